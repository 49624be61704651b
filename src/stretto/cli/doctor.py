"""``stretto doctor``: what this machine supports, and how to fix what it does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from stretto._version import (
    FIRST_TORCH,
    LAST_TORCH,
    TORCH_REQUIREMENT,
    TORCH_VERSIONS,
    __version__,
)
from stretto.background.priority import probe
from stretto.cli._machine import NOTE, OK, WRONG, MachineCheck, machine_checks
from stretto.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stretto.background.priority import Isolation

OVERRIDES = {
    "NCCL_MAX_CTAS": "overrides the CTAs that a plan gives each collective",
    "NCCL_MIN_CTAS": "overrides the CTAs that a plan gives each collective",
    "NCCL_MAX_NCHANNELS": "limits the CTAs that a plan gives each collective",
    "NCCL_MIN_NCHANNELS": "raises the CTAs that a plan gives each collective",
    "NCCL_MAX_NRINGS": "limits the CTAs that a plan gives each collective",
    "NCCL_MIN_NRINGS": "raises the CTAs that a plan gives each collective",
    "NCCL_CGA_CLUSTER_SIZE": "overrides the launch that a plan's resources assume",
    "NCCL_CTA_POLICY": "overrides the CTAs that a plan gives each collective",
    "NCCL_NET": "chooses the network that is probed",
    "NCCL_ALGO": "overrides the algorithm of a plan's buckets",
    "NCCL_PROTO": "overrides the protocol that is probed",
    "NCCL_NTHREADS": "changes how much of the device each CTA takes",
    "NCCL_SOCKET_IFNAME": "chooses the network that is probed",
    "GLOO_SOCKET_IFNAME": (
        "chooses the network; each further name gives every group one more "
        "connection, in addition to lanes"
    ),
    "GLOO_DEVICE_TRANSPORT": "chooses how Gloo sends",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "replaces the process groups that lanes use",
}
"""Variables that change the effect of a plan, and how."""

_OVERLAP = "CUDA_DEVICE_MAX_CONNECTIONS"
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_CPU_COMBINER = "cpu-all-reduce-combiner"


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, as_json: bool) -> None:
    """Report what this machine supports, what is wrong, and how to fix it.

    Exits with 1 if something is wrong that stretto cannot do without.
    """
    checks = [
        *_python_checks(),
        *environment_checks(os.environ),
        *jax_checks(os.environ),
        isolation_check(probe()),
        *_lab_checks(),
    ]
    if as_json:
        import json

        report = {"stretto": __version__, "checks": [asdict(check) for check in checks]}
        click.echo(json.dumps(report))
    else:
        _print(checks)
    if any(check.status == WRONG for check in checks):
        sys.exit(1)


def _print(checks: list[MachineCheck]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        color = {OK: "green", NOTE: "yellow", WRONG: "red"}[check.status]
        sign = click.style(f"{check.status:>5}", fg=color)
        click.echo(f"{sign}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            click.echo(f"{'':>5}  {'':<{width}}  -> {check.remedy}")


def _python_checks() -> Iterator[MachineCheck]:
    version = platform.python_version()
    yield MachineCheck(
        name="python",
        status=OK if sys.version_info >= (3, 11) else WRONG,
        found=f"{version} on {platform.system()} {platform.machine()}",
        remedy="" if sys.version_info >= (3, 11) else "install Python 3.11 or newer",
    )
    yield MachineCheck(
        name="cores", status=OK, found=f"{len(os.sched_getaffinity(0))} usable cores"
    )
    try:
        import torch
    except ImportError as error:
        yield MachineCheck(
            name="torch",
            status=WRONG,
            found=f"cannot be imported: {error}",
            remedy=f"pip install '{TORCH_REQUIREMENT}'",
        )
        return
    yield torch_version_check(torch.__version__)
    yield from _backend_checks()


def torch_version_check(version: str) -> MachineCheck:
    """Check whether stretto was written for a version of torch."""
    parts = version.split("+")[0].split(".")
    found = tuple(int(part) if part.isdigit() else -1 for part in parts[:2])
    if FIRST_TORCH <= found <= LAST_TORCH:
        return MachineCheck(name="torch", status=OK, found=version)
    return MachineCheck(
        name="torch",
        status=WRONG if found < FIRST_TORCH else NOTE,
        found=f"{version}; stretto is tested with {TORCH_VERSIONS}",
        remedy=f"pip install '{TORCH_REQUIREMENT}'",
    )


def _backend_checks() -> Iterator[MachineCheck]:
    import torch
    from torch import distributed

    if not distributed.is_available():
        yield MachineCheck(
            name="torch.distributed",
            status=WRONG,
            found="this build of torch lacks torch.distributed",
            remedy="pip install torch (a build for Linux)",
        )
        return
    gloo = distributed.is_gloo_available()
    yield MachineCheck(
        name="gloo",
        status=OK if gloo else NOTE,
        found="usable, on CPU" if gloo else "not in this build of torch",
        remedy="" if gloo else "pip install torch (a build with Gloo)",
    )
    if not torch.cuda.is_available():
        yield MachineCheck(
            name="cuda", status=OK, found="no device: training runs on CPU"
        )
        yield from machine_checks(os.environ)
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} SMs"
        )
        yield MachineCheck(name=f"cuda:{i}", status=OK, found=found)
    yield from machine_checks(os.environ)


def environment_checks(environment: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Check for variables that would silently change the effect of a plan."""
    nothing = True
    for name, effect in OVERRIDES.items():
        if name in environment:
            nothing = False
            yield MachineCheck(
                name="environment",
                status=NOTE,
                found=f"{name}={environment[name]}: {effect}",
                remedy=f"unset {name}, or probe and plan with it set",
            )
    if environment.get(_OVERLAP) == "1":
        nothing = False
        yield MachineCheck(
            name="environment",
            status=NOTE,
            found=f"{_OVERLAP}=1: communication cannot overlap computation on CUDA",
            remedy=f"unset {_OVERLAP}",
        )
    if environment.get(_ORDER) == "0":
        nothing = False
        yield MachineCheck(
            name="environment",
            status=NOTE,
            found=f"{_ORDER}=0: NCCL lanes may start in different orders and deadlock, "
            "so plans with several are refused",
            remedy=f"export {_ORDER}=1",
        )
    if nothing:
        yield MachineCheck(
            name="environment",
            status=OK,
            found="no variable overrides a plan",
        )


def jax_checks(environment: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Check an installed JAX, which is not imported, for what costs it overlap."""
    try:
        version = metadata.version("jax")
    except metadata.PackageNotFoundError:
        return
    plugins = [point.name for point in metadata.entry_points(group="jax_plugins")]
    if plugins and environment.get("JAX_PLATFORMS") != "cpu":
        yield MachineCheck(
            name="jax",
            status=NOTE,
            found=f"{version} with {', '.join(plugins)}: stretto.jax runs on CPUs only",
            remedy="export JAX_PLATFORMS=cpu, or leave communication to XLA with "
            "jax.jit(..., compiler_options=stretto.jax.compile_options())",
        )
    elif _CPU_COMBINER in environment.get("XLA_FLAGS", ""):
        yield MachineCheck(
            name="jax", status=OK, found=f"{version}; XLA_FLAGS names {_CPU_COMBINER}"
        )
    else:
        yield MachineCheck(
            name="jax",
            status=NOTE,
            found=f"{version}; on CPU, XLA's own communication (a mesh, shard_map) "
            "joins all gradients into one all-reduce after backward",
            remedy="jax.jit(..., compiler_options=stretto.jax.compile_options())",
        )


def isolation_check(found: Isolation) -> MachineCheck:
    """Check whether a background job on this host yields the processors."""
    if found.works:
        return MachineCheck(name="background", status=OK, found=str(found))
    return MachineCheck(
        name="background",
        status=NOTE,
        found=str(found),
        remedy="permit cgroups with cpu.idle (systemd: Delegate=cpu), or start "
        "background jobs with setsid; without, they run in windows only",
    )


def _lab_checks() -> Iterator[MachineCheck]:
    """Check whether a lab of each mode works, by building one for a moment."""
    from stretto.lab import LabSpec, Mode, run_lab

    program = shutil.which("true")
    if program is None:
        yield MachineCheck(
            name="lab", status=NOTE, found="no program `true` to try it with"
        )
        return
    spec = LabSpec(hosts=2, link_bytes_per_s=1.25e8, flow_bytes_per_s=3.75e7)

    def attempt(mode: Mode) -> str | None:
        lines: list[str] = []
        return lab_failure(
            lambda: run_lab(
                spec, [program], mode=mode, timeout_s=20, announce=lines.append
            ),
            lines,
        )

    failure = attempt(Mode.NAMESPACES)
    if failure is None:
        who = "as root" if os.geteuid() == 0 else "in a user namespace"
        yield MachineCheck(
            name="lab", status=OK, found=f"namespaces, {who}: link and flow caps"
        )
        return
    yield MachineCheck(
        name="lab", status=NOTE, found=failure, remedy=_lab_remedy(failure)
    )
    failure = attempt(Mode.PACED)
    yield MachineCheck(
        name="lab",
        status=OK if failure is None else NOTE,
        found=failure or "paced: a limit per connection, no limit per link",
    )


def lab_failure(attempt: Callable[[], int], lines: list[str]) -> str | None:
    """Return why an attempt to build a lab failed, or ``None`` if it did not."""
    try:
        status = attempt()
    except (LabError, OSError) as error:
        return str(error)
    if status == 0:
        return None
    return f"a lab of `true` ended with {status}: {' '.join(lines)}"


def _lab_remedy(failure: str) -> str:
    search: dict[str, Any] = {"path": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    missing = [
        package
        for tool, package in (
            ("ip", "iproute2"),
            ("tc", "iproute2"),
            ("nft", "nftables"),
        )
        if shutil.which(tool, **search) is None
    ]
    if missing:
        return f"apt-get install {' '.join(dict.fromkeys(missing))}"
    if os.geteuid() != 0 and "namespace" in failure:
        return (
            "sudo sysctl kernel.unprivileged_userns_clone=1 "
            "kernel.apparmor_restrict_unprivileged_userns=0, or run as root"
        )
    return "run as root, with the capability CAP_SYS_ADMIN in a container"
