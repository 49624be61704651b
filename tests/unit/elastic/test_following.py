"""What a rank does with a view that comes while it follows another one."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.elastic import training
from stretto.members.view import Member, View

if TYPE_CHECKING:
    from collections.abc import Iterator


class Followed(Exception):
    """The rank waits for a view after the first one."""


class KeeperOfTwoViews:
    """A client whose second view comes before the first one is entered."""

    member, joins, drains = 0, False, False

    def __init__(self) -> None:
        self.newest: View | None = None
        self.address = ""
        self._on_view: Any = None

    def start(self, address: str, *, on_view: Any, **_: Any) -> None:
        self.address, self._on_view = address, on_view

    def next_view(self, after: int, *, timeout_s: float) -> View:
        del timeout_s
        if after:
            raise Followed
        self.newest = self._view(1, 0)
        return self.newest

    def entered(self, generation: int) -> None:
        del generation
        self.newest = self._view(2, 0, 1)
        self._thread = threading.Thread(target=self._on_view, args=(self.newest,))
        self._thread.start()
        group = self._on_view.__self__._group
        while not group.has_ended:  # it continues until the group is built
            time.sleep(0.001)

    def _view(self, generation: int, *ids: int) -> View:
        members = tuple(Member(id=i, keeper=0, address=self.address) for i in ids)
        return View(generation=generation, members=members)


class KeeperOfOneView(KeeperOfTwoViews):
    """A client that ends its rank's only membership."""

    def entered(self, generation: int) -> None:
        self._thread = threading.Thread(
            target=self._on_view.__self__._group.end, args=(generation,)
        )
        self._thread.start()


pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def keeper(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[KeeperOfTwoViews]:
    client: KeeperOfTwoViews = getattr(request, "param", KeeperOfTwoViews)()
    monkeypatch.setattr(training.MemberClient, "of_environment", lambda: client)
    before = signal.getsignal(signal.SIGTERM)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield client
    client._thread.join()
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("keeper", [KeeperOfTwoViews, KeeperOfOneView], indirect=True)
def test_a_rank_alone_waits_for_the_next_view(keeper: KeeperOfTwoViews) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = training.Elastic(net, optimizer, batch="global:2")

    def train() -> None:
        for batch in run.batches([torch.ones(2)] * 8):
            with run.step():
                run.model(batch).sum().backward()
                optimizer.step()
            keeper._thread.join()

    with pytest.raises(Followed):
        train()
