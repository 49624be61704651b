"""What is decided about lanes before anything is opened."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore

from stretto.errors import CommTimeout, PlanMismatch
from stretto.runtime.backends import gloo, nccl
from stretto.runtime.backends.nccl import Communicator, communicators_of
from stretto.runtime.lanes import needs_of
from stretto.runtime.presence import Presence
from stretto.runtime.ranks import Ranks
from stretto.schema import Bucket, Plan
from support.plans import plan_of_buckets

NEEDS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([None, 1, 2, 4, 8, 16])),
    min_size=1,
    max_size=12,
    unique=True,
)


def plan(*buckets: Bucket, lanes: int) -> Plan:
    return plan_of_buckets(buckets, lanes=lanes)


def ranks() -> Ranks:
    return Ranks(rank=0, size=2, names=(4, 7), store=HashStore(), timeout_s=9.0)


def test_a_plan_needs_each_lane_with_each_resource_once_and_in_order():
    made = plan(
        Bucket(tensors=("a",), lane=1, slices=3, wire_dtype="float32"),
        Bucket(tensors=("b",), lane=1, resource=4, wire_dtype="float32"),
        Bucket(tensors=("c",), lane=1, resource=4, wire_dtype="float32"),
        lanes=2,
    )
    assert needs_of(made) == ((1, None), (0, None), (1, 4))


# Gloo.


@given(NEEDS)
def test_a_gloo_lane_has_the_connections_of_its_largest_resource(needs):
    found = gloo.connections_of(needs)
    for lane in {lane for lane, _ in needs}:
        assert found[lane] == max(r or 1 for other, r in needs if other == lane)


def test_lanes_beyond_the_limit_on_descriptors_are_refused_with_both_numbers():
    needs = [(0, 8), (1, None)]
    # 9 connections to each of 3 peers, with 3 descriptors more each.
    gloo.check(needs, 4, descriptors_open=10, max_descriptors=10 + 63)
    with pytest.raises(PlanMismatch) as caught:
        gloo.check(needs, 4, descriptors_open=10, max_descriptors=10 + 62)
    for word in ("63", "72", "10 open", "ulimit -n"):
        assert word in str(caught.value)


STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_a_store_lost_while_a_lane_opens_is_one_error_that_names_its_rank():
    with subprocess.Popen(
        [sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        mine = Ranks(
            rank=1,
            size=2,
            names=(0, 1),
            store=store,
            timeout_s=30.0,
            presence=Presence(store, rank=1),
        )
        lanes = gloo.GlooLanes(
            ranks=mine,
            store_for=lambda name: PrefixStore(name, store),
            end_requests=None,
            notes=PrefixStore("notes", store),
        )
        threading.Timer(0.3, server.kill).start()
        begin = time.perf_counter()
        with pytest.raises(CommTimeout, match=r"rank 1 can't open lane 0: .*rank 0"):
            lanes.open([(0, None)])
        assert time.perf_counter() - begin < 20  # not the 30 s of the group


# NCCL: which communicators.


@given(NEEDS)
def test_lanes_overlap_and_a_lanes_own_collectives_do_not(needs):
    found = communicators_of(needs, multiprocessors=1000)
    assert set(found) == set(needs)
    for (lane, resource), made in found.items():
        assert made.lane == lane
        assert made.ctas == resource
        # One device stream per lane: all of a family come from one parent ...
        family = [c for (other, _), c in found.items() if other == lane]
        roots = {c.parent or c for c in family}
        assert len(roots) == 1
        assert all(c.family == (len(family) > 1) for c in family)
        # ... which no other lane shares, and which none of them exceeds.
        (root,) = roots
        assert root.lane == lane
        assert root.parent is None
        if len(family) > 1:
            assert root.ctas >= (made.ctas or made.max_ctas)
    names = [made.name for made in found.values()]
    assert len(set(names)) == len(names)
    order = list(found.values())
    assert all(c.parent is None or c.parent in order[:i] for i, c in enumerate(order))


@given(NEEDS, st.integers(2, 200))
def test_lanes_together_never_take_more_than_half_of_a_device(needs, multiprocessors):
    lanes = {lane for lane, _ in needs}
    try:
        found = communicators_of(needs, multiprocessors=multiprocessors)
    except PlanMismatch:
        return
    if lanes == {lane for lane, r in needs if r is None} and len(needs) == 1:
        assert next(iter(found.values())).max_ctas is None  # NCCL's own, as DDP's
        return
    taken = sum(
        max(c.ctas or c.max_ctas for c in found.values() if c.lane == lane)
        for lane in lanes
    )
    assert taken <= max(1, multiprocessors // 2)


def test_too_many_ctas_are_refused_with_both_numbers_and_every_lane():
    communicators_of([(0, 33), (1, 33)], multiprocessors=132)
    with pytest.raises(PlanMismatch) as caught:
        communicators_of([(0, 34), (0, 8), (1, 33)], multiprocessors=132)
    for word in ("67 CTAs", "66", "132", "lane 0: 34", "lane 1: 33"):
        assert word in str(caught.value)


def test_plans_of_two_to_eight_lanes_use_the_same_communicators():
    two = communicators_of([(i, None) for i in range(2)], multiprocessors=132)
    eight = communicators_of([(i, None) for i in range(8)], multiprocessors=132)
    assert set(two.values()) <= set(eight.values())


# NCCL: which options.


class Options(SimpleNamespace):
    """What torch's options are set like."""

    def __init__(self, **more):
        config = SimpleNamespace(
            min_ctas=None, max_ctas=None, cga_cluster_size=None, split_share=None
        )
        super().__init__(
            _timeout=None,
            config=config,
            split_from=None,
            split_color=0,
            group_name="",
            global_ranks_in_group=[],
            **more,
        )


def test_a_resource_pins_the_ctas_and_a_member_is_split_from_its_parent():
    parent, child = communicators_of([(2, 4), (2, 16)], multiprocessors=132).values()
    assert (parent.ctas, child.ctas, child.parent) == (16, 4, parent)
    first = nccl.fill_options(Options(), parent, None, ranks())
    assert (first.config.min_ctas, first.config.max_ctas) == (16, 16)
    assert first.config.split_share == 1
    assert first.split_from is None
    second = nccl.fill_options(Options(), child, "backend", ranks())
    assert (second.config.min_ctas, second.config.max_ctas) == (4, 4)
    assert second.config.cga_cluster_size == 1
    assert (second.split_from, second.config.split_share) == ("backend", 1)
    assert second.split_color >= 0
    assert second.global_ranks_in_group == [4, 7]
    assert second._timeout.total_seconds() == 9.0


def test_a_lane_of_its_own_is_not_split_and_leaves_nccl_its_choice():
    (alone,) = communicators_of([(0, None)], multiprocessors=132).values()
    made = nccl.fill_options(Options(), alone, None, ranks())
    config = made.config
    assert (config.min_ctas, config.max_ctas, config.split_share) == (None,) * 3
    assert made.split_from is None
    first, *_ = communicators_of([(0, None), (1, None)], multiprocessors=132).values()
    config = nccl.fill_options(Options(), first, None, ranks()).config
    assert (config.min_ctas, config.max_ctas) == (None, 8)


def test_a_torch_that_can_not_split_with_shared_resources_is_named():
    old = Options()
    del old.config.split_share
    member = Communicator(lane=3, ctas=4, family=True)
    with pytest.raises(PlanMismatch, match=r"lane 3 .* one\s+resource per lane"):
        nccl.fill_options(old, member, None, ranks())
    alone = Communicator(lane=3, ctas=4)
    assert nccl.fill_options(old, alone, None, ranks()).config.max_ctas == 4


# NCCL: how they end.


class Backend:
    """Keeps what is called in a list shared with others."""

    def __init__(self, calls, name, *, fails=False):
        self._calls, self._name, self._fails = calls, name, fails

    def _group_start(self):
        self._calls.append("start")

    def _group_end(self):
        self._calls.append("end")

    def abort(self):
        self._calls.append(self._name)
        if self._fails:
            raise RuntimeError("ended already")


def test_communicators_are_aborted_in_one_group_children_first():
    calls: list[str] = []
    nccl.abort_all([Backend(calls, "a", fails=True), Backend(calls, "b")])
    assert calls == ["start", "b", "a", "end"]
    nccl.abort_all([])


def test_ending_a_stuck_device_is_left_behind_at_the_time_limit():
    stuck = threading.Event()
    begin = time.perf_counter()
    assert not nccl.within(0.2, stuck.wait)
    assert time.perf_counter() - begin < 5
    stuck.set()
    assert nccl.within(5.0, lambda: None)

    def fails():
        raise RuntimeError("unhandled cuda error")

    assert not nccl.within(5.0, fails)
