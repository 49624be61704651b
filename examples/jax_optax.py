"""Data-parallel training with JAX and optax, compared with one process.

Two emulated hosts; gradients travel over connections of at most 300 Mbit/s, each within
backward:

    stretto lab run --hosts 2 --link 1gbit --flow 300mbit -- \
        python examples/jax_optax.py

At the end rank 0 trains alone with the whole batch and compares the weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import stretto.jax as sj

WIDTH, LAYERS, BATCH, STEPS = 256, 6, 64, 20

tx = optax.sgd(0.02, momentum=0.9)


def loss(params: Any, x: Any, y: Any) -> Any:
    """Return the mean squared error of a network of dense layers."""
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return ((x @ params["out"] - y) ** 2).mean()


def initial(seed: int) -> Any:
    """Return random parameters."""
    *keys, last = jax.random.split(jax.random.key(seed), LAYERS + 1)
    shape, scale = (WIDTH, WIDTH), WIDTH**-0.5
    layers = [
        {"w": scale * jax.random.normal(key, shape), "b": jnp.zeros(WIDTH)}
        for key in keys
    ]
    return {"layers": layers, "out": scale * jax.random.normal(last, (WIDTH,))}


def train(params: Any, value_and_grad: Any, mine: slice) -> Any:
    """Return the parameters after all steps, and the last loss."""

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    chance = np.random.default_rng(0)  # the same batches on all ranks
    for _ in range(STEPS):
        x = chance.normal(size=(BATCH, WIDTH)).astype("float32")
        y = np.sin(x.sum(1))
        params, state, value = step(params, state, x[mine], y[mine])
    return params, value


if __name__ == "__main__":
    sj.init()
    rows = sj.shard(BATCH)
    start = sj.broadcast(initial(seed=sj.rank()))  # rank 0's on all ranks
    found, value = train(start, sj.value_and_grad, slice(rows.start, rows.stop))
    value = sj.allreduce(value)
    if sj.rank() == 0:
        alone, _ = train(start, jax.value_and_grad, slice(None))
        ours, theirs = (ravel_pytree(tree)[0] for tree in (found, alone))
        apart = float(abs(ours - theirs).max() / abs(theirs).max())
        print(f"{sj.size()} ranks, loss {value:.4f}, weights differ by {apart:.1e}")  # noqa: T201
    sj.shutdown()
