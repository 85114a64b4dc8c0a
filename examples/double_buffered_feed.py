"""A double-buffered feed as a Keras callback: put and get are decoupled, and `fit` is Keras' own.

The callback puts batch k+1 into the area when batch k begins, while the train function takes batch k out of
it. The dataset that `fit` iterates over yields only the number of the step. Every row is trained once
per epoch, in order, also those of the smaller last batch. Run: python examples/double_buffered_feed.py
"""

import keras
import numpy as np
import tensorflow as tf

import mgpu

NUM_ROWS, BATCH_SIZE, NUM_EPOCHS = 10, 3, 2
NUM_STEPS = -(-NUM_ROWS // BATCH_SIZE)


class StagedModel(keras.Model):
    """A model whose train step takes its batch from a StagingArea."""

    area: mgpu.StagingArea
    last_rows: tf.Variable

    def train_step(self, data):
        # `data` is the number of the step; what is trained on comes from the area, which is filled by now.
        x, y, row = self.area.get_now()
        self.last_rows.assign(row)
        return super().train_step((x, y))


class DoubleBufferedFeed(keras.callbacks.Callback):
    """Keep the next batch in the area: one in use, one waiting."""

    def __init__(self, area, x, y):
        super().__init__()
        self.area, self.x, self.y = area, x, y
        self.trained_rows = []

    def put(self, step):
        if step < NUM_STEPS:  # nothing follows the last batch: the area drains
            rows = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
            self.area.put((self.x[rows], self.y[rows], np.arange(NUM_ROWS)[rows]))

    def on_epoch_begin(self, epoch, logs=None):
        self.trained_rows = []
        print(f"epoch {epoch + 1}: size at first: {int(self.area.size())}")
        self.put(0)
        print(f"  filled, size: {int(self.area.size())}")

    def on_train_batch_begin(self, batch, logs=None):
        self.put(batch + 1)
        self.size_before = int(self.area.size())

    def on_train_batch_end(self, batch, logs=None):
        rows = self.model.last_rows.numpy().tolist()
        self.trained_rows += rows
        print(f"  step {batch}: rows {rows}, size before {self.size_before}, after {int(self.area.size())}")

    def on_epoch_end(self, epoch, logs=None):
        print(f"  rows trained: {self.trained_rows}, loss {logs['loss']:.4f}")


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    model = StagedModel(inputs, keras.layers.Dense(1)(inputs))
    # XLA cannot compile the get, so the train function must stay a plain tf.function.
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)

    device = (mgpu.get_available_gpus(1) or ["/CPU:0"])[0]
    spec = (
        tf.TensorSpec([None, 4], tf.float32),
        tf.TensorSpec([None, 1], tf.float32),
        tf.TensorSpec([None], tf.int64),
    )
    with mgpu.StagingArea(spec, device, depth=2, name="feed") as area:
        model.area = area
        model.last_rows = tf.Variable([0], shape=[None], dtype=tf.int64, trainable=False)
        steps = tf.data.Dataset.range(NUM_STEPS)
        model.fit(steps, epochs=NUM_EPOCHS, verbose=0, callbacks=[DoubleBufferedFeed(area, x, y)])
        print(f"size at the end: {int(area.size())}")


if __name__ == "__main__":
    main()
