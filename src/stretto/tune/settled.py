"""What tuning found and decided, and the line that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.schema import Cluster, Plan, Workload
from stretto.schema.tuning import Tuning
from stretto.units import format_s

LEAST_GAIN_RATIO = 0.02
"""A plan predicted to save less than this, and not tried, leaves DDP as it is."""


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
    """The same of DDP's buckets; ``None``: not tried."""

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
        if self.step_s is not None and self.ddp_step_s is not None:
            return 1 - self.step_s / self.ddp_step_s
        ours, theirs = self.plan.predicted, self.ddp.predicted
        if ours is None or theirs is None or theirs.iteration_s == 0:
            return 0.0
        return 1 - ours.iteration_s / theirs.iteration_s


OnSettled = Callable[[Settled], None]


def summary(settled: Settled) -> str:
    """One line: what was chosen, what it saves, and how near the bound it is."""
    figures = _figures(settled)
    if not settled.applied:
        return f"left as DDP does it: {figures}"
    plan = settled.plan
    slices = sorted({bucket.slices for bucket in plan.buckets})
    parts = "-".join(str(s) for s in (slices[0], slices[-1])[: len(slices)])
    word = "remembered" if settled.remembered else "planned"
    return (
        f"{word}: {_count(len(plan.buckets), 'bucket')} in {parts} "
        f"slice{'s' if slices[-1] > 1 else ''} on {_count(plan.lanes, 'lane')}; "
        f"{figures}"
    )


def _figures(settled: Settled) -> str:
    ours, theirs = settled.plan.predicted, settled.ddp.predicted
    if ours is None or theirs is None:
        return "no prediction"
    saved = f"({100 * settled.saved_ratio:.0f} % saved)"
    if settled.step_s is None:
        return (
            f"predicted step {format_s(ours.iteration_s)} against "
            f"{format_s(theirs.iteration_s)} with DDP's buckets {saved}, no plan can "
            f"be faster than {format_s(ours.lower_bound_s)}"
        )
    if settled.ddp_step_s is None:
        ddp = f"{format_s(theirs.iteration_s)} predicted with DDP's buckets"
    else:
        ddp = f"{format_s(settled.ddp_step_s)} with DDP's buckets"
    line = f"measured step {format_s(settled.step_s)} against {ddp} {saved}"
    if settled.bound_s is not None:
        share = 100 * settled.bound_s / settled.step_s
        line += f", {share:.0f} % of the bound"
    return line


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
