"""Compare values on all ranks before anything depends on them.

`Ranks`, `ranks_of` and `missing_after` can be imported from here too, as before they
had modules of their own (`ranks`, `store`).
"""

from __future__ import annotations

import json
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto._version import __version__
from stretto.errors import CommTimeout, RankDisagreement, StrettoError
from stretto.logs import get_logger
from stretto.runtime.ranks import Ranks as Ranks  # noqa: TC001 - also for others
from stretto.runtime.store import Missing, store_lost
from stretto.runtime.store import missing_after as missing_after
from stretto.runtime.store import ranks_of as ranks_of
from stretto.schema import tensors_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.runtime.ranks import TensorRow
    from stretto.schema import Plan

_log = get_logger(__name__)


_CATCH_UP_S, _CATCH_UP_POLL_S = 5.0, 0.05
"""How long a rank that came too late waits for the others to begin a later model."""


@final
class Agreement:
    """Meetings of all ranks of a group in its store, numbered by their order.

    Every rank must call `require_same` the same number of times in the same order. The
    purpose of each call is compared too, so ranks that enter the same meeting with
    different intents get an error.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._meeting = 0
        self.is_over = ranks.is_over
        """Returns whether a meeting should end without the missing ranks."""
        self._lost: RuntimeError | None = None

    @cached_property
    def serial(self) -> int:
        """The number of this model in the group, equal on all ranks.

        It is assigned on first access, which all ranks do in the same order. A model
        that only one rank copies never reads it, so it does not shift other ranks'
        numbers.
        """
        # The counter is inside the store rather than in this process: it restarts with
        # the store, so it is the same on all ranks after a restart too.
        return self._ranks.store.add(f"serial/{self._ranks.rank}", 1)

    @property
    def number(self) -> int | None:
        """The model's `serial` if it was already assigned, else None."""
        return self.__dict__.get("serial")

    @cached_property
    def _store(self) -> Store:
        return PrefixStore(f"agree/{self.serial}", self._ranks.store)

    def require_same(
        self, purpose: str, values: Mapping[str, str], *, may_differ: str = ""
    ) -> bool:
        """Require that all ranks pass equal values.

        Return whether they also pass the same value under ``may_differ``.

        A value under ``trouble`` is not compared: if any rank has one, every other rank
        gets an error. Such a rank may leave out values that it does not know. Either
        every rank returns or every live rank raises: it never happens that some
        continue while others stop.

        Raises:
            RankDisagreement: on every rank, with the values and their ranks.
            CommTimeout: some ranks did not arrive in time, or the store is lost; the
                message names them.
        """
        rows = self._rows(purpose, values)
        # Compare purposes first: with different purposes, other values differ too.
        keys = sorted({k for row in rows for k in row}, key=_order)
        for key in keys:
            if key == may_differ:
                continue
            if key == "trouble":
                # Options follow: an unusable option necessarily differs.
                self._refuse_trouble(rows)
                continue
            self._refuse_different(key, rows)
        return len({row.get(may_differ) for row in rows}) == 1

    def gather(self, purpose: str, text: str) -> list[str]:
        """Return every rank's text, by rank. A meeting, as `require_same`.

        Raises:
            RankDisagreement: on every rank, when ranks have different purposes.
            CommTimeout: some ranks did not arrive in time, or the store is lost.
        """
        rows = self._rows(purpose, {"text": text})
        self._refuse_different("purpose", rows)
        return [row["text"] for row in rows]

    def others_wait(self) -> str:
        """Return a sentence on ranks that wait at a meeting that this rank skipped.

        Empty if there is no such rank or the store does not answer. Never waits for a
        rank.
        """
        try:
            found: dict[str, list[int]] = {}
            for rank in range(self._ranks.size):
                key = f"{self._meeting}/{rank}"
                if self._lost is None and self._store.check([key]):
                    purpose = json.loads(self._store.get(key))["purpose"]
                    found.setdefault(purpose, []).append(rank)
        except RuntimeError:
            return ""
        return " ".join(
            f"Meanwhile {self._ranks.name_all(ranks)} tried to {purpose}, which "
            f"{self._ranks.name(self._ranks.rank)} did not: ranks make different calls."
            for purpose, ranks in found.items()
        )

    def _rows(self, purpose: str, values: Mapping[str, str]) -> list[dict[str, str]]:
        mine = json.dumps({"purpose": purpose, **values})
        return [json.loads(value) for value in self._exchange(purpose, mine)]

    def _refuse_different(self, key: str, rows: Sequence[Mapping[str, str]]) -> None:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            if key in row or "trouble" not in row:
                ranks_by_value.setdefault(row.get(key, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            raise RankDisagreement(self._difference(key, ranks_by_value), key=key)

    def _refuse_trouble(self, rows: Sequence[Mapping[str, str]]) -> None:
        for rank, row in enumerate(rows):
            if "trouble" in row and rank != self._ranks.rank:
                raise RankDisagreement(
                    f"{self._ranks.name(rank)} cannot continue: {row['trouble']}"
                )

    def _difference(self, key: str, ranks_by_value: dict[str, list[int]]) -> str:
        parts = [
            f"{self._ranks.name_all(ranks)} reported {value}"
            for value, ranks in ranks_by_value.items()
        ]
        remedy = _REMEDY.get(key, _REMEDY["settings"])
        return f"{_KEY_WORDS.get(key, key)}: {'; '.join(parts)}. {remedy}"

    def _exchange(self, purpose: str, mine: str) -> list[str]:
        """Return every rank's value, by rank."""
        ranks = self._ranks
        if self._lost is not None:
            raise store_lost(ranks, purpose, self._lost)
        try:
            return self._exchange_in_store(purpose, mine)
        except RuntimeError as exc:
            if isinstance(exc, StrettoError):
                raise
            # A late answer would be mistaken for the answer to a later request.
            self._lost = exc
            raise store_lost(ranks, purpose, exc) from exc

    # Note [One decision per meeting]
    # A rank whose time runs out while the last rank arrives would stop where others
    # continue. So every rank that has seen all the others, or has given up, tries to
    # write the meeting's decision; the store keeps the first one, and every rank
    # follows it.

    # Note [A model that a rank did not build]
    # A rank whose program failed before it built a model has built one model less than
    # the others, which waited for it and stopped. Its next model would meet at the
    # place of the one that it missed, and so would all later ones. So a rank that finds
    # its first meeting over takes the number at which all others have arrived since.

    def _catches_up(self) -> bool:
        """Take the number of the others' present model, if all have begun a later one.

        Wait a little for them: they may be on their way there.
        """
        ranks, end_s = self._ranks, time.perf_counter() + _CATCH_UP_S
        end_s = min(end_s, time.perf_counter() + ranks.timeout_s)
        while True:
            others = [
                ranks.store.add(f"serial/{rank}", 0)
                for rank in range(ranks.size)
                if rank != ranks.rank
            ]
            behind = min(others, default=0) - self.serial
            if behind > 0:
                break
            if time.perf_counter() > end_s or self.is_over():
                return False
            time.sleep(_CATCH_UP_POLL_S)
        self.__dict__.pop("_store")
        self.__dict__["serial"] = ranks.store.add(f"serial/{ranks.rank}", behind)
        self._meeting = 0
        return True

    def _exchange_in_store(self, purpose: str, text: str) -> list[str]:
        ranks, store = self._ranks, self._store
        meeting, self._meeting = self._meeting, self._meeting + 1
        keys = [f"{meeting}/{rank}" for rank in range(ranks.size)]
        store.set(keys[ranks.rank], text)
        missing = missing_after(ranks, store, keys, self.is_over)
        mine = "go" if missing is None else f"stop{missing.gone or ''}"
        decision = store.compare_set(f"{meeting}/end", "", mine).decode()
        if decision != "go":
            gone = decision.removeprefix("stop")
            is_late = missing is None and not gone and meeting == 0
            if is_late and self._catches_up():
                return self._exchange_in_store(purpose, text)
            raise CommTimeout(self._not_come(purpose, missing, gone))
        if ranks.presence is not None:
            ranks.presence.learn(ranks.names)
        found = [value.decode() for value in _values(store, keys)]
        if meeting > 0:
            # All ranks entered this meeting, so all have read the last one's keys.
            store.delete_key(f"{meeting - 1}/{ranks.rank}")
            if ranks.rank == 0:
                store.delete_key(f"{meeting - 1}/end")
        return found

    def _not_come(self, purpose: str, missing: Missing | None, gone: str) -> str:
        """Return the message about a meeting that ended without some rank."""
        ranks = self._ranks
        mine = ranks.name(ranks.rank)
        if gone:
            return f"{mine} can't {purpose}: {gone}"
        if missing is None:
            return (
                f"{mine} arrived after others had stopped waiting for it to {purpose}. "
                f"Check the log of {mine}: it hung, or took another code path."
            )
        known = "; ".join(
            row
            for r in missing.ranks
            if ranks.presence and (row := ranks.presence.describe(ranks.names[r]))
        )
        return (
            f"{mine} waited {ranks.timeout_s:g} s for "
            f"{ranks.name_all(missing.ranks)} to {purpose}"
            f"{f' ({known})' if known else ''}. Check the logs of the missing ranks: "
            "they exited, hung, or took another code path."
        )


def _values(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of the keys, in one request if the store supports it."""
    if store.has_extended_api():
        values: list[bytes] = store.multi_get(keys)
        return values
    return [store.get(key) for key in keys]


_KEY_WORDS = {
    "purpose": "ranks do different things",
    "stretto": "ranks run different versions of stretto",
    "torch": "ranks run different versions of PyTorch",
    "model": "ranks hold different models",
    "plan": "ranks hold different plans",
    "names": "ranks give the model's parameters different names, or another order",
    "settings": "ranks have different settings",
}
_KEY_ORDER = {key: i for i, key in enumerate((*_KEY_WORDS, "trouble"))}


def _order(key: str) -> tuple[int, str]:
    """Return the sort key of a compared value; options come last."""
    return _KEY_ORDER.get(key, len(_KEY_ORDER)), key


_REMEDY = {
    "purpose": "Build models and apply plans in the same order on every rank.",
    "stretto": "Install one version everywhere.",
    "torch": "Install one version everywhere.",
    "model": "Build the model with the same code and options on every rank.",
    "plan": "Give every rank the same plan file.",
    "names": "Build the model with the same code and options on every rank.",
    "settings": "Give every rank the same arguments and environment.",
}


_NAMES = "names"
"""The key of the parameters' names, which may differ where there is no plan."""


def described(rows: Sequence[TensorRow]) -> str:
    """Return a model's tensors in a few words; names count no more than for DDP."""
    unnamed = [("", *row[1:]) for row in map(tuple, rows)]
    size_bytes = sum(row.bytes for row in rows)
    return f"{len(rows)} tensors of {size_bytes} bytes, {tensors_digest(unnamed)}"


def require_matching_setup(
    agreement: Agreement,
    ranks: Ranks,
    *,
    purpose: str,
    rows: Sequence[TensorRow],
    plan: Plan | None,
    trouble: StrettoError | None,
    settings: Mapping[str, str],
) -> bool:
    """Require that all ranks have the same versions, model and plan.

    ``trouble`` is the error that prevents this rank from executing the plan;
    ``settings`` are options that must be equal, by name. Without a plan, parameters
    may have different names, as with DDP, which knows them by their order.

    Returns: whether all ranks give the parameters the same names, in the same order.

    Raises:
        StrettoError: ``trouble``, if there is any.
        RankDisagreement: ranks differ, or another rank reports an error.
        CommTimeout: a rank did not arrive.
    """
    same_names = True
    if ranks.size > 1:
        values = {
            "stretto": __version__,
            "torch": torch.__version__,
            "model": described(rows),
            _NAMES: tensors_digest([tuple(row) for row in rows]),
            "plan": "no plan" if plan is None else plan.digest,
            **{f"option {name}": value for name, value in settings.items()},
        }
        if trouble is not None:
            values["trouble"] = str(trouble)
        try:
            same_names = agreement.require_same(
                purpose, values, may_differ=_NAMES if plan is None else ""
            )
        except RankDisagreement:
            if trouble is None:
                raise  # this rank's own error is more specific
    if trouble is not None:
        raise trouble
    if plan is not None and plan.ranks != ranks.size and not ranks.rank:
        _log.warning(
            "%s: the plan was made for %d ranks, but the job has %d: it is executed, "
            "but may not be the best",
            ranks.name(0),
            plan.ranks,
            ranks.size,
        )
    return same_names


def require_plan_applied(
    agreement: Agreement, ranks: Ranks, plan: Plan | None, trouble: Exception | None
) -> None:
    """Require that a plan's lanes are open on every rank.

    Raises:
        Exception: ``trouble``, if there is any.
        RankDisagreement: another rank failed.
        CommTimeout: a rank did not arrive.
    """
    gone = isinstance(trouble, CommTimeout)  # others have or will get the same error
    if ranks.size > 1 and not gone:
        values = {"plan": "no plan" if plan is None else plan.digest}
        if trouble is not None:
            values["trouble"] = str(trouble)
        try:
            agreement.require_same("take up a plan", values)
        except RankDisagreement:
            if trouble is None:
                raise
    if trouble is not None:
        raise trouble
