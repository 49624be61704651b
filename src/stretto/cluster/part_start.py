"""From the ledger's command to start an attempt to what its supervisor runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import variable_names
from stretto.cluster.commands import PROFILE
from stretto.cluster.part_spec import PartSpec, ReplanSpec
from stretto.cluster.views import BURST
from stretto.lab.ports import free_port
from stretto.network_interfaces import INTERFACE_VARIABLES, interface_of
from stretto.process_identity import boot_id
from stretto.schema.job import DIRECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cluster.commands import StartPart
    from stretto.cluster.folders import Folders, Settings
    from stretto.schema.job import Job

_PEERS_GRACE_S = 5.0


def part_spec_of(
    command: StartPart,
    folders: Folders,
    devices: Sequence[str],
    *,
    settings: Settings,
    meeting: Sequence[Any] | None,
    watchdog_until_s: float,
) -> PartSpec:
    """Return what a host runs for a command.

    Args:
        command: the ledger's.
        folders: of the cluster.
        devices: names of the host's devices.
        settings: of the cluster.
        meeting: address and port at which the ranks meet; ``None``: choose a port.
        watchdog_until_s: when the host's watchdogs fire, as of `loop.now_s`.
    """
    spec = command.spec
    address, port = meeting or (settings.address, free_port())
    words, launch, profile = spec.command, spec.launch, ""
    if command.purpose == PROFILE and spec.burst is not None:
        path = profile_path(spec, folders, devices)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        words, launch, profile = _profiling(spec, path), DIRECT, str(path)
    batch = command.batch or spec.batch
    return PartSpec(
        job=command.job,
        attempt=command.attempt,
        boot=boot_id(),
        role=spec.role,
        launch=launch,
        command=words,
        directory=spec.directory,
        environment=spec.environment,
        devices=tuple(devices[index] for index in command.devices),
        first_rank=command.first_rank,
        world_size=command.ranks,
        master_address=address,
        master_port=int(port),
        files=str(folders.files(command.job)),
        logs=str(folders.logs(command.job, command.attempt)),
        boards=str(folders.host(command.host) / "boards"),
        profile=profile,
        host_memory_bytes=0 if profile else spec.host_memory_bytes,
        gang="" if spec.gang is None else spec.gang.kind,
        batch=batch,
        max_loss=spec.background.max_loss,
        allows_background=spec.background.allow and not profile,
        signal=spec.restart.signal,
        grace_s=spec.restart.grace_s,
        peers_grace_s=min(_PEERS_GRACE_S, spec.restart.grace_s),
        watchdog_s=settings.watchdog_s,
        first_watchdog_until_s=watchdog_until_s,
        report_every_s=settings.report_every_s,
        extra=_variables(command, folders, batch, settings.address),
        replan=_replan_spec(command, folders, devices, settings.network),
    )


def _replan_spec(
    command: StartPart, folders: Folders, devices: Sequence[str], network: str
) -> ReplanSpec | None:
    """Return what a job's plan was made from, if it may change while the job runs."""
    spec, plan = command.spec, folders.plan(command.job, command.ranks)
    if spec.burst is None or not spec.burst.replan:
        return None
    if command.purpose == PROFILE or command.method != BURST or not plan.exists():
        return None
    profile = spec.burst.profile or profile_path(spec, folders, devices)
    return ReplanSpec(
        plan=str(plan),
        profile=str(Path(spec.directory, profile)),
        network=network,
        amplification_limit=spec.burst.amplification_limit,
    )


def _variables(
    command: StartPart, folders: Folders, batch: int | None, address: str
) -> dict[str, str]:
    found = {
        variable_names.CLUSTER_JOB: command.job,
        variable_names.CLUSTER_FILES: str(folders.files(command.job)),
    }
    if command.resume:
        found[variable_names.CLUSTER_RESUME] = "1"
    if batch is not None:
        found[variable_names.CLUSTER_BATCH] = str(batch)
    plan = folders.plan(command.job, command.ranks)
    if command.method == BURST and plan.exists():
        found[variable_names.CLUSTER_PLAN] = str(plan)
    if len(command.hosts) > 1 and (interface := interface_of(address)) is not None:
        # Gloo otherwise takes the interface of what the host's name resolves to, which
        # is often the loopback one: other hosts could not connect.
        found |= dict.fromkeys(INTERFACE_VARIABLES, interface)
    return found


def profile_path(spec: Job, folders: Folders, devices: Sequence[str]) -> Path:
    """Return the file of the profile of a job and of its equals.

    They have the same factory in an equal file, batch, number and kind of devices.
    """
    factory = "" if spec.burst is None else spec.burst.factory
    source = Path(spec.directory, factory.partition(":")[0])
    with contextlib.suppress(OSError):
        factory += hashlib.sha256(source.read_bytes()).hexdigest()
    kind = devices[0].partition(":")[0]
    text = json.dumps([factory, spec.batch, spec.gpus.maximum, kind])
    return folders.profile(hashlib.sha256(text.encode()).hexdigest()[:32])


def _profiling(spec: Job, path: Path) -> tuple[str, ...]:
    """Return the command that writes a job's layer profile."""
    factory = "" if spec.burst is None else spec.burst.factory
    words = (sys.executable, "-m", "stretto", "burst", "profile", factory)
    sizes = ("--gpus", str(spec.gpus.maximum), "--batch", str(spec.batch))
    return (*words, "-o", str(path), *sizes)
