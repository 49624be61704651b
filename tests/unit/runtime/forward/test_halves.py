"""Buckets in two halves, on lanes that connect ranks of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.forward.halves import Halves, sum_of_squares
from stretto.runtime.forward.lazy import LazyGradient, real_gradients, wrap
from stretto.runtime.forward.member import BucketMember
from stretto.runtime.sender import BucketSender, PlainWatch

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (7, 1, 5, 2, 3000)
BUCKETS = ((0, 1, 2), (3,), (4,))
SLICES = (2, 1, 3)


class Work:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class Lane:
    """The lane of one rank; a wait requires the same call of all ranks."""

    def __init__(self, calls: list[list[Any]], rank: int) -> None:
        self._calls, self._rank = calls, rank

    def _start(self, finish: Any, *arguments: Any) -> Work:
        mine = self._calls[self._rank]
        number = len(mine)
        mine.append(arguments)
        return Work(lambda: finish([calls[number] for calls in self._calls]))

    def allreduce(self, tensors: list[torch.Tensor], _opts: Any = None) -> Work:
        def finish(rows: list[Any]) -> None:
            tensors[0].copy_(torch.stack([given for (given,) in rows]).sum(0))

        return self._start(finish, tensors[0].clone())

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, *_splits: Any
    ) -> Work:
        def finish(rows: list[Any]) -> None:
            pieces = [given.chunk(len(rows))[self._rank] for (given,) in rows]
            output.copy_(torch.cat(pieces))

        return self._start(finish, tensor.clone())

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        def finish(rows: list[Any]) -> None:
            output.copy_(torch.cat([given for (given,) in rows]))

        return self._start(finish, tensor.clone())


def schedule(index: int, slices: int) -> BucketSchedule:
    elements = sum(SIZES[i] for i in BUCKETS[index])
    edges = [elements * i // slices for i in range(slices + 1)]
    return BucketSchedule(
        index=index,
        tensors=tuple(f"p{i}" for i in BUCKETS[index]),
        parameters=BUCKETS[index],
        elements=elements,
        slices=tuple(
            Slice(lane=i, resource=None, start=edges[i], end=edges[i + 1])
            for i in range(slices)
        ),
    )


def exchanged(ranks: int, dtype: torch.dtype) -> tuple[list[Any], list[torch.Tensor]]:
    """Each rank's halves and buckets after an exchange, and the plain sums."""
    torch.manual_seed(ranks)
    given = [[torch.randn(n).to(dtype) for n in SIZES] for _ in range(ranks)]
    lanes: dict[int, list[list[Any]]] = {
        i: [[] for _ in range(ranks)] for i in (0, 1, 2)
    }
    schedules = [schedule(i, n) for i, n in enumerate(SLICES)]
    found = []
    for rank in range(ranks):
        members = []
        for row, bucket in zip(schedules, BUCKETS, strict=True):
            offset, some = 0, []
            for place, i in enumerate(bucket):
                parameter = nn.Parameter(torch.zeros(SIZES[i], dtype=dtype))
                some.append(
                    BucketMember(Any, f"p{i}", parameter, row.index, place, offset)  # type: ignore[arg-type]
                )
                offset += SIZES[i]
            members.append(some)
        sender = BucketSender(
            {(i, None): Lane(lanes[i], rank) for i in lanes},
            PlainWatch(lambda place, cause: AssertionError(f"{place}: {cause}")),
        )
        halves = Halves(schedules, members, sender, rank=rank, ranks=ranks)
        buckets = [torch.cat([given[rank][i] for i in row]) for row in BUCKETS]
        for row, values in zip(schedules, buckets, strict=True):
            halves.launcher(row, None)(values, None)
        found.append((halves, buckets, sender, members))
    orders = [halves.sum_up() for halves, *_ in found]
    assert orders == [[2, 1, 0]] * ranks
    for halves, buckets, sender, _ in found:
        for row, values in zip(schedules, buckets, strict=True):
            sender.wait(row)
            halves.complete(row.index, values)
    return found, [sum(rows[i] for rows in given) for i in range(len(SIZES))]  # type: ignore[misc]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halves_give_each_rank_the_same_sums(ranks: int) -> None:
    found, sums = exchanged(ranks, torch.float64)
    wanted = [torch.cat([sums[i] for i in row]) for row in BUCKETS]
    for _, buckets, _, _ in found:
        for bucket, other, sum_ in zip(buckets, found[0][1], wanted, strict=True):
            assert torch.equal(bucket, other)
            torch.testing.assert_close(bucket, sum_, rtol=1e-14, atol=1e-14)


def test_two_ranks_get_the_bits_of_an_all_reduce() -> None:
    found, sums = exchanged(2, torch.float32)
    for bucket, row in zip(found[0][1], BUCKETS, strict=True):
        assert torch.equal(bucket, torch.cat([sums[i] for i in row]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_norms_are_those_of_the_sums(ranks: int, dtype: torch.dtype) -> None:
    found, _ = exchanged(ranks, dtype)
    for halves, buckets, _, members in found:
        for bucket, row in zip(buckets, members, strict=True):
            for member in row:
                part = bucket[member.offset : member.offset + member.parameter.numel()]
                exact = float(part.double().norm())
                assert halves.norm(member) == pytest.approx(exact, rel=1e-6)
                assert halves.norm(member) == found[0][0].norm(
                    found[0][3][member.bucket][member.place]
                )


def test_squares_of_a_large_float32_tensor_are_exact_where_torch_s_norm_is_not() -> (
    None
):
    values = torch.rand(3_000_000)
    exact = float(values.double().square().sum())
    assert sum_of_squares(values) == pytest.approx(exact, rel=1e-8)


class Owner:
    """Knows the norms of its gradients, and multiplies them when they are finished."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self.finished = 0
        self.real = gradients
        self.parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
        overlap: Any = self
        self.members = [
            BucketMember(overlap, str(i), p, 0, i, 0)
            for i, p in enumerate(self.parameters)
        ]
        for member, gradient in zip(self.members, gradients, strict=True):
            member.lazy = wrap(gradient, self.finish, member, None, by_parts=True)
            member.parameter.grad = member.lazy

    def finish(self) -> None:
        self.finished += 1
        for member in self.members:
            lazy = member.lazy
            if lazy is not None and lazy.finish is not None:
                lazy.finish = None
                for multiply, factor in member.factors:
                    multiply(lazy.target, factor)

    def norm_of(self, member: BucketMember) -> torch.Tensor | None:
        return None if self.finished else self.real[member.place].norm()

    def scale(self, member: BucketMember, multiply: Any, factor: Any) -> None:
        member.factors.append((multiply, factor))

    def show_gradients(self) -> None:
        self.finish()


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator) for n in (3, 8)]


def plain() -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients():
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return parameters


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_finishes_nothing(foreach: bool | None, max_norm: float) -> None:
    owner, others = Owner(gradients()), plain()
    norm = nn.utils.clip_grad_norm_(owner.parameters, max_norm, foreach=foreach)
    wanted = nn.utils.clip_grad_norm_(others, max_norm, foreach=foreach)
    assert not owner.finished
    assert norm == wanted
    owner.finish()
    for real, other in zip(owner.real, others, strict=True):
        assert other.grad is not None
        assert torch.equal(real, other.grad)


@pytest.mark.parametrize("norm_type", [1.0, float("inf"), 3.0])
def test_other_norms_finish_and_are_exact(norm_type: float) -> None:
    owner, others = Owner(gradients()), plain()
    norm = nn.utils.clip_grad_norm_(owner.parameters, 0.5, norm_type)
    assert owner.finished
    assert norm == nn.utils.clip_grad_norm_(others, 0.5, norm_type)


def test_a_norm_that_is_not_finite_raises_as_pytorch_s() -> None:
    owner = Owner([torch.tensor([1.0, float("inf")]), torch.ones(2)])
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(owner.parameters, 0.5, error_if_nonfinite=True)


def test_a_gradient_beside_wrappers_is_clipped_too() -> None:
    owner, others = Owner(gradients()), plain()
    owner.parameters[0].grad = owner.real[0]
    nn.utils.clip_grad_norm_(owner.parameters, 0.5, foreach=True)
    nn.utils.clip_grad_norm_(others, 0.5, foreach=True)
    owner.finish()
    for real, other in zip(owner.real, others, strict=True):
        assert other.grad is not None
        assert torch.equal(real, other.grad)


def test_an_address_that_is_taken_ends_the_knowledge_of_a_norm() -> None:
    owner = Owner(gradients())
    owner.members[0].version = 3
    lazy = owner.members[0].lazy
    assert isinstance(lazy, LazyGradient)
    real_gradients([lazy])
    assert owner.members[0].version is None
