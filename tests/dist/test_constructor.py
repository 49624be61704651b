"""What DDP's constructor refuses, ours refuses with the same error."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.errors import SpecError
from support.checks import raised

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class Meta(nn.Module):
    """Parameters of two device types."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(2, 2)
        self.there = nn.Linear(2, 2, device="meta")


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


CASES: dict[str, Any] = {
    "nothing to train": lambda wrap: wrap(frozen()),
    "no parameters": lambda wrap: wrap(nn.ReLU()),
    "uninitialized": lambda wrap: wrap(nn.LazyLinear(3)),
    "lazy and frozen": lambda wrap: wrap(nn.Sequential(nn.LazyLinear(3), frozen())),
    "two device types": lambda wrap: wrap(Meta()),
    "device ids on a CPU": lambda wrap: wrap(nn.Linear(2, 2), device_ids=[0]),
    "two device ids": lambda wrap: wrap(nn.Linear(2, 2), device_ids=[0, 1]),
    "output device": lambda wrap: wrap(nn.Linear(2, 2), output_device=0),
    "unknown option": lambda wrap: wrap(nn.Linear(2, 2), no_such_option=1),
    "no module": lambda wrap: wrap(),
    "a negative cap": lambda wrap: wrap(nn.Linear(2, 2), bucket_cap_mb=-1),
    "cap of a word": lambda wrap: wrap(nn.Linear(2, 2), bucket_cap_mb="much"),
}


def errors(wrap: Any) -> dict[str, tuple[str, str]]:
    found = {}
    for name, case in CASES.items():
        try:
            case(wrap)
        except Exception as exc:  # noqa: BLE001 - errors are compared
            # A call's own words name the class.
            line = (str(exc).splitlines() or [""])[0]
            found[name] = (type(exc).__name__, line.split("__init__()")[-1].strip())
        else:
            found[name] = ("none", "")
    return found


def rank_builds(rank: int, size: int) -> tuple[Any, Any]:
    return errors(nn.parallel.DistributedDataParallel), errors(stretto.DDP)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_errors_of_the_constructor_are_ddp_s(ranks: Any, size: int) -> None:
    assert torch.distributed.is_available()
    for theirs, ours in ranks(rank_builds, size):
        assert ours == theirs


INVALID: tuple[dict[str, Any], ...] = (
    {"plan": 3},
    {"plan": "no-such-plan.json"},
    {"tune": {"steps": 3}},
    {"wire_dtype": "int8"},
    {"overlap": "sideways"},
    {"order": "sorted"},
    {"order": "negotiated", "lanes": 0},
    {"order": "negotiated", "unit_bytes": "1"},
    {"nan": "perhaps"},
    {"nan": "warn", "nan_patience": "1"},
    {"timeout_s": 0},
    {"timeout_s": "5"},
    {"record": "steps.json"},
    {"on_settled": "print"},
    {"lane_backend": "pigeon"},
    {"lane_backend": ["local"]},
    {"error_feedback": "no"},
    {"exact_clipping": "no"},
)


def one_rank_has_invalid_options(rank: int, size: int) -> list[str]:
    found = []
    for options in INVALID:
        try:
            stretto.DDP(nn.Linear(2, 2), **(options if rank else {}))
        except Exception as exc:  # noqa: BLE001 - errors are compared
            found.append(type(exc).__name__)
        else:
            found.append("none")
    return found


def test_an_option_that_is_invalid_on_one_rank_is_an_error_on_all(ranks: Any) -> None:
    """The others waited for as long as the process group lets them."""
    others, mine = ranks(one_rank_has_invalid_options, 2, group_s=100.0)
    assert others == ["RankDisagreement"] * len(INVALID)
    assert mine == ["SpecError"] * len(INVALID)


def one_rank_tunes_on_another_schedule(rank: int, size: int) -> list[tuple[str, str]]:
    found = []
    for first, other in (("forced", ""), ("", "forcd")):
        os.environ["STRETTO_TUNE_SCHEDULE"] = other if rank else first
        try:
            stretto.DDP(nn.Linear(2, 2))
        except Exception as exc:  # noqa: BLE001 - errors are compared
            found.append((type(exc).__name__, str(exc)))
        else:
            found.append(("none", ""))
    return found


def test_schedules_that_differ_or_do_not_exist_are_errors_on_all(ranks: Any) -> None:
    others, mine = ranks(one_rank_tunes_on_another_schedule, 2, group_s=100.0)
    assert others[0] == mine[0]
    assert "rank 0 reported 'forced'; rank 1 reported ''" in mine[0][1]
    assert [others[1][0], mine[1][0]] == ["RankDisagreement", "SpecError"]


def rank_has_invalid_variables(rank: int, size: int) -> list[str]:
    found = []
    for name in ("OVERLAP", "CLIPPING", "LANE_BACKEND"):
        os.environ[f"STRETTO_{name}"] = "perhaps"
        try:
            stretto.DDP(nn.Linear(2, 2))
        except SpecError as exc:
            found.append(str(exc))
        del os.environ[f"STRETTO_{name}"]
    return found


def test_a_value_that_a_variable_cannot_have_is_an_error(ranks: Any) -> None:
    for overlap, clipping, backend in ranks(rank_has_invalid_variables, 1):
        assert overlap.startswith(
            "overlap (or STRETTO_OVERLAP) must be 'backward' or 'forward' or 'auto'"
        )
        assert clipping == "STRETTO_CLIPPING must be exact or parts, got 'perhaps'"
        assert backend.startswith("STRETTO_LANE_BACKEND must be one of 'gloo', ")


def rank_poisons(rank: int, size: int) -> str:
    os.environ["STRETTO_POISON"] = "yes"
    _, message = raised(stretto.DDP, nn.Linear(2, 2), overlap="auto")
    return message


def test_a_poison_that_is_neither_on_nor_off_is_an_error(ranks: Any) -> None:
    assert ranks(rank_poisons, 1) == ["STRETTO_POISON must be 1 or 0, got 'yes'"]


def rank_passes_a_number(rank: int, size: int) -> str:
    with pytest.raises(TypeError) as error:
        stretto.DDP(nn.Linear(2, 2), process_group=3)
    return str(error.value)


def test_a_process_group_that_is_a_number_is_an_error(ranks: Any) -> None:
    assert ranks(rank_passes_a_number, 1) == [
        "process_group must be a process group, got 3"
    ]


def options_in_other_types(rank: int, size: int) -> str:
    value: Any = np.True_ if rank else True
    model = stretto.DDP(nn.Linear(2, 2), exact_clipping=value, error_feedback=value)
    return model.backend


def test_true_of_numpy_equals_true_of_another_rank(ranks: Any) -> None:
    assert ranks(options_in_other_types, 2) == ["gloo"] * 2


def test_variables_that_are_empty_count_as_not_set(
    ranks: Any, monkeypatch: Any
) -> None:
    for name in ("PLAN", "OVERLAP", "CLIPPING", "LANE_BACKEND", "TUNE_SCHEDULE"):
        monkeypatch.setenv(f"STRETTO_{name}", "")
    assert ranks(builds, 2) == ["gloo"] * 2


def builds(_rank: int, _size: int) -> str:
    return stretto.DDP(nn.Linear(2, 2)).backend


def test_the_signature_has_ddp_s_arguments_in_ddp_s_order() -> None:
    theirs = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    ours = inspect.signature(stretto.DDP).parameters
    rows = [(p.name, p.kind, p.default) for p in theirs.values()]
    assert [(p.name, p.kind, p.default) for p in ours.values()][: len(rows)] == rows
    assert {"plan", "tune", "lane_backend"} <= ours.keys()


class InOrder(nn.Module):
    """Two equal layers, which ranks name in another order."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Wrapped(nn.Module):
    """Adds a prefix to parameters' names, as `torch.compile` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InOrder(("a", "b"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.inner(x))


def trained(model: Any, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(12):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def alone(wrap: Any, rank: int) -> list[torch.Tensor]:
    """Build models that DDP refuses on one rank, before it waits for others."""
    if rank == 0:
        for bad in (nn.ReLU(), frozen()):
            with pytest.raises(RuntimeError, match="gradient"):
                wrap(bad)
    return trained(wrap(InOrder(("a", "b"))), rank)


def after_a_message(wrap: Any, rank: int) -> list[torch.Tensor]:
    """Send the parameters by hand, once rank 0 has built its model."""
    module = InOrder(("a", "b"))
    if rank == 0:
        model = wrap(module, init_sync=False)
    for p in module.parameters():
        if rank == 0:
            dist.send(p.data, 1)
        else:
            dist.recv(p.data, 0)
    if rank != 0:
        model = wrap(module, init_sync=False)
    return trained(model, rank)


def in_another_order(wrap: Any, rank: int) -> list[torch.Tensor]:
    """Build two models, each rank beginning with another one."""
    torch.manual_seed(0)
    modules = [InOrder(("a", "b")), Wrapped()]
    models: dict[int, Any] = {}
    for number in (rank, 1 - rank):
        models[number] = wrap(modules[number], init_sync=False)
    return [*trained(models[0], rank), *trained(models[1], rank)]


FORMS: dict[str, Any] = {
    "an error on one rank": alone,
    "a message between constructors": after_a_message,
    "constructors in another order": in_another_order,
    "other names": lambda wrap, rank: trained(
        wrap(Wrapped() if rank else InOrder(("a", "b"))), rank
    ),
    "names in another order": lambda wrap, rank: trained(
        wrap(InOrder(("b", "a") if rank else ("a", "b"))), rank
    ),
}


def build_in_every_form(rank: int, size: int) -> list[str]:
    os.environ["STRETTO_TUNE_SCHEDULE"] = "forced"
    different = []
    for name, form in FORMS.items():
        torch.manual_seed(rank)
        theirs = form(nn.parallel.DistributedDataParallel, rank)
        torch.manual_seed(rank)
        ours = form(stretto.DDP, rank)
        if not all(map(torch.equal, theirs, ours)):
            different.append(name)
    return different


def test_ranks_may_build_models_as_ddp_lets_them(ranks: Any) -> None:
    assert ranks(build_in_every_form, 2, group_s=60.0) == [[], []]


def groups_time_out_differently(rank: int, size: int) -> bool:
    os.environ["STRETTO_TUNE_SCHEDULE"] = "forced"
    group = dist.new_group(timeout=timedelta(seconds=60 + rank))
    model = stretto.DDP(InOrder(("a", "b")), process_group=group)
    trained(model, rank)
    return model.plan is not None


def test_timeouts_of_process_groups_may_differ(ranks: Any) -> None:
    assert ranks(groups_time_out_differently, 2) == [True, True]
