"""The board of a device: what its foreground and its background know of each other.

One small file per device in a folder of the user, which both processes map. It holds
the foreground's last marks (time, step, computing or waiting for what), the windows
that it predicts, both processes, and what the background does.

# Note [Torn reads]
There is one writer per record. It writes the record's number, the fields, and the
number again, in one call of ``pack_into``, which no other thread of the process
interrupts. A reader reads the second number first and the first number last. If they
are equal, no later write had begun when it ended. This needs stores that become visible
in order, as on x86-64; elsewhere a read may be torn within nanoseconds, and the cost is
one wrong decision about one task.

# Note [Nothing is written unread]
The background sets a field of the board to its process id; marks are written while it
is set. The foreground clears it when that process has ended.

# Note [Namespaces of process ids]
A process cannot see whether those of another namespace, such as a container's, still
run. So each process that has a board open holds a shared lock on it, which the kernel
releases. A board of another namespace is replaced if no process holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, final

from stretto import variable_names
from stretto.background.windows import Window
from stretto.errors import BackgroundError, SpecError
from stretto.process_identity import kernel_id, stat_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


FREE, COMPUTING, WAITING, COMMUNICATING = range(4)
"""States of the foreground. ``COMMUNICATING``: it waits, and the communication itself
uses the device."""

_MAGIC = b"strboard"
_VERSION = 2
_HEADER = struct.Struct("=8sIIQQ")  # magic, version, size, boot, namespace of pids

# Offsets in units of 8 bytes.
READER, _READER_STARTED, _LAST_MARK = 4, 5, 6
"""``READER``: process id of the background that reads marks; 0 without one."""

_FOREGROUND, _FOREGROUND_STARTED = 8, 9
_BACKGROUND, _BACKGROUND_STARTED = 10, 11

_STATUS_AT = 128
_STATUS = struct.Struct("=QddQdddQQ")  # number, BackgroundStatus, number
_KINDS_AT, _KIND_BYTES, _MAX_KINDS = 256, 32, 24
_WINDOWS_AT, _MAX_WINDOWS = 1024, 120
_WINDOW = struct.Struct("=ddQ")
_RING_AT, _MARK_BYTES, _MARKS = 4096, 64, 512
_MARK = struct.Struct("=QQdQQQ")  # number, step, time, state, kind, number
_MARK_END = (_MARK.size - 8) // 8

_SIZE = _RING_AT + _MARK_BYTES * _MARKS

_MASK = 2**64 - 1
"""The values of a number's field; a file of something else's may hold any number."""

_claimed: set[tuple[Path, int]] = set()
"""Boards and roles that this program has claimed. A role that has this process's id,
and is not among them, is that of the program that called ``exec``."""

_LOCK_S = 10.0
"""How long a process that opens a board waits for another that changes it."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3
"""Between two tries to lock a file."""


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """One mark of the foreground."""

    number: int
    step: int
    time_s: float
    """On the clock of ``time.perf_counter``, which all processes of a host share."""
    state: int
    kind: str


@final
@dataclass(slots=True, kw_only=True)
class BackgroundStatus:
    """The status that a background publishes. The background changes its own."""

    lease_begin_s: float = 0.0
    """When its open lease began; 0 without one."""

    usual_s: float = 0.0
    """Usual length of its tasks."""

    tasks: int = 0
    running_s: float = 0.0
    waited_s: float = 0.0
    loss: float = 0.0
    """The foreground's loss by it, by its own measurement."""

    is_preempted: bool = False
    """Whether the foreground gets the device at once when it needs it."""


def runtime_folder() -> Path:
    """Return the user's folder of boards, to which only the user writes.

    A folder that the user has named is left as it is: its files are the user's alone.

    Raises:
        BackgroundError: it cannot be created, belongs to another user, or was named
            and others may write to it.
    """
    folder = _folder_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise BackgroundError(
            f"the folder of boards {folder} cannot be created ({exc.strerror}): set "
            f"{variable_names.RUNTIME_DIR} to a folder of your own"
        ) from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise BackgroundError(
            f"the folder of boards {folder} is not a folder of this user: remove it, "
            f"or set {variable_names.RUNTIME_DIR} to another"
        )
    if os.environ.get(variable_names.RUNTIME_DIR):
        if found.st_mode & stat.S_IWOTH:
            raise BackgroundError(
                f"others may write to the folder of boards {folder}: set "
                f"{variable_names.RUNTIME_DIR} to a folder of your own, for instance "
                f"{folder / f'stretto-{os.geteuid()}'}"
            )
    elif stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def _folder_path() -> Path:
    named = os.environ.get(variable_names.RUNTIME_DIR)
    if named:
        return Path(named).absolute()
    private = os.environ.get("XDG_RUNTIME_DIR")
    if private and _is_own(private):
        return Path(private) / "stretto"
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"stretto-{os.geteuid()}"


def _is_own(folder: str) -> bool:
    """Return whether a folder is this user's to write to.

    Programs that change the user keep the other user's variables.
    """
    try:
        found = Path(folder).stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and os.access(folder, os.W_OK)


def physical_name(device: str, visible: str) -> str:
    """Return a GPU's name among all of the host's; other names are unchanged.

    Processes number the GPUs that they see, so two of them may have different names for
    one GPU.

    Args:
        device: as the process names it.
        visible: the process's ``CUDA_VISIBLE_DEVICES``.
    """
    kind, _, number = device.partition(":")
    names = [name.strip() for name in visible.split(",")]
    index = int(number) if number.isdigit() else 0 if not number else len(names)
    if kind != "cuda" or not visible.strip() or index >= len(names):
        return device
    return f"cuda:{names[index]}"


def file_of(device: str, ending: str) -> Path:
    """Return the path of a device's file in the folder of boards.

    Raises:
        SpecError: the name of the device has characters that no file should have.
        BackgroundError: there is no such folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)?", device):
        raise SpecError(
            f"a device is named like cpu, cpu:1, cuda:0 or exclusive:NAME, "
            f"got {device!r}"
        )
    return runtime_folder() / f"{device.replace(':', '@')}.{ending}"


def require_own_file(descriptor: int, path: Path) -> None:
    """Refuse what is not a file of this user, whose owner could truncate it.

    Raises:
        BackgroundError: it is another user's, or no file.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise BackgroundError(f"{path} is not a file of this user: remove it")


@contextlib.contextmanager
def as_background_error(path: Path) -> Iterator[None]:
    """Raise a BackgroundError in place of an OSError on a device's file.

    Raises:
        BackgroundError: instead of an OSError.
    """
    try:
        yield
    except OSError as exc:
        raise BackgroundError(
            f"{path} cannot be used ({exc.strerror or exc}): set "
            f"{variable_names.RUNTIME_DIR} to a folder in memory or on a local disk"
        ) from exc


def lock_within(descriptor: int, patience_s: float) -> bool:
    """Lock an open file; return ``False`` if another process keeps it locked so long.

    Locks are held for microseconds, but a process may be stopped while it holds one.
    """
    begin_s, pause_s = perf_counter(), _SHORTEST_PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if perf_counter() - begin_s >= patience_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return True


def is_running(pid: int, started: int) -> bool:
    """Return whether the process with an id and a start time still runs."""
    if not pid:
        return False
    row = stat_row(pid)
    if row is not None:
        return row[0] not in "ZXx" and int(row[1]) == started
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def own_start() -> int:
    """Return this process's start time, 0 if unknown."""
    row = stat_row(os.getpid())
    return 0 if row is None else int(row[1])


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _own_kernel() -> tuple[int, int]:
    boot, _, namespace = kernel_id().partition(" ")
    return _digest(boot), _digest(namespace)


@final
class Board:
    """One device's board, mapped."""

    def __init__(self, device: str) -> None:
        """Map the board; create it if it is missing or left by ended processes.

        Raises:
            BackgroundError: the file is not a board, is not this user's, is used by
                processes that this one cannot see, or cannot be mapped or locked.
        """
        self.device = device
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.path = file_of(physical_name(device, visible), "board")
        with as_background_error(self.path):
            self._descriptor = _opened(self.path)
            try:
                self._map = mmap.mmap(self._descriptor, _SIZE)
            except BaseException:
                os.close(self._descriptor)
                raise
        self.words = memoryview(self._map).cast("Q")
        """The board in units of 8 bytes."""
        self._numbers = itertools.count(1)
        self._kinds_lock = threading.Lock()
        self._kinds: dict[str, int] = {}
        self._pid = os.getpid()

    def close(self) -> None:
        """Unmap the board; the file stays for the next process."""
        if self._descriptor >= 0:
            self.words.release()
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        _lock(self._descriptor, self.path)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _clear_ended(self, role: int) -> bool:
        """Clear a role if its process has ended; return whether so.

        The role is left if another process takes it meanwhile, and for now if the board
        is locked: a process may be stopped while it holds the lock.
        """
        held = self.words[role], self.words[role + 1]
        if not held[0] or is_running(*held):
            return False
        if not lock_within(self._descriptor, 0.0):
            return False
        try:
            has_ended = held == (self.words[role], self.words[role + 1])
            if has_ended:
                self.words[role] = 0
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return has_ended

    # the foreground's side

    def claim_foreground(self) -> None:
        """Become the device's foreground.

        Raises:
            BackgroundError: another living process is.
        """
        with self._locked():
            self._require_free(_FOREGROUND, "foreground")
            # The table has no room for the kinds of every foreground since the boot.
            self._map[_KINDS_AT:_WINDOWS_AT] = bytes(_WINDOWS_AT - _KINDS_AT)
            self._numbers = itertools.count(self.words[_LAST_MARK] + 1)
            if self.words[_FOREGROUND] == os.getpid():
                self.mark(0, FREE)  # a background may follow its last program
            self.mark(0, COMPUTING)
            self.words[_FOREGROUND_STARTED] = own_start()
            self.words[_FOREGROUND] = os.getpid()
            self.set_windows(())
            _claimed.add((self.path, _FOREGROUND))

    def release_foreground(self) -> None:
        """Leave the device free."""
        if self._pid == os.getpid() and self.words[_FOREGROUND] == self._pid:
            self.mark(0, FREE)
            self.words[_FOREGROUND] = 0
            _claimed.discard((self.path, _FOREGROUND))

    @property
    def is_read(self) -> bool:
        """Whether a background reads marks."""
        return self.words[READER] != 0

    def clear_ended_reader(self) -> None:
        """Stop writing marks for a background that has ended."""
        self._clear_ended(READER)

    def mark(self, step: int, state: int, kind: int = 0) -> None:
        """Write a mark: what the foreground does from now on.

        Args:
            step: number of the step.
            state: ``FREE``, ``COMPUTING``, ``WAITING`` or ``COMMUNICATING``.
            kind: what it waits for, as `kind_number` returned it.
        """
        number = next(self._numbers) & _MASK
        _MARK.pack_into(
            self._map,
            _RING_AT + _MARK_BYTES * (number % _MARKS),
            number,
            step,
            perf_counter(),
            state,
            kind,
            number,
        )
        self.words[_LAST_MARK] = number

    def kind_number(self, kind: str) -> int:
        """Return the number by which marks name a kind of wait; 0 if there are many."""
        known = self._kinds.get(kind)
        if known is None:
            with self._kinds_lock:
                known = self._kinds[kind] = self._new_kind(kind)
        return known

    def _new_kind(self, kind: str) -> int:
        name = kind.encode()[: _KIND_BYTES - 1]
        for number in range(1, _MAX_KINDS):
            at = _KINDS_AT + _KIND_BYTES * number
            held = bytes(self._map[at : at + _KIND_BYTES]).rstrip(b"\0")
            if not held:
                self._map[at : at + _KIND_BYTES] = name.ljust(_KIND_BYTES, b"\0")
            if held in (b"", name):
                return number
        return 0

    def set_windows(self, windows: Sequence[Window]) -> None:
        """Write the windows that a prediction gives each step; the longest ones."""
        kept = sorted(windows, key=lambda w: -w.length_s)[:_MAX_WINDOWS]
        kept.sort(key=lambda w: w.begin_s)
        rows = b"".join(
            _WINDOW.pack(w.begin_s, w.length_s, self.kind_number(w.kind)) for w in kept
        )
        front = _WINDOWS_AT // 8
        number = (self.words[front] + 1) & _MASK
        struct.pack_into(
            f"=QQ{_MAX_WINDOWS * _WINDOW.size}sQ",
            self._map,
            _WINDOWS_AT,
            number,
            len(kept),
            rows,
            number,
        )

    def background(self) -> tuple[int, BackgroundStatus] | None:
        """Return the background's process id and status; ``None`` without one."""
        pid = self.words[_BACKGROUND]
        status = self._status()
        if not pid or status is None:
            return None
        return pid, status

    def background_runs(self) -> bool:
        """Return whether the background's process still runs."""
        return is_running(self.words[_BACKGROUND], self.words[_BACKGROUND_STARTED])

    # the background's side

    def claim_background(self) -> None:
        """Become the device's background, and ask for marks.

        Raises:
            BackgroundError: another living process is.
        """
        with self._locked():
            self._require_free(_BACKGROUND, "background")
            started = own_start()
            self.publish(BackgroundStatus())
            self.words[_BACKGROUND_STARTED] = started
            self.words[_BACKGROUND] = os.getpid()
            self.words[_READER_STARTED] = started
            self.words[READER] = os.getpid()
            _claimed.add((self.path, _BACKGROUND))

    def release_background(self) -> None:
        """Let another background have the device."""
        if self._pid == os.getpid() and self.words[_BACKGROUND] == self._pid:
            self.words[READER] = 0
            self.words[_BACKGROUND] = 0
            _claimed.discard((self.path, _BACKGROUND))

    @property
    def has_foreground(self) -> bool:
        """Whether a foreground has claimed the device; its process may have ended."""
        return self.words[_FOREGROUND] != 0

    @property
    def foreground_pid(self) -> int:
        """The foreground's process id; 0 without one."""
        return self.words[_FOREGROUND]

    def clear_ended_foreground(self) -> bool:
        """Free the device if its foreground's process has ended; return whether so."""
        return self._clear_ended(_FOREGROUND)

    @property
    def last_number(self) -> int:
        """Number of the foreground's last mark."""
        return self.words[_LAST_MARK]

    def marks_after(self, number: int) -> list[Mark]:
        """Return the marks after a number, oldest first.

        Older ones may be overwritten: compare the first mark's number.
        """
        last = self.words[_LAST_MARK]
        first = max(number + 1, last - _MARKS + 2)
        found = (self._mark(wanted) for wanted in range(first, last + 1))
        return [mark for mark in found if mark is not None]

    def _mark(self, number: int) -> Mark | None:
        at = _RING_AT + _MARK_BYTES * (number % _MARKS)
        end = self.words[at // 8 + _MARK_END]
        _, step, time_s, state, kind, _ = _MARK.unpack_from(self._map, at)
        if not end == self.words[at // 8] == number:
            return None
        return Mark(number, step, time_s, state, self._kind_name(kind))

    def _kind_name(self, number: int) -> str:
        if not 0 < number < _MAX_KINDS:
            return "other"
        at = _KINDS_AT + _KIND_BYTES * number
        held = bytes(self._map[at : at + _KIND_BYTES]).rstrip(b"\0")
        return held.decode(errors="replace")

    @property
    def windows_number(self) -> int:
        """Changes whenever the foreground writes windows."""
        return self.words[_WINDOWS_AT // 8]

    def windows(self) -> tuple[Window, ...]:
        """Return the windows that the foreground predicts; empty if it does not."""
        size = 16 + _MAX_WINDOWS * _WINDOW.size
        for _ in range(100):
            end = self.words[(_WINDOWS_AT + size) // 8]
            body = bytes(self._map[_WINDOWS_AT : _WINDOWS_AT + size])
            if end == self.words[_WINDOWS_AT // 8]:
                count = min(int.from_bytes(body[8:16], sys.byteorder), _MAX_WINDOWS)
                rows = _WINDOW.iter_unpack(body[16 : 16 + count * _WINDOW.size])
                return tuple(
                    Window(begin_s=b, length_s=s, kind=self._kind_name(k))
                    for b, s, k in rows
                )
        return ()

    def publish(self, status: BackgroundStatus) -> None:
        """Write what the background does; in some 2 us, so at each lease."""
        number = (self.words[_STATUS_AT // 8] + 1) & _MASK
        _STATUS.pack_into(
            self._map,
            _STATUS_AT,
            number,
            status.lease_begin_s,
            status.usual_s,
            status.tasks,
            status.running_s,
            status.waited_s,
            status.loss,
            status.is_preempted,
            number,
        )

    def _status(self) -> BackgroundStatus | None:
        for _ in range(100):
            end = self.words[(_STATUS_AT + _STATUS.size) // 8 - 1]
            row = _STATUS.unpack_from(self._map, _STATUS_AT)
            if end == self.words[_STATUS_AT // 8]:
                return BackgroundStatus(
                    lease_begin_s=row[1],
                    usual_s=row[2],
                    tasks=row[3],
                    running_s=row[4],
                    waited_s=row[5],
                    loss=row[6],
                    is_preempted=bool(row[7]),
                )
        return None

    def _require_free(self, role: int, name: str) -> None:
        pid, started = self.words[role], self.words[role + 1]
        if pid == os.getpid() and started == own_start():
            if (self.path, role) not in _claimed:
                return
            raise BackgroundError(
                f"device {self.device} has a {name} already, process {pid}, which is "
                "this one: use the one that it has opened, or name another device"
            )
        if is_running(pid, started):
            raise BackgroundError(
                f"device {self.device} has a {name} already, process {pid}: end it, or "
                "name another device"
            )


def _opened(path: Path) -> int:
    """Return a descriptor of a valid board; replace one that ended processes left."""
    while True:
        try:
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as exc:
            raise BackgroundError(
                f"the board {path} cannot be opened ({exc.strerror}): remove it, or "
                f"set {variable_names.RUNTIME_DIR} to another folder"
            ) from exc
        try:
            _lock(descriptor, path)
            if _is_current(descriptor, path) and _is_ready(descriptor, path):
                _set_lock(descriptor, fcntl.F_RDLCK)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Lock a board.

    Raises:
        BackgroundError: another process keeps it locked.
    """
    if not lock_within(descriptor, _LOCK_S):
        raise BackgroundError(
            f"the board {path} is locked by another process, which may be stopped: "
            f"continue or end it (`fuser {path}` shows which), or set "
            f"{variable_names.RUNTIME_DIR} to another folder"
        )


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether the path still names the file, which another may replace."""
    held = os.fstat(descriptor)
    try:
        named = path.lstat()
    except OSError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _is_ready(descriptor: int, path: Path) -> bool:
    """Return whether the file is a board; remove one that ended processes left.

    Raises:
        BackgroundError: it is another file, or a board that is used.
    """
    require_own_file(descriptor, path)
    found = os.fstat(descriptor)
    if found.st_size == 0:
        _format(descriptor, path)
        return True
    head = os.pread(descriptor, 96, 0)
    if not head.startswith(_MAGIC):
        raise BackgroundError(f"{path} is not a board: remove it")
    if len(head) == 96:
        _, version, size, boot, namespace = _HEADER.unpack_from(head)
        own_boot, own_namespace = _own_kernel()
        if (version, size) == (_VERSION, found.st_size) and size == _SIZE:
            if (boot, namespace) == (own_boot, own_namespace):
                return True
            if boot == own_boot and not _set_lock(descriptor, fcntl.F_WRLCK):
                raise BackgroundError(
                    f"the board {path} is used in another namespace of process ids: "
                    "run foreground and background in the same one, or set "
                    f"{variable_names.RUNTIME_DIR} to another folder"
                )
        elif boot == own_boot:
            _require_unused(head, path)
    # A new file, because shrinking or growing this one could end who has it mapped.
    path.unlink()
    return False


def _set_lock(descriptor: int, kind: int) -> bool:
    """Set an open file's lock on its board; return ``False`` if others prevent it.

    Unlike `flock`'s, which orders changes, this lock is held while the board is open.
    """
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        return False
    whole = struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, command, whole)
    except OSError:
        return False
    return True


def _require_unused(head: bytes, path: Path) -> None:
    words = struct.unpack_from("=12Q", head)
    for role in (_FOREGROUND, _BACKGROUND):
        if is_running(words[role], words[role + 1]):
            raise BackgroundError(
                f"the board {path} is used by process {words[role]} with another "
                "version of stretto: end it, or use the same version"
            )


def _format(descriptor: int, path: Path) -> None:
    try:
        # Without this a process that touches a missing page is killed by a signal.
        os.posix_fallocate(descriptor, 0, _SIZE)
    except OSError as exc:
        os.ftruncate(descriptor, 0)
        raise BackgroundError(
            f"no space for the board {path} ({exc.strerror}): set "
            f"{variable_names.RUNTIME_DIR} to another folder"
        ) from exc
    header = _HEADER.pack(_MAGIC, _VERSION, _SIZE, *_own_kernel())
    os.pwrite(descriptor, header, 0)
