"""What a program reads between a backward and the next forward."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

from stretto.runtime.forward import other_threads, steps
from stretto.runtime.forward.lazy import LazyGradient
from stretto.runtime.forward.pending import PendingParameter
from stretto.runtime.forward.reads import ReadWatch, shown_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.runtime.forward.reads import ReadsReport

STEPS = 4


class Program:
    """A model that trains for some steps, watched or not."""

    def __init__(self, *, watched: bool, poisons: bool = True) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.seen: set[str] = set()
        self.watch = None
        if watched:
            table = list(self.net.named_parameters())
            self.watch = ReadWatch(self.net, table, seen=self.seen, poisons=poisons)

    def forward(self) -> torch.Tensor:
        if self.watch is not None:
            self.watch.begin_forward()
        out: torch.Tensor = self.net(torch.ones(3, 4))
        if self.watch is not None:
            self.watch.end_forward()
        return out

    def train(self, before: Any = None, after: Any = None, start: int = 0) -> None:
        for step in range(start, start + STEPS):
            self.optimizer.zero_grad()
            self.forward().square().mean().backward()
            if self.watch is not None:
                self.watch.backward_ended()
            if before is not None:
                before(self, step)
            self.optimizer.step()
            if after is not None:
                after(self, step)
        self.forward()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    # Other tests of this process may have left what prevents overlap.
    monkeypatch.setattr(steps, "new_reader", lambda: None)
    monkeypatch.setattr(steps, "other_thread", lambda: None)
    monkeypatch.setattr(other_threads, "other_thread", lambda: None)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(torch_optimizer, name, OrderedDict())
    program = Program(watched=True)
    yield program
    assert program.watch is not None
    program.watch.release()
    assert not steps._handles
    assert all(type(p) is nn.Parameter for p in program.net.parameters())


def report_of(program: Program) -> ReadsReport:
    assert program.watch is not None
    return program.watch.report()


def clip(program: Program, _step: int) -> None:
    nn.utils.clip_grad_norm_(program.net.parameters(), 0.5)


def average(program: Program, _step: int) -> None:
    program.net[1].weight.detach().clone()


def write(program: Program, _step: int) -> None:
    with torch.no_grad():
        program.net[0].weight.mul_(0.9)


def evaluate(program: Program, _step: int) -> None:
    with torch.no_grad():
        program.net(torch.ones(1, 4))


def zero(program: Program, _step: int) -> None:
    program.optimizer.zero_grad(set_to_none=False)


def twice(program: Program, _step: int) -> None:
    program.optimizer.step()


def keep(program: Program, _step: int) -> None:
    program.kept = [p.grad for p in program.net.parameters()]  # type: ignore[attr-defined]


def again(program: Program, _step: int) -> None:
    program.net(torch.ones(2, 4)).sum().backward()


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "clip": (clip, None),
    "average": (None, average),
    "write": (None, write),
    "evaluate": (None, evaluate),
    "zero": (None, zero),
    "twice": (None, twice),
    "keep": (keep, None),
    "accumulate": (again, None),
    "everything": (lambda p, s: (clip(p, s), again(p, s)), write),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_watching_changes_no_value(name: str, watched: Program) -> None:
    plain = Program(watched=False)
    for program in (plain, watched):
        program.train(*PROGRAMS[name])
    pairs = zip(plain.values(), watched.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_plain_program_lets_steps_wait(watched: Program) -> None:
    watched.train()
    assert report_of(watched) == {"prevents": None, "early": [], "reader": None}


def test_reads_of_forward_show(watched: Program) -> None:
    watched.train()
    assert watched.seen == {name for name, _ in watched.net.named_parameters()}


def test_the_reader_of_gradients_is_named(watched: Program) -> None:
    watched.train(clip)
    line = clip.__code__.co_firstlineno + 1
    assert report_of(watched)["prevents"] == (
        f"{shown_path(__file__)}:{line} reads gradients before optimizer.step() "
        "(clip_grad_norm_), so all must have arrived there"
    )


def test_clipping_by_parts_reads_no_gradient(watched: Program) -> None:
    assert watched.watch is not None
    watched.watch._by_parts = True
    plain = Program(watched=False)
    for program in (plain, watched):
        program.train(clip)
    assert report_of(watched) == {"prevents": None, "early": [], "reader": None}
    pairs = zip(plain.values(), watched.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_reader_of_parameters_is_named(watched: Program) -> None:
    watched.train(None, average)
    found = report_of(watched)
    line = average.__code__.co_firstlineno + 1
    assert found["prevents"] is None
    assert found["early"] == ["1.weight"]
    assert found["reader"] == (
        f"{shown_path(__file__)}:{line} reads parameters between optimizer.step() and "
        "the next forward"
    )


def test_an_evaluation_reads_all_parameters(watched: Program) -> None:
    watched.train(None, evaluate)
    assert len(report_of(watched)["early"]) == 6


def test_gradients_that_are_set_to_zero_are_read(watched: Program) -> None:
    watched.train(None, zero)
    found = report_of(watched)
    assert len(found["early"]) == 6
    assert "reads gradients between optimizer.step() and the" in str(found["reader"])


def test_steps_of_two_optimizers_may_wait(watched: Program) -> None:
    *first, weight, bias = watched.net.parameters()
    watched.optimizer = torch.optim.AdamW(first)
    second = torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9)
    watched.train(None, lambda *_: (second.step(), second.zero_grad()))
    assert report_of(watched) == {"prevents": None, "early": [], "reader": None}
    assert len(watched.seen) == 6


def test_what_is_read_in_few_steps_prevents_nothing(watched: Program) -> None:
    def seldom(function: Callable[..., None]) -> Callable[..., None]:
        return lambda program, step: None if step % STEPS else function(program, step)

    watched.train(seldom(clip), seldom(average))
    watched.train(seldom(clip), seldom(average), start=STEPS)
    assert report_of(watched) == {"prevents": None, "early": [], "reader": None}


def test_an_optimizer_that_cannot_be_divided_is_named(watched: Program) -> None:
    watched.optimizer = torch.optim.LBFGS(watched.net.parameters())
    watched.optimizer.step = lambda: torch.optim.LBFGS.step(
        watched.optimizer, lambda: watched.net(torch.ones(1, 4)).sum()
    )
    watched.train()
    why = report_of(watched)["prevents"]
    assert why is not None
    assert why.startswith("torch.optim.lbfgs.LBFGS is not known to treat")


def test_a_program_without_an_optimizer_is_prevented(watched: Program) -> None:
    for _ in range(STEPS):
        watched.forward().square().mean().backward()
        assert watched.watch is not None
        watched.watch.backward_ended()
    assert "no optimizer's step was seen" in str(report_of(watched)["prevents"])


def test_gradients_and_parameters_are_watched_in_between(watched: Program) -> None:
    kinds: list[set[Any]] = []

    def look(program: Program, _step: int) -> None:
        kinds.append({type(p.grad) for p in program.net.parameters()})

    def look_after(program: Program, _step: int) -> None:
        kinds.append({type(p) for p in program.net.parameters()})

    watched.train(look, look_after)
    assert kinds[:2] == [{LazyGradient}, {nn.Parameter}]  # the first step makes states
    assert kinds[2:4] == [{LazyGradient}, {PendingParameter}]


def test_an_installed_file_is_shown_from_its_package_on() -> None:
    assert shown_path("/x/lib/python3/site-packages/a/b.py") == "a/b.py"
    assert shown_path("/elsewhere/train.py") == "train.py"
