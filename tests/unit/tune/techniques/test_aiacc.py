"""The bandit's score against its formula, and what it does on known histories."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.tune.techniques.aiacc import Bandit

ARMS = ("a", "b", "c")


def test_unused_arms_come_first_in_their_order() -> None:
    bandit = Bandit(ARMS)
    seen = []
    for _ in ARMS:
        arm = bandit.choose()
        seen.append(arm)
        bandit.tell(arm, improved=False)
    assert seen == list(ARMS)


@given(
    history=st.lists(st.tuples(st.sampled_from(ARMS), st.booleans()), max_size=60),
    window=st.integers(1, 40),
    exploration=st.floats(0, 2),
)
def test_scores_are_the_published_formula(
    history: list[tuple[str, bool]], window: int, exploration: float
) -> None:
    bandit = Bandit(ARMS, window=window, exploration=exploration)
    for arm, improved in history:
        bandit.tell(arm, improved=improved)
    kept = history[-window:]
    for arm in ARMS:
        mine = [improved for name, improved in kept if name == arm]
        if not mine:
            assert bandit.score(arm) == math.inf
            continue
        # The area, drawn: each success lifts the curve from its place to the end; read
        # backwards in time, as OpenTuner does, so that late successes weigh more.
        heights, height = [], 0
        for improved in reversed(mine):
            heights.append(0)
            if improved:
                height += 1
            heights[-1] = height
        # Sum of i over successes equals the area with time running backwards.
        assert sum(heights) == sum(i for i, s in enumerate(mine, start=1) if s)
        credit = sum(heights) / (len(mine) * (len(mine) + 1) / 2)
        bonus = exploration * math.sqrt(2 * math.log2(len(kept)) / len(mine))
        assert bandit.score(arm) == pytest.approx(credit + bonus)


def test_an_arm_that_brings_more_is_used_more_and_a_dead_one_still_now_and_then() -> (
    None
):
    bandit = Bandit(ARMS, window=30)
    uses = dict.fromkeys(ARMS, 0)
    for turn in range(300):
        arm = bandit.choose()
        uses[arm] += 1
        bandit.tell(arm, improved=arm == "b" and turn % 2 == 0)
    assert uses["b"] > 2 * max(uses["a"], uses["c"])
    assert min(uses.values()) > 5


def test_what_it_learnt_is_forgotten_with_the_window() -> None:
    bandit = Bandit(("a", "b"), window=10, exploration=0.0)
    for _ in range(5):
        bandit.tell("a", improved=True)
        bandit.tell("b", improved=False)
    assert bandit.choose() == "a"
    for _ in range(5):
        bandit.tell("a", improved=False)
        bandit.tell("b", improved=True)
    assert bandit.choose() == "b"


def test_closed_arms_are_not_chosen() -> None:
    bandit = Bandit(ARMS)
    assert bandit.choose(["c"]) == "c"
    with pytest.raises(SpecError, match="no arm to choose from"):
        bandit.choose([])


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(SpecError, match="arms must be different"):
        Bandit(("a", "a"))
    with pytest.raises(SpecError, match="window must be >= 1, got 0"):
        Bandit(ARMS, window=0)
    with pytest.raises(SpecError, match="exploration must be >= 0, got nan"):
        Bandit(ARMS, exploration=math.nan)
