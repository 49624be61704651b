"""Gradients averaged over ranks, sent while backward computes the next ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stretto.errors import SpecError
from stretto.horovod.reduce_ops import ENGINE_OPS, Average, ReduceOp, Sum
from stretto.jax import callbacks, ranks
from stretto.jax.accumulation import applied_every
from stretto.jax.refusals import (
    is_float0,
    no_other,
    refuse_nested,
    refuse_skipped,
    refuse_transformed,
)
from stretto.jax.tags import ScannedParameters, flag_tag, plan_of, whole_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import optax


def _require_op(op: ReduceOp) -> None:
    if op not in ENGINE_OPS:
        raise SpecError(
            f"op must be one of {', '.join(o.name for o in ENGINE_OPS)}, got {op!r}"
        )


def allreduce_gradients(grads: Any, *, op: ReduceOp = Average) -> Any:
    """Return gradients reduced over ranks, in or outside of `jax.jit`.

    All ranks must call it equally often, with trees of equal paths, shapes and dtypes.
    Each gradient leaves when it is ready, so within a jitted step communication runs
    beside backward.

    Args:
        grads: A tree of arrays. Gradients of integers (float0) are returned as given.
        op: The reduction.

    Raises:
        SpecError: `init` was not called, a dtype can't be sent, or the call is within
            vmap, pmap, shard_map or a differentiated function.
    """
    _require_op(op)
    what = "allreduce_gradients"
    if ranks.size() == 1:
        return grads
    refuse_nested(what)
    found, tree = jax.tree_util.tree_flatten_with_path(grads)
    leaves = [leaf for _, leaf in found]
    sent = [i for i, leaf in enumerate(leaves) if not is_float0(leaf)]
    refuse_transformed(what, leaves)
    arrays = [jnp.asarray(leaves[i]) for i in sent]
    if not arrays:
        return grads
    plan = plan_of([found[i][0] for i in sent], arrays, ENGINE_OPS[op])
    ticket = callbacks.begin(plan.what)
    # Backward computes the gradients of the last parameters first.
    tokens = [
        callbacks.submit(ticket, i, arrays[i]) for i in reversed(range(len(arrays)))
    ]
    total = sum(tokens, callbacks.token())
    reduced = callbacks.finish(ticket, total, plan.results(arrays))
    for i, value in zip(sent, reduced, strict=True):
        leaves[i] = value
    return jax.tree_util.tree_unflatten(tree, leaves)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - as in jax.value_and_grad
    *,
    op: ReduceOp = Average,
    scanned: Callable[[Any], Any] | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad` of a function, with gradients reduced over ranks.

    Each gradient is sent within backward. The value, and auxiliary results, stay this
    rank's own. All ranks must call the result equally often, from one thread.

    Args:
        fun: The function of this rank's samples; it returns a scalar, or with
            ``has_aux`` a scalar and something else.
        argnums: The arguments to differentiate, as in JAX.
        has_aux: Whether ``fun`` returns a pair.
        op: The reduction.
        scanned: Returns the part of the first of these arguments that a
            ``jax.lax.scan`` goes through, a tree of stacked parameters. Their gradients
            are sent layer by layer; the scan's body must call `in_backward`, and
            nothing else may use these parameters.

    Raises:
        SpecError: when called: `init` was not called, a dtype can't be sent, or the
            call is within vmap, pmap, shard_map or a differentiated function. With
            ``scanned``, ``op`` is neither Average nor Sum.
    """
    _require_op(op)
    if scanned is not None and op not in (Average, Sum):
        raise SpecError(f"scanned= needs op=Average or op=Sum, got {op!r}")

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        local: Callable[..., tuple[Any, Any]]
        local = jax.value_and_grad(fun, argnums, has_aux)
        if ranks.size() == 1:
            return local(*args, **kwargs)
        numbers = tuple(n % len(args) for n in numbers if -len(args) <= n < len(args))
        chosen = {n: args[n] for n in numbers}
        found, tree = jax.tree_util.tree_flatten_with_path(chosen)
        leaves = [leaf for _, leaf in found]
        refuse_transformed("value_and_grad", leaves)
        floats = all(jnp.issubdtype(jnp.result_type(x), np.inexact) for x in leaves)
        if not leaves or not floats:
            return local(*args, **kwargs)  # which explains what is wrong
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        places = jax.tree_util.tree_unflatten(tree, map(_Place, range(len(leaves))))
        stacks = _stacks(scanned, places[numbers[0]])
        plan = plan_of([path for path, _ in found], leaves, ENGINE_OPS[op], stacks)
        sent: list[int] = []

        def tagged(values: list[Any], ticket: Any) -> Any:
            values = [
                flag_tag(plan.flags[i], sent)(value, ticket)
                if i in plan.flags
                else whole_tag(plan.first[i], sent)(value, ticket)
                for i, value in enumerate(values)
            ]
            put = jax.tree_util.tree_unflatten(tree, values)
            if scanned is not None:
                part = scanned(put[numbers[0]])
                layers = ScannedParameters.of(
                    part, ticket, [plan.first[i] for i in stacks]
                )
                put[numbers[0]] = jax.tree_util.tree_map(
                    lambda node: layers if node is part else node,
                    put[numbers[0]],
                    is_leaf=lambda node: node is part,
                )
            return fun(*(put.get(n, arg) for n, arg in enumerate(args)), **kwargs)

        with no_other("value_and_grad"):
            ticket = callbacks.begin(plan.what)
            result, (grads, tokens) = jax.value_and_grad(tagged, (0, 1), has_aux)(
                leaves, ticket
            )
        for i, gradient in enumerate(grads):
            row = plan.flags.get(i, plan.first[i])
            if row not in sent:
                zero = jnp.float32(0) if i in plan.flags else gradient
                tokens += callbacks.submit(ticket, row, zero)
        grads = jax.tree_util.tree_unflatten(
            tree, callbacks.finish(ticket, tokens, plan.results(leaves))
        )
        given = tuple(grads[n] for n in numbers)
        return result, given[0] if isinstance(argnums, int) else given

    return reduced


@dataclass(frozen=True, slots=True)
class _Place:
    """Takes a leaf's place: parameters that share an array are different leaves."""

    number: int


def _stacks(scanned: Callable[[Any], Any] | None, places: Any) -> list[int]:
    """Return which of the leaves are stacked, in the order of their tree."""
    if scanned is None:
        return []
    try:
        part = jax.tree_util.tree_leaves(scanned(places))
    except (TypeError, AttributeError):  # it computes with leaves
        part = []
    if not part or not all(isinstance(leaf, _Place) for leaf in part):
        raise SpecError(
            "scanned= must return a part of the first differentiated argument itself, "
            "for instance lambda params: params['layers']"
        )
    return [place.number for place in part]


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - as in jax.grad
    *,
    op: ReduceOp = Average,
    scanned: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Return `jax.grad` of a function, with gradients reduced over ranks.

    See `value_and_grad`. With ``has_aux`` it returns gradients and the auxiliary
    result.
    """
    both = value_and_grad(fun, argnums, has_aux, op=op, scanned=scanned)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return reduced


def distributed(
    tx: optax.GradientTransformation, *, op: ReduceOp = Average, every: int = 1
) -> optax.GradientTransformation:
    """Return an optax transformation that reduces gradients over ranks first.

    Do not combine it with `value_and_grad` of this package, which reduces already.

    Args:
        tx: The optimizer.
        op: The reduction.
        every: Number of steps whose mean gradient is reduced and applied at once; the
            other steps update nothing and send nothing.

    Raises:
        SpecError: ``every`` is below 1; in an update, ``optax.apply_if_finite``, or
            ``optax.MultiSteps`` with a function that skips steps, is around it.
    """
    import optax

    _require_op(op)
    if every < 1:
        raise SpecError(f"every must be >= 1, got {every}")
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        refuse_skipped()
        reduced = allreduce_gradients(updates, op=op)
        return inner.update(reduced, state, params, **extra)

    found = optax.GradientTransformationExtraArgs(inner.init, update)
    return found if every == 1 else applied_every(found, every)
