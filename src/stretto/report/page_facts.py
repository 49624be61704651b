"""Sections of a page about what was run: plans, model and cluster, notes, sources."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from stretto.report.html import DASH, facts_list, section, table
from stretto.units import counted, format_bytes, format_rate, format_s

if TYPE_CHECKING:
    from stretto.report.results import RunReport
    from stretto.schema import Cluster, Link, Workload


def plans(report: RunReport) -> str:
    """Return the table of the methods' plans."""
    planned = [(m, m.plan) for m in report.methods if m.plan is not None]
    if not planned:
        return ""
    sizes = {}
    if report.workload is not None:
        sizes = {tensor.name: tensor.bytes for tensor in report.workload.tensors}
    rows = []
    for m, plan in planned:
        totals = [
            sum(sizes[name] for name in bucket.tensors)
            for bucket in plan.buckets
            if all(name in sizes for name in bucket.tensors)
        ]
        known = len(totals) == len(plan.buckets)
        rows.append(
            (
                [
                    m.name,
                    plan.planner,
                    plan.overlap,
                    str(len(plan.buckets)),
                    str(sum(bucket.slices for bucket in plan.buckets)),
                    str(plan.lanes),
                    format_bytes(min(totals)) if known else DASH,
                    format_bytes(max(totals)) if known else DASH,
                ],
                "",
                m is report.fastest,
            )
        )
    heads = [
        "method",
        "planner",
        "overlap",
        "buckets",
        "collectives",
        "lanes",
        "smallest bucket",
        "largest bucket",
    ]
    return section(
        "Plans",
        "A bucket is what one collective sends. Slices of a bucket are sent at once "
        "on several lanes, so there may be more collectives than buckets.",
        f'<div class="scroll">{table(heads, rows)}</div>',
    )


def subject(report: RunReport) -> str:
    """Return the facts of the model and the cluster."""
    parts = []
    if report.workload is not None:
        parts.append(
            f"<div><h3>Model</h3>{facts_list(_workload_facts(report.workload))}</div>"
        )
    if report.cluster is not None:
        parts.append(
            f"<div><h3>Cluster</h3>{facts_list(_cluster_facts(report.cluster))}</div>"
        )
    if not parts:
        return ""
    return section("Model and cluster", "", f'<div class="pair">{"".join(parts)}</div>')


def _workload_facts(workload: Workload) -> dict[str, str]:
    sizes = [tensor.bytes for tensor in workload.tensors]
    return {
        "name": workload.name,
        "framework": workload.framework,
        "device": workload.device,
        "batch per rank": str(workload.batch_per_rank),
        "forward and rest": format_s(workload.forward_s),
        "backward": format_s(workload.backward_s),
        "gradients": f"{len(sizes)} tensors, {format_bytes(workload.total_bytes)}",
        "largest tensor": format_bytes(max(sizes)),
        "smallest tensor": format_bytes(min(sizes)),
    }


def _cluster_facts(cluster: Cluster) -> dict[str, str]:
    facts = {
        "name": cluster.name,
        "ranks": f"{cluster.ranks}: {counted(cluster.hosts, 'host')} of "
        f"{cluster.ranks_per_host}",
    }
    if cluster.hosts > 1:
        facts |= _link_facts("between hosts", cluster.inter_host)
    if cluster.ranks_per_host > 1 or cluster.hosts == 1:
        facts |= _link_facts("inside a host", cluster.intra_host)
    if cluster.allreduce is not None:
        fit = cluster.allreduce
        facts["all-reduce alone"] = (
            f"{format_s(fit.startup_s)} and {format_s(fit.s_per_byte * 2**20)} per "
            f"MiB, fitted at {fit.ranks} ranks"
        )
    if cluster.concurrency is not None:
        gammas = ", ".join(f"{value:.3g}" for value in cluster.concurrency.gamma)
        facts["slow-down of 1, 2, ... at once"] = gammas
    return facts


def _link_facts(name: str, link: Link) -> dict[str, str]:
    flow = link.stream_bytes_per_s
    return {
        name: format_rate(link.bandwidth_bytes_per_s)
        + (f", one flow {format_rate(flow)}" if flow is not None else "")
        + (f", latency {format_s(link.latency_s)}" if link.latency_s else "")
    }


def reading(report: RunReport) -> str:
    """Return the notes on how to read the figures."""
    notes = [escape(note) for note in report.notes]
    if any(m.measured_step_s is not None for m in report.methods):
        notes.append(
            "<b>measured</b> is the median over the steps of the slowest rank; "
            "<b>spread</b> is half the distance between the quartiles."
        )
    if report.mean_error_ratio is not None:
        notes.append(
            "<b>predicted</b> was computed before the run from the model's profile and "
            "the network's probe alone; <b>error</b> is predicted over measured, less "
            "one."
        )
    shares = any(m.bound_share is not None for m in report.methods)
    if report.bound_s is not None and shares:
        notes.append(
            "<b>over bound</b> is the measured step over the lower bound, "
            f"{format_s(report.bound_s)}: a perfect plan would have 1.00. The bound is "
            "computed from the measured network and profile, so it has their error: a "
            "figure just below 1 is that error, not a faster network."
        )
    if any(m.measured is not None for m in report.methods):
        notes.append(
            "A measured timeline is one recorded step of rank 0, the one of median "
            "length. A lane is drawn as if it sent one slice after another."
        )
    if not notes:
        return ""
    items = "".join(f"<li>{note}</li>" for note in notes)
    return section("How to read this", "", f"<ul>{items}</ul>")


def provenance(report: RunReport) -> str:
    """Return where the figures come from: machine, options, profile, probe."""
    parts = []
    for title, facts in (
        ("Machine and options", report.environment),
        ("Profile", report.workload.provenance if report.workload else {}),
        ("Probe", report.cluster.provenance if report.cluster else {}),
    ):
        if facts:
            parts.append(f"<div><h3>{title}</h3>{facts_list(facts)}</div>")
    if not parts:
        return ""
    body = f'<div class="pair">{"".join(parts)}</div>'
    return section("Sources of the figures", "", body)
