"""``stretto replay``: execute a plan with waiting in place of computation."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._ranks import process_group, require_ranks
from stretto.cli._tables import aligned
from stretto.cli._values import Real, Whole
from stretto.schema import Cluster, Plan, Workload
from stretto.units import format_bytes, format_s

if TYPE_CHECKING:
    from stretto._api.replaying import Replay


@click.command(cls=OutputCommand, name="replay")
@click.argument("workload_file", metavar="WORKLOAD", type=click.Path())
@click.option("--plan", "plan_file", metavar="FILE", required=True, help="The plan.")
@click.option(
    "--cluster",
    "cluster_file",
    metavar="FILE",
    help="Cluster file for the prediction.  [default: measure the network first]",
)
@click.option(
    "--budget",
    "budget_s",
    type=Real(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Time limit in seconds for measuring the network, without --cluster.",
)
@click.option(
    "--steps",
    type=Whole(min=1),
    default=20,
    show_default=True,
    help="Number of measured steps.",
)
@click.option(
    "--warmup",
    type=Whole(min=0),
    default=3,
    show_default=True,
    help="Number of warm-up steps before them.",
)
@click.option(
    "--trace",
    callback=writable,
    metavar="FILE",
    help="Write rank 0's last step, for Perfetto.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    workload_file: str,
    plan_file: str,
    cluster_file: str | None,
    budget_s: float,
    steps: int,
    warmup: int,
    trace: str | None,
    as_json: bool,
) -> None:
    """Execute a plan's communication on the running ranks, and compare with prediction.

    Computation is replaced by waiting for the times in WORKLOAD, so a network can be
    tested without accelerators. Runs on every rank, so start it as you would start a
    training script:

    \b
      stretto lab run --hosts 4 --link 1gbit --flow 300mbit -- \\
        stretto replay workload.json --plan plan.json
      torchrun --nproc-per-node 4 --no-python \\
        stretto replay workload.json --plan plan.json --cluster cluster.json

    Rank 0 prints. The prediction leaves out contention: waiting does not become slower
    beside communication.
    """  # noqa: D301
    require_ranks("replay")
    workload, plan = Workload.load(workload_file), Plan.load(plan_file)
    plan.check_matches(workload)
    cluster = None if cluster_file is None else Cluster.load(cluster_file)
    with process_group() as rank:
        from stretto._api.measuring import probe
        from stretto._api.replaying import replay

        if cluster is None:
            _say(rank, f"measuring the network, at most {budget_s:g} s")
            cluster = probe(budget_s=budget_s, contention=False)
        _say(rank, f"replaying {plan.planner}: {warmup} + {steps} steps")
        found = replay(workload, plan, cluster, steps=steps, warmup=warmup)
        if rank == 0:
            if trace is not None:
                found.timeline.save(trace)
            click.echo(json.dumps(_row(found)) if as_json else _table(found))


def _say(rank: int, text: str) -> None:
    if rank == 0 and sys.stderr.isatty():
        click.echo(text, err=True)


def _row(found: Replay) -> dict[str, object]:
    """Return the replay as plain data; the timeline has a file of its own."""
    return {
        "ranks": found.ranks,
        "predicted_s": found.predicted_s,
        "measured_s": found.measured_s,
        "error": found.error,
        "steps_s": list(found.steps_s),
        "buckets": [asdict(row) for row in found.buckets],
    }


def _table(found: Replay) -> str:
    """Return the buckets' times, then the step's, as aligned text."""
    rows = [
        ("bucket", "size", "launch", "measured", "end", "measured", "difference"),
        *(
            (
                str(row.bucket),
                format_bytes(row.bytes),
                format_s(row.predicted_launch_s),
                format_s(row.measured_launch_s),
                format_s(row.predicted_end_s),
                format_s(row.measured_end_s),
                f"{1e3 * (row.measured_end_s - row.predicted_end_s):+.1f} ms",
            )
            for row in found.buckets
        ),
    ]
    low_s, high_s = min(found.steps_s), max(found.steps_s)
    lines = [
        aligned(rows),
        "",
        "Times of buckets count from the start of backward.",
        (
            f"step on {found.ranks} ranks: predicted {format_s(found.predicted_s)}, "
            f"measured {format_s(found.measured_s)} (median of {len(found.steps_s)}, "
            f"{format_s(low_s)} to {format_s(high_s)}); the prediction differs by "
            f"{100 * found.error:+.1f} %"
        ),
    ]
    if not found.buckets:
        lines = ["one rank sends nothing", "", lines[-1]]
    return "\n".join(lines)
