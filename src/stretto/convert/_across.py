"""Find losses that compare the samples of a batch with each other.

Each rank compares its own samples only. So such a loss, which may well be a mean,
differs from the loss of the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._tree import argument, dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_NAMES = ("contrastive", "ntxent", "nt_xent", "infonce", "info_nce", "supcon", "simclr")
_LIBRARY = "pytorch_metric_learning."
_PAIRS = ("torch.cdist", "torch.pdist", "torch.nn.functional.pdist")
_PRODUCTS = ("torch.mm", "torch.matmul")


def point_out(work: Work) -> None:
    """List the places that compare samples of a batch."""
    for call in work.tree.calls:
        if work.tree.without_gradient(call):
            continue
        full = work.tree.called(call)
        plain = full.rpartition(".")[2].lower()
        named = any(name in plain for name in _NAMES) and "loss" in full.lower()
        multiplied = full in _PRODUCTS and len(call.args) > 1
        if (
            full.startswith(_LIBRARY)
            or named
            or full in _PAIRS
            or (multiplied and _is_transposed(work, call.args[1].value))
            or _hardest(work, call)
        ):
            _say(work, call)
    for product in found(work.tree.module, cst.BinaryOperation):
        if (
            isinstance(product.operator, cst.MatrixMultiply)
            and _is_transposed(work, product.right)
            and not work.tree.without_gradient(product)
        ):
            _say(work, product)


def _say(work: Work, node: cst.BaseExpression) -> None:
    work.undecided(
        node,
        f"`{work.tree.text(node)[:50]}` compares the samples of a batch with each "
        "other: each rank sees its own samples only, so the loss is not that of one "
        "process. Gather them with torch.distributed.nn.functional.all_gather first",
    )


def _is_transposed(work: Work, node: cst.BaseExpression) -> bool:
    """Return whether an expression is a matrix of samples, transposed."""
    of: cst.BaseExpression | None = None
    if isinstance(node, cst.Attribute) and node.attr.value in ("T", "mT"):
        of = node.value
    elif isinstance(node, cst.Call):
        of = work.tree.method_called(node, "t")
        swapped = work.tree.method_called(node, "transpose", "permute")
        if swapped is not None and [work.tree.text(a.value) for a in node.args] in (
            ["0", "1"],
            ["1", "0"],
        ):
            of = swapped
    path = dotted(of)
    if path is None:
        return False
    return not path.startswith("self.") and path.rpartition(".")[2].lower() not in (
        "weight",
        "w",
    )


def _hardest(work: Work, call: cst.Call) -> bool:
    """Return whether the largest values of a batch's losses are taken."""
    on = work.tree.method_called(call, "topk", "sort", "kthvalue")
    if work.tree.called(call) in ("torch.topk", "torch.sort") and call.args:
        on = call.args[0].value
    if argument(call, 1, "dim") is not None and on is not None:
        return False
    return "loss" in (dotted(on) or "").lower()
