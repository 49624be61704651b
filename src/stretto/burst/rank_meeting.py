"""Meetings of a burst model's ranks before anything is built or sent."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from typing import TYPE_CHECKING, TypeVar, final

import torch

from stretto._version import __version__
from stretto.errors import CommTimeout, RankDisagreement, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.runtime.agreement import Agreement, Ranks

_Made = TypeVar("_Made")


@final
class RankMeeting:
    """Compares what the ranks of one model are about to do.

    Each method is collective.
    """

    def __init__(self, agreement: Agreement, ranks: Ranks) -> None:
        self._agreement = agreement
        self._ranks = ranks
        self.rank_groups: RankGroups | None = None
        """The model's connections; not open yet at its first meeting."""

    def succeed_together(
        self,
        purpose: str,
        make: Callable[[], _Made],
        same: Mapping[str, str] | None = None,
    ) -> _Made:
        """Return the result of ``make`` if it fails on no rank.

        Args:
            purpose: the same on all ranks.
            make: local to this rank.
            same: what must be equal on all ranks, by the words for a difference.

        Raises:
            RankDisagreement: it failed on another rank, or ranks differ.
        """
        values = dict(same or {})
        trouble: Exception | None = None
        try:
            made = make()
        except Exception as exc:  # noqa: BLE001 - raised below, once others know
            trouble = exc
            values["trouble"] = str(exc) or type(exc).__name__
        error = self.difference(purpose, values)
        if trouble is not None:
            raise trouble
        if error is not None:
            raise error
        return made

    def difference(
        self, purpose: str, values: Mapping[str, str]
    ) -> RankDisagreement | None:
        """Compare values on all ranks and return what differs.

        Raises:
            CommTimeout: a rank did not arrive.
        """
        if self._ranks.size == 1:
            return None
        try:
            with self._waiting(f"the meeting to {purpose}"):
                self._agreement.require_same(purpose, values)
        except RankDisagreement as error:
            return error
        return None

    def gather(self, purpose: str, text: str, *, place: str = "") -> list[str]:
        """Return every rank's text, by rank.

        Args:
            purpose: the same on all ranks.
            text: this rank's.
            place: what waits, for the error of a lost rank; default: the purpose.

        Raises:
            CommTimeout: a rank did not arrive.
        """
        with self._waiting(place or f"the meeting to {purpose}"):
            return self._agreement.gather(purpose, text)

    def require_same_model(
        self,
        purpose: str,
        *,
        graph: LayerGraph | None,
        example: str,
        trained: int,
        held: Sequence[str],
        plan: str,
        settings: str,
        trouble: StrettoError | None,
    ) -> None:
        """Require that all ranks pass the same model, plan and settings.

        Args:
            purpose: what the ranks are about to do.
            graph: the model's layers; None if this rank could not capture them.
            example: shapes and types of the inputs with which they were captured.
            trained: number of parameters that require a gradient.
            held: the model's parameters and buffers, in its order.
            plan: its digest.
            settings: arguments that must be equal.
            trouble: why this rank can't take part.

        Raises:
            StrettoError: ``trouble``, if there is any.
            RankDisagreement: ranks differ, or another rank has trouble.
        """
        values = {
            "stretto": __version__,
            "torch": torch.__version__,
            "plan": plan,
            "settings": settings,
            "parameters": hashlib.sha256("\n".join(held).encode()).hexdigest(),
        }
        if graph is not None:
            values["model"] = (
                f"layers {graph.digest}, operations {graph.semantics}, "
                f"{trained} trained parameters"
            )
        if trouble is not None:
            values["trouble"] = str(trouble)
        error = self.difference(purpose, values)
        if error is not None and error.key == "model":
            # This explains why a plan fits on some ranks only.
            raise self._with_cause(error, graph, example)
        if trouble is not None:
            raise trouble
        if error is not None and error.key == "parameters":
            raise self._with_parameter(error, held)
        if error is not None:
            raise error

    def _with_parameter(
        self, error: RankDisagreement, held: Sequence[str]
    ) -> RankDisagreement:
        """Return the error of other parameters with the first that differs."""
        texts = self.gather("compare parameters", json.dumps(held))
        places = self._first_apart([[(n, n) for n in json.loads(t)] for t in texts])
        return RankDisagreement(
            "ranks hold different parameters or buffers, or in different orders; the "
            f"first that differs: {places}. Define modules, parameters and buffers in "
            "one order on every rank: an optimizer knows them by their order, and a "
            "loop over a set may run in another order in each process.",
            key=error.key,
        )

    def _first_apart(self, rows: Sequence[Sequence[tuple[str, str]]]) -> str:
        """Return the first place that differs, with its ranks; "" if none does.

        ``rows`` are keys and places by rank.
        """
        for each in itertools.zip_longest(*rows, fillvalue=("", "its end")):
            if len({key for key, _ in each}) == 1:
                continue
            ranks_at: dict[str, list[int]] = {}
            for rank, (_, place) in enumerate(each):
                ranks_at.setdefault(place, []).append(rank)
            return ", ".join(
                f"{place} on {self._ranks.name_all(ranks)}"
                for place, ranks in ranks_at.items()
            )
        return ""

    def _with_cause(
        self, error: RankDisagreement, graph: LayerGraph | None, example: str
    ) -> RankDisagreement:
        """Return the error of different models with the first thing that differs.

        The inputs with which the ranks captured them, or an operation. A rank that
        could not capture its model passes None.
        """
        operations = [] if graph is None else graph.operations()
        mine = json.dumps([example, operations])
        texts = self.gather("compare the models' operations", mine)
        examples, rows = zip(*(json.loads(text) for text in texts), strict=True)
        if places := self._first_apart([[(text, text)] for text in examples]):
            return RankDisagreement(
                "ranks have samples of different shapes or types, or other arguments "
                f"of forward, in the example inputs or else in their first batches: "
                f"{places}. All samples must have the example's: pad them to one "
                "length, and pass the same example_inputs= on every rank.",
                key=error.key,
            )
        if not all(rows) or not (places := self._first_apart(rows)):
            return error
        return RankDisagreement(
            f"{error} The first operations of forward that differ: {places}. If "
            "the code is the same, a loop over a set may run in another order in "
            "each process (use a list, or sorted()), or a value comes from a "
            "rank's own data or seed.",
            key=error.key,
        )

    @contextlib.contextmanager
    def _waiting(self, place: str) -> Iterator[None]:
        """Watch for the other ranks' errors during a meeting.

        Raises:
            CommTimeout: a rank did not arrive; with its own error if it reported one.
        """
        if self.rank_groups is None:
            yield
            return
        try:
            with self.rank_groups.refusals.waiting(place):
                yield
        except CommTimeout as exc:
            raise self.rank_groups.failures.error or exc from None
