"""What errors of reads name: the layer whose values are read, and the program's line.

A rank runs layer '0' of a module, and none of the others.
"""

from __future__ import annotations

import copy
import gc
import inspect

import pytest
import torch
from torch import nn

from stretto.burst.checks.guarded_tensors import require_current
from stretto.burst.checks.stale_guard import StaleParameterGuard
from stretto.errors import StrettoError


class TwoRanks:
    rank, size = 0, 2

    def name(self, rank):
        return f"rank {rank}"


class Guarded:
    def __init__(self):
        self.reported = []
        self.module = nn.Sequential(
            nn.Linear(2, 3),
            nn.ReLU(),
            nn.BatchNorm1d(3, affine=False),
            nn.Linear(3, 3),
            nn.Linear(3, 2),
        )
        self.guard = StaleParameterGuard(
            self.module, TwoRanks(), self.reported.append, lambda _parameter: None
        )
        own = list(self.module[0].parameters())
        others = [
            (str(i), [*part.parameters(), *part.buffers()])
            for i, part in enumerate(self.module)
            if i > 0
        ]
        self.guard.runs(own, others)
        self.guard.is_stale = True


READS = {
    "value": ("4", lambda m: m[4].weight.sum()),
    "attribute": ("4", lambda m: m[4].weight.data),
    "alias": ("4", lambda m: m[4].weight.view_as(m[4].weight).sum()),
    "buffer": ("2", lambda m: m[2].running_mean.sum()),
    "change": ("4", lambda m: m[4].bias.clamp_(0.0, 1.0)),
    "change by others": ("4", lambda m: m[0].weight.data.mul_(m[4].weight.sum())),
    "copied from": ("4", lambda m: torch.empty(2).copy_(m[4].bias)),
    "list": ("4", lambda m: torch._foreach_norm([m[0].weight, m[4].weight])),
    "list of changes": ("4", lambda m: torch._foreach_mul_([m[4].weight], 0.5)),
    "copy": ("4", lambda m: copy.deepcopy(m[4])),
    "layer": ("4", lambda m: m[4](torch.ones(1, 3))),
    "another model": ("4", lambda m: require_current(m[4].parameters())),
    "state": ("3", lambda m: m.state_dict()),
    "state of a part": ("4", lambda m: m[4].state_dict()),
    "state of buffers": ("2", lambda m: m[2].state_dict()),
    "state of a part that runs here": ("3", lambda m: m[0].state_dict()),
}


@pytest.mark.parametrize(("layer", "read"), READS.values(), ids=READS)
def test_an_error_names_the_layer_that_is_read(layer, read):
    guarded = Guarded()
    with pytest.raises(StrettoError, match=f"rank 0 does not run layer '{layer}'"):
        read(guarded.module)


@pytest.mark.parametrize(
    ("layer", "read"),
    [READS["value"], READS["change"], READS["copy"], READS["buffer"]],
    ids=["value", "change", "copy", "buffer"],
)
def test_an_error_after_the_models_end_names_the_layer_that_is_read(layer, read):
    guarded = Guarded()
    module = guarded.module
    del guarded
    gc.collect()
    with pytest.raises(StrettoError, match=f"layer '{layer}'.* was deleted"):
        read(module)


def test_an_error_of_an_optimizers_state_names_a_layer_that_it_changes():
    guarded = Guarded()
    optimizer = torch.optim.SGD(guarded.module[4].parameters(), lr=0.1)
    guarded.guard.before_step(optimizer)
    with pytest.raises(StrettoError, match="layer '4' and has no current optimizer"):
        optimizer.state_dict()


def test_an_error_names_the_programs_line():
    guarded = Guarded()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(StrettoError) as caught:
        guarded.module.state_dict()
    assert str(caught.value).startswith(f"{__file__}:{line}: rank 0 does not run")


def test_the_reported_error_names_the_programs_line():
    guarded = Guarded()
    with pytest.raises(StrettoError):
        guarded.module[4].weight.sum()
    assert str(guarded.reported[0]).startswith(f"{__file__}:")


def test_layers_without_values_elsewhere_refuse_no_state():
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    guard = StaleParameterGuard(
        module, TwoRanks(), lambda _error: None, lambda _parameter: None
    )
    guard.runs(list(module[0].parameters()), [("1", [])])
    guard.is_stale = True
    module.state_dict()
