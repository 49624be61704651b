"""List a ``collate_fn`` of the script that makes batches of uneven parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import argument, dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._tree import Scope

_JOINING = ("torch.cat", "torch.concat", "torch.concatenate", "torch.hstack")
_DROPPING = "leaves samples out"
_PADDING = "pads samples to the longest of a batch"
_MIXING = "computes with a value of all samples of a batch"
_UNEVEN = "joins samples that may have different lengths"
_OF_BATCH = frozenset(["mean", "std", "var", "norm"])
_EXTREMES = frozenset(["max", "min", "amax", "amin"])
"""Calls that scale samples only within an operation: lengths have a maximum too."""


def point_out(work: Work, call: cst.Call) -> None:
    """List what a training loader's ``collate_fn`` does that ranks do differently.

    Args:
        work: The script and its edits.
        call: The call that makes the loader.
    """
    given = argument(call, 6, "collate_fn")
    if given is None or work.choices.per_rank_batch:
        return
    for function in _functions(work, given, work.tree.function(call)):
        node, what = _finding(work, function)
        if node is None:
            continue
        shown = (
            f"`{' '.join(work.tree.text(node).split())[:60]}` in a collate_fn {what}"
        )
        if what == _PADDING:
            work.know(
                node,
                f"{shown}, and each rank pads its own samples: a mean over padded "
                "elements without a mask differs from that of one process",
            )
        elif what == _MIXING:
            work.undecided(
                node,
                f"{shown}: each rank has its own samples only, so the batch is not "
                "that of one process",
            )
        else:
            work.undecided(
                node,
                f"{shown}, so the sizes of ranks' batches differ, while gradients are "
                "averaged over ranks: the mean is not that of one process",
            )


def is_listed(work: Work, function: cst.FunctionDef | cst.Lambda) -> bool:
    """Return whether a ``collate_fn`` is listed for what ranks do differently."""
    node, what = _finding(work, function)
    return node is not None and what != _PADDING


def _functions(
    work: Work, given: cst.BaseExpression, scope: Scope
) -> Iterator[cst.FunctionDef | cst.Lambda]:
    """Yield the functions of the script that an argument may be."""
    if isinstance(given, cst.Lambda):
        yield given
        return
    if isinstance(given, cst.Call):
        name = work.tree.called(given)
        kind = work.tree.classes.get(dotted(given.func) or "")
        if kind is not None:
            methods = found(kind.body, cst.FunctionDef)
            yield from (f for f in methods if f.name.value == "__call__")
        elif name in ("functools.partial", "partial") and given.args:
            yield from _functions(work, given.args[0].value, scope)
        return
    name = (dotted(given) or "").rpartition(".")[2]
    named = [f for f in work.tree.functions if f.name.value == name]
    if named:
        yield from named[:1]
        return
    for origin in work.flow.origins(given, scope):
        if origin.value is not given:
            yield from _functions(work, origin.value, origin.scope)


def _finding(
    work: Work, function: cst.FunctionDef | cst.Lambda
) -> tuple[cst.CSTNode | None, str]:
    """Return the expression that makes parts uneven, and what it does."""
    samples = _samples(function)
    for part in found(function.body, cst.CompFor):
        if part.ifs and _names(part.iter) & samples:
            return work.tree.parent(part) or part, _DROPPING
    for loop in found(function.body, cst.For):
        skipping = next(found(loop.body, cst.Continue), None)
        if skipping is not None and _names(loop.iter) & samples:
            return loop.iter, _DROPPING
    for call in found(function.body, cst.Call):
        name = work.tree.called(call)
        last = name.rpartition(".")[2]
        if name == "filter" and len(call.args) > 1:
            return call, _DROPPING
        if last == "pad_sequence" or (
            name == "max"
            and any(work.tree.called(c) == "len" for c in found(call, cst.Call))
        ):
            return call, _PADDING
    returned = (
        work.flow.returned(function) if isinstance(function, cst.FunctionDef) else []
    )
    offsets = any("offset" in n for v in returned for n in _names(v))
    for call in found(function.body, cst.Call):
        name = work.tree.called(call)
        if name in _JOINING and not offsets and _joins_samples(call, function):
            return call, _UNEVEN
        if _reduces(work, call):
            return call, _MIXING
    return None, ""


def _samples(function: cst.FunctionDef | cst.Lambda) -> set[str]:
    """Return the names of the list of samples."""
    if isinstance(function, cst.Lambda):
        return {p.name.value for p in function.params.params}
    return set(parameters(function)) - {"self"}


def _joins_samples(call: cst.Call, function: cst.FunctionDef | cst.Lambda) -> bool:
    """Return whether a call joins a list, rather than a few values that it names."""
    value = call.args[0].value if call.args else None
    axis = argument(call, 1, "dim")
    first = axis is None or (isinstance(axis, cst.Integer) and axis.value == "0")
    if not first or isinstance(value, cst.List | cst.Tuple):
        return False
    return not any(
        isinstance(inner.func, cst.Attribute) and inner.func.attr.value == "unsqueeze"
        for inner in found(function.body, cst.Call)
    )


def _reduces(work: Work, call: cst.Call) -> bool:
    """Return whether a call makes one value of all samples of a tensor."""
    if not isinstance(call.func, cst.Attribute):
        return False
    name = call.func.attr.value
    scales = isinstance(work.tree.parent(call), cst.BinaryOperation)
    if name not in _OF_BATCH and not (scales and name in _EXTREMES):
        return False
    of_torch = work.tree.called(call).startswith("torch.")
    if not of_torch and dotted(call.func) is not None:
        head = (dotted(call.func) or "").partition(".")[0]
        if head in work.tree.imported:
            return False
    given = [a.value for a in call.args][1 if of_torch else 0 :]
    return not given or (isinstance(given[0], cst.Integer) and given[0].value == "0")


def _names(node: cst.CSTNode) -> set[str]:
    return {name.value for name in found(node, cst.Name)}
