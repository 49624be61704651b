"""A CUDA device. Experimental: run on single GPUs only.

A stream's priority decides among kernels that have not begun; a running kernel is never
interrupted. So tasks must be short: a job that is captured as CUDA graphs is cut into
pieces of about half a millisecond (`GraphPieces`), an event per task shows when it has
ended, and few may be outstanding.

# Note [Priorities of streams]
Level 0 is the lowest, and that of the default stream. A background has it and a
foreground should compute on a stream of `foreground_stream`. A graph's kernels have the
priority of the stream on which it was captured, so each job captures on its own.

# Note [Streams of tasks]
A task runs on the program's own streams; events on the current one time it. A stream of
the lease's would not be ordered with what the program launches between tasks, such as
data that is copied to the device or a loss that is read. And a lease that a backward
ends is ended by another thread, which can't restore this one's stream.

While the program captures a graph nothing is recorded, and no event is asked for: the
kernels do not run, and an event would be one of the graph's.

# Note [Two processes on one GPU]
Without MPS they take turns in time slices, so only windows of several milliseconds are
of use. With MPS, `CudaDevice.isolate` makes this process a client of low priority,
which the driver reads when CUDA is initialized.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from stretto.background.devices.base import AbstractDevice, EndedTask
from stretto.background.priority import Isolation
from stretto.errors import SpecError
from stretto.logs import get_logger, warn_experimental

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping, Sequence
    from contextlib import AbstractContextManager

_log = get_logger(__name__)

PIECE_S = 0.5e-3
"""Length of a piece of a job that is captured as CUDA graphs."""

_LOWEST, _HIGHEST = 0, -3
"""Priorities of streams, as torch limits them."""

_MPS_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
_MPS_BELOW_NORMAL = "1"


def has_mps(environment: MutableMapping[str, str]) -> bool:
    """Return whether an MPS daemon serves this process."""
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()


@final
class CudaDevice(AbstractDevice):
    """Tasks are timed on the streams on which the program launches them."""

    idles_in_communication: ClassVar[bool] = False

    closed_kinds: ClassVar[frozenset[str]] = frozenset(
        {"all-reduce", "synchronization"}
    )
    """NCCL's kernels take twice as long beside other kernels (DeepPool, section 5)."""

    def __init__(self, name: str, cuda: Any = torch.cuda) -> None:
        """Use a device; nothing is created on it before the first task.

        Args:
            name: ``cuda`` or ``cuda:NUMBER``.
            cuda: the module ``torch.cuda``.

        Raises:
            SpecError: the part after the colon is not a number, or no such GPU is seen.
        """
        super().__init__(name)
        number = name.partition(":")[2] or "0"
        if not number.isdigit():
            raise SpecError(f"a CUDA device is named like cuda:0, got {name!r}")
        self._index, self._cuda = int(number), cuda
        count = cuda.device_count()
        if self._index >= count:
            raise SpecError(f"there is no device {name}: PyTorch sees {count} GPUs")
        self._stream: Any = None
        self._open: tuple[str, Any] | None = None
        self._tasks: deque[tuple[str, Any, Any]] = deque()
        self._ended: list[EndedTask] = []

    def isolate(
        self,
        foreground_pid: int,
        environment: MutableMapping[str, str] | None = None,
    ) -> Isolation:
        """Become an MPS client of low priority, if there is MPS."""
        del foreground_pid
        warn_experimental(_log, "a background on a CUDA device")
        environment = os.environ if environment is None else environment
        if not has_mps(environment):
            return Isolation(
                method="",
                detail="no MPS: two processes take turns in time slices on the GPU",
            )
        if environment.get(_MPS_PRIORITY) == _MPS_BELOW_NORMAL:
            return Isolation(method="mps", detail="MPS client of low priority")
        if self._cuda.is_initialized():
            return Isolation(
                method="",
                detail="MPS without a client priority: CUDA was initialized before; "
                f"set {_MPS_PRIORITY}={_MPS_BELOW_NORMAL} when starting the program",
            )
        environment[_MPS_PRIORITY] = _MPS_BELOW_NORMAL
        return Isolation(method="mps", detail="MPS client of low priority")

    def preempts(self, isolation: Isolation) -> bool:
        """Return ``False``: kernels run to their end."""
        del isolation
        return False

    @property
    def stream(self) -> Any:
        """A stream of low priority, for a job that is captured."""
        if self._stream is None:
            self._stream = self._cuda.Stream(device=self._index, priority=_LOWEST)
        return self._stream

    def foreground_stream(self) -> Any:
        """Return a new stream whose kernels come before any background's."""
        return self._cuda.Stream(device=self._index, priority=_HIGHEST)

    def start_task(self, label: str, *, waits: bool, depth: int) -> bool:
        """Time what is launched from now on."""
        del waits, depth
        self._open = label, self._recorded()
        return True

    def end_task(self) -> None:
        """Record an event behind the task's launches."""
        if self._open is not None:
            (label, begin), self._open = self._open, None
            end = self._recorded()
            if begin is not None and end is not None:
                self._tasks.append((label, begin, end))

    def _recorded(self) -> Any:
        """Return an event on the current stream; ``None`` while that is captured."""
        if self._is_capturing():
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._index))
        return event

    def _is_capturing(self) -> bool:
        cuda = self._cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def ended(self) -> list[EndedTask]:
        """Return the tasks whose events have been reached since the last call."""
        self._collect()
        found, self._ended = self._ended, []
        return found

    def _collect(self) -> None:
        if self._tasks and self._is_capturing():
            return
        while self._tasks and self._tasks[0][2].query():
            label, begin, end = self._tasks.popleft()
            length_s = begin.elapsed_time(end) / 1e3
            self._ended.append(EndedTask(label, length_s, perf_counter()))

    @property
    def outstanding(self) -> int:
        """Tasks whose events have not been reached, and an open one."""
        self._collect()
        waits = 0 if self._is_capturing() else len(self._tasks)
        return waits + int(self._open is not None)

    def close(self) -> None:
        """Wait for what was launched."""
        if self._tasks:
            self._tasks[-1][2].synchronize()
            self._collect()


def pieces(times_s: Sequence[float], piece_s: float = PIECE_S) -> list[range]:
    """Return consecutive segments joined to pieces of about one length.

    A piece ends before the segment that would make it longer, so only a single segment
    may exceed the length.

    Raises:
        SpecError: a time is negative, or the length is not positive.
    """
    if not piece_s > 0.0:
        raise SpecError(f"piece_s must be positive, got {piece_s:g}")
    found: list[range] = []
    begin, sum_s = 0, 0.0
    for i, time_s in enumerate(times_s):
        if not time_s >= 0.0:
            raise SpecError(f"times_s[{i}] must be at least 0, got {time_s:g}")
        if i > begin and sum_s + time_s > piece_s:
            found.append(range(begin, i))
            begin, sum_s = i, 0.0
        sum_s += time_s
    if begin < len(times_s):
        found.append(range(begin, len(times_s)))
    return found


@final
class GraphPieces:
    """A job captured as CUDA graphs of about equal length, replayed in order."""

    def __init__(
        self,
        device: CudaDevice,
        segments: Sequence[Callable[[], None]],
        times_s: Sequence[float],
        *,
        piece_s: float = PIECE_S,
        cuda: Any = torch.cuda,
    ) -> None:
        """Capture a job on the background's stream.

        Args:
            device: where it runs.
            segments: calls that launch its parts, with static tensors; in order.
            times_s: how long each part takes.
            piece_s: length of a piece.
            cuda: the module ``torch.cuda``.

        Raises:
            SpecError: the numbers of times and segments differ.
        """
        if len(segments) != len(times_s):
            raise SpecError(
                f"times_s must have one time per segment: {len(segments)}, got "
                f"{len(times_s)}"
            )
        self._graphs = []
        pool = cuda.graph_pool_handle()
        for piece in pieces(times_s, piece_s):
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, pool=pool, stream=device.stream):
                for i in piece:
                    segments[i]()
            self._graphs.append(graph)

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._graphs)

    def replay(self, lease: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Run the job once, each piece in a lease of its own.

        The graphs share memory, so they are replayed in the order of their capture.

        Args:
            lease: `stretto.Background.lease`; it gets a label for each piece.
        """
        for label, graph in self._labeled():
            with lease(label):
                graph.replay()

    def _labeled(self) -> Iterator[tuple[str, Any]]:
        for i, graph in enumerate(self._graphs):
            yield f"piece {i}", graph
