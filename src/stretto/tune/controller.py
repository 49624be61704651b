"""Run ``plan="auto"``: measure in the first steps, plan, try, settle, keep watching.

Every step trains. The phases of a run, in order:

1. ``WARM_UP``: a step with DDP's own buckets. DDP rebuilds them once, after that step;
   from then on all ranks know them, and a failure restores them at once.
2. ``CHECK``: an equal job's plan from an earlier run is applied; if its steps take as
   long as they took then, it is settled. If that run ended before tuning had settled,
   the search continues at 4 with the figures of that run's profile.
3. ``PROFILE``: the first steps are profiled, the network is probed, and the planner's
   plan is applied (`stretto.tune.initial_profile`).
4. ``SEARCH``: plans are tried while training continues (`stretto.tune.online_search`),
   within limits on steps and on lost time.
5. ``CONFIRM``: all ranks have settled on the best plan; it is logged.
6. ``WATCH``: step times are watched; a lasting change starts again at 3
   (`stretto.tune.drift_detector`).

The controller acts at the end of each reduced backward: DDP brings every rank there
equally often. Steps are counted there, ranks meet there
(`stretto.tune.tuning_meeting`), and plans change there. Nothing is done in a forward. A
failure on any rank is reported at the next meeting; then all ranks return to DDP's
buckets together, and one log line gives the reason. If a run ends before 5, rank 0
saves what is known (`stretto.tune.tuning_state`).
"""

from __future__ import annotations

import enum
import importlib
import math
import platform
import weakref
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast, final

import torch

from stretto._version import __version__
from stretto.errors import Infeasible, NoisyProfile, SpecError, StrettoError
from stretto.logs import get_logger
from stretto.planners.base import predicted_s
from stretto.runtime.weak_call import weakly
from stretto.schema import Plan, codec, tensors_digest
from stretto.schema.tuning import Tuning, TuningEvent
from stretto.tune.cached_plans import (
    PackedPlan,
    PlanCheck,
    ddp_step_s_at,
    decoded,
    encoded,
    packed,
    profile_again,
    settled_of,
)
from stretto.tune.calibration import CalibratedModel
from stretto.tune.drift_detector import WINDOW_STEPS, DriftDetector, StepTimeChange
from stretto.tune.evaluations import Evaluations
from stretto.tune.forced import (
    FORCED_STEP_S,
    ForcedProfiler,
    ForcedSearch,
    is_forced,
)
from stretto.tune.initial_profile import (
    InitialProfiler,
    ProfileResult,
    UnclearNetwork,
    deferred_plan,
)
from stretto.tune.online_search import Judgment, OnlineSearch
from stretto.tune.options import TuneOptions
from stretto.tune.plan_cache import (
    CachedPlan,
    PlanCache,
    TunedJob,
    default_path,
)
from stretto.tune.result import OnSettled, TuningResult, summary
from stretto.tune.starts import PROFILED, nearest_plan, retargeted, starts_of
from stretto.tune.tuning_meeting import (
    Ended,
    Refused,
    Stopped,
    TuningMeeting,
    reason_of,
)
from stretto.tune.tuning_state import TuningState, save_unfinished, within
from stretto.units import format_s

if TYPE_CHECKING:
    from stretto.runtime import DistributedDataParallel
    from stretto.tune.tuning_state import OnUnfinished

_log = get_logger(__name__)

WARM_UP_STEPS = 1
"""DDP rebuilds its buckets after the first step."""

WAIT_STEPS = (50, 500)
"""Steps from a profile that found the network too noisy to the next one. A neighbor's
burst of traffic ends at some time; the last profile's failure ends tuning."""

CACHE_S = 2.0
"""Training waits at most this long for the plan cache's disk."""


class Phase(enum.Enum):
    """The phase of tuning; equal on all ranks at every meeting."""

    WARM_UP = "warm up"
    CHECK = "check"
    PROFILE = "profile"
    WAIT = "wait"
    SEARCH = "search"
    CONFIRM = "confirm"
    WATCH = "watch"
    OVER = "over"


class StepReport(TypedDict):
    """Each rank's message to a meeting, about the step that ends there."""

    step_s: float | None
    """``None`` if the step does not count; in `Phase.WATCH` a median."""

    host: str

    trial: NotRequired[list[float | None]]
    """In `Phase.SEARCH`, the message of `OnlineSearch` or `ForcedSearch`."""


class MeetingAnswer(TypedDict):
    """Rank 0's answer; all ranks act on it."""

    step_s: float | None
    """``None`` if the step does not count on every rank."""

    hosts: NotRequired[int]
    """In `Phase.WARM_UP`."""

    offer: NotRequired[PackedPlan | None]
    """In `Phase.WARM_UP`, an equal job's plan (`cached_plans.packed`), or ``None``."""

    trial: NotRequired[Judgment]
    """In `Phase.SEARCH`, what the search judged."""


@final
class AutoPlan:
    """Take one model from its first step to a plan, and keep watching it."""

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
        forward: bool = False,
    ) -> None:
        """Prepare; tuning starts at the end of the first reduced backward.

        With ``forward`` a plan's communication may overlap with the next forward.

        The model is not kept alive. ``on_unfinished`` is called on rank 0 if the run
        ends before tuning has settled; it must not hold a reference to the model.
        """
        # The model owns this object.
        self._model = cast("DistributedDataParallel", weakref.proxy(model))
        self._name = name
        self._planner = planner
        self._wire_dtype = wire_dtype
        self._on_settled = on_settled
        self._options = options or TuneOptions()
        self._forward = forward
        ranks = model._ranks  # noqa: SLF001
        self._rank_name = ranks.name(ranks.rank)
        self._sync = TuningMeeting(ranks, serial=model._agreement.serial)  # noqa: SLF001
        self._forced = is_forced()
        caches = (
            self._options.plan_cache
            and self._options.model
            and self._sync.rank == 0
            and not self._forced
        )
        self._cache = PlanCache(default_path() if caches else None)
        if self._sync.rank == 0:
            # A fit imports it, which takes 0.25 s; import it now, not during a step.
            importlib.import_module("scipy.optimize")
        self._known = TuningState(name=name)
        self._end: weakref.finalize[..., Any] | None = None
        if self._sync.rank == 0:
            self._end = weakref.finalize(
                model, save_unfinished, self._known, self._cache, on_unfinished
            )
        self._phase = Phase.WARM_UP
        self._next_meeting = WARM_UP_STEPS
        self._failed: str | None = None
        self._began_s: float | None = None
        self._evaluations = Evaluations()
        self._trained_s = 0.0
        self._hosts = 1
        self._profiler: InitialProfiler | ForcedProfiler | None = None
        self._profiled_from: tuple[int, float] | None = None
        """The step after which the last profile began, and when."""
        self._waits = 0
        """Profiles that failed since the last one that did not."""
        self._failed_probes_s = 0.0
        self._online: OnlineSearch | ForcedSearch | None = None
        self._continues = False
        self._checking: PlanCheck | None = None
        self._watch: DriftDetector | None = None
        self._settled: TuningResult | None = None
        self._median_s: float | None = None
        self._rank0_record: Tuning | None = None
        self.settled = False
        """Whether a plan has settled; a lasting change may reopen the search."""
        self.done = False
        """Whether tuning is over for the rest of the run."""

    def reduced(self) -> None:
        """Record the end of a reduced backward; must be called on every rank."""
        if self.done or self._joining():
            return
        if self._online is not None and self._model.device_type == "cuda":
            # Trials compare step lengths, which the host sees only after a
            # synchronization.
            torch.cuda.synchronize()
        now_s = perf_counter()
        step_s = math.inf if self._began_s is None else now_s - self._began_s
        counts = not self._evaluations.end_step() and math.isfinite(step_s)
        self._known.steps += 1
        if counts:
            self._trained_s += step_s
        try:
            self._record_step(step_s, counts=counts)
        except Exception as exc:  # noqa: BLE001 - all ranks learn of it when they meet
            self._failed = self._failed or self._describe(exc)
        if self._known.steps >= self._next_meeting:
            self._meet(step_s if counts else None)
        self._watch_reads()
        self._began_s = perf_counter()

    def _watch_reads(self) -> None:
        """In a profile, watch what the program does until the next forward."""
        if self._profiler is not None:
            try:
                self._profiler.watch_reads()
            except Exception as exc:  # noqa: BLE001 - all ranks learn of it
                self._failed = self._failed or self._describe(exc)

    def evaluated(self) -> None:
        """Record that the model is used without training: the step is longer."""
        self._evaluations.add()

    def abandon(self, reason: str) -> None:
        """End tuning in its current state; the caller decides which plan stays."""
        self._end_parts()
        self._record("gave up", reason)
        self.settled = True
        self._finish()

    def _joining(self) -> bool:
        """Whether ranks may have different numbers of steps (``join``)."""
        config = getattr(self._model, "_join_config", None)
        return bool(config is not None and config.enable)

    # The meeting at the end of a step.

    def _record_step(self, step_s: float, *, counts: bool) -> None:
        """Record what this rank alone sees of a step."""
        if self._phase is Phase.PROFILE and self._profiler is not None:
            self._profiler.step_ended(step_s, counts=counts)
        elif self._phase is Phase.SEARCH and self._online is not None:
            self._online.note(step_s if counts else math.inf)
        elif self._phase is Phase.WATCH and self._watch is not None:
            self._median_s = self._watch.add(step_s if counts else math.inf)

    def _meet(self, step_s: float | None) -> None:
        message: StepReport = {"step_s": step_s, "host": platform.node()}
        if self._phase is Phase.SEARCH and self._online is not None:
            message["trial"] = self._online.message()
        if self._phase is Phase.WATCH:
            median_s = self._median_s
            finite = median_s is not None and math.isfinite(median_s)
            message["step_s"] = median_s if finite else None
        try:
            found = self._sync.begin(
                self._known.steps, message, self._judge, failed=self._failed
            )
        except Stopped as exc:
            self._fall_back(str(exc))
            return
        self._plan_meeting()
        try:
            self._act(found)
        except Ended as exc:
            # Lanes may be closed: no step may use them.
            self._fall_back(str(exc))
            return
        except Stopped as exc:
            self._failed = str(exc)
        except Exception as exc:  # noqa: BLE001 - the others must learn of it
            is_ours = isinstance(exc, StrettoError)
            self._failed = str(exc) if is_ours else self._describe(exc)
            self._sync.fail(self._failed)
        if self._phase is Phase.SEARCH and self._online is not None:
            # Also on a rank that has failed since: the others arrive no earlier.
            self._next_meeting = self._known.steps + self._online.ahead

    def _plan_meeting(self) -> None:
        """Set the step of the next meeting, at a point that all ranks reach."""
        steps = WINDOW_STEPS if self._phase is Phase.WATCH else 1
        self._next_meeting = self._known.steps + steps

    def _judge(self, messages: list[StepReport]) -> MeetingAnswer:
        """Return rank 0's answer to all ranks' messages.

        All ranks end a reduced backward together, so rank 0's clock is enough.
        """
        steps_s = [message["step_s"] for message in messages]
        found: MeetingAnswer = {"step_s": None if None in steps_s else steps_s[0]}
        if self._phase is Phase.WARM_UP:
            hosts = self._count_hosts([message["host"] for message in messages])
            found["hosts"], found["offer"] = hosts, self._cached_plan(hosts)
        elif self._phase is Phase.SEARCH and self._online is not None:
            found["trial"] = self._online.judge([row["trial"] for row in messages])
        return found

    def _act(self, found: MeetingAnswer) -> None:
        """Run this phase's work at the end of a step, the same on all ranks."""
        step_s = math.inf if found["step_s"] is None else float(found["step_s"])
        match self._phase:
            case Phase.WARM_UP:
                self._start(found["hosts"], found["offer"])
            case Phase.CHECK:
                self._check(step_s)
            case Phase.PROFILE:
                self._profile_step()
            case Phase.WAIT:
                self._profile()
            case Phase.SEARCH:
                self._trial_step(found["trial"])
            case Phase.CONFIRM:
                self._confirmed()
            case Phase.WATCH:
                self._watch_step(step_s)
            case Phase.OVER:
                pass

    def _change(self, plan: Plan) -> None:
        """Apply a plan on all ranks.

        Raises:
            Refused: on all ranks, when one of them can't apply it; nothing has changed.
        """
        now = self._model._own_plan  # noqa: SLF001
        if now is None or now.digest != plan.digest:
            self._model._change_plan(plan, self._sync.agree)  # noqa: SLF001

    def _describe(self, exc: BaseException) -> str:
        """Return an error of this rank as it is reported to the others."""
        _log.debug("tuning failed on this rank", exc_info=exc)
        return f"{self._rank_name}: {reason_of(exc)}"

    def _fall_back(self, reason: str) -> None:
        """Return to DDP's buckets; all ranks call this at the end of the same step."""
        self._end_parts()
        self._model._restore_rule()  # noqa: SLF001
        self._model._release_lanes()  # noqa: SLF001
        self._record("gave up", reason)
        self.settled = True
        self._finish()
        if self._sync.rank == 0:
            _log.warning("cannot make a plan, DDP's own rule stays in use: %s", reason)

    def _end_parts(self) -> None:
        profiler, self._profiler = self._profiler, None
        trials, self._online = self._online, None
        for part in (profiler, trials):
            try:
                if part is not None:
                    part.abandon()
            except Exception:  # noqa: BLE001 - tuning is over whatever happens here
                _log.debug("cannot end the profile or the trials", exc_info=True)

    def _finish(self) -> None:
        self._phase = Phase.OVER
        self.done = True
        self._stop_recording()

    # WARM_UP and CHECK: an equal job's plan of an earlier run.

    def _count_hosts(self, names: list[str]) -> int:
        """Return the number of hosts; each has the same number of ranks."""
        hosts = len(set(names))
        return hosts if self._sync.size % hosts == 0 else self._sync.size

    def _cached_plan(self, hosts: int) -> PackedPlan | None:
        """Return an equal job's cached plan as a message, or ``None``; on rank 0."""
        job = self._job(hosts)
        found = within(
            CACHE_S, partial(self._cache.exact, job), what="reading the plan cache"
        )
        self._known.checked = found
        return None if found is None else packed(found)

    def _job(self, hosts: int) -> TunedJob:
        rows = sorted(self._model.tensor_table())
        return TunedJob(
            name=self._name,
            model=tensors_digest(rows),
            hosts=hosts,
            ranks_per_host=self._sync.size // hosts,
            environment=(
                f"stretto {__version__}, torch {torch.__version__}, "
                f"{self._model.device_type}, "
                f"{self._model._lane_backend}"  # noqa: SLF001
                f"{f', wire {self._wire_dtype}' if self._wire_dtype else ''}"
                f"{', during forward' if self._forward else ''}"
            ),
        )

    def _start(self, hosts: int, offer: PackedPlan | None) -> None:
        self._hosts = hosts
        self._known.job = self._job(hosts)
        found, self._known.checked = self._known.checked, None
        self._record("started", "first step", ranks=self._sync.size, hosts=hosts)
        self._model._rebuild_rule()  # noqa: SLF001
        if offer is not None:
            plan, step_s, ddp_step_s, unfinished_steps = offer
            if self._try_cached(codec.decode(plan, Plan)):
                unfinished = unfinished_steps is not None
                who = "an equal job settled it"
                if unfinished:
                    who = f"best of {unfinished_steps} steps of an equal job"
                self._record(
                    "remembered",
                    f"{who}: {format_s(step_s)} a step then",
                    step_s=step_s,
                    ddp_step_s=ddp_step_s,
                )
                self._known.checked = found
                self._continues = unfinished and self._options.steps > 0
                self._checking = PlanCheck(step_s)
                self._phase = Phase.CHECK
                return
        self._profile()

    def _try_cached(self, plan: Plan) -> bool:
        try:
            self._change(plan)
        except Refused:
            return False
        return True

    def _check(self, step_s: float) -> None:
        checking = self._checking
        assert checking is not None  # noqa: S101 - set where the phase begins
        now_s = checking.add(step_s)
        if now_s is None:
            return
        if checking.is_slower(now_s):
            self._record(
                "changed",
                f"its step now takes {format_s(now_s)}: measuring again"
                if math.isfinite(now_s)
                else "no step of it could be counted: measuring again",
            )
            self._known.stale = True
            self._profile()
            return
        if not self._continues:
            self._settle_cached(now_s)
        elif checking.is_faster(now_s):
            why = f"its step takes only {format_s(now_s)} now: measuring again"
            self._record("changed", why)
            self._known.stale = True
            self._profile()
        else:
            self._continue()

    def _settle_cached(self, now_s: float) -> None:
        offer: tuple[dict[str, Any], float | None] | None = None
        found = self._known.checked
        if found is not None:
            ddp_step_s = ddp_step_s_at(found, now_s)
            offer = encoded(settled_of(found, now_s)), ddp_step_s
        parts, ddp_step_s = self._sync.broadcast_object(offer)
        self._settle(
            TuningResult(
                **decoded(parts), step_s=now_s, ddp_step_s=ddp_step_s, from_cache=True
            )
        )

    def _continue(self) -> None:
        """Search on from a plan whose step time is unchanged; do not profile again."""
        offer: dict[str, Any] | str | None = None
        found = self._known.checked
        if found is not None:
            try:
                offer = encoded(
                    profile_again(
                        found, planner=self._planner, wire_dtype=self._wire_dtype
                    )
                )
            except (Infeasible, SpecError) as exc:
                offer = str(exc)
        given: dict[str, Any] | str = self._sync.broadcast_object(offer)
        if isinstance(given, str):
            self._record("changed", f"{given}: measuring again")
            self._profile()
            return
        self._planned(ProfileResult(**decoded(given), probe_s=0.0))

    # PROFILE: a profile of the first steps and the network, and its plan.

    def _profile(self) -> None:
        if self._forced:
            self._profiler = ForcedProfiler(
                self._model,
                self._sync,
                change=weakly(self._change),
                forward=self._forward,
            )
        else:
            self._profiler = InitialProfiler(
                self._model,
                self._sync,
                name=self._name,
                planner=self._planner,
                wire_dtype=self._wire_dtype,
                hosts=self._hosts,
                change=weakly(self._change),
                forward=self._forward,
            )
        self._phase = Phase.PROFILE
        self._profiled_from = self._known.steps, perf_counter()
        self._profiler.start()
        self._plan_meeting()  # after a meeting, so on all ranks or none

    def _profile_step(self) -> None:
        assert self._profiler is not None  # noqa: S101 - set where the phase begins
        try:
            profile = self._profiler.advance()
        except UnclearNetwork as exc:
            if self._waits == len(WAIT_STEPS):
                raise NoisyProfile(f"{exc} ({self._waits + 1} attempts)") from exc
            self._wait(exc)
            return
        if profile is None:
            return
        self._profiler = None
        self._waits = 0
        self._record(
            "profiled",
            "steps with deferred communication, then the network",
            forward_s=profile.workload.forward_s,
            backward_s=profile.workload.backward_s,
            probe_s=profile.probe_s,
            flow_bytes_per_s=profile.cluster.bottleneck.flow_bytes_per_s,
            link_bytes_per_s=profile.cluster.bottleneck.bandwidth_bytes_per_s,
        )
        self._planned(profile)

    def _wait(self, exc: UnclearNetwork) -> None:
        """Continue with the plan of before, and profile again later."""
        self._profiler = None
        self._failed_probes_s += exc.probe_s
        if self._settled is None:
            self._model._restore_rule()  # noqa: SLF001
        else:
            self._change(self._settled.executed)
        steps = WAIT_STEPS[self._waits]
        self._waits += 1
        self._phase = Phase.WAIT
        self._next_meeting = self._known.steps + steps
        why = f"cannot measure the network: {exc}; next attempt in {steps} steps"
        self._record("profiled", why, probe_s=exc.probe_s)
        if self._sync.rank == 0:
            _log.info("%s", why)

    def _planned(self, profile: ProfileResult) -> None:
        self._known.profile = profile
        self._record(
            "planned",
            f"{self._planner} under the fitted model",
            plan=profile.plan.digest,
            predicted_s=predicted_s(profile.plan),
            ddp_predicted_s=predicted_s(profile.ddp),
        )
        self._record_forward(profile)
        self._begin_search(profile)

    def _record_forward(self, profile: ProfileResult) -> None:
        if profile.forward is not None:
            self._record(
                "planned",
                "overlap with the next forward is predicted to be faster",
                plan=profile.forward.digest,
                predicted_s=predicted_s(profile.forward),
            )
        elif profile.no_forward is not None:
            self._record("planned", f"no overlap with forward: {profile.no_forward}")

    # SEARCH: trials.

    def _begin_search(self, profile: ProfileResult) -> None:
        settled = TuningResult(
            workload=profile.workload,
            cluster=profile.cluster,
            plan=profile.plan,
            ddp=profile.ddp,
            no_forward=profile.no_forward,
        )
        if self._forced:
            self._try_forced()
            return
        if self._options.steps == 0:
            self._settle(replace(settled, plan=profile.forward or profile.plan))
            return
        calibrated = None
        starts: list[tuple[str, Plan]] = []
        if self._sync.rank == 0:
            calibrated = CalibratedModel(
                profile.workload,
                profile.cluster,
                planner=self._planner,
                wire_dtype=self._wire_dtype,
                forward=profile.may_forward,
            )
            starts = self._starts(settled, calibrated)
        seen_s = {
            plan.digest: profile.deferred_s
            for name, plan in starts
            if name == PROFILED and profile.deferred_s is not None
        }
        left = self._known.steps_left(self._options.steps)  # rank 0 alone knows
        self._online = OnlineSearch(
            self._model,
            self._sync,
            calibrated=calibrated,
            starts=starts,
            options=replace(self._options, steps=left),
            record=weakly(self._record),
            baseline=settled.ddp,
            seen_s=seen_s,
            trained_s=self._trained_since(profile, left),
            lost_before_s=self._lost_in_profile(profile),
            change=weakly(self._change),
        )
        self._known.search = self._online.search
        self._phase = Phase.SEARCH
        if not self._online.begin():
            self._end_trials()

    def _trained_since(self, profile: ProfileResult, steps: int) -> float:
        """Return the time trained since the last search, which sets this one's budget.

        At most ``steps`` steps count: a search that reopens after days must not lose
        hours.
        """
        trained_s, self._trained_s = self._trained_s, 0.0
        return min(
            trained_s,
            steps * (profile.workload.forward_s + profile.workload.backward_s),
        )

    def _lost_in_profile(self, profile: ProfileResult) -> float:
        """Return the time lost since the last settled plan, compared with this plan."""
        lost_s, self._failed_probes_s = self._failed_probes_s, 0.0
        if self._profiled_from is None:
            return lost_s
        (step, at_s), self._profiled_from = self._profiled_from, None
        steps = self._known.steps - step
        took_s = perf_counter() - at_s
        return lost_s + max(0.0, took_s - steps * predicted_s(profile.plan))

    def _try_forced(self) -> None:
        self._online = ForcedSearch(self._model, self._sync, weakly(self._change))
        self._phase = Phase.SEARCH
        self._online.begin()

    def _starts(
        self, settled: TuningResult, calibrated: CalibratedModel
    ) -> list[tuple[str, Plan]]:
        checked = self._known.checked
        before = None
        if self._settled is not None:
            before = self._settled.executed
        elif checked is not None:
            before = checked.plan
        nearest = None
        if before is None and self._options.model:
            assert self._known.job is not None  # noqa: S101 - set where tuning starts
            nearest = nearest_plan(
                self._cache, self._known.job, calibrated, self._record
            )
        return starts_of(
            planned=settled.plan,
            ddp=settled.ddp,
            forward=self._profiled_forward(),
            model=self._options.model,
            before=None
            if before is None
            else retargeted(before, settled.workload, settled.cluster),
            stale=self._known.stale,
            nearest=nearest,
            profiled=self._profiled(settled),
        )

    def _profiled_forward(self) -> Plan | None:
        profile = self._known.profile
        return None if profile is None else profile.forward

    def _profiled(self, settled: TuningResult) -> Plan | None:
        """Return the plan of the profiled steps, whose step time is known."""
        profile = self._known.profile
        if (
            profile is None
            or profile.deferred_s is None
            or self._wire_dtype is not None
        ):
            return None
        return retargeted(deferred_plan(self._model), settled.workload, settled.cluster)

    def _trial_step(self, found: Judgment) -> None:
        assert self._online is not None  # noqa: S101 - set where trials begin
        if not self._online.advance(found):
            self._end_trials()

    def _end_trials(self) -> None:
        trials, self._online = self._online, None
        assert trials is not None  # noqa: S101 - the caller ran it
        trials.abandon()
        profile = self._known.profile
        assert profile is not None  # noqa: S101 - trials follow a profile
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
        outcome = self._sync.broadcast_object(outcome)
        settled = TuningResult(
            workload=profile.workload,
            cluster=profile.cluster,
            plan=profile.plan,
            ddp=profile.ddp,
        )
        why = "no plan could be measured"
        spent: dict[str, Any] = {}
        if self._forced:
            settled = replace(settled, step_s=FORCED_STEP_S)
            why = "forced"
        elif outcome is None:
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
        settled = replace(settled, no_forward=_no_forward(profile, settled.executed))
        self._known.checked = None  # this run's own figures replace it
        self._settle(settled, why=why, **spent)

    # CONFIRM and WATCH: a settled plan.

    def _settle(
        self, settled: TuningResult, *, why: str = "as measured", **spent: Any
    ) -> None:
        chosen = settled.executed
        self._change(chosen)
        self._model.release_unused_lanes()
        self._record(
            "settled",
            why,
            plan=chosen.digest,
            step_s=settled.step_s,
            ddp_step_s=settled.ddp_step_s,
            bound_s=settled.bound_s,
            saved_ratio=settled.saved_ratio,
            **spent,
        )
        # Only rank 0 has the complete record, because it decides.
        self._rank0_record = codec.decode(
            self._sync.broadcast_object(codec.encode(self.record)), Tuning
        )
        settled = replace(settled, record=self._rank0_record)
        self._phase = Phase.CONFIRM
        self.settled = True
        self._stop_recording()
        before = self._settled
        self._settled = settled
        if self._watch is not None:
            better = before is None or before.executed.digest != chosen.digest
            self._watch.settled_again(settled.step_s, better=better)
        elif self._options.watch:
            self._watch = DriftDetector(settled.step_s)
        if self._sync.rank == 0:
            _log.show(summary(settled))
            if settled.no_forward is not None:
                _log.show(f"no overlap with forward: {settled.no_forward}")
            within(CACHE_S, partial(self._keep, settled), what="writing the plan cache")
        if self._on_settled is not None:
            self._on_settled(settled)

    def _confirmed(self) -> None:
        """Continue after all ranks have settled and run the user's callback."""
        if not self._options.watch:
            self._finish()
            return
        self._phase = Phase.WATCH
        self._plan_meeting()

    def _stop_recording(self) -> None:
        """Cancel the save at the end of the run; a decided plan needs none."""
        if self._end is not None:
            self._end.detach()

    def _keep(self, settled: TuningResult) -> None:
        if settled.step_s is None or self._known.job is None or settled.from_cache:
            return
        self._cache.store(
            CachedPlan(
                job=self._known.job,
                plan=settled.executed,
                workload=settled.workload,
                cluster=settled.cluster,
                step_s=settled.step_s,
                ddp_step_s=settled.ddp_step_s,
            )
        )

    def _watch_step(self, median_s: float) -> None:
        """Judge a window of steps; a value infinite on any rank is infinite on all."""
        watch = self._watch
        assert watch is not None  # noqa: S101 - set where a plan settled
        change = self._forced_change() if self._forced else watch.judge(median_s)
        if change is None:
            return
        why = (
            f"steps took {format_s(change.before_s)} when it settled and take "
            f"{format_s(change.now_s)} now: searching again"
        )
        self._record("changed", why, before_s=change.before_s, now_s=change.now_s)
        if self._sync.rank == 0:
            _log.info("%s", why)
        self._profile()

    def _forced_change(self) -> StepTimeChange | None:
        """Reopen the search once, after the first window."""
        again = sum(event.what == "changed" for event in self._known.events)
        return (
            None
            if again
            else StepTimeChange(before_s=FORCED_STEP_S, now_s=FORCED_STEP_S)
        )

    # The record of events.

    @property
    def record(self) -> Tuning:
        """All events so far with their reasons; rank 0 shares them at the end."""
        if self._rank0_record is not None and self._sync.rank != 0:
            return self._rank0_record
        return Tuning(name=self._name, events=tuple(self._known.events))

    story = record  # its former name

    def _record(self, what: str, why: str, **values: Any) -> None:
        self._known.events.append(
            TuningEvent(step=self._known.steps, what=what, why=why, values=values)
        )


def _no_forward(profile: ProfileResult, chosen: Plan) -> str | None:
    """Return why the plan chosen after trials does not overlap with forward."""
    if chosen.overlap == "forward":
        return None
    if profile.forward is None:
        return profile.no_forward
    return "no such plan was shown to be faster"
