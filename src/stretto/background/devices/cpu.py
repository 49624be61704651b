"""The processors of a host: the kernel preempts, if priorities work."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, final

from stretto.background import priority
from stretto.background.devices.base import AbstractDevice, EndedTask

if TYPE_CHECKING:
    from stretto.background.priority import Isolation


@final
class CpuDevice(AbstractDevice):
    """Tasks run in the calling thread, and the kernel divides the processors."""

    is_processor: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._running: tuple[str, float] | None = None
        self._ended: list[EndedTask] = []

    def isolate(self, foreground_pid: int) -> Isolation:
        """Lower this process's priority, see `priority`."""
        return priority.lower(foreground_pid=foreground_pid)

    def preempts(self, isolation: Isolation) -> bool:
        """Return whether the test of priorities was passed."""
        return isolation.works

    def start_task(self, label: str, *, waits: bool, depth: int) -> bool:
        """Record the start of a task."""
        del waits, depth
        self._running = label, perf_counter()
        return True

    def end_task(self) -> None:
        """Record the end of a task."""
        if self._running is not None:
            label, begin_s = self._running
            now_s = perf_counter()
            self._ended.append(EndedTask(label, now_s - begin_s, now_s))
            self._running = None

    def ended(self) -> list[EndedTask]:
        """Return the tasks that have ended since the last call."""
        found, self._ended = self._ended, []
        return found

    @property
    def outstanding(self) -> int:
        """Tasks that have been started and have not ended: at most one."""
        return int(self._running is not None)
