"""Values and small parts of the negotiated engine."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.runtime.negotiated import reductions
from stretto.runtime.negotiated.api import EngineOptions
from stretto.runtime.negotiated.progress import Pace
from stretto.runtime.negotiated.requests import (
    DTYPES,
    CollectiveKind,
    Op,
    Request,
    decode,
    encode,
)
from stretto.runtime.negotiated.stable_order import OrderWatch, common_order


@given(
    st.builds(
        Request,
        name=st.text(min_size=1),
        kind=st.sampled_from(
            [
                CollectiveKind.ALLREDUCE,
                CollectiveKind.ALLGATHER,
                CollectiveKind.ALLTOALL,
            ]
        ),
        dtype=st.sampled_from(sorted(set(DTYPES) - {"bool"})),
        shape=st.lists(st.integers(0, 9)).map(tuple),
        op=st.sampled_from(Op),
        prescale=st.floats(allow_nan=False, allow_infinity=False),
        rows=st.integers(0, 9),
        splits=st.lists(st.integers(0, 9)).map(tuple),
        group=st.text(),
    )
)
def test_a_request_survives_its_encoding(request: Request) -> None:
    assert decode(encode(request)) == request
    outer = Request(name="s", kind=CollectiveKind.REGISTER, members=(request,))
    assert decode(encode(outer)) == outer


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"dtype": "complex64"}, "dtype must be one of"),
        ({"kind": CollectiveKind.REDUCESCATTER}, "a scalar has no first dimension"),
        ({"prescale": float("nan")}, "must be finite"),
        ({"dtype": "bool", "op": Op.AVERAGE}, "booleans have no average"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused(values: dict, words: str) -> None:
    plain = {"name": "x", "kind": CollectiveKind.ALLREDUCE, "dtype": "float32"}
    with pytest.raises(SpecError, match=words):
        Request(**{**plain, **values})


@pytest.mark.parametrize(
    "values",
    [{"lanes": 0}, {"unit_bytes": 0}, {"cycle_s": -1.0}, {"stall_s": 0.0}],
)
def test_options_that_break_a_rule_are_refused(values: dict) -> None:
    with pytest.raises(SpecError, match=next(iter(values))):
        EngineOptions(**values)


def test_an_order_is_stable_after_equal_steps_and_not_after_another() -> None:
    watch = OrderWatch(3)
    found = [watch.end_step([0, 1], in_use=False) for _ in range(4)]
    assert found == [False, False, True, True]
    assert watch.end_step([0, 1], in_use=True)
    assert not watch.end_step([1, 0], in_use=True)
    assert not watch.end_step([1, 0], in_use=False)
    assert watch.end_step([1, 0], in_use=False)
    assert not any(OrderWatch(0).end_step([0], in_use=False) for _ in range(9))


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**32))
def test_the_common_order_is_one_order_and_the_same_for_equal_ranks(
    count: int, size: int, seed: int
) -> None:
    chance = random.Random(seed)
    orders = [chance.sample(range(count), count) for _ in range(size)]
    assert sorted(common_order(orders)) == list(range(count))
    assert common_order([orders[0]] * size) == tuple(orders[0])


def test_barren_rounds_come_less_often_and_news_at_once() -> None:
    pace = Pace(0.001)
    assert pace.due_s(news=True) < 0.0
    now_s, rounds = 0.0, 0
    pace.begin(now_s)
    pace.end(now_s, launched=True)
    while now_s < 1.0:
        now_s = max(now_s, pace.due_s(news=False))
        pace.begin(now_s)
        pace.end(now_s, launched=False)
        rounds += 1
    assert rounds < 90
    assert pace.due_s(news=False) == pytest.approx(now_s + 0.02)
    assert pace.due_s(news=True) == pytest.approx(now_s + 0.001)


def test_scaling_is_done_in_wide_types() -> None:
    halves = torch.full((3,), 60000.0, dtype=torch.float16)
    reductions.scale(halves, 0.5)
    assert halves.tolist() == [30000.0] * 3
    whole = torch.tensor([2**53 - 1, -3, 3])
    reductions.scale(whole, 0.5)
    assert whole.tolist() == [2**52 - 1, -1, 1]
    average = Request(
        name="x",
        kind=CollectiveKind.ALLREDUCE,
        dtype="int32",
        shape=(2,),
        op=Op.AVERAGE,
    )
    values = torch.tensor([-7, 7], dtype=torch.int32)
    reductions.finish(values, average, 2)
    assert values.tolist() == [-3, 3]


@given(st.integers(0, 40), st.integers(1, 9))
def test_earlier_ranks_get_one_more_row(rows: int, size: int) -> None:
    bounds = reductions.row_bounds(rows, size)
    shares = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(shares) == rows
    assert len(shares) == size
    assert sorted(shares, reverse=True) == shares
    assert max(shares) - min(shares) <= 1
