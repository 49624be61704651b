"""Plain values that forward keeps, to detect and undo their changes."""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, Any, final

from stretto.burst.tracing.caches import HolderList, LruCache, entries_in
from stretto.burst.tracing.freezing import ATOMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from stretto.burst.tracing.caches import Holder

MISSING = object()

_MAX_DEPTH = 5


@final
class PlainState:
    """The entries of holders under names that forward's code contains.

    Args:
        holders: with their entries before forward.
        names: returns those in the code; None if it makes names while it runs.
    """

    def __init__(
        self, holders: HolderList, names: Callable[[], Set[str] | None]
    ) -> None:
        self._holders = holders
        self._names = names
        self._misses = {
            id(holder): _misses(holder.of) for holder in holders.lru_caches()
        }

    def changed(self) -> list[tuple[Holder, Any, Any]]:
        """Return the changed entries, with their values now."""
        names, found = self._names(), []
        for holder in self._holders.differing():
            if not holder.is_space and not _is_in(names, holder.name):
                continue
            if isinstance(holder.of, LruCache):
                if _misses(holder.of) != self._misses[id(holder)]:
                    found.append((holder, "", gc.get_referents(holder.of)))
                continue
            now, before = entries_in(holder.of), holder.before
            for key in {**now, **before}:
                one, two = now.get(key, MISSING), before.get(key, MISSING)
                if one is two or (type(one) is type(two) and _is_equal(one, two)):
                    continue
                if holder.is_space and (
                    key == "training" or not _is_in(names, str(key))
                ):
                    continue
                found.append((holder, key, one))
        return found

    def of_changed(self) -> PlainState:
        """Return the state of the holders that have changes now."""
        held = {id(holder): holder for holder, _, _ in self.changed()}
        found = PlainState(HolderList(held.values()), self._names)
        found._misses |= {key: self._misses[key] for key in found._misses}
        return found

    def restore(self) -> None:
        """Restore changed entries."""
        for holder, key, _ in self.changed():
            holder.restore([key])
            if isinstance(holder.of, LruCache):
                self._misses[id(holder)] = _misses(holder.of)

    def values(self) -> dict[tuple[int, Any], Any]:
        """Return plain values in changed entries, except a set's, by their places."""
        found: dict[tuple[int, Any], Any] = {}
        for holder, key, value in self.changed():
            if not isinstance(holder.of, (set, LruCache)):
                for path, part in _parts_of(value):
                    found[id(holder.of), (key, *path)] = part
        return found

    def name_of(self, place: tuple[int, Any]) -> str:
        """Return the name of a place in `values`."""
        number, path = place
        return next(h.name_of(path[0]) for h in self._holders if id(h.of) == number)


def _is_in(names: Set[str] | None, name: str) -> bool:
    return names is None or not names.isdisjoint(name.split("."))


def _misses(cache: Any) -> int:
    found: int = cache.cache_info().misses
    return found


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, ATOMS)


def _parts_of(value: Any, depth: int = 0) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the plain values in a value, with their places in it."""
    if is_plain(value):
        yield (), value
    elif isinstance(value, (dict, list, deque)) and depth < _MAX_DEPTH:
        for key, inner in entries_in(value).items():
            for path, part in _parts_of(inner, depth + 1):
                yield (key, *path), part


def _is_equal(one: Any, two: Any) -> bool:
    return is_plain(one) and is_plain(two) and bool(one == two)
