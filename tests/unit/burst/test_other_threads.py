"""Threads that use a module while it is captured."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.fakes import swapped
from stretto.burst.tracing.layer_runs import lent_values
from stretto.burst.tracing.other_threads import values_kept_for_others

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.norm(self.a(x))))


def in_other_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def other_thread() -> Any:
    """A thread that exists all the time."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("other_thread")
@pytest.mark.parametrize(
    "read",
    [
        lambda m: m.a.weight,
        lambda m: dict(m.named_parameters())["a.weight"],
        lambda m: dict(m.a.named_parameters(prefix="x.y"))["x.y.weight"],
        lambda m: m.state_dict(keep_vars=True)["a.weight"],
    ],
)
def test_another_thread_reads_what_a_module_held_before(read: Any) -> None:
    model = Net()
    own = model.a.weight
    with swapped(model.named_modules(), torch.zeros_like):
        assert in_other_thread(lambda: read(model)) is own


@pytest.mark.usefixtures("other_thread")
def test_the_thread_of_an_exchange_reads_what_a_module_got() -> None:
    model = Net()
    with swapped(model.named_modules(), torch.zeros_like):
        assert not model.a.weight.any()


@pytest.mark.usefixtures("other_thread")
def test_another_thread_reads_a_parameters_own_values_while_it_has_others() -> None:
    model = Net()
    own = model.a.weight.detach().clone()
    with (
        values_kept_for_others([model.a.weight]),
        swapped(model.named_modules(), lambda t: t),
        lent_values([(model.a.weight, torch.zeros(8, 5))]),
    ):
        assert torch.equal(in_other_thread(lambda: model.a.weight.detach()), own)


def test_methods_of_modules_are_as_before_after_a_capture() -> None:
    before = dict(vars(nn.Module))
    capture(Net(), (torch.zeros(2, 5),))
    assert dict(vars(nn.Module)) == before


def test_a_thread_that_calls_a_model_during_captures_gets_its_results() -> None:
    model = Net().eval()
    x = torch.randn(4, 5)
    expected = model(x)
    end, worst = threading.Event(), [0.0]

    def use() -> None:
        while not end.is_set():
            with torch.no_grad():
                worst.append(float((model(x) - expected).abs().max()))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(3):
            capture(model, (x,))
    finally:
        end.set()
        thread.join()
    assert max(worst) == 0.0
