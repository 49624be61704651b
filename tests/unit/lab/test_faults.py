"""What a fault's line may say."""

from __future__ import annotations

import pytest

from stretto.errors import SpecError
from stretto.lab import LabSpec, Mode
from stretto.lab.faults import Fault, Verb, packet_rules

SPEC = LabSpec(hosts=2, ranks_per_host=2, link_bytes_per_s=1e8)


def test_a_fault_is_a_verb_a_target_and_a_moment() -> None:
    assert Fault.of("kill host1 at step 40") == Fault(
        verb=Verb.KILL, kind="host", number=1, at_step=40
    )
    assert Fault.of("stop member12 at 2.5 s for 1 s") == Fault(
        verb=Verb.STOP, kind="member", number=12, at_s=2.5, for_s=1.0
    )


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "break host1 at step 4",
        "kill host1",
        "kill host at step 3",
        "kill host1 at step 3 for 2 s",
        "terminate host1 at step 3 for 2 s",
        "change-bytes rank1 at step 3",
        "disconnect rank1 at step 3",
        "stop rank1 at noon",
        "stop rank1 at step 3 for life",
    ],
)
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"fault|needs a host|no end"):
        Fault.of(text)


@pytest.mark.parametrize("text", ["kill host2 at step 1", "kill rank4 at step 1"])
def test_a_fault_needs_a_host_or_rank_that_exists(text: str) -> None:
    with pytest.raises(SpecError, match="the lab has no"):
        Fault.of(text).check(SPEC, Mode.NAMESPACES)


def test_links_can_be_broken_only_where_hosts_have_some() -> None:
    Fault.of("kill rank1 at step 1").check(SPEC, Mode.PACED)
    with pytest.raises(SpecError, match="--mode namespaces"):
        Fault.of("disconnect host1 at step 1").check(SPEC, Mode.PACED)


def test_packets_are_lost_in_the_direction_that_a_fault_names() -> None:
    assert 'iifname "eth0" drop' in packet_rules(Verb.DROP_INPUT)
    assert 'oifname "eth0" drop' in packet_rules(Verb.DROP_OUTPUT)


def test_bytes_are_changed_in_what_a_host_sends() -> None:
    rules = packet_rules(Verb.CHANGE_BYTES)
    assert 'oifname "eth0"' in rules
    assert "set 0x5a" in rules
