"""Batch norms over several ranks keep buffers as those of torch do."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.burst.graph import capture
from stretto.burst.norm import NormSync, _sums
from stretto.errors import SpecError


class _Alone:
    """Stands for the rank's group, its lanes, its guard and its clock."""

    size = 1

    @property
    def norms(self) -> Any:
        return self

    def allgather(self, rows: list[list[Tensor]], mine: list[Tensor]) -> Any:
        rows[0][0].copy_(mine[0])
        return self

    def allreduce(self, _sums: list[Tensor]) -> Any:
        return self

    def guard(self, _place: str) -> Any:
        return contextlib.nullcontext()

    def wait(self, _name: str = "", end: Callable[[], None] | None = None) -> None:
        if end is not None:
            end()


def _synced(norm: nn.Module) -> nn.Module:
    alone: Any = _Alone()
    norm.forward = NormSync(
        norm, layer="norm", rank_groups=alone, group=alone, clock=alone
    )
    return norm


def _untracked(norm: Any) -> None:
    norm.track_running_stats = False


def _uncounted(norm: Any) -> None:
    norm.num_batches_tracked = None


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("change", [_untracked, _uncounted])
def test_buffers_are_kept_as_torch_keeps_them(
    change: Callable[[nn.Module], None], momentum: float | None
) -> None:
    norms = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    plain, synced = norms[0], _synced(norms[1])
    for norm in (plain, synced):
        norm(x)
        change(norm)
        norm(2 * x + 1)
    wanted = plain.state_dict()
    for name, buffer in synced.state_dict().items():
        torch.testing.assert_close(buffer, wanted[name], msg=name)


def test_a_batch_of_one_value_is_refused_with_the_way_out() -> None:
    graph = capture(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (torch.ones(2, 4),)
    )
    with pytest.raises(
        SpecError, match=r"more than 1 value per channel.*drop_last=True"
    ):
        graph.require_count(1)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6, 5)])
def test_sums_of_a_backward_are_those_of_cuda_s_way_to_ask(
    shape: tuple[int, ...],
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, grad = (
        torch.randn(shape, generator=draw, dtype=torch.float64) + i for i in (0, 1)
    )
    over = [d for d in range(len(shape)) if d != 1]
    mean, var = x.mean(over), x.var(over, correction=0)
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    given = grad, x, weight, (mean, var), 1e-5
    for found in zip(
        _sums(*given, as_batch=False), _sums(*given, as_batch=True), strict=True
    ):
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_of_half_precision_is_torchs(
    dtype: torch.dtype, *, affine: bool
) -> None:
    norms = [nn.BatchNorm1d(3, affine=affine).to(dtype) for _ in range(2)]
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for norm in (norms[0], _synced(norms[1])):
        given = x.clone().requires_grad_()
        found = norm(given)
        (found * torch.arange(3, dtype=dtype)).sigmoid().sum().backward()
        held = [p.grad for p in norm.parameters()]
        results.append([found, given.grad, *held, *norm.buffers()])
    for plain, synced in zip(*results, strict=True):
        assert plain.dtype == synced.dtype
        assert torch.allclose(plain, synced, rtol=0.02, atol=0.05)
