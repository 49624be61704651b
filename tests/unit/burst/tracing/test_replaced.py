"""What a program replaces of PyTorch is part of the layers, or is refused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.burst.graph import capture
from stretto.burst.tracing.layer_runs import run_layer
from stretto.burst.tracing.layers import INPUT
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.burst.tracing.layers import LayerGraph

X = torch.randn(4, 6)


def halved(old: Any) -> Any:
    return lambda *args, **kwargs: old(*args, **kwargs) * 0.5


def wrapped(old: Any) -> Any:
    return functools.wraps(old)(halved(old))


class Calls(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.call(self.one(x)))
        return found


class Shifted(nn.Linear):
    """Calls the forward of PyTorch's class."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + 1


def with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def computed(graph: LayerGraph, x: Tensor) -> Tensor:
    found = {INPUT: x}
    for node in graph.nodes:
        found[node.name] = run_layer(node, [found[name] for name in node.inputs])
    return found[graph.output].detach()


def require_as_model(model: nn.Module) -> None:
    graph = capture(model, (X,))
    assert torch.allclose(computed(graph, X), model(X), atol=1e-6)


@pytest.mark.parametrize("change", [halved, wrapped])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.modules.batchnorm._BatchNorm])
def test_a_replaced_forward_of_batch_norms_is_captured(
    change: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "forward", change(kind.forward))
    require_as_model(with_norm())


@pytest.mark.parametrize("change", [halved, wrapped])
def test_a_replaced_forward_of_one_batch_norm_is_captured(change: Any) -> None:
    model: Any = with_norm()
    model[1].forward = change(model[1].forward)
    require_as_model(model)


def test_a_check_keeps_the_replaced_forward_of_a_norm() -> None:
    model: Any = with_norm().eval()
    model[1].forward = mine = halved(model[1].forward)
    capture(model, (X,))
    assert model[1].forward is mine


@pytest.mark.parametrize("change", [halved, wrapped])
@pytest.mark.parametrize(
    ("space", "name", "call"),
    [
        (functional, "relu", lambda x: functional.relu(x)),
        (functional, "gelu", lambda x: functional.gelu(x)),
        (functional, "layer_norm", lambda x: functional.layer_norm(x, (6,))),
        (torch, "relu", torch.Tensor.relu),
        (torch, "einsum", lambda x: torch.einsum("bi,bi->bi", x, x)),
        (Tensor, "mul", lambda x: x.mul(x)),
        (Tensor, "sum", lambda x: x * x.sum(1, keepdim=True)),
        (Tensor, "norm", lambda x: x * x.norm(dim=1, keepdim=True)),
    ],
)
def test_a_replaced_function_is_called_once(
    change: Any, space: Any, name: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Calls(call)
    monkeypatch.setattr(space, name, change(getattr(space, name)))
    require_as_model(model)


def test_a_method_that_is_put_back_is_captured_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Calls(lambda x: x.mul(x))
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "mul", halved(Tensor.mul))
        capture(model, (X,))
    require_as_model(model)


def test_dropouts_of_functions_are_not_of_a_replaced_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Calls(functional.dropout)
    monkeypatch.setattr(nn.Dropout, "forward", halved(nn.Dropout.forward))
    assert any(node.has_dropout for node in capture(model, (X,)).nodes)


@pytest.mark.parametrize(
    ("part", "name"),
    [(nn.BatchNorm1d(6), "batch_norm"), (nn.Dropout(0.5), "dropout")],
)
def test_a_replaced_function_inside_a_module_that_ranks_compute_is_refused(
    part: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, name, halved(getattr(functional, name)))
    with pytest.raises(SpecError, match=f"functional.{name}, which .*test_replaced"):
        capture(nn.Sequential(nn.Linear(6, 6), part, nn.Linear(6, 3)), (X,))


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_a_function_inside_such_a_module_that_is_replaced_ends_a_capture(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture(with_norm(), (X,))
    monkeypatch.setattr(functional, name, halved(getattr(functional, name)))
    assert graph.outdated() == f"torch.nn.functional.{name}"


def test_a_replaced_forward_inside_one_operation_names_what_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", halved(nn.Dropout.forward))
    part = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), part)
    with pytest.raises(SpecError, match=r"test_replaced.*replaces the forward of '1."):
        capture(model, (X,))


@pytest.mark.parametrize(
    ("space", "name"), [(Tensor, "__add__"), (nn.Module, "__call__")]
)
def test_a_replaced_function_that_layers_call_too_is_named(
    space: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Calls(lambda x: x + x.tanh())
    monkeypatch.setattr(space, name, halved(getattr(space, name)))
    with pytest.raises(SpecError, match=f"has replaced torch.*{name} .*test_replaced"):
        capture(model, (X,))


def test_layers_keep_their_names_where_modules_become_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Shifted(6, 6), nn.Linear(6, 3))
    before = capture(model, (X,))
    monkeypatch.setattr(nn.Linear, "forward", halved(nn.Linear.forward))
    after = capture(model, (X,)).named_like(before)
    assert [n.name for n in after.nodes] == [n.name for n in before.nodes]


def test_layers_of_other_parameters_keep_their_own_names() -> None:
    before = capture(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), (X,))
    after = capture(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), (X,))
    assert after.named_like(before) is after
