"""The checks of the contract of backends: each runs in every rank of its case."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from stretto.errors import CommTimeout
from stretto.runtime import DistributedDataParallel
from stretto.runtime.failure import FailureReporter
from stretto.schema import Bucket, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stretto.runtime.lanes import LanePool
    from stretto.testing._backend_bench import BackendBench


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int32, torch.int64),
)
"""Types that an all-reduce of every backend supports."""


SIZES = (1, 7, 1_000, 300_001)
"""Elements: the last exceeds what a backend is likely to move at once."""


BOUND_S = 25.0
"""A failure is reported within this, however long a rank's own timeout is."""


_TIMEOUT_S = 2.0


_REOPENED = 12


_LEFT_TO_END_S = 0.2
"""Time in which something wrong may happen; nothing is required to end in it."""


_CLOSE_S = 10.0
"""``close`` returns within this where no collective is queued."""


def _reduce(lane: Any, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = operation
    return lane.allreduce([tensor], options)


def sums(bench: BackendBench) -> None:
    """Check sums over all ranks for each type and size."""
    pool = bench.pool()
    lane = pool.lane(0)
    assert (lane.rank(), lane.size()) == (bench.rank, bench.size)
    sums = []
    for dtype in DTYPES:
        for elements in SIZES:
            theirs = bench.all_values(dtype, elements)
            found = theirs[bench.rank].clone()
            lane.allreduce([found]).wait()
            _require_sum(found, theirs)
            sums.append(found)
    bench.require_same_bits(sums)
    pool.close()


def _require_sum(found: torch.Tensor, parts: list[torch.Tensor]) -> None:
    if len(parts) == 2:
        # One rounding, whatever the order.
        assert torch.equal(found, parts[0] + parts[1]), f"a sum of {found.dtype}"
        return
    exact = torch.stack([part.double() for part in parts]).sum(0)
    if not found.is_floating_point():
        assert torch.equal(found, exact.to(found.dtype)), f"a sum of {found.dtype}"
        return
    # Each of the additions may round once.
    unit = torch.finfo(found.dtype).eps * len(parts)
    magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
    assert ((found.double() - exact).abs() <= unit * magnitude).all(), (
        f"a sum of {found.dtype}"
    )


def operations(bench: BackendBench) -> None:
    """Check each reduction beside the sum."""
    pool = bench.pool()
    lane = pool.lane(0)
    wanted: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
        dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    }
    for operation, expected in wanted.items():
        for dtype in (torch.float32, torch.int64):
            rows = torch.stack(bench.all_values(dtype, 1_000))
            found = rows[bench.rank].clone()
            _reduce(lane, found, operation).wait()
            assert torch.allclose(found, expected(rows)), (operation, dtype)
            bench.require_same_bits([found])
    if bench.is_on_host:
        words = torch.tensor([6 + bench.rank, 12, -1])
        _reduce(lane, words, dist.ReduceOp.BAND).wait()
        wanted_bits = functools.reduce(int.__and__, range(6, 6 + bench.size))
        assert words.tolist() == [wanted_bits, 12, -1]
    pool.close()


def not_finite(bench: BackendBench) -> None:
    """Check that infinities and NaNs arrive."""
    pool = bench.pool()
    found = torch.tensor([float("inf"), 1.0, float("nan")], device=bench.device)
    found[1] += bench.rank
    pool.lane(0).allreduce([found]).wait()
    assert found[0].item() == float("inf")
    assert found[1].item() == 3.0
    assert found[2].isnan().item()
    pool.close()


def in_order(bench: BackendBench) -> None:
    """Launch many all-reduces of one size: the n-th of every rank belong together."""
    pool = bench.pool()
    lane = pool.lane(0)
    values = [torch.full((5,), float(n), device=bench.device) for n in range(40)]
    works = []
    for value in values:
        works.append(lane.allreduce([value]))
        if bench.rank == len(works) % bench.size:
            time.sleep(0.002)  # ranks do not launch at the same moments
    for work in reversed(works):
        work.wait()
    for n, value in enumerate(values):
        assert value.tolist() == [float(bench.size * n)] * 5
    pool.close()


def slices(bench: BackendBench) -> None:
    """Reduce slices of one buffer, several in flight, on several lanes."""
    pool = bench.pool()
    opened = pool.open([(0, None), (1, None), (2, None)])
    theirs = bench.all_values(torch.float32, 90_001)
    buffer = theirs[bench.rank].clone()
    pieces = list(buffer.split(7_000))
    kept = pieces.pop(3).clone()
    works = [opened[i % 3, None].allreduce([piece]) for i, piece in enumerate(pieces)]
    for work in works:
        work.wait()
    wanted = theirs[0] + theirs[1]
    wanted[21_000:28_000] = kept  # this slice was not sent
    assert torch.equal(buffer, wanted)
    pool.close()


def lanes_at_once(bench: BackendBench) -> None:
    """Launch on several lanes, in another order on each rank."""
    pool = bench.pool()
    lanes = [pool.lane(number) for number in range(4)]
    order = range(4) if bench.rank % 2 else range(3, -1, -1)
    for _ in range(5):
        values = [torch.full((40_000,), 1.0 + number) for number in range(4)]
        works = [lanes[number].allreduce([values[number]]) for number in order]
        for work in works:
            work.wait()
        assert [v[-1].item() for v in values] == [
            bench.size * (1.0 + number) for number in range(4)
        ]
    pool.close()


def other_collectives(bench: BackendBench) -> None:
    """Check the collectives beside all-reduce."""
    pool = bench.pool()
    lane = pool.lane(0)
    rank, size = bench.rank, bench.size
    for elements in (3, 400_000):
        for root in range(size):
            options: Any = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            found = bench.values(torch.float32, elements, rank)
            lane.broadcast([found], options).wait()
            assert torch.equal(found, bench.values(torch.float32, elements, root))
        theirs = bench.all_values(torch.float32, elements)
        gathered = torch.empty(size * elements, device=bench.device)
        lane._allgather_base(gathered, theirs[rank]).wait()  # noqa: SLF001
        assert torch.equal(gathered, torch.cat(theirs))
        sent = torch.cat(theirs) + rank
        got = torch.empty_like(sent)
        lane.alltoall_base(got, sent, [], [], dist.AllToAllOptions()).wait()
        expected = [theirs[rank] + other for other in range(size)]
        assert torch.equal(got, torch.cat(expected))
    barrier = dist.BarrierOptions()
    if bench.device.type == "cuda":
        # NCCL's barrier is a sum on a device, which it can't infer from its group.
        barrier.device_ids = [torch.cuda.current_device()]
    lane.barrier(opts=barrier).wait()
    _uneven(bench, lane)
    pool.close()


def barrier(bench: BackendBench) -> None:
    """Hold each rank back in turn: the barrier of the others does not end before."""
    pool = bench.pool()
    lane = pool.lane(0)
    for late in range(bench.size):
        work = None if bench.rank == late else lane.barrier()
        bench.meet()  # all but one have made the call
        if work is not None:
            time.sleep(_LEFT_TO_END_S)
            assert not work.is_completed(), f"a barrier ended without rank {late}"
        bench.meet()  # all have looked
        if work is None:
            work = lane.barrier()
        work.wait()
    pool.close()


def _uneven(bench: BackendBench, lane: Any) -> None:
    """Send rank r ``200,000 * r + s + 1`` rows, from rank s."""
    rank, size = bench.rank, bench.size
    sends = [200_000 * to + rank + 1 for to in range(size)]
    gets = [200_000 * rank + source + 1 for source in range(size)]
    parts = [
        torch.full((count,), float(10 * rank + to), device=bench.device)
        for to, count in enumerate(sends)
    ]
    got = torch.empty(sum(gets), device=bench.device)
    lane.alltoall_base(
        got, torch.cat(parts), gets, sends, dist.AllToAllOptions()
    ).wait()
    wanted = [
        torch.full((count,), float(10 * source + rank), device=bench.device)
        for source, count in enumerate(gets)
    ]
    assert torch.equal(got, torch.cat(wanted))


def futures(bench: BackendBench) -> None:
    """Read results from futures, and launch from a callback."""
    pool = bench.pool()
    lane = pool.lane(0)
    value = torch.ones(8, device=bench.device)
    work = lane.allreduce([value])
    seen = work.get_future().then(lambda ended: ended.value()[0].clone())
    assert torch.equal(seen.wait(), torch.full_like(value, float(bench.size)))
    work.wait()  # Gloo completes the future first
    assert work.is_completed() or not bench.is_on_host

    def again(ended: Any) -> torch.Tensor:
        # As PowerSGD does: a collective that is awaited in a callback.
        future = lane.allreduce([ended.value()[0]]).get_future()
        found: torch.Tensor = future.wait()[0]
        return found

    value = torch.ones(8, device=bench.device)
    twice = lane.allreduce([value]).get_future().then(again).wait()
    assert torch.equal(twice, torch.full_like(twice, float(bench.size**2)))
    pool.close()


def resources(bench: BackendBench) -> None:
    """Open a lane with two resources, and use both in turn."""
    pool = bench.pool()
    opened = pool.open([(0, None), (0, 2), (1, 2)])
    assert set(opened) == {(0, None), (0, 2), (1, 2)}
    assert pool.lane(1, 2) is opened[1, 2]
    if bench.is_on_host:
        values = [torch.full((3,), float(n)) for n in range(8)]
        works = [
            opened[0, 2 if n % 2 else None].allreduce([value])
            for n, value in enumerate(values)
        ]
        for work in works:
            work.wait()
        for n, value in enumerate(values):
            assert value.tolist() == [float(bench.size * n)] * 3
    pool.close()


def retain(bench: BackendBench) -> None:
    """Release lanes and open them again."""
    pool = bench.pool()
    kept = pool.lane(0)
    for _ in range(3):
        for number in range(2):
            value = torch.ones(10, device=bench.device)
            pool.lane(number).allreduce([value]).wait()
            assert value.tolist() == [float(bench.size)] * 10
        bench.meet()  # no collective is in flight on any rank
        pool.retain([(0, None)])
        assert pool.lane(0) is kept
    pool.close()


def retain_frees(bench: BackendBench) -> None:
    """Release lanes: what the process held for them is freed."""
    lanes = range(4)
    for is_last in (False, True):  # what a process makes once is made in the first turn
        pool = bench.pool()
        _use(bench, pool, [0])
        first = _held_after(None, 1.0) if is_last else {}
        _use(bench, pool, lanes)
        bench.meet()  # no collective is in flight on any rank
        pool.retain([(0, None)])
        if is_last:
            _require_held(first, "with lane 0", "after retaining only lane 0")
        _use(bench, pool, [0])
        pool.close()


def _use(bench: BackendBench, pool: LanePool, lanes: Iterable[int]) -> None:
    for number in lanes:
        value = torch.ones(10, device=bench.device)
        pool.lane(number).allreduce([value]).wait()
        assert value.tolist() == [float(bench.size)] * 10


def close_queued(bench: BackendBench) -> None:
    """Close with collectives queued: they still run, on every rank.

    Rank 0 closes before the others make their calls. Its ``close`` may wait for them,
    so they continue when it has returned or after a moment.
    """
    pool = bench.pool()
    lane = pool.lane(0)
    lane.allreduce([torch.ones(4)]).wait()
    values = [torch.full((1_000 * n + 1,), float(n)) for n in range(20)]
    if bench.rank == 0:
        works = [lane.allreduce([value]) for value in values]
        bench.meet()
        del lane  # a lane ends with its last user
        pool.close()
        bench.announce("closed")
    else:
        bench.meet()
        bench.wait_for("closed", _LEFT_TO_END_S)
        works = [lane.allreduce([value]) for value in values]
        del lane
        pool.close()
    for work in works:
        work.wait()
    for n, value in enumerate(values):
        assert (value == bench.size * n).all(), f"queued collective {n}"
    bench.meet()


def close_alone(bench: BackendBench) -> None:
    """Close on one rank only: it does not wait for the others."""
    for closing in range(bench.size):
        pool = bench.pool()
        _use(bench, pool, range(2))
        bench.meet()  # no collective is in flight on any rank
        if bench.rank == closing:
            thread = threading.Thread(target=pool.close, daemon=True)
            thread.start()
            thread.join(_CLOSE_S)
            assert not thread.is_alive(), (
                f"close waited {_CLOSE_S:g} s for ranks that have not closed"
            )
        bench.meet()
        pool.close()


def reopened(bench: BackendBench) -> None:
    """Close pools, or drop them: threads, descriptors and memory are freed."""
    held: list[dict[str, int]] = []
    for turn in range(_REOPENED):
        pool = bench.pool()
        for number in range(3):
            pool.lane(number).allreduce([torch.ones(200_000)]).wait()
        if turn % 2:
            pool.close()
        del pool
        if turn == 2:
            held.append(_held_after(None, 1.0))
    _require_held(held[0], "at first", "at last")


def _require_held(first: dict[str, int], when: str, now: str) -> None:
    """Require that the process soon holds no more than it did first."""
    last = _held_after(first, 10.0)
    for key, count in first.items():
        assert last[key] <= count, f"{key}: {count} {when}, {last[key]} {now}"


def _held_after(wanted: dict[str, int] | None, limit_s: float) -> dict[str, int]:
    """Return what the process holds after ``limit_s``, or once it is ``wanted``."""
    deadline = time.perf_counter() + limit_s
    while True:
        gc.collect()
        found = {
            kind: sum(1 for _ in Path(f"/proc/self/{name}").iterdir())
            for kind, name in (("threads", "task"), ("descriptors", "fd"))
        }
        shared = Path("/proc/self/maps").read_text().splitlines()
        found["shared mappings"] = sum(" rw-s " in line for line in shared)
        freed = wanted is not None and all(found[k] <= wanted[k] for k in wanted)
        if freed or time.perf_counter() > deadline:
            return found
        time.sleep(0.05)


def abort(bench: BackendBench) -> None:
    """Abort while a peer takes no part: works fail at once, on both."""
    pool = bench.pool()
    lane = pool.lane(0)
    lane.allreduce([torch.ones(4)]).wait()
    bench.meet()
    if bench.rank == 0:
        works = [lane.allreduce([torch.ones(1 << 18)]) for _ in range(3)]
        time.sleep(0.3)
        with bench.within(5.0):
            pool.abort()
            for work in works:
                _require_failure(work)
        bench.meet()
        return
    bench.meet()
    with bench.within(5.0):
        _require_failure(lane, torch.ones(1 << 18))


def _require_failure(*what: Any) -> RuntimeError:
    """Return the error of a work, or of an all-reduce on a lane."""
    try:
        work = what[0] if len(what) == 1 else what[0].allreduce([what[1]])
        work.wait()
    except RuntimeError as exc:
        return exc
    raise AssertionError("a collective without its peers has succeeded")


def late_rank(bench: BackendBench) -> None:
    """Leave a rank out: the others report a timeout that names it."""
    pool = bench.pool(_TIMEOUT_S)
    lane = pool.lane(0)
    lane.allreduce([torch.ones(4)]).wait()
    if bench.rank == 1:
        time.sleep(_TIMEOUT_S + 4.0)  # alive, but it takes another path
        return
    with bench.within(BOUND_S):
        cause = _require_failure(lane, torch.ones(1 << 18))
        error = _report(bench, pool, _TIMEOUT_S, cause)
    assert "did not end within 2 s" in str(error), error
    assert "rank 1" in str(error), error


def _report(
    bench: BackendBench, pool: LanePool, timeout_s: float, cause: RuntimeError
) -> CommTimeout:
    """Return the one error of a model whose collective failed."""
    reporter = FailureReporter(bench.ranks_for(timeout_s), pool.abort)
    error = reporter.report("the all-reduce of bucket 3 on lane 0", cause)
    assert isinstance(error, CommTimeout)
    assert str(error).startswith(
        f"rank {bench.rank}: the all-reduce of bucket 3 on lane 0"
    ), error
    return error


def dead_rank(bench: BackendBench) -> None:
    """Kill a rank in the middle of a collective: the others name it soon."""
    pool = bench.pool()  # its timeout is a minute
    lanes = [pool.lane(number) for number in range(2)]
    lanes[0].allreduce([torch.ones(4)]).wait()
    bench.meet()  # and know each other's processes
    if bench.rank == bench.size - 1:
        lanes[0].allreduce([torch.ones(1 << 18)])
        os.kill(os.getpid(), signal.SIGKILL)
    with bench.within(BOUND_S):
        cause = _require_failure(lanes[1], torch.ones(1 << 18))
        error = _report(bench, pool, 60.0, cause)
    assert f"rank {bench.size - 1} is gone" in str(error), error
    with bench.within(5.0):  # nothing waits for it again
        _require_failure(lanes[0], torch.ones(4))


def dead_before_opening(bench: BackendBench) -> None:
    """Lose a rank before lanes are opened: the others do not wait for it."""
    bench.meet()
    if bench.rank == bench.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    error: RuntimeError | None = None
    with bench.within(BOUND_S):
        try:
            bench.pool().lane(0)
        except RuntimeError as exc:
            error = exc
    assert f"rank {bench.size - 1} is gone" in str(error), error


def model(bench: BackendBench) -> None:
    """Train a planned model: gradients are DDP's, bit for bit on two ranks."""

    def net() -> nn.Module:
        torch.manual_seed(5)
        layers = (nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 3))
        return nn.Sequential(*layers).to(bench.device)

    names = [name for name, _ in net().named_parameters()][::-1]
    plan = Plan(
        planner="test",
        workload_digest="",
        ranks=bench.size,
        overlap="backward",
        lanes=3,
        buckets=tuple(
            Bucket(tensors=tuple(part), lane=i, slices=1 + 2 * i, wire_dtype="float32")
            for i, part in enumerate((names[:2], names[2:]))
        ),
    )
    model = DistributedDataParallel(net(), plan=plan, lane_backend=bench.backend)
    reference = nn.parallel.DistributedDataParallel(net())
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + bench.rank)
        x = torch.randn(16, 64, generator=generator).to(bench.device)
        for each in (model, reference):
            each.zero_grad()
            each(x).square().mean().backward()
        for mine, theirs in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad), f"step {step}"
    assert model.backend == bench.backend
