"""List loops over the samples of a batch that add up losses or gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._loop_sums import added_in
from stretto.convert._tree import dotted, found, stored_names

if TYPE_CHECKING:
    from stretto.convert._classify import AbstractShares
    from stretto.convert._edit import Work


def point_out(work: Work, shares: AbstractShares) -> None:
    """List each loop whose sum is over this rank's samples, as far as can be seen.

    Such a sum is not a mean over the whole batch, which an average of gradients over
    ranks is correct for.
    """
    if work.choices.per_rank_batch:
        return
    batches = {
        name.value
        for loop in work.job.training
        if isinstance(loop.node, cst.For)
        for name in stored_names(loop.node.target)
    }
    taking = {id(loop.node) for loop in work.job.training}
    for node in found(work.tree.module, cst.For):
        if id(node) in taking or work.tree.without_gradient(node):
            continue
        over = _samples(work, node.iter, batches, shares)
        if over is not None and _adds_up(work, node):
            work.undecided(
                node,
                f"whether this loop, which adds up losses or gradients, is over the "
                f"samples of `{over}`: each rank adds up its own, and gradients are "
                "averaged over ranks. If it is, multiply the loss by WORLD_SIZE, or "
                "divide it by the number of samples",
            )


def _samples(
    work: Work, over: cst.BaseExpression, batches: set[str], shares: AbstractShares
) -> str | None:
    """Return the name of a batch that is iterated over in its first dimension."""
    if isinstance(over, cst.Name):
        return over.value if over.value in batches else None
    if not isinstance(over, cst.Call):
        return None
    called = work.tree.called(over)
    for argument in over.args:
        if called in ("zip", "enumerate", "reversed"):
            name = _samples(work, argument.value, batches, shares)
        elif called == "range":
            name = _whose_length(work, argument.value, shares)
        else:
            name = None
        if name is not None:
            return name
    return None


def _whose_length(
    work: Work, node: cst.BaseExpression, shares: AbstractShares
) -> str | None:
    """Return what an expression is the length of, if that is of this rank's samples."""
    on: cst.BaseExpression | None = None
    if isinstance(node, cst.Call) and dotted(node.func) == "len" and node.args:
        on = node.args[0].value
    elif isinstance(node, cst.Call):
        on = work.tree.method_called(node, "size")
        if on is not None and [work.tree.text(a.value) for a in node.args] != ["0"]:
            on = None
    elif isinstance(node, cst.Subscript):
        of = node.value
        if isinstance(of, cst.Attribute) and of.attr.value == "shape":
            first = work.tree.text(node.slice[0].slice) == "0"
            on = of.value if first else None
    if on is None or dotted(on) is None or not shares.is_share(on):
        return None
    return dotted(on)


def _adds_up(work: Work, loop: cst.For) -> bool:
    """Return whether a loop adds to a loss, or calls backward for each sample."""
    graph = work.graph_names
    inside = [c for c in work.job.backwards if work.tree.within(c, loop.body)]
    if any(not _is_divided(work, call) for call in inside):
        return True
    names = {added.name for added in added_in(loop.body)} & graph
    return any(
        names & {n.value for n in found(call, cst.Name)} and not _is_divided(work, call)
        for call in work.job.backwards
    )


def _is_divided(work: Work, call: cst.Call) -> bool:
    """Return whether a loss is divided before its backward."""
    names = {n.value for n in found(call, cst.Name)}
    scope = work.tree.function(call)
    values = [call, *(o.value for n in names for o in work.flow.assigned(n, scope))]
    return any(
        isinstance(part.operator, cst.Divide)
        for value in values
        for part in found(value, cst.BinaryOperation)
    ) or any(
        isinstance(part.operator, cst.DivideAssign) and dotted(part.target) in names
        for part in found(work.tree.module, cst.AugAssign)
    )
