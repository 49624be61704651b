"""Decide from the profiled steps whether plans may overlap with forward.

``overlap="auto"`` asks for it. Each rank reports what its program reads between a
backward and the next forward; rank 0 merges the reports, and plans.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, final

from stretto import planners
from stretto.planners.base import predicted_s
from stretto.planners.joint import RUNNABLE_DIMS
from stretto.tune.search import BETTER_RATIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from stretto.runtime import DistributedDataParallel
    from stretto.runtime.forward.reads import ReadsReport
    from stretto.schema import Cluster, Plan, Workload

FORWARD_DIMS = (*RUNNABLE_DIMS, "forward")
"""Dimensions of the plan that may overlap with forward."""

FORWARD_PLAN_S = 0.3
"""Training waits this long for the climbing of such a plan."""

FORWARD_PLANNER = "joint"
"""The planner of such plans."""


class ForwardVerdict(TypedDict):
    """Rank 0's conclusion from all ranks' reads."""

    prevents: str | None
    """Why no plan may overlap with forward, or ``None``."""

    early: list[str]
    """Names of parameters that are read before the next forward."""

    reader: str | None
    """The code that reads them."""


def verdict_of(reports: Sequence[ReadsReport | None]) -> ForwardVerdict:
    """Return what the reads of all ranks mean for plans that overlap with forward.

    A parameter that one rank reads early is needed early: the others wait for it.
    """
    found = [report for report in reports if report is not None]
    prevents = [report["prevents"] for report in found if report["prevents"]]
    if len(found) < len(reports):
        prevents.append("it was not asked for on every rank")
    return ForwardVerdict(
        prevents=prevents[0] if prevents else None,
        early=sorted({name for report in found for name in report["early"]}),
        reader=next((r["reader"] for r in found if r["reader"]), None),
    )


def needed_early(workload: Workload, names: Iterable[str]) -> Workload:
    """Return the workload with some gradients needed as forward begins."""
    early = frozenset(names)
    if not early:
        return workload
    tensors = [
        replace(t, needed_s=0.0) if t.name in early else t for t in workload.tensors
    ]
    return replace(workload, tensors=tuple(tensors))


def forward_options(planner: str) -> dict[str, Any]:
    """Return the options with which a planner's plans may overlap with forward."""
    if planner != FORWARD_PLANNER:
        return {}
    return {"dims": FORWARD_DIMS, "time_limit_s": FORWARD_PLAN_S}


def forward_or_why(
    verdict: ForwardVerdict,
    workload: Workload,
    cluster: Cluster,
    backward: Plan,
    *,
    planner: str,
    wire_dtype: str | None,
) -> tuple[Plan | None, str | None]:
    """Return a plan that overlaps with forward, or why not.

    It is predicted to be faster than ``backward``, the best plan that does not.

    Raises:
        Infeasible: there is no plan.
        SpecError: the planner refuses its options.
    """
    if verdict["prevents"] is not None:
        return None, verdict["prevents"]
    options = forward_options(planner)
    if not options:
        return None, f"planner {planner} makes no such plans"
    plan = planners.plan_with_wire(
        workload, cluster, planner, wire_dtype=wire_dtype, **options
    )
    faster = predicted_s(plan) < (1 - BETTER_RATIO) * predicted_s(backward)
    if plan.overlap == "forward" and faster:
        return plan, None
    return None, verdict["reader"] or "no such plan is predicted to be faster"


@final
class ProfiledReads:
    """A program's reads in the profiled steps, on one rank."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._prevents: str | None = None

    def start(self) -> None:
        """Start with the next `watch`."""
        self._prevents = self._model._watch_reads()  # noqa: SLF001

    def watch(self) -> None:
        """Watch from the end of a reduced backward to the end of the next forward."""
        reads = self._model._reads  # noqa: SLF001
        if reads is not None:
            reads.backward_ended()

    def report(self) -> ReadsReport:
        """Return what was learned so far."""
        reads = self._model._reads  # noqa: SLF001
        if reads is not None:
            return reads.report()
        why = self._prevents or "the whole model is compiled, or ranks may join"
        return {"prevents": why, "early": [], "reader": None}

    def stop(self) -> None:
        """Watch no longer."""
        self._model._release_reads()  # noqa: SLF001
