"""Operations of the Horovod interface against brute force, on 2 and 4 ranks."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist

REDUCED = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
MOVED = (torch.uint8, torch.int8, torch.int16, torch.bfloat16, *REDUCED)


def values(rank: int, dtype: torch.dtype, dim: int, salt: int = 0) -> torch.Tensor:
    """What a rank brings; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(1000 * salt + 10 * rank + dim)
    whole = torch.randint(-30, 30, [5] * dim, generator=generator)
    return whole.abs().to(dtype) if dtype is torch.uint8 else whole.to(dtype)


def all_values(size: int, dtype: torch.dtype, dim: int, salt: int = 0) -> Any:
    return torch.stack([values(r, dtype, dim, salt) for r in range(size)])


def same(found: Any, wanted: torch.Tensor, atol: float = 1e-6) -> None:
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=atol)


def allreduce(rank: int, size: int) -> None:
    for dtype, dim in itertools.product(REDUCED, (1, 2, 3)):
        mine, rows = values(rank, dtype, dim), all_values(size, dtype, dim)
        wide = rows if not dtype.is_floating_point else rows.double()
        total = wide.sum(0).to(dtype)
        if dtype.is_floating_point:
            mean = (wide.sum(0) / size).to(dtype)
        else:
            mean = torch.div(total, size, rounding_mode="trunc")
        same(hvd.allreduce(mine), mean)
        same(mine, values(rank, dtype, dim))  # the input stays
        same(hvd.allreduce(mine, op=hvd.Average), mean)
        same(hvd.allreduce(mine, op=hvd.Sum), total)
        same(hvd.allreduce(mine, op=hvd.Min), rows.amin(0))
        same(hvd.allreduce(mine, op=hvd.Max), rows.amax(0))
        small = (mine % 3 + 1).to(dtype)
        product = (rows % 3 + 1).to(wide.dtype).prod(0).to(dtype)
        same(hvd.allreduce(small, op=hvd.Product), product)
        # Scaling: integers in float64, float16 on the CPU in float32.
        math = torch.float64 if not dtype.is_floating_point else dtype
        math = torch.float32 if dtype is torch.float16 else math
        before = (rows.to(math) * 0.37).to(dtype)
        # Each of up to three additions rounds: half of 2^-4 near 100.
        atol = 0.1 if dtype is torch.float16 else 1e-5
        same(
            hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.37),
            (before if math is torch.float64 else before.double()).sum(0).to(dtype),
            atol,
        )
        same(
            hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.37),
            (total.to(math) * 0.37).to(dtype),
        )
        placed = mine.clone()
        assert hvd.allreduce_(placed, op=hvd.Sum) is placed
        same(placed, total)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        same(hvd.allreduce(torch.ones(2), average=False), torch.full((2,), float(size)))
        same(hvd.allreduce(torch.ones(2), average=True), torch.ones(2))
    assert [w.category for w in warned] == [DeprecationWarning] * 2
    assert {w.filename for w in warned} == {__file__}


def shapes(rank: int, size: int) -> None:
    same(
        hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum),
        torch.tensor(float(sum(range(size)))),
    )
    same(hvd.allreduce(torch.empty(0, 3)), torch.empty(0, 3))
    across = torch.full((4, 3), float(rank)).t()  # not contiguous
    same(hvd.allreduce(across, op=hvd.Sum), torch.full((3, 4), float(sum(range(size)))))
    hvd.allreduce_(across, op=hvd.Sum)
    same(across, torch.full((3, 4), float(sum(range(size)))))
    large = torch.full((3_000_000,), float(rank))
    same(hvd.allreduce(large, op=hvd.Max), torch.full((3_000_000,), size - 1.0))
    frozen = torch.nn.Parameter(torch.full((3,), float(rank)))
    with torch.no_grad():
        hvd.broadcast_(frozen, 0)
    same(frozen.detach(), torch.zeros(3))


def asynchronous(rank: int, size: int) -> None:
    handles, open_once = [], False
    for dtype, dim in itertools.product(REDUCED, (1, 2, 3)):
        handle = hvd.allreduce_async(values(rank, dtype, dim), op=hvd.Sum)
        open_once |= not hvd.poll(handle)
        handles.append((handle, all_values(size, dtype, dim).sum(0).to(dtype)))
    assert open_once
    for handle, wanted in handles:
        same(hvd.synchronize(handle), wanted)
        assert hvd.poll(handle)
    # Ranks may come in any order, and with names.
    names = [f"t{i}" for i in range(8)]
    order = names if rank % 2 else names[::-1]
    named = {
        n: hvd.allreduce_async_(torch.full((3,), float(int(n[1]))), name=n, op=hvd.Sum)
        for n in order
    }
    for name, handle in named.items():
        same(hvd.synchronize(handle), torch.full((3,), float(size * int(name[1]))))


def threads(rank: int, size: int) -> None:
    """Operations from several threads; each thread's come in its own order."""
    found: dict[tuple[int, int], float] = {}

    def go(thread: int) -> None:
        turns = range(20) if (rank + thread) % 2 else reversed(range(20))
        for turn in turns:
            x = torch.full((2,), float(turn + 100 * thread))
            handle = hvd.allreduce_async(x, op=hvd.Sum, name=f"{thread}.{turn}")
            handles[thread, turn] = handle

    handles: dict[tuple[int, int], Any] = {}
    running = [threading.Thread(target=go, args=(n,)) for n in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for key, handle in handles.items():
        found[key] = hvd.synchronize(handle)[0].item()
    assert found == {
        (n, t): size * (t + 100.0 * n) for n in range(3) for t in range(20)
    }


def grouped(rank: int, size: int) -> None:
    for dtype in REDUCED:
        mine = [values(rank, dtype, 2, salt) for salt in range(5)]
        totals = [all_values(size, dtype, 2, s).sum(0).to(dtype) for s in range(5)]
        for found, total in zip(
            hvd.grouped_allreduce(mine, op=hvd.Sum), totals, strict=True
        ):
            same(found, total)
        handle = hvd.grouped_allreduce_async_(mine, op=hvd.Sum, name=f"g{dtype}")
        results = hvd.synchronize(handle)
        assert all(a is b for a, b in zip(results, mine, strict=True))
        for found, total in zip(mine, totals, strict=True):
            same(found, total)
    mine = [torch.full((rank + 1, 2), rank), torch.full((2,), float(rank))]
    gathered = hvd.grouped_allgather(mine)
    same(gathered[0], torch.cat([torch.full((r + 1, 2), r) for r in range(size)]))
    same(gathered[1], torch.arange(size).repeat_interleave(2).float())
    mine = [values(rank, torch.float32, 2, s).repeat(size, 1) for s in range(3)]
    for salt, found in enumerate(hvd.grouped_reducescatter(mine, op=hvd.Sum)):
        same(found, all_values(size, torch.float32, 2, salt).sum(0))
    mine = [torch.full((2,), float(rank)), torch.full((1,), float(rank))]
    assert hvd.grouped_allreduce_(mine, op=hvd.Sum)[1].item() == sum(range(size))
    (alone,) = hvd.grouped_allreduce([torch.ones(2)], op=hvd.Sum)
    same(alone, torch.full((2,), float(size)))


def moving(rank: int, size: int) -> None:
    for dtype, dim in itertools.product(MOVED, (1, 2, 3)):
        mine, rows = values(rank, dtype, dim), all_values(size, dtype, dim)
        same(hvd.allgather(mine), rows.flatten(0, 1))
        uneven = [values(r, dtype, dim)[: r + 1] for r in range(size)]
        same(hvd.allgather(uneven[rank]), torch.cat(uneven))
        for root in range(size):
            same(hvd.broadcast(mine, root), rows[root])
        same(mine, values(rank, dtype, dim))
        placed = mine.clone()
        assert hvd.broadcast_(placed, size - 1) is placed
        same(placed, rows[-1])
        # Rank r sends r + 1 rows to each.
        whole = [
            torch.cat([values(r, dtype, dim)[:1]] * (r + 1) * size) for r in range(size)
        ]
        splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
        found, counts = hvd.alltoall(whole[rank], splits)
        same(found, torch.cat([whole[r][: r + 1] for r in range(size)]))
        same(counts, torch.arange(1, size + 1, dtype=torch.int32))
        same(hvd.alltoall(whole[rank]), found)
        found, counts = hvd.alltoall(whole[rank], [1] * size)  # the rest stays here
        assert found.shape[0] == size
        assert counts.tolist() == [1] * size
        if dtype in REDUCED:
            long = mine.repeat(size, *[1] * (dim - 1))
            same(
                hvd.reducescatter(long, op=hvd.Sum),
                rows.double().sum(0).to(dtype)
                if dtype.is_floating_point
                else rows.sum(0).to(dtype),
            )
            same(hvd.reducescatter(long, op=hvd.Max), rows.amax(0))
    uneven_rows = torch.arange(size + 1).float()
    same(
        hvd.reducescatter(uneven_rows),
        uneven_rows[:2] if rank == 0 else uneven_rows[rank + 1 : rank + 2],
    )
    same(
        hvd.reducescatter(
            torch.ones(size), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
        ),
        torch.full((1,), 1.5 * size),
    )
    flags = torch.tensor([rank == 0, True])
    same(
        hvd.allgather(flags),
        torch.tensor([r == 0 or i for r in range(size) for i in (False, True)]),
    )
    none = torch.ones(0 if rank else 2, 3)
    same(hvd.allgather(none), torch.ones(2, 3))


def compressed(rank: int, size: int) -> None:
    mine = torch.full((3,), rank + 0.5)
    found = hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum)
    same(found, torch.full((3,), sum(range(size)) + size / 2))
    found = hvd.grouped_allreduce([mine], compression=hvd.Compression.fp16, op=hvd.Sum)
    same(found[0], torch.full((3,), sum(range(size)) + size / 2))
    whole = hvd.allreduce(
        torch.tensor([rank]), compression=hvd.Compression.fp16, op=hvd.Sum
    )
    same(whole, torch.tensor([sum(range(size))]))
    sent, context = hvd.Compression.fp16.compress(torch.ones(2, dtype=torch.float64))
    assert sent.dtype is torch.float16
    same(hvd.Compression.fp16.decompress(sent, context), torch.ones(2).double())
    rows = hvd.reducescatter(
        torch.full((size,), rank + 0.5), op=hvd.Sum, compression=hvd.Compression.fp16
    )
    same(rows, torch.full((1,), sum(range(size)) + size / 2))


def sparse(rank: int, size: int) -> None:
    def of(r: int) -> torch.Tensor:
        entries = torch.arange(1, r + 2).float()[:, None] * torch.ones(2)
        return torch.sparse_coo_tensor(
            torch.arange(r + 1)[None], entries, (size + 1, 2), check_invariants=True
        )

    total = sum(of(r).to_dense() for r in range(size))
    for op, wanted in ((hvd.Sum, total), (hvd.Average, total / size)):
        wait = hvd.sparse_allreduce_async(of(rank), f"sparse.{op}", op)
        same(wait().to_dense(), wanted)


def gradients(rank: int, size: int) -> None:
    """What a rank's gradient is, by Horovod's conventions."""
    own = rank + 1.0
    ranks_sum = float(sum(range(1, size + 1)))

    def gradient(shape: Any, run: Any, like: float = own) -> torch.Tensor:
        tensor = torch.ones(shape, requires_grad=True)
        out = run(tensor)
        out.backward(torch.full_like(out, like))
        return tensor.grad

    for name in (None, "named"):
        found = gradient(3, lambda t, n=name: hvd.allreduce(t, op=hvd.Sum, name=n))
        same(found, torch.full((3,), ranks_sum))
    same(gradient(3, hvd.allreduce), torch.full((3,), ranks_sum / size))
    same(
        gradient(
            3,
            lambda t: hvd.allreduce(
                t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.5
            ),
        ),
        torch.full((3,), ranks_sum / 4),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = gradient(3, lambda t: hvd.allreduce(t, average=False))
    same(found, torch.full((3,), ranks_sum))
    mean = torch.full((rank + 1, 2), ranks_sum / size)
    same(gradient((rank + 1, 2), hvd.allgather), mean)
    # As the gather of what each rank's rows are worth: rows of rank r get r.
    tensor = torch.ones(rank + 1, 2, requires_grad=True)
    worth = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)])
    hvd.allgather(tensor).backward(worth)
    same(tensor.grad, torch.full((rank + 1, 2), float(rank)))
    at_root = ranks_sum / size if rank == 1 else 0.0
    same(gradient(3, lambda t: hvd.broadcast(t, 1)), torch.full((3,), at_root))
    # What rank r received it sends back.
    back = torch.arange(1.0, size + 1).repeat_interleave(rank + 1)
    splits = [rank + 1] * size
    same(gradient((rank + 1) * size, lambda t: hvd.alltoall(t, splits)[0]), back)
    same(gradient((rank + 1) * size, hvd.alltoall), back)
    kept = torch.cat([torch.arange(1.0, size + 1), torch.zeros(2)])
    same(gradient(size + 2, lambda t: hvd.alltoall(t, [1] * size)[0]), kept)
    joined = torch.arange(1.0, size + 1)[:, None].expand(size, 2).contiguous()
    same(gradient((size, 2), hvd.reducescatter), joined)
    same(gradient((size, 2), lambda t: hvd.reducescatter(t, op=hvd.Sum)), joined * size)
    many = [torch.ones(2, requires_grad=True) for _ in range(3)]
    for out in hvd.grouped_allreduce(many, op=hvd.Sum):
        out.backward(torch.full_like(out, own))
    for tensor in many:
        same(tensor.grad, torch.full((2,), ranks_sum))
    many = [torch.ones(rank + 1, requires_grad=True) for _ in range(2)]
    sum(o.sum() for o in hvd.grouped_allgather(many)).backward()
    for tensor in many:
        same(tensor.grad, torch.ones(rank + 1))
    many = [torch.ones(size, requires_grad=True) for _ in range(2)]
    sum(o.sum() for o in hvd.grouped_reducescatter(many, op=hvd.Sum)).backward()
    for tensor in many:
        same(tensor.grad, torch.full((size,), float(size)))
    # Twice: the gradient of a gradient.
    tensor = torch.ones(2, requires_grad=True)
    square = hvd.allreduce(tensor**3, op=hvd.Sum)
    (first,) = torch.autograd.grad(square.sum(), tensor, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), tensor)
    same(second, torch.full((2,), 6.0 * size * 1.0))
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad


def barriers(rank: int, size: int) -> None:
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.rank() == rank


def everything(rank: int, size: int) -> tuple[int, ...]:
    warnings.simplefilter("error")
    hvd.init()
    assert hvd.is_initialized()
    for check in (allreduce, shapes, asynchronous, grouped, moving, compressed):
        check(rank, size)
    for check in (sparse, gradients, barriers, threads):
        check(rank, size)
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    place += (hvd.cross_rank(), hvd.cross_size(), int(hvd.is_homogeneous()))
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert torch.distributed.is_initialized()  # was there before
    return place


@pytest.mark.parametrize("size", [2, 4])
def test_operations_give_what_brute_force_gives(ranks: Ranks, size: int) -> None:
    found = ranks(everything, size, timeout_s=100)
    assert found == [(r, size, r, size, 0, 1, 1) for r in range(size)]
