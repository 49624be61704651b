"""Random training programs, to be run with DDP and with a class in its place.

A program is generated from its number alone, so every rank has the same one. `outcome`
runs it and returns what a user could see of it: losses, a digest of all parameters,
errors. Programs contain only what DDP allows: ranks differ where DDP lets them differ.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import pickle
import random
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from stretto.runtime.quiesce import wait_for_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Wrap = Callable[..., Any]

STEPS = 26
"""Enough for two searches of the forced schedule."""

REBUILT = 3
"""From this step on a forward needs no other rank: DDP has rebuilt its buckets."""

WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One training program."""

    number: int
    model: str
    arguments: dict[str, Any]
    """Arguments of the class."""

    steps: tuple[tuple[tuple[str, int], ...], ...]
    """For each step, what happens before it: names of actions and a random number."""

    ending: str = ""
    """The replacement of the last step: an error that occurs on all ranks."""

    def __str__(self) -> str:
        actions = sorted({name for step in self.steps for name, _ in step})
        return (
            f"program {self.number}: {self.model} {self.arguments} "
            f"{' '.join(actions)} {self.ending}"
        )


LOCAL_ACTIONS = (
    "forward_on_some",
    "forward_error",
    "evaluate_on_some",
    "collectives",
)
"""Actions that run the model on some ranks only, which buffers do not allow: DDP
broadcasts them in each forward.
"""

ACTIONS = (
    "no_sync",
    "evaluate",
    "save",
    "copy",
    "backward_twice",
    "two_forwards",
    "clip",
    "wrap_again",
    "zero_to_none",
    "look",
    "overwrite",
    "rate",
)


def draw(number: int) -> Program:
    """Return the program of a number."""
    rng = random.Random(number)
    model = rng.choice(
        (
            *("mlp", "mlp", "norm", "branches", "tied"),
            *("words", "double", "mixed", "gan", "pair"),
        )
    )
    arguments: dict[str, Any] = {}
    if rng.random() < 0.4:
        arguments["bucket_cap_mb"] = rng.choice((0.001, 0.004))
    if rng.random() < 0.4:
        arguments["gradient_as_bucket_view"] = True
    if model == "branches" or rng.random() < 0.2:
        arguments["find_unused_parameters"] = True
    elif rng.random() < 0.2:
        arguments["static_graph"] = True
    static = "static_graph" in arguments
    if model in ("gan", "pair"):
        arguments.pop("static_graph", None)
    actions = list(ACTIONS)
    if model != "norm":
        actions += LOCAL_ACTIONS
    if static:
        # One static graph is one path through the model in each reduced step.
        for name in ("no_sync", "backward_twice", "two_forwards"):
            actions.remove(name)
    if model == "pair":
        actions.remove("wrap_again")  # the two models would rebuild at different steps
    if not static and model not in ("branches", "gan", "pair"):
        actions += ["join", "freeze"]
    if rng.random() < 0.05:
        actions = ["compile"] if model == "mlp" else actions
    chosen = rng.sample(actions, min(len(actions), rng.randint(1, 4)))
    if "join" in chosen:
        # DDP leaves a model marked as joining: each of its later forwards notifies the
        # other ranks, so from then on all ranks must run the same forwards.
        alone = {*LOCAL_ACTIONS, "no_sync", "evaluate"}
        chosen = [name for name in chosen if name not in alone]
    steps: list[tuple[tuple[str, int], ...]] = []
    once = {"join", "freeze", "wrap_again", "compile"}
    rebuilt = REBUILT
    # A forward without backward leaves DDP's Reducer waiting for one, and the next
    # backward reduces, also under no_sync: so micro-steps come first.
    chosen.sort(key=lambda name: (name in once, name != "no_sync"))
    for step in range(STEPS):
        found = []
        for name in chosen:
            if rng.random() > (0.06 if name in once else 0.3):
                continue
            if step < rebuilt and name in (*LOCAL_ACTIONS, *once, "two_forwards"):
                continue
            if name in ("wrap_again", "freeze"):
                rebuilt = step + REBUILT
            found.append((name, rng.randrange(1000)))
        if len({name for name, _ in found} & once) > 1:
            found = found[:1]
        steps.append(tuple(found))
    ending = ""
    if rng.random() < 0.15 and not static and model not in ("branches", "gan", "pair"):
        ending = rng.choice(("unused", "backward_error"))
        if "find_unused_parameters" in arguments and ending == "unused":
            ending = ""
    return Program(
        number=number,
        model=model,
        arguments=arguments,
        steps=tuple(steps),
        ending=ending,
    )


class _Net(nn.Module):
    """A few layers; each step decides which are used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.other = nn.Linear(WIDTH, WIDTH) if kind == "branches" else None
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else None
        self.words = nn.Embedding(16, WIDTH) if kind == "words" else None
        self.last = nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            self.last.weight = self.first.weight
        if kind == "mixed":
            self.block.double()

    def forward(self, inputs: torch.Tensor, branch: int = 0) -> torch.Tensor:
        out = self.first(inputs)
        if branch < 0:  # leaves the rest without gradients
            return cast("torch.Tensor", out)
        if self.words is not None:
            out = out + self.words((inputs[:, 0].abs() * 7).long() % 16)
        if self.other is not None and branch % 2:
            out = self.other(out)
        elif self.kind == "mixed":
            out = self.block(out.double()).float()
        else:
            out = self.block(out)
        if self.norm is not None:
            out = self.norm(out)
        found: torch.Tensor = self.last(out)
        return found


def outcome(
    program: Program,
    wrap: Wrap,
    rank: int,
    size: int,
    groups: Sequence[dist.ProcessGroup],
) -> list[Any]:
    """Run a program; return its outcome on this rank.

    ``wrap`` is DDP's class or one in its place; a "pair" has a group for each model.
    """
    found: list[Any] = []
    try:
        _Run(program, wrap, rank, size, groups, found).all_steps()
    except Exception as exc:  # noqa: BLE001 - errors are compared, too
        line = (str(exc).splitlines() or [""])[0]
        found.append(("error", type(exc).__name__, line[:80]))
    return found


def compared(
    number: int, theirs: Wrap, ours: Wrap, rank: int, size: int, *, timeout_s: float
) -> str | None:
    """Run a program with both classes; return how they differ, or None.

    On two ranks all values must be equal bit for bit, on more within `ROUNDING`.

    Each run has its own process group, so that what an error leaves there does not
    affect the next program.
    """
    program = draw(number)
    found = []
    for wrap in (theirs, ours):
        groups: list[Any] = [
            dist.new_group(timeout=timedelta(seconds=timeout_s))
            for _ in range(2 if program.model == "pair" else 1)
        ]
        found.append(outcome(program, wrap, rank, size, groups))
        wait_for_workers()  # PyTorch's DDP, collected later, could wait for them
        for group in groups:
            dist.destroy_process_group(group)
    pairs = list(zip_longest(*found))
    for place, (a, b) in enumerate(pairs):
        if not _are_equal(a, b, exact=size <= 2):
            return f"{program}: entry {place} of {len(pairs)}: {(a, b)}"
    return None


ROUNDING = 1e-3
"""Relative tolerance. Buckets decide the order in which more than two ranks' gradients
are added, and 26 steps amplify the rounding differences.
"""


def _are_equal(a: object, b: object, *, exact: bool) -> bool:
    """Return whether two entries are equal: bit for bit, or numbers within rounding."""
    if not exact and isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= ROUNDING * max(abs(a), abs(b), 1e-3)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return all(_are_equal(x, y, exact=exact) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


class _Run:
    def __init__(
        self,
        program: Program,
        wrap: Wrap,
        rank: int,
        size: int,
        groups: Sequence[dist.ProcessGroup],
        found: list[Any],
    ) -> None:
        self.program = program
        self.wrap = wrap
        self.rank, self.size = rank, size
        self.group = groups[0]
        self.found = found
        torch.manual_seed(program.number)
        self.net: nn.Module = _Net(program.model)
        if program.model == "double":
            self.net.double()
        self.dtype = next(self.net.parameters()).dtype
        self.critic: Any = None
        if program.model == "gan":
            critic = _Net("mlp")
            self.critic = wrap(critic, process_group=self.group, **program.arguments)
        self.partner: Any = None
        if program.model == "pair":
            partner = _Net("mlp")
            self.partner = wrap(partner, process_group=groups[1], **program.arguments)
        self.step = 0
        self.inputs = 0
        self._wrap()

    def _wrap(self) -> None:
        self.model = self.wrap(
            self.net, process_group=self.group, **self.program.arguments
        )
        also = [] if self.partner is None else self.partner.parameters()
        self.optimizer = torch.optim.SGD(
            [p for p in (*self.net.parameters(), *also) if p.requires_grad],
            lr=0.05,
            momentum=0.9,
        )

    def batch(self, rows: int = 4, width: int = WIDTH) -> torch.Tensor:
        """Return inputs that depend only on this rank's count of batches."""
        self.inputs += 1
        seed = self.program.number * 1000 + self.inputs * 10 + self.rank
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, width, generator=generator).to(self.dtype)

    def loss(self, branch: int = 0) -> torch.Tensor:
        """Return a forward's loss."""
        inputs = self.batch()
        if self.partner is not None:
            # Backward ends in another order on every other rank. While DDP rebuilds its
            # buckets, which is a collective in forward, all ranks use one order.
            turned = self.step > REBUILT and (self.rank + self.step // 3) % 2
            if turned:
                return cast("torch.Tensor", self.model(self.partner(inputs)).mean())
            return cast("torch.Tensor", self.partner(self.model(inputs)).mean())
        out: torch.Tensor = self.model(inputs, branch)
        return out.square().mean()

    def all_steps(self) -> None:
        """Run every step with what comes before it, then the ending."""
        for step, actions in enumerate(self.program.steps):
            self.step = step
            self.optimizer.zero_grad(set_to_none=self.step % 3 != 0)
            for name, number in actions:
                getattr(self, f"do_{name}")(number)
            if self.critic is not None:
                self._gan_step()
            loss = self.loss(self.step)
            loss.backward()
            self.optimizer.step()
            self.found.append(float(loss.detach()))
        if self.program.ending:
            getattr(self, f"end_{self.program.ending}")()
        self.found.append(self.digest() if self.size <= 2 else self.norms())

    def norms(self) -> list[float]:
        """Return the norm of each parameter and buffer."""
        return [float(tensor.double().norm()) for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        partner = {} if self.partner is None else self.partner.state_dict()
        return [*self.net.state_dict().values(), *partner.values()]

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.model.no_sync())
            if self.partner is not None:
                stack.enter_context(self.partner.no_sync())
            yield

    def digest(self) -> str:
        """Return a digest of all parameters and buffers."""
        sha = hashlib.sha256()
        for tensor in self._tensors():
            sha.update(tensor.detach().contiguous().numpy().tobytes())
        return sha.hexdigest()[:16]

    def _gan_step(self) -> None:
        """Run the critic on generated inputs, with both models in turn in the graph."""
        fake = self.model(self.batch())
        self.critic(fake.detach()).square().mean().backward()
        with torch.no_grad():
            for p in self.critic.parameters():
                p -= 0.01 * p.grad
                p.grad = None
        if self.step % 2:
            for p in self.critic.parameters():
                p.requires_grad = False
        self.critic(fake).mean().backward()
        for p in self.critic.parameters():
            p.requires_grad = True
            p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

    # Actions before a step.

    def do_no_sync(self, number: int) -> None:
        """Run micro-steps without reduction; each rank has its own number of them.

        Not with buffers: DDP broadcasts them in a forward, and in which one depends on
        what the rank ran before.
        """
        more = 0 if self.program.model == "norm" else self.rank * (number // 7)
        with self._no_sync():
            for _ in range((number + more) % 3):
                self.loss(self.step).backward()

    def do_forward_on_some(self, number: int) -> None:
        if self.rank == number % self.size:
            self.loss(self.step)

    def do_forward_error(self, number: int) -> None:
        if self.rank != number % self.size:
            return
        try:
            self.model(self.batch(width=WIDTH + 1))
        except RuntimeError as exc:
            self.found.append(type(exc).__name__)

    def do_evaluate_on_some(self, number: int) -> None:
        if self.rank == number % self.size:
            self.do_evaluate(number)

    def do_evaluate(self, number: int) -> None:
        self.model.eval()
        if number % 2 and self.program.model != "norm":
            self.loss(self.step)  # with gradients, which are never used
        else:
            with torch.no_grad():
                self.found.append(float(self.loss(self.step)))
        self.model.train()

    def do_collectives(self, number: int) -> None:
        """Run collectives of the user, before or after a forward on some ranks."""
        if self.rank == number % self.size:
            self.loss(self.step)
        total = torch.ones(1)
        dist.all_reduce(total, group=self.group)
        if self.rank != number % self.size:
            self.loss(self.step)
        dist.barrier(group=self.group)
        self.found.append(float(total))

    def do_save(self, number: int) -> None:
        if self.rank == number % self.size:
            torch.save(self.model.state_dict(), io.BytesIO())
            torch.save(self.model.module, io.BytesIO())
            pickle.dumps(self.model.module)

    def do_copy(self, _number: int) -> None:
        copied = copy.deepcopy(self.model.module)
        self.found.append(sum(p.numel() for p in copied.parameters()))

    def do_backward_twice(self, _number: int) -> None:
        loss = self.loss(self.step)
        loss.backward(retain_graph=True)
        with self._no_sync():
            loss.backward()

    def do_two_forwards(self, _number: int) -> None:
        for loss in [self.loss(self.step) for _ in range(2)]:
            loss.backward()

    def do_clip(self, _number: int) -> None:
        loss = self.loss(self.step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.found.append(float(norm))

    def do_zero_to_none(self, number: int) -> None:
        for p in self.net.parameters():
            p.grad = None if number % 2 else torch.zeros_like(p)

    def do_look(self, number: int) -> None:
        """Read what the last step changed: a parameter, its state, a gradient."""
        p = list(self.net.parameters())[number % 3]
        if number % 2:
            self.found.append(float(p.detach().norm()))
        for row in self.optimizer.state_dict()["state"].values():
            if row.get("momentum_buffer") is not None:
                self.found.append(float(row["momentum_buffer"].sum()))
        if p.grad is not None:
            self.found.append(float(p.grad.sum()))

    def do_overwrite(self, number: int) -> None:
        """Change a parameter in place, as averaging and clipping of weights do."""
        p = list(self.net.parameters())[number % 3]
        with torch.no_grad():
            p.mul_(0.99)

    def do_rate(self, number: int) -> None:
        """Change the learning rate, as schedulers do after a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + number % 3)

    def do_wrap_again(self, _number: int) -> None:
        self._wrap()

    def do_freeze(self, _number: int) -> None:
        """Freeze a layer and build the model again, as fine-tuning does."""
        net: Any = self.net
        net.first.requires_grad_(requires_grad=self.program.model == "tied")
        self._wrap()

    def do_compile(self, _number: int) -> None:
        net: Any = self.net
        net.block = torch.compile(net.block, backend="eager")

    def do_join(self, number: int) -> None:
        """Run steps of which each rank has its own number."""
        with Join([self.model]):
            for _ in range(1 + (number + self.rank) % 3):
                loss = self.loss(self.step)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    # Endings.

    def end_unused(self) -> None:
        """Leave parameters without gradients, which DDP reports in the next forward."""
        for _ in range(2):
            self.loss(-1).backward()

    def end_backward_error(self) -> None:
        """Raise an error within backward, on all ranks at the same place."""

        def refuse(_grad: torch.Tensor) -> None:
            raise ValueError("refused in backward")

        inputs = self.batch().requires_grad_()
        out = self.model.module.first(inputs)
        del out
        handle = self.net.block.register_full_backward_hook(  # type: ignore[union-attr]
            lambda *_: refuse(inputs)
        )
        try:
            self.loss(0).backward()
        except ValueError as exc:
            self.found.append(str(exc))
        handle.remove()
        self.loss(0).backward()
