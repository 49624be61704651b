"""A capture is compared with a new recording of forward now and then."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.checks import recheck
from stretto.burst.checks.recheck import Recheck
from stretto.burst.graph import capture
from stretto.errors import StrettoError


class ReadsFile(nn.Module):
    """Forward reads a file, which no watch of values sees."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.table: torch.Tensor | None = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(3.0)
        word = Path(self.path).read_text()
        self.last = word
        h = self.a(x) + self.table
        if word == "other input":
            return self.b(x)
        if word == "unrecordable" and bool(h.sum() > 0):
            h = h * 2
        return self.b(h.sin() if word == "sin" else h.tanh())


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "word"
    path.write_text("tanh")
    return ReadsFile(path)


def write(model: ReadsFile, word: str) -> None:
    Path(model.path).write_text(word)


def made(model):
    return capture(model, (torch.randn(4, 3),)), Recheck(model)


@pytest.mark.parametrize("word", ["sin", "other input", "unrecordable"])
def test_a_change_that_no_value_shows_is_an_error_with_its_steps(model, word):
    graph, check = made(model)
    for step in range(6):
        check(graph, step)
    write(model, word)
    assert graph.outdated() is None
    for step in range(6, 8):
        check(graph, step)
    for step in range(8, 11):  # stays
        with pytest.raises(StrettoError, match="between 4 and 8: ") as found:
            check(graph, step)
        assert "test_recheck.py:" in str(found.value)


def test_an_unchanged_model_stays_as_it_is(model, monkeypatch):
    model(torch.randn(2, 3))
    graph, check = made(model)
    random.seed(3)
    torch.manual_seed(3)
    model.last = "the program's"
    before, drawn = dict(vars(model)), random.getstate()
    generator, weight = torch.get_rng_state(), model.a.weight
    recorded = []
    difference = type(graph).difference
    monkeypatch.setattr(
        type(graph), "difference", lambda g: (recorded.append(1), difference(g))[1]
    )
    for step in range(20):
        check(graph, step)
    assert len(recorded) == len(recheck._FIRST)
    assert random.getstate() == drawn
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(vars(model)[key] is value for key, value in before.items())
    assert model.a.weight is weight
    assert type(model.table) is torch.Tensor


def test_hooks_never_see_a_recording(model):
    graph, check = made(model)
    seen = []
    handle = model.a.register_forward_hook(lambda *_: seen.append(1))
    write(model, "sin")
    for step in range(20):
        check(graph, step)
    assert not seen
    handle.remove()
    check._is_due = True
    with pytest.raises(StrettoError, match="between 0 and 20"):
        check(graph, 20)


def test_a_replaced_forward_of_a_layer_runs_as_it_is(model):
    graph, check = made(model)
    model.a.forward = lambda x: functional.linear(x, model.a.weight) * 2
    assert graph.outdated() is None
    for step in range(5):
        check(graph, step)


def test_a_forward_that_was_never_recorded_again_is_left_alone(model, caplog):
    graph, check = made(model)
    write(model, "unrecordable")
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            check(graph, step)
    assert len([r for r in caplog.records if "recorded again" in r.message]) == 1


def test_later_recordings_take_a_hundredth_of_the_time(model, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(recheck.time, "monotonic", lambda: now[0])
    graph, check = made(model)
    difference, count = type(graph).difference, [0]

    def slow(self):
        count[0] += 1
        now[0] += 0.5
        return difference(self)

    monkeypatch.setattr(type(graph), "difference", slow)
    for step in range(50_000):
        check(graph, step)
        check.require_equal([check.next_values(), [0]])
        now[0] += 0.01
    assert 0.005 < (count[0] - len(recheck._FIRST)) * 0.5 / now[0] <= 0.01
