"""``plan="auto"``: measure in the first steps, plan, try, settle, and keep watching.

Every step trains. What a run goes through:

1. An equal job's plan from an earlier run is carried out at once; if its steps take
   what they took then, that is all. Where that run ended before tuning had settled, the
   search goes on, at 3, with what its look measured: equal steps say that it still
   holds, and looking again would put the communication of a few steps off.
2. Otherwise the first steps are profiled, the network is probed, and the planner's plan
   is carried out (`stretto.tune.look`).
3. Plans are tried while the training goes on (`stretto.tune.trials`), within limits on
   steps and on lost time.
4. The best stays. Step times are watched, and a lasting change begins again at 2
   (`stretto.tune.drift`).

Where anything of this fails, training goes on as DDP does it and one line says why.
What is known when a run ends before 4 is kept by rank 0 (`stretto.tune.unfinished`).
"""

from __future__ import annotations

import importlib
import logging
import math
import statistics
import weakref
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch

from stretto._version import __version__
from stretto.errors import Infeasible, NoisyProfile, PlanMismatch, SpecError
from stretto.measure import count_hosts
from stretto.planners.base import predicted_s, with_prediction
from stretto.schema import Plan, codec, tensors_digest
from stretto.schema.tuning import Tuning, TuningEvent
from stretto.tune.board import Board, StepClock
from stretto.tune.drift import Watch
from stretto.tune.guide import Guide
from stretto.tune.look import Look, Seen
from stretto.tune.memory import (
    Job,
    PlanMemory,
    Remembered,
    default_path,
    topology_of,
)
from stretto.tune.options import TuneOptions
from stretto.tune.profiling import deferred_plan
from stretto.tune.remembered import (
    ddp_step_s_at,
    decoded,
    encoded,
    nearest_point,
    packed,
    seen_again,
    settled_of,
)
from stretto.tune.settled import OnSettled, Settled, summary
from stretto.tune.starts import PROFILED, starts_of
from stretto.tune.trials import Trials
from stretto.tune.unfinished import Known, end
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.runtime import DistributedDataParallel
    from stretto.tune.unfinished import OnUnfinished

_log = logging.getLogger(__name__)

CHECK_WARMUP_STEPS = 2
CHECK_STEPS = 5
"""A remembered plan is carried out for so many steps before it is believed, and for as
many again before it is not."""

AGREES_RATIO = 0.10
"""A remembered plan whose step is slower than it was by more than this is not."""

ALIKE_DISTANCE = 0.25
"""Jobs further apart share no experience."""


@final
class AutoPlan:
    """Drives one model from its first step to a plan, and on."""

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        name: str = "model",
        planner: str = "joint",
        wire_dtype: str | None = None,
        on_settled: OnSettled | None = None,
        on_unfinished: OnUnfinished | None = None,
        options: TuneOptions | None = None,
    ) -> None:
        """Prepares; the first `before_forward` begins.

        ``on_unfinished`` is called on rank 0, where the run ends before tuning has
        settled; it must not hold the model.
        """
        self._model = model
        self._name = name
        self._planner = planner
        self._wire_dtype = wire_dtype
        self._on_settled = on_settled
        self._options = options or TuneOptions()
        self._board = Board(model.process_group)
        self._memory = PlanMemory(
            default_path()
            if self._options.memory and self._options.model and self._board.rank == 0
            else None
        )
        if self._board.rank == 0:
            # What a fit needs: a quarter of a second that no step shall wait for.
            importlib.import_module("scipy.optimize")
        self._clock = StepClock()
        self._known = Known(name=name)
        self._end: weakref.finalize[..., Any] | None = None
        if self._board.rank == 0:
            self._end = weakref.finalize(
                model, end, self._known, self._memory, on_unfinished
            )
        self._reduces = True
        self._look: Look | None = None
        self._trials: Trials | None = None
        self._continues = False
        self._check_s: list[float] = []
        self._watch: Watch | None = None
        self._settled: Settled | None = None
        self._do: Callable[[float], None] | None = None
        self.settled = False
        """Whether a plan stands; a lasting change may re-open the search."""
        self.done = False
        """Whether there is nothing left to do, now or later."""
        self.at_work = False
        """Whether a plan that the model takes up now is one of ours."""

    def before_forward(self, *, reduces: bool) -> None:
        """To be called before every forward of the training, on every rank alike.

        ``reduces`` is whether the backward that follows communicates.
        """
        if self.done or self._joining():
            return
        self.at_work = True
        try:
            self._go_on(reduces=reduces)
        finally:
            self.at_work = False

    def _go_on(self, *, reduces: bool) -> None:
        if self._trials is not None and self._model.device_type == "cuda":
            # Trials compare lengths of steps, which the host sees only when it waits.
            # Not yet run on a GPU.
            torch.cuda.synchronize()
        step_s = self._clock.ended_s(perf_counter())
        self._reduces = reduces
        first = self._known.job is None
        if first:
            self._start()
        elif step_s is not None:
            self._known.steps += 1
            if self._do is not None:
                self._do(step_s)
        if self._look is not None:
            self._look_on()
        self._clock.begin(
            perf_counter(), reduces=reduces, new_step=first or step_s is not None
        )

    def evaluated(self) -> None:
        """To be called where the model is used without training: the step is longer."""
        self._clock.disturb()

    def abandon(self, reason: str) -> None:
        """Ends tuning where it is: what the model carries out is the caller's now."""
        if self._look is not None:
            self._look.abandon()
        if self._trials is not None:
            self._trials.end()
        self._look = self._trials = self._do = None
        self.settled = self.done = True
        self._keep_nothing_more()
        self._tell("gave up", reason)

    def _joining(self) -> bool:
        """Whether ranks may have different numbers of steps (``join``)."""
        config = getattr(self._model, "_join_config", None)
        return bool(config is not None and config.enable)

    # 1. What an earlier run settled.

    def _start(self) -> None:
        hosts = count_hosts(self._model.process_group)
        rows = sorted(self._model.tensor_table())
        self._known.job = Job(
            name=self._name,
            model=tensors_digest(rows),
            hosts=hosts,
            ranks_per_host=self._board.size // hosts,
            surroundings=(
                f"stretto {__version__}, torch {torch.__version__}, "
                f"{self._model.device_type}, {self._model.backend}, "
                f"wire {self._wire_dtype}"
            ),
        )
        self._tell("started", "first step", ranks=self._board.size, hosts=hosts)
        found = self._memory.exact(self._known.job)
        offer = self._board.shared(None if found is None else packed(found))
        if offer is not None:
            plan, step_s, ddp_step_s, unfinished_steps = offer
            if self._try_remembered(codec.decode(plan, Plan)):
                unfinished = unfinished_steps is not None
                who = "an equal job settled it"
                if unfinished:
                    who = f"best of {unfinished_steps} steps of an equal job"
                self._tell(
                    "remembered",
                    f"{who}: {format_s(step_s)} a step then",
                    step_s=step_s,
                    ddp_step_s=ddp_step_s,
                )
                self._known.checked = found
                self._continues = unfinished and self._options.steps > 0
                self._check_s = [step_s]
                self._do = self._check
                return
        self._profile()

    def _try_remembered(self, plan: Plan) -> bool:
        try:
            self._model.apply_plan(plan)
        except (PlanMismatch, SpecError):
            return False
        return True

    def _check(self, step_s: float) -> None:
        self._check_s.append(step_s)
        then_s, *steps_s = self._check_s
        counted_steps = len(steps_s) - CHECK_WARMUP_STEPS
        if counted_steps not in (CHECK_STEPS, 2 * CHECK_STEPS):
            return
        counted = [s for s in steps_s[CHECK_WARMUP_STEPS:] if math.isfinite(s)]
        median_s = statistics.median(counted) if counted else math.inf
        (now_s,) = self._board.most(median_s)
        if now_s > (1 + AGREES_RATIO) * then_s:
            if counted_steps == CHECK_STEPS:
                return
            self._tell(
                "changed",
                f"its step now takes {format_s(now_s)}: measuring anew"
                if math.isfinite(now_s)
                else "no step of it could be counted: measuring anew",
            )
            self._known.stale = True
            self._profile()
            return
        if not self._continues:
            self._settle_remembered(now_s)
        elif now_s < (1 - AGREES_RATIO) * then_s:
            why = f"its step takes only {format_s(now_s)} now: measuring anew"
            self._tell("changed", why)
            self._known.stale = True
            self._profile()
        else:
            self._continue()

    def _settle_remembered(self, now_s: float) -> None:
        offer: Any = None
        found = self._known.checked
        if found is not None:
            ddp_step_s = ddp_step_s_at(found, now_s)
            offer = encoded(settled_of(found, now_s)), ddp_step_s
        parts, ddp_step_s = self._board.shared(offer)
        self._settle(
            Settled(
                **decoded(parts), step_s=now_s, ddp_step_s=ddp_step_s, remembered=True
            )
        )

    def _continue(self) -> None:
        """Searches on from a plan whose steps take what they took: no second look."""
        offer: Any = None
        found = self._known.checked
        if found is not None:
            try:
                offer = encoded(
                    seen_again(
                        found, planner=self._planner, wire_dtype=self._wire_dtype
                    )
                )
            except (Infeasible, SpecError) as exc:
                offer = str(exc)
        offer = self._board.shared(offer)
        if isinstance(offer, str):
            self._tell("changed", f"{offer}: measuring anew")
            self._profile()
            return
        self._planned(Seen(**decoded(offer), probe_s=0.0))

    # 2. A look.

    def _profile(self) -> None:
        self._do = None
        self._look = Look(
            self._model,
            self._board,
            name=self._name,
            planner=self._planner,
            wire_dtype=self._wire_dtype,
        )
        try:
            self._look.start()
        except (PlanMismatch, SpecError) as exc:
            self._look = None
            self._give_up(exc)

    def _look_on(self) -> None:
        assert self._look is not None  # noqa: S101 - the caller has seen it
        try:
            seen = self._look.before_forward(reduces=self._reduces)
        except (Infeasible, NoisyProfile, SpecError) as exc:
            self._look = None
            self._give_up(exc)
            return
        if seen is None:
            return
        self._look = None
        self._tell(
            "profiled",
            "steps with their communication put off, then the network",
            forward_s=seen.workload.forward_s,
            backward_s=seen.workload.backward_s,
            probe_s=seen.probe_s,
            flow_bytes_per_s=seen.cluster.bottleneck.flow_bytes_per_s,
            link_bytes_per_s=seen.cluster.bottleneck.bandwidth_bytes_per_s,
        )
        self._planned(seen)

    def _planned(self, seen: Seen) -> None:
        self._known.seen = seen
        self._tell(
            "planned",
            f"{self._planner} under the fitted model",
            plan=seen.plan.digest,
            predicted_s=predicted_s(seen.plan),
            ddp_predicted_s=predicted_s(seen.ddp),
        )
        self._search(seen)

    # 3. Trials.

    def _search(self, seen: Seen) -> None:
        settled = Settled(
            workload=seen.workload,
            cluster=seen.cluster,
            plan=seen.plan,
            ddp=seen.ddp,
        )
        if self._options.steps == 0:
            self._settle(settled)
            return
        guide = None
        starts: list[tuple[str, Plan]] = []
        if self._board.rank == 0:
            guide = Guide(
                seen.workload,
                seen.cluster,
                planner=self._planner,
                wire_dtype=self._wire_dtype,
            )
            starts = self._starts(settled, guide)
        seen_s = {
            plan.digest: seen.deferred_s
            for name, plan in starts
            if name == PROFILED and seen.deferred_s is not None
        }
        left = self._known.steps_left(self._options.steps)  # rank 0 alone knows
        self._trials = Trials(
            self._model,
            self._board,
            guide=guide,
            starts=starts,
            options=replace(self._options, steps=left),
            tell=self._tell,
            baseline=settled.ddp,
            seen_s=seen_s,
        )
        self._known.search = self._trials.search
        self._do = self._try_on
        if not self._trials.begin():
            self._end_trials()

    def _starts(self, settled: Settled, guide: Guide) -> list[tuple[str, Plan]]:
        checked = self._known.checked
        before = None
        if self._settled is not None:
            before = self._settled.carried_out
        elif checked is not None:
            before = checked.plan
        nearest = None
        if before is None and self._options.model:
            nearest = self._from_the_nearest(settled, guide)
        return starts_of(
            planned=settled.plan,
            ddp=settled.ddp,
            model=self._options.model,
            before=None if before is None else _retargeted(before, settled),
            stale=self._known.stale,
            nearest=nearest,
            profiled=self._profiled(settled),
        )

    def _profiled(self, settled: Settled) -> Plan | None:
        """The plan of the profiled steps, whose step time is known."""
        seen = self._known.seen
        if seen is None or seen.deferred_s is None or self._wire_dtype is not None:
            return None
        return _retargeted(deferred_plan(self._model), settled)

    def _from_the_nearest(self, settled: Settled, guide: Guide) -> Plan | None:
        """What the most similar earlier job chose, cut to this one's tensors."""
        assert self._known.job is not None  # noqa: S101 - set where tuning starts
        found = self._memory.nearest(
            settled.workload, topology_of(settled.cluster), self._known.job.surroundings
        )
        if found is None or found[1] > ALIKE_DISTANCE:
            return None
        earlier, distance = found
        point = nearest_point(earlier.plan, earlier, guide)
        plan = guide.plan_of(point)
        self._tell(
            "remembered",
            f"job {earlier.job.name!r} is alike: distance {distance:.2f}",
            distance=distance,
            plan=plan.digest,
        )
        return plan

    def _try_on(self, step_s: float) -> None:
        assert self._trials is not None  # noqa: S101 - set where trials begin
        if not self._trials.step(step_s):
            self._end_trials()

    def _end_trials(self) -> None:
        trials, self._trials = self._trials, None
        assert trials is not None  # noqa: S101 - the caller ran it
        trials.end()
        seen = self._known.seen
        assert seen is not None  # noqa: S101 - trials follow a look
        outcome: Any = None
        if trials.search is not None:
            search = trials.search
            best = search.incumbent
            if best is not None and math.isfinite(best.step_s):
                outcome = (
                    codec.encode(best.plan),
                    best.step_s,
                    self._known.ddp_step_s,
                    search.bound_s or None,
                    search.ended,
                    {"lost_s": search.lost_s, "trials": len(search.trials)},
                )
        outcome = self._board.shared(outcome)
        settled = Settled(
            workload=seen.workload, cluster=seen.cluster, plan=seen.plan, ddp=seen.ddp
        )
        why = "no plan could be measured"
        spent: dict[str, Any] = {}
        if outcome is None:
            settled = replace(settled, plan=settled.ddp)
        if outcome is not None:
            plan, step_s, ddp_step_s, bound_s, why, spent = outcome
            settled = replace(
                settled,
                plan=codec.decode(plan, Plan),
                step_s=step_s,
                ddp_step_s=ddp_step_s,
                bound_s=bound_s,
            )
        self._known.checked = None  # from here on this run knows better
        self._settle(settled, why=why, **spent)

    # 4. Settled.

    def _settle(
        self, settled: Settled, *, why: str = "as measured", **spent: Any
    ) -> None:
        chosen = settled.carried_out
        now = self._model.plan
        if now is None or now.digest != chosen.digest:
            self._model.apply_plan(chosen)
        self._model.release_unused_lanes()
        self._tell(
            "settled",
            why,
            plan=chosen.digest,
            step_s=settled.step_s,
            ddp_step_s=settled.ddp_step_s,
            bound_s=settled.bound_s,
            saved_ratio=settled.saved_ratio,
            **spent,
        )
        settled = replace(settled, story=self.story)
        self._do = None
        self.settled = True
        self._keep_nothing_more()
        before = self._settled
        self._settled = settled
        if self._watch is not None:
            better = before is None or before.carried_out.digest != chosen.digest
            self._watch.settled_again(settled.step_s, better=better)
        if self._options.watch:
            self._watch = self._watch or Watch(settled.step_s)
            self._do = self._look_out
        else:
            self.done = True
        if self._board.rank == 0:
            _log.info("%s", summary(settled))
            self._keep(settled)
        if self._on_settled is not None:
            self._on_settled(settled)

    def _keep_nothing_more(self) -> None:
        """The run may end: what is settled is kept, what was decided by hand is not."""
        if self._end is not None:
            self._end.detach()

    def _keep(self, settled: Settled) -> None:
        if settled.step_s is None or self._known.job is None or settled.remembered:
            return
        self._memory.remember(
            Remembered(
                job=self._known.job,
                plan=settled.carried_out,
                workload=settled.workload,
                cluster=settled.cluster,
                step_s=settled.step_s,
                ddp_step_s=settled.ddp_step_s,
            )
        )

    def _look_out(self, step_s: float) -> None:
        watch = self._watch
        assert watch is not None  # noqa: S101 - set where a plan settled
        median_s = watch.add(step_s)
        if median_s is None:
            return
        # Infinite on any rank is infinite on all: then nobody judges.
        (median_s,) = self._board.most(median_s)
        change = watch.judge(median_s)
        if change is None:
            return
        why = (
            f"steps took {format_s(change.before_s)} when it settled and take "
            f"{format_s(change.now_s)} now: searching again"
        )
        self._tell("changed", why, before_s=change.before_s, now_s=change.now_s)
        if self._board.rank == 0:
            _log.info("%s", why)
        self._profile()

    def _give_up(self, reason: Exception) -> None:
        self.settled = self.done = True
        self._do = None
        self._keep_nothing_more()
        self._model.apply_plan(None)
        self._tell("gave up", str(reason))
        if self._board.rank == 0:
            _log.warning("no plan could be made, DDP's own rule stays: %s", reason)

    # The story.

    @property
    def story(self) -> Tuning:
        """All that happened so far, and why."""
        return Tuning(name=self._name, events=tuple(self._known.events))

    def _tell(self, what: str, why: str, **values: Any) -> None:
        self._known.events.append(
            TuningEvent(step=self._known.steps, what=what, why=why, values=values)
        )


def _retargeted(plan: Plan, settled: Settled) -> Plan | None:
    """A plan made for another workload or none, with its prediction for this one."""
    try:
        return with_prediction(
            replace(plan, workload_digest=settled.workload.digest),
            settled.workload,
            settled.cluster,
        )
    except (Infeasible, SpecError):
        return None
