"""Which steps of a trial count."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from stretto import planners
from stretto.schema import codec
from stretto.tune.online_search import OnlineSearch
from stretto.tune.options import TuneOptions

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload

STEPS = 3


class Sync:
    """Rank 1 of a search, which gets plans from rank 0."""

    rank = 1

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def broadcast_object(self, _value: Any) -> Any:
        return codec.encode(self.plan), False, STEPS


@pytest.mark.parametrize(
    ("overlap", "changes", "uncounted"),
    [
        ("backward", True, 1),
        ("forward", True, 2),
        ("backward", False, 0),
        ("forward", False, 0),
    ],
)
def test_the_first_steps_after_a_change_do_not_count(
    workload: Workload, cluster: Cluster, overlap: str, changes: bool, uncounted: int
) -> None:
    """A forward plan's second step has nothing to wait for in its forward."""
    plan = replace(planners.get("ddp").plan(workload, cluster), overlap=overlap)
    model = SimpleNamespace(_own_plan=None if changes else plan)
    search = OnlineSearch(
        cast("Any", model),
        cast("Any", Sync(plan)),
        calibrated=None,
        starts=(),
        options=TuneOptions(),
        record=lambda *_: None,
        change=lambda _plan: None,
    )
    assert search.begin()
    assert search.ahead == STEPS + uncounted
