"""Random rows, perturbed parameters and constant draws for runs of a captured model.

Parameters are perturbed because an effect may vanish behind a zero at initialization;
the model's own random numbers are replaced by constants.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Tolerance of values, relative to the largest."""

COARSE = 5e-2
"""The same if something computes with fewer than 32 bits."""


def tolerance_of(precision: torch.dtype | None) -> float:
    """Return the tolerance for a type's rounding; None is a type of 16 bits."""
    return COARSE if precision is None else TOLERANCES.get(precision, COARSE)


_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
}
_CONSTANTS: dict[Any, float] = {
    torch.empty: 0.0,
    torch.empty_like: 0.0,
    Tensor.new_empty: 0.0,
    torch.rand: 0.6,
    torch.rand_like: 0.6,
    torch.randn: 0.3,
    torch.randn_like: 0.3,
    torch.normal: 0.3,
    torch.bernoulli: 1.0,
    torch.poisson: 1.0,
    torch.randint: 1,
    torch.randint_like: 1,
    torch.multinomial: 0,
    torch._standard_gamma: 0.9,  # noqa: SLF001 - of torch.distributions
    torch._sample_dirichlet: 0.5,  # noqa: SLF001
}
_FILLS = {
    "bernoulli_": 1.0,
    "cauchy_": 0.4,
    "exponential_": 0.7,
    "geometric_": 1.0,
    "log_normal_": 0.8,
    "normal_": 0.3,
    "random_": 1.0,
    "uniform_": 0.6,
}


@final
class Calm(TorchFunctionMode):
    """Replaces random numbers by constants; dropout scales where it is active."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _DROPOUTS:
            given = {"p": 0.5, "training": True, "train": True}
            names = ("input", "p", "training", "inplace")
            given |= dict(zip(names, args, strict=False)) | kwargs
            x = given["input"]
            if not given["training"] or not given["train"] or not given["p"]:
                return x
            return x * (1.0 - given["p"] / 2)
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        elif func is functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        elif func is functional.gumbel_softmax:
            return _gumbel_softmax(*args, **kwargs)
        elif func is functional.rrelu:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            args, kwargs = bound.args, bound.kwargs
        elif name in _FILLS and getattr(Tensor, name, None) is func:
            return args[0].fill_(_FILLS[name])
        elif func in _CONSTANTS:
            return torch.full_like(func(*args, **kwargs), _CONSTANTS[func])
        return func(*args, **kwargs)


def _gumbel_softmax(
    logits: Tensor,
    tau: float = 1,
    hard: bool = False,  # noqa: FBT001, FBT002 - as torch's
    eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:
    """Compute torch's function with constant noise."""
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    one_hot = torch.zeros_like(logits).scatter_(dim, index, 1.0)
    return one_hot - soft.detach() + soft


@final
class Numbers:
    """Random numbers that depend only on a seed, whatever the device and type."""

    def __init__(
        self, seed: int, *, noise: float = 1.0, by_column: bool = False
    ) -> None:
        """Prepare.

        Args:
            seed: The seed.
            noise: Size of parameters' perturbations, relative to the usual one.
            by_column: Whether an integer input's values stay in their columns, as where
                each has a vocabulary of its own.
        """
        self._generator = torch.Generator().manual_seed(seed)
        self._noise = noise
        self._by_column = by_column

    def normal(self, shape: Any, like: Tensor) -> Tensor:
        """Return normal numbers of a shape, with the type and device of a tensor."""
        # float32 on the CPU: one generator, whatever the device and type.
        shape = tuple(shape) + ((2,) if like.is_complex() else ())
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - really random
            made = torch.empty(shape).normal_(generator=self._generator)
            if like.is_complex():
                made = torch.view_as_complex(made)
        return made.to(device=like.device, dtype=like.dtype)

    def rows(self, example: Tensor, number: int) -> Tensor:
        """Return ``number`` random rows like the example's."""
        count = max(1, len(example))
        order = [
            int(torch.randint(count, (), generator=self._generator))
            for _ in range(number)
        ]
        rows = (
            example[order]
            if len(example)
            else example.new_zeros((number, *example.shape[1:]))
        )
        if not example.is_floating_point():
            same = not example.numel() or bool((example == example.flatten()[0]).all())
            if same and example.dtype != torch.bool and not example.is_complex():
                low = torch.randint(2, rows.shape, generator=self._generator)
                return low.to(device=rows.device, dtype=rows.dtype)
            flat = rows.reshape(number, -1)
            if self._by_column:
                for column in flat.unbind(1):
                    mixed = torch.randperm(number, generator=self._generator)
                    column.copy_(column[mixed.to(column.device)])
                return flat.reshape(rows.shape)
            for row in flat:
                mixed = torch.randperm(len(row), generator=self._generator)
                row.copy_(row[mixed.to(row.device)])
            return flat.reshape(rows.shape)
        least, most = (
            (float(example.min()), float(example.max()))
            if example.numel()
            else (0.0, 0.0)
        )
        if 0 <= least < most:  # such as images: not below zero
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - really random
                noise = torch.empty(rows.shape)
                noise.uniform_(0.05, 1.0, generator=self._generator)
            return noise.to(device=rows.device, dtype=rows.dtype) * most
        spread = float(example.std()) if example.numel() > 1 else 1.0
        return self.normal(rows.shape, rows) * (spread if spread > 0 else 1.0)

    def order(self, kinds: int, number: int) -> list[int]:
        """Return ``number`` random numbers below ``kinds``."""
        found = torch.randint(kinds, (number,), generator=self._generator)
        return [int(kind) for kind in found]

    def noise_for(self, tensor: Tensor) -> Tensor:
        """Return a parameter's perturbation: a tenth of its usual value."""
        noise = self.normal(tensor.shape, tensor)
        scale = tensor.abs().mean() if tensor.numel() else tensor.new_zeros(())
        if not bool(torch.isfinite(scale)):
            scale = scale.new_zeros(())
        return self._noise * noise * (0.1 * scale if scale > 0 else 0.2)

    def other_buffer(self, buffer: Tensor) -> Tensor:
        """Return other values for a buffer of floats.

        Signs are kept, because it may hold variances or a mask. Zeros become positive,
        because a program may raise a weight that begins at zero.
        """
        size = self._noise * self.normal(buffer.shape, buffer).abs()
        kept = buffer.isinf() | buffer.isnan()
        made = torch.where(buffer == 0, 0.1 * size, buffer * (1 + 0.1 * size))
        return torch.where(kept, buffer, made)


@contextlib.contextmanager
def without_inner_dropout(module: nn.Module) -> Iterator[None]:
    """Disable dropout in modules that drop within one call of torch."""
    kept = [
        (part, part.dropout)
        for part in module.modules()
        if isinstance(part, (nn.MultiheadAttention, nn.RNNBase))
    ]
    try:
        for part, _ in kept:
            part.dropout = 0.0
        yield
    finally:
        for part, rate in kept:
            part.dropout = rate
