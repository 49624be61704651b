"""An attempt of a job on one host: what its supervisor starts, from data alone."""

from __future__ import annotations

import json
import os
import pwd
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto import variable_names
from stretto.schema.job import BACKGROUND, DIRECT, INDEPENDENT, STRETTO_RUN

if TYPE_CHECKING:
    from collections.abc import Sequence


PART_FILE, END_FILE, LOCK_FILE = "part.json", "end.json", "supervisor.lock"
SOCKET_FILE, STEPS_FILE = "supervisor.sock", "steps"
REQUESTS_FOLDER = "requests"

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSpec:
    """The inputs of a job's burst plan."""

    plan: str
    """Its file."""

    profile: str
    """The layer profile's file."""

    network: str
    """The measured network's file; empty: a published one."""

    amplification_limit: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One host's part of an attempt; the file ``part.json`` of its folder."""

    job: str
    attempt: int
    role: str
    launch: str
    command: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    devices: tuple[str, ...]
    """This host's devices, one rank each."""

    first_rank: int
    world_size: int
    master_address: str
    master_port: int
    files: str
    """Folder of the job's own files, such as checkpoints, which all attempts have."""

    logs: str
    """Folder of the ranks' logs, which outlives the job."""

    boards: str
    """Folder of the boards of this host's devices."""

    profile: str = ""
    """The layer profile that the command writes, if that is its purpose."""

    host_memory_bytes: int = 0
    """Limit for a rank with all that it starts; 0: no limit."""

    gang: str = ""
    batch: int | None = None
    max_loss: float = 0.05
    allows_background: bool = True
    signal: str = "TERM"
    grace_s: float = 30.0
    peers_grace_s: float = 5.0
    """How long other ranks may run after one has failed, to report what they saw."""

    watchdog_s: float = 60.0
    first_watchdog_until_s: float | None = None
    """When the watchdog fires unless it is reset, as of `loop.now_s`; ``None``: after
    all its time."""

    report_every_s: float = 10.0
    boot: str = ""
    """The start of the host in which it was started; empty: not known."""

    extra: dict[str, str] | None = None
    """Variables of the cluster, such as the file of the attempt's plan."""

    replan: ReplanSpec | None = None
    """The inputs of the job's plan, if the plan may change while it runs."""

    def save(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(folder / PART_FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> PartSpec:
        """Return the part in a folder.

        Raises:
            OSError: its file is missing.
            ValueError: the file is damaged.
        """
        return cls.of_plain(
            json.loads((folder / PART_FILE).read_bytes()), str(folder / PART_FILE)
        )

    @classmethod
    def of_plain(cls, plain: Any, source: str) -> PartSpec:
        """Return the part that `dataclasses.asdict` made plain.

        Fields that only a later release knows are left out.

        Args:
            plain: its fields.
            source: where they come from, for messages.

        Raises:
            ValueError: a field is missing or invalid.
        """
        try:
            found = {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
            found["command"] = tuple(found["command"])
            found["devices"] = tuple(found["devices"])
            if (replan := found.pop("replan", None)) is not None:
                found["replan"] = ReplanSpec(
                    **{f.name: replan[f.name] for f in fields(ReplanSpec)}
                )
            return cls(**found)
        except (TypeError, KeyError) as exc:
            raise ValueError(f"{source}: not a part of an attempt: {exc}") from exc

    @property
    def fence(self) -> tuple[str, int]:
        """A key that no two living process trees share."""
        return self.job, self.attempt


@final
@dataclass(frozen=True, slots=True)
class RankCommand:
    """How one rank is started."""

    rank: int
    command: tuple[str, ...]
    environment: dict[str, str]
    log: str
    """Name of its log."""

    device: str


def rank_commands(
    part: PartSpec, folder: Path, numbers: Sequence[int] = ()
) -> list[RankCommand]:
    """Return how the ranks of this host are started.

    Args:
        part: what runs.
        folder: of the part, for the file of step counts.
        numbers: of the ranks, if they are not consecutive: single processes keep
            theirs when others end.
    """
    is_single = part.gang == INDEPENDENT
    local_size = len(part.devices)
    first = part.first_rank
    numbers = numbers or range(first, first + local_size)
    found: list[RankCommand] = []
    for local_rank, (rank, device) in enumerate(
        zip(numbers, part.devices, strict=True)
    ):
        environment = base_environment() | {
            "RANK": "0" if is_single else str(rank),
            "LOCAL_RANK": "0" if is_single else str(local_rank),
            "WORLD_SIZE": "1" if is_single else str(part.world_size),
            "LOCAL_WORLD_SIZE": "1" if is_single else str(local_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": part.master_address,
            "MASTER_PORT": str(part.master_port),
            variable_names.RUNTIME_DIR: part.boards,
            variable_names.CLUSTER_ATTEMPT: str(folder),
        }
        if part.replan is not None:  # on all ranks, which look for requests together
            environment[variable_names.PLAN_REQUESTS] = str(folder / REQUESTS_FOLDER)
        if not is_single or not found:
            environment[variable_names.STEP_COUNTS] = str(folder / STEPS_FILE)
        environment |= _device_variables(
            part, local_rank, (device,) if is_single else part.devices
        )
        environment |= part.extra or {}
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        environment |= part.environment
        command = _with_launcher(part.launch, part.command)
        found.append(RankCommand(rank, command, environment, f"rank{rank}.log", device))
    return found


def base_environment() -> dict[str, str]:
    """Return what a login would set, independent of who started the cluster."""
    python = str(Path(sys.executable).parent)
    environment = {"PATH": f"{python}:{_SYSTEM_PATH}", "LANG": "C.UTF-8"}
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:  # in some containers
        return environment
    return environment | {
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell or "/bin/sh",
    }


def _device_variables(
    part: PartSpec, local_rank: int, visible: tuple[str, ...]
) -> dict[str, str]:
    own = part.devices[local_rank]
    found = {variable_names.DEVICE: own}
    numbers = [d.partition(":")[2] for d in visible if d.startswith("cuda:")]
    if numbers:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
        own = f"cuda:{visible.index(own)}"  # as the rank numbers them
    else:
        found["CUDA_VISIBLE_DEVICES"] = ""
    if part.role == BACKGROUND:
        found[variable_names.BACKGROUND] = own
        found[variable_names.BACKGROUND_MAX_LOSS] = f"{part.max_loss:g}"
    elif part.allows_background:
        found[variable_names.FOREGROUND] = own
    return found


def _with_launcher(launch: str, command: tuple[str, ...]) -> tuple[str, ...]:
    if launch == DIRECT:
        return command
    python = (sys.executable,)
    if launch == STRETTO_RUN:
        return (*python, "-m", "stretto.script", *command)
    return (*python, *command)


def write_json(path: Path, value: Any) -> None:
    """Write a file of this user, whole or not at all."""
    write_private(path, json.dumps(value))


def write_private(path: Path, text: str) -> None:
    """Write a file that this user alone may read, whole or not at all."""
    left = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(left, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        left.replace(path)
    except BaseException:
        left.unlink(missing_ok=True)
        raise
