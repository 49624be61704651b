"""Find out whether an optimizer treats parameters separately.

# Note [A trial of an optimizer]
A rank has gradients only of the layers that it runs, so an optimizer whose step reads
all gradients together, such as a limit on their norm, would compute another step on
each rank. PyTorch's own optimizers are known. Any other one is tried before its first
step: a copy of it takes some steps on random values of a few parameters, and again on
each half of them. If parameters are treated separately, all values are equal bit for
bit. Gradients keep their direction, so that estimates that grow with the distance from
the start differ too, and are large in some steps.

Many decisions over all parameters depend on rare values: no step if a gradient is not
finite, or a smaller one if their norm exceeds a limit. So there are further rounds, see
`_ROUNDS`, in which one half's gradients or values are far from the other half's: any
limit between the two is exceeded by all parameters together, and not by one half alone.
An optimizer that raises an error for such gradients ends its round.

A step may also depend on the loss that its closure returns, or on a number that the
program passes. These are each rank's own, so the trial repeats its first round with
other ones, and nothing may change.

Other parameters of the copy have no gradient, and no memory if the step allows it. The
chosen parameters depend on shapes only, so all ranks come to the same result.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class _Step(NamedTuple):
    """By what the gradients of a step are multiplied."""

    halves: tuple[float, float]

    one: tuple[int, float] | None = None
    """The number of a parameter with another factor, and this factor."""

    is_signed: bool = False
    """Whether all elements of a gradient have the factor's sign."""


class _Round(NamedTuple):
    """Some steps from the start."""

    steps: tuple[_Step, ...]

    values: tuple[float, float] = (1.0, 1.0)
    """By what the parameters of each half are multiplied before."""

    alone: tuple[int, ...] = (0, 1)
    """The halves that take the same steps alone."""

    rate: float | None = None
    """The largest learning rate, if not the optimizer's own."""


_ORDINARY = _Round(
    tuple(
        _Step((scale, scale)) for scale in (*(1.0,) * 8, 1e3, 1.0, 1e3, 1e-3, 1.0, 1.0)
    )
)

_RATIO = 1e6
"""Between the gradients of the halves; limits within it are found."""


def _far_apart(scale: float) -> tuple[_Step, _Step]:
    return _Step((scale * _RATIO, scale)), _Step((scale, scale * _RATIO))


def _not_finite(factor: float, half: int, values: tuple[float, float]) -> _Round:
    """Return a round in which one parameter of a half, then all, are not finite.

    They stay so, so that only the other half is compared. ``values`` are for this half
    and the other one.
    """

    def by_half(this: float, other: float) -> tuple[float, float]:
        return (other, this) if half else (this, other)

    usual = _Step((1.0, 1.0))
    rare = usual._replace(one=(half, factor))
    every = _Step(by_half(factor, 1.0))
    return _Round((usual, rare, rare, every), by_half(*values), alone=(1 - half,))


_ROUNDS = (
    # Estimates of the distance from the start, as in Prodigy, may not grow at the small
    # rates of a warm-up.
    _Round(_ORDINARY.steps, rate=1.0),
    # From small to large: earlier steps must not hide the changes of later ones.
    _Round(
        (
            *_far_apart(1e-12),
            *_far_apart(1e-7),
            _Step((0.0, 0.1)),
            _Step((0.1, 0.0)),
            _Step((10.0, -0.1), is_signed=True),
            _Step((-0.1, 10.0), is_signed=True),
            _Step((-10.0, 0.1), is_signed=True),
            _Step((0.1, -10.0), is_signed=True),
            *_far_apart(1e-2),
            *_far_apart(1e3),
        )
    ),
    *(_not_finite(math.nan, half, (1e5, 1e-3)) for half in (0, 1)),
    *(_not_finite(math.inf, half, (1e-5, 1.0)) for half in (0, 1)),
)

_MAX_STEPS = 48
"""Number of steps after which a trial that has changed nothing ends."""

_OF_A_KIND = 4
"""Number of parameters to try of each group and number of dimensions."""

_MAX_PARAMETERS = 48

_RARE_OF_A_KIND, _MAX_RARE = 2, 24
"""The same for the rounds with rare values."""

_MIN_RATE = 1e-3
"""Replaces a learning rate of 0, as at the start of a warm-up."""

_LOSSES = (1.0, 7.0, 0.1, 30.0)
"""By what losses are multiplied in turn, to find out if a step depends on them."""

_separate: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Optimizers that a trial has found to be separate; whether with a loss or number."""


def why_together(
    optimizer: Optimizer,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """Return how an optimizer reads several parameters together, or ``None``.

    Args:
        optimizer: about to take its first step.
        args: arguments of its ``step``.
        kwargs: further arguments, by name.
    """
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        return "LBFGS reads the gradients of all layers together"
    if is_known(optimizer):
        return None
    named = dict(kwargs or {})
    has_loss = any(_is_loss(value) for value in (*args[1:], *named.values()))
    if _separate.get(optimizer, False) >= has_loss and optimizer in _separate:
        return None
    try:
        found = _tried(optimizer, args, named, has_loss=has_loss)
    except Exception as exc:  # noqa: BLE001 - of the program's optimizer
        text = (str(exc) or type(exc).__name__).splitlines()[0]
        found = (
            f"{kind.__name__} could not be tried on copies of some parameters, to find "
            f"out whether it reads gradients of several layers together ({text})"
        )
    if found is None:
        _separate[optimizer] = has_loss
    return found


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of PyTorch's own, or of `stretto.optim`."""
    return type(optimizer).__module__.startswith(("torch.optim.", "stretto.optim."))


def _is_loss(value: Any) -> bool:
    """Return whether an argument of a step gives it a rank's own loss or number."""
    return callable(value) or isinstance(value, Tensor | float)


def _tried(
    optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any], *, has_loss: bool
) -> str | None:
    chosen = _chosen(optimizer)
    if len(chosen) < 2 and not (chosen and has_loss):
        return None
    name = type(optimizer).__name__
    with _own_draws(chosen[0].device):
        usual = _Values(optimizer, chosen, args, kwargs)
        whole = usual.first()
        if _is_same(whole[-1], usual.values):
            return (
                f"{name} changed none of some copied parameters in {_MAX_STEPS} "
                "steps, so it is unknown whether it reads gradients of several layers "
                "together"
            )
        if has_loss and not usual.ignores_losses(whole):
            return (
                f"{name} reads the loss that its closure returns, or a number that is "
                "passed to its step, which each rank has for its own samples only"
            )
        if len(chosen) < 2:
            return None
        is_equal = usual.are_halves_equal(_ORDINARY, whole)
        if is_equal:
            few = _chosen(optimizer, _RARE_OF_A_KIND, _MAX_RARE)
            rare = _Values(optimizer, few, args, kwargs, is_thin=usual.is_thin)
            is_equal = all(
                rare.are_halves_equal(each, rare.run(each, range(len(few))))
                for each in _ROUNDS
            )
    if is_equal:
        return None
    return (
        f"{name} reads the gradients of several parameters together (its step on some "
        "copied parameters differs from its step on half of them)"
    )


class _Values:
    """Random values and gradients of some parameters, for trials of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        chosen: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        is_thin: bool = True,
    ) -> None:
        self._optimizer, self._chosen = optimizer, chosen
        self._args, self._kwargs = args, kwargs
        self.is_thin = is_thin
        """Whether other parameters have no memory."""
        _seed(chosen[0].device)
        self.values = [_random_values(p) for p in chosen]
        self._grads = [torch.randn_like(v) for v in self.values]

    def first(self) -> list[list[Tensor]]:
        """Return the ordinary round's values; find out if other parameters are thin."""
        every = range(len(self._chosen))
        try:
            return self.run(_ORDINARY, every)
        except Exception:  # noqa: BLE001 - some write to all parameters
            self.is_thin = False
            return self.run(_ORDINARY, every)

    def run(
        self, each: _Round, part: Sequence[int], losses: Sequence[float] = (1.0,)
    ) -> list[list[Tensor]]:
        """Return all values after each step of a round with gradients of a part."""
        found = self._run(each, part, losses, is_thin=self.is_thin)
        if self.is_thin and len(found) < len(each.steps):
            # Rare values may be what lets it write to all parameters.
            found = self._run(each, part, losses, is_thin=False)
        return found

    def ignores_losses(self, whole: Sequence[list[Tensor]]) -> bool:
        """Return whether the ordinary round is the same with other losses."""
        every = range(len(self._chosen))
        return _is_equal(_ORDINARY, whole, self.run(_ORDINARY, every, _LOSSES), every)

    def _run(
        self,
        each: _Round,
        part: Sequence[int],
        losses: Sequence[float],
        *,
        is_thin: bool,
    ) -> list[list[Tensor]]:
        _seed(self._chosen[0].device)
        trial = _Trial(
            self._optimizer,
            self._chosen,
            [_multiplied(v, each.values[i % 2]) for i, v in enumerate(self.values)],
            self._grads,
            part,
            losses,
            each.rate,
            is_thin=is_thin,
        )
        with _NoMessages():  # type: ignore[no-untyped-call]
            return trial.run(each, self._args, self._kwargs)

    def are_halves_equal(self, each: _Round, whole: Sequence[list[Tensor]]) -> bool:
        """Return whether a round with one half gives the same values of this half."""
        every = range(len(self._chosen))
        parts = [every[half::2] for half in each.alone]
        return all(_is_equal(each, whole, self.run(each, p), p) for p in parts)


def _is_equal(
    each: _Round,
    whole: Sequence[list[Tensor]],
    alone: Sequence[list[Tensor]],
    part: Sequence[int],
) -> bool:
    """Return whether a half's values are the same after each step of a round."""
    if each is _ORDINARY and len(alone) != len(whole):
        return False
    return all(
        _is_same([ours[i] for i in part], [theirs[i] for i in part])
        for ours, theirs in zip(whole, alone, strict=False)
    )


@contextlib.contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    """Leave the program's random numbers as they are."""
    plain, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = [] if device.type in ("cpu", "meta") else [device]
    kind = device.type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)  # noqa: NPY002


def _seed(device: torch.device) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, TID251
    torch.default_generator.manual_seed(0)
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        with getattr(module, "device", contextlib.nullcontext)(device):
            module.manual_seed(0)


class _Trial:
    """A copy of an optimizer, with copies of some of its parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        chosen: Sequence[Tensor],
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        part: Sequence[int],
        losses: Sequence[float],
        rate: float | None,
        *,
        is_thin: bool,
    ) -> None:
        self._losses = losses
        self._loss = 1.0
        numbers = {id(p): i for i, p in enumerate(chosen)}
        memo: dict[int, Any] = {}
        for parameter in _parameters(optimizer):
            number = numbers.get(id(parameter))
            if number is not None:
                replica = nn.Parameter(values[number].clone())
            else:
                nothing = torch.zeros(
                    () if is_thin else parameter.shape,
                    dtype=parameter.dtype,
                    device=parameter.device,
                )
                replica = nn.Parameter(
                    nothing.expand(parameter.shape),
                    requires_grad=parameter.requires_grad,
                )
            vars(replica).update(vars(parameter))
            memo[id(parameter)] = replica
        self._parameters = [memo[id(p)] for p in chosen]
        self._starts = values
        self._grads = {i: grads[i] for i in part}
        self._optimizer = _copy_of(optimizer, set(numbers), memo)
        _set_rates(self._optimizer, rate)

    def run(
        self, each: _Round, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[list[Tensor]]:
        """Return all values after each step, up to one that raises for rare values."""
        found: list[list[Tensor]] = []
        is_ordinary = each is _ORDINARY
        for number in range(_MAX_STEPS if is_ordinary else len(each.steps)):
            if number >= len(each.steps) and not _is_same(found[-1], self._starts):
                break
            self._step = each.steps[number % len(each.steps)]
            self._loss = self._losses[number % len(self._losses)]
            self._closure()
            given = [self._given(value) for value in args[1:]]
            named = {key: self._given(value) for key, value in kwargs.items()}
            try:
                self._optimizer.step(*given, **named)
            except Exception:
                if is_ordinary:
                    raise
                break
            found.append([p.detach().clone() for p in self._parameters])
        return found

    def _closure(self) -> Tensor:
        for number, grad in self._grads.items():
            self._parameters[number].grad = _scaled(grad, number, self._step)
        return torch.ones((), requires_grad=True) * self._loss

    def _given(self, value: Any) -> Any:
        """Return an argument of the program's step for one of the trial."""
        if callable(value):
            return self._closure
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                return value
            found = value.detach() * self._loss
            return found.requires_grad_(value.requires_grad)
        return value * self._loss if isinstance(value, float) else value


def _set_rates(optimizer: Optimizer, largest: float | None) -> None:
    """Replace learning rates of 0, and scale all of them to the largest."""
    groups = [
        group
        for group in optimizer.param_groups
        if isinstance(group.get("lr"), (float, int, Tensor))
    ]
    for group in groups:
        if not group["lr"]:
            group["lr"] = group["lr"] + _MIN_RATE
    if largest is not None:
        highest = max((float(group["lr"]) for group in groups), default=largest)
        for group in groups:
            group["lr"] = group["lr"] * (largest / highest)


class _NoMessages(TorchDispatchMode):
    """Refuses communication: ranks need not try an optimizer at the same time."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError("its step communicates with other ranks")
        return func(*args, **(kwargs or {}))


def _scaled(grad: Tensor, number: int, step: _Step) -> Tensor:
    """Return the gradient of a chosen parameter in a step."""
    factor = step.halves[number % 2]
    if step.one is not None and step.one[0] == number:
        factor = step.one[1]
    if step.is_signed and not grad.is_complex():
        grad = grad.abs()
    return _multiplied(grad, factor)


def _multiplied(values: Tensor, factor: float) -> Tensor:
    """Return finite values for a finite factor, also in a type of 16 bits."""
    maximum = torch.finfo(values.dtype).max
    found = values * factor
    if not math.isfinite(factor) or maximum > _RATIO**2:
        return found
    return found.clamp(-maximum / 4, maximum / 4)


def _is_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether values are equal bit for bit, or not numbers in both."""
    return all(
        torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(some, others, strict=True)
    )


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)


def _chosen(
    optimizer: Optimizer, of_a_kind: int = _OF_A_KIND, count: int = _MAX_PARAMETERS
) -> list[Tensor]:
    """Return the smallest trained parameters of each group and number of dimensions."""
    rows = []
    for number, group in enumerate(optimizer.param_groups):
        kinds: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                kinds.setdefault(parameter.dim(), []).append(parameter)
        for kind, some in sorted(kinds.items()):
            some.sort(key=lambda p: p.numel())  # stable, so equal on all ranks
            rows += [(i, number, kind, p) for i, p in enumerate(some[:of_a_kind])]
    # If there are many groups, the first of each come first.
    rows.sort(key=lambda row: row[0])
    rows = sorted(rows[:count], key=lambda row: row[1:3] + row[:1])
    return [row[3] for row in rows]


def _random_values(parameter: Tensor) -> Tensor:
    """Return large and small values, of which small ones show the smallest changes."""
    values = torch.randn_like(torch.empty_like(parameter, requires_grad=False))
    sizes = torch.rand_like(values, dtype=torch.float32).mul(-6.0)
    return values * torch.pow(10.0, sizes).to(values.dtype)


def _copy_of(optimizer: Any, chosen: set[int], memo: dict[int, Any]) -> Any:
    """Return a copy of an optimizer for the parameters of ``memo``.

    Copying by `copy.deepcopy` would lose attributes, which `Optimizer` does not pickle.
    """
    kind = type(optimizer)
    found: Any = object.__new__(kind)
    memo[id(optimizer)] = found
    state = getattr(optimizer, "state", None)
    if isinstance(state, dict) and id(state) not in memo:
        kept: dict[Any, Any] = defaultdict(dict)
        memo[id(state)] = kept
        for key, value in state.items():
            if not isinstance(key, Tensor) or id(key) in chosen:
                kept[copy.deepcopy(key, memo)] = copy.deepcopy(value, memo)
    for key, value in vars(optimizer).items():
        if key.startswith("_optimizer_") and isinstance(value, OrderedDict):
            vars(found)[key] = OrderedDict()  # the program's hooks
        elif isinstance(value, types.FunctionType | types.MethodType) and hasattr(
            kind, key
        ):
            continue  # a scheduler's or the program's, for the original
        else:
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(inner, Optimizer) and id(inner) not in memo:
                    _copy_of(inner, chosen, memo)
            vars(found)[key] = copy.deepcopy(value, memo)
    return found
