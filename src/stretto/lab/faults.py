"""Break what a lab runs: at a step or a time, a process, a host or a host's link.

A fault is a line such as ``kill host1 at step 40`` or ``disconnect host2 at 3 s for 1
s``. The lab's supervisor injects it and undoes it after its time. A step is the largest
number of optimizer steps that any rank has ended (`stretto.step_counts`).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import re
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

from stretto import variable_names
from stretto.errors import LabError, SpecError
from stretto.lab import network
from stretto.lab.spec import INTERFACE, Mode
from stretto.process_identity import process_ids, stat_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.lab.spec import LabJob, LabSpec


class Verb(enum.Enum):
    """The kinds of faults."""

    KILL = "kill"
    """SIGKILL. A host also loses its link first, so that no connection is closed."""

    STOP = "stop"
    """SIGSTOP, and SIGCONT after the time."""

    HANG = "hang"
    """No thread runs, and the parent does not learn of it."""

    SLOW = "slow"
    """Stopped for three quarters of the time, in turns of a tenth of a second."""

    DISCONNECT = "disconnect"
    """The switch's port of a host is down."""

    DROP_OUTPUT = "drop-output"
    """Packets that a host sends are lost."""

    DROP_INPUT = "drop-input"
    """Packets that are sent to a host are lost."""

    LOSE = "lose"
    """One packet in a hundred that a host sends is lost."""

    CHANGE_BYTES = "change-bytes"
    """In one of ten large packets that a host sends, one byte is another. No checksum
    notices it.
    """

    TERMINATE = "terminate"
    """SIGTERM, as before a preemption."""

    FILL_DISK = "fill-disk"
    """No file may grow beyond its first bytes. Error and text are those of a file that
    is too large, since the machine's disk is left alone.
    """

    RESTART = "restart"
    """The lab's command is started again on a host, whose link is up again."""


_OF_LINKS = (
    Verb.DISCONNECT,
    Verb.DROP_OUTPUT,
    Verb.DROP_INPUT,
    Verb.LOSE,
    Verb.CHANGE_BYTES,
)
_ONLY_HOSTS = (*_OF_LINKS, Verb.RESTART)
_ENDLESS = (Verb.KILL, Verb.TERMINATE, Verb.RESTART)
_ENDS = (Verb.KILL, Verb.TERMINATE, *_OF_LINKS)
"""After these a rank of the lab may fail."""

_FULL_BYTES = 1 << 14
"""Largest file on a disk that counts as full."""

_LINE = re.compile(
    r"(?P<verb>[a-z-]+) +(?P<kind>host|rank|member)(?P<number>\d+) +at +"
    r"(step +(?P<step>\d+)|(?P<at>\d+(\.\d+)?) *s)( +for +(?P<for>\d+(\.\d+)?) *s)?"
)

_TURN_S, _STOPPED_SHARE = 0.1, 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    verb: Verb

    kind: str
    """``host``, ``rank`` (of the lab) or ``member`` (of ``stretto run --elastic``)."""

    number: int

    at_step: int | None = None
    at_s: float | None = None
    """Seconds after the lab's start, if no step is named."""

    for_s: float | None = None
    """How long it lasts; ``None``: to the end."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the fault that a line describes.

        Raises:
            SpecError: it describes none.
        """
        found = _LINE.fullmatch(text.strip())
        verbs = [verb.value for verb in Verb]
        if found is None or found["verb"] not in verbs:
            raise SpecError(
                "a fault must be 'VERB hostN|rankN|memberN at step N|at SECONDS s', "
                "with 'for SECONDS s' if it ends; verbs are "
                f"{', '.join(verbs)}; got {text!r}"
            )
        verb, kind = Verb(found["verb"]), found["kind"]
        if verb in _ONLY_HOSTS and kind != "host":
            raise SpecError(f"{verb.value} needs a host, got {text!r}")
        if verb in _ENDLESS and found["for"]:
            raise SpecError(f"{verb.value} has no end, got {text!r}")
        return cls(
            verb=verb,
            kind=kind,
            number=int(found["number"]),
            at_step=None if found["step"] is None else int(found["step"]),
            at_s=None if found["at"] is None else float(found["at"]),
            for_s=None if found["for"] is None else float(found["for"]),
        )

    def check(self, spec: LabSpec, mode: Mode) -> None:
        """Require that a lab can have it.

        Raises:
            SpecError: it has no such host or rank, or no links of its own.
        """
        numbers = {"host": spec.hosts, "rank": spec.num_ranks}
        if self.number >= numbers.get(self.kind, self.number + 1):
            raise SpecError(f"the lab has no {self}: it has {numbers[self.kind]}")
        if mode is Mode.PACED and (self.verb in _ONLY_HOSTS or self.kind == "host"):
            raise SpecError(f"{self.verb.value} {self} needs --mode namespaces")

    def __str__(self) -> str:
        """Return the name of what it hits."""
        return f"{self.kind}{self.number}"


@final
class FaultInjector:
    """Injects a lab's faults, in the lab's first process."""

    def __init__(
        self,
        job: LabJob,
        hosts: list[network.Host],
        home: network.Host | None,
        *,
        pid_of_rank: Callable[[int], int | None],
        restart: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            job: with the faults.
            hosts: the lab's hosts; empty in mode paced.
            home: the switch's namespace.
            pid_of_rank: the process of one of the lab's ranks.
            restart: starts a host's ranks again.
            say: reports what was done.
        """
        self._job, self._hosts, self._home = job, hosts, home
        self._pid_of_rank, self._restart, self._say = pid_of_rank, restart, say
        self._left = [Fault.of(text) for text in job.faults]
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._slowed: dict[Fault, bool] = {}
        self._began_s = time.monotonic()
        self.hit: set[int] = set()
        """Ranks of the lab whose failure is expected."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._left or self._ends or self._slowed)

    def turn(self, step: int) -> None:
        """Inject what is due."""
        now_s = time.monotonic()
        since_s = now_s - self._began_s
        for fault in list(self._left):
            late = fault.at_s is not None and since_s >= fault.at_s
            if late or (fault.at_step is not None and step >= fault.at_step):
                self._left.remove(fault)
                try:
                    self._begin(fault, now_s, f"step {step}, {since_s:.2f} s")
                except LabError as error:
                    self._say(f"{fault.verb.value} {fault} failed: {error}")
        for row in [row for row in self._ends if row[0] <= now_s]:
            self._ends.remove(row)
            row[1]()
        for fault, was in list(self._slowed.items()):
            is_stopped = (now_s % _TURN_S) < _STOPPED_SHARE * _TURN_S
            if is_stopped != was:
                number = signal.SIGSTOP if is_stopped else signal.SIGCONT
                self._signal(fault, number)
                self._slowed[fault] = is_stopped

    def _begin(self, fault: Fault, now_s: float, when: str) -> None:
        self._say(f"{fault.verb.value} {fault} ({when})")
        hit: set[int] = set()
        if fault.verb in _ENDS and fault.kind != "member":
            each = self._job.ranks_per_host
            first = fault.number * each if fault.kind == "host" else fault.number
            count = each if fault.kind == "host" else 1
            hit = set(range(first, first + count))
        self.hit |= hit
        undo = self._inject(fault)
        if undo is not None and fault.for_s is not None:

            def end() -> None:
                undo()
                self.hit -= hit
                self._say(f"{fault.verb.value} {fault} has ended")

            self._ends.append((now_s + fault.for_s, end))

    def _inject(self, fault: Fault) -> Callable[[], None] | None:
        """Inject a fault; return what undoes it."""
        match fault.verb:
            case Verb.KILL:
                if fault.kind == "host":
                    self._port(fault.number, "down")
                while self._signal(fault, signal.SIGKILL) and fault.kind == "host":
                    time.sleep(0.002)  # one may just have started another
                return None
            case Verb.STOP:
                self._signal(fault, signal.SIGSTOP)
                return lambda: self._continue(fault)
            case Verb.SLOW:
                self._slowed[fault] = False

                def end() -> None:
                    del self._slowed[fault]
                    self._continue(fault)

                return end
            case Verb.HANG:
                for pid in self._pids(fault):
                    hang(pid, fault.for_s)
                return None
            case Verb.DISCONNECT:
                self._port(fault.number, "down")
                return lambda: self._port(fault.number, "up")
            case Verb.TERMINATE:
                self._signal(fault, signal.SIGTERM)
                return None
            case Verb.FILL_DISK:
                self._limit_files(fault, _FULL_BYTES)
                return lambda: self._limit_files(fault, resource.RLIM_INFINITY)
            case Verb.RESTART:
                self._port(fault.number, "up")
                self._restart(fault.number)
                return None
            case verb:
                self._nft(fault.number, packet_rules(verb))
                return lambda: self._nft(fault.number, "delete table inet faults\n")

    def _continue(self, fault: Fault) -> None:
        self._signal(fault, signal.SIGCONT)

    def _limit_files(self, fault: Fault, limit_bytes: int) -> None:
        for pid in self._pids(fault):
            with contextlib.suppress(ProcessLookupError):
                _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                if most != resource.RLIM_INFINITY:
                    limit_bytes = min(limit_bytes, most)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, most))

    def _signal(self, fault: Fault, number: int) -> int:
        """Signal the processes that a fault hits; return how many they are."""
        found = self._pids(fault)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(found)

    def _pids(self, fault: Fault) -> list[int]:
        if fault.kind == "rank":
            pid = self._pid_of_rank(fault.number)
            return [] if pid is None else [pid]
        if fault.kind == "member":
            mark = f"{variable_names.MEMBER}={fault.number}".encode()
            return [pid for pid in _living() if mark in _environment(pid)]
        inode = os.fstat(self._hosts[fault.number].net_fd).st_ino
        return [pid for pid in _living() if _network_of(pid) == inode]

    def _port(self, host: int, state: str) -> None:
        line = f"link set port{host} {state}\n"
        network.feed(["ip", "-batch", "-"], line, self._job.tools_env)

    def _nft(self, host: int, rules: str) -> None:
        if self._home is not None:
            with self._hosts[host].entered(self._home):
                network.feed(["nft", "-f", "-"], rules, self._job.tools_env)


def packet_rules(verb: Verb) -> str:
    """Return the nft rules of a host whose packets are lost or changed."""
    hook, name = (
        ("input", "iifname") if verb is Verb.DROP_INPUT else ("output", "oifname")
    )
    rule = "drop"
    if verb is Verb.LOSE:
        rule = "numgen random mod 100 < 1 drop"
    elif verb is Verb.CHANGE_BYTES:  # the 1024th byte after TCP's first: data
        rule = (
            "meta l4proto tcp meta length > 4000 numgen random mod 10 < 1 "
            "@th,8192,8 set 0x5a"
        )
    return f"""\
table inet faults {{
  chain packets {{
    type filter hook {hook} priority 0;
    {name} "{INTERFACE}" {rule}
  }}
}}
"""


def _living() -> list[int]:
    """Return the lab's processes, except this one."""
    rows = ((pid, stat_row(pid)) for pid in process_ids() if pid != os.getpid())
    return [pid for pid, row in rows if row is not None and row[0] not in "ZX"]


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _network_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    return 0


_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000


def hang(pid: int, for_s: float | None) -> None:
    """Stop all threads of a process, from a process forked for that.

    Its parent learns nothing, as of a thread that never returns. The kernel lets it
    continue when the forked process ends.

    Args:
        pid: the process.
        for_s: for how long; ``None``: while the lab runs.
    """
    if os.fork():
        return
    try:
        signal.set_wakeup_fd(-1)
        libc = ctypes.CDLL(None, use_errno=True)
        known: set[int] = set()
        while True:  # threads may start meanwhile
            threads = {int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()}
            if threads <= known:
                break
            for thread in threads - known:
                libc.ptrace(_PTRACE_SEIZE, thread, None, None)
                libc.ptrace(_PTRACE_INTERRUPT, thread, None, None)
            known |= threads
        end_s = None if for_s is None else time.monotonic() + for_s
        while end_s is None or time.monotonic() < end_s:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG | _WALL)[0]:
                    pass  # a killed one ends only when its tracer knows
            time.sleep(0.01)
    finally:
        os._exit(0)
