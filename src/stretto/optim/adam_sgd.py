"""An optimizer that begins as AdamW and ends as SGD with momentum.

# Note [The rule of the switch]
AIACC-Training's optimizer combines Adam and SGD; the paper gives no formula
(section III). This is our reading, after algorithm 1 of SWATS: N. S. Keskar and
R. Socher, "Improving Generalization Performance by Switching from Adam to SGD",
arXiv:1712.07628.

Let ``q`` be Adam's step divided by the learning rate, with bias corrections, and ``g``
the gradient, of one parameter tensor. The step of SGD whose projection on Adam's
direction is Adam's step has the learning rate ``r * lr`` with ``r = q.q / q.g``. Once
an average of ``r`` has settled, SGD continues with this rate.

Three things differ from SWATS:

- Each tensor has its own ratio and switches by itself. SWATS has one ratio of all
  parameters, which would tie every parameter's step to all gradients, so no step could
  be divided by bucket, as overlap with the next forward does.
- Numerator and denominator are averaged, not their ratio: ``q.g`` of one step may be
  near 0, and a single such ratio would determine the average of ratios for long.
- ``r`` is relative to the learning rate and the tolerance is relative to ``r``, so that
  schedules may change the rate before and after the switch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, final, overload

import torch
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from stretto.boolean_options import bool_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim.optimizer import ParamsT


@final
class AdamSGD(Optimizer):
    """AdamW that switches, tensor by tensor, to SGD with momentum.

    A tensor that has switched keeps one buffer of its size in place of two. Its
    gradients must be dense. Decay of weights is decoupled, as in AdamW, before and
    after the switch. `stretto.DDP` with ``overlap="forward"`` and
    `stretto.BurstParallel` treat it as the optimizers of ``torch.optim``.

    Deciding about the switch reads two numbers per tensor and step, so on a device the
    step waits for it until all tensors have switched.

    Args:
        params: Parameters or groups of parameters.
        lr: The learning rate of Adam. After the switch SGD's is this times the ratio
            found for the tensor, so schedulers act on both.
        betas: Decay rates of the averages of gradients and their squares. The first is
            also SGD's momentum, whose rate is multiplied by ``1 - betas[0]``, and the
            second averages the ratio.
        eps: Added to the root of the average square.
        weight_decay: By how much of ``lr * weight`` a weight shrinks in each step.
        switch_at: The number of its steps after which a tensor switches. ``None``: the
            first step at which its ratio is within ``tolerance`` of the average.
        tolerance: Relative distance of ratio and average that counts as settled.
        min_steps: Steps before which ``None`` never switches. ``None``: as many as
            the average covers, ``1 / (1 - betas[1])``.
        foreach: As in ``torch.optim.Adam``.
        fused: As in ``torch.optim.Adam``.
        maximize: Whether to go up the gradient.

    Raises:
        ValueError: an option is out of range, or not true or false.
    """

    is_separable: ClassVar = True
    """A step treats each parameter separately, so stretto may execute it in parts."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        switch_at: int | None = None,
        tolerance: float = 0.1,
        min_steps: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, not {value}")
        for number, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{number}] must be in [0, 1), not {beta}")
        if switch_at is not None and switch_at < 1:
            raise ValueError(f"switch_at must be at least 1 or None, not {switch_at}")
        if not tolerance > 0.0:
            raise ValueError(f"tolerance must be positive, not {tolerance}")
        if min_steps is not None and min_steps < 1:
            raise ValueError(f"min_steps must be at least 1 or None, not {min_steps}")
        maximize = bool_option("maximize", maximize)
        if foreach is not None:
            foreach = bool_option("foreach", foreach)
        if fused is not None:
            fused = bool_option("fused", fused)
        if foreach and fused:
            raise ValueError("foreach and fused cannot both be True")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "switch_at": switch_at,
            "tolerance": tolerance,
            "min_steps": min_steps,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def switched(self) -> list[tuple[Tensor, float]]:
        """Return the tensors that SGD updates now, each with its ratio to ``lr``."""
        return [
            (parameter, self.state[parameter]["sgd_ratio"])
            for group in self.param_groups
            for parameter in group["params"]
            if "sgd_ratio" in self.state.get(parameter, {})
        ]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have gradients.

        Args:
            closure: Computes the loss and the gradients again, and returns the loss.

        Returns:
            The closure's loss.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            late: list[Tensor] = []
            early: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(
                        "AdamSGD does not support sparse gradients; give sparse "
                        "embeddings an optimizer of their own, such as SparseAdam"
                    )
                is_late = "sgd_ratio" in self.state[parameter]
                (late if is_late else early).append(parameter)
            if early:
                self._adam(group, early)
            if late:
                self._sgd(group, late)
        return loss

    def _adam(self, group: dict[str, Any], parameters: Sequence[Any]) -> None:
        """Take a step of AdamW, then find the tensors that have settled."""
        states = [self._begun(group, parameter) for parameter in parameters]
        grads = [parameter.grad for parameter in parameters]
        beta1, beta2 = group["betas"]
        adam(
            list(parameters),
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            has_complex=any(parameter.is_complex() for parameter in parameters),
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        steps = [round(float(state["step"])) for state in states]
        products: list[Tensor] = []
        for state, grad, step in zip(states, grads, steps, strict=True):
            products += _products(state, grad, step, group)
        # One transfer for all tensors of a device.
        found = _numbers(products)
        for state, step, square, along in zip(
            states, steps, found[::2], found[1::2], strict=True
        ):
            if not (math.isfinite(square) and math.isfinite(along)):
                continue
            if group["maximize"]:
                along = -along
            state["square"] = beta2 * state["square"] + (1.0 - beta2) * square
            state["along"] = beta2 * state["along"] + (1.0 - beta2) * along
            ratio = _settled_ratio(state, step, square, along, group)
            if ratio is not None:
                kept = state["step"]
                state.clear()
                state["step"], state["sgd_ratio"] = kept, ratio
                state["momentum_buffer"] = None

    def _begun(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            where = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=where)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(
                    parameter, memory_format=torch.preserve_format
                )
            state["square"] = state["along"] = 0.0
        return state

    def _sgd(self, group: dict[str, Any], parameters: Sequence[Any]) -> None:
        """Take a step of SGD, of tensors with equal rates together."""
        by_rate: dict[float, list[Any]] = {}
        momentum = group["betas"][0]
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] += 1
            if group["weight_decay"]:
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            rate = float((1.0 - momentum) * group["lr"] * state["sgd_ratio"])
            by_rate.setdefault(rate, []).append(parameter)
        for rate, some in by_rate.items():
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in some]
            sgd(
                some,
                [parameter.grad for parameter in some],
                buffers,
                foreach=group["foreach"],
                fused=group["fused"],
                weight_decay=0.0,
                momentum=momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=group["maximize"],
            )
            for parameter, buffer in zip(some, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer


def _products(
    state: dict[str, Any], grad: Tensor, step: int, group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return ``q.q`` and ``q.g``, see Note [The rule of the switch]."""
    beta1, beta2 = group["betas"]
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    if mean.is_complex():
        mean, square, grad = (torch.view_as_real(t) for t in (mean, square, grad))
    root = square.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
    q = (mean / (1.0 - beta1**step)).div_(root).flatten().float()
    return torch.dot(q, q), torch.dot(q, grad.flatten().float())


def _numbers(products: Sequence[Tensor]) -> list[float]:
    """Return scalars of any devices as numbers, with one wait for each device."""
    places: dict[torch.device, list[int]] = {}
    for place, product in enumerate(products):
        places.setdefault(product.device, []).append(place)
    found = [0.0] * len(products)
    for some in places.values():
        stacked = torch.stack([products[place] for place in some]).tolist()
        for place, number in zip(some, stacked, strict=True):
            found[place] = number
    return found


def _settled_ratio(
    state: dict[str, Any],
    step: int,
    square: float,
    along: float,
    group: dict[str, Any],
) -> float | None:
    """Return the ratio of SGD's rate to Adam's if a tensor switches now."""
    # A direction that does not descend on average has no equal step of SGD.
    if state["square"] <= 0.0 or state["along"] <= 0.0:
        return None
    average = float(state["square"] / state["along"])
    if group["switch_at"] is not None:
        return average if step >= group["switch_at"] else None
    least = group["min_steps"] or math.ceil(1.0 / (1.0 - group["betas"][1]))
    if step < max(2, least) or along <= 0.0:
        return None
    distance = abs(square / along - average)
    return average if distance < group["tolerance"] * average else None
