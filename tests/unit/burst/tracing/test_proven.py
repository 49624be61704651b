"""Layers are checked again when what their check depends on has changed."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.burst.captures import Captures
from stretto.burst.graph import capture, check_again
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

X = torch.randn(3, 6)
STATE: dict[str, Any] = {}
FACTOR = torch.zeros(())
COUNT = [0]
SEEN: list[Any] = []


class Options:
    share = 0.0


class Hook:
    """A hook that reads its own attribute."""

    def __init__(self) -> None:
        self.share = 0.0

    def __call__(self, _part: Any, grads: Any, _of_output: Any) -> Any:
        return mixed(grads, self.share)


HOOK = Hook()


def mixed(grads: Any, share: Any) -> Any:
    """Return gradients with a share of other samples' ones."""
    if not share:  # zero times the mean would spread one sample's infinity
        return grads
    return (grads[0] - share * grads[0].mean(0),)


def by_global(_part: Any, grads: Any, _of_output: Any) -> Any:
    return mixed(grads, STATE["share"])


def by_class(_part: Any, grads: Any, _of_output: Any) -> Any:
    return mixed(grads, Options.share)


def by_module(part: Any, grads: Any, _of_output: Any) -> Any:
    return mixed(grads, part.share)


def by_tensor(_part: Any, grads: Any, _of_output: Any) -> Any:
    return mixed(grads, FACTOR)


def in_forward(_part: Any, _args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: mixed((grad,), STATE["share"])[0])


class Reversed(torch.autograd.Function):
    """A function whose backward reads a global."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return mixed((-grad,), STATE["share"])[0]


class Model(nn.Module):
    """Two layers, with an activation of another class between them."""

    def __init__(self, *, has_function: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 4)
        self.act = nn.Tanh()
        self.act.share = 0.0
        self.has_function = has_function

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.one(x))
        return self.two(Reversed.apply(h) if self.has_function else h)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    STATE["share"] = Options.share = HOOK.share = 0.0
    FACTOR.zero_()
    COUNT[0] = 0
    yield
    SEEN.clear()


def set_global(_model: Model) -> None:
    STATE["share"] = 0.5


def set_attribute(model: Model) -> None:
    model.act.share = 0.5


READS: dict[str, tuple[str, Any, Callable[[Model], Any]]] = {
    "global": ("full_backward_hook", by_global, set_global),
    "class": (
        "full_backward_hook",
        by_class,
        lambda _: setattr(Options, "share", 0.5),
    ),
    "module": ("full_backward_hook", by_module, set_attribute),
    "tensor": ("full_backward_hook", by_tensor, lambda _: FACTOR.fill_(0.5)),
    "data": ("full_backward_hook", by_tensor, lambda _: FACTOR.data.fill_(0.5)),
    "object": ("full_backward_hook", HOOK, lambda _: setattr(HOOK, "share", 0.5)),
    "method": (
        "full_backward_hook",
        HOOK.__call__,
        lambda _: setattr(HOOK, "share", 0.5),
    ),
    "partial": (
        "full_backward_hook",
        functools.partial(lambda held, *args: held(*args), HOOK),
        lambda _: setattr(HOOK, "share", 0.5),
    ),
    "pre-hook": (
        "full_backward_pre_hook",
        lambda part, grads: by_global(part, grads, None),
        set_global,
    ),
    "hook in forward": ("forward_hook", in_forward, set_global),
}


@pytest.mark.parametrize("name", READS)
def test_a_hook_that_begins_to_mix_samples_is_refused(name: str) -> None:
    kind, hook, change = READS[name]
    model = Model()
    getattr(model.act, f"register_{kind}")(hook)
    graph = capture(model, (X,))
    assert graph.unproven() is None
    change(model)
    assert graph.unproven() is not None
    with pytest.raises(SpecError, match="mixes samples in backward"):
        check_again(graph, model, (X,))


def test_a_function_whose_backward_begins_to_mix_samples_is_refused() -> None:
    model = Model(has_function=True)
    graph = capture(model, (X,))
    STATE["share"] = 0.5
    assert graph.unproven() is not None
    with pytest.raises(SpecError, match="mixes samples in backward"):
        check_again(graph, model, (X,))


def test_a_hook_that_reads_a_changed_value_and_keeps_samples_apart_is_right() -> None:
    STATE["rate"] = 1.0
    model = Model()
    model.act.register_full_backward_hook(lambda _m, i, _o: (i[0] * STATE["rate"],))
    graph = capture(model, (X,))
    STATE["rate"] = 0.5
    assert graph.unproven() is not None
    assert check_again(graph, model, (X,))
    assert graph.unproven() is None


def logs(_part: Any, grads: Any, _of_output: Any) -> Any:
    SEEN.append(float(grads[0].norm()))
    return (grads[0] * 0.5,)


def test_a_hook_that_keeps_a_list_is_not_checked_again() -> None:
    model = Model()
    model.act.register_full_backward_hook(logs)
    graph = capture(model, (X,))
    model(X).sum().backward()
    assert graph.unproven() is None


def counts(_part: Any, grads: Any, _of_output: Any) -> Any:
    COUNT[0] += 1
    return mixed(grads, 1.0) if COUNT[0] > 1000 else None


def test_a_hook_that_decides_by_what_it_changes_is_refused_by_its_line() -> None:
    model = Model()
    model.act.register_full_backward_hook(counts)
    with pytest.raises(SpecError, match="changes it in each call") as found:
        capture(model, (X,))
    line = counts.__code__.co_firstlineno
    assert str(found.value).startswith(f"{__file__}:{line}: ")


def test_a_check_knows_which_hooks_change_gradients() -> None:
    model = Model()
    model.act.register_full_backward_hook(lambda *_: None)
    changing = model.two.register_full_backward_hook(lambda _m, i, _o: (i[0] * 2,))
    proven = capture(model, (X,)).proven
    assert proven is not None
    assert proven.active == {(id(model.two), "_backward_hooks", changing.id)}


# What layers run as it is.


def shifted(h: Tensor) -> Tensor:
    return h - 0.5 * h.mean(0)


def replace_function(model: Model, patch: pytest.MonkeyPatch) -> None:
    linear = functional.linear
    patch.setattr(functional, "linear", lambda *args: shifted(linear(*args)))


def replace_function_of_torch(_model: Model, patch: pytest.MonkeyPatch) -> None:
    tanh = torch.tanh
    patch.setattr(torch, "tanh", lambda h: shifted(tanh(h)))


def replace_class(_model: Model, patch: pytest.MonkeyPatch) -> None:
    tanh = torch.Tensor.tanh
    patch.setattr(nn.Tanh, "forward", lambda _, h: shifted(tanh(h)))


def replace_module(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(vars(model.act), "forward", lambda h: shifted(torch.sigmoid(h)))


@pytest.mark.parametrize(
    "replace",
    [
        replace_function,
        replace_function_of_torch,
        replace_class,
        replace_module,
    ],
)
def test_a_replaced_function_that_mixes_samples_is_refused(
    replace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    graph = capture(model, (X,))
    replace(model, monkeypatch)
    assert graph.unproven() is not None
    with pytest.raises(SpecError, match="mixes samples"):
        check_again(graph, model, (X,))


def test_a_replaced_forward_that_keeps_samples_apart_is_right() -> None:
    model = Model()
    graph = capture(model, (X,))
    model.act.forward = lambda h: h * 2  # type: ignore[method-assign]
    assert graph.unproven() == "the forward of a module"
    assert check_again(graph, model, (X,))


class Functions(TorchFunctionMode):
    """Mixes samples in linear layers."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return shifted(found) if func is functional.linear else found


class Operators(TorchDispatchMode):
    """Mixes samples in an activation."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return shifted(found) if func is torch.ops.aten.tanh.default else found


def saved() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: shifted(x) if x.dim() == 2 else x, lambda x: x
    )


@pytest.mark.parametrize("mode", [Functions, Operators, saved])
def test_a_mode_around_the_call_that_mixes_samples_is_refused(mode: Any) -> None:
    model = Model()
    graph = capture(model, (X,))
    with mode():
        assert graph.unproven() == "a mode, or hooks on saved tensors"
        with pytest.raises(SpecError, match="mixes samples"):
            check_again(graph, model, (X,))


def test_a_mode_is_checked_once() -> None:
    class Looks(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    model = Model()
    graph = capture(model, (X,))
    with Looks():
        assert check_again(graph, model, (X,))
    assert graph.unproven() is None
    with Looks():
        assert graph.unproven() is None


def test_modes_of_pytorch_need_no_check() -> None:
    graph = capture(Model(), (X,))
    with torch.autograd.graph.save_on_cpu(), torch.device("cpu"):
        assert graph.unproven() is None


class Scales(Hook):
    """A hook on outputs that reads its own attribute."""

    def __call__(self, _part: Any, _args: Any, output: Any) -> Any:
        return output * (1 - self.share)


def test_a_hook_of_a_layer_that_is_an_object_is_watched() -> None:
    model, hook = Model(), Scales()
    model.act.register_forward_hook(hook)
    graph = capture(model, (X,))
    hook.share = 0.5
    assert graph.outdated() is not None


class Logs(Scales):
    """A hook that counts its calls."""

    def __call__(self, _part: Any, _args: Any, _output: Any) -> None:
        self.share += 1


def test_a_hook_of_a_layer_that_counts_its_calls_is_not_watched() -> None:
    model = Model()
    model.act.register_forward_hook(Logs())
    graph = capture(model, (X,))
    model(X)
    assert graph.outdated() is None


class Fades(Scales):
    """A hook that decides by the number of its calls."""

    def __call__(self, _part: Any, _args: Any, output: Any) -> Any:
        self.share += 1
        return output if self.share < 1000 else shifted(output)


def test_a_hook_of_a_layer_that_decides_by_its_calls_is_refused() -> None:
    model = Model()
    model.act.register_forward_hook(Fades())
    with pytest.raises(SpecError, match="changes its own state in each call"):
        capture(model, (X,))


def test_a_hook_of_all_modules_that_is_removed_ends_a_capture() -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda part, _args, output: output * 2 if isinstance(part, nn.Tanh) else None
    )
    try:
        graph = capture(Model(), (X,))
        assert graph.outdated() is None
    finally:
        handle.remove()
    assert graph.outdated() == "a hook of all modules"


def test_a_forward_that_the_executor_replaces_ends_a_capture() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    graph = capture(model, (X,))
    model[1].forward = lambda x: x * 2  # type: ignore[method-assign]
    assert graph.outdated() == "the forward of a module"


class Decides(Model):
    """Reads a setting of PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        is_on = torch.are_deterministic_algorithms_enabled()
        return self.two(h.tanh() if is_on else h.sigmoid())


def test_a_setting_that_forward_reads_ends_a_capture() -> None:
    graph = capture(Decides(), (X,))
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert graph.outdated() == "are_deterministic_algorithms_enabled"
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_under_autocast_a_hook_that_begins_to_mix_samples_is_refused() -> None:
    model = Model()
    model.act.register_full_backward_hook(by_global)
    guard: Any = SimpleNamespace(opened=contextlib.nullcontext)
    graph = capture(model, (X,))
    widths = {node.name: (0, 1) for node in graph.nodes}
    of_parameters = {id(p): (0, 1) for p in model.parameters()}
    owners: Any = SimpleNamespace(
        widths=widths, width_by_id=of_parameters, layer_of=lambda _: "a layer"
    )
    captures = Captures(model, owners, guard, torch.device("cpu"))
    captures.use_example((X,), {})
    captures.follow(graph, widths)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captures.add(lambda _: None)
        assert captures.current() is not None
        STATE["share"] = 0.5
        with pytest.raises(SpecError, match="mixes samples in backward"):
            captures.current()


def test_what_ranks_compare_is_unknown_for_other_trained_parameters() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    module[0].requires_grad_(False)
    proven = capture(module, (X,)).proven
    assert proven is not None
    assert proven.behavior_with((False, False, True, True))
    assert proven.behavior_with((True, True, True, True)) == 0.0
