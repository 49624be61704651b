"""Parameters that submit their gradients from within backward.

# Note [Tags]
A tag is an identity with a gradient of its own, which submits a parameter's whole
gradient as soon as backward has it. A token returns as the gradient of the round's
ticket, so JAX adds the tokens of all submissions, and waiting depends on each. A
parameter that the loss doesn't use never gets to its tag; its zeros are submitted after
backward, because other ranks may use it.

Stacked parameters are sliced by a scan, and each layer's slice is tagged within the
scan's body. What comes back to the whole stack is the gradient of any other use. It
must be zero on all ranks: a flag, a row of its own, is reduced with the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stretto.errors import SpecError
from stretto.jax import callbacks
from stretto.runtime.exchange import ArrayRow
from stretto.runtime.reduction_rounds import RoundRows

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stretto.runtime.negotiated import Op


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which rows of a round hold each parameter."""

    what: RoundRows

    first: tuple[int, ...]
    """Each parameter's first row."""

    flags: dict[int, int]
    """The flag's row of each stacked parameter."""

    def results(
        self, leaves: Sequence[Any]
    ) -> list[tuple[jax.ShapeDtypeStruct, slice]]:
        """Return each parameter's gradient, and the rows from which it is stacked."""
        found = []
        for i, leaf in enumerate(leaves):
            rows = len(leaf) if i in self.flags else 1
            struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            found.append((struct, slice(self.first[i], self.first[i] + rows)))
        return found


def plan_of(
    paths: Sequence[Any], leaves: Sequence[Any], op: Op, stacked: Collection[int] = ()
) -> RowPlan:
    """Return the rows for parameters, of which some are stacks of layers.

    Raises:
        SpecError: a dtype can't be sent, or a stack has no dimension of layers.
    """
    rows: list[ArrayRow] = []
    first, flags = [], {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        name = jax.tree_util.keystr(path) or "value"
        first.append(len(rows))
        if i not in stacked:
            rows.append(ArrayRow(name=name, shape=leaf.shape, dtype=leaf.dtype))
            continue
        if not leaf.ndim:
            raise SpecError(f"{name} is a scalar: scanned= needs stacked parameters")
        rows += [
            ArrayRow(name=f"{name}[{k}]", shape=leaf.shape[1:], dtype=leaf.dtype)
            for k in range(len(leaf))
        ]
        flags[i] = len(rows)
        rows.append(
            ArrayRow(name=f"{name} elsewhere", shape=(), dtype=np.dtype(np.float32))
        )
    return RowPlan(
        RoundRows(tuple(rows), op, tuple(flags.values())), tuple(first), flags
    )


def whole_tag(row: int, sent: list[int]) -> Any:
    """Return a tag that submits a gradient as a row, and notes that it does."""

    @jax.custom_vjp
    def tag(value: Any, ticket: Any) -> Any:
        return value

    def backward(ticket: Any, gradient: Any) -> tuple[Any, Any]:
        sent.append(row)
        return gradient, callbacks.submit(ticket, row, gradient)

    tag.defvjp(lambda value, ticket: (value, ticket), backward)
    return tag


def flag_tag(row: int, sent: list[int]) -> Any:
    """Return a tag that submits whether a gradient has a value other than 0."""

    @jax.custom_vjp
    def tag(value: Any, ticket: Any) -> Any:
        return value

    def backward(ticket: Any, gradient: Any) -> tuple[Any, Any]:
        sent.append(row)
        flag = (gradient != 0).any().astype(jnp.float32)
        return gradient, callbacks.submit(ticket, row, flag)

    tag.defvjp(lambda value, ticket: (value, ticket), backward)
    return tag


def _layer_tag(first: int) -> Any:
    @jax.custom_vjp
    def tag(value: Any, ticket: Any, layer: Any) -> Any:
        return value

    def backward(kept: Any, gradient: Any) -> tuple[Any, Any, None]:
        ticket, layer = kept
        token = callbacks.submit(ticket, first, gradient, layer)
        return jnp.zeros_like(gradient), token, None

    tag.defvjp(lambda value, ticket, layer: (value, (ticket, layer)), backward)
    return tag


@jax.tree_util.register_pytree_node_class
class ScannedParameters:
    """Stacked parameters on their way into a scan, or one layer of them."""

    def __init__(self, tree: Any, tickets: Any, layers: Any, first: Any) -> None:
        self._tree = tree
        self._tickets = tickets
        self._layers = layers
        self._first = first

    @classmethod
    def of(cls, tree: Any, ticket: Any, first: Sequence[int]) -> ScannedParameters:
        """Return parameters whose layers' first rows are ``first``.

        Raises:
            SpecError: the parameters have different numbers of layers.
        """
        counts = {len(leaf) for leaf in jax.tree_util.tree_leaves(tree)}
        if len(counts) != 1:
            raise SpecError(
                "scanned= needs parameters of equally many layers, got stacks of "
                f"{', '.join(map(str, sorted(counts)))}"
            )
        (count,) = counts
        tickets = jnp.broadcast_to(ticket, (count,))
        return cls(tree, tickets, jnp.arange(count, dtype=jnp.int32), tuple(first))

    def layer(self) -> Any:
        """Return a layer's parameters, tagged.

        Raises:
            SpecError: these are all layers.
        """
        if jnp.ndim(self._layers):
            raise SpecError(
                "in_backward must be called in the body of a scan over the parameters "
                "that scanned= names"
            )
        leaves, tree = jax.tree_util.tree_flatten(self._tree)
        tagged = [
            _layer_tag(first)(leaf, self._tickets, self._layers)
            for first, leaf in zip(self._first, leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(tree, tagged)

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], Any]:
        """Return children and the rest, for JAX."""
        return (self._tree, self._tickets, self._layers), self._first

    @classmethod
    def tree_unflatten(cls, first: Any, children: Any) -> ScannedParameters:
        """Return the object of these children, for JAX."""
        tree, tickets, layers = children
        return cls(tree, tickets, layers, first)


def in_backward(layer: Any) -> Any:
    """Return a layer's parameters, whose gradients are sent within a scan's backward.

    Call it in the body of ``jax.lax.scan`` over the parameters that ``scanned`` of
    `value_and_grad` names. Other trees, for instance in a function that isn't
    differentiated, are returned as they are.

    Raises:
        SpecError: it is called outside of the scan's body.
    """
    return layer.layer() if isinstance(layer, ScannedParameters) else layer
