"""Algorithm 1 of DeepPool as printed, with the errors that the figures and tests show.

Its plans may exceed the limit they were made for, and it may miss faster plans within
it: the first predecessor is always accepted, a layer's amplification depends on a
predecessor that the table does not keep, and the last layer's is never tested.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def search_linear(
    comp_s: Sequence[Sequence[float]],
    sync_s: Sequence[Sequence[float]],
    comm_s: Callable[[int, int, int], float],
    widths: Sequence[int],
    amplification_limit: float,
    *,
    order: Sequence[int] | None = None,
) -> tuple[float, tuple[int, ...]]:
    """Return time and widths of Algorithm 1's plan, line by line.

    Args:
        comp_s: by layer and width; the first width is one GPU.
        sync_s: by layer and width.
        comm_s: of (layer, width before it, its width), from the layer before.
        widths: numbers of GPUs.
        amplification_limit: of the paper's AmpLimit.
        order: order in which the inner loop takes widths, ascending as printed.

    Amp(0, h) and comm into the first layer are undefined in print and 0 here.
    """
    count = len(widths)
    inner = range(count) if order is None else order
    before_s = [0.0] * count
    before_layer_s: list[float] | None = None
    came: list[list[int]] = []
    for i in range(len(comp_s)):
        now_s, now_layer_s, chosen = [], [], []
        for g in range(count):
            best_amp = best_s = best_t = math.inf
            best_h = -1
            for h in inner:
                amp, comm = 0.0, 0.0
                if before_layer_s is not None:
                    amp = before_layer_s[h] * widths[h] / comp_s[i - 1][0]
                    comm = comm_s(i, h, g)
                if (
                    amp <= max(best_amp, amplification_limit)
                    and before_s[h] + comm <= best_s
                ):
                    best_s, best_t, best_h = before_s[h] + comm, comm, h
                    best_amp = min(best_amp, amp)
            own_s = comp_s[i][g] + sync_s[i][g]
            now_s.append(best_s + own_s)
            now_layer_s.append(best_t + own_s)
            chosen.append(best_h)
        before_s, before_layer_s = now_s, now_layer_s
        came.append(chosen)
    at = min(range(count), key=before_s.__getitem__)
    total_s, path = before_s[at], []
    for chosen in reversed(came):
        path.append(at)
        at = chosen[at]
    return total_s, tuple(reversed(path))
