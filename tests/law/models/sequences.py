"""Law models over sequences: masks, recurrent layers, attention, embeddings."""

import keras
from keras import layers, ops

from .registry import Built, law_model, padded_ids, sgd

STEPS = 3


@law_model()
def embedding_lstm() -> Built:
    model = keras.Sequential(
        [
            layers.Input((STEPS,), dtype="int32"),
            layers.Embedding(11, 4, mask_zero=True),
            layers.LSTM(3, unroll=True),
            layers.Dense(1, activation="sigmoid"),
        ]
    )

    def data(rows, rng):
        ids = padded_ids(rows, rng, steps=STEPS, vocabulary=11)
        return ids, (ids[:, :1] > 5).astype("float32")

    return Built(
        model,
        data,
        lambda: {"optimizer": sgd(0.5), "loss": "binary_crossentropy", "metrics": ["accuracy"]},
    )


# Keras refuses one weight a row beside a mask of one entry a step.
# TimeDistributed with a mask fails in a graph of Keras 3.6.
@law_model(weights_kinds=("none", "steps"), steps=STEPS, since_keras=(3, 7))
def masked_sequence() -> Built:
    """One target a time step; the mask reaches the loss and the metrics."""
    model = keras.Sequential(
        [
            layers.Input((STEPS,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.GRU(3, return_sequences=True),
            layers.TimeDistributed(layers.Dense(3, activation="softmax")),
        ]
    )

    def data(rows, rng):
        ids = padded_ids(rows, rng, steps=STEPS, vocabulary=9)
        return ids, (ids % 3).astype("int32")

    return Built(
        model,
        data,
        lambda: {
            "optimizer": sgd(0.5),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "weighted_metrics": [keras.metrics.SparseCategoricalAccuracy(name="weighted_accuracy")],
        },
    )


# Keras refuses one weight a row beside a mask of one entry a step.
@law_model(weights_kinds=("none", "steps"), steps=STEPS)
def masked_steps() -> Built:
    """As masked_sequence without a recurrent layer: the quick one for many combinations."""
    model = keras.Sequential(
        [
            layers.Input((STEPS,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.Dense(3, activation="softmax"),
        ]
    )

    def data(rows, rng):
        ids = padded_ids(rows, rng, steps=STEPS, vocabulary=9)
        return ids, (ids % 3).astype("int32")

    return Built(
        model,
        data,
        lambda: {
            "optimizer": sgd(0.5),
            "loss": "sparse_categorical_crossentropy",
            "weighted_metrics": ["accuracy"],
        },
    )


# Keras refuses one weight a row beside a mask of one entry a step.
@law_model(weights_kinds=("none", "steps"), steps=STEPS)
def masked_floats() -> Built:
    """A Masking layer over padded floats, and a loss that sums over the valid steps."""
    model = keras.Sequential(
        [
            layers.Input((STEPS, 2)),
            layers.Masking(0.0),
            layers.SimpleRNN(3, return_sequences=True, unroll=True),
            layers.Dense(1),
        ]
    )

    def data(rows, rng):
        x = rng.normal(size=(rows, STEPS, 2)).astype("float32")
        x *= (padded_ids(rows, rng, steps=STEPS, vocabulary=3) > 0)[:, :, None]
        return x, x.sum(axis=-1, keepdims=True)

    return Built(model, data, lambda: {"optimizer": sgd(0.1), "loss": "mse", "metrics": ["mae"]})


@law_model()
def bidirectional() -> Built:
    model = keras.Sequential(
        [layers.Input((STEPS, 2)), layers.Bidirectional(layers.SimpleRNN(2, unroll=True)), layers.Dense(1)]
    )

    def data(rows, rng):
        x = rng.normal(size=(rows, STEPS, 2)).astype("float32")
        return x, x.mean(axis=(1, 2))[:, None]

    return Built(model, data, lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model()
def attention() -> Built:
    inputs = layers.Input((STEPS, 4))
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=2)(inputs, inputs)
    hidden = layers.LayerNormalization()(layers.Add()([inputs, attended]))
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(hidden))

    def data(rows, rng):
        x = rng.normal(size=(rows, STEPS, 4)).astype("float32")
        return x, (x[:, 0, 0] > 0).astype("int32")

    return Built(
        keras.Model(inputs, outputs),
        data,
        lambda: {
            "optimizer": sgd(),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
        },
    )


@law_model()
def sparse_embedding() -> Built:
    """A large vocabulary whose few used rows repeat: gradients travel as slices, duplicates add."""
    vocabulary = 3000
    model = keras.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(vocabulary, 3),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )

    def data(rows, rng):
        ids = rng.choice([0, 1, 7, 7, vocabulary - 1], size=(rows, 6)).astype("int32")
        return ids, (ids == 7).mean(axis=1, keepdims=True).astype("float32")

    return Built(
        model,
        data,
        lambda: {
            "optimizer": sgd(0.5, momentum=0.9, nesterov=True),
            "loss": "mse",
        },
    )


@keras.saving.register_keras_serializable("law")
class TiedEmbedding(layers.Layer):
    """One table that embeds the ids and scores the next id: its gradient is slices plus dense."""

    def __init__(self, vocabulary, units, **kwargs):
        super().__init__(**kwargs)
        self.vocabulary, self.units = vocabulary, units

    def build(self, input_shape):
        self.table = self.add_weight(shape=(self.vocabulary, self.units), name="table")

    def call(self, ids):
        hidden = ops.tanh(ops.take(self.table, ids, axis=0))
        return ops.matmul(hidden, ops.transpose(self.table))

    def get_config(self):
        return {**super().get_config(), "vocabulary": self.vocabulary, "units": self.units}


@law_model(weights_kinds=("none", "steps"), steps=STEPS)
def tied_embedding() -> Built:
    inputs = layers.Input((STEPS,), dtype="int32")
    outputs = TiedEmbedding(20, 4)(inputs)

    def data(rows, rng):
        ids = rng.integers(20, size=(rows, STEPS)).astype("int32")
        return ids, (ids + 1) % 20

    return Built(
        keras.Model(inputs, outputs),
        data,
        lambda: {
            "optimizer": sgd(0.5, momentum=0.9),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
    )
