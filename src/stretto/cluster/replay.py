"""A trace under several policies: its jobs become models of the zoo."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.cluster.engine_sim import (
    SimulatedCluster,
    SimulatedJob,
    simulate,
    total,
    work_of,
)
from stretto.cluster.policies import registry
from stretto.cluster.speeds import SpeedQuestion, speeds
from stretto.cluster.views import BATCH_OPTIMAL, BURST, DATA_PARALLEL, WEAK, Speeds
from stretto.schema import CollocatedPair
from stretto.schema.efficiency import SampleEfficiency
from stretto.schema.job import BACKGROUND, FOREGROUND, GpuRange, Job
from stretto.zoo import cluster, layer_profile
from stretto.zoo.profiles import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stretto.cluster.traces import Trace

MODELS = {"vgg16": 32, "resnet50": 64, "wide-resnet101-2": 16, "inception-v3": 32}
"""Models that jobs are drawn from, with their batches."""

AMPLIFICATION_LIMIT = 2.0

CRITICAL_BATCH = 1024.0
"""Assumed for all models: above it, larger batches need many more samples."""

_METHODS = {"deeppool": BURST, "weak": WEAK, "batch-optimal": BATCH_OPTIMAL}
_MAX_TABLE_GPUS = 64
"""Beyond it, a job is as fast as on this number of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace becomes jobs."""

    gpus: int

    seed: int = 0

    background_ratio: float = 0.3
    """Part of the jobs that are backgrounds, where the trace does not say."""

    flexible: bool = False
    """Foregrounds can use fewer devices than they asked for."""

    start_s: float = 0.0

    pair: CollocatedPair | None = None


def jobs_of(
    trace: Trace, policies: Iterable[str], options: ReplayOptions
) -> list[SimulatedJob]:
    """Return a trace's jobs; those that need more devices than there are get all.

    Models and missing roles are drawn by the seed.
    """
    draw = random.Random(options.seed)
    methods = {DATA_PARALLEL} | {_METHODS[p] for p in policies if p in _METHODS}
    sizes = {min(job.gpus, options.gpus) for job in trace.jobs}
    tables = {name: _table(name, sizes, methods, options) for name in MODELS}
    specs: dict[tuple[str, str, int], Job] = {}
    found = []
    for job in trace.jobs:
        name = draw.choice(list(MODELS))
        share = draw.random()
        role = job.role
        if role is None:
            role = BACKGROUND if share < options.background_ratio else FOREGROUND
        gpus = min(job.gpus, options.gpus)
        key = (role, name, gpus)
        if key not in specs:
            specs[key] = _spec(role, name, gpus, flexible=options.flexible)
        table = tables[name] if role == FOREGROUND else None
        found.append(
            SimulatedJob(
                spec=specs[key],
                submit_s=job.submit_s,
                work_s=work_of(job.duration_s, gpus, table),
                speeds=table,
            )
        )
    return found


def _spec(role: str, name: str, gpus: int, *, flexible: bool) -> Job:
    minimum = 1 if flexible and role == FOREGROUND else gpus
    return Job(
        name=name,
        role=role,
        command=("train.py",),
        directory="/",
        gpus=GpuRange(minimum=minimum, maximum=gpus),
        batch=MODELS[name],
    )


def _table(
    name: str, sizes: set[int], methods: set[str], options: ReplayOptions
) -> Speeds:
    maximum = min(max(sizes), _MAX_TABLE_GPUS)
    powers = {2**i for i in range(maximum.bit_length()) if 2**i <= maximum}
    counts = powers | {size for size in sizes if size <= maximum} | {maximum}
    larger = tuple(2**i for i in range(9, 16))
    question = SpeedQuestion(
        profile=layer_profile(name, samples=(*SAMPLES, *larger)),
        network=cluster("deeppool"),
        batch=MODELS[name],
        gpus=tuple(sorted(counts)),
        methods=tuple(sorted(methods)),
        efficiency=SampleEfficiency(name="assumed", critical_batch=CRITICAL_BATCH),
        amplification_limit=AMPLIFICATION_LIMIT,
        pair=options.pair,
    )
    return speeds(question)


def replay(
    trace: Trace, policies: Sequence[str], options: ReplayOptions
) -> dict[str, Any]:
    """Return what each policy makes of a trace, and what was assumed."""
    jobs = jobs_of(trace, policies, options)
    rows = []
    for name in policies:
        done = simulate(
            jobs, registry.get(name), gpus=options.gpus, start_s=options.start_s
        )
        rows.append(summary(done))
    return {
        "trace": trace.format,
        "jobs": len(jobs),
        "skipped": trace.skipped,
        "gpus": options.gpus,
        "seed": options.seed,
        "assumed": assumptions(trace, options) + list(_never_started(rows)),
        "policies": rows,
    }


def assumptions(trace: Trace, options: ReplayOptions) -> list[str]:
    """Return what the figures depend on and the trace does not say."""
    models = ", ".join(f"{name} (batch {batch})" for name, batch in MODELS.items())
    found = [
        f"The trace names no models: seed {options.seed} draws one for each job, from "
        + models
        + ".",
        (
            "A job's work is its duration in the trace times its speed, data "
            "parallel, on the devices that it had. Speeds are simulated on A100 "
            "behind one NVSwitch."
        ),
        (
            f"Burst plans have amplification limit {AMPLIFICATION_LIMIT:g}. For other "
            f"batches, the critical batch of each model is {CRITICAL_BATCH:g}."
        ),
    ]
    if trace.skipped:
        found.append(
            "Rows of the trace that are left out, because they have no GPUs, no "
            f"submission, start or end, or last no time: {trace.skipped}."
        )
    if large := sum(job.gpus > options.gpus for job in trace.jobs):
        found.append(
            f"Jobs with more than {options.gpus} GPUs, which get all: {large}."
        )
    if any(min(job.gpus, options.gpus) > _MAX_TABLE_GPUS for job in trace.jobs):
        found.append(
            f"On more than {_MAX_TABLE_GPUS} GPUs a job is as fast as on that number."
        )
    if any(job.role is None for job in trace.jobs):
        found.append(
            f"The trace has no backgrounds: {options.background_ratio:.0%} of the jobs "
            "are, drawn by the seed."
        )
    if options.pair is None:
        found.append(
            "No pair of jobs was measured: a background gets nothing beside a rank "
            "that computes."
        )
    else:
        found.append(f"Beside a rank that computes: measured, {options.pair.title}.")
    return found


def _never_started(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what a policy's times leave out."""
    for row in rows:
        parts = row["foreground"], row["background"]
        never = sum(part["jobs"] - part["ended"] for part in parts)
        if never:
            yield (
                f"Jobs that never start under {row['policy']}, because they need more "
                f"GPUs than it gives their role, and are not in its times from "
                f"submission to end: {never}."
            )


def summary(done: SimulatedCluster) -> dict[str, Any]:
    """Return the figures of one policy.

    GPU-hours by use add up: foreground, background alone and unused are all of the
    cluster's; ``beside`` is what backgrounds did on foregrounds' devices.
    """
    jobs, hours = done.jobs, 3600.0
    fore = [job for job in jobs if job.role == FOREGROUND]
    back = [job for job in jobs if job.role == BACKGROUND]
    times = [job.end_s - job.submit_s for job in fore if job.end_s is not None]
    whole = done.gpus * done.end_s / hours
    foreground = total(jobs, FOREGROUND, "held_s") / hours
    alone = total(jobs, BACKGROUND, "held_s") / hours
    rate = sum(job.work_s - job.left_s for job in back)
    return {
        "policy": done.policy,
        "end_s": done.end_s,
        "foreground": {
            "jobs": len(fore),
            "ended": len(times),
            "completion_s": _distribution(times),
            "wait_s": _distribution([job.waited_s for job in fore]),
            "loss_ratio": _distribution(
                [
                    job.loss_s / (job.end_s - job.first_s)
                    for job in fore
                    if job.end_s is not None
                    and job.first_s is not None
                    and job.end_s > job.first_s
                ]
            ),
        },
        "background": {
            "jobs": len(back),
            "ended": sum(job.end_s is not None for job in back),
            "gpus": rate / done.end_s if done.end_s > 0 else 0.0,
            "wait_s": _distribution([job.waited_s for job in back]),
        },
        "preemptions": sum(job.preemptions for job in jobs),
        "gpu_hours": {
            "foreground": foreground,
            "background_alone": alone,
            "beside": total(jobs, BACKGROUND, "beside_s") / hours,
            "unused": whole - foreground - alone,
            "all": whole,
        },
    }


def _distribution(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    some = sorted(values)
    return {
        "mean": statistics.fmean(some),
        "median": statistics.median(some),
        "p95": some[min(len(some) - 1, int(0.95 * len(some)))],
        "largest": some[-1],
    }
