"""Tables for a terminal, as text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from stretto.units import format_bytes, format_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from stretto.report.results import RunReport
    from stretto.schema import Plan, Workload

_DASH = "-"


def planners_table(rows: Sequence[Mapping[str, Any]], *, width: int = 100) -> str:
    """Return a comparison of planners, one row each, with the fastest marked.

    Each row holds ``planner, iteration_s, exposed_communication_s, lower_bound_s, gap,
    bound_scope, lanes, buckets`` (their number) and, if it was timed, ``search_s``:
    the output of ``stretto compare --json``.
    """
    table = _table(
        "planner", "step", "exposed", "over bound", "lanes", "buckets", "search"
    )
    best_s = min((row["iteration_s"] for row in rows), default=None)
    for row in rows:
        table.add_row(
            row["planner"],
            format_s(row["iteration_s"]),
            format_s(row["exposed_communication_s"]),
            _percent(row["gap"]),
            str(row["lanes"]),
            str(row["buckets"]),
            _or_dash(row.get("search_s"), format_s),
            style="bold" if row["iteration_s"] == best_s else None,
        )
    of_bound: dict[tuple[float, str], list[str]] = {}
    for row in rows:
        bound = (row["lower_bound_s"], row["bound_scope"])
        of_bound.setdefault(bound, []).append(row["planner"])
    captions = []
    for (bound_s, scope), names in of_bound.items():
        whose = f"{', '.join(names)}: " if len(of_bound) > 1 else ""
        captions.append(
            f"{whose}no plan with {scope} can be faster than {format_s(bound_s)} "
            "per step"
        )
    table.caption = "\n".join(captions)
    return _text(table, width)


def contributions_table(rows: Sequence[tuple[str, float]], *, width: int = 100) -> str:
    """Return the step as one dimension after another is opened, and what each saves."""
    table = _table("may be chosen", "step", "saves", "saved in all")
    before_s = first_s = rows[0][1]
    for i, (name, step_s) in enumerate(rows):
        table.add_row(
            f"+ {name}" if i else name,
            format_s(step_s),
            _percent(1 - step_s / before_s) if i else _DASH,
            _percent(1 - step_s / first_s) if i else _DASH,
        )
        before_s = step_s
    return _text(table, width)


def methods_table(report: RunReport, *, width: int = 100) -> str:
    """Return each method's predictions and measurements, with the fastest marked."""
    table = _table(
        "method",
        "predicted",
        "measured",
        "spread",
        "error",
        "against ddp",
        "over bound",
        "final loss",
    )
    fastest = report.fastest
    for m in report.methods:
        table.add_row(
            m.name,
            _or_dash(m.predicted_step_s, format_s),
            _or_dash(m.measured_step_s, format_s),
            _or_dash(m.spread_s, lambda spread_s: f"± {format_s(spread_s)}"),
            _or_dash(m.error_ratio, lambda error: f"{error:+.1%}"),
            _or_dash(m.speedup_over_ddp, lambda ratio: f"{ratio:.2f} x"),
            _or_dash(m.bound_share, lambda share: f"{1 / share:.2f} x"),
            _or_dash(m.final_loss, lambda loss: f"{loss:.4g}"),
            style="bold" if m is fastest else None,
        )
    if report.bound_s is not None:
        scope = f" with {report.bound_scope}" if report.bound_scope else ""
        table.caption = (
            f"no plan{scope} can be faster than {format_s(report.bound_s)} per step"
        )
    return _text(table, width)


def plan_table(plan: Plan, workload: Workload, *, width: int = 100) -> str:
    """Return the buckets of a plan in launch order, and where they may travel.

    Raises:
        PlanMismatch: the plan was made for another model.
    """
    plan.check_matches(workload)
    tensors = {tensor.name: tensor for tensor in workload.tensors}
    has_resource = any(bucket.resource is not None for bucket in plan.buckets)
    has_algorithm = any(bucket.algorithm != "ring" for bucket in plan.buckets)
    extends = plan.overlap in ("forward", "halves")
    table = _table(
        "bucket",
        "tensors",
        "size",
        "ready",
        "lane",
        "slices",
        *(["resource"] if has_resource else []),
        *(["algorithm"] if has_algorithm else []),
        *(["needed"] if extends else []),
        "last tensor",
    )
    table.columns[-1].justify = "left"
    for i in plan.launch_order:
        bucket = plan.buckets[i]
        members = [tensors[name] for name in bucket.tensors]
        last = max(members, key=lambda tensor: tensor.ready_s)
        table.add_row(
            str(i),
            str(len(members)),
            format_bytes(sum(tensor.bytes for tensor in members)),
            format_s(last.ready_s),
            str(bucket.lane),
            str(bucket.slices),
            *([_or_dash(bucket.resource, str)] if has_resource else []),
            *([bucket.algorithm] if has_algorithm else []),
            *([format_s(min(t.needed_s for t in members))] if extends else []),
            _shortened(last.name),
        )
    if extends:
        order = "in launch order; " if plan.overlap == "forward" else ""
        table.caption = (
            f"{order}a bucket may continue during the next forward until it is "
            "needed there"
        )
    return _text(table, width)


def plain_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100
) -> str:
    """Return rows of cells as a table."""
    table = _table(*heads)
    for row in rows:
        table.add_row(*row)
    return _text(table, width)


def _table(first: str, *others: str) -> Table:
    # rich takes longer to import than the rest of a command: import it only to print.
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _text(table: Table, width: int) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines).strip("\n")


def _shortened(name: str, limit: int = 36) -> str:
    """Return the end of a long name, in which names differ."""
    return name if len(name) <= limit else f"...{name[3 - limit :]}"


def _percent(ratio: float) -> str:
    return f"{ratio:.1%}"


def _or_dash(value: Any, text: Any) -> str:
    return _DASH if value is None else str(text(value))
