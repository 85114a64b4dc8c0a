"""The StagingArea experiment: train a small model while the next batch already waits on the device.

Each step takes one batch out of the area and puts the following one in; neither waits for the other.
The size of the area is printed before the first put, after it (the pipeline is filled), after each
one-step epoch, and after the area is cleared. Run: python examples/staging_area.py
"""

import keras
import numpy as np
import tensorflow as tf

import mgpu

NUM_EPOCHS = 5
BATCH_SIZE = 32


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH_SIZE, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.MeanSquaredError()

    device = (mgpu.get_available_gpus(1) or ["/CPU:0"])[0]
    spec = (tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    with mgpu.StagingArea(spec, device, name="example") as area:

        @tf.function
        def step(next_batch):
            # Batch k leaves the area and batch k+1 enters it. Neither depends on the other's data, so the
            # copy of batch k+1 to the device runs beside the computation on batch k.
            features, labels = area.get()
            area.put(next_batch)
            with tf.GradientTape() as tape:
                loss = loss_fn(labels, model(features, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)
            return loss

        print(f"{area} of {spec}")
        print(f"size at first: {int(area.size())}")
        area.put((x, y))
        print(f"size after the first put (fill): {int(area.size())}, {area.nbytes()} bytes")
        for epoch in range(NUM_EPOCHS):
            loss = step((tf.constant(x), tf.constant(y)))
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}, size after its get and put: {int(area.size())}")
        area.clear()
        print(f"size after clear: {int(area.size())}")


if __name__ == "__main__":
    main()
