"""The engine over real Gloo connections, ranks being threads of one process."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from functools import partial
from operator import gt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.errors import CommTimeout, RankDisagreement, SpecError, StrettoError
from stretto.runtime.negotiated import (
    AbstractEngineObserver,
    CollectiveKind,
    Engine,
    EngineOptions,
    Op,
    Request,
    collectives,
    members_of,
    pending,
    reductions,
    request_of,
    rounds,
    send,
)
from stretto.runtime.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.dist

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def places(size: int, timeout_s: float = 30.0) -> list[Ranks]:
    store = dist.HashStore()
    return [
        Ranks(
            rank=rank,
            size=size,
            names=tuple(range(size)),
            store=store,
            timeout_s=timeout_s,
        )
        for rank in range(size)
    ]


def on_ranks(
    size: int, function: Callable[..., Any], *, timeout_s: float = 30.0, **options: Any
) -> list[Any]:
    """What ``function(engine, rank)`` returned or raised on each rank."""
    found: list[Any] = [None] * size

    def go(ranks: Ranks) -> None:
        try:
            engine = Engine(ranks, options=EngineOptions(**options))
            try:
                found[ranks.rank] = function(engine, ranks.rank)
            finally:
                engine.close()
        except Exception as exc:  # noqa: BLE001
            found[ranks.rank] = exc

    threads = [
        threading.Thread(target=go, args=(ranks,), daemon=True)
        for ranks in places(size, timeout_s)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


def values(size: int, function: Callable[..., Any], **more: Any) -> list[Any]:
    found = on_ranks(size, function, **more)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def request(
    name: str, tensor: torch.Tensor, kind=CollectiveKind.ALLREDUCE, **more
) -> Request:
    return request_of(name, kind, tensor, **more)


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return torch.randint(low, 2, shape, generator=generator).to(dtype)


def reduced(rows: list[torch.Tensor], op: Op) -> torch.Tensor:
    """By brute force, in a wide type."""
    dtype = rows[0].dtype
    stacked = torch.stack([row.to(torch.float64) for row in rows])
    wide = {
        Op.SUM: lambda: stacked.sum(0),
        Op.AVERAGE: lambda: stacked.sum(0) / len(rows),
        Op.MIN: lambda: stacked.amin(0),
        Op.MAX: lambda: stacked.amax(0),
        Op.PRODUCT: lambda: stacked.prod(0),
    }[op]()
    return (wide if dtype.is_floating_point else wide.trunc()).to(dtype)


def mixed_program(size: int, seed: int) -> list[dict[str, Any]]:
    """Requests of every kind, type and size."""
    chance = random.Random(seed)
    program = []
    for i in range(30):
        kind = chance.choice([k for k in CollectiveKind if "register" not in k])
        dtype = chance.choice(DTYPES)
        op = chance.choice([o for o in Op if dtype != torch.bool or o != Op.AVERAGE])
        rest = chance.choice([(), (3,), (2, 2)])
        program.append(
            {
                "name": f"{kind} {i}",
                "kind": kind,
                "dtype": dtype,
                "op": op,
                "rest": rest,
                "rows": [chance.randrange(0, 40) for _ in range(size)],
                "splits": [
                    [chance.randrange(0, 5) for _ in range(size)] for _ in range(size)
                ],
                "root": chance.randrange(size),
                "in_place": chance.random() < 0.5,
            }
        )
    return program


def submitted(engine: Engine, rank: int, step: dict[str, Any], seed: int) -> Any:
    kind = step["kind"]
    if kind is CollectiveKind.BARRIER:
        return engine.barrier(step["name"])
    rows = step["rows"][0]
    more: dict[str, Any] = {}
    if kind is CollectiveKind.ALLGATHER:
        rows = step["rows"][rank]
    elif kind is CollectiveKind.ALLTOALL:
        more["splits"] = tuple(step["splits"][rank])
        rows = sum(more["splits"])
    elif kind is CollectiveKind.BROADCAST:
        more["root"] = step["root"]
    else:
        more["op"] = step["op"]
    tensor = numbers(seed + rank, (rows, *step["rest"]), step["dtype"])
    asked = request(step["name"], tensor, kind, **more)
    in_place = step["in_place"] and kind in (
        CollectiveKind.ALLREDUCE,
        CollectiveKind.BROADCAST,
    )
    return engine.submit(asked, tensor, tensor if in_place else None)


def expected(step: dict[str, Any], rank: int, size: int, seed: int) -> Any:
    kind, rest = step["kind"], step["rest"]
    rows = [step["rows"][0]] * size
    if kind is CollectiveKind.ALLGATHER:
        rows = step["rows"]
    elif kind is CollectiveKind.ALLTOALL:
        rows = [sum(splits) for splits in step["splits"]]
    inputs = [numbers(seed + r, (rows[r], *rest), step["dtype"]) for r in range(size)]
    if kind is CollectiveKind.BROADCAST:
        return inputs[step["root"]]
    if kind is CollectiveKind.ALLGATHER:
        return torch.cat(inputs)
    if kind is CollectiveKind.ALLTOALL:
        return torch.cat(
            [inputs[r].split(step["splits"][r])[rank] for r in range(size)]
        )
    whole = reduced(inputs, step["op"])
    if kind is CollectiveKind.ALLREDUCE:
        return whole
    return torch.tensor_split(whole, size)[rank]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_kind_and_type_in_random_orders_is_what_brute_force_says(
    size: int,
) -> None:
    def run(engine: Engine, rank: int) -> int:
        chance = random.Random(rank)
        for seed in range(3):
            program = mixed_program(size, seed)
            handles = {}
            for i in chance.sample(range(len(program)), len(program)):
                handles[i] = submitted(engine, rank, program[i], 100 * seed + i)
                if chance.random() < 0.1:
                    time.sleep(0.002)
            for i, handle in handles.items():
                step = program[i]
                result = handle.wait(30)
                if step["kind"] is CollectiveKind.BARRIER:
                    assert result is None
                    continue
                wanted = expected(step, rank, size, 100 * seed + i)
                assert result.dtype is wanted.dtype
                torch.testing.assert_close(result, wanted, msg=f"{step} {result}")
                if step["kind"] is CollectiveKind.ALLTOALL:
                    received = [splits[rank] for splits in step["splits"]]
                    assert list(handle.received_splits) == received
        return 3

    # Units of 64 bytes: most tensors are cut, and small ones packed.
    assert values(size, run, unit_bytes=64, lanes=3) == [3] * size


def test_scales_averages_and_gaps() -> None:
    def run(engine: Engine, rank: int) -> list[Any]:
        found = []
        for i, (tensor, more) in enumerate(
            [
                (torch.tensor([7, -7]), {"op": Op.AVERAGE}),
                (torch.tensor([3, 5]), {"prescale": 0.5}),
                (torch.tensor([3, 5]), {"postscale": 0.5}),
                (torch.tensor([32e3], dtype=torch.float16), {"prescale": 0.25}),
                (torch.tensor([1.0, 2.0]), {"op": Op.AVERAGE, "prescale": 2.0}),
            ]
        ):
            mine = tensor * (rank + 1)
            handle = engine.submit(request(f"x{i}", mine, **more), mine)
            found.append(handle.wait(30).tolist())
        # An output with gaps, cut over units; and views of it left as they were.
        wide = torch.zeros(5, 40)
        out = wide[:, ::2]
        mine = torch.arange(100.0).reshape(20, 5).T + rank
        assert not mine.is_contiguous()
        engine.submit(request("gaps", mine), mine, out).wait(30)
        torch.testing.assert_close(out, 2 * torch.arange(100.0).reshape(20, 5).T + 1)
        assert not wide[:, 1::2].any()
        with pytest.raises(SpecError, match="output must be dense float32 on cpu"):
            engine.submit(request("y", mine), mine, torch.zeros(3))
        with pytest.raises(SpecError, match="root must be a rank from 0 to 1, got 2"):
            engine.submit(request("y", mine, CollectiveKind.BROADCAST, root=2), mine)
        asked = request("y", mine, CollectiveKind.ALLTOALL, splits=(5,))
        with pytest.raises(SpecError, match="splits must be 2 numbers"):
            engine.submit(asked, mine)
        return found

    expected_rows = [[10, -10], [4, 7], [4, 7], [24000.0], [3.0, 6.0]]
    assert values(2, run, unit_bytes=96) == [expected_rows] * 2


def test_what_differs_is_reported_on_all_ranks_and_the_engine_continues() -> None:
    def run(engine: Engine, rank: int) -> list[str]:
        texts = []
        cases = [
            (torch.zeros(3 + rank), CollectiveKind.ALLREDUCE, {}),
            (torch.zeros(3).to([torch.float32, torch.int64][rank]), "allreduce", {}),
            (torch.zeros(3), CollectiveKind.BROADCAST, {"root": rank}),
            (
                torch.zeros(3),
                [CollectiveKind.ALLREDUCE, CollectiveKind.BROADCAST][rank],
                {},
            ),
            (torch.zeros(3), CollectiveKind.ALLREDUCE, {"op": [Op.SUM, Op.MAX][rank]}),
        ]
        for i, (tensor, kind, more) in enumerate(cases):
            for _ in range(2):
                asked = request(f"x{i}", tensor, CollectiveKind(kind), **more)
                with pytest.raises(RankDisagreement) as caught:
                    engine.submit(asked, tensor).wait(30)
                texts.append(str(caught.value))
            good = torch.ones(2)
            done = engine.submit(request(f"x{i}", good), good).wait(30)
            assert done.tolist() == [2.0, 2.0]
        odd = "b" if rank else "c"
        rows = [(request(n, good), good, None) for n in ("a", odd)]
        handle = engine.submit_group("pair", rows)[0]
        with pytest.raises(RankDisagreement, match="different groups"):
            handle.wait(30)
        return texts

    first, second = values(2, run)
    assert first == second
    assert "different shapes: rank 0: [3]; rank 1: [4]" in first[0]


def test_a_handle_is_not_ended_before_the_others_come() -> None:
    come = threading.Event()

    def run(engine: Engine, rank: int) -> list[bool]:
        x = torch.ones(4)
        if rank:
            come.wait(30)
        handle = engine.submit(request("x", x), x)
        if rank:
            handle.wait(30)
            return []
        found = [handle.poll()]
        with pytest.raises(StrettoError, match="has not ended"):
            _ = handle.result
        with pytest.raises(CommTimeout, match=r"'x' did not end within 0\.2 s"):
            handle.wait(0.2)
        with pytest.raises(SpecError, match="while a request of that name is pending"):
            engine.submit(request("x", x), x)
        found.append(handle.poll())
        come.set()
        assert handle.wait(30).tolist() == [2.0] * 4
        found.append(handle.poll())
        return found

    assert values(2, run)[0] == [False, False, True]


def test_joined_ranks_add_zeros_until_all_have() -> None:
    def run(engine: Engine, rank: int) -> list[Any]:
        found: list[Any] = []
        members = [request(f"p{i}", torch.zeros(20 + i)) for i in range(5)]
        tensors = engine.register("set", members)
        for step in range(6 - 2 * rank):  # rank 0 has most
            gradients = [torch.ones(20 + i) for i in range(5)]
            for i, gradient in enumerate(gradients):
                tensors.submit(i, gradient)
            tensors.wait()
            found.append(gradients[0][0].item())
            x = torch.full((3,), 1.0)
            average = request("x", x, op=Op.AVERAGE)
            found.append(round(engine.submit(average, x).wait(30)[0].item(), 3))
            del step
        if rank == 0:
            b = torch.ones(1)
            with pytest.raises(RankDisagreement, match="joined: 1, 2"):
                engine.submit(request("b", b, CollectiveKind.BROADCAST), b).wait(30)
        found.append(engine.join(30))
        found.append(engine.barrier().wait(30))
        return found

    found = values(3, run, unit_bytes=64, stable_steps=2)
    two = [3.0, 1.0] * 2
    assert found[2] == [*two, 0, None]
    assert found[1] == [*two, *[2.0, 0.667] * 2, 0, None]
    assert found[0] == [*two, *[2.0, 0.667] * 2, *[1.0, 0.333] * 2, 0, None]


def test_a_kept_order_is_left_and_taken_up_by_all_ranks_at_the_same_step() -> None:
    """Sums are right whatever the order, and whichever way units leave."""
    types = [torch.float32, torch.float64, torch.int16, torch.float16]

    def run(engine: Engine, rank: int) -> list[bool]:
        shapes = [(3 * i, 7) for i in range(16)]
        members = [
            request(f"p{i}", torch.zeros(shape, dtype=types[i % 4]), prescale=2.0)
            for i, shape in enumerate(shapes)
        ]
        tensors = engine.register("set", members)
        kept = []
        for step in range(24):
            order = list(range(16))
            if step in (7, 8, 15) and rank == 1:
                random.Random(step).shuffle(order)
            values_ = [
                torch.full(shape[::-1], i + step + rank).to(types[i % 4]).T
                for i, shape in enumerate(shapes)
            ]
            for i in order:
                tensors.submit(i, values_[i], used=i % 2 == 0 or step + rank == 9)
            if step % 5 == 0:  # others' requests at the same time
                x = torch.ones(50)
                assert engine.submit(request("x", x), x).wait(30)[0].item() == 3
            end = tensors.wait()
            odd = set(range(1, 16, 2))
            assert end.unused == (set() if step in (7, 8, 9) else odd)
            assert end.whole
            for i, value in enumerate(values_):
                wanted = 2 * (3 * (i + step) + 3)
                assert value.eq(wanted).all(), (step, i, value, wanted)
            kept.append(tensors.in_stable_order)
        with pytest.raises(SpecError, match="'p0' and 15 more are missing"):
            tensors.wait()
        tensors.submit(3, torch.zeros(9, 7, dtype=torch.float16))
        with pytest.raises(SpecError, match="submitted twice"):
            tensors.submit(3, torch.zeros(9, 7, dtype=torch.float16))
        tensors.abandon()
        tensors.close()
        return kept

    found = values(3, run, unit_bytes=256)
    assert found[0] == found[1] == found[2]
    away = [i for i, kept in enumerate(found[0]) if not kept]
    assert away == [0, 1, 7, 8, 9, 10, 15, 16, 17]


def test_a_step_cut_short_is_reported_to_the_other_ranks() -> None:
    def run(engine: Engine, rank: int) -> list[bool]:
        members = [request(f"p{i}", torch.zeros(4)) for i in range(4)]
        tensors = engine.register("set", members)
        found = []
        for step in range(8):
            for i in range(4):
                if rank == 1 and step in (1, 6) and i == 2:
                    break
                tensors.submit(i, torch.ones(4))
            else:
                found.append(tensors.wait().whole)
                continue
            tensors.abandon()
        return found

    found = values(2, run)
    assert found[1] == [True] * 6
    assert found[0] == [True, False, True, True, True, True, False, True]


class Spans(AbstractEngineObserver):
    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        assert start_s <= end_s
        self.found.append((track, name))


def test_spans_show_the_stages_of_a_request() -> None:
    observers = [Spans(), Spans()]

    def go(ranks: Ranks) -> None:
        engine = Engine(ranks, observer=observers[ranks.rank])
        x = torch.ones(4)
        engine.submit(request("x", x), x).wait(30)
        engine.submit(request("b", x, CollectiveKind.BROADCAST), x).wait(30)
        engine.close()

    threads = [threading.Thread(target=go, args=(r,)) for r in places(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for observer in observers:
        ways = {(t, n) for t, n in observer.found if t in "xb"}
        assert ways >= {("x", "queued"), ("x", "pack"), ("x", "allreduce")}
        assert ways >= {("b", "queued"), ("b", "broadcast")}
        assert ("rounds", "negotiate") in observer.found
        assert any(t.startswith("lane") and n == "x" for t, n in observer.found)


def test_a_stall_names_who_did_not_come_and_ends_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(engine: Engine, rank: int) -> Any:
        x = torch.ones(4)
        name = "x" if rank < 2 else "y"  # they wait for each other
        begin_s = time.perf_counter()
        with pytest.raises(CommTimeout) as caught:
            engine.submit(request(name, x), x).wait(30)
        assert time.perf_counter() - begin_s < 20
        with pytest.raises(CommTimeout):
            engine.submit(request("z", x), x)
        return str(caught.value)

    found = values(3, run, timeout_s=3.0, stall_s=1.0)
    assert len(set(found)) == 1
    assert "did not submit it" in found[0]
    assert "different names" in found[0]
    text = caplog.text
    assert "rank 2 waits for allreduce 'y', which rank 0 did not submit" in text
    assert "allreduce 'x' has waited 1 s for rank 2, which did not submit it" in text
    assert "allreduce 'y' has waited 1 s for ranks 0, 1" in text


def test_what_is_launched_on_one_rank_counts_as_submitted_there() -> None:
    """A rank that is stopped may have sent its last bits to some ranks only."""
    seen = threading.Event()

    def run(engine: Engine, rank: int) -> list[int]:
        core = engine._core
        x = torch.ones(4)
        reduce, held = core.sender.reduce, []
        if rank:
            core.sender.reduce = held.append
        handle = engine.submit(request("x", x), x)
        missing: list[int] = []
        if not rank:
            end_s = time.perf_counter() + 20
            missing = [1]
            while missing and time.perf_counter() < end_s:
                missing = core._stalls.missing("allreduce 'x'")
                time.sleep(0.05)
            seen.set()
        seen.wait(60)
        for rows in held:
            reduce(rows)
        handle.wait(60)
        return missing

    assert values(2, run, stall_s=1.0)[0] == []


def test_closing_fails_what_is_pending_on_all_ranks() -> None:
    def run(engine: Engine, rank: int) -> str:
        x = torch.ones(4)
        handles = [engine.submit(request("x", x), x)] if rank else []
        time.sleep(0.5)
        if not rank:
            engine.close()
            with pytest.raises(StrettoError, match="the engine was closed"):
                engine.submit(request("x", x), x)
            return ""
        with pytest.raises(StrettoError) as caught:
            handles[0].wait(30)
        return str(caught.value)

    assert values(2, run)[1] == "rank 0 closed its engine"


def test_an_exception_at_the_end_of_a_request_fails_only_its_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a lane's thread, and on the control thread."""
    real_of = {
        "write": pending.write,
        "_unpack": send._unpack,
        "combine": reductions.combine,
    }
    names: set[str] = set()

    def maybe(what: str, *args: Any) -> Any:
        if what in names:
            raise ValueError(f"no {what}")
        return real_of[what](*args)

    for module in (pending, collectives, rounds):
        monkeypatch.setattr(module, "write", partial(maybe, "write"))
    monkeypatch.setattr(send, "_unpack", partial(maybe, "_unpack"))
    monkeypatch.setattr(reductions, "combine", partial(maybe, "combine"))
    turn = threading.Barrier(2, timeout=30)

    def run(engine: Engine, rank: int) -> list[str]:
        found = []
        for what in ("write", "_unpack", "combine"):
            for kind in (
                CollectiveKind.ALLREDUCE,
                CollectiveKind.BROADCAST,
                CollectiveKind.REDUCESCATTER,
            ):
                for _ in range(3):  # the second may ride along
                    x = torch.ones(4, 4).t()
                    out = (
                        x
                        if kind is not CollectiveKind.REDUCESCATTER
                        else torch.ones(2, 4)
                    )
                    turn.wait()
                    names.add(what)
                    turn.wait()
                    handle = engine.submit(request("x", x, kind), x, out)
                    try:
                        handle.wait(30)
                    except StrettoError as exc:
                        found.append(str(exc))
                    turn.wait()
                    names.clear()
                    turn.wait()
                    engine.submit(request("y", torch.ones(2)), torch.ones(2)).wait(30)
        return found

    for texts in values(2, run):
        for what in ("write", "_unpack", "combine"):
            assert f"no {what}" in "\n".join(texts)
        assert all("can't be written on this rank" in text for text in texts)


@pytest.mark.parametrize(
    "kind",
    [CollectiveKind.ALLREDUCE, CollectiveKind.BROADCAST, CollectiveKind.ALLGATHER],
)
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_an_exception_at_the_start_of_a_request_fails_all_ranks(
    monkeypatch: pytest.MonkeyPatch, kind: CollectiveKind, error: type[Exception]
) -> None:
    def new_output(shape: Any, like: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "stretto-control" and shape[0] == 7:
            raise error("no room")
        return torch.empty(tuple(shape), dtype=like.dtype)

    for module in (pending, collectives):
        monkeypatch.setattr(module, "new_output", new_output)

    def run(engine: Engine, rank: int) -> str:
        x = torch.ones(7 if kind is not CollectiveKind.ALLGATHER else 3 + rank, 2)
        engine.submit(request("y", torch.ones(2)), torch.ones(2)).wait(30)
        with pytest.raises(StrettoError) as caught:
            engine.submit(request("x", x, kind), x).wait(30)
        with pytest.raises(StrettoError):
            engine.submit(request("y", torch.ones(2)), torch.ones(2)).wait(30)
        return str(caught.value)

    assert all("no room" in text for text in values(2, run, timeout_s=10.0))


def test_opening_and_closing_leaves_nothing_behind() -> None:
    def run(engine: Engine, rank: int) -> None:
        x = torch.ones(64)
        handles = [engine.submit(request(f"x{i}", x), x) for i in range(3)]
        for handle in handles:
            handle.wait(30)
        del rank

    def open_now() -> tuple[int, int]:
        tasks = len(list(Path("/proc/self/task").iterdir()))
        return tasks, len(list(Path("/proc/self/fd").iterdir()))

    values(2, run)
    before = open_now()
    for _ in range(20):
        values(2, run)
    # A thread that is ending still counts, with its sockets.
    ends = time.monotonic() + 10
    while any(map(gt, after := open_now(), before)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_different_options_are_reported_before_anything_else() -> None:
    found: list[Any] = [None, None]

    def go(ranks: Ranks) -> None:
        try:
            Engine(ranks, options=EngineOptions(lanes=1 + ranks.rank))
        except RankDisagreement as exc:
            found[ranks.rank] = str(exc)

    threads = [threading.Thread(target=go, args=(r,)) for r in places(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert "lanes=1" in found[0]
    assert "lanes=2" in found[0]


def test_some_ranks_may_have_an_engine_of_their_own() -> None:
    found: list[Any] = [None] * 3

    def go(ranks: Ranks) -> None:
        x = torch.full((4,), float(ranks.rank))
        with opened(ranks) as everyone:
            if ranks.rank == 1:
                with pytest.raises(SpecError, match="rank 1 must be one of"):
                    members_of(ranks, [2, 0], "pair")
            else:
                with opened(members_of(ranks, [2, 0], "pair")) as pair:
                    total = pair.submit(request("x", x), x).wait(30)
                    root = request("b", x, CollectiveKind.BROADCAST, root=0)
                    sent = pair.submit(root, x).wait(30)
                    y = torch.zeros(3 + pair.rank)
                    with pytest.raises(RankDisagreement, match=r"rank 2: .3.; rank 0:"):
                        pair.submit(request("y", y), y).wait(30)
                    found[ranks.rank] = (pair.rank, total[0].item(), sent[0].item())
            assert everyone.submit(request("x", x), x).wait(30)[0].item() == 3

    threads = [threading.Thread(target=go, args=(r,)) for r in places(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [(1, 2.0, 2.0), None, (0, 2.0, 2.0)]


def opened(ranks: Ranks) -> Any:
    return contextlib.closing(Engine(ranks))
