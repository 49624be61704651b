"""Arrays reduced over real Gloo connections, ranks being threads of one process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stretto.errors import RankDisagreement, SpecError, StrettoError
from stretto.runtime.exchange import ArrayRow, Exchange
from stretto.runtime.negotiated import (
    CollectiveKind,
    Engine,
    EngineOptions,
    Op,
    Request,
)
from stretto.runtime.ranks import Ranks
from stretto.runtime.reduction_rounds import RoundRows, Rounds

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def on_ranks(program: Callable[[Engine], Any], size: int = 2) -> list[Any]:
    """What each rank's program returned, or the error that it raised."""
    store = dist.HashStore()
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        place = Ranks(
            rank=rank,
            size=size,
            names=tuple(range(size)),
            store=store,
            timeout_s=30.0,
        )
        try:
            engine = Engine(place, options=EngineOptions(lanes=2))
            try:
                found[rank] = program(engine)
            finally:
                engine.close()
        except Exception as exc:  # noqa: BLE001
            found[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


def rows_of(*arrays: Any) -> list[ArrayRow]:
    return [
        ArrayRow(name=f"{i}", shape=array.shape, dtype=array.dtype)
        for i, array in enumerate(arrays)
    ]


def test_opposite_orders_give_the_ranks_mean_in_every_step():
    def program(engine: Engine) -> bool:
        exchange = Exchange(engine, "mean", rows_of(*[np.zeros(33, "f4")] * 5))
        equal = True
        for step in range(12):
            order = range(5) if engine.rank else reversed(range(5))
            for i in order:
                exchange.submit(i, np.full(33, 10 * step + i + engine.rank, "f4"))
            for i, got in enumerate(exchange.wait()):
                equal &= bool((got == 10 * step + i + 0.5).all())
        return equal and exchange.in_stable_order

    assert on_ranks(program) == [True, True]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64", "int16", "int64"])
def test_a_sum_has_the_arrays_own_dtype(name):
    if name == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    else:
        dtype = np.dtype(name)

    def program(engine: Engine) -> Any:
        array = np.arange(7).astype(dtype)
        exchange = Exchange(engine, "sum", rows_of(array), op=Op.SUM)
        exchange.submit(0, array)
        return exchange.wait()[0]

    for got in on_ranks(program):
        assert got.dtype == dtype
        assert got.astype(float).tolist() == [0, 2, 4, 6, 8, 10, 12]


def test_complex_numbers_are_averaged():
    def program(engine: Engine) -> Any:
        array = np.array([[1 + 2j], [3j]], "complex64") * (1 + 2 * engine.rank)
        exchange = Exchange(engine, "mean", rows_of(array))
        exchange.submit(0, array)
        return exchange.wait()[0].tolist()

    assert on_ranks(program) == [[[2 + 4j], [6j]]] * 2


def test_scalars_empty_arrays_and_odd_strides_keep_their_shapes():
    arrays = [
        np.array(3.0, "f4"),
        np.zeros((0, 4), "f4"),
        np.arange(24.0).reshape(4, 6)[::-1, ::2].T,
        np.array(2 + 1j, "complex64"),
    ]

    def program(engine: Engine) -> Any:
        exchange = Exchange(engine, "mean", rows_of(*arrays))
        for i, array in enumerate(arrays):
            exchange.submit(i, array)
        return exchange.wait()

    for results in on_ranks(program):
        for got, array in zip(results, arrays, strict=True):
            assert got.shape == array.shape
            assert (got == array).all()


def test_later_steps_leave_earlier_results_and_inputs_alone():
    def program(engine: Engine) -> Any:
        exchange = Exchange(engine, "mean", rows_of(np.zeros(4)))
        kept = []
        for step in range(3):
            given = np.full(4, float(step))
            exchange.submit(0, given)
            given[:] = -1  # as frameworks do
            kept.append(exchange.wait()[0])
        return [float(array[0]) for array in kept]

    assert on_ranks(program) == [[0.0, 1.0, 2.0]] * 2


def test_results_go_into_given_outputs():
    def program(engine: Engine) -> Any:
        exchange = Exchange(engine, "sum", rows_of(np.zeros(4)), op=Op.SUM)
        output = np.empty((4, 2))[:, 0]
        for step in range(3):
            exchange.submit(0, np.full(4, float(step)))
            exchange.wait([output])
        return output.tolist()

    assert on_ranks(program) == [[4.0] * 4] * 2


def test_an_abandoned_step_has_no_results_on_any_rank_and_the_next_one_has():
    def program(engine: Engine) -> Any:
        exchange = Exchange(engine, "mean", rows_of(np.zeros(4), np.zeros(2)))
        exchange.submit(0, np.ones(4))
        said = ""
        if engine.rank == 0:
            exchange.abandon()
        else:
            exchange.submit(1, np.ones(2))
            with pytest.raises(StrettoError) as raised:
                exchange.wait()
            said = str(raised.value)
        exchange.submit(1, np.full(2, 5.0))
        exchange.submit(0, np.full(4, 7.0))
        return said, [float(a[0]) for a in exchange.wait()]

    first, second = on_ranks(program)
    assert first == ("", [7.0, 5.0])
    assert "has no results" in second[0]
    assert second[1] == [7.0, 5.0]


def test_a_second_submission_in_a_step_is_refused_and_changes_nothing():
    def program(engine: Engine) -> Any:
        exchange = Exchange(engine, "mean", rows_of(np.zeros(4)))
        exchange.submit(0, np.ones(4))
        with pytest.raises(SpecError, match="twice"):
            exchange.submit(0, np.zeros(4))
        return exchange.wait()[0].tolist()

    assert on_ranks(program) == [[1.0] * 4] * 2


def test_other_rows_on_a_rank_are_an_error_on_all():
    def program(engine: Engine) -> Any:
        return Exchange(engine, "mean", rows_of(np.zeros(4 + engine.rank)))

    assert all(isinstance(error, RankDisagreement) for error in on_ranks(program))


def test_a_dtype_that_cannot_be_sent_is_refused():
    with pytest.raises(SpecError, match="uint32"):
        rows_of(np.zeros(3, "uint32"))


def round_of(rounds: Rounds, *sizes: int) -> None:
    """Reduce arrays of these sizes in a round."""
    arrays = [np.zeros(size, "f4") for size in sizes]
    ticket = rounds.begin(RoundRows(tuple(rows_of(*arrays)), Op.SUM))
    for i, array in enumerate(arrays):
        rounds.submit(ticket, i, array)
    rounds.wait(ticket)
    rounds.results(ticket)


@pytest.mark.parametrize("steps", [1, 12], ids=["negotiated", "in stable order"])
def test_other_shapes_in_a_later_round_end_all_ranks_with_one_text(steps):
    def program(engine: Engine) -> Any:
        rounds = Rounds(engine)
        for _ in range(steps):
            round_of(rounds, 3, 5)
        round_of(rounds, 3 + engine.rank, 5)

    first, second = on_ranks(program)
    assert isinstance(first, RankDisagreement)
    assert isinstance(second, RankDisagreement)
    assert str(first) == str(second)
    assert "'0' differs in its shapes (rank 0: [3]; rank 1: [4])" in str(first)


def test_a_missing_array_in_a_later_round_is_named_with_its_ranks():
    def program(engine: Engine) -> Any:
        rounds = Rounds(engine)
        round_of(rounds, 3, 5)
        round_of(rounds, *(3, 5)[: 2 - engine.rank])

    for error in on_ranks(program):
        assert "'1' exists on rank 0, not on rank 1" in str(error)


def test_known_rounds_in_opposite_orders_are_an_error():
    def program(engine: Engine) -> Any:
        rounds = Rounds(engine)
        for size in (3, 5):
            round_of(rounds, size)
        for size in (3, 5) if engine.rank else (5, 3):
            round_of(rounds, size)

    for error in on_ranks(program):
        assert "'0' differs in its shapes (rank 0: [5]; rank 1: [3])" in str(error)


def test_a_pause_where_another_rank_takes_a_step_names_both():
    def program(engine: Engine) -> Any:
        rounds = Rounds(engine)
        round_of(rounds, 3)
        rounds.pause("the end")
        if engine.rank:
            rounds.pause("the end")
        round_of(rounds, 3)

    for error in on_ranks(program):
        assert isinstance(error, RankDisagreement)
        assert "rank 0: 1 tensor to reduce; rank 1: the end" in str(error)


def test_groups_of_one_sequence_with_other_shapes_name_the_tensor_and_its_ranks():
    def program(engine: Engine) -> Any:
        rows = []
        for i in range(11):
            shape = (2 + engine.rank if i == 10 else 2,)
            request = Request(
                name=f"{engine.rank}.{i}",
                kind=CollectiveKind.ALLREDUCE,
                dtype="float32",
                shape=shape,
                sequence="s",
            )
            rows.append((request, torch.zeros(shape), None))
        for handle in engine.submit_group(f"group {engine.rank}", rows):
            handle.wait()

    for error in on_ranks(program):
        assert "'tensor 10' differs in its shapes (rank 0: [2]; rank 1: [3])" in (
            str(error)
        )
