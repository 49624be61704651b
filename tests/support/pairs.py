"""A measured pair of a foreground and a background job."""

from __future__ import annotations

from typing import Any

from stretto.schema.collocation import CollocatedPair


def measured_pair(**changes: Any) -> CollocatedPair:
    """Return a pair that loses 3 % and gets 40 %, without a spread."""
    figures: dict[str, Any] = {
        "foreground": "vgg",
        "background": "small",
        "device": "cpu",
        "policy": "outstanding",
        "depth": 1,
        "task_s": 1e-4,
        "usable_ratio": 0.5,
        "loss_ratio": 0.03,
        "loss_spread_ratio": 0.0,
        "share_ratio": 0.4,
        "share_spread_ratio": 0.0,
        "pairs": 8,
    }
    return CollocatedPair(**figures | changes)
