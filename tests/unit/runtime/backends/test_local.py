"""Lanes through shared memory, with threads as ranks of one process."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from stretto.errors import CommTimeout, PlanMismatch, RankDisagreement
from stretto.process_identity import own_identity
from stretto.runtime import backends
from stretto.runtime.backends import local_lanes, shared_memory
from stretto.runtime.backends.base import LaneFailure
from stretto.runtime.ranks import Ranks
from stretto.runtime.torch_compat import sparse_coo_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


def lanes_of(store: HashStore, rank: int, size: int, timeout_s: float) -> Any:
    names = tuple(10 + r for r in range(size))
    ranks = Ranks(rank=rank, size=size, names=names, store=store, timeout_s=timeout_s)
    return backends.get("local").lanes(
        ranks=ranks,
        store_for=lambda name: PrefixStore(f"lanes/{name}", store),
        device=CPU,
        end_requests=None,
        notes=PrefixStore("failed", store),
    )


def together(
    size: int, function: Callable[[int, Any], Any], timeout_s: float = 20.0
) -> list[Any]:
    """What ``function(rank, lanes)`` returned or raised, by rank."""
    store = HashStore()

    def one(rank: int) -> Any:
        lanes = lanes_of(store, rank, size, timeout_s)
        try:
            return function(rank, lanes)
        except Exception as exc:  # noqa: BLE001 - compared by the test
            return exc
        finally:
            lanes.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def lane(lanes: Any, number: int = 0) -> Any:
    return lanes.open([(number, None)])[number, None]


def options(operation: Any) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = operation
    return made


def drawn(rank: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_every_type_are_equal_on_all_ranks_and_right(size):
    def reduce(rank: int, lanes: Any) -> list[torch.Tensor]:
        found = [drawn(rank, dtype, (50_003,)) for dtype in DTYPES]
        works = [lane(lanes).allreduce([each]) for each in found]
        for work in works:
            work.wait()
        return found

    for dtype, *found in zip(DTYPES, *together(size, reduce), strict=True):
        assert all(torch.equal(found[0], other) for other in found), dtype
        parts = [drawn(rank, dtype, (50_003,)) for rank in range(size)]
        if dtype in (torch.float16, torch.bfloat16):
            wanted = torch.stack([p.float() for p in parts]).sum(0).to(dtype)
        elif dtype is torch.bool:
            wanted = torch.stack(parts).any(0)
        else:
            wanted = parts[0]
            for part in parts[1:]:
                wanted = wanted + part
        assert torch.equal(found[0], wanted), dtype


OPERATIONS: dict[Any, Callable[..., Any]] = {
    dist.ReduceOp.AVG: lambda rows: rows.mean(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_operations_on_floats(dtype):
    def reduce(rank: int, lanes: Any) -> list[torch.Tensor]:
        found = [drawn(rank, dtype, (900,)) for _ in OPERATIONS]
        for each, operation in zip(found, OPERATIONS, strict=True):
            lane(lanes).allreduce([each], options(operation)).wait()
        return found

    rows = torch.stack([drawn(rank, dtype, (900,)) for rank in range(3)]).float()
    for found in together(3, reduce):
        for each, wanted in zip(found, OPERATIONS.values(), strict=True):
            torch.testing.assert_close(each, wanted(rows).to(dtype))


def test_bitwise_operations_on_integers():
    operations = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)

    def reduce(rank: int, lanes: Any) -> list[int]:
        found = []
        for operation in operations:
            word = torch.tensor([0b1100 >> rank])
            lane(lanes).allreduce([word], options(operation)).wait()
            found.append(word.item())
        return found

    for found in together(2, reduce):
        assert found == [0b0100, 0b1110, 0b1010]


@pytest.mark.parametrize(
    ("dtype", "operation"),
    [
        (torch.float32, dist.ReduceOp.BAND),
        (torch.complex64, dist.ReduceOp.MAX),
        (torch.int64, dist.ReduceOp.AVG),
        (torch.float8_e4m3fn, dist.ReduceOp.SUM),
    ],
)
def test_what_can_not_be_reduced_is_refused_before_it_is_sent(dtype, operation):
    def reduce(rank: int, lanes: Any) -> str:
        opened = lane(lanes)
        with pytest.raises(RuntimeError, match="does not support") as caught:
            opened.allreduce([torch.zeros(3).to(dtype)], options(operation))
        value = torch.ones(2)
        opened.allreduce([value]).wait()  # the lane still works
        assert value.tolist() == [2.0, 2.0]
        return str(caught.value)

    for text in together(2, reduce):
        assert str(dtype) in text


@given(elements=st.integers(0, 300_000), size=st.integers(2, 4))
@settings(max_examples=15)
def test_every_size_is_summed_exactly(elements, size):
    def reduce(rank: int, lanes: Any) -> torch.Tensor:
        value = torch.arange(elements, dtype=torch.int64) * (rank + 1)
        lane(lanes).allreduce([value]).wait()
        return value

    total = sum(range(1, size + 1))
    for found in together(size, reduce):
        assert torch.equal(found, torch.arange(elements) * total)


def test_memory_of_any_layout_is_reduced_in_place():
    def reduce(rank: int, lanes: Any) -> list[torch.Tensor]:
        whole = torch.full((6, 8), 1.0 + rank)
        views = [
            whole.t()[::2],  # strided
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.ones(3, dtype=torch.complex64).mul_(1j).conj(),
            torch.tensor(2.0, requires_grad=True),
        ]
        for view in views:
            lane(lanes).allreduce([view]).wait()
        return [whole, *views[1:]]

    for whole, channels, conjugate, scalar in together(2, reduce):
        assert whole[:, ::2].eq(3.0).all()
        assert channels.eq(2.0).all()
        assert conjugate.resolve_conj().tolist() == [-2j] * 3
        assert scalar.item() == 4.0


def test_sparse_sums_keep_each_row():
    def reduce(rank: int, lanes: Any) -> torch.Tensor:
        rows = torch.tensor([[0, 2, 2][: rank + 1]])
        values = torch.ones(rank + 1, 4) * (rank + 1)
        found = sparse_coo_tensor(rows, values, (5, 4))
        lane(lanes).allreduce([found]).wait()
        return found

    for found in together(3, reduce):
        wanted = torch.zeros(5, 4)
        wanted[0], wanted[2] = 1 + 2 + 3, 2 + 3 + 3
        assert torch.equal(found.to_dense(), wanted)


def test_lists_are_gathered():
    def gather(rank: int, lanes: Any) -> list[float]:
        parts = [torch.zeros(2, 2) for _ in range(3)]
        lane(lanes).allgather([parts], [torch.full((2, 2), float(rank))]).wait()
        return [part.sum().item() for part in parts]

    assert together(3, gather) == [[0.0, 4.0, 8.0]] * 3


def test_steps_wrap_around():
    def reduce(rank: int, lanes: Any) -> list[float]:
        opened = lane(lanes)
        segment = opened._segment
        # All ranks begin shortly before the largest number.
        for other in range(3):
            segment._words[segment._word(other)] = 0xFFFFFFFC
        segment._step = 0xFFFFFFFC
        time.sleep(0.2)
        value = torch.ones(200_000)
        for _ in range(10):
            opened.allreduce([value]).wait()
        return [value.min().item(), value.max().item(), segment._step]

    for low, high, step in together(3, reduce):
        assert low == high == 3.0**10
        assert step < 100


@pytest.mark.parametrize("number", [0, shared_memory._number])
def test_waiting_for_a_late_rank_costs_little_time(number, monkeypatch):
    monkeypatch.setattr(shared_memory, "_number", number)

    def wait(rank: int, lanes: Any) -> float:
        opened = lane(lanes)
        opened.barrier().wait()
        if rank == 1:
            time.sleep(2.0)
        value = torch.ones(3)
        opened.allreduce([value]).wait()
        return value.sum().item()

    used_s = time.process_time()
    assert together(2, wait) == [6.0, 6.0]
    assert time.process_time() - used_s < 1.0


# Failures.


def test_a_late_rank_is_named_and_both_ranks_end():
    def late(rank: int, lanes: Any) -> tuple[float, str]:
        opened = lane(lanes)
        if rank == 1:
            time.sleep(2.5)
        began_s = time.perf_counter()
        with pytest.raises(LaneFailure) as caught:
            opened.allreduce([torch.ones(3)]).wait()
        with pytest.raises(LaneFailure):  # and every later call
            opened.allreduce([torch.ones(3)]).wait()
        return time.perf_counter() - began_s, str(caught.value)

    (waited_s, first), (after_s, second) = together(2, late, timeout_s=1.0)
    assert 0.9 < waited_s < 5.0
    assert after_s < 2.0
    assert "timed out: rank 11" in first
    assert "still runs" in first
    assert "rank 10 gave up" in second


def test_a_wait_may_end_before_its_work():
    def wait(rank: int, lanes: Any) -> None:
        opened = lane(lanes)
        if rank == 1:
            time.sleep(0.5)
            opened.barrier().wait()
            return
        work = opened.barrier()
        with pytest.raises(RuntimeError, match="Operation timed out!"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        work.wait(timedelta(seconds=20))
        assert work.is_completed()
        assert work.is_success()

    assert together(2, wait) == [None, None]


def test_ranks_that_make_different_calls_get_both_calls():
    def call(rank: int, lanes: Any) -> None:
        opened = lane(lanes)
        if rank == 0:
            opened.allreduce([torch.ones(4)]).wait()
        else:
            opened.allreduce([torch.ones(4, dtype=torch.int32)]).wait()

    found = together(2, call)
    assert {type(each) for each in found} <= {RankDisagreement, LaneFailure}
    text = "\n".join(map(str, found))
    assert "rank 10 makes an all-reduce (SUM) of float32, 16 bytes" in text
    assert "rank 11 makes an all-reduce (SUM) of int32, 16 bytes" in text


def test_splits_that_do_not_match_are_an_error():
    def exchange(rank: int, lanes: Any) -> None:
        gets = [2, 3] if rank == 0 else [1, 2]
        sends = [2, 1] if rank == 0 else [2, 2]
        opened = lane(lanes)
        opened.alltoall_base(
            torch.zeros(sum(gets)), torch.ones(sum(sends)), gets, sends
        ).wait()
        opened.barrier().wait()  # rank 11's own rows were right

    first, second = together(2, exchange)
    assert isinstance(first, RankDisagreement)
    assert isinstance(second, LaneFailure)
    for each in (first, second):
        assert "rank 11 sends 8 bytes to rank 10, which expects 12" in str(each)


def test_futures_hold_the_error():
    def fail(rank: int, lanes: Any) -> str:
        opened = lane(lanes)
        if rank == 1:
            time.sleep(1.5)
            return "late"
        future = opened.allreduce([torch.ones(3)]).get_future()
        both = torch.futures.collect_all([future])
        with pytest.raises(RuntimeError, match="timed out"):
            both.wait()
        with pytest.raises(RuntimeError, match="timed out"):
            future.wait()
        return "failed"

    assert together(2, fail, timeout_s=0.5) == ["failed", "late"]


def test_an_abort_ends_both_sides_at_once():
    stuck = threading.Event()

    def abort(rank: int, lanes: Any) -> float:
        opened = lane(lanes)
        work = opened.allreduce([torch.ones(3)]) if rank == 0 else None
        if rank == 0:
            time.sleep(0.2)
            began_s = time.perf_counter()
            lanes.abort()
            with pytest.raises(LaneFailure, match="rank 10 aborted"):
                work.wait()
            took_s = time.perf_counter() - began_s
            stuck.set()
            return took_s
        stuck.wait(10)
        began_s = time.perf_counter()
        with pytest.raises(LaneFailure, match="rank 10 gave up"):
            opened.broadcast([torch.ones(3)]).wait()
        return time.perf_counter() - began_s

    assert max(together(2, abort)) < 3.0


def test_a_closed_lane_refuses_calls_and_peers_do_not_wait_for_it():
    def close(rank: int, lanes: Any) -> str:
        opened = lane(lanes)
        opened.barrier().wait()
        if rank == 0:
            lanes.close()
            with pytest.raises(LaneFailure, match="is closed"):
                opened.barrier()
            return "closed"
        with pytest.raises(LaneFailure, match="rank 10 has closed the lane"):
            opened.barrier().wait()
        return "left alone"

    assert together(2, close) == ["closed", "left alone"]


# Opening.


def test_ranks_on_several_hosts_are_refused_on_every_rank(monkeypatch):
    def identity() -> Any:
        mine = own_identity()
        if next(hosts):
            return dataclasses.replace(mine, host="other", kernel="another boot")
        return dataclasses.replace(mine, host="here")

    hosts = iter([0, 1, 0])
    monkeypatch.setattr(local_lanes, "own_identity", identity)
    found = together(3, lambda _, lanes: lane(lanes))
    assert {type(each) for each in found} == {PlanMismatch}
    for each in found:
        assert "local lanes need all ranks on one host" in str(each)
        assert "on other" in str(each)
        assert "on here" in str(each)


@pytest.mark.parametrize(
    ("function", "rank"), [("create_memory", 0), ("open_memory", 1)]
)
def test_a_rank_without_memory_is_an_error_on_every_rank_at_once(
    function, rank, monkeypatch
):
    def fail(*_: Any) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(local_lanes, function, fail)
    began_s = time.perf_counter()
    found = together(2, lambda _, lanes: lane(lanes))
    assert time.perf_counter() - began_s < 10.0  # the timeout is 20
    for each in found:
        assert isinstance(each, PlanMismatch)
        assert f"rank {10 + rank} can't open local lane 0" in str(each)
        assert "Cannot allocate memory" in str(each)
        assert "MiB" in str(each)


def test_a_rank_that_does_not_come_is_named():
    store = HashStore()
    lanes = lanes_of(store, 0, 2, 0.5)
    with pytest.raises(
        CommTimeout, match="rank 10 can't open local lanes 3, 4: rank 11"
    ):
        lanes.open([(3, None), (4, 2)])


def test_tensors_on_other_devices_are_refused():
    with pytest.raises(PlanMismatch, match="the model is on cuda"):
        backends.get("local").check([(0, None)], 2, torch.device("cuda"))
    backends.get("local").check([(0, None)], 2, CPU)


def shared_bytes() -> int:
    """Bytes of lanes' memory that are mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:stretto-lane" in line:
            low, high = line.split()[0].split("-")
            total += int(high, 16) - int(low, 16)
    return total


def test_memory_and_descriptors_are_freed_when_lanes_close():
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    kept = []

    def use(rank: int, lanes: Any) -> int:
        opened = [lane(lanes, number) for number in range(2)]
        for each in opened:
            each.allreduce([torch.ones(100_000)]).wait()
        kept.append(opened)  # a reference must not keep the memory
        return shared_bytes()

    seen = together(2, use)
    assert max(seen) >= 2 * shared_memory.segment_bytes(2)
    deadline = time.perf_counter() + 10.0
    while shared_bytes() and time.perf_counter() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert shared_bytes() == 0
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    # Nothing has a name, so that nothing is left after a crash.
    assert not [p for p in Path("/dev/shm").glob("*stretto*") if p.is_file()]


def test_a_dropped_lane_ends_without_being_closed():
    def drop(rank: int, lanes: Any) -> None:
        opened = lane(lanes)
        opened.barrier().wait()
        del opened
        lanes.retain(())

    assert together(2, drop) == [None, None]
    deadline = time.perf_counter() + 10.0
    while shared_bytes() and time.perf_counter() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert shared_bytes() == 0


def test_a_tensor_is_not_kept_after_its_collective():
    def reduce(rank: int, lanes: Any) -> bool:
        import weakref

        opened = lane(lanes)
        value = torch.ones(10)
        gone = weakref.ref(value)
        opened.allreduce([value]).wait()
        del value
        deadline = time.perf_counter() + 5.0
        while gone() is not None and time.perf_counter() < deadline:
            time.sleep(0.01)
        return gone() is None

    assert together(2, reduce) == [True, True]
