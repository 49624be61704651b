"""Refuse operations that depend on a sample's position in the batch.

# Note [Positions of samples]
A tensor made only from the number of samples, such as ``arange(batch)``, is made on
each rank for its own samples. That is correct if all its rows are equal, and for the
positions themselves, which count rows from zero on every rank: as an index, in the
layer in which they are made. A computation checks the effect of such an index. Anything
else, such as ``arange(batch) >= 6``, means certain samples of the global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from stretto.burst.tracing.comparing import BATCHES, follows
from stretto.burst.tracing.trial import ConstantDraws
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_EQUAL, _POSITIONS, _OTHER = "equal", "positions", "other"

_INDEXING = {
    "__getitem__",
    "gather",
    "getitem",
    "index_add",
    "index_copy",
    "index_put",
    "index_put_",
    "index_select",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "set_item",
    "take",
    "take_along_dim",
}
"""Operations that return no positions, unless they are given them to be indexed."""

_MAX_NUMBERS = 1 << 22
_ROUNDINGS = 32
_FEWEST, _MAX = 8, 4099
"""Samples for which such a tensor is computed; limits its size."""


def source_line_of(node: fx.Node) -> str:
    """Return the place of an operation in the user's code, as ``file:line``."""
    found = node.meta.get("place")
    return str(found) if found else f"operation {node.name!r}"


def depends_on_position(node: fx.Node) -> SpecError:
    """Return the error of an operation that depends on certain samples of a batch."""
    way = "Treat all samples the same"
    if is_embedding_bag(node):
        way = (
            "Give an embedding bag one row of indices for each sample and no offsets, "
            "with padding_idx for those that have fewer"
        )
    return SpecError(
        f"{source_line_of(node)}: {node.name!r} depends on a sample's place in the "
        f"batch, and samples have other places on each rank. {way}"
    )


def is_embedding_bag(node: fx.Node) -> bool:
    """Return whether an operation is an embedding bag."""
    if node.op != "call_module":
        return node.target is functional.embedding_bag
    root = node.graph.owning_module
    return root is not None and isinstance(
        root.get_submodule(str(node.target)), nn.EmbeddingBag
    )


def _offsets_of(bag: fx.Node) -> Any:
    """Return the argument of an embedding bag that says where each bag begins."""
    at = 1 if bag.op == "call_module" else 2
    return bag.kwargs.get("offsets", bag.args[at] if len(bag.args) > at else None)


def sample_positions_in(
    root: fx.GraphModule,
    ops: Iterable[fx.Node],
    shapes: Mapping[fx.Node, tuple[Any, Any]],
    counts: Mapping[fx.Node, int],
) -> set[fx.Node]:
    """Return those of ``ops`` whose rows are positions, for an index that reads them.

    A tensor that follows the batch and not the samples must have equal rows, or be
    positions.

    Args:
        root: holds all operations.
        ops: those computed from the input.
        shapes: results' shapes for each of `BATCHES`.
        counts: nodes that are a number of samples, with its value for one.

    Raises:
        SpecError: naming the line of a tensor that violates this.
    """
    known = set(ops)
    seen: set[fx.Node] = set()
    positions: set[fx.Node] = set()
    for op in ops:
        if is_embedding_bag(op) and _offsets_of(op) in known:
            raise depends_on_position(op)
        for node in op.all_input_nodes:
            if node in known or node in seen or node not in shapes:
                continue
            seen.add(node)
            one, two = shapes[node]
            sides = [
                (i, v // BATCHES[0])
                for i, (v, w) in enumerate(zip(one.shape, two.shape, strict=True))
                if follows(v, w)
            ]
            if not sides:
                continue
            for_one = max(1, one.numel() // BATCHES[0])
            count = min(_MAX, max(_FEWEST, _MAX_NUMBERS // for_one))
            value = value_of(root, node, counts, count)
            if value is None:
                continue  # the layers' check reports it
            kinds = {_kind_of(value, i, count, each) for i, each in sides}
            if _OTHER in kinds:
                raise depends_on_position(node)
            if kinds != {_EQUAL}:
                positions.add(node)
    found: set[fx.Node] = set()
    for op in ops:
        is_index = str(getattr(op.target, "__name__", op.target)) in _INDEXING
        if is_index and op.args[:1] and op.args[0] not in positions | found:
            continue
        if any(node in positions or node in found for node in op.all_input_nodes):
            found.add(op)
    return found


def nodes_before(node: fx.Node) -> set[fx.Node]:
    """Return a node and all nodes from which it is computed."""
    found, work = {node}, [node]
    while work:
        for before in work.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                work.append(before)
    return found


def value_of(
    root: fx.GraphModule, node: fx.Node, counts: Mapping[fx.Node, int], count: int
) -> Tensor | None:
    """Return the result of a fixed operation for a number of samples."""
    before = nodes_before(node)
    nodes = [n for n in root.graph.nodes if n in before]
    run = fx.Interpreter(root)
    try:
        with (
            torch.no_grad(),
            ConstantDraws(),
        ):  # values of torch.empty() are not positions
            for n in nodes:
                if n in counts:
                    run.env[n] = counts[n] * count
                elif n.op != "placeholder":
                    run.env[n] = run.run_node(n)
    except Exception:  # noqa: BLE001 - such as too few rows of a table
        return None
    value = run.env[node]
    return value if isinstance(value, Tensor) else None


def _kind_of(value: Tensor, side: int, count: int, each: int) -> str:
    """Return how rows differ along a side that follows the batch."""
    if value.shape[side] != count * each:
        return _OTHER
    flat = value.movedim(side, 0).reshape(count * each, -1)
    ways = [flat.reshape(count, -1)]
    if each > 1:  # the samples are the inner part
        ways.append(flat.reshape(each, count, -1).transpose(0, 1).reshape(count, -1))
    kinds = {_kind_of_rows(rows) for rows in ways}
    return next(kind for kind in (_EQUAL, _POSITIONS, _OTHER) if kind in kinds)


def _kind_of_rows(rows: Tensor) -> str:
    same = (rows == rows[:1]) | ((rows != rows) & (rows[:1] != rows[:1]))
    if rows.is_floating_point() and rows.numel():
        # A product rounds equal rows in different ways.
        largest = torch.where(rows.isfinite(), rows, 0).abs().max()
        limit = _ROUNDINGS * torch.finfo(rows.dtype).eps * largest
        same |= (rows - rows[:1]).abs() <= limit
    if bool(same.all()):
        return _EQUAL
    if rows.dtype == torch.bool or rows.is_complex():
        return _OTHER
    steps = rows[1:] - rows[:-1]
    return _POSITIONS if torch.allclose(steps, steps[:1].expand_as(steps)) else _OTHER
