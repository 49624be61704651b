"""Find NaN and infinity in gradients: the step, the parameter, the rank of origin.

# Note [What is looked at, and when]
On the CPU each reduced bucket is summed once, after backward has ended and before the
Reducer copies it into the gradients: a sum is finite unless a value is not (or finite
values overflow it, which the search after a hit distinguishes), and takes a tenth of
the time of a copy. Until the Reducer copies, each gradient is still the rank's own, so
after a hit, and only then, it shows whether it was bad before the reduction. If
gradients are views of the buckets (`gradient_as_bucket_view`), and in the first step of
a Reducer, a bucket is also summed before it is sent.

On CUDA nothing may wait for the device: sums before sending and the largest magnitude
of each gradient stay on the device, are copied to the host without waiting, and are
read when a later step begins, the first one at which the copy has ended. The optimizer
has seen the gradients by then.

All ranks have the same reduced buckets, so all find the same and meet in the store to
report whose gradient it was. Only a hit has that cost.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, final

import torch
from torch.distributed.distributed_c10d import PrefixStore

from stretto.autograd_engine import queue_callback
from stretto.errors import NumericsError, SpecError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from stretto.runtime.agreement import Agreement
    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)

ACTIONS = ("off", "warn", "raise")

_MEET_S = 10.0
_POLL_S = 0.005
_HALVES = (torch.float16, torch.bfloat16)


def check_options(nan: str, patience: int) -> None:
    """Require a known action and a valid number of steps.

    Raises:
        SpecError: with the valid values.
    """
    if nan not in ACTIONS:
        raise SpecError(
            f"nan must be one of {', '.join(map(repr, ACTIONS))}, got {nan!r}"
        )
    if not isinstance(patience, SupportsIndex) or index(patience) < 0:
        raise SpecError(f"nan_patience must be >= 0 steps, got {patience!r}")


class _Flags(NamedTuple):
    """The flags of one step on CUDA, to be read later."""

    step: int
    names: tuple[str, ...]
    buckets: int
    values: torch.Tensor
    """On the host: a magnitude per bucket before sending, then one per name."""
    copied: Any


@final
class NanCheck:
    """Checks every reduced step of one model and warns or raises.

    A step is one reduced backward, counted from 0. Up to ``patience`` consecutive steps
    may have values that are not finite: a GradScaler finds its scale that way.
    """

    def __init__(
        self,
        *,
        action: str,
        patience: int,
        ranks: Ranks,
        agreement: Agreement,
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        self._raises = action == "raise"
        self._patience = patience
        self._ranks = ranks
        self._agreement = agreement
        # Gradients are computed from the last parameter to the first, so the last bad
        # one is nearest to the origin.
        self._parameters = tuple(parameters)[::-1]
        self._views = False
        self._on_device = any(p.device.type != "cpu" for _, p in parameters)
        self._fresh = True
        self._warned = False
        self._step = 0
        self._streak = 0
        self._buffers: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._own: tuple[str, ...] | None = None
        self._flags: deque[_Flags] = deque()

    @classmethod
    def of(cls, action: str, patience: int, **how: Any) -> NanCheck | None:
        """Return a check, or None if nothing is to be checked."""
        if action == "off":
            return None
        return cls(action=action, patience=patience, **how)

    @cached_property
    def _store(self) -> PrefixStore:
        # A copy that only one rank made must not count among the models.
        return PrefixStore(f"nan/{self._agreement.serial}", self._ranks.store)

    # Called by a process group.

    def begin_step(self) -> None:
        """Read the flags of earlier steps on CUDA, and drop a step cut short."""
        self._buffers.clear()
        self._sums.clear()
        while self._flags and self._flags[0].copied.query():
            self._read(self._flags.popleft())

    def launching(self, buffer: torch.Tensor) -> None:
        """Record a bucket with this rank's gradients, just before it is sent."""
        if buffer.dtype is torch.int32:  # which parameters were used
            return
        self._buffers.append(buffer)
        if self._views or self._fresh or self._on_device:
            self._sums.append(_sum(buffer))

    def reduced(self) -> None:
        """Check a backward whose buckets are reduced but not yet copied by the Reducer.

        On CUDA they are still being reduced.
        """
        if self._on_device:
            queue_callback(self._keep_flags)
            return
        total = math.fsum(
            value if math.isfinite(value := float(_sum(buffer))) else math.nan
            for buffer in self._buffers
        )
        self._buffers.clear()
        if math.isfinite(total):
            self._streak = 0
            self._end()
            return
        # Before the Reducer overwrites the gradients with the reduced values.
        self._own = None if self._sums else self._bad_names()
        queue_callback(self._report_reduced)

    def renewed(self, *, views: bool) -> None:
        """Record a new Reducer, whose gradients are views of its buckets or not."""
        self._views = views
        self._fresh = True
        self._buffers.clear()
        self._sums.clear()

    def warn_unchecked(self, why: str) -> None:
        """Warn once that nothing is checked."""
        if self._ranks.rank == 0 and not self._warned:
            _log.warning(
                "%s: NaN and infinity are not detected: %s",
                self._ranks.name(0),
                why,
            )
        self._warned = True

    # On the CPU.

    def _report_reduced(self) -> None:
        own = self._own
        was_own = (
            not all(math.isfinite(float(s)) for s in self._sums)
            if own is None
            else bool(own)
        )
        bad = self._bad_names()
        step = self._step
        self._end()
        if not bad:
            self._streak = 0  # finite values with a sum that is not finite
            return
        self._report(step, bad, own or (), was_own=was_own, late=False)

    def _end(self) -> None:
        self._step += 1
        self._fresh = False
        self._sums.clear()

    def _bad_names(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, parameter in self._parameters
            if parameter.grad is not None and not _all_finite(parameter.grad)
        )

    # On CUDA.

    def _keep_flags(self) -> None:
        held = [(n, p.grad) for n, p in self._parameters if p.grad is not None]
        sums = [s.float() for s in self._sums]
        norms = torch._foreach_norm(  # noqa: SLF001
            [g.coalesce().values() if g.is_sparse else g for _, g in held], math.inf
        )
        values = torch.stack([*sums, *(norm.float() for norm in norms)])
        on_host = torch.empty_like(values, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        names = tuple(name for name, _ in held)
        self._flags.append(_Flags(self._step, names, len(sums), on_host, copied))
        self._buffers.clear()
        self._end()

    def _read(self, flags: _Flags) -> None:
        finite = torch.isfinite(flags.values).tolist()
        after = finite[flags.buckets :]
        bad = tuple(n for n, ok in zip(flags.names, after, strict=True) if not ok)
        if not bad:
            self._streak = 0
            return
        was_own = not all(finite[: flags.buckets])
        self._report(flags.step, bad, (), was_own=was_own, late=True)

    # Report.

    def _report(
        self,
        step: int,
        bad: tuple[str, ...],
        own: tuple[str, ...],
        *,
        was_own: bool,
        late: bool,
    ) -> None:
        self._streak += 1
        number = self._streak - self._patience
        if number <= 0:
            return
        if not self._raises and number & (number - 1):
            return  # the 1st, 2nd, 4th, 8th ... consecutive step
        everyone = self._meet(step, own, was_own=was_own)
        text = _message(self._ranks, step, bad, everyone)
        if self._streak > 1:
            text += f" {self._streak} consecutive steps have had such gradients."
        if late:
            text += (
                " It was found when a later step began, so an optimizer may have seen "
                "it: restore a checkpoint."
            )
        if self._raises:
            raise NumericsError(text)
        if self._ranks.rank == 0:
            _log.warning("%s", text)

    def _meet(
        self, step: int, own: tuple[str, ...], *, was_own: bool
    ) -> list[dict[str, Any] | None]:
        """Return each rank's findings in its own gradients; ``None``: no report."""
        mine = {"own": was_own, "names": own[:3], "more": max(0, len(own) - 3)}
        size, rank = self._ranks.size, self._ranks.rank
        found: list[dict[str, Any] | None] = [None] * size
        found[rank] = mine
        deadline = time.perf_counter() + min(_MEET_S, self._ranks.timeout_s)
        read = 0
        try:
            self._store.set(f"{step}/{rank}", json.dumps(mine))
            while None in found and time.perf_counter() < deadline:
                for other in (r for r in range(size) if found[r] is None):
                    if self._store.check([f"{step}/{other}"]):
                        found[other] = json.loads(self._store.get(f"{step}/{other}"))
                time.sleep(_POLL_S)
            # The first rank may hold the store, and end with the error raised here:
            # keep it alive until the others have read.
            while self._store.add(f"{step}/read", 1 - read) < size:
                read = 1
                if rank or time.perf_counter() > deadline:
                    break
                time.sleep(_POLL_S)
        except RuntimeError as exc:
            _log.debug("the store does not answer: %s", exc)
        return found


def _sum(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_sparse:
        buffer = buffer._values()  # noqa: SLF001
    # A sum in half precision overflows even if none of its values does.
    return buffer.sum(dtype=torch.float32 if buffer.dtype in _HALVES else None)


def _all_finite(gradient: torch.Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001
    return bool(values.isfinite().all())


def _message(
    ranks: Ranks,
    step: int,
    bad: Sequence[str],
    everyone: Sequence[dict[str, Any] | None],
) -> str:
    listed = _listed(bad[:3], max(0, len(bad) - 3))
    begin = (
        f"{ranks.name(ranks.rank)}: step {step}: the gradient of {listed} is not finite"
    )
    origins = [r for r, row in enumerate(everyone) if row is not None and row["own"]]
    silent = [r for r, row in enumerate(everyone) if row is None]
    if origins:
        parts = []
        for rank in origins:
            row = everyone[rank] or {}
            names = (
                f" ({_listed(row['names'], row['more'])})" if row.get("names") else ""
            )
            parts.append(f"{ranks.name(rank)}{names}")
        where = (
            f"it was not finite before the reduction, in the local gradient of "
            f"{', '.join(parts)}. Check the input and the loss of that step there; "
            "torch.autograd.set_detect_anomaly(True) names the operation. With a "
            "GradScaler, whose first steps may overflow, set nan_patience=20."
        )
    elif silent:
        where = (
            f"it was finite before the reduction here, and {ranks.name_all(silent)} "
            "did not report."
        )
    else:
        where = (
            "it was finite before the reduction on every rank: the sum over ranks, or "
            "its type on the wire, overflowed. Scale the loss down, or plan with a "
            "wider wire_dtype."
        )
    return f"{begin}; {where}"


def _listed(names: Sequence[str], more: int) -> str:
    text = ", ".join(map(repr, names))
    return f"{text} and {more} more" if more else text
