"""What `stretto run --elastic` refuses."""

from __future__ import annotations

import pytest

from stretto.cli.run import _elastic_arguments, _limits
from stretto.errors import SpecError


@pytest.mark.parametrize("text", ["4", "0:2", "3:2", "a:b", ":", "2:"])
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--elastic"):
        _limits(text)


def test_limits_are_the_least_and_the_most_ranks() -> None:
    assert _limits("2:8") == (2, 8)


def test_a_number_of_ranks_may_be_given() -> None:
    script = __file__
    assert _elastic_arguments(("--nproc-per-node", "4", script, "--x"), 8) == (
        4,
        (script, "--x"),
    )
    assert _elastic_arguments((script,), 8) == (8, (script,))


def test_other_options_of_torchrun_are_refused() -> None:
    with pytest.raises(SpecError, match="--nnodes"):
        _elastic_arguments(("--nnodes=2", __file__), 8)
