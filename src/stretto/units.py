"""The package's only conversions between text and seconds, bytes, rates and counts."""

from __future__ import annotations

import math
import re

from stretto.errors import SpecError

_RATE = re.compile(
    r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(k|m|g|t)?(bit|bps)\s*$", re.IGNORECASE
)
_SIZE = re.compile(
    r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ki|mi|gi|k|m|g)?b?\s*$", re.IGNORECASE
)
_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)\s*$")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}


def parse_rate_bytes_per_s(text: str) -> float:
    """Return the bytes per second of a rate such as ``1gbit`` or ``2.5Gbps``.

    Raises:
        SpecError: the text is not a positive rate.
    """
    match = _RATE.match(text)
    bits = float(match[1]) * _DECIMAL[(match[2] or "").lower()] if match else 0.0
    if bits <= 0:
        raise SpecError(
            f"a rate is a positive number and one of bit, kbit, mbit, gbit, "
            f"for instance 300mbit; got {text!r}"
        )
    return bits / 8


def parse_bytes(text: str) -> int:
    """Return the whole bytes of a size such as ``25MiB``, ``1MB`` or ``4096``.

    Raises:
        SpecError: the text is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise SpecError(f"a size is a number and one of B, KiB, MiB, GiB; got {text!r}")
    unit = (match[2] or "").lower()
    size_bytes = float(match[1]) * (_BINARY.get(unit) or _DECIMAL[unit])
    if size_bytes >= 2**63:
        raise SpecError(f"a size must be below 2^63 bytes, got {text:.40}")
    return round(size_bytes)


def parse_s(text: str) -> float:
    """Return the seconds of a time such as ``30 s``, ``10 min`` or ``1.5 h``.

    Raises:
        SpecError: the text is not a positive time.
    """
    match = _TIME.match(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise SpecError(
            f"a time is a positive number and one of s, min, h, for instance 10 min; "
            f"got {text!r}"
        )
    return seconds


def format_s(duration_s: float) -> str:
    """Format a duration with three significant digits and its unit: ``12.3 ms``."""
    if not math.isfinite(duration_s):
        return str(duration_s)
    if duration_s == 0:
        return "0 s"
    # Rounding may carry: 999.9 us is 1.00 ms. Hence the limits just below 1.
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(duration_s) >= 0.9995 * scale:
            return f"{_digits(duration_s / scale, keep_zeros=True)} {unit}"
    return f"{_digits(duration_s / 1e-9, keep_zeros=True)} ns"


def format_bytes(size_bytes: float) -> str:
    """Format a size with three significant digits and a binary unit: ``25 MiB``."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size_bytes) >= scale:
            return f"{_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate in bits per second, as links are sold: ``300 Mbit/s``."""
    bits_per_s = bytes_per_s * 8
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if abs(bits_per_s) >= 0.9995 * scale:
            return f"{_digits(bits_per_s / scale)} {unit}"
    return f"{_digits(bits_per_s)} bit/s"


def counted(number: int, word: str) -> str:
    """Return a number with its noun: ``1 lane``, ``3 lanes``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _digits(value: float, *, keep_zeros: bool = False) -> str:
    """Format three significant digits, never an exponent; whole from 1000 on."""
    if abs(value) >= 999.5:
        return f"{value:.0f}"
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:#.3g}".rstrip(".") if keep_zeros else f"{value:.3g}"
