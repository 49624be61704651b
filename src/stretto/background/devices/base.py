"""The contract of a device that a background and a foreground share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

if TYPE_CHECKING:
    from stretto.background.priority import Isolation


@final
@dataclass(slots=True)
class EndedTask:
    """A task of the background that has ended."""

    label: str
    length_s: float
    """How long it had the device."""
    end_s: float


class AbstractDevice(ABC):
    """A device in one of the two processes that share it."""

    idles_in_communication: ClassVar[bool] = True
    """Whether tasks may start while the foreground's communication uses the device."""

    closed_kinds: ClassVar[frozenset[str]] = frozenset()
    """Kinds of waits in which no task may start unless measured to be harmless."""

    is_processor: ClassVar[bool] = False
    """Whether a process uses the device whenever it has processor time."""

    is_taken: ClassVar[bool] = False
    """Whether the foreground must get the device before it computes."""

    def __init__(self, name: str) -> None:
        self.name = name

    # the background's side

    @abstractmethod
    def isolate(self, foreground_pid: int) -> Isolation:
        """Give this process less of the device than the foreground has."""

    @abstractmethod
    def preempts(self, isolation: Isolation) -> bool:
        """Return whether the foreground gets the device at once when it needs it."""

    @abstractmethod
    def start_task(self, label: str, *, waits: bool, depth: int) -> bool:
        """Get the device for a task of the calling thread.

        Args:
            label: of tasks of about the same length.
            waits: wait for the device if it is busy. Otherwise return ``False``.
            depth: tasks that may be outstanding.
        """

    @abstractmethod
    def end_task(self) -> None:
        """End the task that was started last; on some devices it still runs."""

    @abstractmethod
    def ended(self) -> list[EndedTask]:
        """Return the tasks that have ended since the last call, oldest first."""

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """Tasks that have been started and have not ended."""

    def withdraw(self) -> None:  # noqa: B027 - optional
        """Give back what is reserved for later tasks."""

    # the foreground's side

    def take(self, *, patience_s: float = float("inf")) -> bool:
        """Get the device for the foreground; ``False`` if patience has ended."""
        del patience_s
        return True

    def release(self) -> None:  # noqa: B027 - optional
        """Leave the device while the foreground waits."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release everything."""
