"""What handles the ends of collectives announces, on streams that are stand-ins."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.errors import SpecError
from stretto.runtime.negotiated.api import EngineOptions
from stretto.runtime.negotiated.completion import CompletionStreams, CompletionThreads
from stretto.runtime.negotiated.send import RequestSender


class FakeCuda:
    """Streams with what was queued on them."""

    def __init__(self) -> None:
        self.current: list[str] = []

    def make(self, _device: Any) -> list[str]:
        return []

    @contextlib.contextmanager
    def on(self, stream: list[str]) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self) -> Any:
        found = SimpleNamespace(after=None)

        def record() -> None:
            found.after = list(self.current)

        found.record = record
        return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def waiting_work(cuda: FakeCuda) -> Any:
    return SimpleNamespace(wait=lambda: cuda.current.append("collective"))


def test_an_end_is_announced_with_an_event_behind_the_results(cuda: FakeCuda) -> None:
    """An event that is announced before it is recorded delays no thread."""
    announced: list[Any] = []

    def finish(error: BaseException | None, mark: Any) -> None:
        assert error is None
        cuda.current.append("results")
        announced.extend(event.after for event in mark())

    streams = CompletionStreams([None], torch.device("cuda", 0))
    streams.send(0, lambda _lane: waiting_work(cuda), finish)
    assert announced == [["collective", "results"]]


def test_what_sends_nothing_is_announced_likewise(cuda: FakeCuda) -> None:
    announced: list[Any] = []

    def begin(_lane: Any) -> None:
        cuda.current.append("copy")

    def finish(_error: BaseException | None, mark: Any) -> None:
        announced.extend(event.after for event in mark())

    CompletionStreams([None], torch.device("cuda", 0)).send(0, begin, finish)
    assert announced == [["copy"]]


def test_a_collective_that_cannot_begin_ends_with_its_error(cuda: FakeCuda) -> None:
    found: list[Any] = []

    def begin(_lane: Any) -> None:
        raise RuntimeError("no memory")

    streams = CompletionStreams([None], torch.device("cuda", 0))
    streams.send(0, begin, lambda error, mark: found.append((str(error), mark())))
    assert found == [("no memory", ())]


def test_on_the_host_what_sends_nothing_ends_at_once() -> None:
    found: list[Any] = []
    threads = CompletionThreads([None])
    threads.send(
        0, lambda _lane: None, lambda error, mark: found.append((error, mark()))
    )
    threads.close()
    assert found == [(None, ())]


def test_a_tensor_on_another_gpu_than_the_first_is_refused() -> None:
    sender: Any = RequestSender(None, EngineOptions(), None, None)  # type: ignore[arg-type]
    sender.use_device("all-reduce 'a'", torch.device("cuda", 3))
    sender.use_device("all-reduce 'b'", torch.device("cuda", 3))
    with pytest.raises(SpecError, match=r"'c' is on cuda:0, but .* on cuda:3, and"):
        sender.use_device("all-reduce 'c'", torch.device("cuda", 0))
