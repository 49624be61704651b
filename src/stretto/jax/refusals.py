"""Refuse transformations within which gradients can't be reduced, as JAX traces."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import jax

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_REASONS = {
    "BatchTracer": (
        "jax.vmap over a reduction isn't provided: each rank reduces once per step. "
        "Put vmap inside of the function that is differentiated."
    ),
    "JVPTracer": (
        "differentiating through a reduction isn't provided. Differentiate first, "
        "then reduce: stretto.jax.value_and_grad must be the outermost transformation."
    ),
}
_REASONS["LinearizeTracer"] = _REASONS["JVPTracer"]

_local = threading.local()


def refuse_transformed(what: str, leaves: Sequence[Any]) -> None:
    """Raise if arrays belong to a transformation that can't contain a reduction.

    Raises:
        SpecError: they do.
    """
    for leaf in leaves:
        reason = _REASONS.get(type(leaf).__name__)
        if reason is not None:
            raise SpecError(f"{what}: {reason}")
    names = _axis_names()
    if names:
        raise SpecError(
            f"{what} within pmap, shard_map or vmap over the axes {names} isn't "
            "provided: XLA owns the communication there. Run one process per device "
            "with a plain jax.jit."
        )


def _axis_names() -> list[str]:
    from jax._src import core  # JAX has no public function for it

    found = getattr(core, "get_axis_env", None)
    return [str(name) for name in found().axis_names()] if found else []


@contextlib.contextmanager
def no_other(what: str) -> Iterator[None]:
    """Refuse reductions of gradients that begin within this one's function.

    Raises:
        SpecError: this one began within another's.
    """
    refuse_nested(what)
    _local.outer = what
    try:
        yield
    finally:
        _local.outer = None


def refuse_skipped() -> None:
    """Raise if an optimizer may skip, on this rank alone, what is being traced.

    Raises:
        SpecError: optax's apply_if_finite is around it, or MultiSteps that skips.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_qualname
        if name.startswith("apply_if_finite.<locals>"):
            raise SpecError(
                "distributed within optax.apply_if_finite waits for ranks whose "
                "gradients were not finite, which skip the step. Put it outside: "
                "stretto.jax.distributed(optax.apply_if_finite(tx, n))"
            )
        if name == "MultiSteps.update" and _skips(frame.f_locals.get("self")):
            raise SpecError(
                "distributed within optax.MultiSteps with should_skip_update_fn waits "
                "for ranks that skip the step by their own gradients. Put it outside: "
                "stretto.jax.distributed(optax.MultiSteps(tx, n, "
                "should_skip_update_fn=...).gradient_transformation())"
            )
        frame = frame.f_back


def _skips(steps: Any) -> bool:
    """Return whether a ``MultiSteps`` was given a function that skips steps."""
    function = getattr(steps, "_should_skip_update_fn", None)
    name = getattr(function, "__qualname__", "MultiSteps.")
    return not name.startswith("MultiSteps.")


def refuse_nested(what: str) -> None:
    """Raise if another reduction's function is being differentiated.

    Raises:
        SpecError: it is.
    """
    outer = getattr(_local, "outer", None)
    if outer is not None:
        raise SpecError(
            f"{what} within the function that {outer} differentiates isn't provided: "
            "reduce gradients of one function at a time"
        )


def is_float0(leaf: Any) -> bool:
    """Return whether a leaf is the gradient of an integer: it holds no values."""
    return bool(getattr(leaf, "dtype", None) == jax.dtypes.float0)
