"""Options and output shared by the planning commands."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stretto import _api, planners
from stretto.cli._tables import aligned
from stretto.cli._values import Real, Size, Whole
from stretto.errors import SpecError
from stretto.planners.joint import ALGORITHMS, DIMS, RUNNABLE_DIMS
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stretto.report import MethodResult
    from stretto.schema import Cluster, Plan, Timeline, Workload

_Command = TypeVar("_Command", bound="Callable[..., Any]")


_PLANNER_OPTIONS = {
    "cap_bytes": (
        "--cap",
        Size(least=1),
        "ddp: limit of a bucket.  [default: 25MiB]",
    ),
    "first_cap_bytes": (
        "--first-cap",
        Size(least=1),
        "ddp: limit of the first bucket.  [default: 1MiB, or --cap]",
    ),
    "fusion_bytes": (
        "--fusion-buffer",
        Size(least=1),
        (
            "horovod, dear: size of the fusion buffer.  [default: horovod 64MiB, dear "
            "the best power of two from 1MiB to 128MiB]"
        ),
    ),
    "cycle_s": (
        "--cycle-ms",
        Real(min=0, min_open=True),
        "horovod: milliseconds of a cycle.  [default: 5]",
    ),
    "unit_bytes": (
        "--unit",
        Size(least=1),
        "aiacc: size of a unit.  [default: the best of 1, 4, 16 and 64MiB]",
    ),
    "lanes": (
        "--lanes",
        Whole(min=1),
        "aiacc: number of lanes.  [default: the best up to --max-lanes]",
    ),
    "max_lanes": (
        "--max-lanes",
        Whole(min=1),
        (
            "joint, aiacc, exhaustive: largest number of lanes of a plan.  [default: "
            "8, exhaustive 2]"
        ),
    ),
    "max_groups": (
        "--groups",
        Whole(min=1),
        "libra: largest number of buckets (K).  [default: no limit]",
    ),
    "chunks": (
        "--chunks",
        Whole(min=1),
        (
            "libra, libra-m: chunks of backward (Z) for the searches grid and literal. "
            " [default: grid four per tensor (libra-m: per bucket), literal 150]"
        ),
    ),
    "search": (
        "--search",
        click.STRING,
        "libra, libra-m: pareto (default), grid or literal.",
    ),
    "startup": (
        "--startup",
        click.STRING,
        "libra, libra-m: phase (default) or mixed, as in LIBRA's Eq. 9-11.",
    ),
    "literal": (
        "--literal/--corrected",
        click.BOOL,
        "asc-wfbp: Algorithm 1 as printed, or with its errors corrected (default).",
    ),
    "dims": (
        "--dims",
        click.STRING,
        (
            "joint, exhaustive: dimensions to search: all, or some of "
            f"{','.join(DIMS)}. The runtime executes the default ones in every job, "
            "and resource; forward with `stretto run --overlap`; of algorithm what "
            f"--algorithms says.  [default: {','.join(RUNNABLE_DIMS)}]"
        ),
    ),
    "algorithms": (
        "--algorithms",
        click.STRING,
        (
            "joint, exhaustive: algorithms to choose from, bucket by bucket: some of "
            f"{','.join(ALGORITHMS)}. Opens the dimension algorithm. The runtime "
            "executes ring and, on Gloo with several ranks on each of several hosts, "
            "hierarchical.  [default: all of them, once algorithm is searched]"
        ),
    ),
    "time_limit_s": (
        "--time-limit",
        Real(min=0, min_open=True),
        (
            "joint: seconds after which the search returns the best plan so far.  "
            "[default: no limit]"
        ),
    ),
    "robust": (
        "--robust/--fastest",
        click.BOOL,
        (
            "joint: a near-fastest plan that tolerates a slower backward (default), "
            "or the fastest."
        ),
    ),
}


def planner_help(text: str) -> str:
    """Return the help of an option that names a planner."""
    return (
        f"{text}: {', '.join(planners.NAMES)}, exhaustive (for tiny jobs), or that of "
        "an installed package."
    )


def planner_options(command: _Command) -> _Command:
    """Add the options of every planner to a command, under the planners' own names."""
    for name, (flag, kind, text) in reversed(_PLANNER_OPTIONS.items()):
        command = click.option(flag, name, type=kind, default=None, help=text)(command)
    for name in reversed(DIMS):
        text = f"joint, exhaustive: do not search the dimension {name}."
        if name not in RUNNABLE_DIMS:
            text += " By default it is not searched: use this with --dims all."
        command = click.option(f"--no-{name}", is_flag=True, help=text)(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the planner options given on the command line, in SI units.

    Raises:
        click.UsageError: Options contradict each other.
    """
    chosen = {k: v for k, v in options.items() if v is not None}
    if "cycle_s" in chosen:
        chosen["cycle_s"] /= 1e3
    closed = [name for name in DIMS if chosen.pop(f"no_{name}", False)]
    if "algorithm" in closed and "algorithms" in chosen:
        raise click.UsageError(
            "--no-algorithm closes the dimension that --algorithms opens: pass one of "
            "them"
        )
    if closed:
        names = chosen.get("dims", ",".join(RUNNABLE_DIMS))
        names = DIMS if names == "all" else names.split(",")
        chosen["dims"] = tuple(name for name in names if name not in closed)
    return chosen


def check_options(planner: str, chosen: Mapping[str, Any]) -> None:
    """Require that a planner exists and has the given options.

    Raises:
        click.UsageError: The planner lacks an option; the message names its flags.
        SpecError: there is no such planner.
    """
    known = planners.options_of(planner)
    for name in chosen:
        if name not in known:
            flags = ", ".join(_flag(option) for option in known)
            has = f"it has {flags}" if known else "it has no options"
            raise click.UsageError(
                f"planner {planner} has no option {_flag(name)}; {has}"
            )


@contextlib.contextmanager
def in_flags(planner: str) -> Iterator[None]:
    """Report a planner's error about one of its options by the option's flag."""
    try:
        yield
    except SpecError as error:
        text = str(error)
        for name in planners.options_of(planner):
            if name in _PLANNER_OPTIONS:
                flag = _PLANNER_OPTIONS[name][0]
                text = text.replace(f"planner {planner}: {name} ", f"{flag} ")
        raise SpecError(text, place=error.place) from error


def _flag(option: str) -> str:
    """Return the command line's name of a planner's option."""
    if option not in _PLANNER_OPTIONS:
        return f"{option} (from Python only)"
    flag = _PLANNER_OPTIONS[option][0]
    return f"{flag} or --no-..." if option == "dims" else flag


def warnings_of(plan: Plan, cluster: Cluster) -> list[str]:
    """Return the parts of a prediction that are not based on measurements."""
    if plan.lanes == 1 or cluster.concurrency is not None or cluster.ranks == 1:
        return []
    text = (
        f"cluster {cluster.name!r} has no measured concurrency: the gain from "
        f"{plan.lanes} lanes is assumed to be linear up to the link's bandwidth. "
        "Measure it with stretto probe."
    )
    return [text]


def print_warnings(plans: Iterable[Plan], cluster: Cluster) -> None:
    """Print the warnings of all plans, each once."""
    found = [text for plan in plans for text in warnings_of(plan, cluster)]
    if found:
        click.echo(f"warning: {found[0]}")


def row_of(plan: Plan) -> dict[str, Any]:
    """Return what the commands print about a plan, before any measured times."""
    prediction = plan.predicted
    if prediction is None:
        raise AssertionError("a planner's plan has no prediction")
    return {
        "planner": plan.planner,
        "iteration_s": prediction.iteration_s,
        "backward_s": prediction.backward_s,
        "exposed_communication_s": prediction.exposed_communication_s,
        "lower_bound_s": prediction.lower_bound_s,
        "gap": prediction.gap,
        "bound_scope": prediction.bound_scope,
        "lanes": plan.lanes,
        "buckets": len(plan.buckets),
    }


def row_on_ranks(plan: Plan, workload: Workload) -> dict[str, Any]:
    """Return a plan's row, with the share of the step that computes."""
    row = row_of(plan)
    compute_s = workload.forward_s + workload.backward_s
    iteration_s = row["iteration_s"]
    efficiency = compute_s / iteration_s if iteration_s > 0 else 1.0
    return row | {"ranks": plan.ranks, "efficiency": efficiency}


def scaling_text(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows of `row_on_ranks` as a table, one line per number of ranks."""
    lines = [("ranks", "step", "efficiency", "over bound", "lanes", "buckets")]
    lines += [
        (
            str(row["ranks"]),
            format_s(row["iteration_s"]),
            f"{row['efficiency']:.1%}",
            f"{row['gap']:.1%}",
            str(row["lanes"]),
            str(row["buckets"]),
        )
        for row in rows
    ]
    return aligned(lines)


def save_page(
    path: str,
    workload: Workload,
    cluster: Cluster,
    plans: Mapping[str, Plan],
    scaling: Mapping[str, Sequence[dict[str, Any]]],
    *,
    drawn: Iterable[str],
    contributions: bool,
) -> None:
    """Write the page about the plans, by name, with each plan's rows over the ranks.

    The steps of the plans named in ``drawn`` are drawn as timelines.

    Raises:
        SpecError: the file cannot be written.
    """
    from stretto.report import RunReport, ScaledStep, save

    rows = {name: row_of(plan) for name, plan in plans.items()}
    timelines = {
        name: _api.simulate(workload, cluster, plans[name]).timeline for name in drawn
    }
    opened: list[tuple[str, float]] = []
    if contributions:
        with progress(f"planning {workload.name} with more and more dimensions"):
            opened = _api.contributions(workload, cluster)
    # The smallest bound holds for every planner, whatever its scope. That of halves,
    # which the runtime does not send, would hide how near the others are.
    sent = [rows[name] for name, plan in plans.items() if plan.overlap != "halves"]
    lowest = min(sent or rows.values(), key=lambda row: float(row["lower_bound_s"]))
    page = RunReport(
        title=f"{workload.name} on {cluster.name}, {cluster.ranks} ranks",
        cluster=cluster,
        workload=workload,
        methods=tuple(
            _method(name, plans[name], row["iteration_s"], timelines.get(name))
            for name, row in rows.items()
        ),
        bound_s=lowest["lower_bound_s"],
        bound_scope=lowest["bound_scope"],
        gaps={name: row["gap"] for name, row in rows.items()},
        scaling=tuple(
            ScaledStep(
                method=name,
                ranks=row["ranks"],
                step_s=row["iteration_s"],
                bound_s=row["lower_bound_s"],
                efficiency_ratio=row["efficiency"],
            )
            for name, several in scaling.items()
            for row in several
        ),
        contributions=tuple(opened),
        notes=(
            (
                "No step was measured: every time is predicted by the model, from the "
                "files alone."
            ),
        ),
    )
    save(path, page)


def _method(
    name: str, plan: Plan, step_s: float, timeline: Timeline | None
) -> MethodResult:
    from stretto.report import MethodResult

    return MethodResult(
        name=name,
        predicted_step_s=step_s,
        measured_step_s=None,
        spread_s=None,
        speedup_over_ddp=None,
        bound_share=None,
        final_loss=None,
        predicted=timeline,
        plan=plan,
    )


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show what is running, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    click.echo(f"{text} ...", nl=False, err=True)
    try:
        yield
    finally:
        click.echo("\r\033[K", nl=False, err=True)


def json_text(value: Any) -> str:
    """Format a value as one line of JSON."""
    import json

    return json.dumps(value)
