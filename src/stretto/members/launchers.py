"""Which launcher has started this process, where in its job, and what a loss does.

The variables that a launcher sets say which it is. torchrun and Ray Train set
``RANK`` and ``WORLD_SIZE``; srun has names of its own.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto import variable_names
from stretto.rank_variables import launched_place, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""``True`` where torchrun's own process serves the store at ``MASTER_PORT``."""

_SLURM_PORTS = range(15_000, 30_000)
"""A job's number chooses one, so that jobs on one host get different ones."""

_FIRST_NAME = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_BRACKETS = re.compile(r"\[([^\],-]+)[^\]]*\]")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


class Launcher(enum.Enum):
    """The program that starts ranks."""

    TORCHRUN = "torchrun"
    SRUN = "srun"
    RAY = "Ray Train"
    OTHER = "the launcher"


_STARTERS = {
    **{launcher: launcher.value for launcher in Launcher},
    Launcher.TORCHRUN: "torchrun (also as `stretto run` without --elastic)",
}

_REMEDIES = {
    Launcher.TORCHRUN: "start it with `torchrun ... -m stretto run --elastic MIN:MAX "
    "SCRIPT`, or without torchrun with `stretto run --elastic MIN:MAX SCRIPT`",
    Launcher.SRUN: "start it with `srun ... stretto run --elastic MIN:MAX SCRIPT`",
    Launcher.RAY: "start `stretto run --elastic MIN:MAX SCRIPT` on each host instead",
    Launcher.OTHER: "start it with `stretto run --elastic MIN:MAX SCRIPT`",
}

_RESTARTS = {
    Launcher.TORCHRUN: "--max-restarts N starts all ranks again",
    Launcher.SRUN: "a job submitted with --requeue starts again after a node fails",
    Launcher.RAY: "FailureConfig(max_failures=N) starts all workers again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A process's place in a launcher's job."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    """How many processes of the job this host has, if it is known."""

    address: str
    port: int
    """Where the job's keepers can meet, on the host of rank 0."""

    job: str | None = None
    """The job's name, if the launcher gives it one."""


def launcher_of(environment: Mapping[str, str]) -> Launcher:
    """Return who has started this process, as far as its variables say."""
    if "RAY_RAYLET_PID" in environment or "RAY_JOB_ID" in environment:
        return Launcher.RAY
    if variable_names.LAB in environment:
        return Launcher.OTHER
    if "TORCHELASTIC_RUN_ID" in environment:
        return Launcher.TORCHRUN
    return Launcher.SRUN if "SLURM_STEP_ID" in environment else Launcher.OTHER


def placement_of(environment: Mapping[str, str]) -> Placement | None:
    """Return this process's place, or ``None`` if no launcher has started it.

    Raises:
        SpecError: a variable is not a number, or a rank is outside of its size.
    """
    if (found := launched_place(environment)) is not None:
        # On one more than the port, where the launcher's own store listens at it.
        uses_port = environment.get(AGENT_STORE_VARIABLE) == "True"
        return Placement(
            rank=found.rank,
            size=found.size,
            local_rank=found.local_rank or 0,
            local_size=found.local_size,
            address=found.address,
            port=found.port + uses_port,
        )
    # A batch script has SLURM_PROCID and SLURM_NTASKS, too, but is not a step of srun.
    if {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"} <= environment.keys():
        place = _of_slurm(environment)
        return place if place.size > 1 else None
    return None


def loss_warning(environment: Mapping[str, str], *, has_snapshots: bool) -> str:
    """Return what a lost rank does to a job without keepers, and the way out."""
    launcher = launcher_of(environment)
    after = ""
    if restarts := _RESTARTS.get(launcher):
        where = (
            "the newest snapshot" if has_snapshots else "step 0, without checkpoint="
        )
        after = f" ({restarts}, from {where})"
    return (
        f"a lost rank ends this job, which {_STARTERS[launcher]} has started{after}. "
        f"To continue with the other ranks, {_REMEDIES[launcher]}."
    )


def _of_slurm(environment: Mapping[str, str]) -> Placement:
    job = environment.get("SLURM_JOB_ID", "0")
    step = environment["SLURM_STEP_ID"]
    names = environment.get("SLURM_STEP_NODELIST") or environment.get(
        "SLURM_JOB_NODELIST", ""
    )
    number = int(job) if job.isdecimal() else 0
    port = whole_number(environment, "MASTER_PORT")
    size = whole_number(environment, "SLURM_STEP_NUM_TASKS")
    return Placement(
        rank=whole_number(environment, "SLURM_PROCID") or 0,
        size=size or whole_number(environment, "SLURM_NTASKS") or 1,
        local_rank=whole_number(environment, "SLURM_LOCALID") or 0,
        local_size=tasks_of_node(
            environment.get("SLURM_STEP_TASKS_PER_NODE")
            or environment.get("SLURM_TASKS_PER_NODE", ""),
            whole_number(environment, "SLURM_NODEID") or 0,
        ),
        address=environment.get("MASTER_ADDR") or first_host(names) or "127.0.0.1",
        port=port or _SLURM_PORTS[number % len(_SLURM_PORTS)],
        job=f"slurm-{job}.{step}",
    )


def first_host(names: str) -> str:
    """Return the first host of Slurm's list, such as ``gpu[001-003,7],big1``."""
    found = _FIRST_NAME.match(names)
    return "" if found is None else _BRACKETS.sub(r"\1", found[0])


def tasks_of_node(text: str, node: int) -> int | None:
    """Return a node's number of tasks from Slurm's text, such as ``4(x2),1``."""
    for count, times in _TASKS.findall(text):
        node -= int(times or "1")
        if node < 0:
            return int(count)
    return None
