"""The buckets of one set of ranks, on lanes and guards that note what happens."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.burst.checks.hook_use import HookUse
from stretto.burst.gradient_sync import GradientSync, SyncedLayer
from stretto.burst.timings import StepClock

if TYPE_CHECKING:
    from collections.abc import Iterator


class Groups:
    """Two ranks with the same gradients, on lanes that double what they reduce."""

    def __init__(self, lanes: int) -> None:
        self.sent: list[int] = []
        self.guarded: list[str] = []
        self.fails_on = -1
        self.ranks = SimpleNamespace(name_all=lambda ranks: f"ranks {list(ranks)}")
        opened = [
            SimpleNamespace(
                allreduce=lambda tensors, _opts, i=i: self._start(i, tensors)
            )
            for i in range(lanes)
        ]
        self._lanes = SimpleNamespace(lanes=tuple(opened))

    def _start(self, lane: int, tensors: list[torch.Tensor]) -> Any:
        self.sent.append(lane)

        def wait() -> None:
            if lane == self.fails_on:
                raise RuntimeError("reset by peer")
            tensors[0].mul_(2)

        return SimpleNamespace(wait=wait)

    def group(self, _width: Any) -> Any:
        return self._lanes

    @contextlib.contextmanager
    def guard(self, place: str) -> Iterator[None]:
        self.guarded.append(place)
        try:
            yield
        except RuntimeError as exc:
            raise TimeoutError(f"{place}: {exc}") from exc


class Shadows:
    """Gradients by parameter."""

    def __init__(self) -> None:
        self._grads: dict[int, Any] = {}

    def grad(self, parameter: nn.Parameter) -> Any:
        return self._grads.get(id(parameter))

    def set_grad(self, parameter: nn.Parameter, grad: Any) -> None:
        self._grads[id(parameter)] = grad

    def clear(self) -> None:
        self._grads.clear()


def synced(lanes: int) -> tuple[Any, Any, list[nn.Parameter]]:
    """Return a sync of three layers, a bucket each, whose backward has run."""
    groups, shadows = Groups(lanes), Shadows()
    parameters = [nn.Parameter(torch.zeros(n)) for n in (2, 3, 4)]
    layers = [
        SyncedLayer(name=f"layer{i}", width=(0, 2), parameters=(p,))
        for i, p in enumerate(parameters)
    ]
    hooks: Any = HookUse(groups, lambda text: [text])
    arguments: Any = groups, StepClock(), shadows, layers, hooks
    sync = GradientSync(*arguments, bucket_bytes=1)
    for i, parameter in reversed(list(enumerate(parameters))):
        shadows.set_grad(parameter, torch.full_like(parameter, i + 1.0))
        sync.arrived(parameter)
    return sync, groups, parameters


def test_buckets_take_the_lanes_in_turn_and_their_sums_are_delivered() -> None:
    sync, groups, parameters = synced(2)
    assert groups.sent == [0, 1, 0]
    sync.finish()
    grads = [p.grad.tolist() for p in parameters if p.grad is not None]
    assert grads == [[2.0] * 2, [4.0] * 3, [6.0] * 4]
    # Once at the launch, once at the wait.
    assert len(groups.guarded) == 6
    assert groups.guarded[:3] == groups.guarded[3:]


def test_a_failed_sum_names_bucket_layer_and_lane() -> None:
    sync, groups, parameters = synced(2)
    groups.fails_on = 1
    with pytest.raises(TimeoutError) as caught:
        sync.finish()
    assert str(caught.value) == (
        "the all-reduce of bucket 1 of ranks [0, 1], from layer 'layer1' on, on lane "
        "1: reset by peer"
    )
    # The next backward starts without the works of the failed one.
    groups.fails_on = -1
    sync.reset()
    for parameter in reversed(parameters):
        sync.arrived(parameter)
    sync.finish()
    assert groups.sent == [0, 1, 0, 0, 1, 0]
