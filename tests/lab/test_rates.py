"""What the emulated network carries. Medians of rounds: the machine is shared."""

from __future__ import annotations

import json
import statistics

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("namespaces")]

MBIT = 125_000
ROUNDS = 3
ATTEMPTS = 5


def flows(program, flows, *, opener=0, seconds=1.2):
    return ["--", "python", program, flows, opener, seconds, ROUNDS]


def totals(done):
    assert done.returncode == 0, done.stderr
    return [sum(rates) for rates in json.loads(done.stdout)]


def reaches(lab, *command, rate):
    """Run until the rate is reached, and return the last output.

    Other load on the machine makes flows slower, never faster than their limit.
    """
    for _ in range(ATTEMPTS):
        done = lab.run(*command)
        median = statistics.median(totals(done))
        assert median < 1.1 * rate
        if median > 0.9 * rate:
            return json.loads(done.stdout)
    raise AssertionError(f"{median} of {rate} bytes/s in {ATTEMPTS} attempts")


@pytest.mark.parametrize("opener", [0, 1])
def test_one_flow_reaches_its_cap_whichever_side_opened_it(lab, programs, opener):
    reaches(
        lab,
        *["--hosts", 2, "--link", "1gbit", "--flow", "300mbit", "--timeout", 50],
        *flows(programs / "flows.py", 1, opener=opener),
        rate=300 * MBIT,
    )


@pytest.mark.parametrize("opener", [0, 1])
def test_four_flows_fill_the_link_evenly(lab, programs, opener):
    rounds = reaches(
        lab,
        *["--hosts", 2, "--link", "1gbit", "--flow", "300mbit", "--timeout", 50],
        *flows(programs / "flows.py", 4, opener=opener),
        rate=1000 * MBIT,
    )
    shares = [min(rates) / max(rates) for rates in rounds]
    assert statistics.median(shares) > 0.8


def test_a_flow_without_a_cap_takes_the_link(lab, programs):
    reaches(
        lab,
        *["--hosts", 2, "--link", "400mbit", "--timeout", 50],
        *flows(programs / "flows.py", 1),
        rate=400 * MBIT,
    )


def test_a_flow_cap_above_the_link_means_the_link(lab, programs):
    reaches(
        lab,
        *["--hosts", 2, "--link", "200mbit", "--flow", "1gbit", "--timeout", 50],
        *flows(programs / "flows.py", 2),
        rate=200 * MBIT,
    )


def test_two_labs_at_once_do_not_share_a_link(lab, programs):
    # Each alone could fill its link; on one network they would get half of it.
    command = [
        *["--hosts", 2, "--link", "400mbit", "--flow", "100mbit", "--timeout", 50],
        *flows(programs / "flows.py", 4),
    ]
    with lab.start(*command) as first, lab.start(*command) as second:
        outputs = [process.communicate(timeout=60) for process in (first, second)]
    for process, (out, err) in zip((first, second), outputs, strict=True):
        assert process.returncode == 0, err
        median = statistics.median(sum(rates) for rates in json.loads(out))
        assert median == pytest.approx(400 * MBIT, rel=0.1)
