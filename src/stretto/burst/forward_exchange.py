"""The start of every forward: the ranks exchange and compare a few numbers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import torch

from stretto.burst.checks.backward_use import BackwardUse
from stretto.burst.checks.changes import Changes
from stretto.burst.checks.constant_buffers import ConstantBuffers
from stretto.burst.checks.hook_use import HookUse
from stretto.burst.checks.numbers import as_float, as_int, number_of
from stretto.burst.checks.optimizer_use import OptimizerUse
from stretto.burst.checks.recheck import Recheck
from stretto.burst.checks.replicas import Replicas
from stretto.burst.schedule import RankSchedule, schedule_of
from stretto.burst.tracing.behavior import tolerance_between
from stretto.burst.tracing.packing import advice_on_samples
from stretto.errors import PlanMismatch, RankDisagreement, SpecError, StrettoError
from stretto.sim.sample_layout import Layouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.burst.captures import Trained
    from stretto.burst.dropout import Draws
    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.schedule import ExecutionPlan
    from stretto.burst.timings import StepClock
    from stretto.burst.tracing.layers import LayerGraph

_KEPT = 8
"""Number of global batches whose layouts are kept: of the usual step, of the last of an
epoch, of an evaluation."""


class RankCheck(Protocol):
    """A check whose numbers ranks compare with each forward."""

    @property
    def num_values(self) -> int:
        """Numbers in each exchange."""

    def next_values(self) -> list[int]:
        """Return this rank's numbers."""

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the ranks' numbers; raise on every rank if they differ."""


class ForwardState(NamedTuple):
    """The state of its own forward that a rank sends, besides its checks' numbers."""

    share: int
    """Its number of samples, or why it has none."""

    is_training: int

    is_grad_enabled: int

    input_needs_grad: int

    step: int
    """Training forwards so far."""

    drawn: int
    """Its draws from its generator of random numbers; 0: none."""

    trained: int
    """A number for the set of parameters that need a gradient."""

    operations: int
    """A number for the layers' operations."""

    behavior: int
    """The bits of a number for what the module computes; of 0: unknown."""


NUM_NUMBERS = len(ForwardState._fields) + sum(
    kind.num_values
    for kind in (
        BackwardUse,
        HookUse,
        ConstantBuffers,
        OptimizerUse,
        Replicas,
        Changes,
        Recheck,
    )
)
"""Numbers that each rank sends."""

_BAD_SAMPLE, _TROUBLE = -1, -2


@final
class ForwardExchange:
    """Exchanges the ranks' shares and what they compare; keeps the layouts."""

    def __init__(
        self,
        rank_groups: RankGroups,
        clock: StepClock,
        checks: Sequence[RankCheck],
        hooks: HookUse,
    ) -> None:
        self._rank_groups = rank_groups
        self._clock = clock
        self._checks = checks
        self._hooks = hooks
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
        draws: Draws,
        is_drawing: bool,
        trained: Trained,
        trouble: StrettoError | None,
    ) -> tuple[Layouts, bool]:
        """Return this batch's layouts, and whether a rank's input needs gradients.

        Args:
            graph: the layers that run.
            batch: this rank's samples.
            is_training: the model's mode.
            draws: what random numbers are derived from; begins this forward.
            is_drawing: whether the layers draw random numbers.
            trained: which of the module's parameters need a gradient.
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
        proven = graph.proven
        mine = ForwardState(
            share=count if trouble is None else _TROUBLE,
            is_training=int(is_training),
            is_grad_enabled=int(torch.is_grad_enabled()),
            input_needs_grad=int(batch.requires_grad),
            step=draws.step,
            drawn=draws.next_number(is_drawing=is_drawing),
            trained=number_of(bytes(trained)),
            operations=graph.semantics_number,
            behavior=as_int(0.0 if proven is None else proven.behavior_with(trained)),
        )
        rows = self._exchanged(mine)
        if trouble is not None:
            raise self._shared(trouble, [row[0] for row in rows])
        if not fits:
            kind = tuple(batch.shape[1:]), batch.dtype
            wanted = graph.input_shape, graph.input_dtype
            raise SpecError(
                f"a sample must have shape {wanted[0]} and type {wanted[1]}, as in the "
                f"example inputs, got {kind[0]} and {kind[1]}. "
                f"{advice_on_samples([kind], [wanted])}"
            )
        states = [ForwardState(*row[: len(mine)]) for row in rows]
        self._require_same_state(states)
        start = len(mine)
        for check in self._checks:
            end = start + check.num_values
            check.require_equal([row[start:end] for row in rows])
            start = end
        self._require_same_behavior(states, graph)  # after the checks of hooks
        shares = tuple(state.share for state in states)
        if not sum(shares):
            raise SpecError("the global batch has no sample on any rank")
        draws.follow([state.drawn for state in states])
        needs_grad = any(state.input_needs_grad for state in states)
        return self._layouts_of(shares), needs_grad

    def _exchanged(self, mine: ForwardState) -> list[list[int]]:
        """Return every rank's numbers: its state, then those of each check."""
        numbers = [*mine, *(n for check in self._checks for n in check.next_values())]
        rows: list[list[int]] = []

        def ask() -> None:
            rows.extend(self._rank_groups.exchange(numbers))

        with self._rank_groups.guard(
            "the exchange of the ranks' shares before a forward"
        ):
            self._clock.wait("counts", ask)
        return rows

    def _shared(self, trouble: Exception, shares: Sequence[int]) -> Exception:
        """Return the error of a rank that can't continue, of one type on all ranks.

        Ranks without trouble raise `RankDisagreement`. An input that one rank alone
        may not compute with stays a `SpecError` there.
        """
        bad = [rank for rank, share in enumerate(shares) if share == _TROUBLE]
        if len(bad) == len(shares) or type(trouble) not in (PlanMismatch, StrettoError):
            return trouble
        found = RankDisagreement(
            f"{trouble}. This is so on {self._rank_groups.ranks.name_all(bad)} only. "
            "Change the model in the same way on every rank."
        )
        found.__cause__ = trouble
        return found

    def _require_same_state(self, states: Sequence[ForwardState]) -> None:
        name_all = self._rank_groups.ranks.name_all
        bad = [rank for rank, one in enumerate(states) if one.share == _TROUBLE]
        if bad:
            raise RankDisagreement(
                f"{name_all(bad)} can't continue; see the error there. Change "
                "the model in the same way on every rank."
            )
        bad = [rank for rank, one in enumerate(states) if one.share < 0]
        if bad:
            raise RankDisagreement(
                f"{name_all(bad)} passed samples of another shape or type than the "
                "example's. Give every rank samples of one kind."
            )
        for what, flags in (
            ("train mode", [one.is_training for one in states]),
            ("enabled gradients", [one.is_grad_enabled for one in states]),
        ):
            on = [rank for rank, flag in enumerate(flags) if flag]
            if 0 < len(on) < len(states):
                raise RankDisagreement(
                    f"{name_all(on)} called with {what}, others without. Let all ranks "
                    "train or evaluate at the same time."
                )
        if len({one.step for one in states}) > 1:
            raise RankDisagreement(
                "ranks have trained different numbers of steps: "
                f"{[one.step for one in states]} by rank. Call the model equally often."
            )
        first = states[0]
        other = [r for r, one in enumerate(states) if one.trained != first.trained]
        if other:
            raise RankDisagreement(
                f"{name_all(other)} and {name_all([0])} train different parameters. "
                "Freeze and unfreeze the same ones on every rank."
            )
        other = [
            r for r, one in enumerate(states) if one.operations != first.operations
        ]
        if other:
            raise RankDisagreement(
                f"{name_all(other)} and {name_all([0])} would compute with different "
                "operations: a mode, a flag, autocast or a value that forward reads "
                "differs. Change the model in the same way on every rank."
            )

    def _require_same_behavior(
        self, states: Sequence[ForwardState], graph: LayerGraph
    ) -> None:
        """See Note [Ranks compare what their modules compute] in `tracing.behavior`."""
        known = {r: as_float(one.behavior) for r, one in enumerate(states)}
        known = {rank: value for rank, value in known.items() if value}
        if len(set(known.values())) <= 1:
            return
        first, tolerance = next(iter(known)), tolerance_between(graph)
        other = [r for r, x in known.items() if abs(x - known[first]) > tolerance]
        if not other:
            return
        name_all = self._rank_groups.ranks.name_all
        hooks = self._hooks.differences()
        raise RankDisagreement(
            f"{name_all(other)} and {name_all([first])} compute different values for "
            "equal samples and parameters, though with the same operations: what a "
            "parametrization, a hook, an autograd.Function or another part of the "
            "model with code of its own reads differs. Change the model in the same "
            "way on every rank." + "".join(f" Of its hooks, {text}." for text in hooks)
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
