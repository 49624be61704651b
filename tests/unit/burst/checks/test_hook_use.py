"""Hooks that a burst model calls itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stretto.burst.checks.hook_use import HookUse
from stretto.errors import StrettoError


def test_a_value_of_a_hook_after_accumulation_is_an_error_with_its_line():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    def returns(one: Any) -> Any:
        return one.grad

    parameter.register_post_accumulate_grad_hook(returns)
    ranks: Any = SimpleNamespace()
    line = returns.__code__.co_firstlineno
    with pytest.raises(StrettoError, match=rf"hook_use\.py:{line}: .*returned a value"):
        HookUse(ranks, lambda _: []).call_after(parameter)
