"""Bad input and lost ranks: one clear message on every rank, in bounded time."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.burst.executor import BurstParallel
from support.burst_ranks import plan_of
from support.checks import raised
from support.nets import mlp

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def net(width: int = 8) -> nn.Module:
    return mlp(4, width, width, 2, between=nn.Tanh, seed=0)


FAILS, ENDS = 12345, 12346
"""Thresholds of Python's garbage collector that a rank sets to break its backward."""


class Breaks(torch.autograd.Function):
    """The identity; its backward fails on a rank with a threshold of those.

    A changed attribute, global or variable of the environment would be noticed before.
    """

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if gc.get_threshold()[0] == ENDS:
            os._exit(9)
        if gc.get_threshold()[0] == FAILS:
            raise ValueError("on this rank alone")
        return grads[0]


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(x)


class Ordered(nn.Module):
    """Adds terms in an order as a loop over a set would have it."""

    def __init__(self, flips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.flips = flips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        terms = [h.sin, h.cos]
        for term in reversed(terms) if self.flips else terms:
            h = h + term()
        return h


class Defined(nn.Module):
    """Runs its layers in one order, and defines them in any."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        for name in ("last", "first") if is_turned else ("first", "last"):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return last


EXAMPLE = torch.zeros(2, 4)
LENGTHS = "(4,) of float32 on rank 0, (5,) of float32 on rank 1. All samples must"


def plan_of_ordered(size: int) -> Any:
    return plan_of(Ordered(False), EXAMPLE, lambda _i: (0, size), size)


def rank_with_bad_input(rank: int, size: int) -> dict[str, tuple[str, str]]:
    def make(model: nn.Module, plan: Any, **options: Any) -> BurstParallel:
        options = {"example_inputs": (EXAMPLE,), **options}
        return BurstParallel(model, plan, **options)

    model = net()
    wide = plan_of(model, EXAMPLE, lambda _i: (0, size), size)
    narrow = plan_of(model, EXAMPLE, lambda i: (0, 1 + i % 2), size)
    larger = dataclasses.replace(wide, gpus=size + 1)
    other = plan_of(net(9), EXAMPLE, lambda _i: (0, 1), size)
    longer = plan_of(
        nn.Sequential(net(), nn.Linear(2, 2)), EXAMPLE, lambda _i: (0, 1), size
    )
    any_ = plan_of(nn.PReLU(), EXAMPLE, lambda _i: (0, size), size)
    longer_on_one = torch.zeros(2, 4 + rank)
    found = {
        "ranks": raised(make, net(), larger),
        "sizes": raised(make, net(), other),
        "layers": raised(make, net(), longer),
        "plans": raised(make, net(), wide if rank else narrow),
        "models": raised(make, net() if rank else net(9), wide if rank else other),
        "orders": raised(make, Ordered(rank == 1), plan_of_ordered(size)),
        "settings": raised(make, net(), wide, seed=rank),
        "norms": raised(make, net(), wide, batch_norm="global"),
        "buckets": raised(make, net(), wide, bucket_bytes=0),
        "lanes": raised(make, net(), wide, lanes=0),
        "half a lane": raised(make, net(), wide, lanes=1.5),
        "time": raised(make, net(), wide, timeout_s="5"),
        "no time": raised(make, net(), wide, timeout_s=-1),
        "no seed": raised(make, net(), wide, seed="a" if rank else 0),
        "no group": raised(make, net(), wide, process_group="world"),
        "no example": raised(
            make, net(), wide, example_inputs=(EXAMPLE,) if rank else None
        ),
        "lengths": raised(make, nn.PReLU(), any_, example_inputs=(longer_on_one,)),
    }
    model = make(nn.PReLU(), any_, example_inputs=None)
    found["first lengths"] = raised(model, longer_on_one)
    model = make(net(), narrow)
    found["sample"] = raised(model, torch.zeros(2, 5))
    found["one rank's sample"] = raised(model, torch.zeros(2, 4 + rank))
    found["type"] = raised(model, torch.zeros(2, 4, dtype=torch.float64))
    found["empty"] = raised(model, torch.zeros(0, 4))
    model.train(rank == 0)
    found["modes"] = raised(model, torch.zeros(2, 4))
    model.train()
    with torch.set_grad_enabled(rank == 0):
        found["gradients"] = raised(model, torch.zeros(2, 4))
    found["new plan"] = raised(model.apply_plan, other)
    found["steps"] = raised(model.measure, 0)
    found["no steps"] = raised(model.measure, "3")
    found["norm type"] = raised(model.clip_grad_norm_, 1.0, 0.0)
    found["no norm type"] = raised(model.grad_norm, "two")
    found["no limit"] = raised(model.clip_grad_norm_, "one")
    found["no optimizer"] = raised(model.apply_plan, narrow, model.module)
    one = [torch.optim.SGD(model.parameters(), lr=0.1)]
    found["a list"] = raised(model.refresh, *(one if rank else [one]))
    found["no profile"] = raised(model.predict_windows, narrow, None)
    # What was refused has changed nothing.
    assert model.plan is narrow
    model(torch.ones(3, 4)).sum().backward()
    return found


def test_what_can_not_be_executed_is_refused_on_every_rank(ranks: Any) -> None:
    everyone = ranks(rank_with_bad_input, 2)
    wanted = {
        "ranks": ("PlanMismatch", "the plan needs 3 ranks but the job has 2"),
        "sizes": ("PlanMismatch", "sizes or edges differ"),
        "layers": ("PlanMismatch", "layer '0.0' is not in it"),
        "plans": ("RankDisagreement", "ranks hold different plans"),
        "models": ("RankDisagreement", "ranks hold different models"),
        "orders": ("RankDisagreement", "first operations of forward that differ: "),
        "settings": ("RankDisagreement", "seed=1"),
        "norms": ("SpecError", "batch_norm must be one of sync, local"),
        "buckets": ("SpecError", "bucket_bytes must be >= 1, got 0"),
        "lanes": ("SpecError", "lanes must be >= 1, got 0"),
        "half a lane": ("SpecError", "lanes must be an integer, got 1.5"),
        "time": ("SpecError", "timeout_s must be a number above 0, got '5'"),
        "no time": ("SpecError", "timeout_s must be a number above 0, got -1"),
        "sample": ("SpecError", "must have shape (4,)"),
        "type": ("SpecError", "got (4,) and torch.float64"),
        "empty": ("SpecError", "no sample on any rank"),
        "modes": ("RankDisagreement", "rank 0 called with train mode"),
        "gradients": ("RankDisagreement", "rank 0 called with enabled gradients"),
        "new plan": ("PlanMismatch", "sizes or edges differ"),
        "steps": ("SpecError", "steps must be >= 1, got 0"),
        "norm type": ("SpecError", "norm_type must be > 0"),
        "no group": ("SpecError", "process_group must be a group from torch"),
        "no example": ("RankDisagreement", "rank 0 reported none; rank 1 reported ex"),
        "lengths": ("RankDisagreement", LENGTHS),
        "first lengths": ("RankDisagreement", LENGTHS),
        "no steps": ("SpecError", "steps must be an integer, got '3'"),
        "no norm type": ("SpecError", "norm_type must be a number, got 'two'"),
        "no limit": ("SpecError", "max_norm must be a number, got 'one'"),
        "no optimizer": ("SpecError", "only optimizers can be passed here"),
        "no profile": ("SpecError", "profile must be a LayerProfile"),
    }
    for found in everyone:
        for case, (kind, words) in wanted.items():
            assert found[case][0] == kind, (case, found[case])
            assert words in found[case][1], (case, found[case])
    for case, bad, words in (("no seed", 1, "got 'a'"), ("a list", 0, "got list: ")):
        assert everyone[bad][case][0] == "SpecError", everyone
        assert everyone[1 - bad][case][0] == "RankDisagreement", everyone
        assert all(words in found[case][1] for found in everyone)
    assert everyone[0]["one rank's sample"][0] == "RankDisagreement"
    assert "rank 1 passed" in everyone[0]["one rank's sample"][1]
    assert everyone[1]["one rank's sample"][0] == "SpecError"


def rank_of_a_death(rank: int, size: int, when: str) -> tuple[str, str, float]:
    model = net(64)
    model[3] = Broken()
    plan = plan_of(model, EXAMPLE, lambda i: [(0, size), (1, 2), (0, 1)][i], size)
    burst = BurstParallel(model, plan, example_inputs=(EXAMPLE,))
    victim = 2
    for step in range(6):
        began_s = time.perf_counter()
        try:
            if rank == victim and step == 3:
                if when == "forward":
                    # After the shares were exchanged: others wait for its samples.
                    model[0].register_forward_pre_hook(lambda *_: os._exit(9))
                else:
                    gc.set_threshold(ENDS)
            burst(torch.randn(3, 4)).sum().backward()
        except Exception as exc:  # noqa: BLE001
            took_s = time.perf_counter() - began_s
            same = raised(burst, torch.randn(3, 4)) == (type(exc).__name__, str(exc))
            return type(exc).__name__, str(exc) if same else "another error", took_s
    return "", "", 0.0


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_lost_between_layers_is_named_by_every_other(
    ranks: Any, when: str
) -> None:
    found = ranks(rank_of_a_death, 4, when, errors=True, group_s=600)
    assert found[2] is None
    for rank in (0, 1, 3):
        kind, text, took_s = found[rank]
        assert kind == "CommTimeout", text
        assert text.startswith(f"rank {rank}: the ")
        assert "rank 2 is gone" in text
        assert took_s < 30
    if when == "forward":
        # The rank that waited for the lost one's samples says of which layer. In
        # backward the last gradients of samples may have left before.
        texts = [found[rank][1] for rank in (0, 1, 3)]
        assert any("the redistribution of layer " in text for text in texts), texts


def rank_that_stalls(rank: int, size: int) -> tuple[str, str]:
    model = net()
    plan = plan_of(model, EXAMPLE, lambda i: (0, 1 + i % 2), size)
    burst = BurstParallel(model, plan, example_inputs=(EXAMPLE,), timeout_s=3)
    burst(torch.randn(4, 4)).sum().backward()
    if rank == 1:
        time.sleep(14)
        return "", ""
    return raised(lambda: burst(torch.randn(4, 4)).sum().backward())


def test_a_wait_ends_at_its_timeout_and_names_who_is_stuck(ranks: Any) -> None:
    kind, text = ranks(rank_that_stalls, 2, group_s=600)[0]
    assert kind == "CommTimeout"
    assert "within 3 s" in text
    assert "rank 1 is late or stuck" in text


def rank_with_a_bad_plan_file(
    rank: int, size: int, folder: str
) -> dict[str, tuple[str, str]]:
    model = net()
    plan = plan_of(model, EXAMPLE, lambda i: (0, 1 + i % 2), size)
    good = Path(folder) / f"good-{rank}.json"
    plan.save(good)
    broken = Path(folder) / f"broken-{rank}.json"
    broken.write_text('{"kind": "burst_plan", "schema')
    found: dict[str, tuple[str, str]] = {}
    bad: dict[str, Any] = {
        "missing": Path(folder) / "nowhere.json",
        "broken": broken,
        "folder": Path(folder),
        "no path": 7,
    }
    for kind, path in bad.items():
        mine = path if rank == 1 else good
        for example in (None, (EXAMPLE,)):
            began_s = time.perf_counter()
            try:
                BurstParallel(net(), mine, example_inputs=example)
            except Exception as exc:  # noqa: BLE001
                found[f"{kind} {example is None}"] = (type(exc).__name__, str(exc))
            assert time.perf_counter() - began_s < 15
    for example in (None, (EXAMPLE,)):
        burst = BurstParallel(net(), good, example_inputs=example)
        for kind, path in bad.items():
            try:
                burst.apply_plan(path if rank == 1 else good)
            except Exception as exc:  # noqa: BLE001
                found[f"apply {kind} {example is None}"] = (
                    type(exc).__name__,
                    str(exc),
                )
        burst.apply_plan(good)
        burst(torch.randn(3, 4)).sum().backward()
    return found


def test_a_plan_file_that_one_rank_can_not_read_is_an_error_on_all(
    ranks: Any, tmp_path: Path
) -> None:
    other, one = ranks(rank_with_a_bad_plan_file, 2, str(tmp_path), group_s=60)
    assert len(one) == len(other) == 16
    for case, (kind, text) in other.items():
        assert kind == "RankDisagreement", (case, kind, text)
        assert text.startswith("rank 1 cannot continue: "), (case, text)
        assert one[case][1] in text
        assert one[case][0] == "SpecError", (case, one[case])


def rank_with_a_bad_argument(rank: int, size: int, name: str) -> list[tuple[str, str]]:
    """Rank 1 can't build a model; then all build one."""
    model = net()
    plan = plan_of(model, EXAMPLE, lambda _: (0, size), size)
    bad: dict[str, Any] = {"process_group": "x", "timeout_s": -1}
    more = {name: bad[name]} if rank == 1 else {}
    example = (EXAMPLE,)
    failed = raised(lambda: BurstParallel(model, plan, example_inputs=example, **more))
    burst = BurstParallel(net(), plan, example_inputs=example)
    return [failed, raised(lambda: burst(torch.randn(3, 4)).sum().backward())]


@pytest.mark.parametrize("name", ["process_group", "timeout_s"])
def test_a_model_can_be_built_after_one_ranks_argument_was_invalid(
    ranks: Any, name: str
) -> None:
    (other, after), (_, _) = ranks(rank_with_a_bad_argument, 2, name, group_s=20)
    assert f"rank 1 cannot continue: {name} must be" in other[1]
    assert after == ("", "")


def rank_that_misses_a_model(rank: int, size: int) -> tuple[str, str]:
    """Rank 1's program fails before it builds a model; later all build one."""
    model = net()
    plan = plan_of(model, EXAMPLE, lambda _: (0, size), size)
    example = (EXAMPLE,)
    if rank == 0:
        raised(lambda: BurstParallel(model, plan, example_inputs=example, timeout_s=1))
    torch.distributed.barrier()
    burst = BurstParallel(net(), plan, example_inputs=example)
    return raised(lambda: burst(torch.randn(3, 4)).sum().backward())


def test_a_model_can_be_built_after_one_rank_missed_another(ranks: Any) -> None:
    found = ranks(rank_that_misses_a_model, 2, group_s=20)
    assert found == [("", ""), ("", "")]


def rank_with_its_own_scale(rank: int, size: int) -> tuple[str, str]:
    model = net()
    plan = plan_of(model, EXAMPLE, lambda i: (i % size, 1), size)
    burst = BurstParallel(model, plan, example_inputs=(EXAMPLE,))
    optimizer = torch.optim.SGD(burst.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (1 + rank))
    scaler.scale(burst(torch.randn(3, 4)).sum()).backward()
    return raised(lambda: scaler.step(optimizer))


def test_scalers_with_different_scales_are_an_error_on_all_ranks(ranks: Any) -> None:
    for kind, text in ranks(rank_with_its_own_scale, 2):
        assert kind == "RankDisagreement"
        assert "different factors (4, 8, by rank)" in text


def two_ranks(size: int, **more: Any) -> BurstParallel:
    """Its last layer runs on rank 0 alone, so that rank 1 has no current values."""
    model = net()
    model[1] = Broken()
    plan = plan_of(model, EXAMPLE, lambda i: [(0, 2), (0, 2), (0, 1)][i], size)
    return BurstParallel(model, plan, example_inputs=(EXAMPLE,), **more)


def rank_that_refuses(rank: int, size: int, kind: str) -> list[tuple[str, str, float]]:
    """Rank 1 alone meets an error, which its program catches."""
    from stretto.burst import refusals

    refusals.GRACE_S = 3.0
    burst = two_ranks(size)
    optimizer = torch.optim.SGD(burst.parameters(), lr=0.1)
    plan = burst.plan
    found = []

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        burst(x).sum().backward()
        optimizer.step()

    def tried(function: Any, *args: Any) -> None:
        began_s = time.perf_counter()
        try:
            function(*args)
            found.append(("", "", 0.0))
        except Exception as exc:  # noqa: BLE001
            took_s = time.perf_counter() - began_s
            found.append((type(exc).__name__, str(exc), took_s))

    def fails(*_: Any) -> None:
        raise ValueError("on this rank alone")

    step(torch.ones(2, 4))
    if rank == 1:
        if kind in ("read", "comes back", "plan"):
            tried(burst.module.state_dict)
            time.sleep(1.0 if kind == "comes back" else 12.0)
        elif kind == "forward":
            handle = burst.module[2].register_forward_pre_hook(fails)
            tried(step, torch.ones(2, 4))
            handle.remove()
        elif kind == "backward":
            usual = gc.get_threshold()
            gc.set_threshold(FAILS)
            tried(step, torch.ones(2, 4))
            gc.set_threshold(*usual)
        elif kind == "hooks":
            handle = burst.module.register_forward_pre_hook(fails)
            tried(step, torch.ones(2, 4))
            handle.remove()
            time.sleep(12.0)
    for _ in range(2):
        if kind == "plan":
            tried(burst.apply_plan, plan)
        else:
            tried(step, torch.ones(2, 4))
    if kind == "comes back":
        tried(burst.full_state_dict)
    elif rank == 0:
        time.sleep(12.0)  # the store is this process's
    return found


@pytest.mark.parametrize(
    ("kind", "words", "within_s"),
    [
        ("read", "does not run layer '4'", 9.0),
        ("plan", "does not run layer '4'", 9.0),
        ("forward", "ValueError: on this rank alone", 5.0),
        ("backward", "its backward was ended by an exception", 5.0),
        ("hooks", "ValueError: on this rank alone", 9.0),
    ],
)
def test_ranks_do_not_wait_for_one_that_stopped_with_an_error(
    ranks: Any, kind: str, words: str, within_s: float
) -> None:
    waiting, refused = ranks(rank_that_refuses, 2, kind, group_s=600)
    for error, text, took_s in waiting:
        assert error == "CommTimeout", waiting
        assert "because rank 1 stopped with an error of its own" in text, waiting
        assert words in text
        assert took_s < within_s
    own, *later = refused
    assert own[0] in ("StrettoError", "ValueError")
    for error, _, took_s in later:
        assert error == "CommTimeout", refused
        assert took_s < 15
    if kind != "plan":
        assert "the other ranks no longer wait for this one" in later[0][1]


def test_a_rank_that_catches_a_refusal_continues_with_the_others(ranks: Any) -> None:
    waiting, refused = ranks(rank_that_refuses, 2, "comes back", group_s=600)
    assert [row[0] for row in waiting] == ["", "", ""]
    assert [row[0] for row in refused] == ["StrettoError", "", "", ""]


def fails_where_set(*_: Any) -> None:
    if gc.get_threshold()[0] == FAILS:
        raise ValueError("on this rank alone")


def rank_with_two_models(rank: int, size: int, kind: str) -> tuple[str, str]:
    """Rank 1 has an error in one model; rank 0 waits in the other."""
    from stretto.burst import refusals

    refusals.GRACE_S = 2.0
    first, second = two_ranks(size), two_ranks(size)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    second(torch.ones(2, 4)).sum().backward()
    failed = ""
    if kind == "hook":
        first.module.register_forward_hook(fails_where_set)
        usual = gc.get_threshold()
        if rank == 1:
            gc.set_threshold(FAILS)
        try:
            first(torch.ones(2, 4))
        except ValueError as exc:
            failed = str(exc)
        gc.set_threshold(*usual)
    elif rank == 1:
        failed = raised(first.module.state_dict)[1]
    assert bool(failed) == (rank == 1), failed
    if kind == "continues":
        second(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        time.sleep(5.0)  # longer than the others wait
    found = raised(lambda: second(torch.ones(2, 4)).sum().backward())
    torch.distributed.barrier()  # the store is one rank's
    return found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("read", "does not run layer '4'"),
        ("hook", "ValueError: on this rank alone"),
    ],
)
def test_ranks_that_wait_in_another_model_learn_of_an_error(
    ranks: Any, kind: str, words: str
) -> None:
    waiting, refused = ranks(rank_with_two_models, 2, kind, group_s=600)
    assert waiting[0] == "CommTimeout", waiting
    assert "because rank 1 stopped with an error of its own" in waiting[1]
    assert words in waiting[1]
    assert "the other ranks no longer wait for this one" in refused[1]
    assert words in refused[1]


def test_a_rank_that_continues_with_another_model_is_awaited(ranks: Any) -> None:
    found = ranks(rank_with_two_models, 2, "continues", group_s=600)
    assert found == [("", ""), ("", "")]


def rank_lost_while_ranks_name_a_difference(
    rank: int, size: int, kind: str
) -> tuple[str, str, float]:
    """Rank 1 meets an error before it has sent the others what it holds."""
    from stretto.burst import refusals
    from stretto.runtime.agreement import Agreement

    refusals.GRACE_S = 2.0
    if kind == "operations":
        model: nn.Module = Ordered(rank == 1)
        plan = plan_of_ordered(size)
    else:
        model = Defined(rank == 1)
        plan = plan_of(Defined(False), EXAMPLE, lambda _i: (0, size), size)

    def fails(*_: Any) -> Any:
        raise ValueError("on this rank alone")

    if rank == 1:
        Agreement.gather = fails  # type: ignore[method-assign]
    began_s = time.perf_counter()
    try:
        BurstParallel(model, plan, example_inputs=(EXAMPLE,))
    except Exception as exc:  # noqa: BLE001
        took_s = time.perf_counter() - began_s
        if rank == 1:
            time.sleep(8.0)  # its process does not end
        return type(exc).__name__, str(exc), took_s
    return "", "", 0.0


@pytest.mark.parametrize("kind", ["operations", "parameters"])
def test_ranks_that_name_a_difference_do_not_wait_for_a_lost_one(
    ranks: Any, kind: str
) -> None:
    waiting, lost = ranks(rank_lost_while_ranks_name_a_difference, 2, kind, group_s=600)
    assert lost[:2] == ("ValueError", "on this rank alone")
    assert waiting[0] == "CommTimeout", waiting
    assert "because rank 1 stopped with an error of its own: ValueError" in waiting[1]
    assert waiting[2] < 8.0
