"""Models that ask about their process, their job, or what is around them."""

from __future__ import annotations

import os
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.burst.graph import capture
from stretto.errors import SpecError

X = torch.randn(6, 4)


class Scaled(nn.Module):
    """Scales what it computes by a function's result."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = scale

    def forward(self, x):
        return self.last(self.first(x).tanh() * self.scale())


class Back(torch.autograd.Function):
    """Scales its gradient by the number of ranks."""

    @staticmethod
    def forward(_ctx, x):
        return x * 1

    @staticmethod
    def backward(_ctx, grad):
        return grad * int(os.environ["WORLD_SIZE"])


def from_environment():
    return int(os.environ["WORLD_SIZE"])


def from_getenv():
    return 1 + int(os.getenv("RANK", "0"))


def unused():
    return 1 if int(os.environ.get("RANK", "0")) >= 0 else 2


def seed():
    return 1 + torch.initial_seed() % 2


@pytest.fixture
def second_of_two(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize("scale", [from_environment, from_getenv])
def test_outputs_that_depend_on_the_rank_are_refused_by_the_line(scale):
    line = scale.__code__.co_firstlineno + 1
    with pytest.raises(SpecError, match=rf"questions\.py:{line}: reads .* outputs of"):
        capture(Scaled(scale), (X,))
    assert os.environ["RANK"] == "1"


@pytest.mark.usefixtures("second_of_two")
def test_gradients_that_depend_on_the_number_of_ranks_are_refused():
    class Model(Scaled):
        def forward(self, x):
            return self.last(Back.apply(self.first(x)))

    line = Back.backward.__code__.co_firstlineno + 2
    with pytest.raises(
        SpecError, match=rf"questions\.py:{line}: .* gradients of Model"
    ):
        capture(Model(unused), (X,))


@pytest.mark.usefixtures("second_of_two")
def test_a_rank_that_changes_nothing_may_be_read():
    assert capture(Scaled(unused), (X,)).nodes


def seed_of_generator():
    return 2 if torch.default_generator.initial_seed() == 8 else 1


def seed_by_name():
    return 1 + methodcaller("initial_seed")(torch.default_generator) % 2


def seed_on_request():
    if X.dim() > 2:
        return torch.default_generator.initial_seed()
    return 1


@pytest.mark.parametrize("read", [seed, seed_of_generator, seed_by_name])
def test_a_read_seed_is_refused_by_its_line(read):
    line = read.__code__.co_firstlineno + 1
    with pytest.raises(SpecError, match=rf"questions\.py:{line}: .*initial_seed"):
        capture(Scaled(read), (X,))
    assert torch.initial_seed() >= 0


def test_a_line_that_would_read_the_seed_may_stay_unreached():
    assert capture(Scaled(seed_on_request), (X,)).nodes


@pytest.fixture
def job(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def size_of_group():
    return dist.group.WORLD.size()


def size_of_mesh():
    return Scaled.mesh.size()


def rank_in_mesh():
    return 1 + Scaled.mesh.get_local_rank()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("scale", [size_of_group, size_of_mesh, rank_in_mesh])
def test_groups_and_meshes_answer_as_in_one_process(scale, monkeypatch):
    monkeypatch.setattr(dist.ProcessGroup, "size", lambda _group: 2)
    mesh = dist.device_mesh.DeviceMesh("cpu", [0], _init_backend=False)
    monkeypatch.setattr(type(mesh), "size", lambda _mesh: 2)
    monkeypatch.setattr(type(mesh), "get_local_rank", lambda _mesh: 1)
    monkeypatch.setattr(Scaled, "mesh", mesh, raising=False)
    line = scale.__code__.co_firstlineno + 1
    with pytest.raises(SpecError, match=rf"questions\.py:{line}: reads .* outputs of"):
        capture(Scaled(scale), (X,))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_collectives_in_forward_are_refused_by_their_line(name):
    class Model(Scaled):
        def forward(self, x):
            found = self.first(x)
            getattr(dist, name)(found, *([0] if name == "broadcast" else []))
            return self.last(found)

    line = Model.forward.__code__.co_firstlineno + 2
    with pytest.raises(SpecError, match=rf"questions\.py:{line}: calls .*\.{name} in"):
        capture(Model(unused), (X,))


class Sums(torch.autograd.Function):
    """Adds gradients over the ranks."""

    @staticmethod
    def forward(_ctx, x):
        return x * 1

    @staticmethod
    def backward(_ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


@pytest.mark.usefixtures("job")
def test_collectives_in_a_backward_are_refused_by_their_line():
    class Model(Scaled):
        def forward(self, x):
            return self.last(Sums.apply(self.first(x)))

    line = Sums.backward.__code__.co_firstlineno + 3
    with pytest.raises(
        SpecError, match=rf"questions\.py:{line}: calls .*all_reduce in"
    ):
        capture(Model(unused), (X,))


def test_hooks_on_saved_tensors_in_forward_are_refused_by_the_line():
    class Model(Scaled):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return self.last(self.first(x).tanh())  # within

    line = Model.forward.__code__.co_firstlineno + 2
    with pytest.raises(SpecError, match=rf"questions\.py:{line}: runs within"):
        capture(Model(unused), (X,))


def test_a_class_with_a_call_of_its_own_is_refused_by_its_line():
    class Model(Scaled):
        def __call__(self, x):
            return super().__call__(x) * 2

    line = Model.__call__.__code__.co_firstlineno
    with pytest.raises(SpecError, match=rf"questions\.py:{line}: Model defines __call"):
        capture(Model(unused), (X,))


def test_values_of_hooks_on_saved_tensors_around_a_model_are_watched():
    def around(factor):
        def unpacked(tensor):
            return tensor * factor

        return torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with around(1.0):
        graph = capture(model, (X,))
    with around(1.0):
        assert graph.unproven() is None
    with around(2.0):
        assert graph.unproven() is not None


class Counts(torch.overrides.TorchFunctionMode):
    def __init__(self, held):
        super().__init__()
        self.held, self.calls = held, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        found = func(*args, **(kwargs or {}))
        return found * self.held["factor"] if func is torch.tanh else found


def test_what_a_mode_around_a_model_holds_is_watched_but_not_its_count():
    held = {"factor": 1.0}
    with Counts(held) as mode:
        graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (X,))
    with mode:
        assert graph.unproven() is None
        held["factor"] = 2.0
        assert graph.unproven() is not None


def test_what_the_class_of_a_mode_around_a_model_holds_is_watched(monkeypatch):
    class Scales(torch.overrides.TorchFunctionMode):
        factor = 1.0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return found * self.factor if func is torch.tanh else found

    with Scales():
        graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (X,))
        assert graph.unproven() is None
        monkeypatch.setattr(Scales, "factor", 2.0)
        assert graph.unproven() is not None


def test_parts_that_are_added_end_a_capture():
    class Chain(Scaled):
        def forward(self, x):
            for part in self.children():
                x = part(x)
            return x

    model = Chain(unused)
    graph = capture(model, (X,))
    model.add_module("more", nn.Tanh())
    assert graph.outdated() is not None


def test_hooks_that_forward_counts_are_watched():
    class Model(Scaled):
        def forward(self, x):
            return self.last(self.first(x) * (1 + len(self.first._forward_hooks)))

    model = Model(unused)
    graph = capture(model, (X,))
    model.first.register_forward_hook(lambda *_: None)
    assert graph.outdated() is not None


def test_inputs_on_another_device_are_refused():
    graph = capture(nn.Linear(4, 2), (X,))
    with pytest.raises(SpecError, match="an input is on meta"):
        graph.arguments.pack((X.to("meta"),), {})
