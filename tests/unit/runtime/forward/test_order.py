"""The planned order of launches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.runtime.forward.order import LaunchOrder


@given(order=st.permutations(range(8)))
def test_buckets_launch_in_the_planned_order_as_soon_as_they_can(
    order: list[int],
) -> None:
    launched: list[int] = []
    launches = LaunchOrder(order)
    for ready in range(8):
        launches.note(ready, lambda ready=ready: launched.append(ready))
        possible = next((i for i, b in enumerate(order) if b > ready), 8)
        assert launched == order[:possible]


def test_a_step_that_was_cut_short_leaves_nothing() -> None:
    launched: list[str] = []
    launches = LaunchOrder([1, 0])
    launches.note(0, lambda: launched.append("old"))
    launches.reset()
    launches.note(0, lambda: launched.append("0"))
    launches.note(1, lambda: launched.append("1"))
    assert launched == ["1", "0"]
