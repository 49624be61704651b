"""Write a job's state beside training, and read the newest one.

# Note [Training continues while a snapshot is written]
The state is copied in the training thread, so what is written is the state of one step,
and a thread writes the copy. One snapshot is written at a time: if a disk is so slow
that the next one is due before, that one is left out. A failure is logged once per kind
and changes nothing else: the older snapshot remains, and the next one is tried.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import threading
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import msgspec
import numpy as np
import torch

from stretto import variable_names
from stretto.errors import SpecError, StrettoError
from stretto.logs import get_logger
from stretto.resume.manifests import (
    Interval,
    Manifest,
    digest_of,
    highest_run_in,
    manifests_in,
    remove_old,
    require_whole,
    stem_of,
    write_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_log = get_logger(__name__)

_ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file that torch.save writes."""


def _numpy_classes() -> list[Any]:
    """Return what NumPy's numbers and arrays are made of when they are read."""
    makers: list[Any] = [
        value.__reduce__()[0] for value in (np.float64(0), np.zeros(1))
    ]
    return [
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in np.typecodes["All"]},
        *(
            (maker, f"{module}.{maker.__name__}")
            for maker in makers
            for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        ),
    ]


def copy_of(value: Any) -> Any:
    """Return a copy of a state on the CPU, which shares no memory with it.

    An object that can't be copied is itself in the copy.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps its class and a state_dict's metadata
        for key, each in value.items():
            copied[key] = copy_of(each)
        return copied
    if type(value) in (list, tuple):
        return type(value)(copy_of(each) for each in value)
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - whatever an object's own code raises
        return value


@final
class SnapshotWriter:
    """Writes snapshots of one run to a folder, in a thread."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Prepare.

        Args:
            folder: made when the first snapshot is written.
            keep: how many complete snapshots to keep.
        """
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._logged: set[str] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, manifest: Manifest, state_of: Callable[[], Any]) -> bool:
        """Begin to write a copy of a state; return false if one is being written.

        Args:
            manifest: of this snapshot, without file, size and digest.
            state_of: returns dicts, lists and tuples of tensors and plain values.
        """
        if self.is_busy:
            self._log_once(
                "busy",
                f"the snapshot of step {manifest.step} is left out, because the one "
                f"before it is still being written to {self._folder}",
            )
            return False
        copied = copy_of(state_of())
        # Not a daemon: a process that ends waits until the snapshot is complete.
        self._thread = threading.Thread(
            target=self._write, args=(manifest, copied), name="stretto-snapshot"
        )
        self._thread.start()
        return True

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the snapshot that was begun is on the disk.

        Raises:
            StrettoError: it could not be written.
        """
        self.join()
        if self._failure is not None:
            raise StrettoError(self._failure)

    def _write(self, manifest: Manifest, state: Any) -> None:
        folder = self._folder
        self._failure = None
        name = f"{stem_of(*manifest.order)}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, lambda file: torch.save(state, file))
            size_bytes, sha256 = digest_of(folder / name)
            self._warn_of_classes(folder / name)
            whole = msgspec.structs.replace(
                manifest, file=name, size_bytes=size_bytes, sha256=sha256
            )
            data = msgspec.json.format(msgspec.json.encode(whole)) + b"\n"
            try:
                write_whole(folder / whole.name, lambda file: file.write(data))
            except OSError:
                if not (folder / whole.name).exists():
                    (folder / name).unlink()  # no manifest will ever name it
                raise
            remove_old(folder, keep=self._keep)
            if not (folder / whole.name).exists():
                self._log_once(
                    "superseded",
                    f"the snapshots of this job are not kept in {folder}: another job "
                    "that was started later writes its own there. Give each job a "
                    "folder of its own.",
                )
        except Exception as error:  # noqa: BLE001 - training continues whatever it is
            self._failure = (
                f"the snapshot of step {manifest.step} was not written to {folder}: "
                f"{_reason(error)}. Earlier ones, if there are any, remain."
            )
            self._log_once(f"{type(error)}", self._failure)

    def _warn_of_classes(self, path: Path) -> None:
        """Warn of what `read_newest` would refuse, while the job runs."""
        with torch.serialization.safe_globals(_numpy_classes()):
            found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if found:
            self._log_once("classes", _refused(path, ", ".join(found)))

    def _log_once(self, kind: str, text: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s", text)


@final
class JobSnapshots:
    """When to take a job's snapshots, and where they are."""

    def __init__(
        self, folder: str | os.PathLike[str], *, every: str, keep: int
    ) -> None:
        """Check the options; see `stretto.Elastic`.

        Raises:
            SpecError: ``every`` or ``keep`` is invalid.
        """
        if keep < 1:
            raise SpecError(f"keep must be at least 1 snapshot, got {keep}")
        self.folder = Path(folder)
        self._interval = Interval.of(every)
        self._writer = SnapshotWriter(self.folder, keep=keep)
        self._step, self._at_s = 0, perf_counter()
        self.run = 1
        """Which start of the job this is; `read` finds it out."""

    def read(self, *, wanted: bool | None) -> tuple[Manifest, Any] | None:
        """Return the newest complete snapshot, if there is one and it is wanted.

        Args:
            wanted: ``None`` asks the environment.

        Raises:
            SpecError: the environment's value is unknown.
            StrettoError: a snapshot is not one that this version can read.
        """
        if wanted is None:
            value = os.environ.get(variable_names.RESUME) or "auto"
            if value not in ("auto", "never"):
                raise SpecError(
                    f"{variable_names.RESUME} must be auto or never, not {value}"
                )
            wanted = value == "auto"
        self.run = highest_run_in(self.folder) + 1
        return read_newest(self.folder) if wanted else None

    def note(self, step: int) -> None:
        """Note that the state of a step is on the disk."""
        self._step, self._at_s = step, perf_counter()

    def take_if_due(
        self,
        step: int,
        manifest_of: Callable[[], Manifest],
        state_of: Callable[[], Any],
        *,
        rank: int,
    ) -> None:
        """Begin to write a snapshot if one is due after a step and this is rank 0."""
        if rank or not self._interval.is_due(
            steps=step - self._step, seconds=perf_counter() - self._at_s
        ):
            return
        if self._writer.start(manifest_of(), state_of):
            self.note(step)

    def take(self, manifest: Manifest, state: Any) -> None:
        """Write a snapshot and wait for it.

        Raises:
            StrettoError: it cannot be written.
        """
        self._writer.join()
        self._writer.start(manifest, lambda: state)
        self._writer.wait()
        self.note(manifest.step)


def _refused(path: Path, names: str) -> str:
    return (
        f"{path} holds objects of {names}, which torch.load refuses by default. If you "
        "trust the file, allow their classes with torch.serialization.add_safe_globals "
        "before stretto.Elastic; better keep tensors, NumPy arrays and plain values "
        "only in what scheduler= and extra= save."
    )


def _reason(error: BaseException) -> str:
    """Return what the system said, where torch's own error hides it."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__cause__ or first.__context__
    return str(error if first is None else first)


def read_newest(folder: Path) -> tuple[Manifest, Any] | None:
    """Return the newest complete snapshot; ``None`` where nothing was written yet.

    A damaged one is skipped with a warning, and the one before it is read.

    Raises:
        StrettoError: a manifest cannot be read now, or a state holds classes that torch
            does not load by default.
    """
    skipped = []

    def skip(path: Path, error: Exception) -> None:
        if isinstance(error, OSError):
            raise StrettoError(
                f"the snapshot {path} cannot be read: {error.strerror or error}. Make "
                "it readable, or begin again with resume=False or another folder."
            ) from error
        _log.warning(
            "%s is damaged or of an older version and is skipped: %s", path, error
        )
        skipped.append(path)

    for manifest in manifests_in(folder, skip):
        try:
            require_whole(folder, manifest)
        except StrettoError as error:
            _log.warning("%s; it is skipped", error)
            skipped.append(folder / manifest.file)
            continue
        path = folder / manifest.file
        try:
            with path.open("rb") as file:
                is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
            if not is_archive:
                raise ValueError("it is not what torch.save writes")  # noqa: TRY301
            with torch.serialization.safe_globals(_numpy_classes()):
                state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            refused = re.search(r"GLOBAL ([\w.]+)", str(error))
            name = refused[1] if refused else "a class that it does not know"
            raise StrettoError(_refused(path, name)) from error
        except (OSError, ValueError, EOFError, LookupError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            _log.warning("%s is damaged (%s); it is skipped", path, error)
            skipped.append(path)
        else:
            return manifest, state
    if skipped:
        _log.warning("no snapshot in %s can be read: training begins again", folder)
    return None
