"""Objects that forward shares with its caller, its output and its module."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from stretto.burst.graph import capture
from stretto.burst.tracing.layers import INPUT
from stretto.errors import SpecError, StrettoError

X = torch.randn(2, 4)


class Model(nn.Module):
    """A model with a given forward, which calls its layers ``a`` and ``b``."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def refusal(model, *args):
    with pytest.raises(SpecError) as caught:
        capture(model, args)
    return str(caught.value)


def line_of(function, ahead=1):
    return f"{__file__}:{inspect.getsourcelines(function)[1] + ahead}: "


def writes_by_a_function(self, x):
    functional.relu_(x)
    return self.a(x)


def writes_a_part(self, x):
    x[:, 0] = 0.0
    return self.a(x)


def writes_through_a_view(self, x):
    x.view(-1, 2, 2).clamp_(-1.0, 1.0)
    return self.a(x)


@pytest.mark.parametrize(
    "forward", [writes_by_a_function, writes_a_part, writes_through_a_view]
)
def test_a_forward_that_writes_into_its_input_is_refused_with_the_line(forward):
    message = refusal(Model(forward), X.clone())
    assert message.startswith(line_of(forward)), message
    assert "writes in place into an input" in message
    assert "clone()" in message


def test_a_module_that_writes_into_the_input_is_named():
    message = refusal(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), X)
    assert "module '0' (ReLU) writes in place into an input" in message


def test_a_write_into_a_copy_of_the_input_is_captured():
    def forward(self, x):
        return self.a(x.clone().relu_()) + self.b(x)

    capture(Model(forward), (X,))


def adds_a_key(self, given):
    h = self.a(given["x"])
    given["h"] = h
    return h


def extends_a_list(self, given):
    h = self.a(given["x"])
    given["more"].append(h)
    return h


@pytest.mark.parametrize("forward", [adds_a_key, extends_a_list])
def test_a_forward_that_changes_its_arguments_is_refused_with_the_line(forward):
    message = refusal(Model(forward), {"x": X, "more": []})
    assert message.startswith(line_of(forward, 2)), message
    assert "changes a list or dictionary" in message


@pytest.mark.parametrize(
    "number", [len, lambda x: 1 / x.shape[0], lambda x: x.shape, lambda x: f"{len(x)}"]
)
def test_an_output_that_counts_the_samples_is_refused(number):
    message = refusal(Model(lambda self, x: (self.a(x), number(x))), X)
    assert message.startswith(f"{__file__}:"), message
    assert "the number of samples" in message


@dataclass(frozen=True)
class Output:
    value: torch.Tensor
    name: str
    more: torch.Tensor | None = None


def unpacked(model, x):
    """Return what a captured model gives."""
    graph = capture(model, (x,))
    values = {INPUT: x}
    for node in graph.nodes:
        values[node.name] = node.module(*[values[name] for name in node.inputs])
    return graph.results.unpack(values[graph.output], inputs=[x])


def test_a_dataclass_is_given_as_one():
    model = Model(lambda self, x: [Output(self.a(x), "first"), 1.0])
    found, number = unpacked(model, X)
    assert type(found) is Output
    assert (found.name, found.more, number) == ("first", None, 1.0)
    assert torch.equal(found.value, model.a(X))


def test_a_tensor_that_is_given_twice_is_one_tensor():
    def forward(self, x):
        h = self.a(x)
        return h, {"same": h}

    one, held = unpacked(Model(forward), X)
    assert one is held["same"]


def test_an_object_without_tensors_is_refused_by_its_type():
    message = refusal(
        Model(lambda self, x: torch.distributions.Normal(self.a(x), 1.0)), X
    )
    assert message.startswith(f"{__file__}:"), message
    assert "no tensor but Normal" in message


def test_a_lazy_module_that_has_not_run_is_refused_by_name():
    message = refusal(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)), X)
    assert "'1.weight' of a lazy module has no shape yet" in message


class Lazy(types.ModuleType):
    """A module that can't be loaded when something reads it."""

    def __getattr__(self, name):
        raise ImportError(f"loaded to read {name}")


def test_modules_that_load_lazily_are_not_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "test_lazy", Lazy("test_lazy"))
    capture(nn.Sequential(nn.Linear(4, 4)), (X,))


def test_parameters_that_forward_reads_from_a_container_are_captured():
    model = Model(lambda self, x: self.b(torch.tanh(x @ self.held[0])))
    model.held = [model.a.weight]
    graph = capture(model, (X,))
    assert [p is model.a.weight for p in graph.nodes[0].module.parameters()] == [True]
    assert graph.held_elsewhere == {id(model.a.weight)}


def run_twice(model, x):
    """Return outputs of the model, and of what is captured of it."""
    return model(x), unpacked(model, x)


def returns_a_part(self, x):
    h = self.a(x)
    return h, h[:, 1:3]


def returns_a_part_first(self, x):
    h = self.a(x).view(-1, 2, 2).transpose(1, 2)
    return h[:, 0], {"whole": h}


def returns_what_is_detached(self, x):
    h = self.a(x)
    return h.detach(), h


def returns_rows_of_integers(self, x):
    best = self.a(x).argsort(1)
    return self.b(x), best, best[:, :1]


@pytest.mark.parametrize(
    "forward",
    [
        returns_a_part,
        returns_a_part_first,
        returns_what_is_detached,
        returns_rows_of_integers,
    ],
)
@pytest.mark.parametrize("written", [0, -1])
def test_outputs_that_share_memory_change_together(forward, written):
    model = Model(forward)
    outputs = run_twice(model, X)
    for some in outputs:
        leaves = pytree.tree_leaves(some)
        with torch.no_grad():
            leaves[written].mul_(3)
    for wanted, found in zip(*map(pytree.tree_leaves, outputs), strict=True):
        assert torch.equal(wanted, found)


@pytest.mark.parametrize(
    "forward", [returns_a_part, returns_a_part_first, returns_what_is_detached]
)
def test_outputs_that_share_memory_have_the_model_s_gradients(forward):
    model = Model(forward)
    gradients = []
    for some in run_twice(model, X):
        leaves = [leaf for leaf in pytree.tree_leaves(some) if leaf.requires_grad]
        assert len(leaves) == 1 + (forward is not returns_what_is_detached)
        for i, leaf in enumerate(leaves):
            leaf.mul_(2 + i)
        loss = sum(leaf.square().sum() for leaf in leaves)
        gradients += torch.autograd.grad(loss, list(model.a.parameters()))
    for wanted, found in zip(gradients[:2], gradients[2:], strict=True):
        assert torch.allclose(wanted, found)


def test_outputs_that_overlap_in_other_ways_are_refused_with_the_line():
    def forward(self, x):
        h = self.a(x)
        return h[:, :3], h[:, 2:]

    message = refusal(Model(forward), X)
    assert message.startswith(line_of(forward, 2)), message
    assert "overlaps in memory with another one" in message


def test_parts_that_do_not_overlap_are_captured():
    capture(Model(lambda self, x: self.a(x).chunk(2, 1)), (X,))


def test_an_input_that_is_returned_is_the_program_s_own():
    x = X.clone()
    _, same, part = unpacked(Model(lambda self, x: (self.a(x), x, x[:, 1:])), x)
    same[0, 1] = 7.0
    assert same.data_ptr() == x.data_ptr()
    assert part[0, 0] == 7.0


def test_an_input_that_needs_a_gradient_is_returned_by_the_layers():
    x = X.clone().requires_grad_()
    _, same = unpacked(Model(lambda self, x: (self.a(x), x)), x)
    assert same.grad_fn is not None


class Cache:
    """Holds tensors that layers compute."""

    def __init__(self, held):
        self.held = held


@pytest.fixture(scope="module")
def beside():
    """Outputs that are no tensors: a cache and a constant."""

    def forward(self, x):
        h = self.a(x)
        return self.b(h), Cache([h]), 2j

    return unpacked(Model(forward), X)[1:]


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.held,
        len,
        list,
        lambda cache: cache[0],
        lambda cache: cache(),
    ],
)
def test_an_object_in_the_output_is_an_error_when_it_is_used(use, beside):
    with pytest.raises(StrettoError, match="has an object of Cache here"):
        use(beside[0])


def test_an_object_in_the_output_may_be_passed_on(beside):
    found = copy.deepcopy(beside[0])
    assert found is not None
    assert "Cache" in repr(found)
    assert not hasattr(found, "dtype")


def test_a_constant_in_the_output_is_kept(beside):
    assert beside[1] == 2j
