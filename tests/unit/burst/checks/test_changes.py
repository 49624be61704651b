"""What a program does to gradients: factors that ranks must share are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from stretto.burst.checks.changes import Changes
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Callable


class TwoRanks:
    """Stands for the ranks' names."""

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def name_all(self, ranks: Any) -> str:
        return f"ranks {', '.join(map(str, ranks))}"


def run(
    edit: Callable[[int, int, nn.Parameter], Any],
    dtype: torch.dtype = torch.float32,
    steps: int = 4,
) -> None:
    """Train two ranks' own layers; ``edit`` gets rank, step and each parameter."""
    draw = torch.Generator().manual_seed(1)
    ranks = [Changes(cast("Any", TwoRanks())) for _ in range(2)]
    held = [
        [
            nn.Parameter(torch.randn(*shape, generator=draw).to(dtype))
            for shape in ((30, 20), (30,), (8, 3, 3, 3), (1,))
        ]
        for _ in ranks
    ]
    for changes, mine in zip(ranks, held, strict=True):
        mine[2].data = mine[2].data.to(memory_format=torch.channels_last)
        changes.reset(is_on=True)
    for step in range(steps):
        for rank, changes in enumerate(ranks):
            changes.backward_begins()
            for p in held[rank]:
                p.grad = torch.randn(p.shape, generator=draw).to(dtype) * 0.1
                p.grad = p.grad.contiguous(
                    memory_format=torch.channels_last
                    if p.dim() == 4
                    else torch.contiguous_format
                )
            changes.backward_ended(held[rank])
            with torch.no_grad():
                for p in held[rank]:
                    edit(rank, step, p)
                changes.before_step(held[rank])
                for p in held[rank]:
                    p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
            changes.after_step()
        rows = [changes.next_values() for changes in ranks]
        for changes in ranks:
            changes.require_equal(rows)


def grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


RIGHT: list[Callable[[int, int, nn.Parameter], Any]] = [
    lambda _rank, _step, _p: None,
    lambda _rank, step, p: grad(p).mul_(0.3 + 0.1 * step),
    lambda rank, _step, p: grad(p).mul_(10.0) if rank else None,
    lambda rank, step, p: grad(p).mul_((1.0 + 9 * rank) / (1 + step)),
    lambda rank, step, p: grad(p).add_(p, alpha=0.01 * (step + 1) * (rank + 1)),
    lambda rank, step, p: p.sub_(p, alpha=0.01 * (step + 1) * (rank + 1)),
    lambda rank, step, p: grad(p).clamp_(-0.05 * (rank + 1), 0.02 * (step + 1)),
    lambda _rank, _step, p: grad(p).mul_(0.1 / grad(p).norm()),
    lambda _rank, _step, p: grad(p).sign_(),
    lambda _rank, step, p: grad(p).zero_() if step % 2 else None,
    lambda rank, _step, p: grad(p).zero_() if rank else None,
    lambda _rank, _step, p: grad(p).copy_(grad(p).half().to(p.dtype)),
    lambda _rank, _step, p: grad(p).fill_(float("inf")),
    lambda rank, step, p: p.add_(torch.full_like(p, 0.1 * rank * step)),
    lambda _rank, step, p: p.sub_(grad(p), alpha=0.1 / (1 + step)),
]

WRONG: list[Callable[[int, int, nn.Parameter], Any]] = [
    lambda rank, step, p: grad(p).mul_(0.3 + 0.1 * rank * step),
    lambda rank, step, p: grad(p).mul_(0.4) if step == 2 and rank else None,
    lambda rank, step, p: grad(p).mul_(0.5 + 0.1 * rank * step).clamp_(-0.1, 0.1),
    lambda rank, step, p: p.add_(grad(p), alpha=0.05 * (1 + rank * step)),
]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(RIGHT)))
def test_what_is_right_is_accepted(index: int, dtype: torch.dtype) -> None:
    run(RIGHT[index], dtype, steps=9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(WRONG)))
def test_factors_of_norms_are_refused(index: int, dtype: torch.dtype) -> None:
    if index == 3 and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("parameters of so few bits hide how far they moved")
    with pytest.raises(RankDisagreement, match=r"different factors.*rank 1 by 0\."):
        run(WRONG[index], dtype)


def test_decay_hides_no_factor() -> None:
    def edit(rank: int, step: int, p: nn.Parameter) -> None:
        grad(p).add_(p, alpha=0.02).mul_(0.3 + 0.1 * rank * step)

    for dtype in (torch.float64, torch.float32):
        with pytest.raises(RankDisagreement, match="scaled by different factors"):
            run(edit, dtype)
