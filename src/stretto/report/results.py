"""The contents of a report, and the results file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.errors import SpecError
from stretto.schema import Cluster, Plan, Timeline, Workload, codec
from stretto.schema._convert import ADDED
from stretto.schema.tuning import Tuning

if TYPE_CHECKING:
    from pathlib import Path

BASELINE = "ddp"
"""Name of the method that speed-ups refer to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """One method's predictions and measurements; ``None``: not known."""

    name: str

    predicted_step_s: float | None

    measured_step_s: float | None
    """Median of the measured steps."""

    spread_s: float | None
    """Half the distance between the quartiles of the measured steps."""

    speedup_over_ddp: float | None

    bound_share: float | None
    """Lower bound on the step time over the measured one: 1 is a perfect plan, up to
    the error of the model behind the bound.
    """

    final_loss: float | None

    steps: tuple[float, ...] = ()
    """Measured seconds, step by step."""

    losses: tuple[float, ...] = ()
    """Training loss, step by step."""

    predicted: Timeline | None = None

    measured: Timeline | None = None

    ranks: Timeline | None = None
    """The measured steps of all ranks on one clock."""

    description: str = ""
    """The method, described in a few words."""

    plan: Plan | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise SpecError("name must not be empty", place=".name")
        for name in ("predicted_step_s", "measured_step_s", "spread_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise SpecError(
                    f"{name} must be finite and >= 0, got {value}", place=f".{name}"
                )

    @property
    def error_ratio(self) -> float | None:
        """Return predicted over measured, less one; ``None`` if either is missing."""
        if self.predicted_step_s is None or not self.measured_step_s:
            return None
        return self.predicted_step_s / self.measured_step_s - 1

    @property
    def step_s(self) -> float | None:
        """Return the measured step time, otherwise the predicted one."""
        if self.measured_step_s is None:
            return self.predicted_step_s
        return self.measured_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledStep:
    """One method's prediction on one number of ranks."""

    method: str

    ranks: int

    step_s: float

    bound_s: float

    efficiency_ratio: float
    """Computation alone over the step: one rank's throughput relative to training
    alone.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that a page shows; missing data are left out of it."""

    title: str

    cluster: Cluster | None = None

    workload: Workload | None = None

    methods: tuple[MethodResult, ...] = ()

    bound_s: float | None = None
    """Lower bound on the step time of every plan in ``bound_scope``."""

    bound_scope: str = ""
    """The plans that the bound covers, in words that continue "no plan with"."""

    gaps: dict[str, float] = field(default_factory=dict)
    """How far each method's predicted step is above its own bound: 0 is perfect."""

    scaling: tuple[ScaledStep, ...] = ()
    """Predictions over numbers of ranks, method by method."""

    contributions: tuple[tuple[str, float], ...] = ()
    """The step in s as one dimension of a plan after another is opened."""

    tuning: Tuning | None = None
    """How tuning found the plan inside the run."""

    environment: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, options: shown unchanged."""

    notes: tuple[str, ...] = ()
    """Sentences that belong to these results."""

    def __post_init__(self) -> None:
        names = [method.name for method in self.methods]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise SpecError(
                    f"method {name!r} occurs twice; every method must occur once",
                    place=f".methods[{i}].name",
                )

    @property
    def fastest(self) -> MethodResult | None:
        """Return the method with the shortest measured step, the first of equals."""
        known = [m for m in self.methods if m.measured_step_s is not None]
        return min(known, key=lambda m: m.measured_step_s or 0.0, default=None)

    @property
    def mean_error_ratio(self) -> float | None:
        """Return the mean size of the prediction errors; ``None`` without any."""
        errors = [abs(m.error_ratio) for m in self.methods if m.error_ratio is not None]
        return statistics.fmean(errors) if errors else None

    @property
    def worst_error_ratio(self) -> float | None:
        """Return the largest size of the prediction errors; ``None`` without any."""
        errors = [abs(m.error_ratio) for m in self.methods if m.error_ratio is not None]
        return max(errors, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Return one method as in the results file."""

    name: str
    predicted_step_s: float | None
    measured_step_s: float | None
    spread_s: float | None
    speedup_over_ddp: float | None
    bound_share: float | None
    final_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results file: a report's figures without its timelines."""

    title: str
    bound_s: float | None
    methods: tuple[ResultRow, ...]
    descriptions: dict[str, str]
    steps_s: dict[str, tuple[float, ...]]
    losses: dict[str, tuple[float, ...]]
    environment: dict[str, Any]
    notes: tuple[str, ...]
    bound_scope: str = field(default="", metadata={ADDED: True})


def results_of(report: RunReport) -> Results:
    """Return the figures of a report as they are filed."""
    methods = report.methods
    return Results(
        title=report.title,
        bound_s=report.bound_s,
        bound_scope=report.bound_scope,
        methods=tuple(
            ResultRow(
                name=m.name,
                predicted_step_s=m.predicted_step_s,
                measured_step_s=m.measured_step_s,
                spread_s=m.spread_s,
                speedup_over_ddp=m.speedup_over_ddp,
                bound_share=m.bound_share,
                final_loss=m.final_loss,
            )
            for m in methods
        ),
        descriptions={m.name: m.description for m in methods if m.description},
        steps_s={m.name: m.steps for m in methods if m.steps},
        losses={m.name: m.losses for m in methods if m.losses},
        environment=report.environment,
        notes=report.notes,
    )


def results_json(report: RunReport) -> dict[str, Any]:
    """Return the results file as plain JSON data, including its header."""
    plain: dict[str, Any] = msgspec.json.decode(codec.encode(results_of(report)))
    return plain


def save_results(path: str | Path, report: RunReport) -> None:
    """Write the results file atomically.

    Raises:
        SpecError: the file cannot be written.
    """
    codec.save(path, results_of(report))


def report_of(results: Results) -> RunReport:
    """Return the report in a results file: only figures of methods."""
    return RunReport(
        title=results.title,
        bound_s=results.bound_s,
        bound_scope=results.bound_scope,
        methods=tuple(
            MethodResult(
                name=row.name,
                predicted_step_s=row.predicted_step_s,
                measured_step_s=row.measured_step_s,
                spread_s=row.spread_s,
                speedup_over_ddp=row.speedup_over_ddp,
                bound_share=row.bound_share,
                final_loss=row.final_loss,
                steps=results.steps_s.get(row.name, ()),
                losses=results.losses.get(row.name, ()),
                description=results.descriptions.get(row.name, ""),
            )
            for row in results.methods
        ),
        environment=results.environment,
        notes=results.notes,
    )


def with_method(report: RunReport, method: MethodResult) -> RunReport:
    """Return the report with a method that replaces its namesake, or is appended."""
    names = [m.name for m in report.methods]
    if method.name not in names:
        return replace(report, methods=(*report.methods, method))
    methods = tuple(method if m.name == method.name else m for m in report.methods)
    return replace(report, methods=methods)
