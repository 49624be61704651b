"""A parameter as a member of its bucket, and the interface of the overlap it uses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from stretto.runtime.forward.lazy import LazyGradient


class DeferredUpdate(Protocol):
    """An optimizer's step that is executed in parts."""

    def execute(self, members: Sequence[BucketMember]) -> None:
        """Execute it on these parameters, whose gradients are in place."""


class Overlap(Protocol):
    """One model's pending buckets; `overlap.ForwardOverlap` implements it."""

    def warn(self, why: str) -> None:
        """Say once why a step does not overlap with forward."""

    def refuse(self, why: str) -> None:
        """Finish all for an optimizer's step that can't be deferred; say why, if known.

        An empty reason is one of which the program needs no warning.
        """

    def finish_ended(self) -> None:
        """Finish the buckets whose communication has ended."""

    def defer(self, update: DeferredUpdate, members: Iterable[BucketMember]) -> None:
        """Execute an optimizer's step on these members when they are finished."""

    def touch(self, member: BucketMember) -> None:
        """Finish a member's bucket, because something reads the member."""

    def enter(self) -> None:
        """Finish buckets that no read has finished, as the model's forward starts."""

    def finish_all(self, *, keep_hooks: bool = False) -> None:
        """Finish all buckets."""

    def norm_of(self, member: BucketMember) -> torch.Tensor | None:
        """Return the 2-norm of a member's gradient if it is known before that."""

    def scale(
        self, member: BucketMember, multiply: Callable[..., Any], factor: Any
    ) -> None:
        """Multiply a member's gradient in place, at the latest as it is finished."""

    def show_gradients(self) -> None:
        """Finish all, and put gradients in place of the wrappers that remain."""


@final
class BucketMember:
    """One parameter, its place in the bucket, and what is pending for it."""

    __slots__ = (
        "aside",
        "bucket",
        "factors",
        "gradient",
        "group",
        "guarded",
        "lazy",
        "name",
        "offset",
        "owner",
        "parameter",
        "place",
        "shape",
        "states",
        "swapped",
        "twin",
        "update",
        "version",
    )

    def __init__(
        self,
        owner: Overlap,
        name: str,
        parameter: nn.Parameter,
        bucket: int,
        place: int,
        offset: int,
    ) -> None:
        self.owner = owner
        self.name = name
        self.parameter = parameter
        self.bucket = bucket
        self.place = place
        self.offset = offset
        self.shape: tuple[torch.Size, tuple[int, ...] | None] | None = None
        """Size and strides as the Reducer's views of the bucket have them."""

        self.lazy: LazyGradient | None = None
        self.gradient: torch.Tensor | None = None
        """The gradient of an unfinished bucket; complete once that is finished."""

        self.update: DeferredUpdate | None = None
        """The optimizer's step that is to be executed on this parameter."""

        self.factors: list[tuple[Callable[..., Any], Any]] = []
        """Functions and factors that multiply the gradient once it is complete."""

        self.version: int | None = None
        """A finished gradient's version if its norm is known, until it is written."""

        self.group = 0
        """Index of the optimizer's parameter group, while there is an update."""

        self.guarded: list[torch.Tensor] = []
        """Tensors with a class of `pending`."""

        self.states: list[torch.Tensor] = []
        """Tensors of the optimizer's state, while there is an update."""

        self.twin: Any = None
        """A tensor of `pending` that takes the parameter's place, made once."""

        self.swapped: Any = None
        """The twin, while it has the parameter's implementation."""

        self.aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """In poison mode, tensors and their true values."""

    def view_of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a reduced bucket, as the Reducer views it."""
        flat = bucket
        if self.parameter.is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        assert self.shape is not None  # noqa: S101
        size, stride = self.shape
        part = flat.narrow(0, self.offset, self.parameter.numel())
        if stride is None:
            return part.view(size)
        return part.as_strided(size, stride, part.storage_offset())

    def note_shape(self) -> None:
        """Remember size and strides, once the Reducer has built its views."""
        if self.shape is None:
            p = self.parameter
            dense = torch.ops.aten.is_non_overlapping_and_dense(p)
            self.shape = (p.size(), p.stride() if dense else None)

    def release_lazy(self) -> None:
        """Keep a wrapper for the next step, if nothing else refers to it."""
        lazy = self.lazy
        if lazy is None:
            return
        lazy.finish = lazy.member = lazy.part = None
        # Refers to it: the member, this variable and the call's argument.
        if sys.getrefcount(lazy) > _OWN_REFERENCES:
            self.lazy = None
        else:
            lazy.target = None

    def poison(self, states: Iterable[torch.Tensor]) -> None:
        """Fill the parameter and its states with NaN; keep their values aside."""
        with torch.no_grad():
            for tensor in (self.parameter, *states):
                if tensor.is_floating_point() or tensor.is_complex():
                    plain = tensor.detach()
                    self.aside.append((plain, plain.clone()))
                    plain.fill_(float("nan"))

    def heal(self) -> None:
        """Restore the values from before `poison`."""
        for tensor, value in self.aside:
            tensor.copy_(value)
        self.aside.clear()


_OWN_REFERENCES = 3
