"""Send the largest values of each gradient, and the rest later.

# Note [What a rank sends]
To each gradient a rank adds what it has not yet sent of earlier ones (its residual),
sends the values of largest magnitude, and keeps the others as the new residual (error
feedback). The choice is made within each parameter, so it depends on neither buckets
nor plan. One all-gather per bucket carries values and positions. Each rank adds all
ranks' values in the order of ranks, so the means are equal on all ranks bit for bit. As
there is no second collective, buckets need no communicators of their own.

A tensor of which the values and positions would take as many bytes as all its values is
sent whole, without positions.

Values travel in the gradient's type. Residuals of float16 and bfloat16 gradients are in
float32: a residual may be hundreds of times as large as a step's gradient, and an
addition in their type would round the gradient away. What rounding takes from a value
that is sent stays in the residual.

# Note [Gradients that are zero]
DDP passes zeros for a parameter that this rank did not use. What a rank sends for a
parameter that no rank used is dropped by DDP. So a gradient that is zero throughout
sends zeros and keeps its residual. A value that is NaN or infinite is sent first,
and leaves a residual of zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, final

import torch
import torch.distributed as dist
from torch.futures import Future

from stretto.compression.error_memory import ErrorMemory, clear_not_finite
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

_ALIGN_BYTES = 8
_HALVES = (torch.float16, torch.bfloat16)


class _Part(NamedTuple):
    """The values of one gradient that are sent."""

    start: int
    """Where the gradient starts in its bucket, in elements."""

    values: Tensor
    places: Tensor | None
    """Positions in the gradient; ``None``: all."""


@final
class TopK:
    """Options and residuals of `top_k_hook`.

    Args:
        ratio: Share of each parameter's values to send in a step, above 0 and at most
            1; at least one value of each is sent.
        process_group: The ranks; ``None`` for the default group.
            ``register_lane_hook`` sets it.

    Raises:
        SpecError: ``ratio`` is out of range.
    """

    def __init__(
        self, ratio: float = 0.01, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if (
            isinstance(ratio, bool)
            or not isinstance(ratio, SupportsFloat)
            or not 0.0 < float(ratio) <= 1.0
        ):
            raise SpecError(
                "ratio is the share of values to send, above 0 and at most 1, got "
                f"{ratio!r}"
            )
        self.ratio = float(ratio)
        self.process_group = process_group
        self._residuals = ErrorMemory()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of this rank's residuals, by parameter name.

        Every rank has its own, so each saves and loads its own.

        Args:
            model: The model, in DDP or not.
        """
        return {"residuals": self._residuals.saved(model)}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Continue with residuals that `state_dict` returned.

        Raises:
            SpecError: they are not for this model.
        """
        self._residuals.load(model, state["residuals"])

    @torch.no_grad()
    def average(self, bucket: Any) -> Future[Tensor]:
        """Start the exchange of a ``dist.GradBucket``, whose buffer gets the means."""
        buffer: Tensor = bucket.buffer()
        group: Any = self.process_group or dist.group.WORLD
        ranks: int = group.size()
        if ranks == 1:
            done: Future[Tensor] = Future(
                devices=[buffer.device] if buffer.is_cuda else []
            )
            done.set_result(buffer)
            return done
        parameters = bucket.parameters()
        # DDP passes complex gradients as pairs of real numbers.
        if buffer.layout is not torch.strided or not all(
            parameter.is_floating_point() for parameter in parameters
        ):
            return _whole(group, buffer, ranks)
        parts = self._choose(buffer, parameters)
        sent = _packed(parts, buffer)
        got = sent.new_empty(ranks * sent.numel())
        # The group's own method: a lane is no group that ``dist`` knows.
        work: Any = group._allgather_base(got, sent)  # noqa: SLF001
        shapes = [(p.start, p.values.numel(), p.places is None) for p in parts]

        @torch.no_grad()
        def averaged(future: Future[Any]) -> Tensor:
            future.value()  # raises what the collective raised
            return _average(buffer, got.view(ranks, -1), shapes)

        ended: Future[Tensor] = work.get_future().then(averaged)
        return ended

    def _choose(self, buffer: Tensor, parameters: Sequence[Tensor]) -> list[_Part]:
        """Choose what to send of each gradient, and keep the rest."""
        parts: list[_Part] = []
        start = 0
        for parameter in parameters:
            gradient = buffer[start : start + parameter.numel()]
            total = self._total(parameter, gradient)
            size = total.numel()
            count = count_to_send(size, self.ratio, buffer.element_size())
            has_gradient = gradient.any()
            if count == size:
                values = _rounded(torch.where(has_gradient, total, 0.0), buffer.dtype)
                total.sub_(values)
                parts.append(_Part(start, values, None))
            else:
                places = total.abs().topk(count, sorted=False).indices
                kept = total[places]
                values = _rounded(torch.where(has_gradient, kept, 0.0), buffer.dtype)
                total[places] = kept - values
                parts.append(_Part(start, values, places))
            clear_not_finite(total)
            start += size
        return parts

    def _total(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Add a gradient (1-d) to its residual, and return that."""
        wide = torch.float32 if gradient.dtype in _HALVES else gradient.dtype
        kept = self._residuals.get(parameter)
        if kept is None or kept.dtype != wide or kept.device != gradient.device:
            kept = (
                torch.zeros_like(gradient, dtype=wide)
                if kept is None
                else kept.to(gradient.device, wide)
            )
            self._residuals.put(parameter, kept)
        return kept.add_(gradient)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a model starts without residuals and process group.
        return {"ratio": self.ratio}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def _whole(group: Any, buffer: Tensor, ranks: int) -> Future[Tensor]:
    """Start an all-reduce of a bucket that is not compressed."""
    buffer.div_(ranks)
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    ended: Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
    return ended


def index_dtype(elements: int) -> torch.dtype:
    """Return the narrowest type that holds every position in a vector."""
    return torch.int32 if elements <= 2**31 else torch.int64


def count_to_send(elements: int, ratio: float, value_bytes: int) -> int:
    """Return how many of a gradient's values are sent; all means without positions."""
    count = min(elements, max(1, math.ceil(ratio * elements * (1 - 1e-12))))
    index_bytes = index_dtype(elements).itemsize
    pays = count * (value_bytes + index_bytes) < elements * value_bytes
    return count if pays else elements


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in a type, without making a finite one infinite.

    A residual may exceed what float16 holds where no gradient does.
    """
    if dtype is not torch.float16:
        return values.to(dtype)
    most = torch.finfo(dtype).max
    finite = torch.isfinite(values)
    return torch.where(finite, values.clamp(-most, most), values).to(dtype)


def _packed(parts: Sequence[_Part], buffer: Tensor) -> Tensor:
    """Return values and positions in the bucket as one vector of bytes.

    The wider of the two comes first, so both are aligned.
    """
    index = index_dtype(buffer.numel())
    empty = torch.empty(0, dtype=index, device=buffer.device)
    values = torch.cat([part.values for part in parts])
    places = torch.cat(
        [empty]
        + [
            (part.places + part.start).to(index)
            for part in parts
            if part.places is not None
        ]
    )
    blocks = [values.view(torch.uint8), places.view(torch.uint8)]
    if values.element_size() < places.element_size():
        blocks.reverse()
    size = sum(block.numel() for block in blocks)
    blocks.append(blocks[0].new_zeros(-size % _ALIGN_BYTES))
    return torch.cat(blocks)


def _average(
    buffer: Tensor, rows: Tensor, shapes: Sequence[tuple[int, int, bool]]
) -> Tensor:
    """Set a bucket's buffer to the mean of what the ranks sent."""
    ranks, index = len(rows), index_dtype(buffer.numel())
    count = sum(size for _, size, _ in shapes)
    some = sum(size for _, size, whole in shapes if not whole)
    value_bytes, index_bytes = count * buffer.element_size(), some * index.itemsize
    first = 0 if buffer.element_size() >= index.itemsize else index_bytes
    second = value_bytes if first == 0 else 0
    wide = torch.float32 if buffer.dtype in _HALVES else buffer.dtype
    mean = torch.zeros_like(buffer, dtype=wide)
    for row in rows:
        values = row[first : first + value_bytes].view(buffer.dtype).to(wide)
        values = values / ranks
        places = row[second : second + index_bytes].view(index)
        at, scattered = 0, []
        for start, size, whole in shapes:
            piece = values[at : at + size]
            at += size
            if whole:
                mean[start : start + size] += piece
            else:
                scattered.append(piece)
        if scattered:
            mean.index_add_(0, places, torch.cat(scattered))
    return buffer.copy_(mean)
