"""A training loop of TensorFlow with Horovod's names, compared with one process.

Two emulated hosts; gradients travel over connections of at most 300 Mbit/s, each while
backward computes the next ones:

    stretto lab run --hosts 2 --link 1gbit --flow 300mbit -- \
        python examples/tensorflow_loop.py

At the end rank 0 trains alone with the whole batch and compares the weights.
"""

from typing import Any

import numpy as np
import tensorflow as tf

import stretto.horovod.tensorflow as hvd

WIDTH, LAYERS, BATCH, STEPS = 256, 6, 64, 20


def initial(seed: int) -> list[Any]:
    """Return random variables."""
    chance = np.random.default_rng(seed)
    shapes = [(WIDTH, WIDTH)] * LAYERS + [(WIDTH, 1)]
    return [
        tf.Variable((chance.normal(size=shape) / WIDTH**0.5).astype("float32"))
        for shape in shapes
    ]


def train(variables: list[Any], mine: slice, *, alone: bool) -> Any:
    """Train all steps; return the last loss."""

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = x
            for w in variables[:-1]:
                hidden = tf.tanh(hidden @ w)
            loss = tf.reduce_mean((hidden @ variables[-1] - y) ** 2)
        if not alone:
            tape = hvd.DistributedGradientTape(tape)
        for w, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    chance = np.random.default_rng(0)  # the same batches on all ranks
    for _ in range(STEPS):
        x = chance.normal(size=(BATCH, WIDTH)).astype("float32")
        y = np.sin(x.sum(1, keepdims=True))
        loss = step(x[mine], y[mine])
    return loss


if __name__ == "__main__":
    hvd.init()
    share = BATCH // hvd.size()
    variables = initial(seed=hvd.rank())
    hvd.broadcast_variables(variables, root_rank=0)
    mine = slice(hvd.rank() * share, hvd.rank() * share + share)
    loss = hvd.allreduce(train(variables, mine, alone=False)).numpy()
    if hvd.rank() == 0:
        others = initial(seed=0)
        train(others, slice(None), alone=True)
        ours, theirs = (
            np.concatenate([w.numpy().ravel() for w in each])
            for each in (variables, others)
        )
        apart = abs(ours - theirs).max() / abs(theirs).max()
        print(f"{hvd.size()} ranks, loss {loss:.4f}, weights differ by {apart:.1e}")  # noqa: T201
    hvd.shutdown()
