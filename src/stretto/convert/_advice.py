"""Notes on questions about the converted script that only a person can decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert import _across
from stretto.convert._horovod import _conditional
from stretto.convert._tree import argument, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work


_CLASS_WEIGHT_PLACES = {
    "torch.nn.CrossEntropyLoss": 0,
    "torch.nn.NLLLoss": 0,
    "torch.nn.functional.cross_entropy": 2,
    "torch.nn.functional.nll_loss": 2,
}
"""Losses whose mean divides by the weights of a batch, and where `weight` is passed."""


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
    _across.point_out(work)
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
    micro = _conditional(work)
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
