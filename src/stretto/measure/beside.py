"""Measure computation beside real collectives of a given resource.

Experimental on CUDA: this module has been run on CPUs only.
"""

from __future__ import annotations

import math
import threading
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.measure.contention import AbstractContentionBench
from stretto.measure.network import backend_name, barrier, device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    Launch = Callable[[torch.Tensor], Sequence[Any]]
    """Starts an all-reduce of a message and returns the works to wait for."""

_COMPUTE_S = 0.1
_STREAM_BYTES = 1024 * 1024
_MAX_QUEUED = 512
_THROUGHOUT = 2.5
"""Communication is queued for this multiple of the computation's time alone, so that it
lasts to the end of a computation that it slows.
"""


@final
class CollectiveBench(AbstractContentionBench):
    """All-reduces over a group's ranks, beside a load on the same devices."""

    def __init__(
        self,
        *,
        launch_of: Callable[[int], Launch],
        load: Callable[[], None],
        group: ProcessGroup | None = None,
    ) -> None:
        self._launch_of = launch_of
        self._load = load
        self._group = group
        self._device = device_of(group)
        self._ranks = dist.get_world_size(group)
        self._launches: dict[int, Launch] = {}
        self._messages: dict[int, torch.Tensor] = {}
        self._alone_s: dict[tuple[int, int], float] = {}
        self._cuda = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if self._cuda else None
        load()
        self._synchronize()
        begin = perf_counter()
        for _ in range(3):
            load()
        self._synchronize()
        self._load_s = self.agree((perf_counter() - begin) / 3)
        self._units = max(1, round(_COMPUTE_S / self._load_s))

    @property
    def wire_factor(self) -> float:  # noqa: D102
        return 2 * (self._ranks - 1) / self._ranks

    def compute_s(self, resource: int | None) -> float:  # noqa: D102
        if resource is None:
            self._meet()
            return self._compute()
        launch, message = self._launch(resource), self._message(_STREAM_BYTES)
        alone_s = self._alone_s.get((resource, _STREAM_BYTES))
        if alone_s is None:
            self.send_s(resource, _STREAM_BYTES, beside=False)  # connects
            alone_s = self.send_s(resource, _STREAM_BYTES, beside=False)
        count = math.ceil(_THROUGHOUT * self._units * self._load_s / alone_s)
        count = int(self.agree(min(count, _MAX_QUEUED)))
        self._meet()
        works = [work for _ in range(count) for work in launch(message)]
        compute_s = self._compute()
        for work in works:
            work.wait()
        self._synchronize()
        return compute_s

    def send_s(self, resource: int, size_bytes: int, *, beside: bool) -> float:  # noqa: D102
        launch, message = self._launch(resource), self._message(size_bytes)
        alone_s = self._alone_s.get((resource, size_bytes), self._load_s)
        self._meet()
        if self._cuda:
            sent_s = self._send_cuda(launch, message, alone_s if beside else 0.0)
        else:
            sent_s = self._send_host(launch, message, beside=beside)
        if not beside:
            self._alone_s[resource, size_bytes] = sent_s
        return sent_s

    def agree(self, value: float) -> float:  # noqa: D102
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return float(tensor.item())

    def slowest(self, values: Sequence[float]) -> list[float]:  # noqa: D102
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        found: list[float] = tensor.tolist()
        return found

    def provenance(self) -> dict[str, Any]:  # noqa: D102
        return {
            "communication": backend_name(self._group, self._device),
            "ranks": self._ranks,
            "device": str(self._device),
            "torch": torch.__version__,
            "load_s": self._load_s,
            "loads": self._units,
        }

    def _launch(self, resource: int) -> Launch:
        if resource not in self._launches:
            self._launches[resource] = self._launch_of(resource)
        return self._launches[resource]

    def _message(self, size_bytes: int) -> torch.Tensor:
        if size_bytes not in self._messages:
            self._messages[size_bytes] = torch.zeros(
                size_bytes // 4, dtype=torch.float32, device=self._device
            )
        return self._messages[size_bytes]

    def _meet(self) -> None:
        self._synchronize()
        barrier(self._group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _compute(self) -> float:
        """Return the load's time; on CUDA its stream's, not communication's."""
        if not self._cuda:
            begin = perf_counter()
            for _ in range(self._units):
                self._load()
            return perf_counter() - begin
        start, end = _event(), _event()
        start.record()
        for _ in range(self._units):
            self._load()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0

    def _send_host(
        self, launch: Launch, message: torch.Tensor, *, beside: bool
    ) -> float:
        ended = threading.Event()
        ends_s: list[float] = []

        def end(_: Any) -> None:
            ends_s.append(perf_counter())
            ended.set()

        begin = perf_counter()
        works = launch(message)
        done = torch.futures.collect_all([work.get_future() for work in works])
        done.add_done_callback(end)
        while beside and not ended.is_set():
            self._load()
        for work in works:
            work.wait()
        ended.wait()
        return ends_s[0] - begin

    def _send_cuda(
        self, launch: Launch, message: torch.Tensor, beside_s: float
    ) -> float:
        start, end = _event(), _event()
        start.record()
        works = launch(message)
        with torch.cuda.stream(self._side):
            for work in works:
                work.wait()
            end.record()
        for _ in range(math.ceil(_THROUGHOUT * beside_s / self._load_s)):
            self._load()
        self._synchronize()
        return float(start.elapsed_time(end)) / 1000.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
