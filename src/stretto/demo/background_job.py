"""A background job of the demo: ``python -m stretto.demo.background_job DEVICE``.

It trains a small network on random samples, one lease for each step, while the rank
that started it asks for that. With a second argument, seconds, each task sleeps that
long instead: it computes on an emulated device, which no other job shares.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from stretto.background.board import Board
from stretto.background.lease import Background
from stretto.errors import BackgroundError

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32
_START_S = 120.0
"""How long a job may take to start; a busy machine needs a minute."""

_IDLE_S = 0.5
_LEASE_S = 0.2


@final
class BackgroundJob:
    """The rank's side: a background job in a process of its own."""

    def __init__(self, device: str, *, task_s: float | None = None) -> None:
        """Start the job; it waits until `run` is called.

        Args:
            device: name of the device.
            task_s: sleep that long in each task instead of training.
        """
        more = [] if task_s is None else [str(task_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, device, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.isolation = self._started()
        """How its processor time is kept behind the foreground's."""
        self.pid = self._process.pid
        self.statistics: dict[str, Any] = {}
        """Its last `BackgroundStatistics`, after `close`; empty if it was killed."""

        self._board = Board(device)

    def _started(self) -> str:
        """Return its first line, once it has claimed the device.

        Raises:
            BackgroundError: it has ended, or has not answered in time.
        """
        answer = self._process.stdout
        assert answer is not None  # noqa: S101
        answers = select.select([answer], [], [], _START_S)[0]
        if answers and (line := answer.readline().strip()):
            return line
        if not answers:
            self._process.kill()
        self._process.communicate()
        raise BackgroundError(
            f"a background job ended with status {self._process.returncode} before it "
            "had its device; see its own message above"
            if answers
            else f"a background job has not started within {_START_S:g} s"
        )

    def _ask(self, word: str) -> None:
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def run(self) -> None:
        """Let it train."""
        self._ask("run")

    def stop(self) -> None:
        """Let it wait."""
        self._ask("stop")

    def progress(self) -> tuple[int, float]:
        """Return its training steps so far, and the time of this count in seconds.

        Read from the board: the job itself may get no processor time to answer.
        """
        found = self._board.background()
        return (0 if found is None else found[1].tasks), time.perf_counter()

    def close(self) -> None:
        """End it."""
        self._board.close()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(10.0)
            assert self._process.stdout is not None  # noqa: S101
            self.statistics = json.loads(self._process.stdout.readline() or "{}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, 10),
    )


def _training() -> Callable[[], None]:
    """Return a training step."""
    torch.set_num_threads(1)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(BATCH, 512, generator=draw)
        y = x[:, :10].argmax(1)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _answer(line: str) -> None:
    """Write a line to the rank, unless it has ended, for instance by Ctrl-C."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    """Run tasks while asked to, until the input ends."""
    task: Callable[[], None]
    if len(sys.argv) > 2:
        task = functools.partial(time.sleep, float(sys.argv[2]))
    else:
        task = _training()
    runs = False
    with Background(sys.argv[1]) as background:
        _answer(str(background.isolation))
        while True:
            if select.select([sys.stdin], [], [], 0.0 if runs else _IDLE_S)[0]:
                word = sys.stdin.readline().strip()
                if not word:
                    _answer(json.dumps(asdict(background.statistics)))
                    return
                runs = word == "run"
            if not runs or not background.wait(timeout_s=_LEASE_S):
                continue
            task()
            background.end_task()


if __name__ == "__main__":
    main()
