"""A kernel that uses a device as a collective would, for `stretto probe --synthetic`.

$k$ blocks with as many threads as NCCL's stay on the device and
move memory at a set rate until they are stopped. In each round a block reads two arrays
and writes one, as a ring's reduction does, then spins until its rate allows the next
round, as NCCL's wait for the network does. A block occupies its multiprocessor as one
of NCCL's does, up to what registers and shared memory leave to others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.errors import StrettoError
from stretto.measure.contention import AbstractContentionBench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREADS = 544
"""Threads of a block: 512 plus one warp, as NCCL's ring uses for large messages
(``NCCL_NTHREADS`` and its documentation).
"""

DEFAULT_BLOCK_BYTES_PER_S = 2e9
"""Bytes of message that a block handles per second: 100 Gbit/s over 6 channels."""

_ROUND_FLOATS = 16384
_MAX_S = 5.0
_COMPUTE_S = 0.02

_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(544, 1)
communicate(const float* a, const float* b, float* c, const int* stop,
            unsigned long long* rounds, int round_ns, int longest_ms)
{
    const unsigned long long longest_ns = 1000000ull * longest_ms;
    const int floats = 16384;
    const long long at = (long long)blockIdx.x * floats;
    volatile const int* stopping = stop;
    unsigned long long begin, now;
    __shared__ int ended;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    if (threadIdx.x == 0) ended = 0;
    __syncthreads();
    unsigned long long done = 0;
    while (true) {
        for (int i = threadIdx.x; i < floats; i += blockDim.x)
            c[at + i] = __ldcv(a + at + i) + __ldcv(b + at + i);
        done += 1;
        if (threadIdx.x == 0) {
            // Until the next round is due, or to the end whatever happens.
            do {
                asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
                if (*stopping || now - begin > longest_ns) ended = 1;
            } while (!ended && now - begin < done * (unsigned long long)round_ns);
        }
        __syncthreads();
        if (ended) break;
        __syncthreads();
    }
    if (threadIdx.x == 0) rounds[blockIdx.x] = done;
}
"""


@final
class SyntheticBench(AbstractContentionBench):
    """Blocks that act like a collective's, beside a load on the same device."""

    wire_factor = None

    def __init__(
        self,
        *,
        load: Callable[[], None],
        device: torch.device,
        max_blocks: int,
        block_bytes_per_s: float = DEFAULT_BLOCK_BYTES_PER_S,
    ) -> None:
        # The only compiler is the one that torch includes (NVRTC).
        compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
        if compile_kernel is None:
            raise StrettoError(
                f"this torch ({torch.__version__}) has no torch.cuda._compile_kernel, "
                "which builds the emulated communication: install torch 2.11 or "
                "newer, or measure with ranks (`stretto probe --resources`)"
            )
        self._device = device
        self._load = load
        self._rate = block_bytes_per_s
        with torch.cuda.device(device):
            self._kernel = compile_kernel(_SOURCE, "communicate")
        self._arrays = [
            torch.zeros(max_blocks * _ROUND_FLOATS, device=device) for _ in range(3)
        ]
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._rounds = torch.zeros(max_blocks, dtype=torch.int64, device=device)
        self._round_ns = round(1e9 * 4 * _ROUND_FLOATS / block_bytes_per_s)
        # As with NCCL's streams: the blocks get their places before waiting
        # computation's.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._units = 1
        load()
        alone_s = self.compute_s(None)
        self._units = max(1, round(_COMPUTE_S / alone_s))

    def compute_s(self, resource: int | None) -> float:  # noqa: D102
        torch.cuda.synchronize(self._device)
        self._stop.zero_()
        torch.cuda.synchronize(self._device)
        if resource is not None:
            self._kernel(
                grid=(resource, 1, 1),
                block=(THREADS, 1, 1),
                # The kernel receives whole numbers as C ints, of 32 bits.
                args=[
                    *self._arrays,
                    self._stop,
                    self._rounds,
                    self._round_ns,
                    round(1e3 * _MAX_S),
                ],
                stream=self._stream,
            )
            # An idle device starts the blocks within microseconds.
            time.sleep(0.001)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(self._units):
            self._load()
        end.record()
        self._stop.fill_(1)  # on the load's stream: communication ends with it
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end)) / 1000.0

    def send_s(self, resource: int, size_bytes: int, *, beside: bool) -> float:  # noqa: D102
        raise StrettoError(
            f"nothing is sent without peers (resource {resource}, {size_bytes} bytes, "
            f"beside {beside}): this is a bug in stretto"
        )

    def agree(self, value: float) -> float:  # noqa: D102
        return value

    def slowest(self, values: Sequence[float]) -> list[float]:  # noqa: D102
        return list(values)

    def provenance(self) -> dict[str, Any]:  # noqa: D102
        return {
            "communication": "synthetic kernel, no peers",
            "device": torch.cuda.get_device_name(self._device),
            "torch": torch.__version__,
            "threads_per_block": THREADS,
            "block_bytes_per_s": self._rate,
            "loads": self._units,
        }
