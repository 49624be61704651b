"""Open lanes through shared memory: ranks exchange processes and descriptors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, final

from stretto.errors import CommTimeout, PlanMismatch, StrettoError
from stretto.process_identity import Identity, own_identity
from stretto.runtime.backends.base import AbstractLanes
from stretto.runtime.backends.local_collectives import LocalLane
from stretto.runtime.backends.shared_memory import (
    SharedSegment,
    close_all,
    create_memory,
    new_token,
    open_memory,
    segment_bytes,
)
from stretto.runtime.store import missing_after, store_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.backends.base import Need
    from stretto.runtime.ranks import Ranks

_NOTE_CHARACTERS = 500


@final
class LocalLanes(AbstractLanes):
    """Shares memory with the other ranks, and ends lanes."""

    def __init__(
        self, *, ranks: Ranks, store_for: Callable[[str], Store], notes: Store
    ) -> None:
        self._ranks = ranks
        self._store_for = store_for
        self._notes = notes
        self._lanes: dict[int, LocalLane] = {}
        self._all: weakref.WeakSet[LocalLane] = weakref.WeakSet()
        self._made: Counter[str] = Counter()

    def open(self, needs: Sequence[Need]) -> dict[Need, Any]:
        """Return the lanes for one plan; collective."""
        numbers = tuple(dict.fromkeys(n for n, _ in needs if n not in self._lanes))
        if numbers:
            segments = self._share(numbers)
            for number, segment in zip(numbers, segments, strict=True):
                lane = LocalLane(number, segment, self._ranks)
                self._lanes[number] = lane
                self._all.add(lane)
        return {need: self._lanes[need[0]] for need in needs}

    def _share(self, numbers: Sequence[int]) -> list[SharedSegment]:
        """Return memory for new lanes, mapped by every rank.

        Raises:
            CommTimeout: a rank is lost or late.
            PlanMismatch: ranks are on several hosts, or one can't map the memory.
        """
        name = "local " + ",".join(map(str, numbers))
        # Reopened lanes must not find their first memory in the store.
        self._made[name] += 1
        name += f"/{self._made[name]}"
        held: list[int] = []
        try:
            return self._meet(name, numbers, held)
        except StrettoError:
            raise
        except OSError as exc:
            # The others would wait for this rank.
            rank = self._ranks.name(self._ranks.rank)
            need = -(-segment_bytes(self._ranks.size) * len(numbers) // 2**20)
            note = (
                f"{rank} can't open {_lanes(numbers)} with {need} MiB of shared memory:"
                f" {exc}. Plan with fewer lanes, or leave lane_backend out."
            )
            with contextlib.suppress(RuntimeError):
                self._notes.set(name, note[:_NOTE_CHARACTERS])
            raise PlanMismatch(note) from exc
        except RuntimeError as exc:
            raise store_lost(self._ranks, f"open {_lanes(numbers)}", exc) from exc
        finally:
            close_all(held)

    def _meet(
        self, name: str, numbers: Sequence[int], held: list[int]
    ) -> list[SharedSegment]:
        """Exchange processes and memory; ``held`` gets descriptors to close."""
        ranks, store = self._ranks, self._store_for(name)
        is_first = ranks.rank == 0
        tokens = [new_token() for _ in numbers] if is_first else []
        if is_first:
            size = segment_bytes(ranks.size)
            held += [create_memory(f"stretto-lane{n}", size) for n in numbers]
        mine = {
            "process": dataclasses.asdict(own_identity()),
            "memory": held if is_first else [],
            "tokens": [token.hex() for token in tokens],
        }
        store.set(str(ranks.rank), json.dumps(mine))
        self._wait(name, store, [str(r) for r in range(ranks.size)], numbers)
        rows = [json.loads(store.get(str(r))) for r in range(ranks.size)]
        processes = [Identity(**row["process"]) for row in rows]
        _require_one_host(ranks, processes)
        if not is_first:
            for number in rows[0]["memory"]:
                held.append(open_memory(processes[0], number))
        segments = [
            SharedSegment(
                descriptor,
                ranks=ranks,
                processes=processes,
                label=f"lane {number} on shared memory",
            )
            for number, descriptor in zip(numbers, held, strict=True)
        ]
        tokens = [bytes.fromhex(token) for token in rows[0]["tokens"]]
        for segment, token in zip(segments, tokens, strict=True):
            if is_first:
                segment.stamp(token)
        store.set(f"mapped/{ranks.rank}", "")
        keys = [f"mapped/{r}" for r in range(ranks.size)]
        self._wait(name, store, keys, numbers)
        for segment, token in zip(segments, tokens, strict=True):
            if not segment.stamped(token):
                raise OSError("the memory is not that of the first rank")
        return segments

    def _wait(
        self, name: str, store: Store, keys: Sequence[str], numbers: Sequence[int]
    ) -> None:
        """Wait for a key of each rank.

        Raises:
            CommTimeout: a rank is lost or late.
            PlanMismatch: another rank has left a note.
        """
        ranks = self._ranks
        missing = missing_after(ranks, store, keys, lambda: self._notes.check([name]))
        if missing is None:
            return
        if self._notes.check([name]):
            raise PlanMismatch(self._notes.get(name).decode())
        why = missing.reason(ranks)
        raise CommTimeout(
            f"{ranks.name(ranks.rank)} can't open {_lanes(numbers)}: {why}"
        )

    def abort(self) -> None:
        """Make every collective fail, here and on the other ranks."""
        for lane in list(self._all):
            lane.abort()

    def retain(self, lanes: Container[int]) -> None:
        """Release the other lanes; each ends with its last user."""
        for number in [n for n in self._lanes if n not in lanes]:
            del self._lanes[number]

    def close(self) -> None:
        """End every lane after its collectives are done; does not wait for them."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


def _require_one_host(ranks: Ranks, processes: Sequence[Identity]) -> None:
    """Require that all processes see each other.

    Raises:
        PlanMismatch: the same on every rank.
    """
    kernels = {process.kernel for process in processes}
    if len(kernels) > 1:
        by_host: dict[str, list[int]] = {}
        for rank, process in enumerate(processes):
            by_host.setdefault(process.host, []).append(rank)
        places = "; ".join(f"{ranks.name_all(r)} on {h}" for h, r in by_host.items())
        raise PlanMismatch(
            "local lanes need all ranks on one host, in one container, but there are "
            f"{len(kernels)} ({places}): leave lane_backend out."
        )


def _lanes(numbers: Sequence[int]) -> str:
    word = "lane" if len(numbers) == 1 else "lanes"
    return f"local {word} {', '.join(map(str, numbers))}"
