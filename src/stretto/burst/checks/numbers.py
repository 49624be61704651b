"""Convert what ranks compare to integers for their exchange."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def as_int(value: float) -> int:
    """Return the bits of a number."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def as_float(number: int) -> float:
    """Return the number of these bits."""
    found: float = struct.unpack("<d", struct.pack("<q", number))[0]
    return found


def number_of(data: bytes) -> int:
    """Return a number that differs for different data, and fits into 64 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def number_of_words(words: Iterable[str]) -> int:
    """Return a number that differs for different words, and fits into 64 bits."""
    return number_of("\0".join(words).encode())
