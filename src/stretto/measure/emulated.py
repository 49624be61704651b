"""A model that waits instead of computing, with the sizes and times of a workload.

It stands for a model on a device of its own: while the device computes, the host's
cores are free for the network. So a plan can be executed on a real network without an
accelerator (``stretto replay``), and on a machine whose ranks share a few cores.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.errors import SpecError
from stretto.schema.plan import WIRE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.schema import Workload

_WAITED_S = 2e-4
"""A use of a parameter that takes longer than this waited for communication."""


class DeviceClock:
    """The time at which an emulated device has done its work, with its waits."""

    def __init__(self) -> None:
        self._origin_s = 0.0

    def begin(self) -> None:
        """Start to count work from now on."""
        self._origin_s = time.perf_counter()

    def reach(self, work_s: float) -> None:
        """Sleep until this much work is done.

        Each time counts from the beginning, so that late wake-ups do not add up.
        """
        left_s = self._origin_s + work_s - time.perf_counter()
        if left_s > 0.0:
            time.sleep(left_s)

    def wait(self, waited_s: float) -> None:
        """Count a wait, in which the device does no work."""
        if waited_s > _WAITED_S:
            self._origin_s += waited_s


@final
class EmulatedModel(nn.Module):
    """A model whose forward and backward sleep for the times of a workload.

    Its parameters have the names, sizes and types of the workload's tensors, one
    dimension each and zeros as values. Forward uses each parameter at its ``needed_s``
    by calling the module that holds it, and ends after ``forward_s``; if such a use has
    to wait, what follows happens later. In backward each gradient is ready at its
    ``ready_s``, and backward ends after ``backward_s``.

    Forward returns its input's sum, or 0, as a tensor without dimensions. Each element
    of each parameter has the gradient of that output, as if all elements were added to
    it. Where gradients are kept from step to step (``zero_grad(set_to_none=False)``, or
    none at all) no memory is allocated for them.

    Works with `stretto.DistributedDataParallel` and PyTorch's, on any device: the host
    sleeps.

    Args:
        workload: gives sizes and times.

    Raises:
        SpecError: a name cannot be a parameter's, or a type has no gradients.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._forward_s = workload.forward_s
        self._backward_s = workload.backward_s
        self._clock = DeviceClock()
        # By tensor in the order of readiness. Both lists exist before tensors are
        # added, so that one of their name is refused.
        self._parts: list[tuple[float, float, nn.Module, str]] = []
        self._by_need: list[int] = []
        self._parts += [
            (tensor.needed_s, tensor.ready_s, *_added(self, tensor.name))
            for tensor in workload.tensors
        ]
        for tensor, (_, _, owner, leaf) in zip(
            workload.tensors, self._parts, strict=True
        ):
            if tensor.dtype not in WIRE_DTYPES:
                raise SpecError(
                    f"tensor {tensor.name!r} is of type {tensor.dtype}, which has no "
                    "gradients: leave it out of the workload"
                )
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            elements = tensor.bytes // dtype.itemsize
            _register(owner, leaf, tensor.name, torch.zeros(elements, dtype=dtype))
        self._by_need += sorted(
            range(len(self._parts)), key=lambda i: (self._parts[i][0], -i)
        )

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        """Return the sum of the inputs after the time of a forward."""
        clock = self._clock
        clock.begin()
        for i in self._by_need:
            needed_s, _, owner, leaf = self._parts[i]
            clock.reach(needed_s)
            before_s = time.perf_counter()
            _use(self, owner, leaf)
            clock.wait(time.perf_counter() - before_s)
        clock.reach(self._forward_s)
        device = getattr(self._parts[0][2], self._parts[0][3]).device
        trains = torch.is_grad_enabled()
        begin = torch.zeros((), device=device, requires_grad=trains)
        out = begin if inputs is None else begin + inputs.sum()
        if not trains:
            return out
        # Backward visits these in the opposite order.
        out = _point(out, None, clock, self._backward_s)
        for _, ready_s, owner, leaf in reversed(self._parts):
            out = _point(out, getattr(owner, leaf), clock, ready_s)
        return _begin(out, clock)


class _Holder(nn.Module):
    """Holds parameters; a call is a use of one."""

    def forward(self, leaf: str) -> None:
        getattr(self, leaf).detach()


def _use(model: nn.Module, owner: nn.Module, leaf: str) -> None:
    if owner is model:
        getattr(owner, leaf).detach()
    else:
        owner(leaf)


def _added(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor of this name, and its name there."""
    *path, leaf = name.split(".")
    owner = model
    for part in path:
        below = getattr(owner, part, None)
        if not isinstance(below, nn.Module):
            below = _Holder()
            try:
                owner.add_module(part, below)
            except KeyError as error:
                raise _unusable(name, error) from error
        owner = below
    return owner, leaf


def _register(owner: nn.Module, leaf: str, name: str, values: Tensor) -> None:
    try:
        owner.register_parameter(leaf, nn.Parameter(values))
    except KeyError as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: KeyError) -> SpecError:
    return SpecError(
        f"tensor {name!r} cannot be a parameter of an emulated model: {error.args[0]}. "
        "Rename it in the workload."
    )


class _Begin(torch.autograd.Function):
    """Its backward is the first of the model, and starts the clock."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, clock: DeviceClock) -> Tensor:
        ctx.clock = clock
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.begin()
        return grads[0], None


class _Point(torch.autograd.Function):
    """A point of backward at which a parameter's gradient is ready, if it has one."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        parameter: Tensor | None,
        clock: DeviceClock,
        ready_s: float,
    ) -> Tensor:
        ctx.clock, ctx.ready_s, ctx.parameter = clock, ready_s, parameter
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, parameter = None, ctx.parameter
        if parameter is not None:
            gradient = grads[0].to(parameter.dtype).expand(parameter.shape)
            if parameter.grad is None:  # else it is added without a copy
                gradient = gradient.contiguous()
        ctx.clock.reach(ctx.ready_s)
        return grads[0], gradient, None, None


_begin: Callable[..., Tensor] = _Begin.apply
_point: Callable[..., Tensor] = _Point.apply
