"""Require that ranks join norms, or a scaler's checks, of the same gradients.

# Note [Calls that meet]
Each call that joins the ranks' gradients, such as clipping, meets the next such call of
every other rank. A program that clips each parameter separately if it has a gradient
makes one call for each of its own parameters, so calls for different parameters meet.
Therefore calls carry what they are for. All ranks may pass the same parameters, or
those of all gradients that they hold. A rank that passes none shows that the program
does not leave calls out. The last case looks the same as a call for one layer on each
rank if no rank passes more than one layer; it is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stretto.burst.checks.numbers import number_of
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from stretto.burst.ownership import Ownership
    from stretto.runtime.agreement import Ranks

NUM_VALUES: Final = 8
"""Length of `JoinedCall.row`."""

_CALLS: Final = ("clip_grad_norm_", "get_total_norm or grad_norm", "GradScaler")
CLIP, NORM, SCALER = range(3)

_EXACT: Final = 2**52
"""Integers up to this one are exact as numbers in double precision."""


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """The purpose of one rank's call.

    Args:
        kind: ``CLIP``, ``NORM`` or ``SCALER``.
        norm_type: of the norm; 0 for a scaler.
        positions: of the given parameters among the model's, in ascending order.
        is_all: whether every gradient that the rank holds is among them.
        layers: number of their layers.
    """

    kind: int
    norm_type: float
    positions: tuple[int, ...]
    is_all: bool
    layers: int

    def row(self, value: float | Tensor) -> list[float | Tensor]:
        """Return this rank's value and its call as numbers to exchange."""
        code = number_of(repr(self.positions).encode()) % _EXACT
        first = self.positions[0] if self.positions else -1
        count = len(self.positions)
        known = (self.kind, self.norm_type, code, first, count, self.is_all)
        return [value, *map(float, known), float(self.layers)]


def call_for(
    kind: int,
    module: nn.Module,
    ownership: Ownership,
    given: Iterable[Tensor],
    norm_type: float = 0.0,
) -> JoinedCall:
    """Return the call for these parameters, some of which may be other models'."""
    ids = {id(p) for p in given}
    own = list(module.parameters())
    found = [i for i, p in enumerate(own) if id(p) in ids]
    return JoinedCall(
        kind=kind,
        norm_type=norm_type,
        positions=tuple(found),
        is_all=all(id(p) in ids for p in own if p.grad is not None),
        layers=len({ownership.layer_of(own[i]) for i in found}),
    )


def require_same_call(
    rows: Sequence[Sequence[float]], ranks: Ranks, module: nn.Module
) -> None:
    """Compare the calls of all ranks, see Note [Calls that meet].

    Args:
        rows: each rank's `JoinedCall.row`.
        ranks: of the model.
        module: whose parameters have the positions.

    Raises:
        RankDisagreement: on every rank, naming two ranks whose calls differ.
    """
    first = rows[0]
    for rank, row in enumerate(rows):
        if row[1:3] != first[1:3]:
            raise _differ(rows, 0, rank, ranks, module)
    other = next((r for r, row in enumerate(rows) if row[3] != first[3]), None)
    if other is None:
        return
    given = [row for row in rows if row[5]]
    is_all = all(row[6] for row in given)
    is_several = len(given) < len(rows) or any(row[7] > 1 for row in given)
    if len(given) > 1 and not (is_all and is_several):
        raise _differ(rows, 0, other, ranks, module)


def _differ(
    rows: Sequence[Sequence[float]],
    one: int,
    other: int,
    ranks: Ranks,
    module: nn.Module,
) -> RankDisagreement:
    names = [name for name, _ in module.named_parameters()]

    def text(rank: int) -> str:
        _, kind, norm_type, _, first, count, *_ = rows[rank]
        norm = "" if kind == SCALER or norm_type == 2 else f" (norm_type={norm_type:g})"
        held = "no parameters"
        if count:
            more = f" and {count - 1:.0f} more" if count > 1 else ""
            held = f"parameter {names[int(first)]!r}{more}"
        return f"{_CALLS[int(kind)]}{norm} for {held} on {ranks.name(rank)}"

    return RankDisagreement(
        f"ranks called {text(one)} and {text(other)} at the same time, which "
        "would join those of different gradients: make the same calls on every rank, "
        "and pass the same parameters, such as model.parameters(), also those whose "
        ".grad is None on this rank; or call the burst model's clip_grad_norm_() or "
        "grad_norm()"
    )


def combined(values: Sequence[float], *, is_max: bool) -> float:
    """Return the largest of the ranks' values, or their sum; NaN if any is NaN."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if is_max else math.fsum(values)
