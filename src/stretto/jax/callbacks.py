"""Callbacks that XLA runs inside of a computation.

`begin` and `wait` are ordered effects, `submit` and `take` are not, see Note [Rounds].
The unordered ones read and write XLA's own memory (`buffer_callback`), or with
``STRETTO_JAX_CALLBACKS=io`` copies that JAX makes (`io_callback`), as `buffer_callback`
is an experiment of JAX.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from stretto import variable_names
from stretto.errors import SpecError
from stretto.jax import ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime.reduction_rounds import RoundRows


_SCALAR = jax.ShapeDtypeStruct((), np.float32)
_ZERO = np.float32(0)


def _uses_buffers() -> bool:
    kind = os.environ.get(variable_names.JAX_CALLBACKS, "buffer")
    if kind not in ("buffer", "io"):
        raise SpecError(
            f"{variable_names.JAX_CALLBACKS} must be buffer or io, got {kind!r}"
        )
    return kind == "buffer"


def call(
    function: Callable[..., None],
    results: Sequence[jax.ShapeDtypeStruct],
    *arguments: jax.Array,
) -> list[jax.Array]:
    """Have XLA call ``function(outputs, *inputs)`` once the arguments are ready.

    Both are NumPy arrays; the function fills the outputs. It is called once per
    execution even if the results are unused.
    """
    if _uses_buffers():

        def on_buffers(_context: Any, outputs: Any, *inputs: Any) -> None:
            function([np.asarray(o) for o in outputs], *map(np.asarray, inputs))

        found = buffer_callback(on_buffers, list(results), has_side_effect=True)
        return list(found(*arguments))

    def on_copies(*inputs: Any) -> list[np.ndarray[Any, Any]]:
        outputs = [np.empty(result.shape, result.dtype) for result in results]
        function(outputs, *map(np.asarray, inputs))
        return outputs

    return list(io_callback(on_copies, list(results), *arguments))


def ordered(function: Callable[..., float], *arguments: jax.Array) -> jax.Array:
    """Have XLA call ``function(*numbers)`` in program order; return its number."""

    def on_numbers(*numbers: Any) -> np.float32:
        return np.float32(function(*(float(np.asarray(n)) for n in numbers)))

    found: jax.Array = io_callback(on_numbers, _SCALAR, *arguments, ordered=True)
    return found


def begin(what: RoundRows) -> jax.Array:
    """Begin a round in the computation; return its ticket, a float32 scalar."""
    return ordered(partial(_begin, what))


def _begin(what: RoundRows) -> float:
    return ranks.joined().rounds.begin(what)


def submit(
    ticket: jax.Array, row: int, value: jax.Array, offset: jax.Array | None = None
) -> jax.Array:
    """Send an array of the round when it is ready; return a token, the scalar 0.

    Its row is ``row``, plus ``offset``, which the computation may compute.
    """

    def send(outputs: Any, number: Any, array: Any, more: Any = 0) -> None:
        ranks.joined().rounds.submit(int(number), row + int(more), array)
        outputs[0][...] = _ZERO

    offsets = () if offset is None else (offset,)
    return call(send, [_SCALAR], ticket, value, *offsets)[0]


def finish(
    ticket: jax.Array,
    tokens: jax.Array,
    results: Sequence[tuple[jax.ShapeDtypeStruct, slice]],
) -> list[jax.Array]:
    """End a round whose arrays have all been submitted; return its results.

    ``tokens`` is the sum of the tokens that `submit` returned. ``results`` are shapes,
    each with the rows that it is made of.
    """
    rows = [part for _, part in results]

    def take(outputs: Any, number: Any) -> None:
        ranks.joined().rounds.take(int(number), outputs, rows)

    ended = ordered(_wait, ticket, tokens)
    return call(take, [struct for struct, _ in results], ended)


def _wait(ticket: float, _tokens: float) -> float:
    ranks.joined().rounds.wait(int(ticket))
    return ticket


def token() -> jax.Array:
    """Return the sum of no tokens."""
    return jnp.zeros((), jnp.float32)
