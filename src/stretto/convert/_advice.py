"""Notes on questions about the converted script that only a person can decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._horovod import conditional_steps
from stretto.convert._tree import argument, dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work


_CLASS_WEIGHT_PLACES = {
    "torch.nn.CrossEntropyLoss": 0,
    "torch.nn.NLLLoss": 0,
    "torch.nn.functional.cross_entropy": 2,
    "torch.nn.functional.nll_loss": 2,
}
"""Losses whose mean divides by the weights of a batch, and where `weight` is passed."""

_COMPARING_NAMES = (
    "contrastive",
    "ntxent",
    "nt_xent",
    "infonce",
    "info_nce",
    "supcon",
    "simclr",
)
_COMPARING_LIBRARY = "pytorch_metric_learning."
_PAIRS = ("torch.cdist", "torch.pdist", "torch.nn.functional.pdist")
_PRODUCTS = ("torch.mm", "torch.matmul")


def give(work: Work) -> None:
    """Add notes on what was left unchanged."""
    tree = work.tree
    first = work.job.optimizers[0].call
    if work.choices.per_rank_batch:
        work.know(
            first,
            "the learning rate is left unchanged, but with N ranks each step now "
            "takes N times the samples, and an epoch has N times fewer steps: a "
            "learning rate multiplied by N, with some warm-up, is the usual first "
            "choice (Goyal et al., 2017, for SGD)",
        )
    else:
        work.know(
            first,
            "the learning rate is left unchanged: all ranks together take the batch "
            "that one process took, so a step is the same; if the number of samples "
            "is not divisible by the number of ranks, a few are seen twice in the "
            "last step. With --per-rank a step is not the same",
        )
    _point_out_comparisons(work)
    norms = [
        c
        for c in tree.calls
        if "BatchNorm" in tree.called(c) and "Sync" not in tree.called(c)
    ]
    if norms:
        work.know(
            norms[0],
            "BatchNorm computes its statistics over each rank's samples, not over the "
            "whole batch: results differ slightly from one process. On GPUs "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping "
            "computes them over all samples",
        )
    micro = conditional_steps(work)
    if micro and not work.horovod:
        work.know(
            micro[0],
            "gradients are accumulated: they are exchanged in every backward, which "
            "is correct but unnecessary. `with model.no_sync():` around all but the "
            "last avoids it",
        )
    for node in found(tree.module, cst.Arg):
        if node.keyword is not None and node.keyword.value == "ignore_index":
            work.undecided(
                node,
                "a mean that leaves samples out (ignore_index): if ranks leave out "
                "different numbers of samples, the mean over ranks is not the mean "
                "over all samples",
            )
    for call in tree.calls:
        place = _CLASS_WEIGHT_PLACES.get(tree.called(call))
        if place is None or argument(call, -1, "reduction") is not None:
            continue
        weight = argument(call, place, "weight")
        if weight is not None and tree.text(weight) != "None":
            work.undecided(
                call,
                "a mean over samples weighted by class (weight=): ranks count equally "
                "even if the total weights of their samples differ, so the step "
                "differs from one process. For an equal step divide the sum "
                '(reduction="sum") by the number of samples',
            )
    if any(tree.called(c).startswith("torch.backends.mps") for c in tree.calls):
        work.know(None, "MPS devices do not support distributed training; CPU does")


def _point_out_comparisons(work: Work) -> None:
    """List the losses that compare the samples of a batch with each other.

    Each rank compares its own samples only. So such a loss, which may well be a mean,
    differs from the loss of the whole batch.
    """
    for call in work.tree.calls:
        if work.tree.without_gradient(call):
            continue
        full = work.tree.called(call)
        plain = full.rpartition(".")[2].lower()
        named = (
            any(name in plain for name in _COMPARING_NAMES) and "loss" in full.lower()
        )
        multiplied = full in _PRODUCTS and len(call.args) > 1
        if (
            full.startswith(_COMPARING_LIBRARY)
            or named
            or full in _PAIRS
            or (multiplied and _is_transposed(work, call.args[1].value))
            or _hardest(work, call)
        ):
            _point_out_comparison(work, call)
    for product in found(work.tree.module, cst.BinaryOperation):
        if (
            isinstance(product.operator, cst.MatrixMultiply)
            and _is_transposed(work, product.right)
            and not work.tree.without_gradient(product)
        ):
            _point_out_comparison(work, product)


def _point_out_comparison(work: Work, node: cst.BaseExpression) -> None:
    if work.proofs.is_rowwise(node):
        return
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
    if isinstance(on, cst.Call):
        text = work.tree.text(on).replace(" ", "")
        return text.endswith((".flatten()", ".view(-1)", ".reshape(-1)", ".ravel()"))
    return "loss" in (dotted(on) or "").lower()
