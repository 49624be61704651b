"""The sender of bucketed gradients, on lanes that note what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.futures import Future

from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.sender import BucketSender, PlainWatch


class Work:
    """A collective that has ended, well or with an error."""

    def __init__(self, tensor: torch.Tensor, error: str) -> None:
        self._tensor, self._error = tensor, error
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self._error:
            raise RuntimeError(self._error)

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result([self._tensor])
        return future


class Lane:
    """Doubles what it reduces; ``error`` ends its collectives."""

    def __init__(self, error: str = "", *, closed: bool = False) -> None:
        self._error, self._closed = error, closed
        self.calls: list[tuple[list[float], Any]] = []
        self.works: list[Work] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        if self._closed:
            raise RuntimeError("closed")
        (tensor,) = tensors
        self.calls.append((tensor.tolist(), opts))
        tensor.mul_(2)
        self.works.append(Work(tensor, self._error))
        return self.works[-1]


class Failed(Exception):
    """The owner's error."""


def failed(place: str, cause: BaseException) -> Failed:
    return Failed(f"{place}: {cause}")


def give_up(buffer: torch.Tensor, error: RuntimeError) -> Any:
    return buffer, str(error)


def schedule(
    index: int, *parts: tuple[int, int | None, int, int], **more: Any
) -> BucketSchedule:
    slices = tuple(
        Slice(lane=lane, resource=resource, start=start, end=end)
        for lane, resource, start, end in parts
    )
    return BucketSchedule(
        index=index,
        tensors=("w", "b"),
        parameters=(0, 1),
        elements=slices[-1].end,
        slices=slices,
        **more,
    )


def test_each_slice_goes_to_its_lane_with_the_callers_options() -> None:
    lanes = {(0, None): Lane(), (1, 4): Lane()}
    sender = BucketSender(lanes, PlainWatch(failed))
    buffer = torch.tensor([1.0, 2.0, 3.0])
    start = sender.starter(schedule(0, (1, 4, 0, 2), (0, None, 2, 3)))
    works = start(buffer, "options")
    assert lanes[1, 4].calls == [([1.0, 2.0], "options")]
    assert lanes[0, None].calls == [([3.0], "options")]
    assert buffer.tolist() == [2.0, 4.0, 6.0]
    assert list(works) == [*lanes[1, 4].works, *lanes[0, None].works]
    # The works are the caller's: nothing is left to wait for.
    assert not sender.wait_all()


def test_a_whole_bucket_is_sent_without_a_view_and_gives_the_lanes_own_work() -> None:
    seen = []

    class Whole(Lane):
        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
            seen.append(tensors[0])
            return super().allreduce(tensors, opts)

    lane = Whole()
    sender = BucketSender({(0, None): lane}, PlainWatch(failed))
    buffer = torch.ones(2)
    work = sender.work_launcher(schedule(0, (0, None, 0, 2)), give_up)(buffer, None)
    assert seen[0] is buffer
    assert work is lane.works[0]


def test_a_bucket_of_several_slices_gives_a_future_that_ends_in_the_wait() -> None:
    sender = BucketSender({(0, None): Lane()}, PlainWatch(failed))
    bucket = schedule(1, (0, None, 0, 1), (0, None, 1, 2))
    buffer = torch.ones(2)
    future = sender.work_launcher(bucket, give_up)(buffer, None).get_future()
    assert not future.done()
    sender.wait(bucket)
    assert future.value() is buffer
    assert buffer.tolist() == [2.0, 2.0]


def test_buckets_are_waited_for_in_launch_order() -> None:
    order: list[str] = []

    class Watch:
        def report(self, place: str, cause: BaseException) -> Exception:
            return failed(place, cause)

        def wait(self, work: Any, place: str) -> None:
            order.append(place)
            work.wait()

    lanes = {(0, None): Lane(), (1, None): Lane()}
    sender = BucketSender(lanes, Watch())
    first = schedule(3, (1, None, 0, 1), (0, None, 1, 2), label="first")
    second = schedule(0, (0, None, 0, 2), label="second")
    third = schedule(1, (1, None, 0, 2), label="third")
    for bucket in (first, second, third):
        sender.launcher(bucket)(torch.ones(2), None)
    sender.wait(second)
    assert order == ["second on lane 0"]
    assert sender.wait_all()
    assert order[1:] == [
        "first on lane 1",
        "first on lane 0",
        "second on lane 0",
        "third on lane 1",
    ]
    sender.forget()
    assert not sender.wait_all()


def test_each_slice_that_ended_is_handed_to_the_caller_before_the_next_wait() -> None:
    lanes = {(0, None): Lane(), (1, None): Lane("reset by peer")}
    sender = BucketSender(lanes, PlainWatch(failed))
    bucket = schedule(0, (0, None, 0, 1), (1, None, 1, 2))
    sender.launcher(bucket)(torch.ones(2), None)
    ended: list[Slice] = []
    with pytest.raises(Failed):
        sender.wait(bucket, ended.append)
    assert ended == [bucket.slices[0]]


def test_an_error_names_the_bucket_and_the_lane_that_failed() -> None:
    lanes = {(0, None): Lane(), (1, None): Lane("reset by peer")}
    sender = BucketSender(lanes, PlainWatch(failed))
    bucket = schedule(7, (0, None, 0, 1), (1, None, 1, 2))
    sender.launcher(bucket)(torch.ones(2), None)
    with pytest.raises(Failed) as caught:
        sender.wait_all()
    text = "the all-reduce of bucket 7 ('w' and 1 more) on lane 1: reset by peer"
    assert str(caught.value) == text
    assert isinstance(caught.value.__cause__, RuntimeError)
    # At a launch it is not known which of the bucket's lanes was closed.
    error = sender.report(bucket, RuntimeError("closed"))
    assert str(error) == (
        "the all-reduce of bucket 7 ('w' and 1 more) on lanes 0, 1: closed"
    )


def test_what_failed_to_launch_or_was_forgotten_is_not_waited_for() -> None:
    lanes = {(0, None): Lane("never waited for"), (1, None): Lane(closed=True)}
    sender = BucketSender(lanes, PlainWatch(failed))
    with pytest.raises(RuntimeError, match="closed"):
        sender.launcher(schedule(0, (0, None, 0, 1), (1, None, 1, 2)))(
            torch.ones(2), None
        )
    assert not sender.wait_all()
    closed, buffer = schedule(0, (1, None, 0, 2)), torch.ones(2)
    cut = schedule(1, (0, None, 0, 1), (1, None, 1, 2))
    for bucket in (closed, cut):
        launch = sender.work_launcher(bucket, give_up)
        given, text = launch(buffer, None)
        assert given is buffer
        assert text == "closed"
    assert not sender.wait_all()
    sender.launcher(schedule(0, (0, None, 0, 2)))(torch.ones(2), None)
    sender.forget()
    assert not sender.wait_all()


def test_an_observer_gets_the_launch_and_the_end_of_each_slice() -> None:
    seen: list[tuple[Any, ...]] = []

    class Observer:
        def bucket_launched(self, bucket: int, now_s: float) -> None:
            seen.append(("launched", bucket, len(lanes[0, None].calls), now_s))

        def slice_finished(
            self, bucket: int, lane: int, elements: int, now_s: float
        ) -> None:
            seen.append(("finished", bucket, lane, elements, now_s))

    lanes = {(0, None): Lane(), (2, None): Lane()}
    sender = BucketSender(lanes, PlainWatch(failed))
    observer: Any = Observer()
    bucket = schedule(5, (2, None, 0, 3), (0, None, 3, 5))
    works = sender.starter(bucket, observer)(torch.ones(5), None)
    for work, elements in zip(works, (3, 2), strict=True):
        assert work.get_future().wait()[0].tolist() == [2.0] * elements
    assert [row[:-1] for row in seen] == [
        ("launched", 5, 0),
        ("finished", 5, 2, 3),
        ("finished", 5, 0, 2),
    ]
    assert sorted(row[-1] for row in seen) == [row[-1] for row in seen]
