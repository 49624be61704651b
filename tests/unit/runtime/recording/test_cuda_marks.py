"""A GPU's events by a stand-in: what is asked of CUDA, and what is made of it."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stretto.runtime.recording.step import CudaMarks, HostMarks, Recorder, marks_for

if TYPE_CHECKING:
    from collections.abc import Iterator


class Device:
    """A device whose clock is the test's, and which is behind the host."""

    def __init__(self) -> None:
        self.now_s = 500.0
        self.waits = 0

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, -1.0

    def record(self, _stream: Any) -> None:
        self.at_s = self.device.now_s

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: "aside")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "current")
    return found


def test_the_device_of_the_parameters_chooses() -> None:
    assert isinstance(marks_for(None), HostMarks)
    assert isinstance(marks_for(torch.device("cpu")), HostMarks)
    assert isinstance(marks_for(torch.device("cuda", 0)), CudaMarks)


def test_a_step_on_a_gpu_is_known_by_its_events_and_waits_for_none_of_them(
    device: Device,
) -> None:
    recorder = Recorder(device=torch.device("cuda", 0))
    recorder.attached(["a"], [])

    def at(seconds: float) -> float:
        device.now_s = 500.0 + seconds
        return 1.0  # the host is long done with all of it

    recorder.forward_started(at(0.0))
    recorder.forward_ended(at(1.0))
    recorder.backward_started(at(1.25))
    recorder.gradient_ready(0, at(2.0))
    recorder.backward_computed(at(3.0))
    recorder.backward_ended(at(3.5))
    assert device.waits == 0
    device.now_s = 510.0
    before_s = perf_counter()
    timeline = recorder.timeline
    assert timeline is not None
    rows = [(s.name, s.start_s, s.end_s) for s in timeline.spans]
    assert [name for name, _, _ in rows] == ["forward", "backward"]
    assert rows[0][1:] == pytest.approx((0.0, 1.0))
    assert rows[1][1:] == pytest.approx((1.25, 3.0))
    assert recorder.ready_s == pytest.approx({"a": 0.75})
    ((marks, _),) = recorder.steps
    # On the host's clock: the step began ten device seconds before it was asked.
    assert before_s - 10.0 <= marks.forward_s[0] <= perf_counter() - 10.0
