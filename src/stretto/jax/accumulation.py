"""Optimizers that apply the mean gradient of several steps at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    import optax


class EveryState(NamedTuple):
    """The state of `applied_every`, a tree of arrays."""

    steps: jax.Array
    """Number of steps in the mean."""

    mean: Any
    """The mean of this rank's gradients, at least in float32."""

    inner: Any


def applied_every(
    tx: optax.GradientTransformationExtraArgs, every: int
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose steps update nothing, but once in ``every``.

    The other steps don't run ``tx``, which may communicate: ``optax.MultiSteps`` runs
    it in each step and drops what it returns.
    """
    import optax

    def init(params: Any) -> EveryState:
        mean = jax.tree_util.tree_map(_no_gradients, params)
        return EveryState(jnp.zeros((), jnp.int32), mean, tx.init(params))

    def update(
        updates: Any, state: EveryState, params: Any = None, **extra: Any
    ) -> tuple[Any, EveryState]:
        mean = jax.tree_util.tree_map(
            lambda m, g: (m + (g - m) / (state.steps + 1)).astype(m.dtype),
            state.mean,
            updates,
        )

        def apply() -> tuple[Any, EveryState]:
            given = jax.tree_util.tree_map(
                lambda m, g: m.astype(jnp.result_type(g)), mean, updates
            )
            found, inner = tx.update(given, state.inner, params, **extra)
            inner = jax.tree_util.tree_map(_cast_like, inner, state.inner)
            zeros = jax.tree_util.tree_map(jnp.zeros_like, mean)
            return found, EveryState(jnp.zeros_like(state.steps), zeros, inner)

        def keep() -> tuple[Any, EveryState]:
            shapes, _ = jax.eval_shape(apply)
            zeros = jax.tree_util.tree_map(
                lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes
            )
            return zeros, EveryState(state.steps + 1, mean, state.inner)

        is_last = state.steps == every - 1
        if isinstance(is_last, jax.core.Tracer):
            return jax.lax.cond(is_last, apply, keep)  # type: ignore[no-any-return]
        return apply() if is_last else keep()

    return optax.GradientTransformationExtraArgs(init, update)


def _no_gradients(parameter: Any) -> jax.Array:
    dtype = jnp.promote_types(jnp.result_type(parameter), jnp.float32)
    return jnp.zeros(jnp.shape(parameter), dtype)


def _cast_like(new: Any, old: Any) -> Any:
    new, old = jnp.asarray(new), jnp.asarray(old)
    return new if new.dtype == old.dtype else new.astype(old.dtype)
