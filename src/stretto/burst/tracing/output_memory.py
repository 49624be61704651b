"""Give outputs that share memory, with each other or with inputs, as the model does.

# Note [Outputs that share memory]
A model may return ``h, h[:, :3]``, or an input beside its result. If the program then
writes into one in place, the other changes in one process. Layers pass copies, so each
output would have memory of its own. Where an output's elements are elements of another
one, or of an input, it is therefore made as a view of that one. Outputs that overlap in
other ways are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from stretto.burst.tracing.fakes import storage_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
@dataclass(frozen=True, slots=True)
class RowView:
    """An output as a view of another tensor with the same rows."""

    of_input: bool
    """Whether the other one is an input of the model."""

    number: int
    """The other one's number, among outputs or among inputs."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """One sample's shape and strides, and its first element, in the other one's
    contiguous memory."""

    is_detached: bool
    """Whether no gradient flows back through it."""

    knows_gradient: bool
    """Whether the other one needed a gradient at capture, so that `is_detached` was
    known."""

    def made(self, base: Tensor, output: Tensor) -> Tensor:
        """Return the view of a tensor, or the output that layers gave for it.

        If an input needs a gradient, what layers give has it.
        """
        if not base.is_contiguous() or (base.requires_grad and not self.knows_gradient):
            return output
        each = base[0].numel() if len(base) else 1
        view = base.as_strided(
            (len(base), *self.shape),
            (each, *self.strides),
            base.storage_offset() + self.offset,
        )
        return view.detach() if self.is_detached else view


def views_among(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[RowView | None] | int:
    """Return for each output the view that it is; of no other one: ``None``.

    If outputs overlap in a way that views can't repeat, return the number of one.
    """
    found: list[RowView | None] = [None] * len(outputs)
    memory = [storage_of(tensor) for tensor in outputs]
    for j, output in enumerate(outputs):
        for k, given in enumerate(inputs):
            if memory[j] == storage_of(given) and found[j] is None:
                found[j] = _view(output, given, k, of_input=True)
    bases: set[int] = set()
    for i in sorted(range(len(outputs)), key=lambda i: _rank(outputs[i])):
        if found[i] is not None:
            continue
        for j, output in enumerate(outputs):
            is_other = output is not outputs[i] and memory[i] == memory[j]
            if is_other and found[j] is None and j not in bases:
                found[j] = _view(output, outputs[i], i, of_input=False)
                bases |= {i} if found[j] is not None else set()
    left = [j for j in range(len(outputs)) if found[j] is None]
    for j in left:
        for i in left:
            if (
                outputs[i] is not outputs[j]
                and memory[i] == memory[j]
                and _overlap(outputs[i], outputs[j])
            ):
                return j
    return found


def _rank(output: Tensor) -> tuple[bool, int]:
    """Return a number that is small for an output that others may be views of."""
    return not output.requires_grad, -output.numel()


def _view(
    output: Tensor, base: Tensor, number: int, *, of_input: bool
) -> RowView | None:
    """Return an output as a view of another tensor, if it is one."""
    if output.dtype != base.dtype or output.dim() < 1 or base.dim() < 1:
        return None
    if output.shape[0] != base.shape[0] or not output.numel():
        return None
    if output.stride(0) != base.stride(0) or not _is_apart(base):
        return None
    if output.requires_grad and not base.requires_grad:
        return None
    sides = list(zip(base.shape[1:], base.stride()[1:], strict=True))
    places = _contiguous_strides(base.shape[1:])
    if base.is_contiguous():  # elements lie one behind the other
        sides, places = [(base[0].numel(), 1)], [1]
    offset = _steps(int(output.storage_offset() - base.storage_offset()), sides)
    steps = [_steps(stride, sides) for stride in output.stride()[1:]]
    if offset is None or None in steps:
        return None
    for d, (size, _) in enumerate(sides):
        last = offset[d] + sum(
            step[d] * (length - 1)
            for step, length in zip(steps, output.shape[1:], strict=True)
            if step is not None
        )
        if last >= size:
            return None
    return RowView(
        of_input=of_input,
        number=number,
        shape=tuple(output.shape[1:]),
        strides=tuple(
            sum(n * place for n, place in zip(step, places, strict=True))
            for step in steps
            if step is not None
        ),
        offset=sum(n * place for n, place in zip(offset, places, strict=True)),
        is_detached=base.requires_grad and not output.requires_grad,
        knows_gradient=base.requires_grad,
    )


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    found, each = [], 1
    for size in reversed(shape):
        found.append(each)
        each *= size
    return found[::-1]


def _steps(distance: int, sides: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return a distance in memory as a number of steps along each dimension."""
    found = [0] * len(sides)
    for d in sorted(range(len(sides)), key=lambda d: -sides[d][1]):
        size, stride = sides[d]
        if size > 1 and stride > 0:
            found[d], distance = divmod(distance, stride)
        if distance < 0 or found[d] < 0:
            return None
    return found if not distance else None


def _is_apart(tensor: Tensor) -> bool:
    """Return whether each element has a place of its own."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= span:
            return False
        span += (size - 1) * stride
    return True


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Return whether tensors in one storage have elements in common.

    The first samples stand for all.
    """
    if not one.numel() or not two.numel():
        return False
    few = [(min(2, len(t)), *t.shape[1:]) for t in (one, two)]
    ends = [
        t.storage_offset()
        + sum((n - 1) * step for n, step in zip(shape, t.stride(), strict=True))
        for t, shape in zip((one, two), few, strict=True)
    ]
    if min(ends) < max(one.storage_offset(), two.storage_offset()):
        return False
    filled = []
    for tensor, shape in zip((one, two), few, strict=True):
        flat = torch.zeros(max(ends) + 1, dtype=torch.bool)
        place = tensor.storage_offset()
        flat.as_strided(shape, tensor.stride(), place).fill_(value=True)
        filled.append(flat)
    return bool((filled[0] & filled[1]).any())
