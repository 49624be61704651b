from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import units
from stretto.errors import SpecError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1gbit", 1.25e8),
        ("300mbit", 3.75e7),
        ("2.5Gbps", 3.125e8),
        (" 8 kbit ", 1e3),
        ("8bit", 1.0),
        (".5tbit", 6.25e10),
        ("1.gbit", 1.25e8),
    ],
)
def test_rates_are_read_in_bits(text, bytes_per_s):
    assert units.parse_rate_bytes_per_s(text) == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "-1gbit", "0gbit", "1gbyte", "1 g bit", "1e9bit", "nan"]
)
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(SpecError, match="300mbit") as caught:
        units.parse_rate_bytes_per_s(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("25MiB", 25 * 2**20),
        ("64kib", 2**16),
        ("1MB", 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("0", 0),
        ("7B", 7),
        ("2k", 2000),
    ],
)
def test_sizes_are_binary_only_where_they_say_so(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 TB", "1e3", "ten"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SpecError, match="size") as caught:
        units.parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 s"),
        (1.3, "1.30 s"),
        (0.0123, "12.3 ms"),
        (1e-3, "1.00 ms"),
        (0.99999e-3, "1.00 ms"),
        (612e-6, "612 us"),
        (3e-9, "3.00 ns"),
        (12345.6, "12346 s"),
        (999.7, "1000 s"),
        (-0.25, "-250 ms"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_durations_have_three_digits(duration_s, text):
    assert units.format_s(duration_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1020 * 1024, "1020 KiB"),
        (25 * 2**20, "25 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**42, "4096 GiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size_bytes, text):
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (3.75e7, "300 Mbit/s"),
        (1.25e8, "1 Gbit/s"),
        (1.18e8, "944 Mbit/s"),
        (1.25e13, "100000 Gbit/s"),
        (10.0, "80 bit/s"),
        (0.0, "0 bit/s"),
    ],
)
def test_rates_are_written_as_links_are_sold(bytes_per_s, text):
    assert units.format_rate(bytes_per_s) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("30 s", 30.0), ("1.5min", 90.0), (" 2 h ", 7200.0)]
)
def test_times_have_a_unit(text, seconds):
    assert units.parse_s(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "0 s", "-1 s", "1 day", "1e3 s", "s"])
def test_other_times_are_refused(text):
    with pytest.raises(SpecError, match="positive number"):
        units.parse_s(text)


@given(st.floats(1e-12, 1e12))
def test_written_durations_mean_what_they_say(duration_s):
    text = units.format_s(duration_s)
    assert "e" not in text or duration_s < 1e-9
    number, unit = text.split(" ")
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(duration_s, rel=5.1e-3)


@given(st.floats(1.0, 1e14))
def test_written_rates_are_read_back(bytes_per_s):
    text = re.sub(r"/s$", "", units.format_rate(bytes_per_s))
    assert units.parse_rate_bytes_per_s(text) == pytest.approx(bytes_per_s, rel=5.1e-3)


@given(st.integers(0, 2**50))
def test_written_sizes_are_read_back(size_bytes):
    again = units.parse_bytes(units.format_bytes(size_bytes))
    assert again == pytest.approx(size_bytes, rel=5.1e-3)


def test_a_count_of_one_has_a_singular_noun():
    assert [units.counted(n, "host") for n in (0, 1, 2)] == [
        "0 hosts",
        "1 host",
        "2 hosts",
    ]
