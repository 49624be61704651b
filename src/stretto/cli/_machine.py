"""Checks of `stretto doctor` on network interfaces, Gloo, NCCL, MPS and limits."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OK, NOTE, WRONG = "ok", "note", "wrong"

GLOO_TRANSPORTS = ("TCP", "TCP_TLS", "UV", "IBVERBS")
"""Values of GLOO_DEVICE_TRANSPORT that builds of torch may support."""

USUAL_LANES = 8
USUAL_RANKS = 64
"""Lanes and ranks that a machine's limits should allow: what planners choose among,
and a cluster of moderate size.
"""

_THREADS_PER_LANE = 3
_DESCRIPTORS_PER_LANE = 3
_DESCRIPTORS_BESIDE = 256  # libraries, data loaders, the process group itself

# One child per transport, because the choice is read once per process.
_TRY_TRANSPORTS = """
import os, sys
import torch.distributed as dist
for name in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["GLOO_DEVICE_TRANSPORT"] = name
        try:
            dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            print("has", name, flush=True)
        finally:
            os._exit(0)
    os.wait()
try:
    dist.ProcessGroupGloo.create_default_device()
    print("default works", flush=True)
except RuntimeError as error:
    print("default fails:", str(error).splitlines()[0], flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """The result of one check."""

    name: str

    status: str
    """``ok``, ``note`` (works, with a limit) or ``wrong``."""

    found: str

    remedy: str = ""
    """The command that fixes it."""


def interface_checks(
    environment: Mapping[str, str], interfaces: list[str]
) -> Iterator[MachineCheck]:
    """Check the interfaces, and whether the requested one is among them."""
    shown = ", ".join(interfaces) or "none"
    missing = [
        name
        for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",")
        if name and name not in interfaces
    ]
    if missing:
        others = [name for name in interfaces if name != "lo"] or interfaces
        yield MachineCheck(
            name="interfaces",
            status=WRONG,
            found=f"GLOO_SOCKET_IFNAME names {', '.join(missing)}; there are {shown}",
            remedy=f"export GLOO_SOCKET_IFNAME={others[0] if others else 'lo'}",
        )
    else:
        yield MachineCheck(name="interfaces", status=OK, found=shown)


def gloo_checks(output: str, environment: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Check what Gloo can send with, from the output `output` of `try_gloo`."""
    lines = output.splitlines()
    has = [line.removeprefix("has ") for line in lines if line.startswith("has ")]
    asked = environment.get("GLOO_DEVICE_TRANSPORT", "").upper()
    found = f"transports {', '.join(has)}" if has else "no transport"
    failed = [line for line in lines if line.startswith("default fails: ")]
    if asked and asked not in has:
        yield MachineCheck(
            name="gloo transport",
            status=WRONG,
            found=f"GLOO_DEVICE_TRANSPORT={asked} is not in this build; {found}",
            remedy="unset GLOO_DEVICE_TRANSPORT",
        )
    elif failed or not has:
        reason = failed[0].removeprefix("default fails: ") if failed else "no answer"
        yield MachineCheck(
            name="gloo transport",
            status=WRONG,
            found=f"{found}; the default device fails: {reason}",
            remedy="export GLOO_SOCKET_IFNAME=lo (or the interface that others reach)",
        )
    else:
        yield MachineCheck(name="gloo transport", status=OK, found=found)


def try_gloo() -> str:
    """Return the output of a process that tries Gloo's transports."""
    environment = {**os.environ}
    environment.pop("GLOO_DEVICE_TRANSPORT", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_TRANSPORTS, *GLOO_TRANSPORTS],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "default fails: no answer within 60 s"
    return done.stdout


def limit_checks(
    *, descriptors: int | None, threads: int | None
) -> Iterator[MachineCheck]:
    """Check whether a process may open the lanes of a usual plan.

    ``None`` means no limit.
    """
    wanted = _DESCRIPTORS_BESIDE + USUAL_LANES * (USUAL_RANKS + _DESCRIPTORS_PER_LANE)
    limit = "any number of" if descriptors is None else f"{descriptors}"
    short = descriptors is not None and descriptors < wanted
    yield MachineCheck(
        name="descriptors",
        status=NOTE if short else OK,
        found=f"a process may have {limit} files and connections"
        + (
            f"; {USUAL_LANES} Gloo lanes over {USUAL_RANKS} ranks need {wanted}"
            if short
            else ""
        ),
        remedy=f"ulimit -n {2 * wanted}" if short else "",
    )
    need = USUAL_LANES * _THREADS_PER_LANE
    few = threads is not None and threads < 8 * need
    count = "any number of" if threads is None else f"{threads}"
    yield MachineCheck(
        name="threads",
        status=NOTE if few else OK,
        found=f"this user may have {count} threads"
        + (f"; {USUAL_LANES} Gloo lanes need {need} in each process" if few else ""),
        remedy=f"ulimit -u {64 * need}" if few else "",
    )


def own_limits() -> dict[str, int | None]:
    """Return this process's limits, as `limit_checks` takes them."""
    found: dict[str, int | None] = {}
    for name, which in (
        ("descriptors", resource.RLIMIT_NOFILE),
        ("threads", resource.RLIMIT_NPROC),
    ):
        soft = resource.getrlimit(which)[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def nccl_check(
    built: tuple[int, ...] | None, loaded: tuple[int, ...] | None, devices: int
) -> MachineCheck:
    """Check that torch was built with the NCCL version that is loaded."""
    from stretto.runtime import backends

    name = backends.for_device("cuda").name
    if built is None:
        return MachineCheck(
            name=name,
            status=NOTE if devices else OK,
            found="not in this build of torch"
            + (", though there are devices" if devices else ""),
            remedy="pip install torch (a build for CUDA)" if devices else "",
        )
    texts = [".".join(map(str, version)) for version in (loaded or built, built)]
    if loaded is not None and loaded != built:
        return MachineCheck(
            name=name,
            status=NOTE,
            found=f"{texts[0]} is loaded, torch was built with {texts[1]}",
            remedy="unset LD_PRELOAD, unless another NCCL is wanted",
        )
    return MachineCheck(
        name=name, status=OK, found=f"{texts[0]}, as built and as loaded"
    )


def mps_check(environment: Mapping[str, str], program: str | None) -> MachineCheck:
    """Check whether several processes can share a GPU without taking turns."""
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if Path(pipes, "control").exists():
        found = f"the daemon of {pipes} serves this machine"
        return MachineCheck(name="mps", status=OK, found=found)
    if program is None:
        found = "not installed: several ranks on one GPU take turns in time slices"
    else:
        found = "not running: several ranks on one GPU take turns in time slices"
    return MachineCheck(name="mps", status=OK, found=found)


def file_checks(settings: Mapping[str, tuple[str, str]]) -> Iterator[MachineCheck]:
    """Check for NCCL variables that are set in a file, not in the environment."""
    for name, (value, where) in settings.items():
        if where != "the environment":
            yield MachineCheck(
                name="environment",
                status=NOTE,
                found=f"{name}={value} is set in {where}, which NCCL reads",
                remedy=f"remove {name} from {where}, or probe and plan with it",
            )


def machine_checks(environment: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Run all of these checks on this machine."""
    import torch

    from stretto.runtime import backends

    nccl = backends.for_device("cuda")
    names = [name for _, name in socket.if_nameindex()]
    yield from interface_checks(environment, names)
    yield from gloo_checks(try_gloo(), environment)
    yield from limit_checks(**own_limits())
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield nccl_check(*nccl.library_versions(), devices)
    if devices:
        yield mps_check(environment, shutil.which("nvidia-cuda-mps-control"))
    yield from file_checks(nccl.settings(environment))
