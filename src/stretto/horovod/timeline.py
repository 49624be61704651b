"""Write timeline files with Horovod's span names, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
import queue
import threading
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, final

from stretto.errors import SpecError
from stretto.logs import get_logger
from stretto.runtime.negotiated import AbstractEngineObserver, CollectiveKind

_log = get_logger(__name__)

_KINDS = frozenset(kind.value for kind in CollectiveKind)
_NAMES = {"pack": "MEMCPY_IN_FUSION_BUFFER"}
_END = b"\n]\n"
_LATER = "DYNAMIC"


@final
class _Writer:
    """A file that is valid JSON at any time, even if the process is killed.

    Events go through a queue to a thread, so that the caller does not wait. Each write
    starts at the closing bracket and ends with a new one.
    """

    def __init__(self, path: Path, *, mark_cycles: bool) -> None:
        self.path = path
        self._mark_cycles = mark_cycles
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = os.open(path, flags, 0o644)
        self._at = os.pwrite(self._file, b"[\n", 0)
        self._first = True
        self._failed = False
        self._began_s = perf_counter()
        self._tracks: dict[str, int] = {}
        self._queued_until_s: dict[str, float] = {}
        self._queue: queue.SimpleQueue[tuple[str, str, float, float] | None] = (
            queue.SimpleQueue()
        )
        start_us = int(datetime.now(tz=UTC).timestamp() * 1e6)
        self._write(
            [
                {
                    "name": "start_time_since_epoch_in_micros",
                    "ph": "M",
                    "pid": 0,
                    "args": {"start_time_since_epoch_in_micros": start_us},
                }
            ]
        )
        self._thread = threading.Thread(
            target=self._run, name="stretto-timeline", daemon=True
        )
        self._thread.start()

    def add_span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Queue a span; return at once."""
        self._queue.put((track, name, start_s, end_s))

    def close(self) -> None:
        """Write the queued spans and close the file."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while True:
            spans = [self._queue.get()]
            while not self._queue.empty():
                spans.append(self._queue.get())
            events: list[dict[str, Any]] = []
            for span in spans:
                if span is not None:
                    events += self._events(*span)
            try:
                self._write(events)
            except OSError as exc:
                if not self._failed:
                    _log.warning("the timeline %s lacks spans: %s", self.path, exc)
                self._failed = True
            if None in spans:
                return

    def _events(
        self, track: str, name: str, start_s: float, end_s: float
    ) -> list[dict[str, Any]]:
        if track == "rounds":
            if not self._mark_cycles:
                return []
            cycle = {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0}
            return [{**cycle, "ts": self._us(start_s)}]
        events = []
        if track not in self._tracks:
            number = self._tracks[track] = len(self._tracks) + 1
            named: dict[str, Any] = {"ph": "M", "pid": number}
            events = [
                {**named, "name": "process_name", "args": {"name": track}},
                {
                    **named,
                    "name": "process_sort_index",
                    "args": {"sort_index": number},
                },
            ]
        spans = [(name, start_s, end_s)]
        if name == "queued":
            kind = track.partition(".")[0]
            suffix = f"_{kind.upper()}" if kind in _KINDS else ""
            spans = [(f"NEGOTIATE{suffix}", start_s, end_s)]
            self._queued_until_s[track] = end_s
        elif name in _NAMES or name in _KINDS:
            spans = [(_NAMES.get(name, name.upper()), start_s, end_s)]
            until_s = self._queued_until_s.pop(track, start_s)
            if until_s < start_s:
                spans.insert(0, ("QUEUE", until_s, start_s))
        pid = self._tracks[track]
        for each, begin_s, done_s in spans:
            if done_s < self._began_s:
                continue
            at = self._us(begin_s)
            length = {"ts": at, "dur": round(self._us(done_s) - at, 3)}
            events.append({"name": each, "ph": "X", "pid": pid, "tid": 0, **length})
        return events

    def _us(self, at_s: float) -> float:
        return round(max(0.0, at_s - self._began_s) * 1e6, 3)

    def _write(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        text = ",\n".join(json.dumps(event) for event in events).encode()
        if not self._first:
            text = b",\n" + text
        os.pwrite(self._file, text + _END, self._at)
        self._first = False
        self._at += len(text)


_writer: _Writer | None = None
_lock = threading.Lock()


def open_timeline(file_path: str, *, mark_cycles: bool) -> None:
    """Write a timeline into ``file_path`` from now on; see `start_timeline`."""
    global _writer
    if file_path == _LATER:
        return
    path = Path(file_path)
    with _lock:
        if _writer is not None:
            if _writer.path == path:
                return
            _writer.close()
            _writer = None
        try:
            _writer = _Writer(path, mark_cycles=mark_cycles)
        except OSError as exc:
            raise SpecError(
                f"start_timeline: {path} can't be written: {exc.strerror}"
            ) from exc


def stop_timeline() -> None:
    """End the timeline and close its file; do nothing without one."""
    global _writer
    with _lock:
        writer, _writer = _writer, None
        if writer is not None:
            writer.close()


def recording() -> bool:
    """Return whether this rank is writing a timeline."""
    return _writer is not None


def add_span(track: str, name: str, start_s: float, end_s: float) -> None:
    """Add a span, in `time.perf_counter` seconds, if a timeline is written."""
    writer = _writer
    if writer is not None:
        writer.add_span(track, name, start_s, end_s)


@final
class _Observer(AbstractEngineObserver):
    """Forwards an engine's spans to the current timeline."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        if _writer is not None:
            add_span(track + self._suffix, name, start_s, end_s)


def engine_observer(process_set_id: int) -> AbstractEngineObserver | None:
    """Return the observer for the engine of a process set, when it opens.

    A timeline may start later than the engine, so the observer always exists.
    """
    return _Observer(f" (process set {process_set_id})" if process_set_id else "")
