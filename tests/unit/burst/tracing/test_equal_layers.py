"""Layers that compute the same: of these the first and the last are checked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.graph import capture
from stretto.burst.tracing import proof
from stretto.burst.tracing.custom_backward import with_own_backward
from stretto.burst.tracing.equal_layers import kinds_of
from stretto.errors import SpecError

COUNT = 5


class Block(nn.Module):
    """A layer with a bias that is given to it as a buffer."""

    def __init__(self, shift=0.5, order=None, width=4):
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.back = nn.Linear(width, 4)
        self.shift = shift
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("order", order)

    def forward(self, x):
        h = functional.gelu(self.linear(x))
        h = self.back(h) * self.scale + self.shift
        return h if self.order is None else h[..., self.order]


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.linear.weight.requires_grad_(False)


class Tied(Block):
    def __init__(self):
        super().__init__()
        self.back.weight = self.linear.weight


def rescaled():
    block = Block()
    block.scale[0] = 5.0
    return block


def hooked():
    block = Block()
    block.linear.register_forward_hook(lambda _m, _i, output: output * 2)
    return block


def infinite():
    block = Block()
    with torch.no_grad():
        block.linear.bias[0] = -torch.inf
    return block


def kinds(blocks):
    graph = capture(nn.Sequential(*blocks), (torch.randn(4, 4),), verify=False)
    replaced = frozenset(id(p) for n in graph.nodes for p in n.module.parameters())
    return graph, kinds_of(graph.nodes, replaced, with_own_backward(graph.nodes))


def test_blocks_are_equal_whatever_their_parameters_hold():
    blocks = [Block() for _ in range(COUNT)]
    with torch.no_grad():
        blocks[1].linear.weight.zero_()
    graph, found = kinds(blocks)
    assert set(found) == {node.name for node in graph.nodes}
    per_block = len(graph.nodes) // COUNT
    assert len(set(found.values())) <= per_block


@pytest.mark.parametrize(
    "other",
    [
        lambda: Block(shift=0.25),
        lambda: Block(order=torch.tensor([3, 2, 1, 0])),
        lambda: Block(width=8),
        Frozen,
        Tied,
        rescaled,
        hooked,
        infinite,
    ],
)
def test_a_block_that_computes_something_else_is_not(other):
    blocks = [Block() for _ in range(COUNT)]
    _, plain = kinds(blocks)
    usual = set(plain.values())
    blocks[2] = other()
    graph, found = kinds(blocks)
    of_block = [node.name for node in graph.nodes if node.name.startswith("2")]
    assert of_block
    assert any(found.get(name) not in usual for name in of_block)


class Mixing(Block):
    def forward(self, x):
        h = super().forward(x)
        return h.repeat(2, 1).view(len(h), 2, 4)[:, 0]


@pytest.mark.parametrize("place", range(COUNT))
def test_one_of_many_that_mixes_samples_is_found(place):
    blocks = [Block() for _ in range(COUNT)]
    blocks[place] = Mixing()
    with pytest.raises(SpecError, match="it mixes samples"):
        capture(nn.Sequential(*blocks), (torch.randn(4, 4),))


class Power(torch.autograd.Function):
    """Mixes samples in backward."""

    @staticmethod
    def forward(ctx, x, amount):
        ctx.amount = amount
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.amount * grad.mean(0), None


class OwnBackward(nn.Module):
    def __init__(self, amount):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.amount = amount

    def forward(self, x):
        return Power.apply(self.linear(x), self.amount)


@pytest.mark.parametrize("place", range(COUNT))
def test_all_backwards_that_are_not_torchs_are_checked(place):
    blocks = [OwnBackward(0.0) for _ in range(COUNT)]
    blocks[place].amount = 1.0
    with pytest.raises(SpecError, match="it mixes samples in backward"):
        capture(nn.Sequential(*blocks), (torch.randn(4, 4),))


class Rounded(nn.Module):
    """Decides by the values of its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return torch.where(h > 0, h, 2 * h)


@pytest.mark.parametrize(
    ("block", "all_checked"), [(Block, ""), (Rounded, "gt"), (hooked, "linear")]
)
def test_how_many_layers_are_checked(block, all_checked, monkeypatch):
    checked = []
    operations = proof._Check._operations

    def counted(self, node, *args):
        checked.append(node.name)
        return operations(self, node, *args)

    monkeypatch.setattr(proof._Check, "_operations", counted)
    blocks = [block() for _ in range(COUNT)]
    graph = capture(nn.Sequential(*blocks), (torch.ones(4, 4),))
    names = [node.name for node in graph.nodes]
    assert len(set(checked)) < len(names)
    assert {names[0], names[-1]} <= set(checked)
    if all_checked:
        wanted = {name for name in names if all_checked in name}
        assert len(wanted) >= COUNT
        assert wanted <= set(checked)
