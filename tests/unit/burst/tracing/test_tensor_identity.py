"""Forwards that compare which tensor objects the module's are."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.errors import SpecError


class Doubles(nn.Module):
    """Doubles its result if a function of the module says so."""

    def __init__(self, known, prepare):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.known = known
        prepare(self)

    def forward(self, x):
        h = self.last(self.first(x).tanh()) * self.scale
        return h * (2 if self.known(self) else 1)  # decides


def keep_weight(module):
    module.kept = [module.last.weight]


def keep_id(module):
    module.kept = {id(module.last.weight)}


def keep_buffer(module):
    module.__dict__["kept"] = module.scale


def tie(module):
    module.last.weight = module.first.weight


def in_list(module):
    return any(p is module.last.weight for p in module.kept)


def in_set(module):
    return id(module.last.weight) in module.kept


def is_buffer(module):
    return module.scale is module.kept


def is_tied(module):
    return module.last.weight is module.first.weight


@pytest.mark.parametrize(
    ("known", "prepare"),
    [(in_list, keep_weight), (in_set, keep_id), (is_buffer, keep_buffer)],
)
def test_a_forward_that_knows_its_own_tensors_is_refused_by_its_line(known, prepare):
    line = Doubles.forward.__code__.co_firstlineno + 2
    with pytest.raises(SpecError, match=rf"identity\.py:{line}: forward of Doubles"):
        capture(Doubles(known, prepare), (torch.randn(6, 4),))


class Stops(Doubles):
    """Stops a gradient if a function of the module says so; returns the same."""

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h.detach() + 0 * h if self.known(self) else h)


class Halves(torch.autograd.Function):
    """Halves the gradient if asked to."""

    @staticmethod
    def forward(ctx, x, is_half):
        ctx.is_half = is_half
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (0.5 if ctx.is_half else 1.0), None


class Tells(Doubles):
    def forward(self, x):
        h = Halves.apply(self.first(x).tanh(), self.known(self))
        return self.last(h)


@pytest.mark.parametrize("kind", [Stops, Tells])
def test_a_forward_that_knows_its_tensors_for_gradients_is_refused(kind):
    with pytest.raises(SpecError, match=r"identity\.py:\d+: .* another gradient with"):
        capture(kind(in_list, keep_weight), (torch.randn(6, 4),))


def test_gradients_with_the_modules_own_tensors_call_no_hook_of_theirs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    called = []
    model[0].weight.register_hook(called.append)
    model[0].weight.grad = torch.ones(4, 4)
    assert capture(model, (torch.randn(6, 4),)).nodes
    assert not called
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    model(torch.randn(6, 4)).sum().backward()
    assert len(called) == 1


def keep_address(module):
    module.kept = {module.last.weight.data_ptr()}


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module.last.weight.data_ptr() in module.kept,
        lambda module: module.last.weight.untyped_storage().data_ptr() in module.kept,
        lambda module: module.last.weight.is_set_to(module.first.weight),
        lambda module: module.last.weight._version == 0,
    ],
)
def test_a_forward_that_asks_which_memory_it_has_is_refused_by_its_line(read):
    line = read.__code__.co_firstlineno
    with pytest.raises(SpecError, match=rf"identity\.py:{line}: reads"):
        capture(Doubles(read, keep_address), (torch.randn(6, 4),))


class AsksBack(torch.autograd.Function):
    """Asks in backward which memory a tensor has."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + ctx.saved_tensors[0].data_ptr() % 2), None


def test_a_backward_that_asks_which_memory_it_has_is_refused_by_its_line():
    class Asks(Doubles):
        def forward(self, x):
            return self.last(AsksBack.apply(self.first(x), self.last.weight))

    line = AsksBack.backward.__code__.co_firstlineno + 2
    with pytest.raises(SpecError, match=rf"identity\.py:{line}: reads data_ptr"):
        capture(Asks(in_list, keep_weight), (torch.randn(6, 4),))


def test_the_refusal_leaves_the_modules_tensors_as_they_were():
    model = Doubles(in_list, keep_weight)
    held = [*model.parameters(), *model.buffers()]
    was = [(id(t), t.data_ptr(), t._version, t.detach().clone()) for t in held]
    with pytest.raises(SpecError, match="which tensor objects"):
        capture(model, (torch.randn(6, 4),))
    for tensor, (same, memory, version, values) in zip(
        (*model.parameters(), *model.buffers()), was, strict=True
    ):
        assert (id(tensor), tensor.data_ptr()) == (same, memory)
        assert tensor._version == version
        assert torch.equal(tensor, values)


def test_a_forward_that_compares_its_registered_tensors_is_captured():
    assert capture(Doubles(is_tied, tie), (torch.randn(6, 4),)).nodes


def test_buffers_that_forward_changes_keep_their_values():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.GELU())
    was = [buffer.clone() for buffer in model.buffers()]
    assert capture(model, (torch.randn(6, 4),)).nodes
    assert all(map(torch.equal, model.buffers(), was))


class Asks(nn.Module):
    """Doubles its result if a function of the module and the input says so."""

    def __init__(self, known):
        super().__init__()
        self.layer, self.known = nn.Linear(4, 4), known
        self.kept = None

    def forward(self, x):
        return self.layer(x) * (2 if self.known(self, x) else 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda module, x: id(x) == module.kept,
        lambda module, x: x in dict.fromkeys(module.kept or ()),
        lambda module, x: hash(x) in (module.kept or ()),
        lambda _module, x: x._base is not None,
        lambda _module, x: x.is_shared(),
        lambda _module, x: bool(x._backward_hooks),
    ],
)
def test_a_forward_that_asks_which_object_its_input_is_is_refused_by_its_line(read):
    line = read.__code__.co_firstlineno
    with pytest.raises(SpecError, match=rf"identity\.py:{line}: reads"):
        capture(Asks(read), (torch.randn(6, 4),))


def test_a_forward_may_tell_its_parameters_and_what_it_computes_apart():
    def known(module, x):
        made = {id(x * 2)} | {id(p) for p in module.parameters()}
        return len(made) == 3

    assert capture(Asks(known), (torch.randn(6, 4),)).nodes


def test_inputs_with_an_attribute_that_forward_may_read_are_refused():
    graph = capture(
        Asks(lambda _module, x: getattr(x, "tag", 0) == 1), (torch.randn(6, 4),)
    )
    x = torch.randn(3, 4)
    x.other = 1
    graph.require_unread_attributes([x])
    x.tag = 1
    with pytest.raises(SpecError, match="an input has the attribute 'tag'"):
        graph.require_unread_attributes([x])


def test_an_input_within_a_storage_is_refused_if_forward_asks_where_it_begins():
    graph = capture(Asks(lambda _module, x: x.storage_offset()), (torch.randn(6, 4),))
    rows = torch.randn(6, 4)
    graph.require_layout_known([rows[:3]])
    with pytest.raises(SpecError, match=r"identity\.py:\d+: reads where in its stor"):
        graph.require_layout_known([rows[3:]])


@pytest.mark.parametrize(
    "hold",
    [lambda x: [x], lambda x: {"last": (x,)}, weakref.ref],
)
def test_an_input_that_a_container_holds_is_known_as_one(hold):
    model = Asks(lambda module, _x: module.kept is None)
    rows = torch.randn(6, 4)
    model.kept = hold(rows)
    graph = capture(model, (torch.randn(6, 4),))
    assert graph.one_tensor_as([rows]) == ((0, "kept"),)
    assert graph.one_tensor_as([rows.clone()]) == ()


def test_an_input_that_a_default_value_holds_is_known_as_one():
    rows = torch.randn(6, 4)

    def known(_module, x, held=(rows,)):
        return any(x is one for one in held)

    graph = capture(Asks(known), (torch.randn(6, 4),))
    assert len(graph.one_tensor_as([rows])) == 1
