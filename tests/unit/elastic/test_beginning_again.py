"""Ranks that were started in place of others find that none of them is left."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.elastic import training
from stretto.members.view import Member, View

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)

DATA = [torch.full((3,), float(i)) for i in range(12)]


class KeeperOfANewcomer:
    """A client whose rank is alone, in the fifth view."""

    member, joins, drains = 7, True, False
    newest: View | None = None

    def start(self, address: str, **_: Any) -> None:
        self._address = address

    def next_view(self, after: int, *, timeout_s: float) -> View:
        del after, timeout_s
        member = Member(id=7, keeper=0, address=self._address)
        return View(generation=5, members=(member,))

    def entered(self, generation: int) -> None:
        del generation


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def trained(folder: Path | None, steps: int) -> tuple[int, list[Any]]:
    """Return the first step and the parameters after the last one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    run = training.Elastic(net, optimizer, batch="global:4", checkpoint=folder)
    first = run.steps
    for _ in run.epochs(3):
        for batch in run.batches(DATA):
            with run.step():
                run.model(batch).square().mean().backward()
                optimizer.step()
            if run.steps == steps:
                break
        if run.steps == steps:
            break
    if folder is not None:
        run.save()
    dist.destroy_process_group()
    return first, [parameter.tolist() for parameter in net.parameters()]


def test_the_newest_snapshot_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(None, 8)
    assert trained(tmp_path, 5)[0] == 0
    client = KeeperOfANewcomer()
    monkeypatch.setattr(training.MemberClient, "of_environment", lambda: client)
    assert trained(tmp_path, 8) == (5, expected[1])
    assert "all ranks that had trained were lost" in caplog.text


def test_without_snapshots_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = KeeperOfANewcomer()
    monkeypatch.setattr(training.MemberClient, "of_environment", lambda: client)
    assert trained(None, 2)[0] == 0
    assert "begins again from step 0, because no snapshot is left" in caplog.text
