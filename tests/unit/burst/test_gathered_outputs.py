"""Losses on outputs that were gathered from ranks with other numbers of samples."""

import pytest
import torch
import torch.distributed as dist

from stretto.burst.boundary import mark_output
from stretto.burst.gathered_outputs import gathered_unevenly


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def output(*, is_uneven):
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    return mark_output(
        x, 0.5, lambda _grad, _why_not: None, [], is_apart=False, is_uneven=is_uneven
    )


def test_a_backward_that_calls_a_collective_is_found():
    loss = Gather.apply(output(is_uneven=True).square()).sum()
    assert gathered_unevenly([loss]) == "Gather"


def test_a_function_of_torch_is_found():
    class Gathers(Twice):
        pass

    Gathers.__module__ = "torch.distributed.nn.functional"
    loss = Gathers.apply(output(is_uneven=True)).sum()
    assert gathered_unevenly([loss]) == "Gathers"


@pytest.mark.parametrize(
    "loss",
    [
        lambda: Gather.apply(output(is_uneven=False)).sum(),
        lambda: Twice.apply(output(is_uneven=True)).sum(),
        lambda: Gather.apply(torch.ones(3, requires_grad=True)).sum(),
        lambda: Gather.apply(output(is_uneven=True).detach().requires_grad_()).sum(),
    ],
)
def test_other_losses_are_not(loss):
    assert gathered_unevenly([loss()]) is None
