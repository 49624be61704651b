"""List what makes the models of ranks differ although their gradients are equal.

Gradients are averaged over ranks, so models stay equal as long as all that changes them
is equal: learning rates, the data, the parameters themselves. Since training began each
rank draws its own random numbers, and it always has its own samples, gradients before
the exchange, clock and errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._changed_parameters import ChangedParameters
from stretto.convert._gradient_hooks import GradientHooks
from stretto.convert._rank_decisions import RankDecisions
from stretto.convert._rank_settings import RankSettings
from stretto.convert._rank_sources import RankSources
from stretto.convert._replica_notes import ReplicaNotes
from stretto.convert._trained_parts import TrainedParts
from stretto.convert._tree import found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._models import Models
    from stretto.convert._replica_notes import RankValues


def point_out(
    work: Work, models: Models, values: RankValues, begins: cst.CSTNode
) -> None:
    """List what makes models differ.

    Args:
        work: The script and its edits.
        models: The trained models and where they are wrapped.
        values: What differs by rank.
        begins: The statement before which ranks begin to draw their own numbers.
    """
    sources = RankSources(work, begins)
    on = ReplicaNotes(
        work=work,
        models=models,
        values=values,
        sources=sources,
        parts=TrainedParts(work, models, sources),
        begins=begins,
    )
    changed, hooks = ChangedParameters(on), GradientHooks(on)
    settings, decisions = RankSettings(on), RankDecisions(on)
    for call in work.tree.calls:
        changed.by_call(call)
        hooks.hook(call)
        hooks.gradients(call)
        settings.statistics(call)
        settings.trial(call)
        settings.seed(call)
    changes: Iterator[cst.Assign | cst.AugAssign]
    changes = found(work.tree.module, (cst.Assign, cst.AugAssign))
    for node in changes:
        if not settings.assigned(node):
            changed.by_assignment(node)
    for loop in found(work.tree.module, cst.For):
        settings.samples(loop)
    for optimizer in work.job.optimizers:
        settings.closures(optimizer)
        for given in optimizer.call.args[1:]:
            settings.setting(given.value, optimizer.scope, "the optimizer")
    settings.data()
    tests: Iterator[cst.If | cst.While]
    tests = found(work.tree.module, (cst.If, cst.While))
    for test in tests:
        decisions.decision(test)
    for choice in found(work.tree.module, cst.IfExp):
        decisions.choice(choice)
    for block in found(work.tree.module, cst.Try):
        decisions.attempt(block)
