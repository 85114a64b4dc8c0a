"""Law models without structure: dense layers, and the metrics that go with each kind of target."""

import keras
from keras import layers

from .registry import Built, binary, classes, images, law_model, sgd, tabular


@law_model()
def dense() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]})


@law_model()
def regression_metrics() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(2)])
    return Built(
        model,
        tabular(targets=2),
        lambda: {
            "optimizer": sgd(0.05, momentum=0.9),
            "loss": keras.losses.Huber(),
            "metrics": [
                keras.metrics.RootMeanSquaredError(name="rmse"),
                keras.metrics.R2Score(name="r2"),
                keras.metrics.CosineSimilarity(name="cosine"),
            ],
            "weighted_metrics": [keras.metrics.MeanAbsoluteError(name="weighted_mae")],
        },
    )


@law_model(weights_kinds=("none", "rows", "class"), num_classes=3)
def classifier() -> Built:
    model = keras.Sequential(
        [layers.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(3, activation="softmax")]
    )
    return Built(
        model,
        classes(),
        lambda: {
            "optimizer": sgd(),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
            "weighted_metrics": [keras.metrics.SparseCategoricalAccuracy(name="weighted_accuracy")],
        },
    )


@law_model(weights_kinds=("none", "rows", "class"), num_classes=2)
def binary_metrics() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1, activation="sigmoid")])
    metrics = keras.metrics
    return Built(
        model,
        binary(),
        lambda: {
            "optimizer": sgd(),
            "loss": keras.losses.BinaryCrossentropy(label_smoothing=0.1),
            "metrics": [
                "accuracy",
                metrics.AUC(name="auc"),
                metrics.Precision(name="precision"),
                metrics.Recall(name="recall"),
                metrics.TruePositives(name="tp"),
                metrics.FalseNegatives(name="fn"),
            ],
            "weighted_metrics": [metrics.AUC(name="weighted_auc", curve="PR")],
        },
    )


@law_model()
def one_hot_metrics() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="softmax")])
    draw = classes()

    def data(rows, rng):
        x, y = draw(rows, rng)
        return x, keras.utils.to_categorical(y, 3)

    metrics = keras.metrics
    return Built(
        model,
        data,
        lambda: {
            "optimizer": sgd(),
            "loss": "categorical_crossentropy",
            "metrics": [
                metrics.F1Score(average="macro", name="f1"),
                metrics.OneHotMeanIoU(num_classes=3, name="iou"),
                metrics.CategoricalAccuracy(name="accuracy"),
            ],
        },
    )


@law_model(weights_kinds=("none", "rows", "class"), num_classes=3)
def conv() -> Built:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    return Built(model, images(), _image_compile)


@law_model()
def separable_conv() -> Built:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 2)),
            layers.SeparableConv2D(4, 3, activation="relu"),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    return Built(model, images(channels=2), _image_compile)


@law_model(atol=1e-5)  # E[x^2] - E[x]^2 cancels: the variance carries a few more units of rounding
def conv_sync_bn() -> Built:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(momentum=0.9, synchronized=True),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    return Built(model, images(), _image_compile)


@law_model(max_towers=1)  # a tower's own batch statistics are not the whole batch's
def conv_bn() -> Built:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    return Built(model, images(), _image_compile)


@law_model()
def frozen_bn() -> Built:
    """A frozen batch normalisation uses its moving statistics: exact on any number of towers."""
    norm = layers.BatchNormalization()
    norm.trainable = False
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3), norm, layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model()
def dropout_zero() -> Built:
    model = keras.Sequential(
        [layers.Input((4,)), layers.Dense(3, activation="elu"), layers.Dropout(0.0), layers.Dense(1)]
    )
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mae"})


@law_model(max_towers=1)  # each tower draws a mask of its own
def dropout() -> Built:
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(6, activation="elu"),
            layers.Dropout(0.5),
            layers.GaussianNoise(0.1),
            layers.Dense(1),
        ]
    )
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


def _image_compile():
    return {
        "optimizer": sgd(),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
