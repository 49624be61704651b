"""Methods that TorchDynamo may resume, see Note [TorchDynamo and super]."""

from __future__ import annotations

from typing import Any

import pytest

import stretto
from stretto import runtime


@pytest.mark.parametrize(
    "method",
    [
        stretto.DistributedDataParallel.forward,
        runtime.DistributedDataParallel.forward,
        runtime.DistributedDataParallel.no_sync,
        runtime.DistributedDataParallel._pre_forward,
    ],
)
def test_methods_of_a_compiled_step_name_the_class_they_extend(method: Any) -> None:
    assert "super" not in method.__code__.co_names
