"""Detect gradients and parameters that a program scales differently on each rank.

A rank holds only the gradients of the layers that it runs. A norm that a program
computes over `.grad` by hand is therefore the norm of some layers, different on each
rank. Clipping by it, normalizing by it, or moving parameters by `rho * grad / norm`
trains a different model than one process would. Where no two ranks run the same layer,
comparing copies does not find it.

# Note [Factors by rank]
When a backward has ended, a few elements of some gradients and of their parameters are
kept. They are compared before an optimizer's step: a gradient whose elements all became
c times what they were was scaled by c. Parameters are compared at the next forward,
excluding the changes of optimizer steps: if they moved by s times the gradient, s is
the factor. Ranks exchange their factors with each forward.

A program may scale some layers on purpose, such as a head that learns ten times faster,
and those may all be on one rank. Such factors are constant, or change in the same way
on all ranks; those of norms do not. So ranks may differ, but the growth of their
factors since the first comparison may not. A rank with several factors scales by layer;
then no factors are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.burst.checks.numbers import as_float, as_int
from stretto.burst.checks.tolerances import FACTORS, OTHER_FACTORS
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.runtime.agreement import Ranks

_ELEMENTS = 64
"""Number of elements compared in each gradient."""

_GRADIENTS = 8
"""Number of gradients compared after each backward; they change each time."""

_EVERY_ON_ACCELERATORS = 64
"""Number of backward passes between two checks that read values from an accelerator.

Reading waits for the device. A tensor whose version changed is always read; this
interval is for writes through ``.data``, which do not change the version."""

_NONE, _ONE, _MANY = 0, 1, 2
"""How many factors a rank has seen."""

_IDLE, _STEPPED, _NOT_STEPPED = 0, 1, 2

Values = NDArray[np.float64]


@dataclass(eq=False)
class _Sample:
    """One parameter, with its gradient and values when last compared."""

    parameter: torch.nn.Parameter
    offset: int
    grad: torch.Tensor
    grad_version: int
    values: torch.Tensor
    values_version: int
    is_done: bool = False
    """Whether a step has used the gradient."""
    first: torch.Tensor = field(init=False)
    """The gradient's elements when backward ended."""

    def __post_init__(self) -> None:
        self.first = self.grad


@final
class Changes:
    """Changes of one model's gradients and parameters on this rank."""

    num_values: ClassVar[int] = 3

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.is_on = False
        self.reset()

    def reset(self, *, is_on: bool | None = None) -> None:
        """Forget everything; ``is_on`` enables or disables comparing from now on."""
        self.is_on = self.is_on if is_on is None else is_on
        self._samples: list[_Sample] = []
        self._turn = 0
        self._state = _IDLE
        self._in_use: set[int] = set()
        """Parameters of the optimizer whose step runs."""
        self._is_from_closure = False
        """Whether the last backward ran within an optimizer's step."""
        self._scaled: dict[int, float | None] = {}
        self._moved: list[float] = []
        self._tolerance = 0.0
        self._before: dict[str, dict[int, float]] = {}

    # Events on this rank.

    @torch.no_grad()
    def backward_begins(self) -> dict[int, bool]:
        """Compare gradients that a program changed and has not used yet.

        Return by parameters' ids whether the last backward's gradients are still there.
        """
        if not self.is_on:
            return {}
        kept = self._still_there(None)
        self.look_at_gradients()
        self._samples = []
        return kept

    @torch.no_grad()
    def backward_ended(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Keep some elements of the gradients that have arrived."""
        if not self.is_on:
            return
        held = [p for p in parameters if _is_readable(p)]
        self._samples = []
        self._is_from_closure = bool(self._in_use)
        if not held:
            return
        self._turn += 1
        if self._state == _IDLE:
            self._state = _NOT_STEPPED
        first = self._turn * _GRADIENTS % len(held)
        chosen = [held[(first + i) % len(held)] for i in range(len(held))][:_GRADIENTS]
        for parameter in chosen:
            assert parameter.grad is not None  # noqa: S101
            self._samples.append(
                _Sample(
                    parameter,
                    self._turn,
                    _elements(parameter.grad, self._turn),
                    parameter.grad._version,  # noqa: SLF001
                    _elements(parameter, self._turn),
                    parameter._version,  # noqa: SLF001
                )
            )

    @torch.no_grad()
    def look_at_gradients(self) -> None:
        """Record by what gradients were scaled since they were last compared."""
        self._look_at_gradients(None)

    @torch.no_grad()
    def gradients_were_scaled(self) -> None:
        """Exclude a scaling that all ranks have just applied."""
        for sample in self._samples:
            grad = sample.parameter.grad
            if (
                grad is not None
                and not sample.is_done
                and _is_readable(sample.parameter)
            ):
                sample.grad = _elements(grad, sample.offset)
                sample.grad_version = grad._version  # noqa: SLF001

    @torch.no_grad()
    def before_step(self, parameters: Iterable[torch.Tensor]) -> dict[int, bool]:
        """Compare the gradients that an optimizer will use.

        Return by parameters' ids whether they are still there.
        """
        if not self.is_on:
            return {}
        self._state = _STEPPED
        self._in_use = {id(p) for p in parameters}
        kept = self._still_there(self._in_use)
        self._look_at_gradients(self._in_use)
        self._look_at_parameters()
        return kept

    @torch.no_grad()
    def after_step(self) -> None:
        """Exclude changes by an optimizer's step, but not by its closure."""
        in_use, self._in_use = self._in_use, set()
        if self._is_from_closure:
            self._look_at_gradients(in_use)
        for sample in self._samples:
            # Not before: a step may scale gradients and call its base class's step.
            sample.is_done |= id(sample.parameter) in in_use
            self._keep_values(sample)

    def _look_at_gradients(self, used: set[int] | None) -> None:
        for sample in self._samples:
            parameter = sample.parameter
            if sample.is_done or not (used is None or id(parameter) in used):
                continue
            grad = parameter.grad
            if grad is None or not _is_readable(parameter):
                continue
            if not self._reads(grad, sample.grad_version):
                continue
            now = _some(grad, sample.offset)
            before = sample.grad
            sample.grad_version = grad._version  # noqa: SLF001
            tolerance = FACTORS.get(grad.dtype, OTHER_FACTORS)
            if _is_same(now, before):
                found = 1.0 if bool(before.any()) else None
            else:
                sample.grad = now = now.clone()
                if now.shape != before.shape:
                    continue
                values = _numbers(sample.values)
                found = _factor(_numbers(before), _numbers(now), values, tolerance)
            if found is None:
                continue
            self._tolerance = max(self._tolerance, tolerance)
            key = id(parameter)
            self._scaled[key] = (self._scaled.get(key) or 1.0) * found

    def _still_there(self, used: set[int] | None) -> dict[int, bool]:
        """Return whether gradients were not zeroed since they arrived, where known."""
        found = {}
        for sample in self._samples:
            parameter = sample.parameter
            if used is not None and (sample.is_done or id(parameter) not in used):
                continue
            grad = parameter.grad
            if grad is None:
                found[id(parameter)] = False
            elif _is_readable(parameter) and self._reads(grad, sample.grad_version):
                if bool(_some(grad, sample.offset).any()):
                    found[id(parameter)] = True
                elif bool(sample.first.any()):
                    found[id(parameter)] = False
        return found

    def _look_at_parameters(self) -> None:
        for sample in self._samples:
            parameter = sample.parameter
            if not self._reads(parameter, sample.values_version):
                continue
            before = sample.values
            if _is_same(_some(parameter, sample.offset), before):
                sample.values_version = parameter._version  # noqa: SLF001
                continue
            now = self._keep_values(sample)
            tolerance = FACTORS.get(parameter.dtype)
            if tolerance is None or now.shape != before.shape:
                continue
            epsilon = torch.finfo(parameter.dtype).eps
            found = _move(
                _numbers(before), _numbers(now), _numbers(sample.first), epsilon
            )
            if found is not None:
                self._moved.append(found)

    def _keep_values(self, sample: _Sample) -> torch.Tensor:
        sample.values = _elements(sample.parameter, sample.offset)
        sample.values_version = sample.parameter._version  # noqa: SLF001
        return sample.values

    def _reads(self, tensor: torch.Tensor, version: int) -> bool:
        return (
            tensor.device.type == "cpu"
            or tensor._version != version  # noqa: SLF001
            or self._turn % _EVERY_ON_ACCELERATORS == 0
        )

    # The exchange between ranks.

    @torch.no_grad()
    def next_values(self) -> list[int]:
        """Return `num_values` numbers to exchange."""
        if self.is_on:
            self._look_at_parameters()
        tolerance = self._tolerance or OTHER_FACTORS
        scales = [f for f in self._scaled.values() if f is not None]
        kind, scale = _summary(scales, tolerance, plain=1.0)
        move_kind, move = _summary(self._moved, _MOVE_TOLERANCE, plain=None)
        if self._in_use:  # an exception ended the step, or its closure runs
            self._state = _NOT_STEPPED
        flags = self._state + 3 * kind + 9 * move_kind
        self._state, self._scaled, self._moved, self._tolerance = _IDLE, {}, [], 0.0
        coarse = int(tolerance == OTHER_FACTORS)
        return [flags + 27 * coarse, as_int(scale), as_int(move)]

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged, the same on all ranks.

        Raises:
            RankDisagreement: on every rank, with the factors.
        """
        if not self.is_on:
            return
        states = [row[0] % 3 for row in rows]
        stepped = [rank for rank, state in enumerate(states) if state == _STEPPED]
        waited = [rank for rank, state in enumerate(states) if state == _NOT_STEPPED]
        if stepped and waited:
            name_all = self._ranks.name_all
            raise RankDisagreement(
                f"{name_all(stepped)} took an optimizer step with the last "
                f"gradients, {name_all(waited)} did not. Decide whether to step from "
                "values that are the same on all ranks, such as the norm that "
                "torch.nn.utils.clip_grad_norm_ returns or model.grad_norm()"
            )
        kinds = [row[0] // 3 % 3 for row in rows]
        coarse = any(
            row[0] // 27 and kind for row, kind in zip(rows, kinds, strict=True)
        )
        tolerance = OTHER_FACTORS if coarse else FACTORS[torch.float32]
        scales = [as_float(row[1]) for row in rows]
        self._compare("gradients were scaled", kinds, scales, tolerance)
        kinds = [row[0] // 9 % 3 for row in rows]
        moves = [as_float(row[2]) for row in rows]
        what = "parameters were moved along their gradients"
        self._compare(what, kinds, moves, _MOVE_TOLERANCE)

    def _compare(
        self,
        what: str,
        kinds: Sequence[int],
        factors: Sequence[float],
        tolerance: float,
    ) -> None:
        now = {r: f for r, f in enumerate(factors) if kinds[r] == _ONE}
        if len(now) < 2 or _MANY in kinds:
            return
        before = self._before.get(what)
        if before is None or now.keys() != before.keys():
            self._before[what] = now
            return
        if _are_near(now.values(), tolerance) and _are_near(before.values(), tolerance):
            return
        growth = [now[r] / before[r] for r in now]
        if _are_near(growth, 2 * tolerance):
            return
        by_rank = ", ".join(
            f"{self._ranks.name(r)} by {now[r]:.4g}, in an earlier step by "
            f"{before[r]:.4g}"
            for r in now
        )
        raise RankDisagreement(
            f"{what} by different factors on different ranks: {by_rank}. A rank has "
            "the gradients of the layers that it runs, so a norm over them is not the "
            "model's. To clip, use torch.nn.utils.clip_grad_norm_, whose norm is over "
            "all ranks; for other uses, take the norm from model.grad_norm() or "
            "torch.nn.utils.get_total_norm, called on all ranks. For learning rates by "
            "layer, use the optimizer's parameter groups"
        )


_MOVE_TOLERANCE = 1e-2
"""Rounding is large when a large parameter moves by little."""


def _is_readable(parameter: torch.nn.Parameter) -> bool:
    grad = parameter.grad
    return (
        grad is not None
        and grad.layout == torch.strided
        and grad.is_floating_point()
        and grad.numel() > 0
        and grad.stride() == parameter.stride()
        and _is_dense(grad)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or bool(
        torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )


def _elements(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return copies of some elements, in the order of memory."""
    return _some(tensor, offset).clone()


def _some(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a view of these elements."""
    count = tensor.numel()
    stride = max(1, count // _ELEMENTS)
    start = offset % stride
    number = min(_ELEMENTS, -(-(count - start) // stride))
    first = tensor.storage_offset() + start
    return tensor.detach().as_strided((number,), (stride,), first)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all elements are equal; not a number never is."""
    return one.dtype == other.dtype and torch.equal(one, other)


def _numbers(tensor: torch.Tensor) -> Values:
    found: Values = tensor.double().cpu().numpy()
    return found


def _factor(
    before: Values, now: Values, values: Values, tolerance: float
) -> float | None:
    """Return the factor by which a gradient was scaled; ``None`` if it is unknown.

    A weight decay may have changed it as well, and a limit on values fewer than half of
    its elements.
    """
    if np.array_equal(before, now):
        return 1.0 if before.any() else None
    keep = np.isfinite(before) & np.isfinite(now) & (before != 0) & (now != 0)
    before, now, values = before[keep], now[keep], values[keep]
    if len(np.unique(np.abs(before))) < 2:
        return None
    ratios = now / before
    middle = float(np.sort(ratios)[len(ratios) // 2])
    near = np.abs(ratios - middle) <= tolerance * abs(middle)
    if len(np.unique(np.abs(before[near]))) >= 2 and 2 * near.sum() > len(near):
        return middle
    if len(before) < 4 or tolerance == OTHER_FACTORS:
        return None
    columns = np.stack((before, values), axis=1)
    sizes = np.abs(columns).max(axis=0)
    if not np.isfinite(values).all() or not sizes.all():
        return None
    found, _, rank, spectrum = np.linalg.lstsq(columns / sizes, now, rcond=None)
    if rank < 2 or spectrum[1] < 0.05 * spectrum[0]:
        return None
    apart = np.abs(columns / sizes @ found - now).max()
    if apart > 0.01 * tolerance * np.abs(now).max() or 10 * abs(found[0]) < abs(
        found[1]
    ):
        return None
    return float(found[0] / sizes[0]) or None


def _move(before: Values, now: Values, grad: Values, epsilon: float) -> float | None:
    """Return s if a parameter moved by s times its gradient, or times its square's.

    The second is what adaptive sharpness-aware minimization does.
    """
    if now.shape != grad.shape or np.array_equal(now, before):
        return None
    if not np.isfinite((before, now, grad)).all():
        return None
    moved = now - before
    rounding = 2 * epsilon * np.maximum(np.abs(before), np.abs(now))
    if np.linalg.norm(rounding) > _MOVE_TOLERANCE * np.linalg.norm(moved):
        return None
    for direction in (grad, before * before * grad):
        if len(np.unique(np.abs(direction[direction != 0]))) < 2:
            continue
        factor = float(moved @ direction / (direction @ direction))
        expected = factor * direction
        bound = 2 * rounding + 1e-3 * _MOVE_TOLERANCE * np.abs(expected).max()
        if factor and (np.abs(moved - expected) <= bound).all():
            return factor
    return None


def _summary(
    factors: list[float], tolerance: float, *, plain: float | None
) -> tuple[int, float]:
    """Return how many factors there are besides the plain one, and the plain one."""
    known = [f for f in factors if math.isfinite(f) and f]
    if not known:
        return _NONE, 0.0
    rest = [f for f in known if plain is None or not _are_near((f, plain), tolerance)]
    if not rest:
        return _ONE, plain or 0.0
    return (_ONE if _are_near(rest, tolerance) else _MANY), rest[0]


def _are_near(factors: Any, tolerance: float) -> bool:
    every = list(factors)
    largest = max(abs(f) for f in every)
    return bool(max(every) - min(every) <= tolerance * largest)
