"""Options that are true or false refuse everything else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from stretto.boolean_options import bool_option
from stretto.burst.graph import capture
from stretto.convert import Choices
from stretto.errors import SpecError
from stretto.optim import AdamSGD


@pytest.mark.parametrize(
    ("value", "is_true"),
    [
        (True, True),
        (0, False),
        (1, True),
        (np.True_, True),
        (np.int64(0), False),
        (np.array(1), True),
        (torch.tensor(False), False),
        (torch.tensor([1]), True),
    ],
)
def test_what_counts_as_true_or_false(value: object, is_true: bool) -> None:
    assert bool_option("verify", value) is is_true


@pytest.mark.parametrize(
    "value",
    ["no", "", b"1", None, 2, -1, 1.0, [], torch.ones(2), torch.tensor(1.0), object],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match="verify must be True or False, got "):
        bool_option("verify", value)


def options_of_the_library(value: Any) -> dict[str, Callable[[], object]]:
    """Return calls with one option each, which must be refused before they begin."""
    none: Any = None
    weight = torch.nn.Parameter(torch.zeros(2))
    line = torch.nn.Linear(2, 2)
    inputs = (torch.zeros(2, 2),)
    return {
        "watch": lambda: stretto.TuneOptions(watch=value),
        "plan_cache": lambda: stretto.TuneOptions(plan_cache=value),
        "memory": lambda: stretto.TuneOptions(memory=value),
        "model": lambda: stretto.TuneOptions(model=value),
        "maximize": lambda: AdamSGD([weight], maximize=value),
        "foreach": lambda: AdamSGD([weight], foreach=value),
        "fused": lambda: AdamSGD([weight], fused=value),
        "verify": lambda: capture(line, inputs, verify=value),
        "cuda_graphs": lambda: stretto.profile_layers(
            line, inputs, batch=2, gpus=1, cuda_graphs=value
        ),
        "contention": lambda: stretto.probe(contention=value),
        "adapts": lambda: stretto.Background("exclusive:none", adapts=value),
        "isolates": lambda: stretto.Background("exclusive:none", isolates=value),
        "resume": lambda: stretto.Elastic(line, none, batch="rank:1", resume=value),
        "repair": lambda: stretto.Elastic(line, none, batch="rank:1", repair=value),
        "per_rank_batch": lambda: Choices(per_rank_batch=value),
    }


@pytest.mark.parametrize("name", options_of_the_library("no"))
def test_no_option_takes_a_text_for_true(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} must be True or False, got 'no'"):
        options_of_the_library("no")[name]()


def test_equal_options_have_one_text_that_ranks_compare() -> None:
    no: Any = np.False_
    options = stretto.TuneOptions(watch=no)
    assert repr(options) == repr(stretto.TuneOptions(watch=False))
