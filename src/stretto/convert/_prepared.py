"""Find whether a forward of a wrapped model prepares each ``backward``.

DistributedDataParallel exchanges a parameter's whole gradient when backward has it,
whatever the loss went through, if the wrapper was called since the last backward. So a
method of the module may compute a part of a loss beside the wrapper's forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._tree import found

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_CUTTING = ("detach", "item", "data", "numpy", "tolist", "argmax")


def is_cut(work: Work, call: cst.Call) -> bool:
    """Return whether no gradient flows out of a call, as of ``net.draw().detach()``."""
    node: cst.CSTNode = call
    above = work.tree.parent(node)
    while isinstance(above, cst.Attribute | cst.Subscript) or (
        isinstance(above, cst.Call) and above.func is node
    ):
        if isinstance(above, cst.Attribute) and above.attr.value in _CUTTING:
            return True
        node, above = above, work.tree.parent(above)
    return False


def every_backward(work: Work, forwards: list[cst.Call]) -> bool:
    """Return whether each backward follows a forward, and no other backward since."""
    tree, backwards = work.tree, work.job.backwards
    for backward in backwards:
        others = [
            tree.line(other)
            for other in backwards
            if other is not backward
            and tree.function(other) is tree.function(backward)
            and tree.line(other) <= tree.line(backward)
        ]
        if not _follows(work, backward, forwards, max(others, default=0)):
            return False
    return bool(backwards)


def _follows(
    work: Work, backward: cst.Call, forwards: list[cst.Call], since: int
) -> bool:
    """Return whether a forward after a line runs before a backward, in its pass."""
    tree = work.tree
    inner: cst.CSTNode = backward
    for above in tree.ancestors(backward):
        if isinstance(above, cst.IndentedBlock | cst.SimpleStatementSuite | cst.Module):
            for line in above.body:
                if line is inner or tree.within(backward, line):
                    break
                if tree.line(line) > since and _always(line, forwards):
                    return True
        if isinstance(above, cst.For | cst.While | cst.FunctionDef):
            return False
        inner = above
    return False


def _always(line: cst.CSTNode, forwards: list[cst.Call]) -> bool:
    """Return whether a statement calls a forward, whichever of its branches is run."""
    if isinstance(line, cst.SimpleStatementLine | cst.SimpleStatementSuite):
        maybe = {
            id(call)
            for part in found(
                line, (cst.Lambda, cst.BaseComp, cst.IfExp, cst.BooleanOperation)
            )
            for call in found(part, cst.Call)
        }
        return any(
            id(call) not in maybe and call in forwards for call in found(line, cst.Call)
        )
    if isinstance(line, cst.With):
        return any(_always(part, forwards) for part in line.body.body)
    if isinstance(line, cst.If):
        other = line.orelse
        branches: list[cst.CSTNode] = [line.body]
        if isinstance(other, cst.Else):
            branches.append(other.body)
        elif isinstance(other, cst.If):
            branches.append(other)
        return len(branches) == 2 and all(
            any(_always(part, forwards) for part in _lines(branch))
            for branch in branches
        )
    return False


def _lines(branch: cst.CSTNode) -> list[cst.CSTNode]:
    if isinstance(branch, cst.IndentedBlock):
        return list(branch.body)
    return [branch]
