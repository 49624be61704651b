"""A block that is lost within or between steps of optimizers runs again unchanged."""

from __future__ import annotations

import copy
import fractions
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
import torch.distributed as dist

from stretto.elastic import training
from stretto.elastic.undo import OtherState
from stretto.errors import CommTimeout, StrettoError
from stretto.members.view import Member, View
from stretto.resume.snapshots import copy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)


class KeeperOfOneRank:
    """A client whose rank is alone in each view."""

    member, joins, drains = 0, False, False
    newest: View | None = None

    def start(self, address: str, **_: Any) -> None:
        self._address = address

    def next_view(self, after: int, *, timeout_s: float) -> View:
        del timeout_s
        member = Member(id=0, keeper=0, address=self._address)
        return View(generation=after + 1, members=(member,))

    def entered(self, generation: int) -> None:
        del generation

    def failed(self, generation: int) -> None:
        del generation


@pytest.fixture(autouse=True)
def _keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    client = KeeperOfOneRank()
    monkeypatch.setattr(training.MemberClient, "of_environment", lambda: client)
    before = signal.getsignal(signal.SIGTERM)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, before)


DATA = [torch.full((3,), float(i)) for i in range(12)]


class Losses:
    """Raises as a lost rank does, at one of the calls."""

    def __init__(self, at: int | None) -> None:
        self._at, self.calls = at, 0

    def __call__(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self._at:
            raise CommTimeout("a rank is lost")
        loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss


def parameters(net: torch.nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in net.parameters()]


def trained_with_a_closure(lost_at: int | None) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    run, loss_of = training.Elastic(net, optimizer, batch="global:4"), Losses(lost_at)
    for batch in run.batches(DATA):
        with run.step():

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(run.model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    return parameters(net), len(run.history)


def test_a_step_with_a_closure() -> None:
    expected, _ = trained_with_a_closure(None)
    assert trained_with_a_closure(7) == (expected, 2)


def trained_with_two_optimizers(lost_at: int | None) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    first = torch.optim.Adam(net[0].parameters())
    second = torch.optim.Adam(net[1].parameters())
    run = training.Elastic(net, first, batch="global:4", extra={"second": second})
    loss_of = Losses(lost_at)
    for batch in run.batches(DATA):
        with run.step():
            loss_of(run.model, batch).backward()
            second.step()
            loss_of(run.model, batch).backward()
            first.step()
    return parameters(net), len(run.history)


def test_two_optimizers() -> None:
    expected, _ = trained_with_two_optimizers(None)
    assert trained_with_two_optimizers(4) == (expected, 2)


def test_one_step_and_a_collective_that_fails_after_it() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run, loss_of = training.Elastic(net, optimizer, batch="global:4"), Losses(2)

    def train() -> None:
        for batch in run.batches(DATA):
            with run.step():
                loss_of(run.model, batch).backward()
                optimizer.step()
                loss_of(run.model, batch)

    with pytest.raises(StrettoError, match="failed after optimizer"):
        train()


class ChangedInForward(torch.nn.Module):
    """Has a momentum encoder without gradients, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        self.key.requires_grad_(requires_grad=False)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        key, query = self.key.weight, self.query.weight
        key.data = 0.9 * key.data + 0.1 * query.data
        result: torch.Tensor = self.query(inputs) + self.calls * self.key(inputs)
        return result


def trained_with_changed_parameters(lost_at: int | None) -> tuple[list[Any], int, int]:
    torch.manual_seed(0)
    net = ChangedInForward()
    optimizer = torch.optim.SGD(net.query.parameters(), lr=0.001)
    run, loss_of = training.Elastic(net, optimizer, batch="global:3"), Losses(lost_at)
    for batch in run.batches(DATA):
        with run.step():
            loss_of(run.model, batch).backward()
            with torch.no_grad():  # as sharpness-aware minimization
                net.query.bias.add_(0.1)
            optimizer.zero_grad()
            loss_of(run.model, batch).backward()
            with torch.no_grad():
                net.query.bias.sub_(0.1)
            optimizer.step()
    return parameters(net), net.calls, len(run.history)


@pytest.mark.parametrize("lost_at", [2, 8])
def test_parameters_that_the_program_changes_itself(lost_at: int) -> None:
    *expected, _ = trained_with_changed_parameters(None)
    assert trained_with_changed_parameters(lost_at) == (*expected, 2)


def trained_with_late_changes(lost_at: int | None, change: Any) -> list[Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    net.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([net.weight, net.bias], lr=0.001)
    run, loss_of = training.Elastic(net, optimizer, batch="global:3"), Losses(lost_at)
    for batch in run.batches(DATA):
        with run.step():
            if run.steps == 3:
                change(net)
            loss_of(run.model, batch).backward()
            optimizer.step()
    return [*parameters(net), net.frozen.requires_grad, net.training]


def replace_memory(net: Any) -> None:
    net.frozen.data = net.frozen.data * 3


LATE_CHANGES = {
    "in place": lambda net: torch.nn.init.zeros_(net.bias),
    "data": lambda net: net.weight.data.mul_(1.5),
    "frozen data": lambda net: net.frozen.data.add_(1),
    "numpy": lambda net: net.frozen.numpy().__iadd__(1),
    "swapped": lambda net: net.weight.data.copy_(net.weight.data.flip(1)),
    "memory": replace_memory,
    "foreach": lambda net: torch._foreach_add_([net.frozen.data], 1),
    "mode": lambda net: net.eval(),
}


@pytest.mark.parametrize("name", LATE_CHANGES)
def test_a_change_that_earlier_blocks_had_not_made(name: str) -> None:
    change = LATE_CHANGES[name]
    expected = trained_with_late_changes(None, change)
    assert trained_with_late_changes(4, change) == expected


def test_flags_are_set_back() -> None:
    seen: list[bool] = []

    def unfreeze(net: Any) -> None:
        seen.append(net.frozen.requires_grad)
        net.frozen.requires_grad_()

    trained_with_late_changes(4, unfreeze)
    assert seen == [False, False]


class Decaying:
    """Changes an optimizer's options before its step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def factor(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9

    def in_place(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].mul_(0.9)

    def betas(self) -> None:
        for group in self.optimizer.param_groups:
            group["betas"] = tuple(0.9 * each for each in group["betas"])

    def new_option(self) -> None:
        for group in self.optimizer.param_groups:
            group["calls"] = group.get("calls", 0) + 1

    def group(self) -> None:
        added = torch.nn.Parameter(torch.zeros(1))
        self.optimizer.add_param_group({"params": [added]})

    def schedule(self) -> None:
        self.scheduler.step()


def trained_with_changed_options(
    lost_at: int | None, how: str, *, optimizers: int = 1
) -> list[Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    rate: Any = torch.tensor(0.01) if how == "in_place" else 0.01
    first = torch.optim.Adam(net[0].parameters(), lr=rate)
    second = torch.optim.Adam(net[1].parameters())
    decaying = Decaying(first)
    extra: dict[str, Any] = {"second": second} if optimizers == 2 else {}
    run = training.Elastic(
        net, first, batch="global:4", scheduler=decaying.scheduler, extra=extra
    )
    loss_of = Losses(lost_at)
    for batch in run.batches(DATA):
        with run.step():
            getattr(decaying, how)()
            loss_of(run.model, batch).backward()
            if optimizers == 2:
                second.step()
                loss_of(run.model, batch).backward()
            first.step()
    options = [
        {**group, "params": len(group["params"])} for group in first.param_groups
    ]
    return [*parameters(net), options, decaying.scheduler.last_epoch]


@pytest.mark.filterwarnings("ignore:Detected call of")  # before optimizer.step()
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(
    "how", ["factor", "in_place", "betas", "new_option", "group", "schedule"]
)
def test_options_that_a_block_changes(how: str, optimizers: int) -> None:
    expected = trained_with_changed_options(None, how, optimizers=optimizers)
    lost_at = 2 * optimizers  # after the first step of an optimizer, if there are two
    found = trained_with_changed_options(lost_at, how, optimizers=optimizers)
    assert found == expected


def test_an_optimizer_s_state_that_was_changed_before_its_step() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())
    run, loss_of = training.Elastic(net, optimizer, batch="global:3"), Losses(3)

    def train() -> None:
        for batch in run.batches(DATA):
            with run.step():
                if run.steps == 2:
                    optimizer.state[net.weight]["exp_avg"].zero_()
                loss_of(run.model, batch).backward()
                optimizer.step()

    with pytest.raises(StrettoError, match="changed the state of an optimizer before"):
        train()


class Centered(torch.nn.Module):
    """A loss that changes a buffer in its forward, as DINO's center."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.center: torch.Tensor

    def forward(self, found: torch.Tensor, *, changes: bool = True) -> torch.Tensor:
        if changes:
            self.center = 0.9 * self.center + 0.1 * found.detach().mean()
        loss: torch.Tensor = (found - self.center).square().mean()
        return loss


def trained_with_a_center(lost_at: int | None, since: int = 0) -> list[Any]:
    torch.manual_seed(0)
    net, center = torch.nn.Linear(3, 1), Centered()
    optimizer, loss_of = torch.optim.SGD(net.parameters(), lr=0.001), Losses(lost_at)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = training.Elastic(
        net, optimizer, batch="global:3", scheduler=scheduler, extra={"loss": center}
    )
    for batch in run.batches(DATA):
        with run.step() as step:
            loss = center(run.model(batch), changes=run.steps >= since)
            (loss + loss_of(run.model, batch)).backward()
            optimizer.step()
        if step.is_committed:
            scheduler.step()
    return [*parameters(net), center.center.tolist(), scheduler.last_epoch]


@pytest.mark.parametrize("lost_at", [1, 2, 4])
def test_a_loss_that_changes_its_own_buffer(lost_at: int) -> None:
    assert trained_with_a_center(lost_at) == trained_with_a_center(None)


@pytest.mark.parametrize("since", [2, 3])
def test_a_buffer_of_a_loss_that_the_first_blocks_had_not_changed(since: int) -> None:
    expected = trained_with_a_center(None, since=since)
    assert trained_with_a_center(4, since=since) == expected


class Averaged:
    """Returns a copy of its value, and counts how often it is loaded."""

    def __init__(self) -> None:
        self.value, self.loads = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.loads = state["value"], self.loads + 1


def test_a_state_of_copies_is_set_back_whenever_it_changes_first() -> None:
    held = Averaged()
    other = OtherState(held)
    for _ in range(5):
        other.begin_block()
        other.release()
    other.begin_block()
    held.value += 1
    assert other.undo()
    assert not held.value.any()


def test_a_state_that_was_set_back_is_the_object_s_own() -> None:
    held = Averaged()
    other = OtherState(held)
    other.begin_block()
    held.value += 1
    other.undo()
    held.value += 2
    other.begin_block()
    assert held.value.tolist() == [2.0] * 3


def test_an_unchanged_object_is_not_loaded() -> None:
    held = Averaged()
    other = OtherState(held)
    other.begin_block()
    other.undo()
    assert held.loads == 0


class Holder:
    """Holds one value of any kind."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


VALUES = [numpy.zeros(2), numpy.int64(0), numpy.float32(0), fractions.Fraction(0), 0]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_of_any_kind_is_set_back(value: Any) -> None:
    held = Holder(value)
    other = OtherState(held)
    before = copy.deepcopy(held.value)
    other.begin_block()
    held.value += 1  # in place, where the kind can
    assert other.undo()
    assert numpy.array_equal(held.value, before)


def test_a_value_that_cannot_be_copied_is_refused() -> None:
    other = OtherState(Holder(threading.Lock()))
    other.begin_block()
    assert not other.undo()


def test_a_sparse_tensor_is_a_state_like_any_other() -> None:
    held = Holder(torch.eye(3).to_sparse())
    other = OtherState(held)
    other.begin_block()
    held.value = held.value * 2
    assert other.undo()
    assert held.value.to_dense().sum() == 3


def test_a_tensor_whose_shape_changes_is_set_back() -> None:
    held = Holder(torch.zeros(2))
    other = OtherState(held)
    for size in (3, 1):
        other.begin_block()
        before, held.value = held.value, torch.ones(size)
        assert other.undo()
        assert torch.equal(held.value, before)
        held.value = torch.ones(size)


class Growing(torch.nn.Module):
    """Replaces a buffer with a larger one, and makes another."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, inputs.sum().reshape(1)])
        if not hasattr(self, "last"):
            self.register_buffer("last", inputs.clone(), persistent=False)
        result: torch.Tensor = self.linear(inputs)
        return result


def test_buffers_that_forward_replaces() -> None:
    net = Growing()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run, seen = training.Elastic(net, optimizer, batch="global:4"), []
    lose = True
    for batch in run.batches(DATA):
        with run.step():
            loss = run.model(batch).mean()
            if lose:
                lose = False
                raise CommTimeout("a rank is lost")
            loss.backward()
            optimizer.step()
            seen.append(batch.sum().item())
    assert net.seen.tolist() == [0.0, *seen]


def test_an_epoch_that_is_left_early() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run = training.Elastic(net, optimizer, batch="global:4")
    for batch in run.batches(DATA):
        with run.step():
            run.model(batch).mean().backward()
            optimizer.step()
        break
    with pytest.raises(StrettoError, match="left after 4 of 12 samples of epoch 0"):
        next(run.batches(DATA))


def test_a_loss_that_a_commit_notices_is_followed_after_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the program does after the block belongs to the state that others get."""
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    run = training.Elastic(net, optimizer, batch="global:3")
    monkeypatch.setattr(run, "_compares", lambda: run.steps == 2)

    def lose(*_: Any, **__: Any) -> None:
        raise CommTimeout("a rank is lost")

    monkeypatch.setattr(run._digests, "launch", lose)
    memberships = []
    for batch in run.batches(DATA):
        with run.step() as step:
            run.model(batch).sum().backward()
            optimizer.step()
        assert step.is_committed
        memberships.append(len(run.history))
    assert memberships == [1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:Detected call of")  # the others took the steps
def test_a_rank_that_joins_at_the_end_of_an_epoch_does_the_rest_of_it() -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return (
            training.Elastic(net, optimizer, batch="global:4", scheduler=scheduler),
            scheduler,
        )

    def train(run: Any, scheduler: Any) -> list[tuple[int, int, list[float]]]:
        rows = []
        for epoch in run.epochs(3):
            for batch in run.batches(DATA):
                with run.step():
                    run.model(batch).square().mean().backward()
                    run.optimizer.step()
            scheduler.step()
            rows.append((epoch, run.steps, scheduler.get_last_lr()))
        return rows

    run, scheduler = made()
    given: list[Any] = []
    meet = run._meet

    def meet_and_note() -> None:
        given.append(copy_of(run._state()))
        meet()

    run._meet = meet_and_note
    expected = train(run, scheduler)
    for epoch, state in enumerate(given):
        newcomer, schedule = made()
        newcomer._receive(state)
        assert train(newcomer, schedule) == expected[epoch:]


def test_one_scaler_of_two_optimizers() -> None:
    nets = [torch.nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = OtherState(scaler)

    def step(place: int) -> None:
        loss = nets[place](DATA[1]).square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[place])
        scaler.step(optimizers[place])

    step(0)
    step(1)
    scaler.update()
    other.begin_block()
    step(0)
    assert other.undo()
    other.release()
    other.begin_block()
    step(0)
    step(1)
    scaler.update()
    other.release()
