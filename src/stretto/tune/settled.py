"""What tuning found and decided, and the line that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.schema import Cluster, Plan, Workload
from stretto.schema.tuning import Tuning
from stretto.units import format_s

LEAST_GAIN_RATIO = 0.02
"""A plan predicted to save less than this, and not tried, leaves DDP as it is."""

BOUND_HOLDS_RATIO = 1.10
"""A step shorter than the bound by more than this shows that the bound is wrong; below
that it is the error of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What was measured and decided; equal on all ranks."""

    workload: Workload

    cluster: Cluster

    plan: Plan
    """The best plan found, carried out where ``applied``."""

    ddp: Plan
    """DDP's rule with its default buckets, predicted under the same model."""

    step_s: float | None = None
    """Median step of what is carried out, the slowest rank's; ``None``: not tried."""

    ddp_step_s: float | None = None
    """The same with DDP's buckets, measured in turns with the plan and given at the
    machine's speed of ``step_s``; ``None``: not measured."""

    bound_s: float | None = None
    """What no plan's step can be shorter than under the model."""

    story: Tuning | None = None
    """How it came to this."""

    remembered: bool = False
    """Whether an earlier run's plan was taken over."""

    @property
    def applied(self) -> bool:
        """Whether the plan is carried out instead of DDP's rule.

        Steps decide where they were measured, else the prediction.
        """
        if self.step_s is not None:
            return self.plan.digest != self.ddp.digest
        return self.saved_ratio >= LEAST_GAIN_RATIO

    @property
    def carried_out(self) -> Plan:
        """What the steps that follow do: the plan, or DDP's buckets on one lane.

        These go through the runtime too, so that a rank that is lost is named.
        """
        return self.plan if self.applied else self.ddp

    @property
    def saved_ratio(self) -> float:
        """Share of DDP's step that the plan saves: measured, or else predicted."""
        measured = self.measured_saved_ratio
        return self.predicted_saved_ratio if measured is None else measured

    @property
    def measured_saved_ratio(self) -> float | None:
        """The share as measured in turns; ``None`` where one was not measured."""
        if self.step_s is None or self.ddp_step_s is None:
            return None
        return 1 - self.step_s / self.ddp_step_s

    @property
    def predicted_saved_ratio(self) -> float:
        """The share as predicted by the model; 0 without a prediction."""
        ours, theirs = self.plan.predicted, self.ddp.predicted
        if ours is None or theirs is None or theirs.iteration_s == 0:
            return 0.0
        return 1 - ours.iteration_s / theirs.iteration_s


OnSettled = Callable[[Settled], None]


def summary(settled: Settled) -> str:
    """Return one line: what was chosen, what it saves, and how near the bound it is."""
    parts = [_gain(settled)]
    if settled.step_s is not None and settled.bound_s is not None:
        parts.append(_against_bound(settled.step_s, settled.bound_s))
    figures = ", ".join(parts)
    if not settled.applied:
        return f"left as DDP does it: {figures}"
    plan = settled.plan
    slices = sorted({bucket.slices for bucket in plan.buckets})
    numbers = "-".join(str(s) for s in (slices[0], slices[-1])[: len(slices)])
    word = "remembered" if settled.remembered else "planned"
    return (
        f"{word}: {_count(len(plan.buckets), 'bucket')} in {numbers} "
        f"slice{'s' if slices[-1] > 1 else ''} on {_count(plan.lanes, 'lane')}; "
        f"{figures}"
    )


def _gain(settled: Settled) -> str:
    """Both numbers on one basis: measured in turns, or predicted."""
    measured = settled.measured_saved_ratio
    if measured is not None:
        assert settled.step_s is not None  # noqa: S101 - the ratio needs both
        assert settled.ddp_step_s is not None  # noqa: S101
        if not settled.applied:
            return (
                f"measured step {format_s(settled.step_s)} with DDP's buckets, no "
                "plan was faster by more than the noise"
            )
        when = " when it settled" if settled.remembered else ""
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
            f"below the bound of {format_s(bound_s)}: the profile was taken on a "
            "busier machine, and its bound does not hold"
        )
    if share > 1:
        return "as fast as the bound, within its error"
    return f"{100 * share:.0f} % of the bound"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
