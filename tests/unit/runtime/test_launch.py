"""Callbacks of futures that have ended."""

from __future__ import annotations

from typing import Any

import pytest
from torch.futures import Future

from stretto.runtime.launch import done, then, when_done


def _interrupted(_: Any) -> None:
    raise KeyboardInterrupt


def _failing(_: Any) -> None:
    raise RuntimeError("lost")


@pytest.mark.parametrize("call", [then, when_done])
def test_an_interrupt_in_a_callback_stays_an_interrupt(call: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        call(done(1), _interrupted)


def test_a_callback_gives_its_value_or_its_error() -> None:
    assert then(done(1), lambda ended: ended.value() + 1).wait() == 2
    with pytest.raises(RuntimeError, match="lost"):
        then(done(1), _failing).wait()


def test_a_callback_waits_for_its_future() -> None:
    future: Future[int] = Future()
    after = then(future, lambda ended: ended.value() + 1)
    found: list[int] = []
    when_done(future, lambda ended: found.append(ended.value()))
    assert not after.done()
    assert found == []
    future.set_result(1)
    assert after.wait() == 2
    assert found == [1]
