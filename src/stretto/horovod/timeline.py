"""Timeline files with Horovod's span names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.runtime.negotiated import AbstractEngineObserver


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002
    """Writes a timeline into ``file_path`` from now on."""
    raise NotImplementedError


def stop_timeline() -> None:
    """Ends the timeline and closes its file; nothing where none was started."""


def engine_observer(process_set_id: int) -> AbstractEngineObserver | None:
    """What the engine of a process set tells its spans to; asked when it opens.

    A timeline may start later than the engine, so this is there from the beginning.
    """
    del process_set_id
    return None
