"""Backward methods of the script's own ``torch.autograd.Function`` classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._tree import dotted, found, stored_names

if TYPE_CHECKING:
    from stretto.convert._tree import Tree


_COUNTING = frozenset(
    [
        "mean",
        "std",
        "var",
        "norm",
        "max",
        "min",
        "amax",
        "amin",
        "median",
        "softmax",
        "numel",
        "nelement",
    ]
)
"""Methods that depend on all samples, or on their number."""

_READ = ("torch", "numpy", "math", "typing")
"""Packages whose functions are known by their names."""


def counts_samples(
    tree: Tree, forward: cst.FunctionDef | None, backward: cst.FunctionDef
) -> bool:
    """Return whether a backward may depend on all samples, or on their number.

    What it calls in the script counts too, and what ``forward`` keeps for it.
    """
    if _counts(tree, backward, []):
        return True
    if forward is None or not forward.params.params:
        return False
    context = forward.params.params[0].name.value
    kept = set()
    for line in found(forward.body, cst.Assign):
        for target in line.targets:
            on = target.target
            of_context = isinstance(on, cst.Attribute) and dotted(on.value) == context
            if isinstance(on, cst.Attribute) and of_context and _is_number(line.value):
                kept.add(on.attr.value)
    saves = (
        call
        for call in found(forward.body, cst.Call)
        if dotted(call.func) == f"{context}.save_for_backward"
    )
    if any(_is_number(given.value) for call in saves for given in call.args):
        return True
    return any(
        part.attr.value in kept and isinstance(part.value, cst.Name)
        for part in found(backward.body, cst.Attribute)
    )


def _counts(
    tree: Tree, function: cst.FunctionDef, around: list[cst.FunctionDef]
) -> bool:
    """Return whether a function, or one that it calls, may count samples."""
    if function in around:
        return False
    if _is_number(function.body) or _divides_by_size(function):
        return True
    for call in found(function.body, cst.Call):
        path = dotted(call.func) or ""
        head, _, last = path.rpartition(".")
        package = tree.imported.get(path.partition(".")[0])
        if package is not None and not package.startswith(_READ):
            return True
        if package is not None:
            continue
        helpers = [f for f in tree.functions if f.name.value == last]
        of_class = head.rpartition(".")[2] in tree.classes or head in ("cls", "self")
        if (not head or of_class) and any(
            _counts(tree, helper, [*around, function]) for helper in helpers
        ):
            return True
    return False


def _is_number(node: cst.CSTNode) -> bool:
    """Return whether code computes a number of samples, or with all of them."""
    for call in found(node, cst.Call):
        name = (dotted(call.func) or "").rpartition(".")[2]
        if isinstance(call.func, cst.Attribute):
            name = call.func.attr.value
        numbers = [a.value for a in call.args]
        first = any(isinstance(n, cst.Integer) and n.value == "0" for n in numbers)
        if name in _COUNTING or name == "len" or (name == "size" and first):
            return True
        if name == "sum" and not numbers:
            return True
    for part in found(node, cst.Subscript):
        inner = part.slice[0].slice
        if (
            isinstance(part.value, cst.Attribute)
            and part.value.attr.value == "shape"
            and isinstance(inner, cst.Index)
            and isinstance(inner.value, cst.Integer)
            and inner.value.value == "0"
        ):
            return True
    return False


def _divides_by_size(function: cst.FunctionDef) -> bool:
    """Return whether a function computes with the first of a tensor's sizes."""
    sizes: set[str] = set()
    for line in found(function.body, cst.Assign):
        value = line.value.func if isinstance(line.value, cst.Call) else line.value
        if not isinstance(value, cst.Attribute) or value.attr.value not in (
            "shape",
            "size",
        ):
            continue
        for target in line.targets:
            if isinstance(target.target, cst.Tuple | cst.List):
                first = target.target.elements[0].value
                sizes |= {name.value for name in stored_names(first)}
    return any(
        isinstance(side, cst.Name) and side.value in sizes
        for operation in found(function.body, cst.BinaryOperation)
        for side in (operation.left, operation.right)
    )
