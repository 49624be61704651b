"""Masks of dropout modules that ranks draw by sample."""

import itertools

import pytest
import torch
from torch import nn

from stretto.burst.dropout import Draws, DropoutDraw


@pytest.fixture
def drop():
    draws = Draws(seed=0, device=torch.device("cpu"))
    made = DropoutDraw(nn.Dropout(0.5), "drop", draws)
    made.layers = {"first": 0, "second": 1}
    return made


def masks(drop, layer, calls):
    drop.draws.begin(layer, range(3))
    return [drop(torch.ones(3, 32)) for _ in range(calls)]


def test_each_call_of_one_module_has_masks_of_its_own(drop):
    found = [*masks(drop, "first", 2), *masks(drop, "second", 2)]
    for one, two in itertools.combinations(found, 2):
        assert not torch.equal(one, two)


def test_a_layer_that_runs_again_has_the_same_masks(drop):
    for one, two in zip(masks(drop, "first", 2), masks(drop, "first", 2), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (50, 4)),
        (nn.Dropout1d, (50, 4)),
        (nn.Dropout1d, (50, 3, 4)),
        (nn.Dropout2d, (50, 3, 4, 4)),
        (nn.Dropout3d, (50, 3, 4, 4)),
        (nn.Dropout3d, (50, 3, 2, 4, 4)),
    ],
    ids=str,
)
def test_what_torch_drops_as_a_whole_ranks_drop_as_a_whole(kind, shape):
    module = kind(0.5)
    torchs = module(torch.ones(shape)) > 0
    drop = DropoutDraw(module, "drop", Draws(seed=0, device=torch.device("cpu")))
    drop.layers = {"layer": 0}
    drop.draws.begin("layer", range(shape[0]))
    ours = drop(torch.ones(shape)) > 0
    for sides in range(1, len(shape) + 1):
        parts = [mask.reshape(*shape[:sides], -1) for mask in (torchs, ours)]
        torchs_whole, ours_whole = (bool((p == p[..., :1]).all()) for p in parts)
        assert torchs_whole == ours_whole
