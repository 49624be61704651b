"""Describe a job that users submit to a cluster: its command and its devices.

The command is a list of arguments, which no shell interprets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto import variable_names
from stretto.errors import SpecError
from stretto.schema import codec, rules
from stretto.schema._convert import ADDED, FORMERLY

if TYPE_CHECKING:
    from pathlib import Path

FOREGROUND, BACKGROUND = "foreground", "background"
ROLES = (FOREGROUND, BACKGROUND)
"""The job that devices are for, and one that uses them while the first waits."""

STRETTO_RUN, TORCHRUN, DIRECT = "stretto run", "torchrun", "direct"
LAUNCHES = (STRETTO_RUN, TORCHRUN, DIRECT)
"""How the command starts: by a launcher with one rank per device, or nothing: then the
command is started once per device, with the ranks' usual environment variables."""

CLAIMS, LOCAL_SGD, INDEPENDENT = "claims", "local-sgd", "none"
GANGS = (CLAIMS, LOCAL_SGD, INDEPENDENT)
"""How a background job of several devices adds up their work."""

SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")
"""Signals that a job may want as the request to stop."""

SET_BY_CLUSTER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "CUDA_VISIBLE_DEVICES",
    variable_names.RUNTIME_DIR,
    variable_names.STEP_COUNTS,
    variable_names.PLAN_REQUESTS,
    variable_names.DEVICE,
    variable_names.FOREGROUND,
    variable_names.BACKGROUND,
    variable_names.BACKGROUND_MAX_LOSS,
)
"""Variables that a job file cannot set, nor any with the cluster's own prefix."""

MAX_WORD_BYTES = 2**17 - 1
MAX_WORDS_BYTES = 2**20
"""Limits of one word of the command or of a variable, and of all: the kernel's."""

MAX_GPUS = 2**20
MAX_PRIORITY = 1000
MAX_NAME = 63

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTIONAL = {ADDED: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRange:
    """How many devices a job can use."""

    minimum: int = field(metadata={FORMERLY: "least"})

    maximum: int = field(metadata={FORMERLY: "most"})

    def __post_init__(self) -> None:
        rules.at_least(".minimum", self.minimum, 1)
        rules.at_most(".maximum", self.maximum, MAX_GPUS)
        if self.maximum < self.minimum:
            raise SpecError(
                f"maximum must be >= {self.minimum}, the minimum, got {self.maximum}",
                place=".maximum",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstOptions:
    """How a foreground job gets a burst plan."""

    factory: str
    """``FILE.py:NAME`` of the function that makes the model, as for
    ``stretto burst profile``."""

    amplification_limit: float | None = field(default=None, metadata=_OPTIONAL)
    """Largest GPU time of a layer, relative to its time on one GPU; at least 1."""

    profile: str | None = field(default=None, metadata=_OPTIONAL)
    """Path of a layer profile; ``None``: the job is profiled before it starts."""

    replan: bool = field(default=False, metadata=_OPTIONAL)
    """Make plans again from steps that the job measures, and change its plan while it
    runs; the script calls `BurstParallel.follow_requests`."""

    def __post_init__(self) -> None:
        file, _, name = self.factory.partition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise SpecError(
                f"factory must be FILE.py:NAME, got {self.factory!r}", place=".factory"
            )
        if self.amplification_limit is not None:
            rules.finite(".amplification_limit", self.amplification_limit, above=0.0)
            if self.amplification_limit < 1.0:
                raise SpecError(
                    "amplification_limit must be >= 1 (as much GPU time as on one "
                    f"GPU), got {self.amplification_limit:g}",
                    place=".amplification_limit",
                )
        if self.profile is not None:
            _text(".profile", self.profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRules:
    """Rules for backgrounds beside a foreground on its devices."""

    allow: bool

    max_loss: float = field(default=0.05, metadata=_OPTIONAL)
    """Part of the foreground's speed that a background may cost."""

    closed_in: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """Waits in which no background task starts, such as ``all-reduce``."""

    def __post_init__(self) -> None:
        rules.finite(".max_loss", self.max_loss)
        if self.max_loss >= 1.0:
            raise SpecError(
                f"max_loss must be < 1, got {self.max_loss:g}: 0.05 permits 5 %",
                place=".max_loss",
            )
        for i, wait in enumerate(self.closed_in):
            rules.not_empty(f".closed_in[{i}]", wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangOptions:
    """How the devices of a background job work together."""

    kind: str
    """``claims``: exact. ``local-sgd``: another algorithm. ``none``: each by itself."""

    micro_batches: int = field(default=1, metadata=_OPTIONAL)
    """Micro-batches of a step, with ``claims``."""

    def __post_init__(self) -> None:
        rules.one_of(".kind", self.kind, GANGS)
        rules.at_least(".micro_batches", self.micro_batches, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """How a job is stopped, and started again after a failure."""

    attempts: int = field(default=3, metadata=_OPTIONAL)
    """Restarts after failures. A restart after preemption or a lost host is free."""

    backoff_s: float = field(default=10.0, metadata=_OPTIONAL)
    """Wait before the first restart; it doubles with each failure."""

    signal: str = field(default="TERM", metadata=_OPTIONAL)
    """Requests the job to write a checkpoint and end."""

    grace_s: float = field(default=30.0, metadata=_OPTIONAL)
    """Time from the signal until the job is killed."""

    def __post_init__(self) -> None:
        rules.at_least(".attempts", self.attempts, 0)
        rules.one_of(".signal", self.signal, SIGNALS)
        for name in ("backoff_s", "grace_s"):
            rules.finite(f".{name}", getattr(self, name))
            if getattr(self, name) > 86400.0:
                raise SpecError(
                    f"{name} must be <= 86400, one day, got {getattr(self, name):g}",
                    place=f".{name}",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as submitted. Optional fields may be missing from its file."""

    name: str

    role: str

    command: tuple[str, ...]
    """Script and arguments, without launcher."""

    directory: str
    """Absolute path of the folder in which the command runs, on every host."""

    gpus: GpuRange

    launch: str = field(default=STRETTO_RUN, metadata=_OPTIONAL)

    queue: str = field(default="default", metadata=_OPTIONAL)

    priority: int = field(default=0, metadata=_OPTIONAL)
    """Jobs of a higher priority start first."""

    user: str = field(default="", metadata=_OPTIONAL)
    """The user who submitted it; the command line fills it in."""

    environment: dict[str, str] = field(default_factory=dict, metadata=_OPTIONAL)
    """All variables that the job sees beside those that the cluster sets."""

    batch: int | None = field(default=None, metadata=_OPTIONAL)
    """Samples of a step on all devices; policies that change it need it."""

    memory_bytes: int = field(default=0, metadata=_OPTIONAL)
    """Largest memory on a device; 0: unknown, so it is not counted."""

    host_memory_bytes: int = field(default=0, metadata=_OPTIONAL)
    """Largest memory on the host of a rank with all that it starts; 0: no limit."""

    burst: BurstOptions | None = field(default=None, metadata=_OPTIONAL)

    background: BackgroundRules = field(
        default=BackgroundRules(allow=True), metadata=_OPTIONAL
    )
    """The jobs that may run beside a foreground job."""

    gang: GangOptions | None = field(default=None, metadata=_OPTIONAL)

    restart: RestartRules = field(default=RestartRules(), metadata=_OPTIONAL)

    after: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """Ids or names of jobs that must be done before this one starts."""

    def __post_init__(self) -> None:
        _short_name(".name", self.name)
        _short_name(".queue", self.queue)
        rules.one_of(".role", self.role, ROLES)
        rules.one_of(".launch", self.launch, LAUNCHES)
        self._check_command()
        self._check_environment()
        rules.at_least(".priority", self.priority, -MAX_PRIORITY)
        rules.at_most(".priority", self.priority, MAX_PRIORITY)
        if self.batch is not None:
            rules.at_least(".batch", self.batch, 1)
        rules.at_least(".memory_bytes", self.memory_bytes, 0)
        rules.at_least(".host_memory_bytes", self.host_memory_bytes, 0)
        self._check_role()
        for i, name in enumerate(self.after):
            rules.not_empty(f".after[{i}]", name)
            if name == self.name:
                raise SpecError(
                    f"{name!r} cannot start after itself: name jobs that were "
                    "submitted before",
                    place=f".after[{i}]",
                )
            if name in self.after[:i]:
                raise SpecError(f"{name!r} is a duplicate", place=f".after[{i}]")

    def _check_command(self) -> None:
        if not self.command:
            raise SpecError(
                'command must be a list such as ["train.py", "--epochs", "90"], got '
                "an empty one",
                place=".command",
            )
        rules.not_empty(".command[0]", self.command[0])
        for i, word in enumerate(self.command):
            _text(f".command[{i}]", word)
            _short(f".command[{i}]", word)
        _text(".directory", self.directory)
        if not self.directory:
            raise SpecError(
                "directory must not be empty: name the folder in which the command "
                'runs, such as "." for the job file\'s own',
                place=".directory",
            )
        if not self.directory.startswith("/"):
            raise SpecError(
                "directory must be an absolute path, because every host uses it, got "
                f"{self.directory!r}",
                place=".directory",
            )

    def _check_environment(self) -> None:
        for name, value in self.environment.items():
            place = f".environment.{name}"
            if not _VARIABLE.fullmatch(name):
                raise SpecError(
                    f"{name!r} is not the name of an environment variable", place=place
                )
            if name in SET_BY_CLUSTER or name.startswith(variable_names.CLUSTER_PREFIX):
                raise SpecError(f"{name} is set by the cluster: remove it", place=place)
            _text(place, value)
            _short(place, f"{name}={value}")
        variables = (f"{name}={value}" for name, value in self.environment.items())
        total = sum(len(word.encode()) + 1 for word in (*self.command, *variables))
        if total > MAX_WORDS_BYTES:
            raise SpecError(
                f"the command and the environment have {total} bytes, at most "
                f"{MAX_WORDS_BYTES} can be passed to a process: put data into a file",
                place=".command",
            )

    def _check_role(self) -> None:
        if self.role == BACKGROUND and self.burst is not None:
            raise SpecError(
                "a background job has no burst plan: remove burst, or change the role",
                place=".burst",
            )
        if self.role == FOREGROUND and self.gang is not None:
            raise SpecError(
                "only a background job is a gang: remove gang, or change the role",
                place=".gang",
            )

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Return the job in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the job atomically."""
        codec.save(path, self)


def _short_name(place: str, value: str) -> None:
    if not _NAME.fullmatch(value) or len(value) > MAX_NAME:
        raise SpecError(
            f"{place[1:]} must be 1 to {MAX_NAME} letters, digits, '.', '_' or '-', "
            f"the first a letter or digit, got {value!r:.80}",
            place=place,
        )


def _short(place: str, value: str) -> None:
    size = len(value.encode())
    if size > MAX_WORD_BYTES:
        raise SpecError(
            f"has {size} bytes, at most {MAX_WORD_BYTES} can be passed to a process: "
            "put data into a file",
            place=place,
        )


def _text(place: str, value: str) -> None:
    if "\0" in value:
        raise SpecError("must not contain the character NUL", place=place)
