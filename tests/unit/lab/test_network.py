from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.lab.network import (
    NUM_FLOW_CLASSES,
    bridge_commands,
    burst_bytes,
    marking_rules,
    shaping_commands,
)
from stretto.lab.spec import LabSpec

CLASS = re.compile(
    r"class add dev eth0 parent (?P<parent>\S+) classid (?P<id>\S+) "
    r"htb rate (?P<rate>\d+)bps ceil (?P<ceil>\d+)bps"
)


def classes_of(spec):
    return [match.groupdict() for match in CLASS.finditer(shaping_commands(spec))]


def lab(link_bytes_per_s=125e6, flow_bytes_per_s=37.5e6, hosts=2):
    return LabSpec(
        hosts=hosts,
        link_bytes_per_s=link_bytes_per_s,
        flow_bytes_per_s=flow_bytes_per_s,
    )


def test_every_mark_leads_to_a_class_that_exists_and_no_two_to_one():
    made = {each["id"] for each in classes_of(lab())}
    reached = dict(re.findall(r"(\d+) : (1:[0-9a-f]+)", marking_rules()))
    # `numgen inc mod N offset 1` counts from 1 to N.
    assert set(reached) == {str(mark) for mark in range(1, NUM_FLOW_CLASSES + 1)}
    assert len(set(reached.values())) == NUM_FLOW_CLASSES
    assert set(reached.values()) <= made


@settings(max_examples=20)
@given(link=st.floats(2e4, 1e10), flow=st.none() | st.floats(2e4, 1e10))
def test_ceilings_are_the_rates_asked_for(link, flow):
    top, other, *flows = classes_of(lab(link, flow))
    assert int(top["ceil"]) == int(top["rate"]) == round(link)
    assert int(other["ceil"]) == round(link)
    expected = round(link if flow is None else min(link, flow))
    assert {int(each["ceil"]) for each in flows} == {expected}
    assert len(flows) == NUM_FLOW_CLASSES
    assert {each["parent"] for each in [other, *flows]} == {top["id"]}


@given(link=st.floats(1e5, 1e10))
def test_guaranteed_rates_leave_the_link_to_be_borrowed(link):
    # htb lets a class below its own rate send whatever its parent says.
    _, *children = classes_of(lab(link))
    assert sum(int(child["rate"]) for child in children) <= 0.01 * link


@pytest.mark.parametrize("rate", [1e5, 37.5e6, 125e6, 1.25e9])
def test_a_burst_holds_a_segment_and_at_most_some_milliseconds(rate):
    burst = burst_bytes(rate)
    assert burst >= 65536
    assert burst <= max(65536, 2e-3 * rate)


def test_every_host_is_plugged_into_the_bridge():
    commands = bridge_commands(lab(hosts=3), [7, 8, 9])
    for host, fd in enumerate([7, 8, 9]):
        assert re.search(
            rf"port{host} .*peer name eth0 .*/proc/self/fd/{fd}$", commands, re.M
        )
        assert f"link set port{host} master br0" in commands
