"""How near values of several ranks must be, by type.

Ranks with other processors may round the same computation differently.
"""

from __future__ import annotations

import torch

_COPIES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}
_OTHER_COPIES = 1e-2

FACTORS = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative difference of factors by which gradients or parameters were scaled."""

OTHER_FACTORS = 3e-2
"""The same for all other types."""


def of_copies(dtype: torch.dtype) -> float:
    """Return the relative difference at which copies count as equal."""
    return _COPIES.get(dtype, _OTHER_COPIES)
