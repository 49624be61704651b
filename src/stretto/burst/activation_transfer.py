"""Move samples between layers on different ranks, and their gradients back.

# Note [Two functions for one move]
A move begins where the samples are computed and is awaited where they are used, so that
ranks compute other branches meanwhile: `_Begin` and `_End`. Backward mirrors that:
`_End` begins the gradients' way back, `_Begin` waits for them. Autograd runs ready
nodes in the reverse of the order in which forward ran. So every rank begins and ends
its moves in one order, that of the layers, in forward and in its reverse in backward:
no two ranks can wait for each other. Ranks without samples pass tensors of no rows
through the same functions, so that backward runs on them too.

Samples are sent and received directly: gathering 4 ranks' 64 KiB to 8 MiB on one took
0.31 / 1.0 / 18 ms this way and 0.5 / 2.5 / 24 ms by an all-to-all (loopback, two busy
cores), which also involves ranks that have nothing to move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from stretto.burst.memory import in_memory
from stretto.errors import StrettoError
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.timings import StepClock
    from stretto.sim.sample_layout import Rows, Transfer


_TAGS = 2**30
"""Upper limit of tags; Gloo's have 32 bits."""


@final
class _Pending:
    """A move in progress on this rank."""

    def __init__(
        self,
        after: torch.Tensor,
        coming: list[tuple[Any, torch.Tensor, tuple[int, ...] | None]],
    ) -> None:
        self.after = after
        self._coming = coming

    def finish(self) -> None:
        """Wait until the rows have arrived."""
        for work, buffer, rows in self._coming:
            work.wait()
            if rows is not None:
                self.after[list(rows)] = buffer
        self._coming = []


@final
class ActivationTransfer:
    """Sends and receives rows over one model's connections."""

    def __init__(self, rank_groups: RankGroups, clock: StepClock) -> None:
        self._rank_groups = rank_groups
        self._clock = clock
        self._in_flight: list[tuple[Any, torch.Tensor, int, str]] = []
        self._left: list[tuple[Any, torch.Tensor, int, str]] = []
        self._forwards = 0

    def begin(
        self,
        rows: torch.Tensor,
        transfer: Transfer,
        tag: int,
        layer: str,
        *,
        copies: bool = False,
    ) -> _Pending:
        """Start a move of ``rows``; ``tag`` distinguishes simultaneous moves.

        ``copies``: send copies, because others may write into ``rows``.
        """
        given, rows = rows, in_memory(rows)
        after = rows.new_empty((transfer.num_after, *rows.shape[1:]))
        for here, there in transfer.kept:
            after[rows_of(there)] = rows[rows_of(here)]
        arriving = [(peer, after[rows_of(some)]) for peer, some in transfer.receives]
        buffers = [(peer, rows[rows_of(some)]) for peer, some in transfer.sends]
        if copies:
            buffers = [(peer, _apart(buffer, given)) for peer, buffer in buffers]
        with self._rank_groups.guard(f"the redistribution of layer {layer!r}"):
            sent, coming = self._rank_groups.post(buffers, arriving, tag)
        for work, (_, buffer) in zip(sent, buffers, strict=True):
            self._in_flight.append((work, buffer, _version(buffer), layer))
        # Rows that are not contiguous arrive in a separate tensor.
        return _Pending(
            after,
            [
                (work, buffer, some if isinstance(some, tuple) else None)
                for work, (_, buffer), (_, some) in zip(
                    coming, arriving, transfer.receives, strict=True
                )
            ],
        )

    def end(self, pending: _Pending, layer: str) -> torch.Tensor:
        """Return the rows, once they have arrived."""
        with self._rank_groups.guard(f"the redistribution of layer {layer!r}"):
            self._clock.wait("redistribution", pending.finish)
        return pending.after

    def finish_sends(self) -> None:
        """Wait until everything sent has left.

        Raises:
            StrettoError: a layer wrote into its output while it was being sent.
        """
        in_flight, self._in_flight = self._in_flight, []
        for work, buffer, version, layer in in_flight:
            with self._rank_groups.guard(f"the redistribution of layer {layer!r}"):
                self._clock.wait("redistribution", work.wait)
            if _version(buffer) != version:
                raise StrettoError(
                    f"the output of layer {layer!r} was written to while it was sent "
                    "to other ranks: let the layers after it work out of place "
                    "(inplace=False)"
                )

    def drop(self) -> None:
        """Stop waiting for rows in flight: backward was aborted.

        They may still be on their way to a slower rank, so they are kept until they
        have left. Unclaimed rows are never mistaken for others, because each forward
        has its own tags.
        """
        self._left = [row for row in self._left if not row[0].is_completed()]
        self._left += self._in_flight
        self._in_flight = []

    def next_tags(self, count: int) -> int:
        """Return the first tag of a forward that needs ``count``."""
        self._forwards += 1
        return self._forwards * count % _TAGS


@final
class Move:
    """The move of one output to the ranks of a layer that reads it, in one forward.

    ``of_input``: of the model's input, into which the program may write meanwhile.
    """

    def __init__(
        self,
        activations: ActivationTransfer,
        transfer: Transfer,
        *,
        tag: int,
        layer: str,
        of_input: bool,
    ) -> None:
        self.activations = activations
        self._of_input = of_input
        self.transfer = transfer
        self.tag = tag
        self.layer = layer
        self.pending: _Pending | None = None
        self._begun: torch.Tensor | None = None
        self._ended: torch.Tensor | None = None

    def begin(self, rows: torch.Tensor, anchor: torch.Tensor | None) -> None:
        """Start it; with ``anchor`` a gradient comes back, on all ranks or on none."""
        self._begun = (
            _Begin.apply(rows, anchor, self)  # type: ignore[no-untyped-call]
            if anchor is not None and torch.is_grad_enabled()
            else self.begin_samples(rows)
        )

    def end(self) -> torch.Tensor:
        """Return this rank's rows after the move, for the first or a later reader."""
        begun, self._begun = self._begun, None
        if begun is not None:
            assert self.pending is not None  # noqa: S101
            self._ended = (
                _End.apply(begun, self)  # type: ignore[no-untyped-call]
                if begun.requires_grad
                else self.activations.end(self.pending, self.layer)
            )
        assert self._ended is not None  # noqa: S101
        return self._ended

    def begin_samples(self, rows: torch.Tensor) -> torch.Tensor:
        """Start moving the samples."""
        self.pending = self.activations.begin(
            rows, self.transfer, self.tag, self.layer, copies=self._of_input
        )
        return self.pending.after

    def begin_gradients(self, grad: torch.Tensor) -> None:
        """Start moving the gradients back.

        Autograd gives one gradient to several branches. A parameter's ``.grad`` may be
        a view of it, to which further gradients are added in place.
        """
        assert self.transfer.back is not None  # noqa: S101
        self.pending = self.activations.begin(
            grad, self.transfer.back, self.tag + 1, self.layer, copies=True
        )


class _Begin(torch.autograd.Function):
    """Forward begins a move, backward ends that of the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, _anchor: Any, move: Move) -> Any:
        ctx.move = move
        return move.begin_samples(rows.detach())

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *_grads: Any) -> Any:
        move = ctx.move
        return move.activations.end(move.pending, move.layer), None, None


class _End(torch.autograd.Function):
    """Forward ends a move, backward begins that of the gradients."""

    @staticmethod
    def forward(ctx: Any, begun: torch.Tensor, move: Move) -> Any:
        ctx.move = move
        move.activations.end(move.pending, move.layer)  # type: ignore[arg-type]
        # Rows arrived in the output of `_Begin`; layers could not modify a view in
        # place.
        ctx.mark_dirty(begun)
        return begun

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.move.begin_gradients(grads[0])
        # Only a token: the real gradient has another rank's number of rows.
        return grads[0], None


class _Tie(torch.autograd.Function):
    """Returns the output, with backward continuing to all inputs in any case."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.count = len(inputs)
        return output.view_as(output)

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(None for _ in range(ctx.count))


class _Absent(torch.autograd.Function):
    """Returns no rows on a rank that has none of a layer; backward passes through."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        passed: Callable[[], None] | None,
        *inputs: torch.Tensor,
    ) -> Any:
        ctx.passed = passed
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in inputs]
        return torch.empty((0, *shape), dtype=dtype, device=device)

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *_grads: Any) -> Any:
        if ctx.passed is not None:
            ctx.passed()
        zeros = [torch.zeros(s, dtype=d, device=at) for s, d, at in ctx.shapes]
        return None, None, None, None, *zeros


def tied(output: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Tie a layer's output to every input, so that backward always visits them.

    A layer that detaches an input, or does not use it, would otherwise end backward on
    its ranks before it sends the gradients that other ranks wait for.
    """
    found: torch.Tensor = _Tie.apply(output, *inputs)  # type: ignore[no-untyped-call]
    return found


def absent(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    inputs: list[torch.Tensor],
    *,
    passed: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return a layer's output on a rank that has no samples of it.

    ``passed`` is called when backward passes through.
    """
    found: torch.Tensor = _Absent.apply(  # type: ignore[no-untyped-call]
        shape, dtype, device, passed, *inputs
    )
    return found


def _apart(buffer: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return a buffer that does not share memory with ``given``."""
    shares = buffer.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return buffer.clone() if shares else buffer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def rows_of(rows: Rows) -> slice | list[int]:
    """Return rows as an index of a tensor: a view if they are contiguous."""
    return rows if isinstance(rows, slice) else list(rows)
