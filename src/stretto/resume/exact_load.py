"""Load an optimizer's state without a change of its types.

``Optimizer.load_state_dict`` casts floating-point states to their parameter's type, for
instance float32 copies of bfloat16 weights. A rank that got its state so would train
differently from the one that gave it.
"""

from __future__ import annotations

from typing import Any

import torch


def load_exactly(value: Any, state: dict[str, Any]) -> None:
    """Load a state into an optimizer, or another object that has ``load_state_dict``.

    Args:
        value: the object.
        state: what its ``state_dict`` returned, here or on another rank.
    """
    value.load_state_dict(state)
    if not isinstance(value, torch.optim.Optimizer):
        return
    saved = state.get("state", {})
    groups = zip(value.param_groups, state.get("param_groups", ()), strict=False)
    for group, given in groups:
        for parameter, number in zip(group["params"], given["params"], strict=False):
            mine = value.state.get(parameter)
            if not isinstance(mine, dict):
                continue
            for key, wanted in saved.get(number, {}).items():
                got = mine.get(key)
                if (
                    isinstance(got, torch.Tensor)
                    and isinstance(wanted, torch.Tensor)
                    and got.dtype != wanted.dtype
                ):
                    mine[key] = wanted.detach().to(got.device, copy=True)
