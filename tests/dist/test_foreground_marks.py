"""Steps and waits that models mark for a background, and what marks leave unchanged."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import foreground_marks
from stretto.background.board import Board
from stretto.runtime import DistributedDataParallel
from support.burst_sides import Side, cross, net
from support.plans import plan_in_turn, reversed_names

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class Noted:
    """Marks as words."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def step(self, source: object = None) -> None:
        self.words.append("step")

    def begin_wait(self, what: str, *, uses_device: bool = False) -> None:
        self.words.append(f"wait {what}")

    def end_wait(self) -> None:
        self.words.append("end")


STEP = ["step", "wait all-reduce", "end"]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    if kind == "negotiated":
        return DistributedDataParallel(module, order="negotiated")
    plan = None
    if kind == "plan":
        names = reversed_names(module)
        plan = plan_in_turn([names[:2], names[2:]], lanes=2)
    return DistributedDataParallel(module, plan=plan)


def rank_marks_ddp(rank: int, size: int, kind: str) -> list[list[str]]:
    model = model_of(kind)
    x = torch.randn(6, 4)
    found = []
    noted = Noted()
    foreground_marks.set_current(noted)

    def take() -> None:
        found.append(noted.words)
        noted.words = []

    for _ in range(3):
        model(x).sum().backward()
        take()
    if kind != "negotiated":  # two micro-steps are one step
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        take()
    with torch.no_grad():
        model(x)
    take()
    model.eval()
    model(x)  # a forward without backward begins the next step
    model(x).sum().backward()
    take()
    return found


@pytest.mark.parametrize("kind", ["rule", "plan", "negotiated"])
def test_ddp_marks_each_step_and_its_wait_for_gradients(ranks: Any, kind: str) -> None:
    steps = 3 if kind == "negotiated" else 4
    for found in ranks(rank_marks_ddp, 2, kind):
        assert found == [STEP] * steps + [[], STEP]


def rank_marks_burst(rank: int, size: int) -> list[list[str]]:
    torch.set_default_dtype(torch.float64)
    side = Side(rank, size, [(0, 2), (0, 1), (0, 2)], "even")
    noted = Noted()
    foreground_marks.set_current(noted)
    _, wrapped, x, y = side.start(net())
    found = []
    for _ in range(3):
        noted.words = []
        cross(wrapped(x), y).backward()
        found.append(noted.words)
    noted.words = []
    with torch.no_grad():
        wrapped(x)
    found.append(noted.words)
    return found


def test_burst_marks_each_step_and_every_wait(ranks: Any) -> None:
    for found in ranks(rank_marks_burst, 2):
        for words in found[:3]:
            assert words[0] == "step"
            assert words.count("step") == 1
            waits = [w.removeprefix("wait ") for w in words if w.startswith("wait ")]
            assert words.count("end") == len(waits)
            assert "redistribution" in waits
        assert "step" not in found[3]


def rank_beside_a_background(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Train alone, then with marks that are read; compare bit for bit."""
    os.environ |= {
        "STRETTO_RUNTIME_DIR": folder,
        "STRETTO_FOREGROUND": "cpu:{rank}",
        "RANK": str(rank),
    }
    found = []
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    for reads in (False, True):
        model = model_of("rule")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        board = Board(f"cpu:{rank}")
        if reads:
            board.claim_background()
        before = board.last_number
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append((board.last_number - before, list(model.state_dict().values())))
        steps = [mark.step for mark in board.marks_after(before)]
        board.release_background()
        board.close()
    equal = all(map(torch.equal, found[0][1], found[1][1]))
    return {"alone": found[0][0], "beside": found[1][0], "steps": steps, "equal": equal}


def test_the_named_foreground_writes_marks_only_while_they_are_read(
    ranks: Any, tmp_path: Any
) -> None:
    for found in ranks(rank_beside_a_background, 2, str(tmp_path / "run")):
        assert found["alone"] == 0
        assert found["beside"] == 15  # a step, a wait and its end
        assert found["steps"] == [i for i in range(6, 11) for _ in range(3)]
        assert found["equal"]


def rank_without_a_device(rank: int, size: int, folder: str) -> float:
    """All ranks name one device: one gets it, the others train without."""
    os.environ |= {"STRETTO_RUNTIME_DIR": folder, "STRETTO_FOREGROUND": "cpu:0"}
    model = model_of("rule")
    model(torch.ones(2, 4)).sum().backward()
    return float(next(model.parameters()).grad.sum())


def test_a_device_that_cannot_be_had_ends_no_training(
    ranks: Any, tmp_path: Any
) -> None:
    one, two = ranks(rank_without_a_device, 2, str(tmp_path / "run"))
    assert one == two


def test_the_first_models_steps_count(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    one, two = foreground_marks.StepMarker(), foreground_marks.StepMarker()
    with stretto.Foreground("cpu:5") as foreground:
        assert foreground_marks.current() is foreground

        def steps_after(*sources: object) -> int:
            before = foreground._step
            for source in sources:
                foreground.step(source)
            return foreground._step - before

        assert steps_after(one, two, one, two) == 2
        assert steps_after(*[two] * 12) > 0  # the first has ended
        assert steps_after(two, one, two) == 2
        assert steps_after(None) == 1  # the loop marks its own steps from now on
        assert steps_after(two, one) == 0
    assert foreground_marks.current() is foreground_marks.NO_MARKS
