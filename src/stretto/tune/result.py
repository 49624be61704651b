"""The result of tuning, and its one-line summary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.schema import Cluster, Plan, Workload
from stretto.schema.tuning import Tuning
from stretto.units import counted, format_s

MIN_GAIN_RATIO = 0.02
"""A plan predicted to save less than this, and not tried, is not applied."""

BOUND_HOLDS_RATIO = 1.10
"""If the bound exceeds the step by more than this ratio, the bound is wrong; a smaller
excess is within the error of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """The measurements and the decision; equal on all ranks."""

    workload: Workload

    cluster: Cluster

    plan: Plan
    """The best plan found; it is executed if ``applied``."""

    ddp: Plan
    """DDP's rule with its default buckets, predicted under the same model."""

    step_s: float | None = None
    """Median step of the executed plan on the slowest rank; ``None`` if not tried."""

    ddp_step_s: float | None = None
    """The same with DDP's buckets, measured in alternation with the plan and scaled to
    the machine's speed of ``step_s``; ``None`` if not measured."""

    bound_s: float | None = None
    """Lower bound on any plan's step time under the model."""

    record: Tuning | None = None
    """The events that led to the decision."""

    from_cache: bool = False
    """Whether it is the plan of an earlier run."""

    no_forward: str | None = None
    """With ``overlap="auto"``, why communication does not overlap with the next
    forward; ``None`` if it does, or if the plan is of an earlier run."""

    @property
    def story(self) -> Tuning | None:
        """`record`, under its former name."""
        return self.record

    @property
    def remembered(self) -> bool:
        """`from_cache`, under its former name."""
        return self.from_cache

    @property
    def applied(self) -> bool:
        """Whether the plan is executed instead of DDP's rule.

        Measured steps decide if there are any, otherwise the prediction.
        """
        if self.step_s is not None:
            return self.plan.digest != self.ddp.digest
        return self.saved_ratio >= MIN_GAIN_RATIO

    @property
    def executed(self) -> Plan:
        """The plan that the next steps execute: ours, or DDP's buckets on one lane.

        DDP's buckets go through the runtime too, so that an error can name a lost rank.
        """
        return self.plan if self.applied else self.ddp

    @property
    def saved_ratio(self) -> float:
        """Share of DDP's step that the plan saves: measured, or else predicted."""
        measured = self.measured_saved_ratio
        return self.predicted_saved_ratio if measured is None else measured

    @property
    def measured_saved_ratio(self) -> float | None:
        """The measured share, or ``None`` if either step time is missing."""
        if self.step_s is None or self.ddp_step_s is None:
            return None
        return 1 - self.step_s / self.ddp_step_s

    @property
    def predicted_saved_ratio(self) -> float:
        """The share predicted by the model; 0 without a prediction."""
        ours, theirs = self.plan.predicted, self.ddp.predicted
        if ours is None or theirs is None or theirs.iteration_s == 0:
            return 0.0
        return 1 - ours.iteration_s / theirs.iteration_s


OnSettled = Callable[[TuningResult], None]


def summary(settled: TuningResult) -> str:
    """Return one line: the choice, its saving, and its distance from the bound."""
    parts = [_gain(settled)]
    if settled.step_s is not None and settled.bound_s is not None:
        parts.append(_against_bound(settled.step_s, settled.bound_s))
    figures = ", ".join(parts)
    if not settled.applied:
        return f"DDP's buckets kept: {figures}"
    plan = settled.plan
    word = "remembered" if settled.from_cache else "planned"
    extent = ", also during the next forward" if plan.overlap == "forward" else ""
    return (
        f"{word}: {_buckets_of(plan)} on {counted(_lanes_used(plan), 'lane')}{extent}; "
        f"{figures}"
    )


def _buckets_of(plan: Plan) -> str:
    """Describe a plan's buckets, with their slices where any is cut."""
    buckets = counted(len(plan.buckets), "bucket")
    slices = sorted({bucket.slices for bucket in plan.buckets})
    if slices == [1]:
        return buckets
    if len(plan.buckets) == 1:
        return f"{buckets} in {slices[0]} slices"
    numbers = " to ".join(str(s) for s in (slices[0], slices[-1])[: len(slices)])
    return f"{buckets} of {numbers} slices each"


def _lanes_used(plan: Plan) -> int:
    """Return the number of lanes with a slice, which may be fewer than are open."""
    return len(
        {
            (bucket.lane + i) % plan.lanes
            for bucket in plan.buckets
            for i in range(bucket.slices)
        }
    )


def _gain(settled: TuningResult) -> str:
    """Return both step times on one basis: measured in alternation, or predicted."""
    measured = settled.measured_saved_ratio
    if measured is not None:
        assert settled.step_s is not None  # noqa: S101 - the ratio needs both
        assert settled.ddp_step_s is not None  # noqa: S101
        if not settled.applied:
            return (
                f"measured step {format_s(settled.step_s)}, no "
                "plan was faster by more than the noise"
            )
        when = " when it settled" if settled.from_cache else ""
        return (
            f"measured step {format_s(settled.step_s)} against "
            f"{format_s(settled.ddp_step_s)} with DDP's buckets "
            f"({100 * measured:.0f} % saved{when})"
        )
    ours, theirs = settled.plan.predicted, settled.ddp.predicted
    now = ""
    if settled.step_s is not None:
        now = f"measured step {format_s(settled.step_s)}; "
    if ours is None or theirs is None:
        return f"{now}no prediction"
    line = (
        f"{now}predicted step {format_s(ours.iteration_s)} against "
        f"{format_s(theirs.iteration_s)} predicted with DDP's buckets "
        f"({100 * settled.predicted_saved_ratio:.0f} % saved)"
    )
    if settled.step_s is None:
        scope = f" with {ours.bound_scope}" if ours.bound_scope else ""
        line += f", no plan{scope} can be faster than {format_s(ours.lower_bound_s)}"
    return line


def _against_bound(step_s: float, bound_s: float) -> str:
    share = bound_s / step_s
    if share > BOUND_HOLDS_RATIO:
        return (
            f"below the lower bound of {format_s(bound_s)}: the profile was taken on a "
            "busier machine, and its bound does not hold"
        )
    if share > 1:
        return "as fast as the lower bound, within its error"
    return f"{1 / share:.2f} times the lower bound"
