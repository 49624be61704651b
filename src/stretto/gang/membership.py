"""Agree who is in a gang, and when a step has ended.

# Note [One list of decisions]
The store holds a list of decisions that all members follow in order. A decision ends a
step, continues without members that are lost, or ends the gang. The first one that is
proposed for a number counts (`compare_set`), so a step never ends for some members
while others compute it again. A step ends only after every member has its sum; a member
may compute and send, but nothing that it did counts once a decision names it as lost.
A member that is given up while it is stopped finds that decision when it continues,
because the step before it can't have ended without it.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout
from stretto.logs import get_logger
from stretto.process_identity import ProcessState
from stretto.runtime.presence import Wait
from stretto.runtime.store import store_lost

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)

_LOOK_EVERY_S = 0.2
_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.005
SILENT_S = 5.0
"""How long a member may be silent after a failure, besides what it computes."""

_LEAVE_S = 2.0
_MAX_TRIES = 3
"""Times that a sum is tried by the same members, none of which is lost."""


@final
class GangStore:
    """A gang's keys; a store that does not answer is one clear error."""

    def __init__(self, store: Store, ranks: Ranks, prefix: str) -> None:
        self._store: Any = PrefixStore(prefix, store)
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        """Return a method of the store."""
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except RuntimeError as exc:
                raise store_lost(self._ranks, "continue a gang", exc) from exc

        return call

    def below(self, prefix: str) -> GangStore:
        """Return the keys below a prefix."""
        return GangStore(self._store, self._ranks, prefix)


@final
class GangMembership:
    """The members of a gang, as one of them sees them."""

    def __init__(self, store: GangStore, ranks: Ranks) -> None:
        """Begin with all ranks; nothing is sent.

        Args:
            store: for keys of this gang only.
            ranks: those that built the gang.
        """
        self._store, self._ranks = store, ranks
        self._watch = Wait(ranks.presence, every_s=_LOOK_EVERY_S)
        self._looked_s = 0.0
        self._tries = 1
        self.members = tuple(range(ranks.size))
        """Ranks of the group that have not been lost."""

        self.number = 0
        """How many decisions have been made; the next one's number."""

        self.epoch = 0
        """Changes whenever the members need other connections."""

        self.lost_in_step: set[int] = set()
        """Ranks that were lost since the last step ended."""

        self.error: CommTimeout | None = None
        """The error that has ended the gang for this rank."""

        self.patience_s = SILENT_S
        """How long a member may be silent after a failure."""

        self._began = 0
        self._last: tuple[GangStore, tuple[int, ...]] | None = None

    @property
    def step_store(self) -> GangStore:
        """Keys that only the attempts before the next decision use."""
        return self._store.below(str(self.number))

    @property
    def claims_store(self) -> GangStore:
        """Keys for this step, whatever is decided before it ends."""
        return self._store.below(f"{self._began}/claims")

    # what a member does

    def look(self) -> bool:
        """Follow a decision that was made, or that a lost member needs, if any.

        Cheap if the last look was a moment ago. Waits only after a failure.

        Returns:
            Whether there was one: members may have been lost.

        Raises:
            CommTimeout: the gang has ended for this rank.
        """
        now_s = time.perf_counter()
        if now_s < self._looked_s + _LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        if not self.has_trouble():
            return False
        self._resolve("", now_s)
        return True

    def has_trouble(self) -> bool:
        """Return whether a meeting or a sum of the members can't end."""
        store = self.step_store
        return bool(
            store.check(["decision"]) or store.check(["failed"]) or self._ended()
        )

    def meet(self, what: str) -> bool:
        """Wait for all members; return whether they came, and none was lost before.

        Raises:
            CommTimeout: the gang has ended for this rank.
        """
        store, began_s = self.step_store, time.perf_counter()
        if self._meet(what, "") is not None:
            return False
        if store.check(["decision"]):  # this rank was given up before it came
            self._resolve("", began_s)
            return False
        return True

    def fail(self, why: str, since_s: float) -> None:
        """Report that this rank's sum can't end, and follow what is decided then.

        Args:
            why: the cause.
            since_s: when this rank began to wait for the others.

        Raises:
            CommTimeout: the gang has ended for this rank.
        """
        self._resolve(why, since_s)

    def end_step(self, note: str) -> bool:
        """End the step once every member has the sum; return whether it has ended.

        Args:
            note: what `last_notes` returns of this rank.

        Raises:
            CommTimeout: the gang has ended for this rank.
        """
        store, members = self.step_store, self.members
        ended = self._meet("summed", note)
        if ended is None:
            ended = self._propose({"end": True})
        if ended:
            self._leave(store, members)
            self._remove_last()
            self._last = store, members
        return ended

    def last_notes(self) -> list[str]:
        """Return what each member of the last step has noted, by rank."""
        if self._last is None:
            return [""] * len(self.members)
        store, members = self._last
        return [store.get(f"summed/{member}").decode() for member in members]

    def give_up(self, why: str) -> None:
        """End the gang on all ranks, unless another decision was made before.

        Raises:
            CommTimeout: the gang has ended for this rank.
        """
        self._propose({"error": why})

    def require_open(self) -> None:
        """Require that the gang has not ended for this rank.

        Raises:
            CommTimeout: it has.
        """
        if self.error is not None:
            raise self.error

    # decisions

    def _meet(self, what: str, note: str) -> bool | None:
        """Wait for all members; ``None`` if they came.

        Otherwise a decision was followed: return whether it ends the step.
        """
        began_s, pause_s = time.perf_counter(), _PAUSE_S
        store = self.step_store
        keys = [f"{what}/{member}" for member in self.members]
        store.set(f"{what}/{self._ranks.rank}", note)
        while not store.check(keys):
            if time.perf_counter() - began_s > self._ranks.timeout_s:
                return self._resolve("timed out", began_s)
            if self.has_trouble():
                return self._resolve("", began_s)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _ended(self) -> dict[int, str]:
        """Return members whose processes have ended, and how; looks now and then."""
        names = self._ranks.names
        lost = self._watch.lost(names[member] for member in self.members)
        return {m: lost[names[m]] for m in self.members if names[m] in lost}

    def _resolve(self, why: str, since_s: float) -> bool:
        """Wait until a decision is made, and follow it; return whether a step ended.

        Args:
            why: what failed on this rank, or empty.
            since_s: when this rank began to wait.
        """
        store, pause_s = self.step_store, _PAUSE_S
        store.set(f"answer/{self._ranks.rank}", why)
        if why:
            store.set("failed", "1")
        failed_s = time.perf_counter() if why else None
        while not store.check(["decision"]):
            lost = self._ended()
            now_s = time.perf_counter()
            late = now_s - since_s > self._ranks.timeout_s
            if not lost and failed_s is None and (late or store.check(["failed"])):
                failed_s = now_s
                store.set("failed", "1")
            if not lost and failed_s is not None:
                silent = [m for m in self.members if not store.check([f"answer/{m}"])]
                if not silent:
                    return self._propose(self._try_again(store))
                if now_s > failed_s + self.patience_s:
                    lost = self._given_up(silent, since_s)
            if lost:
                return self._propose({"lost": lost})
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_EVERY_S)
        return self._follow(json.loads(store.get("decision")))

    def _given_up(self, silent: list[int], since_s: float) -> dict[int, str]:
        """Return silent members that are given up, and what is known of them.

        A process that is known to exist may be busy: it has the ranks' timeout.
        """
        found, presence = {}, self._ranks.presence
        waited_s = time.perf_counter() - since_s
        for member in silent:
            name = self._ranks.names[member]
            known = (
                presence is not None
                and presence.state(name) is not ProcessState.UNKNOWN
            )
            if waited_s > self._ranks.timeout_s or not known:
                row = presence.describe(name) if presence is not None else ""
                found[member] = f"no answer in {waited_s:.1f} s{row and f'; {row}'}"
        return found

    def _try_again(self, store: Any) -> dict[str, Any]:
        whys = {m: store.get(f"answer/{m}").decode() for m in self.members}
        rows = [f"{self._ranks.name(m)}: {why}" for m, why in whys.items() if why]
        if self._tries < _MAX_TRIES:
            return {"try": self._tries + 1}
        return {
            "error": f"the sum failed {_MAX_TRIES} times although every member "
            f"answers: the network between them failed. {'; '.join(rows)}"
        }

    def _propose(self, decision: dict[str, Any]) -> bool:
        """Make a decision, unless another was made; follow the one that counts."""
        text = json.dumps(decision)
        held = self.step_store.compare_set("decision", "", text)
        return self._follow(json.loads(held))

    def _follow(self, decision: dict[str, Any]) -> bool:
        """Follow a decision; return whether it ends the step."""
        store, members = self.step_store, self.members
        self.number += 1
        self._looked_s = 0.0
        self._tries = decision.get("try", 1)
        if "error" in decision:
            self._leave(store, members)
            self._end(decision["error"])
        elif "lost" in decision:
            self._lose({int(m): how for m, how in decision["lost"].items()})
        if "end" in decision:
            self._began, self.lost_in_step = self.number, set()
            return True
        self.epoch = self.number
        return False

    def _lose(self, lost: dict[int, str]) -> None:
        ranks = self._ranks
        how = "; ".join(lost.values())
        if ranks.rank in lost:
            self._end(f"the gang has removed this rank: {how}")
        self.members = tuple(m for m in self.members if m not in lost)
        self.lost_in_step |= lost.keys()
        who = ranks.name_all(list(lost))
        _log.warning(
            "%s: the gang has lost %s (%s). It continues with %s, and computes the "
            "micro-batches of %s in this step again",
            ranks.name(ranks.rank),
            who,
            how,
            ranks.name_all(self.members),
            who,
        )

    def _end(self, why: str) -> None:
        self.error = CommTimeout(f"{self._ranks.name(self._ranks.rank)}: {why}")
        raise self.error

    def _leave(self, store: Any, members: tuple[int, ...]) -> None:
        """Leave a decision behind; the rank that may hold the store leaves last.

        A program may end, and the store with it, as soon as its last step has ended.
        """
        left = int(store.add("left", 1))
        if self._ranks.names[self._ranks.rank] != 0:
            return
        deadline, pause_s = time.perf_counter() + _LEAVE_S, _PAUSE_S
        while left < len(members) and time.perf_counter() < deadline:
            if self._ended():
                return
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            left = int(store.add("left", 0))

    def _remove_last(self) -> None:
        """Delete the keys of the step before; all members have left it.

        A member that was given up may still have to read the decision, and does not
        count as one that has left.
        """
        if self._last is None or self._ranks.rank != self.members[0]:
            return
        store, members = self._last
        if int(store.add("left", 0)) < len(members):
            return
        for key in ("decision", "left", *(f"summed/{m}" for m in members)):
            with contextlib.suppress(RuntimeError):  # some stores delete nothing
                store.delete_key(key)
