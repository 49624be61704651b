"""Backward passes by rank: another number, an exception, an unknown weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from stretto.burst.checks.backward_use import BackwardUse
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Callable


class TwoRanks:
    """Stands for the ranks' names."""

    size = 2

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def name_all(self, ranks: Any) -> str:
        return f"rank {', '.join(map(str, ranks))}"


ERROR = ValueError("bad")
EVEN, UNEVEN = (0.5, 0.5), (0.25, 0.75)


def run(
    *events: Callable[[int, BackwardUse], Any],
) -> tuple[list[BackwardUse], list[str]]:
    """Let two ranks meet after these events; return them and why they stopped."""
    stopped: list[str] = []
    texts = ["", ""]
    uses = [
        BackwardUse(cast("Any", TwoRanks()), lambda _text: texts, stopped.append)
        for _ in range(2)
    ]
    for rank, use in enumerate(uses):
        use.follow(["a", "b"])
        use.holds_trained(holds=True)
        for event in events:
            event(rank, use)
        texts[rank] = use._error
    meet(uses)
    return uses, stopped


def meet(uses: list[BackwardUse]) -> None:
    rows = [use.next_values() for use in uses]
    for use in uses:
        use.require_equal(rows)


def use_alone(rank: int, use: BackwardUse, value: float = 1.0) -> None:
    grads = [(1, torch.full((3,), value * (rank + 1), dtype=torch.float64))]
    use.used_without_output(grads, is_known=False)


def fail(_rank: int, use: BackwardUse) -> None:
    use.failed(ERROR, had_ended=False)


RIGHT: list[list[Callable[[int, BackwardUse], Any]]] = [
    [],
    [lambda _rank, use: use.ended()],
    [fail],
    # Another model's hook raised: this one had ended.
    [lambda _rank, use: use.ended(), lambda _r, u: u.failed(ERROR, had_ended=True)],
    # Equal parts of all batches; parts that differ, but gradients that do not.
    [lambda _r, u: [u.forward_ended(UNEVEN), u.forward_ended(UNEVEN)], use_alone],
    [
        lambda _r, u: [u.forward_ended(UNEVEN), u.forward_ended(EVEN)],
        lambda _r, u: use_alone(0, u),
    ],
    [
        lambda _r, u: [u.forward_ended(UNEVEN), u.forward_ended(EVEN)],
        lambda _r, u: use_alone(0, u, float("nan")),
    ],
]

REFUSED: list[tuple[str, list[Callable[[int, BackwardUse], Any]]]] = [
    ("0 on rank 0, 1 on rank 1", [lambda rank, use: rank and use.ended()]),
    (
        "the backward of rank 1 (ValueError: bad), but not that of rank 0",
        [lambda rank, use: fail(rank, use) if rank else use.ended()],
    ),
    (
        "the backward of rank 1 (ValueError: bad), but not that of rank 0",
        [lambda rank, use: [use.ended(), rank and use.failed(ERROR, had_ended=True)]],
    ),
    (
        "first of 'b', are unknown",
        [lambda _r, u: [u.forward_ended(UNEVEN), u.forward_ended(EVEN)], use_alone],
    ),
    (
        "first of 'b', are unknown",
        [
            lambda _r, u: [u.forward_ended(UNEVEN), u.forward_ended(EVEN)],
            lambda rank, u: rank and use_alone(rank, u),
        ],
    ),
]


@pytest.mark.parametrize("index", range(len(RIGHT)))
def test_backward_passes_that_are_right_are_accepted(index: int) -> None:
    uses, stopped = run(*RIGHT[index])
    meet(uses)
    assert not stopped


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_other_backward_passes_are_refused(index: int) -> None:
    words, events = REFUSED[index]
    with pytest.raises(RankDisagreement) as found:
        run(*events)
    assert words in str(found.value)


def test_a_rank_that_holds_nothing_is_not_compared() -> None:
    uses = run()[0]
    uses[1].holds_trained(holds=False)
    meet(uses)
    uses[0].failed(ERROR, had_ended=False)
    meet(uses)


def test_gradients_before_the_first_forward_have_equal_weights() -> None:
    uses, _ = run(use_alone)
    with pytest.raises(RankDisagreement, match="weights of these gradients are"):
        uses[0].forward_ended(UNEVEN)
    uses[1].forward_ended(EVEN)
