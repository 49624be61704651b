"""Forwards that wait for their backward while the program does something else.

As in `test_burst_uses`: each is one process's result, or refused in one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.burst.executor import BurstParallel
from support.burst_sides import (
    Alone,
    Side,
    Widths,
    WithTemperature,
    cross,
    net,
    train,
    worst_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


class Plain(torch.nn.Module):
    """Has no batch norm: rows may be few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(6, 5)
        self.last = torch.nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def frozen_in_between(side: Side, *, again: bool = False) -> Any:
    """Another forward runs while a layer is frozen."""
    model, wrapped, x, y = side.start()
    loss = cross(wrapped(x), y)
    model[0].requires_grad_(False)
    wrapped(x)
    model[0].requires_grad_(True)
    if again:
        loss = loss + cross(wrapped(x), y)
    loss.backward()
    return side.grads(model)


def frozen_in_between_and_again(side: Side) -> Any:
    return frozen_in_between(side, again=True)


def frozen_then_next_step(side: Side) -> Any:
    """Backwards of forwards with other frozen layers, each after the other's."""
    model, wrapped, x, y = side.start()
    losses = []
    for i in (0, 2, 5):
        model[i].requires_grad_(False)
        losses.append(cross(wrapped(x), y))
        model[i].requires_grad_(True)
    for loss in losses:
        loss.backward()
    return side.grads(model)


def fewer_rows_in_the_later_forward(side: Side) -> Any:
    """A rank has no rows of a layer in one of two forwards of one backward."""
    model, wrapped, x, y = side.start(Plain())
    one = int(not side.size or side.rank == side.size - 1)
    few = slice(len(x) - one, len(x))
    (cross(wrapped(x), y) + cross(wrapped(x[few]), y[few])).backward()
    return side.grads(model)


def values_replaced_in_between(side: Side) -> Any:
    """A parameter gets another storage between a forward and its backward."""
    model, wrapped, x, y = side.start(Plain())
    loss = cross(wrapped(x), y)
    held = list(model.first.parameters())  # all ranks run it
    kept = [p.data for p in held]
    for p in held:
        p.data = p.data.clone()
    wrapped(x)
    for p, values in zip(held, kept, strict=True):
        p.data = values
    loss.backward()
    return side.grads(model)


def temperature_by_forward(side: Side) -> Any:
    """Two forwards with other shares, and a backward for each."""
    model = WithTemperature()
    wrapped = side.wrap(model)
    losses = []
    for few in (False, True):
        x, y = _parts(side, few=few)
        losses.append(cross(wrapped(x) / model.temperature, y))
    for loss in losses:
        loss.backward()
    return side.grads(model)


def temperature_unfrozen_in_between(side: Side) -> Any:
    """A loss's own parameter is frozen in another forward."""
    model, wrapped, x, y = side.start(WithTemperature())
    loss = cross(wrapped(x) / model.temperature, y)
    model.temperature.requires_grad_(False)
    wrapped(x)
    model.temperature.requires_grad_(True)
    loss.backward()
    return side.grads(model)


class Heads(torch.nn.Module):
    """Returns two tensors."""

    def __init__(self, *, is_turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = {"first": torch.nn.Linear(6, 4), "last": torch.nn.Linear(6, 4)}
        for name in sorted(made, reverse=is_turned):
            self.add_module(name, made[name])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), torch.sin(self.last(x))


def output_written_in_place(side: Side) -> Any:
    model, wrapped, x, y = side.start()
    out = wrapped(x)
    out[:, 0] = 0.0
    out.mul_(2)
    out /= 3
    cross(out, y).backward()
    return side.grads(model)


def outputs_written_in_place(side: Side) -> Any:
    """Some ranks have one row or none."""
    model, wrapped, x, y = side.start(Heads())
    if side.size:
        counts = [0] * (side.size - 2) + [1, side.batch - 1]
        at = sum(counts[: side.rank])
        rows = slice(at, at + counts[side.rank])
        whole = side.shares
        side.shares = [side.batch] + [0] * (side.size - 1)
        rank, side.rank = side.rank, 0
        x, y = (each[rows] for each in side.data(0))
        side.rank, side.shares = rank, whole
    one, two = wrapped(x)
    one[:, 0] = 0.0
    two.mul_(2)
    (cross(one, y) + cross(two, y)).backward()
    return side.grads(model)


def input_written_in_place(side: Side) -> Any:
    """A sampling loop updates its input without gradients."""
    _, wrapped, x, _ = side.start(net(outputs=6))
    with torch.no_grad():
        for _ in range(4):
            x.sub_(0.1 * wrapped(x))
        last = wrapped(x)
        x.zero_()
    if not side.size:
        return last
    parts: list[Any] = [None] * side.size
    dist.all_gather_object(parts, last)
    return torch.cat(parts)


def built_and_saved_in_inference_mode(side: Side) -> Any:
    model = net()
    with torch.inference_mode():
        wrapped = side.wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        train(side, wrapped, optimizer, 1)
        with torch.inference_mode():
            wrapped.eval()
            wrapped(side.data(0)[0])
            if side.size:
                wrapped.refresh(optimizer)
            wrapped.train()
    return side.state(wrapped)


def norm_without_parameters(side: Side) -> Any:
    """A rank has no rows of a layer with a batch norm in float64."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5, bias=False, dtype=torch.float64),
        torch.nn.BatchNorm1d(5, affine=False, dtype=torch.float64),
        torch.nn.Linear(5, 4, dtype=torch.float64),
    )
    _, wrapped, x, y = side.start(model)
    has_rows = not side.size or side.rank == side.size - 1
    few = slice(len(x) - 2, len(x)) if has_rows else slice(0)
    cross(wrapped(x[few]), y[few]).backward()
    return side.grads(model)[1:]  # with two rows the first's is rounding


def _parts(side: Side, *, few: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows; ``few``: those of the last rank are on the first."""
    x, y = side.data(0)
    if few and side.size:
        counts = list(side.shares)
        side.shares = [side.batch, *(0 for _ in counts[1:])]
        x, y = side.data(0)
        side.shares = counts
    return x, y


RIGHT: list[Callable[[Side], Any]] = [
    frozen_in_between,
    frozen_in_between_and_again,
    frozen_then_next_step,
    fewer_rows_in_the_later_forward,
    values_replaced_in_between,
    temperature_by_forward,
    temperature_unfrozen_in_between,
    output_written_in_place,
    outputs_written_in_place,
    input_written_in_place,
    built_and_saved_in_inference_mode,
]


def rank_of_a_right_use(rank: int, size: int, name: str, widths: Widths) -> Any:
    torch.set_default_dtype(torch.float64)
    use = globals()[name]
    try:
        return worst_of(use(Side(rank, size, widths, "uneven")), use(Alone()))
    except Exception as exc:  # noqa: BLE001
        return f"{type(exc).__name__}: {exc}"


@pytest.mark.parametrize("use", RIGHT, ids=lambda use: use.__name__)
def test_a_forward_waits(ranks: Any, use: Callable[[Side], Any]) -> None:
    widths = [(0, 2), (1, 1), (0, 1)]
    found = ranks(rank_of_a_right_use, 2, use.__name__, widths)
    for rank, value in enumerate(found):
        assert isinstance(value, float), (rank, value)
        assert value < 1e-9, (rank, value)


def test_a_norm_without_parameters_has_the_type_of_its_statistics(ranks: Any) -> None:
    name = norm_without_parameters.__name__
    for value in ranks(rank_of_a_right_use, 3, name, [(0, 3)]):
        assert isinstance(value, float), value
        assert value < 1e-9


# Refused on all ranks.


def temperature_of_two_forwards(side: Side) -> None:
    model = WithTemperature()
    wrapped = side.wrap(model)
    loss = torch.zeros(())
    for few in (False, True):
        x, y = _parts(side, few=few)
        loss = loss + cross(wrapped(x) / model.temperature, y)
    loss.backward()


def frozen_in_the_later_of_two(side: Side) -> None:
    model, wrapped, x, y = side.start()
    loss = cross(wrapped(x), y)
    model[0].requires_grad_(False)
    loss = loss + cross(wrapped(x), y)
    model[0].requires_grad_(True)
    loss.backward()


def temperature_unfrozen_after_the_forward(side: Side) -> None:
    model = WithTemperature()
    model.temperature.requires_grad_(False)
    _, wrapped, x, y = side.start(model)
    out = wrapped(x)
    model.temperature.requires_grad_(True)
    cross(out / model.temperature, y).backward()


def frozen_before_a_backward_in_no_sync(side: Side) -> None:
    model, wrapped, x, y = side.start()
    loss = cross(wrapped(x), y)
    model[0].requires_grad_(False)
    wrapped(x)
    with wrapped.no_sync():
        loss.backward()


def new_plan_in_between(side: Side) -> None:
    _model, wrapped, x, y = side.start()
    loss = cross(wrapped(x), y)
    wrapped.apply_plan(side.plan(net(), [(0, 1), (0, 2)]))
    loss.backward()


def defined_in_another_order(side: Side) -> None:
    side.wrap(Heads(is_turned=side.rank == 1))


def _apart(side: Side) -> Any:
    model = Plain()
    return BurstParallel(
        model,
        side.plan(model, [(0, 1), (1, 1)]),
        example_inputs=(torch.zeros(2, 6),),
    )


def optimizers_of_two_kinds(side: Side) -> None:
    model = _apart(side)
    kind = torch.optim.SGD if side.rank else torch.optim.Adam
    train(side, model, kind(model.parameters(), lr=0.1))


def two_steps_on_one_rank(side: Side) -> None:
    model = _apart(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, optimizer, after=lambda: side.rank and optimizer.step())


def clipped_to_two_norms(side: Side, clip: Any = nn.utils.clip_grad_norm_) -> None:
    model = _apart(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = 0.1 if side.rank else 0.05
    train(side, model, optimizer, after=lambda: clip(model.parameters(), most))


def clipped_to_two_values(side: Side) -> None:
    clipped_to_two_norms(side, nn.utils.clip_grad_value_)


REFUSED = {
    optimizers_of_two_kinds: "rank 0 took 1 steps of Adam since the last forward, rank",
    two_steps_on_one_rank: "rank 1 2 steps of SGD",
    clipped_to_two_norms: "clipped to [0.05] on rank 0 and to [0.1] on rank 1",
    clipped_to_two_values: "clipped to [0.05] on rank 0 and to [0.1] on rank 1",
    defined_in_another_order: "'first.weight' of (4, 6) torch.float64 on rank 0, 'last",
    temperature_of_two_forwards: "give each rank the same part of both batches",
    frozen_in_the_later_of_two: "call backward() for each, or freeze after",
    temperature_unfrozen_after_the_forward: "unfreeze parameters before the forward",
    frozen_before_a_backward_in_no_sync: "runs in no_sync(): do it after",
    new_plan_in_between: "call apply_plan between optimizer.step() and",
}


def rank_of_refused_uses(rank: int, size: int, name: str) -> tuple[str, str]:
    torch.set_default_dtype(torch.float64)
    use = globals()[name]
    try:
        use(Side(rank, size, [(0, 2), (1, 1), (0, 1)], "even"))
    except Exception as exc:  # noqa: BLE001
        return type(exc).__name__, str(exc)
    return "", "nothing was raised"


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_a_forward_is_refused_on_all_ranks(
    ranks: Any, use: Callable[[Side], None]
) -> None:
    for kind, text in ranks(rank_of_refused_uses, 2, use.__name__):
        assert kind in {"StrettoError", "RankDisagreement"}, text
        assert REFUSED[use] in text
