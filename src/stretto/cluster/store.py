"""The events of a cluster in SQLite, and tables of what they amount to."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stretto.cluster.events import Event
    from stretto.cluster.ledger import Ledger


@final
class Store:
    """One writer's connection: WAL, and a lock that only one coordinator has.

    Files have mode 0600 in a folder of mode 0700.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the store of a folder.

        Raises:
            ClusterError: another coordinator has it, or it cannot be opened; the
                message says which, and the next step.
        """
        raise NotImplementedError

    def events(self) -> Iterator[Event]:
        """Yield the kept events in order, without steps."""
        raise NotImplementedError

    def append(self, events: Sequence[Event], ledger: Ledger) -> None:
        """Keep events and the rows of jobs, attempts and devices that they changed.

        All or nothing. An event whose agent and number are kept already is skipped.

        Raises:
            StoreUnavailable: the disk is full, or the file is locked or damaged.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the lock."""
        raise NotImplementedError
