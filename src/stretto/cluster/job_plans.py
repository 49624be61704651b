"""Plans of a profiled job: ``python -m stretto.cluster.job_plans ROOT JOB PROFILE``.

The coordinator runs this in a process of its own, because planning takes seconds. It
writes how fast the job runs on each number of devices, and a burst plan for each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto import zoo
from stretto.cluster.folders import Folders
from stretto.cluster.part_spec import write_json
from stretto.cluster.views import BURST, DATA_PARALLEL, Speed, Speeds
from stretto.cluster.wire import data_of, plain_data
from stretto.cost import cluster_at
from stretto.cost.burst import BurstNetwork
from stretto.errors import Infeasible, SpecError, StrettoError
from stretto.planners.burst.plan import same_width
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.simulated import plan_on, simulate
from stretto.schema import Cluster, codec
from stretto.schema.burst import BurstPlan, LayerProfile
from stretto.schema.collocation import Collocation
from stretto.schema.job import Job
from stretto.sim.collocation import collocate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.schema.collocation import CollocatedPair
    from stretto.sim.burst import BurstStep

MAX_SIMULATED = 64
"""Largest number of devices that is planned for."""

NETWORK = "deeppool"
"""The measured network of `stretto.zoo` that is assumed if none was measured."""


@final
@dataclass(frozen=True, slots=True)
class JobPlans:
    """Estimates of jobs before they run."""

    speeds: Speeds

    plans: dict[int, BurstPlan]
    """Burst plans by number of devices."""


def plan_job(
    spec: Job,
    profile: LayerProfile,
    network: Cluster,
    *,
    devices: int,
    pair: CollocatedPair | None = None,
) -> JobPlans:
    """Return a job's speeds and burst plans.

    Args:
        spec: the job; its batch stays the same on all numbers of devices.
        profile: of its layers.
        network: resized to each number of devices.
        devices: of the cluster.
        pair: what was measured of the job beside a background; without it, no rate of
            a background is known.

    Raises:
        SpecError: the job has no batch, or no number of devices can be predicted.
    """
    if spec.batch is None:
        raise SpecError(
            f"job {spec.name!r} has no batch, which a plan needs: add it to its file",
            place=".batch",
        )
    rows: dict[str, list[Speed]] = {DATA_PARALLEL: [], BURST: []}
    plans: dict[int, BurstPlan] = {}
    alone_s, reason = 0.0, ""
    for gpus in _counts(spec, devices):
        try:
            resized = cluster_at(network, gpus)
            problem = _problem(spec, profile, resized, gpus)
            plain = simulate(profile, same_width(problem, gpus), resized)
            burst_plan, burst = plan_on(problem, resized)
        except (SpecError, Infeasible, ValueError) as error:
            # The profile lacks the samples of such a device, or the limit is too low.
            reason = str(error)
            continue
        alone_s = alone_s or plain.iteration_s * gpus
        rows[DATA_PARALLEL].append(_speed(plain, gpus, spec.batch, alone_s, pair))
        rows[BURST].append(_speed(burst, gpus, spec.batch, alone_s, pair))
        plans[gpus] = burst_plan
    if not plans:
        raise SpecError(f"job {spec.name!r} cannot be planned: {reason}")
    return JobPlans(
        Speeds(methods={method: tuple(found) for method, found in rows.items()}), plans
    )


def _counts(spec: Job, devices: int) -> Iterator[int]:
    """Yield the numbers of devices to plan for: powers of two, and both ends."""
    maximum = min(spec.gpus.maximum, devices, MAX_SIMULATED, spec.batch or 1)
    powers = {1 << i for i in range(maximum.bit_length())}
    yield from sorted(n for n in powers | {spec.gpus.minimum, maximum} if n <= maximum)


def _problem(
    spec: Job, profile: LayerProfile, network: Cluster, gpus: int
) -> BurstProblem:
    limit = None if spec.burst is None else spec.burst.amplification_limit
    return BurstProblem.of(
        profile,
        BurstNetwork.of(network, gpus),
        gpus=gpus,
        batch=spec.batch or 1,
        widths="powers" if gpus & (gpus - 1) == 0 else "divisors",
        amplification_limit=limit,
    )


def _speed(
    step: BurstStep,
    gpus: int,
    batch: int,
    alone_s: float,
    pair: CollocatedPair | None,
) -> Speed:
    beside = None if pair is None else collocate(step, pair)
    loss = 0.0 if beside is None else 1.0 - step.iteration_s / beside.iteration_s
    return Speed(
        gpus=gpus,
        batch=batch,
        step_s=step.iteration_s,
        speedup=alone_s / step.iteration_s,
        idle_ratios=tuple(idle_s / step.iteration_s for idle_s in step.idle_s),
        background=() if beside is None else beside.background_by_rank,
        loss=max(0.0, loss),
    )


def pair_of(path: str, spec: Job) -> CollocatedPair | None:
    """Return the pair of a job that a file has, whichever its background is.

    Raises:
        SpecError: the file cannot be read.
    """
    if not path:
        return None
    rows = Collocation.load(path).rows
    return next((row for row in rows if row.foreground == spec.name), None)


# the process


def save_request(folders: Folders, job: str, spec: Job) -> None:
    """Write what the process needs to know."""
    folder = folders.plans(job)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "speeds.json").unlink(missing_ok=True)
    codec.save(folder / "job.json", spec)


def read_answer(folders: Folders, job: str) -> tuple[Speeds | None, str]:
    """Return the speeds that the process wrote, or why they are missing."""
    try:
        found = json.loads((folders.plans(job) / "speeds.json").read_bytes())
        data: dict[str, Any] = data_of(found)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"planning ended without an answer: {error}"
    return data["speeds"], str(data["why"])


def main(root: str, job: str, profile: str) -> int:
    """Plan a job, and write the answer."""
    folders = Folders(Path(root))
    data: dict[str, Any] = {"speeds": None, "why": ""}
    try:
        settings = folders.load_settings()  # which say where plans are
        spec = Job.load(folders.plans(job) / "job.json")
        found = plan_job(
            spec,
            LayerProfile.load(Path(spec.directory, profile)),
            Cluster.load(settings.network)
            if settings.network
            else zoo.cluster(NETWORK),
            devices=sum(map(len, folders.hosts(settings).values())),
            pair=pair_of(settings.collocation, spec),
        )
        for gpus, plan in found.plans.items():
            codec.save(folders.plan(job, gpus), plan)
        data["speeds"] = found.speeds
    except StrettoError as error:
        data["why"] = str(error)
    write_json(folders.plans(job) / "speeds.json", plain_data(data))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
