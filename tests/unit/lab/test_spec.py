from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.lab.spec import (
    MAX_HOSTS,
    MIN_RATE_BYTES_PER_S,
    SUBNET,
    LabSpec,
    Mode,
    host_address,
    hosts_file,
    rank_environment,
    shared_environment,
)

SPECS = st.builds(
    LabSpec,
    hosts=st.integers(1, MAX_HOSTS),
    ranks_per_host=st.integers(1, 8),
    link_bytes_per_s=st.floats(MIN_RATE_BYTES_PER_S, 1e11),
    flow_bytes_per_s=st.none() | st.floats(MIN_RATE_BYTES_PER_S, 1e11),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hosts", 0),
        ("hosts", MAX_HOSTS + 1),
        ("ranks_per_host", 0),
        ("link_bytes_per_s", 0.0),
        ("link_bytes_per_s", math.nan),
        ("link_bytes_per_s", math.inf),
        ("flow_bytes_per_s", -1.0),
    ],
)
def test_a_wrong_value_is_named(field, value):
    good = {"hosts": 2, "link_bytes_per_s": 1e8}
    with pytest.raises(SpecError, match=field) as caught:
        LabSpec(**(good | {field: value}))
    assert caught.value.place == f".{field}"
    assert str(value) in str(caught.value)


@given(spec=SPECS)
def test_a_flow_gets_at_most_the_link(spec):
    assert spec.flow_cap_bytes_per_s <= spec.link_bytes_per_s
    if spec.flow_bytes_per_s is None:
        assert spec.flow_cap_bytes_per_s == spec.link_bytes_per_s


@settings(max_examples=30)
@given(spec=SPECS, mode=st.sampled_from([Mode.NAMESPACES, Mode.PACED]))
def test_ranks_learn_who_they_are(spec, mode):
    ranks = [
        rank_environment(spec, rank, mode=mode, master_port=1234)
        for rank in range(spec.num_ranks)
    ]
    places = [(int(env["GROUP_RANK"]), int(env["LOCAL_RANK"])) for env in ranks]
    assert places == list(
        itertools.product(range(spec.hosts), range(spec.ranks_per_host))
    )
    for rank, env in enumerate(ranks):
        assert env["RANK"] == str(rank)
        assert env["WORLD_SIZE"] == str(spec.num_ranks)
        assert env["LOCAL_WORLD_SIZE"] == str(spec.ranks_per_host)
        # What decides where to meet must be the same for all.
        for key in ("MASTER_ADDR", "MASTER_PORT", "STRETTO_LAB_ADDRESSES"):
            assert env[key] == ranks[0][key]
    addresses = ranks[0]["STRETTO_LAB_ADDRESSES"].split(",")
    assert len(addresses) == spec.hosts
    assert len(set(addresses)) == (spec.hosts if mode is Mode.NAMESPACES else 1)


def test_the_process_group_is_sent_to_the_interface_of_the_mode():
    spec = LabSpec(hosts=2, link_bytes_per_s=1e8)
    names = {
        mode: rank_environment(spec, 0, mode=mode, master_port=1)["GLOO_SOCKET_IFNAME"]
        for mode in (Mode.NAMESPACES, Mode.PACED)
    }
    assert names == {Mode.NAMESPACES: "eth0", Mode.PACED: "lo"}


def test_addresses_fit_the_subnet_and_differ():
    addresses = [host_address(host) for host in range(MAX_HOSTS)]
    assert len(set(addresses)) == MAX_HOSTS
    usable = {str(address) for address in itertools.islice(SUBNET.hosts(), 1000)}
    assert set(addresses) <= usable


def test_the_hosts_file_names_every_host_in_both_families():
    lines = hosts_file(LabSpec(hosts=3, link_bytes_per_s=1e8)).splitlines()
    for host in range(3):
        assert f"{host_address(host)} host{host}" in lines
        assert f"::ffff:{host_address(host)} host{host}" in lines


def test_python_is_the_one_that_runs_the_lab():
    env = shared_environment({"PATH": "/bin"}, num_ranks=1, num_cores=1)
    first, *rest = env["PATH"].split(":")
    assert first == str(Path(sys.executable).parent)
    assert rest == ["/bin"]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 4, "1"), (16, 4, "4"), (7, 2, "3")]
)
def test_threads_share_the_cores(cores, ranks, threads):
    env = shared_environment({}, num_ranks=ranks, num_cores=cores)
    assert env["OMP_NUM_THREADS"] == threads


def test_the_callers_choice_of_threads_holds():
    env = shared_environment({"OMP_NUM_THREADS": "5"}, num_ranks=4, num_cores=2)
    assert env["OMP_NUM_THREADS"] == "5"


def test_variables_of_an_outer_launcher_do_not_reach_the_ranks():
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/home/me"}
    env = shared_environment(outer, num_ranks=1, num_cores=1)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["HOME"] == "/home/me"
