"""The parts that touch NCCL, on stand-ins for what torch has with a GPU."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.futures import Future

from stretto import logs
from stretto.errors import PlanMismatch
from stretto.runtime.backends import nccl
from stretto.runtime.backends.nccl_settings import LAUNCH_ORDER
from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.lanes import LanePool, check_lanes
from stretto.runtime.ranks import Ranks
from support.plans import plan_in_turn

DEVICE = torch.device("cuda", 0)


class Group:
    """A communicator that notes what happens to it."""

    made: ClassVar[list[Group]] = []
    ended: ClassVar[list[str]] = []

    class Options(SimpleNamespace):
        def __init__(self, *, is_high_priority_stream):
            super().__init__(
                high=is_high_priority_stream,
                config=SimpleNamespace(split_share=0, min_ctas=None, max_ctas=None),
                split_from=None,
                split_color=0,
            )

    def __init__(self, store, rank, size, options):
        self.store, self.options, self.connected = store, options, None
        assert not any(options is other.options for other in Group.made)
        Group.made.append(self)

    def eager_connect_single_device(self, device):
        parent = self.options.split_from
        assert parent is None or parent.connected is not None
        self.connected = device

    def shutdown(self):
        Group.ended.append("shutdown")

    def abort(self):
        Group.ended.append("abort")


@pytest.fixture
def device(monkeypatch):
    """Torch as on a device with 132 multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(Group, "ended", [])
    monkeypatch.setattr(nccl, "_logged", set())
    monkeypatch.delenv(LAUNCH_ORDER, raising=False)
    yield monkeypatch
    os.environ.pop(LAUNCH_ORDER, None)


def pool() -> LanePool:
    ranks = Ranks(rank=0, size=2, names=(0, 1), store=HashStore(), timeout_s=5.0)
    return LanePool(ranks, serial=1, backend="nccl", device=DEVICE)


def test_what_a_plan_needs_is_made_once_parents_first_and_ended_with_the_pool(device):
    lanes = pool()
    opened = lanes.open([(0, 2), (0, 8), (1, None)])
    parent, child, other = Group.made
    assert (opened[0, 8], opened[0, 2], opened[1, None]) == (parent, child, other)
    assert child.options.split_from is parent
    assert parent.options.split_from is other.options.split_from is None
    assert parent.options.config.split_share == child.options.config.split_share == 1
    assert other.options.config.split_share == 0
    assert (child.options.config.min_ctas, child.options.config.max_ctas) == (2, 2)
    assert all(group.options.high and group.connected == DEVICE for group in Group.made)
    assert os.environ[LAUNCH_ORDER] == "1"
    assert lanes.open([(0, 2), (0, 8), (1, None)]) == opened
    assert len(Group.made) == 3
    lanes.abort()
    assert Group.ended == ["abort"] * 3
    del lanes, opened
    assert Group.ended[3:] == ["shutdown"] * 3


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_logs_once_that_lanes_are_experimental(device, caplog, rank, lines):
    device.setattr(logs, "_announced", set())
    ranks = Ranks(rank=rank, size=2, names=(0, 1), store=HashStore(), timeout_s=5.0)
    for serial in (1, 2):
        LanePool(ranks, serial=serial, backend="nccl", device=DEVICE)
    assert caplog.text.count("run on one GPU only so far") == lines


def test_lanes_after_nccls_first_collective_log_the_order_once(device, caplog):
    device.setattr(nccl, "_collectives_issued", lambda: 3)
    lanes = pool()
    lanes.lane(0)
    assert not caplog.messages
    lanes.lane(1)
    lanes.lane(2)
    (logged,) = caplog.messages
    assert f"Start with {LAUNCH_ORDER}=1" in logged
    assert LAUNCH_ORDER not in os.environ


def test_a_plan_that_can_not_be_opened_is_refused_before_anything_is(device):
    def plan(resource):
        return plan_in_turn([("a",)], lanes=2, slices=2, resource=resource)

    check_lanes(plan(33), "nccl", DEVICE)
    with pytest.raises(PlanMismatch, match="68 CTAs"):
        check_lanes(plan(34), "nccl", DEVICE)
    device.setenv("NCCL_MIN_CTAS", "4")
    with pytest.raises(PlanMismatch, match="NCCL_MIN_CTAS=4"):
        check_lanes(plan(2), "nccl", DEVICE)
    check_lanes(plan(None), "nccl", DEVICE)
    device.setenv(LAUNCH_ORDER, "0")
    with pytest.raises(PlanMismatch, match=f"{LAUNCH_ORDER}=0"):
        check_lanes(plan(None), "nccl", DEVICE)
    assert not Group.made


# Launching: what waits where, in which order.


class Buffer:
    """A bucket that notes the streams it was recorded with."""

    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, cut):
        return (cut.start, cut.stop)

    def record_stream(self, stream):
        self.seen.append(("recorded", stream))


@pytest.fixture
def streams(monkeypatch):
    """Streams by number, and what happened with which one current."""
    seen: list[Any] = []
    current = ["computation"]

    count = iter(range(9))

    def make(_device):
        return f"stream {next(count)}"

    @contextlib.contextmanager
    def switch(stream):
        current.append(stream)
        yield
        current.pop()

    def reduce_on(lane):
        def reduce(tensors, _opts):
            seen.append((f"lane {lane} sends {tensors[0]}", current[-1]))
            return SimpleNamespace(
                wait=lambda: seen.append((f"waits for lane {lane}", current[-1]))
            )

        return reduce

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", switch)
    monkeypatch.setattr(nccl.NcclLaunch, "future", lambda _: Future())
    return SimpleNamespace(seen=seen, current=current, reduce_on=reduce_on)


def schedule(*cuts):
    return BucketSchedule(
        index=5,
        tensors=("a",),
        parameters=(0,),
        elements=cuts[-1],
        slices=tuple(
            Slice(lane=i, resource=None, start=start, end=end)
            for i, (start, end) in enumerate(zip((0, *cuts), cuts, strict=False))
        ),
    )


def test_slices_go_to_their_lanes_and_a_stream_of_ours_waits_for_them(streams):
    launch = nccl.NcclLaunch(DEVICE)
    reduces = [streams.reduce_on(0), streams.reduce_on(1)]
    buffer = Buffer(streams.seen)
    work = launch.launcher(schedule(4, 7), reduces, None)(buffer, None)
    gather = "stream 0"
    assert streams.seen == [
        ("lane 0 sends (0, 4)", "computation"),
        ("lane 1 sends (4, 7)", "computation"),
        ("waits for lane 0", gather),
        ("waits for lane 1", gather),
        ("recorded", gather),
    ]
    assert work.get_future().value() is buffer


def test_a_bucket_in_one_piece_is_handed_on_as_nccls_own_work(streams):
    launch = nccl.NcclLaunch(DEVICE)
    work = launch.launcher(schedule(7), [streams.reduce_on(0)], None)("all", None)
    assert streams.seen == [("lane 0 sends all", "computation")]
    assert not isinstance(work, dist.Work)  # handed on as it came


def test_an_observer_marks_each_slice_on_a_stream_that_ends_with_it(streams):
    class Observer:
        def bucket_launched(self, bucket, now_s):
            streams.seen.append((f"bucket {bucket}", streams.current[-1]))

        def slice_finished(self, bucket, lane, elements, now_s):
            streams.seen.append((f"{elements} on {lane}", streams.current[-1]))

    launch = nccl.NcclLaunch(DEVICE)
    reduces = [streams.reduce_on(0), streams.reduce_on(1)]
    launch.launcher(schedule(4, 7), reduces, Observer())(Buffer(streams.seen), None)
    assert streams.seen == [
        ("bucket 5", "computation"),
        ("lane 0 sends (0, 4)", "computation"),
        ("waits for lane 0", "stream 1"),
        ("4 on 0", "stream 1"),
        ("lane 1 sends (4, 7)", "computation"),
        ("waits for lane 1", "stream 2"),
        ("3 on 1", "stream 2"),
        ("waits for lane 0", "stream 0"),
        ("waits for lane 1", "stream 0"),
        ("recorded", "stream 0"),
    ]
