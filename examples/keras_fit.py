"""Data-parallel training with Keras's ``fit``, compared with one process.

Two emulated hosts; gradients travel over connections of at most 300 Mbit/s, each while
backward computes the next ones:

    stretto lab run --hosts 2 --link 1gbit --flow 300mbit -- \
        python examples/keras_fit.py

KERAS_BACKEND chooses the backend: tensorflow, jax or torch. At the end rank 0 trains
alone with the whole batch and compares the weights.
"""

from typing import Any

import keras
import numpy as np

import stretto.keras as sk

WIDTH, LAYERS, BATCH, STEPS = 256, 6, 64, 20


def model_of(seed: int, optimizer: Any) -> Any:
    """Return a network of dense layers, compiled."""
    keras.utils.set_random_seed(seed)
    dense = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
    layers = [keras.Input((WIDTH,)), *dense, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, loss="mse")
    return model


def fitted(model: Any, mine: range, callbacks: list[Any]) -> list[Any]:
    """Train with these samples of each batch; return the losses of all steps."""
    chance = np.random.default_rng(0)  # the same batches on all ranks
    x = chance.normal(size=(STEPS, BATCH, WIDTH)).astype("float32")
    y = np.sin(x.sum(2, keepdims=True))
    part = slice(mine.start, mine.stop)
    history = model.fit(
        x[:, part].reshape(-1, WIDTH),
        y[:, part].reshape(-1, 1),
        batch_size=len(mine),
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return list(history.history["loss"])


def optimizer() -> Any:
    """Return a new optimizer."""
    return keras.optimizers.SGD(0.02, momentum=0.9)


if __name__ == "__main__":
    sk.init()
    model = model_of(sk.rank(), sk.DistributedOptimizer(optimizer()))
    callbacks = [sk.BroadcastInitialState(), sk.MetricAverage()]
    loss = fitted(model, sk.shard(BATCH), callbacks)[-1]
    if sk.rank() == 0:
        alone = model_of(0, optimizer())
        fitted(alone, range(BATCH), [])
        ours, theirs = (
            np.concatenate([w.ravel() for w in each.get_weights()])
            for each in (model, alone)
        )
        apart = abs(ours - theirs).max() / abs(theirs).max()
        print(f"{sk.size()} ranks, loss {loss:.4f}, weights differ by {apart:.1e}")  # noqa: T201
    sk.shutdown()
