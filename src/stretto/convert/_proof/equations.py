"""Functions whose text names dimensions: ``einsum``, and those of einops."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import elementwise
from stretto.convert._proof.batch_values import (
    Constant,
    Linear,
    Rows,
    Unproved,
    Why,
    first_rows,
)
from stretto.convert._proof.given_arguments import known_text

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


def einsum(given: CallArguments) -> Value:
    """Return the value of ``torch.einsum``."""
    node = given.node
    text = given.args[0] if given.args else None
    values = list(given.args[1:])
    equation = text.value if isinstance(text, Constant) else None
    if not isinstance(equation, str):
        return Unproved(Why.UNREAD, node) if first_rows(values) else Constant(grad=True)
    if "..." in equation:
        return elementwise(values, node)
    if "->" not in equation:
        used = equation.replace(",", "").replace(" ", "")
        equation += "->" + "".join(sorted(c for c in used if used.count(c) == 1))
    left, _, right = equation.replace(" ", "").partition("->")
    letters = set()
    degree = 0
    out: Rows | None = None
    for names, value in zip(left.split(","), values, strict=False):
        if isinstance(value, Unproved):
            return value
        if isinstance(value, Rows) and names:
            axis = 0 if value.axis is None else value.axis
            letters.add(names[axis] if axis < len(names) else names[0])
            degree += value.degree
            out = value if out is None else out
            if value.shifted is not None:
                return Unproved(Why.ACROSS, value.shifted)
        elif isinstance(value, Linear):
            return Unproved(Why.NONLINEAR, node)
    if out is None:
        return Constant(grad=True)
    if len(letters) > 1:
        return Unproved(Why.ACROSS, node)
    letter = letters.pop()
    if letter not in right:
        return Linear(degree + 1)
    return Rows(
        axis=right.index(letter), ndim=len(right), degree=degree, opaque=out.opaque
    )


def einops_function(last: str, given: CallArguments) -> Value | None:
    """Return the value of a function of einops."""
    on = first_rows(given.args[:1])
    text = known_text(given.get("pattern", 1))
    if on is None:
        return Constant(grad=True)
    if text is None or "->" not in text or on.axis is None:
        return replace(on, ndim=None, raw=False, whole=False)
    left, _, right = text.partition("->")
    before, after = _groups_in(left), _groups_in(right)
    name = before[on.axis][0] if on.axis < len(before) and before[on.axis] else None
    if name is None:
        return replace(on, ndim=None, raw=False, whole=False)
    for place, group in enumerate(after):
        if name in group:
            first = place if group[0] == name or True else None
            return replace(on, axis=first, ndim=len(after), raw=False, whole=False)
    if last == "reduce":
        how = known_text(given.get("reduction", 2))
        if how in ("mean", "sum"):
            return Linear(on.degree + (how == "sum"))
    return Unproved(Why.ACROSS, given.node)


def _groups_in(text: str) -> list[list[str]]:
    """Return the names of each dimension in one half of an einops pattern."""
    out: list[list[str]] = []
    inside = False
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            inside = True
            out.append([])
        elif word == ")":
            inside = False
        elif inside:
            out[-1].append(word)
        else:
            out.append([word])
    return out
