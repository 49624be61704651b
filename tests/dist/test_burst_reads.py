"""State that forward reads and a program changes between steps, on all ranks."""

from __future__ import annotations

import functools
import itertools
import operator
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from stretto.errors import StrettoError
from support.burst_sides import Alone, Side, cross, worst_of

if TYPE_CHECKING:
    from stretto.burst.executor import BurstParallel

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


class Options:
    class Inner:
        rate = 1.0

    rate = 1.0


def scaled(h: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return h * rate


activation: Any = torch.tanh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.a.rate = 1.0  # type: ignore[assignment]
        self.options = Options()

    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = scaled(activation(self.a(x)), self.options.rate * Options.Inner.rate)
        h = h * self.a.rate * self.gain
        return self.b(h * 2 if self.a.weight.requires_grad else h)


def change(model: nn.Module, step: int, side: int) -> None:
    """Change something else before each step; ``side`` makes names unique."""
    globals()["activation"] = torch.sin if step == 1 else torch.tanh
    Options.rate = 2.0 if step == 2 else 1.0
    Options.Inner.rate = 2.0 if step == 3 else 1.0
    model.a.rate = 2.0 if step == 4 else 1.0  # type: ignore[union-attr,assignment]
    Net.gain = property(lambda _: 2.0 if step == 5 else 1.0)  # type: ignore[assignment,method-assign,misc]
    scaled.__defaults__ = (float(side),)
    model.a.weight.requires_grad_(step != 6)  # type: ignore[union-attr,operator]


def trained(side: Side) -> list[torch.Tensor]:
    model = Net()
    change(model, 0, 1)
    wrapped = side.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(8):
        change(model, step, 1)
        x, y = side.data(step)
        optimizer.zero_grad()
        cross(wrapped(x), y).backward()
        optimizer.step()
    return side.state(wrapped)


def rank_of_changes(rank: int, size: int) -> float:
    torch.set_default_dtype(torch.float64)
    found = trained(Side(rank, size, [(0, 2), (1, 1)], "even"))
    return worst_of(found, trained(Alone()))


def test_changes_of_what_forward_reads_train_as_one_process(ranks: Any) -> None:
    for worst in ranks(rank_of_changes, 2, timeout_s=120, group_s=60):
        assert worst < 1e-9


class ReadsFile(Net):
    path = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        word = Path(self.path).read_text()
        return self.b(h.sin() if word == "sin" else h.tanh())


def trained_with_a_file(side: Side) -> list[torch.Tensor]:
    model = ReadsFile()
    with tempfile.NamedTemporaryFile("w") as file:
        model.path = file.name
        wrapped = side.wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(24):
            Path(file.name).write_text("sin" if step in (6, 7, 19) else "")
            x, y = side.data(step)
            optimizer.zero_grad()
            cross(wrapped(x), y).backward()
            optimizer.step()
    return side.state(wrapped)


def rank_of_a_file(rank: int, size: int) -> float:
    torch.set_default_dtype(torch.float64)
    found = trained_with_a_file(Side(rank, size, [(0, 2), (1, 1)], "even"))
    return worst_of(found, trained_with_a_file(Alone()))


def test_a_change_that_no_value_shows_trains_as_one_process(ranks: Any) -> None:
    for worst in ranks(rank_of_a_file, 2, timeout_s=120, group_s=60):
        assert worst < 1e-9


def rank_of_its_own_file(rank: int, size: int) -> list[str]:
    model = ReadsFile()
    found = []
    with tempfile.NamedTemporaryFile("w") as file:
        model.path = file.name
        side = Side(rank, size, [(0, 2), (1, 1)], "even")
        wrapped: BurstParallel = side.wrap(model)
        for step in range(8):
            if step == 6 and rank == 1:
                Path(file.name).write_text("sin")
            x, y = side.data(step)
            try:
                functional.cross_entropy(wrapped(x), y).backward()
            except StrettoError as exc:
                found.append(f"{step} {exc}")
    return found


def test_a_change_on_one_rank_that_no_value_shows_stops_all(ranks: Any) -> None:
    for found in ranks(rank_of_its_own_file, 2, timeout_s=120, group_s=60):
        assert [text.split()[0] for text in found] == ["6", "7"]
        assert all("with different operations" in text for text in found)


RATES = {"parametrization": 1.0, "hook": 1.0, "backward": 1.0, "log": 1.0}


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * RATES["parametrization"]


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * RATES["backward"]


def scaled_by_hook(_part: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
    return out * RATES["hook"]


def looks(_part: Any, _given: Any, _out: torch.Tensor) -> None:
    if RATES["log"] < 0:
        raise ValueError("no output")


class RunsOwnCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        parametrize.register_parametrization(self.a, "weight", Scaled())
        self.b.register_forward_hook(scaled_by_hook)
        self.b.register_forward_hook(looks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Backward.apply(self.a(x)))


def rank_of_own_code(rank: int, size: int, name: str) -> list[str]:
    side = Side(rank, size, [(0, 2), (1, 1)], "even")
    wrapped: BurstParallel = side.wrap(RunsOwnCode())
    found = []
    for step in range(4):
        if step == 2 and rank == 1:
            RATES[name] = 0.5
        x, y = side.data(step)
        try:
            cross(wrapped(x), y).backward()
        except StrettoError as exc:
            found.append(f"{step} {exc}")
    return found


@pytest.mark.parametrize("name", ["parametrization", "hook", "backward"])
def test_another_value_on_one_rank_in_code_that_layers_run_stops_all(
    ranks: Any, name: str
) -> None:
    for found in ranks(rank_of_own_code, 2, name, timeout_s=120, group_s=60):
        assert [text.split()[0] for text in found] == ["2", "3"]
        assert all("compute different values" in text for text in found)


def test_another_value_on_one_rank_that_changes_no_result_is_allowed(
    ranks: Any,
) -> None:
    assert ranks(rank_of_own_code, 2, "log", timeout_s=120, group_s=60) == [[], []]


class Branches(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h * 2 if x.requires_grad else h)


def rank_of_an_input(rank: int, size: int) -> list[str]:
    side = Side(rank, size, [(0, 2), (1, 1)], "even")
    wrapped = side.wrap(Branches())
    found = []
    for step, needs in enumerate((False, rank == 0, False)):
        x, y = side.data(step)
        try:
            cross(wrapped(x.requires_grad_(needs)), y).backward()
        except StrettoError as exc:
            found.append(str(exc))
    return found


def test_an_input_that_needs_a_gradient_is_refused_where_forward_asks(
    ranks: Any,
) -> None:
    first, second = ranks(rank_of_an_input, 2, timeout_s=120, group_s=60)
    assert len(first) == len(second) == 1
    assert "reads whether a tensor needs a gradient" in first[0]
    assert "can't continue" in second[0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.ones(8).bool(), persistent=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h).masked_fill(~self.mask, -3.0).tanh()


class Checkpointed(nn.Module):
    """Runs masked code again in backward, and has a hook elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.masked, self.b = nn.Linear(6, 8), Masked(), nn.Linear(8, 4)
        self.b.register_forward_pre_hook(lambda _module, given: (given[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.masked, self.a(x), use_reentrant=False))

    def change(self, step: int) -> None:
        self.masked.mask.copy_(torch.arange(8) % 3 != step % 3)


class Replaced(nn.Module):
    """Its program puts another mask into a list in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.masks = [torch.ones(8)]
        self.rate = [1.0]
        self.get = operator.itemgetter(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh() * self.masks[0] * self.get(self.rate))

    def change(self, step: int) -> None:
        if step < 9:
            self.masks[0] = (torch.arange(8) % 2 != step % 2).double()
        elif step % 3 == 0:
            self.rate[0] = 1 + step / 10


@functools.lru_cache(maxsize=4)
def positions(size: int) -> torch.Tensor:
    return torch.arange(float(size)).cos()


class Positions(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + positions(h.shape[1])


class CachedInAHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.add, self.b = nn.Linear(6, 8), Positions(), nn.Linear(8, 4)
        self.add.register_forward_hook(lambda _module, _given, found: found * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.add(self.a(x)).tanh())

    def change(self, _step: int) -> None:
        pass


class Decides(nn.Module):
    """Reads values of buffers, which the program changes now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("times", torch.linspace(0, 1, 4))
        self.register_buffer("mask", torch.arange(8) < 5, persistent=False)
        self.register_buffer("signs", None, persistent=False)
        self.sizes = torch.tensor([3, 5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).tanh()
        for one, two in itertools.pairwise(self.times):
            h = h + float(two - one) * h.sin()
        if self.signs is None:
            self.signs = torch.arange(8) % 2
        h = h.clone()
        h[:, self.mask] *= float(self.signs.sum())
        return self.b(torch.cat(h.split(self.sizes.tolist(), 1)[::-1], 1))

    def change(self, step: int) -> None:
        if step == 4:
            self.times.data.mul_(2)
        if step == 7:
            self.times = self.times.flip(0)
        if step == 10:
            self.mask.logical_not_()
        if step == 13:
            self.sizes += torch.tensor([1, -1])


CHANGING = [Checkpointed, Replaced, CachedInAHook, Decides]


def trained_while_changing(kind: Any, side: Side) -> list[torch.Tensor]:
    positions.cache_clear()
    model = kind()
    wrapped = side.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(18):
        model.change(step)
        x, y = side.data(step)
        optimizer.zero_grad()
        cross(wrapped(x), y).backward()
        optimizer.step()
    return side.state(wrapped)


def rank_of_changing_models(rank: int, size: int) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    return {
        kind.__name__: worst_of(
            trained_while_changing(kind, Side(rank, size, [(0, 2), (1, 1)], "even")),
            trained_while_changing(kind, Alone()),
        )
        for kind in CHANGING
    }


def test_masks_that_change_and_tables_in_modules_with_hooks_train_as_one_process(
    ranks: Any,
) -> None:
    for found in ranks(rank_of_changing_models, 2, timeout_s=240, group_s=60):
        assert all(worst < 1e-9 for worst in found.values()), found


class Returns(nn.Module):
    """Applies its first layer again at the end if asked to, which joins its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x).tanh())
        return self.a(h) if self.again else h


def again(model: Returns) -> None:
    model.again = True


def replaces(model: Returns) -> None:
    model.b = nn.Linear(6, 6)


def rank_with_other_layers(rank: int, size: int, change: str) -> tuple[str, str]:
    model = Returns()
    side = Side(rank, size, [(0, 2), (0, 2)], "even")
    wrapped = side.wrap(model)
    wrapped(side.data(0)[0]).sum().backward()
    if rank == 1:
        globals()[change](model)
    try:
        wrapped(side.data(1)[0])
    except StrettoError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize("change", ["again", "replaces"])
def test_other_layers_on_one_rank_are_one_type_of_error_on_all(
    ranks: Any, change: str
) -> None:
    found = ranks(rank_with_other_layers, 2, change, timeout_s=120, group_s=60)
    assert {kind for kind, _ in found} == {"RankDisagreement"}, found
