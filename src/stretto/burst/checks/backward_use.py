"""Check that every rank ended the same backward passes, with known weights.

# Note [A backward that ended on some ranks]
A rank calls the hooks of its own layers only, so an exception from one may end one
rank's backward after the others have all that they need from it. Its program may catch
the exception and skip the step; in one process, that skips it for all layers. So with
each forward, ranks compare how many backward passes have ended since the last one, and
how many an exception ended. An exception on all ranks is right, and so is one where no
other rank holds trained parameters.

# Note [A backward without an output]
If a loss uses parameters but no output of the model, nothing says which samples it
depends on. Outputs of another burst model in the same backward do. Otherwise the
gradients get the ranks' parts of the batch in the last forward, which are right where
all forwards had the same. Where they differ, ranks compare the gradients with the next
forward: equal ones, such as those of a penalty, are right with any weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, final

import torch

from stretto.burst.checks.numbers import as_float, as_int
from stretto.burst.checks.tolerances import of_copies
from stretto.burst.refusals import text_of
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stretto.runtime.agreement import Ranks

_FAILED = 2**32
"""Counts a backward that an exception ended; an ended one counts 1."""

_NOTHING = -1
"""Instead of a count: the rank has nothing to train."""


@final
class BackwardUse:
    """The backward passes of one model on this rank since the last exchange.

    ``gather`` returns every rank's text. All ranks call it if one ended another number.
    ``stop`` makes a text the error of all later calls: parameters are mixed then.
    """

    num_values: ClassVar[int] = 4

    def __init__(
        self,
        ranks: Ranks,
        gather: Callable[[str], Sequence[str]],
        stop: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._gather = gather
        self._stop = stop
        self._names: tuple[str, ...] = ()
        self._holds = False
        """Whether this rank holds trained parameters now."""
        self._even = (1 / ranks.size,) * ranks.size
        self._shares: tuple[float, ...] | None = None
        """Shares of all forwards so far, before they differed."""
        self._has_varied = False
        self._is_assumed_even = False
        """Whether gradients that differ by rank had the same weight everywhere, before
        a forward said which parts of the batch ranks have."""
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._held = self._holds
        """Whether it holds some, or did in a backward."""
        self._error = ""
        self._first = 0
        """Number of the first parameter whose weight is unknown, from 1; 0: none."""
        self._sum = self._size = 0.0
        self._tolerance = of_copies(torch.float64)

    def follow(self, names: Iterable[str]) -> None:
        """Name the parameters of a plan by their order."""
        self._names = tuple(names)

    # Events on this rank.

    def holds_trained(self, holds: bool) -> None:  # noqa: FBT001
        """Record whether this rank holds trained parameters from now on."""
        self._holds = holds
        self._held |= holds

    def ended(self) -> None:
        """Record that a backward ended and its gradients were delivered."""
        self._count += 1

    def failed(self, error: BaseException, *, had_ended: bool) -> None:
        """Record that an exception ended a backward, which may have been recorded."""
        self._count += _FAILED - had_ended
        self._error = text_of(error)

    def forward_ended(self, shares: tuple[float, ...]) -> None:
        """Record each rank's part of a batch.

        Raises:
            RankDisagreement: on every rank, gradients had other weights before.
        """
        if self._shares is None:
            self._shares = shares
            if self._is_assumed_even and shares != self._even:
                raise self._refusal(0)
        self._has_varied |= shares != self._shares

    @torch.no_grad()
    def used_without_output(
        self, gradients: Iterable[tuple[int, torch.Tensor]], *, is_known: bool
    ) -> None:
        """Record gradients of a loss that no output of the model enters.

        Args:
            gradients: with their parameters' numbers, before they are weighted.
            is_known: whether outputs of another model tell their weights.
        """
        if is_known or self._ranks.size == 1:
            return
        if self._shares is not None and not self._has_varied:
            return
        for number, grad in gradients:
            real = torch.view_as_real(grad) if grad.is_complex() else grad
            weight = 1.0 + (number + 1) * 0.6180339887498949 % 1.0
            self._first = self._first or number + 1
            self._sum += weight * float(real.double().sum())
            self._size += weight * float(real.double().abs().sum())
            self._tolerance = max(self._tolerance, of_copies(grad.dtype))

    # The exchange between ranks.

    def next_values(self) -> list[int]:
        """Return `num_values` numbers to exchange."""
        count = self._count if self._held or self._count >= _FAILED else _NOTHING
        return [count, self._first, as_int(self._sum), as_int(self._size)]

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged.

        Raises:
            RankDisagreement: on every rank, naming the ranks and the error.
        """
        error, tolerance = self._error, self._tolerance
        self._forget()
        counts = {rank: row[0] for rank, row in enumerate(rows) if row[0] != _NOTHING}
        if len(set(counts.values())) > 1:
            found = self._other_passes(counts, error)
            self._stop(str(found))
            raise found
        if not any(row[1] for row in rows):
            return
        first = rows[0]
        is_same = all(
            row[1] == first[1] and _are_near(first, row, tolerance) for row in rows[1:]
        )
        if is_same:
            return
        if self._shares is not None:
            raise self._refusal(max(row[1] for row in rows))
        self._is_assumed_even = True

    def _other_passes(self, counts: dict[int, int], error: str) -> RankDisagreement:
        """Return the error of ranks of which some ended another number of passes."""
        name_all = self._ranks.name_all
        texts = self._gather(error)
        number = max(count // _FAILED for count in counts.values())
        if not number:
            numbers = ", ".join(
                f"{c} on {self._ranks.name(r)}" for r, c in counts.items()
            )
            return RankDisagreement(
                "ranks ran different numbers of backward passes since the last "
                f"forward: {numbers}. Call backward() equally often on every rank, "
                "also where a rank has no samples"
            )
        failed = [r for r, count in counts.items() if count // _FAILED == number]
        rest = [r for r in counts if r not in failed]
        text = next((texts[r] for r in failed if texts[r]), "unknown")
        return RankDisagreement(
            f"an exception ended the backward of {name_all(failed)} ({text}), but not "
            f"that of {name_all(rest)}: in one process no rank would have stepped with "
            "these gradients. Load the last state saved and, to skip a step, decide it "
            "after backward() from values that are the same on all ranks, such as "
            "model.grad_norm()"
        )

    def _refusal(self, number: int) -> RankDisagreement:
        """Return the error of gradients without a known weight."""
        name = f", first of {self._names[number - 1]!r}," if number else ""
        return RankDisagreement(
            "the loss of an earlier backward used parameters of the model but none of "
            f"its outputs, so the weights of these gradients{name} are unknown, "
            "because the ranks' parts of the batch have changed between forwards: "
            "call the burst model rather than its parts, add such a term to a loss of "
            "the model's outputs for the same samples before one backward(), or give "
            "ranks the same parts of every batch"
        )


def _are_near(first: Sequence[int], other: Sequence[int], tolerance: float) -> bool:
    one, scale = as_float(first[2]), as_float(first[3])
    two, other_scale = as_float(other[2]), as_float(other[3])
    bound = tolerance * max(scale, other_scale)
    if abs(one - two) <= bound and abs(scale - other_scale) <= bound:
        return True
    return not math.isfinite(scale) and first[2:] == other[2:]
