"""The start of every forward: the ranks exchange and compare a few numbers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

import torch

from stretto.burst import changes as factors
from stretto.burst import constant_buffers, hook_use, optimizer_use
from stretto.burst.schedule import RankSchedule, schedule_of
from stretto.errors import RankDisagreement, SpecError
from stretto.sim.sample_layout import Layouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.burst.changes import Changes
    from stretto.burst.constant_buffers import ConstantBuffers
    from stretto.burst.hook_use import HookUse
    from stretto.burst.optimizer_use import OptimizerUse
    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.replicas import Replicas
    from stretto.burst.schedule import ExecutionPlan
    from stretto.burst.timings import StepClock
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.errors import StrettoError

_KEPT = 8
"""Number of global batches whose layouts are kept: of the usual step, of the last of an
epoch, of an evaluation."""


# Places in each exchange: nine numbers of this module, then those of others.
_CHANGES = 9
_USES = _CHANGES + factors.NUM_VALUES
_HOOKS = _USES + optimizer_use.NUM_VALUES
_BUFFERS = _HOOKS + hook_use.NUM_VALUES
NUM_NUMBERS = _BUFFERS + constant_buffers.NUM_VALUES
"""Numbers that each rank sends."""

_BAD_SAMPLE, _TROUBLE = -1, -2


@final
class BatchPartition:
    """Exchanges the ranks' shares, and keeps the layouts derived from them."""

    def __init__(self, rank_groups: RankGroups, clock: StepClock) -> None:
        self._rank_groups = rank_groups
        self._clock = clock
        self._layouts: OrderedDict[tuple[int, ...], Layouts] = OrderedDict()
        self._schedules: OrderedDict[tuple[int, tuple[int, ...]], RankSchedule] = (
            OrderedDict()
        )

    def exchange(
        self,
        graph: LayerGraph,
        batch: torch.Tensor,
        *,
        is_training: bool,
        step: int,
        trained: int,
        operations: int,
        replicas: Replicas,
        changes: Changes,
        uses: OptimizerUse,
        hooks: HookUse,
        buffers: ConstantBuffers,
        trouble: StrettoError | None,
    ) -> tuple[Layouts, bool]:
        """Return this batch's layouts, and whether a rank's input needs gradients.

        Args:
            graph: the layers that run.
            batch: this rank's samples.
            is_training: the model's mode.
            step: number of training forwards so far.
            trained: a number for the set of parameters that need a gradient.
            operations: a number for the layers' operations.
            replicas: compares a layer's copies.
            changes: compares the changes of gradients and parameters.
            uses: compares how ranks use their optimizers.
            hooks: compares the program's hooks.
            buffers: compares the values of buffers.
            trouble: the error that prevents this rank's forward; the other ranks are
                informed.

        Raises:
            SpecError: a sample has another shape or type than the example's.
            RankDisagreement: ranks differ in mode, parameters, step, in the factors of
                their gradients or the use of optimizers, or one has invalid input.
            CommTimeout: a rank was lost.
        """
        fits = (
            tuple(batch.shape[1:]) == graph.input_shape
            and batch.dtype == graph.input_dtype
        )
        count = len(batch) if fits and batch.dim() else _BAD_SAMPLE
        mine = [
            count if trouble is None else _TROUBLE,
            int(is_training),
            int(torch.is_grad_enabled()),
            int(batch.requires_grad),
            step,
            trained,
            *replicas.next_values(),
            operations,
            *changes.next_values(),
            *uses.next_values(),
            *hooks.next_values(),
            *buffers.next_values(graph),
        ]
        rows: list[list[int]] = []

        def ask() -> None:
            rows.extend(self._rank_groups.exchange(mine))

        with self._rank_groups.guard("the exchange of the ranks' shares"):
            self._clock.wait("counts", ask)
        if trouble is not None:
            raise trouble
        if not fits:
            raise SpecError(
                f"a sample must have shape {graph.input_shape} and type "
                f"{graph.input_dtype}, as in the example inputs, got "
                f"{tuple(batch.shape[1:])} and {batch.dtype}. Pad samples to the "
                "example's length, and mask the padding in the loss"
            )
        shares = tuple(row[0] for row in rows)
        self._require_alike(rows, shares)
        hooks.require_alike([row[_HOOKS:_BUFFERS] for row in rows])
        buffers.require_alike([row[_BUFFERS:] for row in rows])
        uses.require_alike([row[_USES:_HOOKS] for row in rows])
        replicas.require_equal([(row[6], row[7]) for row in rows])
        changes.require_alike([row[_CHANGES:_USES] for row in rows])
        if not sum(shares):
            raise SpecError("the global batch has no sample on any rank")
        return self._layouts_of(shares), any(row[3] for row in rows)

    def _require_alike(
        self, rows: Sequence[Sequence[int]], shares: tuple[int, ...]
    ) -> None:
        name_all = self._rank_groups.ranks.name_all
        bad = [rank for rank, share in enumerate(shares) if share == _TROUBLE]
        if bad:
            raise RankDisagreement(
                f"{name_all(bad)} can't continue; see the error there. Change "
                "the model in the same way on every rank."
            )
        bad = [rank for rank, share in enumerate(shares) if share < 0]
        if bad:
            raise RankDisagreement(
                f"{name_all(bad)} passed samples of another shape or type than the "
                "example's. Give every rank samples of one kind."
            )
        for i, what in enumerate(("train mode", "enabled gradients"), start=1):
            on = [rank for rank, row in enumerate(rows) if row[i]]
            if 0 < len(on) < len(rows):
                raise RankDisagreement(
                    f"{name_all(on)} called with {what}, others without. Let all ranks "
                    "train or evaluate at the same time."
                )
        if len({row[4] for row in rows}) > 1:
            raise RankDisagreement(
                "ranks have trained different numbers of steps: "
                f"{[row[4] for row in rows]} by rank. Call the model equally often."
            )
        other = [rank for rank, row in enumerate(rows) if row[5] != rows[0][5]]
        if other:
            raise RankDisagreement(
                f"{name_all(other)} and {name_all([0])} train different parameters. "
                "Freeze and unfreeze the same ones on every rank."
            )

        other = [rank for rank, row in enumerate(rows) if row[8] != rows[0][8]]
        if other:
            raise RankDisagreement(
                f"{name_all(other)} and {name_all([0])} would compute with different "
                "operations: a mode, a flag, autocast or a value that forward reads "
                "differs. Change the model in the same way on every rank."
            )

    def _layouts_of(self, shares: tuple[int, ...]) -> Layouts:
        if shares not in self._layouts:
            self._layouts[shares] = Layouts(shares)
            while len(self._layouts) > _KEPT:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(shares)
        return self._layouts[shares]

    def schedule(self, plan: ExecutionPlan, layouts: Layouts) -> RankSchedule:
        """Return this rank's schedule of a forward with these shares."""
        key = (id(plan), layouts.shares)
        if key not in self._schedules:
            rank = self._rank_groups.ranks.rank
            self._schedules[key] = schedule_of(plan, layouts, rank)
            while len(self._schedules) > 2 * _KEPT:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def forget_schedules(self) -> None:
        """Drop the schedules, because the plan changes."""
        self._schedules.clear()
