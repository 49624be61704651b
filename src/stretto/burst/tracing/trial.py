"""Random rows, perturbed parameters and constant draws for runs of a captured model.

Parameters are perturbed because an effect may vanish behind a zero at initialization;
the model's own random numbers are replaced by constants.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stretto.burst.memory import in_memory
from stretto.burst.tracing.addresses import refuse_address
from stretto.burst.tracing.replaced import own_function
from stretto.burst.tracing.source_lines import source_line
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

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
    torch.alpha_dropout,
    torch.dropout,
    torch.feature_alpha_dropout,
    torch.feature_dropout,
}
_DROPOUTS_IN_PLACE = {
    torch.alpha_dropout_,
    torch.dropout_,
    torch.feature_alpha_dropout_,
    torch.feature_dropout_,
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
    Tensor.bernoulli: 1.0,
    torch.binomial: 1.0,
    torch.poisson: 1.0,
    torch.randint: 1,
    torch.randint_like: 1,
    torch.multinomial: 0,
    Tensor.multinomial: 0,
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


_DRAWING = {
    *_DROPOUTS,
    *_DROPOUTS_IN_PLACE,
    *_CONSTANTS,
    torch.native_dropout,
    functional.multi_head_attention_forward,
    functional.gumbel_softmax,
    functional.rrelu,
    torch.randperm,
    torch.rrelu,
    torch.rrelu_,
    Tensor.new,
}
_DRAWING_NAMES = {*_FILLS, "scaled_dot_product_attention"}
"""Functions that `ConstantDraws` replaces, and names of more; all others run as is."""


_QUIET = {
    *_DROPOUTS,
    *_DROPOUTS_IN_PLACE,
    torch.empty,
    torch.empty_like,
    Tensor.new_empty,
    Tensor.new,
    functional.multi_head_attention_forward,
    functional.rrelu,
    torch.rrelu,
    torch.rrelu_,
}
_QUIET_NAMES = {"scaled_dot_product_attention"}
"""Names of operations that may draw nothing."""


@final
class ConstantDraws(TorchFunctionMode):
    """Replaces random numbers by constants; dropout scales where it is active.

    Args:
        is_backward: refuse them: ranks would draw others, in an order of their own. A
            checkpoint that draws again what its forward drew is right.
    """

    def __init__(self, *, is_backward: bool = False) -> None:
        super().__init__()
        self._is_backward = is_backward
        if is_backward:  # so that a state of forward is another one
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                torch.empty(()).random_()
            self._seed, self._state = torch.initial_seed(), torch.get_rng_state()

    def _require_forwards(self, kwargs: Any) -> None:
        """Refuse new random numbers in backward."""
        if not self._is_backward or _is_running_again():
            return
        is_set_back = (
            kwargs.get("generator") is None
            and torch.initial_seed() == self._seed
            and not torch.equal(torch.get_rng_state(), self._state)
        )
        if not is_set_back:
            raise SpecError(
                f"{source_line()}: draws random numbers in backward, where ranks would "
                "draw others than one process: draw them in forward, for each sample, "
                "and save them for backward"
            )

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = own_function(func)
        refuse_address(func)  # of a backward, which is not recorded
        name = getattr(func, "__name__", "")
        if func not in _DRAWING and name not in _DRAWING_NAMES:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if self._is_backward and func not in _QUIET and name not in _QUIET_NAMES:
            self._require_forwards(kwargs)
        if func is torch.randperm:
            return func(*args, **kwargs)
        if func in _DROPOUTS or func in _DROPOUTS_IN_PLACE:
            x, kept, in_place = _dropout(*args, **kwargs)
            if kept != 1.0 and self._is_backward:
                self._require_forwards(kwargs)
            in_place = in_place or func in _DROPOUTS_IN_PLACE
            return x.mul_(kept) if in_place else x * kept
        if func is torch.native_dropout:
            x, kept, _ = _dropout(*args, **kwargs)
            return x * kept, torch.ones_like(x, dtype=torch.bool)
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
        elif func in (torch.rrelu, torch.rrelu_):
            given = dict(zip(_OF_RRELU, args, strict=False)) | kwargs
            args, kwargs = (), given | {"training": False}
        elif func is Tensor.new and _is_size(args[1:]):
            return func(*args, **kwargs).zero_()
        elif name in _FILLS and getattr(Tensor, name, None) is func:
            return args[0].fill_(_FILLS[name])
        elif func in _CONSTANTS:
            with torch.no_grad():
                return torch.full_like(func(*args, **kwargs), _CONSTANTS[func])
        return func(*args, **kwargs)


def _is_running_again() -> bool:
    """Return whether a checkpoint runs a forward again in backward."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


@final
@dataclass(eq=False)
class Result:
    """The result of an operation."""

    line: str
    """The line of the user's code that calls it."""

    value: Tensor | None

    given: list[int]
    """The numbers of the results that it reads."""

    is_tracked: bool = False

    grad: Tensor | None = None


@final
class RecordedResults(TorchFunctionMode):
    """Keeps the result of each operation, and its gradient once it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Result] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = own_function(func)
        leaves = pytree.tree_leaves((args, kwargs))
        given = [self._numbers[id(x)] for x in leaves if id(x) in self._numbers]
        result = func(*args, **(kwargs or {}))
        one = Result(source_line(), None, given)
        if isinstance(result, Tensor):
            self._numbers[id(result)] = len(self.found)
            self._alive.append(result)
            one.value = result.detach().clone()
            if result.requires_grad and not result.is_leaf:
                one.is_tracked = True
                result.register_hook(partial(setattr, one, "grad"))
        self.found.append(one)
        return result

    def line_reading(self, one: Result) -> str:
        """Return the line of the last operation that reads a result, or its own."""
        number = self.found.index(one)
        lines = [other.line for other in self.found if number in other.given]
        return lines[-1] if lines else one.line


_OF_RRELU = ("input", "lower", "upper", "training")


def _is_size(args: tuple[Any, ...]) -> bool:
    """Return whether ``x.new(...)`` gets sizes, and so gives no values."""
    return len(args) != 1 or isinstance(args[0], (int, torch.Size))


def _dropout(
    input: Tensor,  # noqa: A002 - as torch's
    p: float = 0.5,
    training: bool | None = True,  # noqa: FBT001, FBT002
    inplace: bool = False,  # noqa: FBT001, FBT002
    *,
    train: bool | None = True,
) -> tuple[Tensor, float, bool]:
    """Return a dropout's input, what to scale it with, and whether in place."""
    is_active = training is not False and train is not False
    return input, 1.0 - p / 2 if is_active else 1.0, inplace


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


_COLUMNS, WHOLE = "columns", "rows"
VALUES = ("elements", _COLUMNS, WHOLE)
"""How inputs are made of the examples: from single values, integers in any order; so,
but integers stay in their columns, as where each has a vocabulary of its own; or of
whole rows of all examples together, as where values of a row depend on each other."""

_MAX_ROWS = 64
"""Limit of an example's rows that are looked at."""


def _different_rows(examples: Sequence[Tensor]) -> list[int]:
    """Return the numbers of rows that are different from each other."""
    found: dict[bytes, int] = {}
    for i in range(min(_MAX_ROWS, *(len(example) for example in examples))):
        row = [in_memory(example[i : i + 1].cpu()).view(-1) for example in examples]
        data = b"".join(part.view(torch.uint8).numpy().tobytes() for part in row)
        found.setdefault(data, i)
    return list(found.values())


def _require_different(rows: list[int]) -> None:
    if len(rows) < 2:
        raise ValueError("the example's rows are all equal")


@final
class RandomInputs:
    """Random numbers that depend only on a seed, whatever the device and type."""

    def __init__(
        self, seed: int, *, noise: float = 1.0, values: str = VALUES[0]
    ) -> None:
        """Prepare.

        Args:
            seed: The seed.
            noise: Size of parameters' perturbations, relative to the usual one.
            values: How inputs are made, one of `VALUES`.
        """
        self.is_first = seed == 1
        self.perturbs = noise == 1.0
        self._generator = torch.Generator().manual_seed(seed)
        self._noise = noise
        self._values = values

    def normal(self, shape: Any, like: Tensor) -> Tensor:
        """Return normal numbers of a shape, with the type and device of a tensor."""
        # float32 on the CPU: one generator, whatever the device and type.
        shape = tuple(shape) + ((2,) if like.is_complex() else ())
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - really random
            made = torch.empty(shape).normal_(generator=self._generator)
            if like.is_complex():
                made = torch.view_as_complex(made)
        return made.to(device=like.device, dtype=like.dtype)

    def rows(self, examples: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return ``number`` random rows like the examples' for each of them.

        Raises:
            ValueError: the rows would all be equal, which hides mixed samples.
        """
        if self._values == VALUES[0]:
            return [self._rows(example, number) for example in examples]
        if self._values == _COLUMNS:
            made = [self._rows(example, number) for example in examples]
            _require_different(_different_rows(made))
            return made
        kinds = _different_rows(examples)
        _require_different(kinds)
        mixed = torch.randperm(len(kinds), generator=self._generator).tolist()
        order = [kinds[mixed[i % len(kinds)]] for i in range(number)]
        return [example[order] for example in examples]

    def _rows(self, example: Tensor, number: int) -> Tensor:
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
            if self._values == _COLUMNS:
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
        numbers: list[int] = found.tolist()
        return numbers

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
