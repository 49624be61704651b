"""Find the variables through which gradients flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from stretto.convert._job import FoundTraining

_CUTTING = frozenset(["item", "detach", "data", "numpy", "tolist", "shape", "size"])
"""Attributes and methods behind which no gradient flows."""


def graph_names(job: FoundTraining) -> frozenset[str]:
    """Return the variables through which gradients flow to a ``backward``."""
    out: set[str] = set()
    scopes: list[cst.CSTNode] = []
    for call in job.backwards:
        loss = job.differentiated(call)
        if loss is not None:
            out |= _tensor_names(loss)
        scope = job.tree.function(call)
        scopes.append(job.tree.module if scope is None else scope.body)
    grown = -1
    while grown < len(out):
        grown = len(out)
        for body in scopes:
            for assign in found(body, cst.Assign):
                names = {dotted(t.target) for t in assign.targets}
                if names & out:
                    out |= _tensor_names(assign.value)
            for added in found(body, cst.AugAssign):
                if dotted(added.target) in out:
                    out |= _tensor_names(added.value)
            for call in found(body, cst.Call):
                on = job.tree.method_called(call, "append", "extend")
                if on is not None and dotted(on) in out:
                    for given in call.args:
                        out |= _tensor_names(given.value)
    return frozenset(out)


def _tensor_names(node: cst.BaseExpression) -> set[str]:
    """Return the names in an expression that gradients may flow through."""
    out: set[str] = set()
    waiting: list[cst.CSTNode] = [node]
    while waiting:
        here = waiting.pop()
        if isinstance(here, cst.Attribute) and here.attr.value in _CUTTING:
            continue
        if isinstance(here, cst.Call) and dotted(here.func) in ("float", "int", "len"):
            continue
        path = dotted(here)
        if path is not None:
            out.add(path)
        if isinstance(here, cst.Attribute):
            waiting.append(here.value)
        else:
            waiting += here.children
    return out - {"self", "torch", "F", "nn", "math"}
