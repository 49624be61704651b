"""Guarded tensors whose owner is gone."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.checks.guarded_tensors import require_current
from stretto.burst.checks.stale_guard import StaleParameterGuard
from stretto.errors import StrettoError

GONE = "rank 0 does not run layer '1'.* the burst model that trained it was deleted"


class TwoRanks:
    rank, size = 0, 2

    def name(self, rank):
        return f"rank {rank}"


def module_of_a_deleted_model(*, is_stale):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    guard = StaleParameterGuard(
        module, TwoRanks(), lambda _error: None, lambda _parameter: None
    )
    own = list(module[0].parameters())
    guard.runs(own, [("1", [*module[1].parameters(), *module[1].buffers()])])
    guard.is_stale = is_stale
    del guard
    gc.collect()
    return module


READS = {
    "forward": lambda module: module(torch.ones(4, 2)),
    "state": lambda module: module.state_dict(),
    "copy": copy.deepcopy,
    "change": lambda module: module[1].weight.data.mul_(2.0),
    "step": lambda module: torch._foreach_mul_([module[1].weight.detach()], 0.5),
    "another model": lambda module: require_current(module.buffers()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_that_the_last_step_changed_elsewhere_are_not_read(read):
    module = module_of_a_deleted_model(is_stale=True)
    with pytest.raises(StrettoError, match=GONE):
        read(module)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_of_the_last_refresh_are_read(read):
    read(module_of_a_deleted_model(is_stale=False))


def test_a_whole_state_makes_values_current():
    module = module_of_a_deleted_model(is_stale=True)
    module.load_state_dict(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    )
    module(torch.ones(4, 2))


def test_a_part_of_a_state_does_not():
    module = module_of_a_deleted_model(is_stale=True)
    module.load_state_dict({"1.weight": torch.ones(3)}, strict=False)
    with pytest.raises(StrettoError, match=GONE):
        module(torch.ones(4, 2))


def test_a_later_model_guards_what_an_earlier_one_did():
    module = module_of_a_deleted_model(is_stale=False)
    guard = StaleParameterGuard(
        module, TwoRanks(), lambda _error: None, lambda _parameter: None
    )
    guard.runs(list(module[1].parameters()), [("0", list(module[0].parameters()))])
    guard.is_stale = True
    assert type(module[1].weight) is nn.Parameter
    with pytest.raises(StrettoError, match="rank 0 does not run layer '0'"):
        module[0].weight.sum()


@pytest.mark.parametrize("name", ["layer_norm", "linear"])
def test_a_function_that_a_program_replaces_is_called_once(monkeypatch, name):
    own = getattr(functional, name)
    monkeypatch.setattr(functional, name, lambda *a, **k: own(*a, **k) * 0.5)
    kind = {"layer_norm": nn.LayerNorm(3), "linear": nn.Linear(3, 3)}[name]
    module = nn.Sequential(nn.Linear(2, 3), kind)
    wanted = module(torch.ones(4, 2))
    guard = StaleParameterGuard(
        module, TwoRanks(), lambda _error: None, lambda _parameter: None
    )
    guard.runs(list(module[0].parameters()), [("1", list(module[1].parameters()))])
    guard.is_stale = False
    assert torch.equal(module(torch.ones(4, 2)), wanted)
