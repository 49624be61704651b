"""Convert floating-point numbers to integers for the exchange between ranks."""

from __future__ import annotations

import struct


def as_int(value: float) -> int:
    """Return the bits of a number."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def as_float(number: int) -> float:
    """Return the number of these bits."""
    found: float = struct.unpack("<d", struct.pack("<q", number))[0]
    return found
