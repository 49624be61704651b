"""Steps and waits that models mark for a background, and what marks leave unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto
import stretto.horovod.torch as hvd
from stretto import foreground_marks
from stretto.background.board import COMPUTING, FREE, WAITING, Board
from stretto.runtime import DistributedDataParallel
from support.burst_sides import Side, cross, net
from support.plans import plan_in_turn, reversed_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

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


def horovod_of(
    module: nn.Module, parameters: Iterable[nn.Parameter] | None = None, **options: Any
) -> Any:
    """Horovod's optimizer for a module, or for some of its parameters."""
    optimizer = torch.optim.SGD(parameters or module.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, **options)


def noted_in(noted: Noted, act: Callable[[], object]) -> list[str]:
    """What is noted while something is done."""
    noted.words = []
    act()
    return list(noted.words)


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def rank_marks_horovod(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    module, x = plain_net(), torch.randn(6, 4)
    noted = Noted()
    foreground_marks.set_current(noted)

    def backward() -> None:
        module(x).sum().backward()

    found: dict[str, Any] = {}
    optimizer = horovod_of(module)

    def step() -> None:
        backward()
        optimizer.step()

    found["steps"] = [noted_in(noted, step) for _ in range(3)]
    found["closure"] = noted_in(noted, lambda: optimizer.step(backward))
    with torch.no_grad():
        found["evaluation"] = noted_in(noted, lambda: module(x))
    found["backward"] = noted_in(noted, backward)
    found["synchronize"] = noted_in(noted, optimizer.synchronize)
    with optimizer.skip_synchronize():
        found["rest"] = noted_in(noted, optimizer.step)
    found["two passes"] = []
    del optimizer
    optimizer = horovod_of(module, backward_passes_per_step=2)
    for _ in range(2):
        found["two passes"].append(noted_in(noted, backward))
        found["two passes"].append(noted_in(noted, step))
    del optimizer
    optimizer = horovod_of(module, sparse_as_dense=True, num_groups=2)
    found["groups"] = [noted_in(noted, step) for _ in range(2)]
    used = list(module.parameters())[:2]
    del optimizer
    optimizer = horovod_of(module, used)
    found["no gradient"] = [noted_in(noted, optimizer.step) for _ in range(2)]
    backward()
    found["abandoned"] = noted_in(
        noted, lambda: optimizer.load_state_dict(optimizer.state_dict())
    )
    return found


def test_horovods_optimizer_marks_each_step_and_its_wait(ranks: Any) -> None:
    for found in ranks(rank_marks_horovod, 2):
        assert found == {
            "steps": [STEP] * 3,
            "closure": STEP,
            "evaluation": [],
            "backward": STEP[:1],
            "synchronize": STEP[1:],
            "rest": [],
            "two passes": [STEP[:1], STEP[1:]] * 2,
            "groups": [STEP] * 2,
            "no gradient": [STEP] * 2,
            "abandoned": STEP[1:],
        }


def rank_alone_with_horovod(rank: int, size: int) -> list[list[str]]:
    hvd.init()
    module, noted = plain_net(), Noted()
    foreground_marks.set_current(noted)
    optimizer = horovod_of(module)

    def step() -> None:
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return [noted_in(noted, step) for _ in range(3)]


def test_horovods_optimizer_marks_the_steps_of_one_rank(ranks: Any) -> None:
    assert ranks(rank_alone_with_horovod, 1) == [[["step"]] * 3]


def rank_fails_with_horovod(rank: int, size: int) -> list[list[str]]:
    """Ranks have gradients of other shapes."""
    hvd.init()
    noted = Noted()
    foreground_marks.set_current(noted)
    module = nn.Linear(4, 3 + rank)
    optimizer = horovod_of(module)

    def step() -> None:
        module(torch.ones(2, 4)).sum().backward()
        with pytest.raises(hvd.HorovodInternalError):
            optimizer.step()

    return [noted_in(noted, step)]


def test_a_step_of_horovod_that_fails_ends_its_wait(ranks: Any) -> None:
    assert ranks(rank_fails_with_horovod, 2) == [[STEP]] * 2


def rank_beside_a_background(
    rank: int, size: int, folder: str, kind: str
) -> dict[str, Any]:
    """Train alone, then with marks that are read; compare bit for bit."""
    os.environ |= {
        "STRETTO_RUNTIME_DIR": folder,
        "STRETTO_FOREGROUND": "cpu:{rank}",
        "RANK": str(rank),
    }
    if kind == "horovod":
        hvd.init()
    found = []
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    for reads in (False, True):
        if kind == "horovod":
            model = plain_net()
            optimizer = horovod_of(model)
        else:
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


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_the_named_foreground_writes_marks_only_while_they_are_read(
    ranks: Any, tmp_path: Any, kind: str
) -> None:
    for found in ranks(rank_beside_a_background, 2, str(tmp_path / "run"), kind):
        assert found["alone"] == 0
        assert found["beside"] == 15  # a step, a wait and its end
        # Of this model: all its ranks have the same count, whatever was trained before.
        assert found["steps"] == [i for i in range(1, 6) for _ in range(3)]
        assert found["equal"]


HOROVOD_SCRIPT = """
import torch
import stretto.horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4) * hvd.rank()).square().mean().backward()
    optimizer.step()
hvd.barrier()
"""


def test_run_marks_the_steps_of_a_horovod_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    boards = [Board(f"cpu:{rank}") for rank in range(2)]
    for board in boards:
        board.claim_background()
    script = tmp_path / "train.py"
    script.write_text(HOROVOD_SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stretto", "run", "--nproc-per-node", "2"),
            *("--foreground", "cpu:{local_rank}", str(script)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for board in boards:
        marks = board.marks_after(0)
        board.release_background()
        board.close()
        assert [(mark.step, mark.state) for mark in marks] == [
            (0, COMPUTING),  # it claims the device
            *((i, s) for i in range(1, 6) for s in (COMPUTING, WAITING, COMPUTING)),
            (0, FREE),
        ]
        waits = [mark.kind for mark in marks if mark.state == WAITING]
        assert waits == ["all-reduce"] * 5


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
            return sum(foreground._counts(source) for source in sources)

        assert steps_after(one, two, one, two) == 2
        assert steps_after(*[two] * 12) > 0  # the first has ended
        assert steps_after(two, one, two) == 2
        assert steps_after(None) == 1  # the loop marks its own steps from now on
        assert steps_after(two, one) == 0
    assert foreground_marks.current() is foreground_marks.NO_MARKS
