"""Ranks as threads over one store."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from stretto.errors import CommTimeout, RankDisagreement
from stretto.runtime.agreement import Agreement
from stretto.runtime.failure import FailureReporter
from stretto.runtime.presence import is_communication_error
from stretto.runtime.ranks import Ranks


def make_ranks(size: int, timeout_s: float = 20.0) -> list[Ranks]:
    store = dist.HashStore()
    return [
        Ranks(
            rank=rank,
            size=size,
            names=tuple(range(10, 10 + size)),
            store=store,
            timeout_s=timeout_s,
        )
        for rank in range(size)
    ]


def everywhere(size: int, function: Any) -> list[Any]:
    def safe(rank: int) -> Any:
        try:
            return function(rank)
        except (RankDisagreement, CommTimeout) as exc:
            return exc

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(safe, range(size)))


def test_equal_values_pass_again_and_again_and_leave_few_keys() -> None:
    ranks = make_ranks(3)
    agreements = [Agreement(r) for r in ranks]

    def meet(rank: int) -> None:
        for i in range(20):
            agreements[rank].require_same("meet", {"plan": str(i)})

    assert everywhere(3, meet) == [None] * 3
    assert ranks[0].store.num_keys() <= 9


def test_a_difference_is_reported_on_every_rank_with_both_values() -> None:
    agreements = [Agreement(r) for r in make_ranks(3)]
    found = everywhere(
        3,
        lambda rank: agreements[rank].require_same(
            "meet", {"plan": "left" if rank == 1 else "right"}
        ),
    )
    texts = {str(exc) for exc in found}
    assert all(isinstance(exc, RankDisagreement) for exc in found)
    assert len(texts) == 1
    text = texts.pop()
    assert "ranks 10, 12 reported right" in text
    assert "rank 11 reported left" in text


def test_a_different_torch_is_reported_before_a_different_model() -> None:
    agreements = [Agreement(r) for r in make_ranks(2)]
    found = everywhere(
        2,
        lambda rank: agreements[rank].require_same(
            "meet", {"model": str(rank), "torch": f"2.{rank}"}
        ),
    )
    assert all("PyTorch" in str(exc) for exc in found)


def test_one_ranks_trouble_is_reported_to_the_others() -> None:
    agreements = [Agreement(r) for r in make_ranks(2)]
    found = everywhere(
        2,
        lambda rank: agreements[rank].require_same(
            "meet", {"trouble": "no such plan"} if rank else {}
        ),
    )
    assert "rank 11 cannot continue: no such plan" in str(found[0])
    assert found[1] is True


def test_a_rank_that_does_not_come_is_named_at_the_timeout() -> None:
    ranks = make_ranks(3, timeout_s=0.3)
    agreements = [Agreement(r) for r in ranks]
    with pytest.raises(CommTimeout, match=r"rank 10 waited 0\.3 s for ranks 11, 12"):
        agreements[0].require_same("meet", {})


def test_who_comes_too_late_stops_as_those_did_who_had_waited() -> None:
    ranks = make_ranks(2, timeout_s=0.3)
    agreements = [Agreement(r) for r in ranks]
    with pytest.raises(CommTimeout, match="for rank 11 to meet"):
        agreements[0].require_same("meet", {})
    with pytest.raises(CommTimeout, match="rank 11 arrived after others had stopped"):
        agreements[1].require_same("meet", {})
    # The next meeting is everybody's again.
    assert everywhere(2, lambda rank: agreements[rank].require_same("go", {})) == [
        True,
        True,
    ]


def test_all_continue_or_all_stop_whenever_the_last_one_comes() -> None:
    outcomes = set()
    for trial in range(40):
        agreements = [Agreement(r) for r in make_ranks(2, timeout_s=0.02)]

        def meet(rank: int, late_s: float = 0.018 + trial * 2e-4) -> None:
            time.sleep(late_s if rank else 0.0)
            agreements[rank].require_same("meet", {})

        kinds = {type(outcome) for outcome in everywhere(2, meet)}
        assert len(kinds) == 1
        outcomes |= kinds
    assert outcomes <= {type(None), CommTimeout}


def test_a_store_that_is_gone_is_reported_as_such() -> None:
    class Gone:
        def set(self, *_: Any) -> None:
            raise RuntimeError("Broken pipe\nand a stack")

    agreement = Agreement(make_ranks(2)[0])
    vars(agreement)["_store"] = Gone()
    with pytest.raises(CommTimeout, match=r"rank 10 can't meet: the store.*is gone"):
        agreement.require_same("meet", {})


def test_a_roll_call_names_the_rank_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.runtime.failure._ROLL_CALL_S", 0.5)
    closed: list[int] = []
    ranks = make_ranks(4)
    desks = [FailureReporter(r, lambda rank=r.rank: closed.append(rank)) for r in ranks]
    cause = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    def fail(rank: int) -> str:
        if rank == 2:
            return ""
        first = desks[rank].report(f"the all-reduce of bucket {rank}", cause)
        assert desks[rank].report("another", cause) is first
        assert first.__cause__ is cause
        return str(first)

    for rank, text in enumerate(everywhere(4, fail)):
        if rank != 2:
            assert text.startswith(f"rank {10 + rank}: the all-reduce of bucket {rank}")
            assert "rank 12 is gone or stuck" in text
    assert sorted(closed) == [0, 1, 3]


def test_only_the_transports_errors_count_as_communication() -> None:
    assert is_communication_error(
        RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:5] Read error")
    )
    assert not is_communication_error(RuntimeError("shapes can't be multiplied"))


def test_a_value_that_may_differ_is_reported_and_refuses_no_rank() -> None:
    agreements = [Agreement(r) for r in make_ranks(2)]
    for names, same in ((("a", "a"), True), (("a", "b"), False)):
        found = everywhere(
            2,
            lambda rank, names=names: agreements[rank].require_same(
                "meet", {"plan": "no plan", "names": names[rank]}, may_differ="names"
            ),
        )
        assert found == [same, same]


def test_a_rank_that_missed_a_model_meets_the_others_at_their_next() -> None:
    ranks = make_ranks(2, timeout_s=0.3)
    with pytest.raises(CommTimeout):
        Agreement(ranks[0]).require_same("meet", {})
    ranks = [dataclasses.replace(each, timeout_s=20.0) for each in ranks]
    agreements = [Agreement(each) for each in ranks]
    found = everywhere(2, lambda rank: agreements[rank].require_same("go", {}))
    assert found == [True, True]


def test_a_rank_that_missed_a_model_counts_as_the_others_from_then_on() -> None:
    ranks = make_ranks(2, timeout_s=0.3)
    with pytest.raises(CommTimeout):
        Agreement(ranks[0]).require_same("meet", {})
    ranks = [dataclasses.replace(each, timeout_s=20.0) for each in ranks]
    first = [Agreement(each) for each in ranks]
    everywhere(2, lambda rank: first[rank].require_same("go", {}))
    assert Agreement(ranks[0]).serial == Agreement(ranks[1]).serial
