"""`verify=True` finds a wrong capture, on all ranks, before anything is trained."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto.burst import captures
from stretto.burst.executor import BurstParallel
from stretto.errors import SpecError, StrettoError
from support.burst_ranks import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

EXAMPLE = torch.zeros(2, 6)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Linear(8, 7, bias=False),
        nn.BatchNorm1d(7),
        nn.Dropout(0.4),
        nn.Linear(7, 4),
    )


class Calls(nn.Module):
    """A layer's module with another function around its call."""

    def __init__(self, inner: nn.Module, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.inner, x)


def without_a_bias(inner: Any, x: Any) -> Any:
    return inner(x) - inner.bias.detach()


def without_a_gradient(inner: Any, x: Any) -> Any:
    return inner(x.detach())


def with_half_a_weights_gradient(inner: Any, x: Any) -> Any:
    out = inner(x)
    other = nn.functional.linear(x, inner.weight.detach(), inner.bias)
    return (out + other) / 2


def mixing_samples(inner: Any, x: Any) -> Any:
    """Right where one rank has all rows, wrong over several."""
    return inner(x) - inner(x).mean(0)


def on_all_rows_alone(inner: Any, x: Any) -> Any:
    return inner(x) if len(x) == 7 else 1.01 * inner(x)


def with_another_momentum(inner: Any) -> nn.Module:
    made = nn.BatchNorm1d(7, momentum=0.3)
    made._parameters, made._buffers = inner._parameters, inner._buffers
    return made


WRONG: dict[str, tuple[str, Any, str]] = {
    "bias": ("0", without_a_bias, "the output differs by"),
    "gradient": ("5", without_a_gradient, "the gradient of '0.weight' in layer '0'"),
    "half": ("5", with_half_a_weights_gradient, "the gradient of '5.inner.weight'"),
    "mixing": ("5", mixing_samples, "the output differs by"),
    "rows": ("0", on_all_rows_alone, "the output differs by"),
    "buffers": ("3", with_another_momentum, "buffer '3.running_mean'"),
}


def rank_of_wrong_captures(rank: int, size: int) -> dict[str, tuple[str, str]]:
    torch.set_default_dtype(torch.float64)
    right, found = captures.capture, {}
    plan = plan_of(net(), EXAMPLE.double(), lambda i: [(0, 3), (1, 2), (0, 1)][i], size)

    def capture_with(child: str, change: Any) -> Any:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            graph = right(*args, **kwargs)
            joined = graph.joined

            def changed(names: Any) -> Any:
                made = joined(names)
                for node in made.nodes:
                    for name, part in list(node.module.named_children()):
                        if name == child:
                            is_norm = change is with_another_momentum
                            other = change(part) if is_norm else Calls(part, change)
                            setattr(node.module, name, other)
                return made

            object.__setattr__(graph, "joined", changed)
            return graph

        return wrong

    def build(**more: Any) -> tuple[str, str]:
        model = net()
        before = copy.deepcopy(model.state_dict())
        kept = torch.get_rng_state()
        try:
            BurstParallel(
                model, plan, example_inputs=(EXAMPLE.double(),), verify=True, **more
            )
        except StrettoError as exc:
            return type(exc).__name__, str(exc)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(kept, torch.get_rng_state())
        return "", ""

    found["right"] = build()
    found["local"] = build(batch_norm="local")
    for name, (child, change, _) in WRONG.items():
        captures.capture = capture_with(child, change)
        found[name] = build()
    captures.capture = right
    # At the first forward, and again at the next one after it was refused.
    captures.capture = capture_with("0", without_a_bias)
    late = BurstParallel(net(), plan, verify=True)
    for name in ("first", "second"):
        with pytest.raises(StrettoError) as refused:
            late(torch.linspace(-1, 1, 12).view(2, 6))
        found[name] = (type(refused.value).__name__, str(refused.value))
    captures.capture = right
    return found


def test_a_wrong_capture_is_one_error_on_all_ranks(ranks: Any) -> None:
    everyone = ranks(rank_of_wrong_captures, 3, timeout_s=150)
    for found in everyone:
        assert found["right"] == ("", ""), found["right"]
        assert found["local"][0] == SpecError.__name__
        assert 'use batch_norm="sync"' in found["local"][1]
        for name, (_, _, words) in WRONG.items():
            assert found[name][0] == "StrettoError", (name, found[name])
            assert words in found[name][1], (name, found[name])
            assert "Train Sequential with DistributedDataParallel" in found[name][1]
        assert "the output differs by" in found["first"][1]
        assert found["first"] == found["second"]
    assert everyone[0] == everyone[1] == everyone[2]


class Recurrent(nn.Module):
    """Has a layer that runs sample by sample, and a bias without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.recurrent = nn.LSTM(4, 16, num_layers=2, dropout=0.5, batch_first=True)
        self.middle, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, _ = self.recurrent(self.first(x))
        out: torch.Tensor = self.last(self.norm(self.middle(steps[:, -1])))
        return out


def rank_of_rounding(_rank: int, size: int) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(8, 5, 4)
    plan = plan_of(model, x, lambda _: (0, 1), size)
    BurstParallel(model, plan, example_inputs=(x,), verify=True)


def test_what_is_only_rounding_is_not_a_wrong_capture(ranks: Any) -> None:
    ranks(rank_of_rounding, 1, timeout_s=100)


class Between(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.function(self.one(x)))
        return out


class Columns(nn.Module):
    """Looks up columns that have vocabularies of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(50, 4), nn.Embedding(3, 4)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.first(x[:, 0]), self.second(x[:, 1])]
        out: torch.Tensor = self.last(torch.cat(parts, 1))
        return out


def drops_nothing(h: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(h, 0.0)


def drops_in_a_checkpoint(h: torch.Tensor) -> Any:
    return checkpoint(
        lambda x: nn.functional.dropout(x, 0.3).tanh(), h, use_reentrant=False
    )


def rank_of_right_captures(_rank: int, size: int) -> None:
    columns = torch.stack([torch.arange(8) * 5 % 50, torch.arange(8) % 3], 1)
    rows = torch.randn(8, 4)
    for model, x in (
        (Between(drops_nothing), rows),
        (Between(drops_in_a_checkpoint), rows),
        (Columns(), columns),
    ):
        plan = plan_of(model, x, lambda i: [(0, 2), (1, 1), (0, 1)][i % 3], size)
        BurstParallel(model, plan, example_inputs=(x,), verify=True)


def test_draws_and_columns_are_those_of_the_ranks(ranks: Any) -> None:
    ranks(rank_of_right_captures, 2, timeout_s=100)
