"""Many steps with many plans: DDP's losses bit for bit, and nothing that grows."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.testing.soak import soak

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


def rank_soaks(rank: int, size: int) -> dict[str, Any]:
    return soak(rank, size, steps=100, every=5)


@pytest.mark.filterwarnings("ignore")
def test_losses_are_ddps_and_nothing_grows(ranks: Any) -> None:
    for found in ranks(rank_soaks, 2, timeout_s=170):
        assert found["plans"] == 20
        assert found["first difference"] is None
        # Plans repeat after a quarter of the steps: all lanes are open by then.
        assert found["sockets"][-1] <= found["sockets"][1]
        assert found["threads"][-1] <= found["threads"][1]
        assert found["resident_bytes"][-1] - found["resident_bytes"][1] < 8 * 2**20
