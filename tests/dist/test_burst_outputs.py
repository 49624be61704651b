"""Models of several outputs of which a step uses some, and activations that hooks keep.

The oracle is one process with the whole batch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.burst.executor import BurstParallel
from support.burst_ranks import part, plan_of, shares_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.burst_sides import Widths

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

BATCH = 6


class Heads(nn.Module):
    """A trunk, two heads on it, and one that shares a layer with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5)
        self.first = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        self.second = nn.Linear(5, 2)
        self.third = nn.Linear(5, 2)
        self.aside = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        inner = self.first[1](self.first[0](h))
        return {
            "first": self.first[2](inner),
            "second": self.second(h),
            "third": self.third(inner),
            "aside": self.aside(x),
            "label": h.argmax(1),
        }


STEPS = (
    [("first", "first")],
    [("second", "second")],
    [("first", "second")],  # even samples use one head, odd ones the other
    [("third", "aside")],
    [("second", "second"), ("aside", "aside")],  # accumulated in no_sync
    [("first", "third")],
)


def loss_of(out: dict[str, torch.Tensor], rows: torch.Tensor, names: Any) -> Any:
    """The mean over samples; each uses one of two outputs."""
    each = [
        out[names[int(row) % 2]][i].square().sum()
        for i, row in enumerate(rows.tolist())
    ]
    return sum(each, torch.zeros(())) / max(1, len(each)) + 0 * out[names[0]].sum()


def train(model: Any, mine: Any) -> list[list[bool]]:
    """Which gradients were there after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    draw = torch.Generator().manual_seed(5)
    there = []
    for step, uses in enumerate(STEPS):
        optimizer.zero_grad()
        if isinstance(model, Heads):
            inner: Any = model
        else:
            inner = model.module
        inner.second.requires_grad_(step != 2)
        inner.trunk.requires_grad_(step != 0)  # frozen when the model is built
        for number, names in enumerate(uses):
            x = mine(torch.randn(BATCH, 6, generator=draw))
            rows = mine(torch.arange(BATCH))
            last = number == len(uses) - 1
            sends: Any = contextlib.nullcontext()
            if not last and not isinstance(model, Heads):
                sends = model.no_sync()
            with sends:
                loss_of(model(x), rows, names).backward()
        there.append([p.grad is not None for p in model.parameters()])
        optimizer.step()
    return there


def heads_on_ranks(rank: int, size: int, widths: Widths, shares: str) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ours, theirs = Heads(), Heads()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.trunk.requires_grad_(requires_grad=False)
    example = torch.zeros(2, 6)
    plan = plan_of(ours, example, lambda i: widths[i % len(widths)], size)
    model = BurstParallel(ours, plan, example_inputs=(example,))
    parts = shares_of(BATCH, size, shares)
    there = train(model, lambda rows: part(rows, parts, rank))
    wanted = train(theirs, lambda rows: rows)
    held = [model._parts.ownership.runs_parameter(p) for p in model.parameters()]
    differ = [
        (step, i)
        for step, (mine, whole) in enumerate(zip(there, wanted, strict=True))
        for i, is_held in enumerate(held)
        if mine[i] != (whole[i] and is_held)
    ]
    state = model.full_state_dict()
    apart = max(
        float((state[name] - value).abs().max())
        for name, value in theirs.state_dict().items()
    )
    return differ, apart


@pytest.mark.parametrize(
    ("size", "widths", "shares"),
    [
        (2, [(0, 2), (1, 1), (0, 1)], "uneven"),
        (3, [(1, 2), (0, 3), (2, 1), (0, 1)], "even"),
        (2, [(0, 2)], "one"),
    ],
)
def test_layers_behind_outputs_that_no_loss_uses_get_no_gradient(
    ranks: Any, size: int, widths: Widths, shares: str
) -> None:
    for differ, apart in ranks(heads_on_ranks, size, widths, shares, timeout_s=120):
        assert differ == []
        assert apart < 1e-9


def clipping(rank: int, size: int) -> Any:
    """Clip over the gradients that a rank holds: rank 1 runs no layer."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ours, theirs = Heads(), Heads()
    theirs.load_state_dict(ours.state_dict())
    example = torch.zeros(2, 6)
    plan = plan_of(ours, example, lambda _: (0, 1), size)
    model = BurstParallel(ours, plan, example_inputs=(example,))
    norms = []
    for one, rows in ((model, slice(rank * 2, rank * 2 + 2)), (theirs, slice(0, 4))):
        draw = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=draw)[rows]
            one(x)["first"].square().sum(1).mean().backward()
            held = [p for p in one.parameters() if p.grad is not None]
            norms.append(nn.utils.clip_grad_norm_(held, 0.1))
            optimizer.step()
    state = model.full_state_dict()
    apart = [(state[n] - v).abs().max() for n, v in theirs.state_dict().items()]
    mine, whole = torch.stack(norms[:2]), torch.stack(norms[2:])
    return float((mine - whole).abs().max()), float(max(apart))


def test_clipping_over_gradients_that_one_rank_lacks_is_one_process_s(
    ranks: Any,
) -> None:
    for found in ranks(clipping, 2, timeout_s=60, group_s=20):
        assert max(found) < 1e-9


class Gate(torch.autograd.Function):
    """Lets a gradient through once its switch is on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(switch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (switch,) = ctx.saved_tensors
        return grad * 2 if bool(switch) else None, None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle = nn.Linear(6, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 2)
        self.register_buffer("switch", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(self.body(x).tanh())
        return self.head(Gate.apply(h, self.switch))


def gated(rank: int, size: int, widths: Widths) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ours, theirs = (Gated() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    example = torch.zeros(2, 6)
    plan = plan_of(ours, example, lambda i: widths[i % len(widths)], size)
    model = BurstParallel(ours, plan, example_inputs=(example,))
    parts = shares_of(BATCH, size, "uneven")
    whole = torch.randn(BATCH, 6)
    for one, x in ((model, part(whole, parts, rank)), (theirs, whole)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.3)
        switch = ours.switch if one is model else theirs.switch
        for step in range(4):
            switch.fill_(step > 1)
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    state = model.full_state_dict()
    return max(float((state[n] - v).abs().max()) for n, v in theirs.named_parameters())


@pytest.mark.parametrize("widths", [[(0, 2)], [(0, 1), (1, 1)], [(1, 1), (0, 2)]])
def test_a_gradient_that_a_backward_withheld_at_first_arrives(
    ranks: Any, widths: Widths
) -> None:
    for apart in ranks(gated, 2, widths, timeout_s=60, group_s=20):
        assert apart < 1e-9


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@contextlib.contextmanager
def keeping(model: Features, kind: str) -> Iterator[dict[str, Any]]:
    """A hook that keeps what a layer reads or gives."""
    kept: dict[str, Any] = {}

    def keep(_module: Any, read: Any, given: Any) -> None:
        tensor = read[0] if kind == "input" else given
        if kind == "term":
            tensor = tensor.square().mean()
        kept["last"] = tensor.detach() if kind == "detached" else tensor

    layer = model.body if kind == "block" else model.body[2]
    layer.register_forward_hook(keep)
    yield kept


def loss_on_kept(rank: int, size: int, kind: str, widths: Widths) -> tuple[str, str]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Features()
    example = torch.zeros(2, 6)
    with keeping(module, kind) as kept:
        plan = plan_of(module, example, lambda i: widths[i % len(widths)], size)
        model = BurstParallel(module, plan, example_inputs=(example,))
        x = torch.randn(4, 6, requires_grad=True)
        try:
            for _ in range(2):
                out = model(x * 1.0)
                loss = out.square().mean()
                used = kept.get("last")
                if kind != "unused" and used is not None:
                    loss = loss + used.square().sum()
                loss.backward()
        except Exception as exc:  # noqa: BLE001
            return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize("widths", [[(0, 2)], [(0, 2), (1, 1)]], ids=["all", "mixed"])
@pytest.mark.parametrize("kind", ["output", "input", "block", "term"])
def test_a_loss_on_an_activation_that_a_hook_kept_is_refused(
    ranks: Any, kind: str, widths: Widths
) -> None:
    found = ranks(loss_on_kept, 2, kind, widths, timeout_s=60, group_s=30)
    texts = [text for _, text in found]
    assert any("a forward hook of 'body" in text for text in texts)
    for text in texts:  # a rank without the layer may be the first to find it
        assert "a forward hook of" in text


@pytest.mark.parametrize("kind", ["detached", "unused"])
def test_a_hook_may_keep_activations_that_no_loss_differentiates(
    ranks: Any, kind: str
) -> None:
    for found in ranks(loss_on_kept, 2, kind, [(0, 2)], timeout_s=60):
        assert found == ("", "")


def test_a_loss_with_what_a_hook_kept_of_the_capture_is_refused(ranks: Any) -> None:
    """Rank 0 does not run the layer: its hook saw the capture's tensors alone."""
    found = ranks(
        loss_on_kept, 2, "detached", [(0, 2), (1, 1)], timeout_s=60, group_s=30
    )
    for _, text in found:
        assert "a tensor that has no values" in text


class Nearest(nn.Module):
    """Reads a place of each sample that is computed from its values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        far = (0.1 * torch.tanh(self.two(x)[:, 0]) + 1e-3 * x[:, 0]).abs().long()
        h = self.one(x)[torch.arange(len(x)) - far]
        return self.last(torch.cat([h, h[:, :2]], 1))


def another_sample_s_row(rank: int, size: int) -> tuple[str, str]:
    """The second step's last sample reads the row before its own."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Nearest()
    example = torch.zeros(2, 6)
    plan = plan_of(module, example, lambda i: [(0, 1), (1, 1), (0, 2)][i % 3], size)
    model = BurstParallel(module, plan, example_inputs=(example,))
    x = torch.zeros(4, 6)
    try:
        for step in range(2):
            x[3, 0] = 1500.0 * step
            model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    except Exception as exc:  # noqa: BLE001
        return f"step {step}", str(exc)
    return "", ""


def test_an_index_that_leaves_its_sample_on_one_rank_ends_the_step_on_all(
    ranks: Any,
) -> None:
    for step, text in ranks(another_sample_s_row, 2, timeout_s=60, group_s=30):
        assert step == "step 1"
        assert "an index into the rows of the batch is computed" in text


class Shared(nn.Module):
    """Gives an activation, a part of it, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.body(x))
        y = self.head(h)
        return y, y[:, :2], x


def writing(rank: int, size: int) -> tuple[float, list[bool]]:
    """Write into outputs in place, in training and in evaluation."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ours, theirs = Shared(), Shared()
    theirs.load_state_dict(ours.state_dict())
    example = torch.zeros(2, 6)
    plan = plan_of(ours, example, lambda i: [(0, 2), (1, 1)][i % 2], size)
    model = BurstParallel(ours, plan, example_inputs=(example,))
    apart, own = 0.0, []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(5, 6, generator=draw)
        found = []
        for one, rows in ((model, slice(3 * rank, 3 + 2 * rank)), (theirs, slice(5))):
            one.train(step < 2)
            given = x[rows].clone()
            with torch.set_grad_enabled(step < 2):
                whole, some, same = one(given)
                some.mul_(3).sin_()
                whole.mul_(2)
                loss = (whole.sum(1) + some.square().sum(1) + same.sum(1)).mean()
            own.append(given.data_ptr() == same.data_ptr())
            if step < 2:
                loss.backward()
            found.append(whole.detach())
        apart = max(apart, float((found[0] - found[1][rows_of(rank)]).abs().max()))
        with torch.no_grad():
            for mine, wanted in zip(
                ours.parameters(), theirs.parameters(), strict=True
            ):
                if step < 2 and mine.grad is not None:
                    apart = max(apart, float((mine.grad - wanted.grad).abs().max()))
    return apart, own


def rows_of(rank: int) -> slice:
    return slice(3 * rank, 3 + 2 * rank)


def test_outputs_that_share_memory_train_as_in_one_process(ranks: Any) -> None:
    for apart, own in ranks(writing, 2, timeout_s=60, group_s=30):
        assert apart < 1e-12
        assert all(own)
