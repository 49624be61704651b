"""Gradients of a static graph: which parameters take no new plan, and what is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.runtime.static_graph import (
    GradientCounts,
    raise_as_static,
    unsupported,
)


def counted(*uses: int) -> dict[str, int]:
    """Return the counts of parameters by number of gradients in one iteration."""
    parameters = [(f"p{i}", nn.Parameter(torch.ones(1))) for i in range(len(uses))]
    counts = GradientCounts(parameters)
    counts.begin()
    for (_, parameter), times in zip(parameters, uses, strict=True):
        for _ in range(times):
            parameter.sum().backward()
    return counts.end()


def test_only_counts_other_than_one_are_returned() -> None:
    assert counted(1, 1) == {}
    assert counted(1, 0, 2) == {"p1": 0, "p2": 2}


def test_a_parameter_without_a_gradient_is_named_with_a_way_out() -> None:
    line = unsupported(counted(1, 0))
    assert "\n" not in line
    assert "'p1' gets none. " in line
    assert "Pass find_unused_parameters=True instead of static_graph=True" in line


def test_a_parameter_with_several_gradients_is_named_with_its_number() -> None:
    line = unsupported(counted(2, 1, 0))
    assert "'p0' gets 2 (1 more differ). " in line
    assert line.endswith("Pass the plan when the model is created.")
    assert "find_unused_parameters" not in line


UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new "
    "one. This error indicates that your module has parameters that were not used in "
    "producing loss. Pass `find_unused_parameters=True`.\n"
    "Parameter indices which did not receive grad for rank 0: 3"
)


def test_a_changed_graph_gets_ddps_error_for_static_graphs() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise_as_static(RuntimeError(UNUSED))
    assert "training graph has changed in this iteration" in str(raised.value)
    assert "find_unused_parameters" not in str(raised.value)
    assert str(raised.value).endswith(
        "\nParameter indices which did not receive grad for rank 0: 3"
    )


def test_other_errors_of_a_static_graph_stay() -> None:
    raise_as_static(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
