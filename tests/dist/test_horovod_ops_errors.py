"""What fails, on which ranks and how, and that all continues after it."""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist


def raised(kind: type[Exception], run: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        run()
    # The classes that scripts catch.
    assert kind is not hvd.HorovodInternalError or isinstance(
        caught.value, RuntimeError
    )
    return str(caught.value)


def goes_on(size: int) -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


def disagreements(rank: int, size: int) -> list[str]:
    """Texts, which must be the same on all ranks."""
    fail = hvd.HorovodInternalError
    odd = rank % 2 == 1
    many = torch.ones(17 + rank, 17)
    typed = torch.ones(6 * size, dtype=torch.int32 if odd else torch.float32)
    split = torch.ones(2 * size, 10 * (rank + 1))
    runs: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(many),
        lambda: hvd.allreduce(torch.ones(17, 4) if odd else torch.ones(68)),
        lambda: hvd.allreduce(typed),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if odd else hvd.Min),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=1.0 + rank),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum, postscale_factor=1.0 + rank),
        lambda: hvd.allgather(torch.ones(2, 10 * (rank + 1))),
        lambda: hvd.allgather(typed),
        lambda: hvd.broadcast(split, 0),
        lambda: hvd.broadcast(typed, 0),
        lambda: hvd.broadcast(torch.ones(3), rank),
        lambda: hvd.alltoall(typed),
        lambda: hvd.alltoall(split),
        lambda: hvd.reducescatter(typed),
        lambda: hvd.reducescatter(split),
        lambda: hvd.grouped_allreduce([torch.ones(2), many], name="bad group"),
        lambda: hvd.grouped_allreduce([torch.ones(2)] * (2 + odd), name="other group"),
        lambda: hvd.grouped_allgather([torch.ones(2), typed]),
        lambda: hvd.grouped_reducescatter([typed, torch.ones(size)]),
    ]
    texts = [raised(fail, run) for run in runs]
    goes_on(size)
    return texts


def own_mistakes(rank: int, size: int) -> None:
    raised(ValueError, lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))
    raised(ValueError, lambda: hvd.allreduce(torch.ones(2), op=17))
    raised(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)))
    raised(ValueError, lambda: hvd.allreduce(torch.ones(2).to_sparse()))
    raised(ValueError, lambda: hvd.allreduce(torch.ones(2), prescale_factor=1e999))
    for run in (hvd.allreduce, hvd.reducescatter):
        # A RuntimeError, as Horovod's.
        text = raised(
            NotImplementedError, lambda r=run: r(torch.ones(size), op=hvd.Adasum)
        )
        assert "op=hvd.Average" in text
    raised(
        NotImplementedError,
        lambda: hvd.grouped_allreduce([torch.ones(2)], op=hvd.Adasum),
    )
    raised(hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.tensor(1.0)))
    raised(
        hvd.HorovodInternalError, lambda: hvd.grouped_reducescatter([torch.tensor(1.0)])
    )
    raised(ValueError, lambda: hvd.allgather(torch.tensor(1.0)))
    raised(ValueError, lambda: hvd.alltoall(torch.tensor(1.0)))
    raised(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)))
    raised(ValueError, lambda: hvd.alltoall(torch.ones(size - 1), [1] * size))
    raised(ValueError, lambda: hvd.alltoall(torch.ones(size), [1] * (size + 1)))
    raised(ValueError, lambda: hvd.alltoall(torch.ones(size), [0.5] * size))
    raised(ValueError, lambda: hvd.alltoall(torch.ones(size), torch.ones(size)))
    raised(
        ValueError, lambda: hvd.alltoall(torch.ones(size), [-1, 1] + [0] * (size - 2))
    )
    text = raised(ValueError, lambda: hvd.broadcast(torch.ones(2), size))
    assert f"got {size}" in text
    raised(ValueError, lambda: hvd.broadcast(torch.ones(2), -1))
    raised(ValueError, lambda: hvd.synchronize(7))
    raised(ValueError, lambda: hvd.poll(None))
    raised(ValueError, lambda: hvd.sparse_allreduce_async(torch.ones(2), "n", hvd.Sum))
    raised(
        ValueError,
        lambda: hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "n", hvd.Min),
    )
    raised(
        ValueError,
        lambda: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0])),
    )
    raised(ValueError, lambda: hvd.ProcessSet([0, 0]))
    raised(ValueError, lambda: hvd.ProcessSet(["a"]))
    raised(ValueError, lambda: hvd.ProcessSet(3))
    raised(ValueError, hvd.mpi_threads_supported)
    assert not hvd.mpi_enabled()
    assert not hvd.mpi_built()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert isinstance(hvd.nccl_built(), int)
    assert "DYNAMIC" in raised(ValueError, lambda: hvd.add_process_set([0]))
    assert "DYNAMIC" in raised(
        ValueError, lambda: hvd.remove_process_set(hvd.global_process_set)
    )
    goes_on(size)


def names_twice(rank: int, size: int) -> None:
    """The second of a name under way fails where it is called, the first continues."""
    for start in (
        lambda: hvd.allreduce_async(torch.ones(2), name="twice"),
        lambda: hvd.allgather_async(torch.ones(2), name="twice"),
        lambda: hvd.broadcast_async(torch.ones(2), 0, name="twice"),
        lambda: hvd.alltoall_async(torch.ones(size), name="twice"),
        lambda: hvd.reducescatter_async(torch.ones(size), name="twice"),
        lambda: hvd.grouped_allreduce_async([torch.ones(2)] * 2, name="twice"),
    ):
        hvd.barrier()
        if rank == 0:  # before the others come: certainly under way
            first = start()
            assert "twice" in raised(ValueError, start)
        hvd.barrier()
        if rank != 0:
            first = start()
        hvd.synchronize(first)
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="twice"))
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="twice"))
    hvd.shutdown()
    with pytest.raises(ValueError, match="init"):
        hvd.allreduce(torch.ones(2))


def errors(rank: int, size: int) -> list[str]:
    warnings.simplefilter("error")
    hvd.init()
    texts = disagreements(rank, size)
    own_mistakes(rank, size)
    names_twice(rank, size)
    return texts


@pytest.mark.parametrize("size", [2, 4])
def test_what_differs_fails_on_all_ranks_with_one_text(ranks: Ranks, size: int) -> None:
    found = ranks(errors, size, timeout_s=100)
    assert all(texts == found[0] for texts in found)
    logged = "\n".join(found[0])
    for word in ("shapes", "dtypes", "reductions", "root ranks", "prescale", "rank 1"):
        assert word in logged


def leaves(rank: int, size: int) -> Any:
    """A rank that goes away while others wait."""
    hvd.init()
    goes_on(size)
    if rank == 1:
        hvd.shutdown()
        return None
    text = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(3)))
    again = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(3)))
    hvd.shutdown()
    return text, again


def test_a_rank_that_leaves_fails_what_others_wait_for(ranks: Ranks) -> None:
    found = ranks(leaves, 2, timeout_s=60)
    assert "rank 1 closed" in found[0][0]
    assert found[0][0] == found[0][1]


def waits(rank: int, size: int) -> Any:
    """A rank that does not come: a line in the log and an error, at the times set."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("stretto").addHandler(handler)
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.5"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
    hvd.init()
    goes_on(size)
    begin_s = time.perf_counter()
    text = ""
    if rank == 0:
        text = raised(
            hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(3), name="late")
        )
    else:
        time.sleep(6)
    took_s = time.perf_counter() - begin_s
    hvd.shutdown()
    return text, logged, took_s


def test_a_rank_that_never_comes_is_reported_then_fails(ranks: Ranks) -> None:
    text, logged, took_s = ranks(waits, 2, timeout_s=60)[0]
    assert "'allreduce.late'" in text
    assert "rank 1" in text
    assert any("'allreduce.late'" in line and "rank 1" in line for line in logged)
    assert took_s < 25


def dies(rank: int, size: int) -> str:
    hvd.init()
    goes_on(size)
    if rank == 1:
        os._exit(3)
    return raised(hvd.HorovodInternalError, lambda: hvd.allgather(torch.ones(3)))


def test_a_rank_that_dies_fails_all_others(ranks: Ranks) -> None:
    found = ranks(dies, 3, timeout_s=60, errors=True)
    assert found[1] is None
    assert "rank 1" in found[0]
    assert "rank 1" in found[2]


def joins(rank: int, size: int) -> list[int]:
    warnings.simplefilter("error")
    hvd.init()
    last = []
    for first in range(size):
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
            a = torch.arange(-4, 4).to(dtype) * 3
            b = torch.full((5,), 7, dtype=dtype)
            if rank != first:
                handles = [
                    hvd.allreduce_async(t, name=n) for t, n in ((a, "a"), (b, "b"))
                ]
                handles += [hvd.grouped_allreduce_async([a, b], op=hvd.Sum, name="g")]
                for handle, tensor in zip(handles, (a, b), strict=False):
                    wide = tensor.double() * (size - 1) / size
                    wanted = wide if dtype.is_floating_point else wide.trunc()
                    torch.testing.assert_close(
                        hvd.synchronize(handle), wanted.to(dtype)
                    )
                for got, tensor in zip(
                    hvd.synchronize(handles[2]), (a, b), strict=True
                ):
                    torch.testing.assert_close(got, tensor * (size - 1))
            last.append(hvd.join())
    for run in (
        lambda: hvd.allgather(torch.ones(2)),
        lambda: hvd.broadcast(torch.ones(2), 1, name="sent"),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Min),
        lambda: hvd.alltoall(torch.ones(size)),
        lambda: hvd.reducescatter(torch.ones(size)),
        hvd.barrier,
    ):
        if rank != 0:
            assert "joined: 0" in raised(hvd.HorovodInternalError, run)
        last.append(hvd.join(-1))
    goes_on(size)
    hvd.shutdown()
    return last


@pytest.mark.parametrize("size", [2, 4])
def test_joined_ranks_count_as_zeros(ranks: Ranks, size: int) -> None:
    found = ranks(joins, size, timeout_s=100)
    assert all(last == found[0] for last in found)
    assert set(found[0]) <= set(range(size))
    # The first to join is not the last one to.
    firsts = [first for first in range(size) for _ in range(4)] + [0] * 6
    assert all(a != b for a, b in zip(found[0], firsts, strict=True))
