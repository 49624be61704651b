"""The rank that is named when a lane cannot be opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stretto.process_identity import ProcessState
from stretto.runtime.backends import gloo
from stretto.runtime.ranks import Ranks

if TYPE_CHECKING:
    import pytest


def test_a_stopped_rank_is_named_and_not_the_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "_LATE_S", 0.0)
    states = [ProcessState.RUNS, ProcessState.RUNS, ProcessState.STOPPED]
    presence: Any = SimpleNamespace(state=states.__getitem__)
    store = dist.HashStore()
    ranks = Ranks(
        rank=1,
        size=3,
        names=(0, 1, 2),
        store=store,
        timeout_s=5.0,
        presence=presence,
    )
    lanes = gloo.GlooLanes(
        ranks=ranks, store_for=lambda _: store, end_requests=None, notes=store
    )
    cause = dist.DistStoreError("wait timeout after 5000ms, keys: /lanes/2/1/0/0")
    loss = lanes._loss(2, cause)
    assert "rank 1 can't open lane 2: rank 2 is stuck" in str(loss)
