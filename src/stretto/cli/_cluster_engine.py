"""``stretto cluster start | down | status``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from stretto.cli._cluster_options import as_json, in_folder, put
from stretto.cli._values import Real, Size, Whole
from stretto.cluster import engine_local, engine_ray
from stretto.cluster.folders import Settings
from stretto.cluster.local_devices import KINDS, local_devices
from stretto.cluster.policies import registry
from stretto.cluster.ray_head import is_loopback
from stretto.errors import SpecError
from stretto.schema import Cluster, Collocation

if TYPE_CHECKING:
    from stretto.cluster.folders import Folders, RaySettings

_HERE = "here"
_MAX_DEVICES = 1024


@click.command(name="start")
@click.option(
    "--local",
    "devices",
    type=Whole(min=1, max=_MAX_DEVICES),
    metavar="N",
    help="Use this machine, with N devices.  [default: its GPUs, or its processors]",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value=_HERE,
    metavar="[HOST:PORT]",
    help="Use Ray: one that runs there, with all its nodes, or one that is started "
    "here and that other hosts can join.",
)
@click.option(
    "--interface",
    metavar="ADDRESS",
    help="Address of this machine for a Ray that is started here. Any but the default "
    "lets it listen on all interfaces.  [default: 127.0.0.1]",
)
@click.option(
    "--shared",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Folder that all hosts share, for logs and jobs' files.  [default: the "
    "cluster's own]",
)
@click.option(
    "--insecure",
    "is_insecure",
    is_flag=True,
    help="Join a Ray that asks for no token.",
)
@click.option(
    "--hosts",
    type=Whole(1, _MAX_DEVICES),
    default=1,
    show_default=True,
    help="Emulated hosts that share the devices, to try what happens if one fails.",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="Kind of the devices.  [default: cuda with enough GPUs, otherwise cpu]",
)
@click.option(
    "--device-memory",
    "memory_bytes",
    type=Size(least=1),
    metavar="SIZE",
    help="Memory of each device, such as 80GB, which jobs' memory_bytes are compared "
    "with.  [default: not compared]",
)
@click.option(
    "--policy",
    default="fifo",
    show_default=True,
    help=f"Policy that decides which jobs run where: {', '.join(registry.NAMES)}, or "
    "that of an installed package; `stretto cluster simulate` compares them.",
)
@click.option(
    "--watchdog",
    "watchdog_s",
    type=Real(min=0.5),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time without the coordinator after which a host ends its jobs.",
)
@click.option(
    "--heartbeat",
    "heartbeat_s",
    type=Real(min=0.02),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between a host's heartbeats; without four of them, it is lost.",
)
@click.option(
    "--report",
    "report_every_s",
    type=Real(min=0.05),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between reports of a job's steps.",
)
@click.option(
    "--network",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="Network that burst plans are made for, from `stretto probe`.  [default: "
    "DeepPool's]",
)
@click.option(
    "--collocation",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="Measured pairs, from `stretto run --background DEVICE --collocation FILE`: "
    "which backgrounds may run beside which foregrounds.",
)
@in_folder
@as_json
def start_command(
    devices: int | None,
    ray: str | None,
    interface: str | None,
    shared: str | None,
    is_insecure: bool,
    hosts: int,
    kind: str | None,
    memory_bytes: int | None,
    policy: str,
    watchdog_s: float,
    heartbeat_s: float,
    report_every_s: float,
    network: str | None,
    collocation: str | None,
    folders: Folders,
    is_json: bool,
) -> None:
    """Start a cluster on this machine or on Ray.

    It keeps running when you log out.
    """
    registry.get(policy)
    # A Ray that runs already says itself what its nodes have.
    is_named = ray in (None, _HERE) or devices is not None
    if interface is not None and ray != _HERE:
        raise SpecError(
            f"--interface {interface}: is for a Ray that is started here: give --ray, "
            "without an address"
        )
    if is_insecure and ray in (None, _HERE):
        raise SpecError(
            "--insecure: is for a Ray that runs already: give --ray HOST:PORT"
        )
    if not is_named and (hosts > 1 or kind is not None):
        given = f"--hosts {hosts}" if hosts > 1 else f"--kind {kind}"
        raise SpecError(
            f"{given}: describes this machine's devices: give their number with "
            "--local N, or Ray says what its nodes have"
        )
    for kind_of_file, path in ((Cluster, network), (Collocation, collocation)):
        if path is not None:
            kind_of_file.load(path)  # the coordinator reads it much later
    address = "127.0.0.1" if interface is None else interface
    ray_settings = _ray(folders, ray, address, is_insecure=is_insecure)
    names = local_devices(devices, kind) if is_named else []
    if is_named and hosts > len(names):
        raise SpecError(
            f"--hosts {hosts}: more hosts than the {len(names)} devices: give each "
            "at least one"
        )
    if watchdog_s < 5 * heartbeat_s:
        raise SpecError(
            f"--watchdog {watchdog_s:g} must be at least five heartbeats of "
            f"{heartbeat_s:g} s, or one late answer ends jobs"
        )
    settings = Settings(
        hosts={
            f"host{number}": tuple(names[number::hosts])
            for number in range(hosts if is_named else 0)
        },
        policy=policy,
        memory_bytes=memory_bytes or 0,
        network=network or "",
        collocation=collocation or "",
        watchdog_s=watchdog_s,
        heartbeat_s=heartbeat_s,
        report_every_s=report_every_s,
        shared=shared or "",
        ray=ray_settings,
    )
    found = engine_local.start(folders, settings)
    if is_json:
        put(found)
        return
    click.echo(f"started a cluster in {folders.root}")
    if ray_settings is not None and not is_loopback(ray_settings.address):
        click.echo(engine_ray.how_to_join(ray_settings))
    _echo_status(found)


def _ray(
    folders: Folders, ray: str | None, interface: str, *, is_insecure: bool
) -> RaySettings | None:
    if ray is None:
        return None
    if ray == _HERE:
        return engine_ray.started_ray(folders, interface)
    return engine_ray.joined_ray(ray, is_insecure=is_insecure)


@click.command(name="down")
@click.option(
    "--timeout",
    "timeout_s",
    type=Real(min=0),
    default=150.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until jobs have written their checkpoints.",
)
@in_folder
@as_json
def down_command(timeout_s: float, folders: Folders, is_json: bool) -> None:
    """Stop the jobs with their grace, and end the cluster.

    Jobs that ran wait for the next `stretto cluster start` of the same folder.
    """
    has_ended = engine_local.down(
        folders, timeout_s=timeout_s, report=functools.partial(click.echo, err=True)
    )
    if is_json:
        put({"down": True, "jobs_ended": has_ended})
        return
    click.echo(f"the cluster in {folders.root} is down")
    if not has_ended:
        click.echo("jobs that still run end when their watchdog fires")


@click.command(name="status")
@in_folder
@as_json
def status_command(folders: Folders, is_json: bool) -> None:
    """Show the cluster's hosts and devices, and count its jobs."""
    found = engine_local.ask(folders, {"do": "status"})
    if is_json:
        put(found)
    else:
        _echo_status(found)


def _echo_status(found: dict[str, Any]) -> None:
    if found["trouble"]:
        click.echo(f"the store is unavailable: {found['trouble']}")
    for row in found["hosts"]:
        state = "ready" if row["joined"] else "not heard from"
        if row["drained"]:
            state += ", drained"
            state += " until `stretto cluster down` has ended" if row["ending"] else ""
        if why := row.get("why"):  # missing in answers of an earlier release
            state += f"; {why}"
        click.echo(f"{row['host']}: {state}")
        for device in row["devices"]:
            jobs = [device[role] for role in ("foreground", "background")]
            used = ", ".join(job for job in jobs if job) or "free"
            click.echo(f"  {device['name']}: {used}")
    counts = ", ".join(f"{number} {state}" for state, number in found["jobs"].items())
    click.echo(f"jobs: {counts or 'none'}; policy {found['policy']}")
