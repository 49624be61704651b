"""Find the number of dimensions of a batch in a script's text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import Rows
from stretto.convert._tree import found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._proof.script_run import Frame, Run


def learn_rank(run: Run, node: cst.BaseExpression, count: int, frame: Frame) -> None:
    """Take from ``b, t, c = x.shape`` that ``x`` has three dimensions."""
    name, on = _sized(run, node, frame)
    if on is not None and on.ndim is None and not run.written:
        run.assign(name, replace(on, ndim=count, thin=False), frame)


def learn_least_rank(run: Run, node: cst.CSTNode, frame: Frame) -> None:
    """Take from ``x.size(1)`` that ``x`` has at least two dimensions."""
    known = run.sizes.get(id(node))
    if known is None:
        known = run.sizes[id(node)] = list(_sizes_in(node))
    for of, dim in known:
        name, on = _sized(run, of, frame)
        if on is not None and on.ndim is None and on.least <= dim and not run.written:
            more = replace(on, least=dim + 1, thin=on.thin and not dim)
            run.assign(name, more, frame)


def _sizes_in(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, int]]:
    """Yield the sizes that code asks for, with their dimensions."""
    for call in found(node, cst.Call):
        if len(call.args) == 1:
            yield from _size(call.func, call.args[0].value)
    for part in found(node, cst.Subscript):
        inner = part.slice[0].slice
        if len(part.slice) == 1 and isinstance(inner, cst.Index):
            yield from _size(part.value, inner.value)


def _size(
    of: cst.BaseExpression, index: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, int]]:
    if isinstance(of, cst.Attribute) and isinstance(index, cst.Integer):
        yield of, int(index.value)


def _sized(run: Run, node: cst.BaseExpression, frame: Frame) -> tuple[str, Rows | None]:
    """Return the name and the value of what ``x.shape`` or ``x.size()`` is of."""
    if isinstance(node, cst.Call):
        node = node.func
    if not isinstance(node, cst.Attribute) or node.attr.value not in ("shape", "size"):
        return "", None
    if not isinstance(node.value, cst.Name):
        return "", None
    on = run.read(node.value.value, frame)
    known = isinstance(on, Rows) and not on.whole and on.opaque is None
    return node.value.value, on if known and isinstance(on, Rows) else None
