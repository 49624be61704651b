"""Inform waiting ranks when a rank refuses a call.

# Note [What others learn of a refusal]
A read of values that are not current, or an error in forward or backward, raises on the
rank where it happens, whose program may catch it. The other ranks wait for that rank in
their next collective and would do so until the timeout. So the rank writes its error to
the store. An error inside a step means that the data that the others wait for in this
step never arrives: they stop at once. For any other error they wait `GRACE_S` seconds,
because the rank may continue; its next call withdraws the error. Stopping means to
close the model's connections and to raise one error that names the rank and its error.
The store is not queried before a wait has lasted `_POLL_S` seconds.

A program may have several models, such as the two of a GAN, and the others may wait in
another one than that of the error. So each rank also writes its last error in any model
of the group, which ranks that wait in any model read. The rank's next call of any model
withdraws it there. Ranks that wait in the model of the error wait for a call of that
model: a rank that continues with another one does not come.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, final

from torch.distributed.distributed_c10d import PrefixStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.runtime.agreement import Ranks

GRACE_S = 30.0
"""Seconds that a rank may take until its next call after it refused something."""

_POLL_S = 0.5


@final
class Published:
    """An error of this rank that the others can read until it is withdrawn."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._is_published = False
        self.last = ""
        """The last error, also once it is withdrawn."""

    def publish(self, text: str) -> None:
        """Let the others read an error, unless they can read an earlier one."""
        self.last = text
        if not self._is_published:
            self._store.set(self._key, text)
            self._is_published = True

    def withdraw(self) -> None:
        """Record that this rank continues."""
        if self._is_published:
            self._is_published = False
            self.clear()

    def clear(self) -> None:
        """Remove an error; also one that an earlier process left in the store."""
        # The key stays: a request for a key that was deleted meanwhile would block.
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key, "")


# Each group has one connection to its store (`stretto.runtime.store`).
_of_any_model: weakref.WeakKeyDictionary[Store, Published] = weakref.WeakKeyDictionary()
"""This rank's last error in any model of a group, by the group's connection."""


def _published_of_any_model(ranks: Ranks, store: Store, key: str) -> Published:
    connection = getattr(ranks.store, "underlying_store", ranks.store)
    found = _of_any_model.get(connection)
    if found is None:
        found = _of_any_model[connection] = Published(store, key)
        found.clear()
    return found


@final
class Refusals:
    """This rank's refused calls, and a watch on the others while it waits."""

    def __init__(self, ranks: Ranks, serial: int, stop: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._serial = serial
        self._store = PrefixStore("refused", ranks.store)
        self._stop = stop
        self._step = 0
        self._since: tuple[float, str] | None = None
        self._seen: dict[str, float] = {}
        """When this rank found errors outside of a step, by their keys."""
        self._ended = threading.Event()
        self._inside = (-1, "")
        """The step that an own error ended, and the error."""
        self._outside: tuple[Published, ...] = ()
        """This rank's error in this model, and in any model of the group."""
        if ranks.size > 1:
            mine, of_any = self._outside_keys(ranks.rank)
            self._outside = (
                Published(self._store, mine),
                _published_of_any_model(ranks, self._store, of_any),
            )
            threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._ended),
                name="stretto-burst-refusals",
                daemon=True,
            ).start()

    # On the rank that refuses.

    def tell(self, error: BaseException, *, inside: bool = False) -> None:
        """Publish an error to the other ranks; ``inside`` a step, it ends that step."""
        if self._ranks.size == 1:
            return
        text = text_of(error)
        with contextlib.suppress(RuntimeError):  # without a store there is no job
            if inside:
                self._inside = self._step, text
                key = self._key("inside", self._ranks.rank)
                self._store.set(key, f"{self._step} {text}")
            for published in self._outside:
                published.publish(text)

    def is_published(self, error: BaseException | None) -> bool:
        """Return whether the others know that this error ended the step."""
        return error is not None and self._inside == (self._step, text_of(error))

    def withdraw(self) -> None:
        """Record that this rank continues."""
        for published in self._outside:
            published.withdraw()

    def given_up(self) -> str:
        """Return the error after which the other ranks stopped waiting for this one."""
        if not any(published.last for published in self._outside):
            return ""
        key = self._key("ended", self._ranks.rank)
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""

    def next_step(self) -> None:
        """Count a forward, which all ranks call equally often."""
        self._step += 1

    # On a rank that waits.

    @contextlib.contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Watch for the other ranks' errors during a wait."""
        before, self._since = self._since, (perf_counter(), place)
        try:
            yield
        finally:
            self._since = before

    def look(self) -> None:
        """End a wait for a rank that has refused the awaited call."""
        since = self._since
        if since is None or perf_counter() - since[0] < _POLL_S:
            self._seen.clear()
            return
        for rank in range(self._ranks.size):
            if rank == self._ranks.rank:
                continue
            text = self._found(rank, GRACE_S)
            if text is not None and self._since is since:
                self._store.set(self._key("ended", rank), text)
                self._stop(self._because(rank, since[1], text))
                return

    def explain(self, place: str) -> str:
        """Return why a wait failed, if another rank had refused a call; else ``""``.

        A rank whose process ends after its error closes its connections, which the
        others may notice before they look for its error.
        """
        with contextlib.suppress(RuntimeError):  # the store may have ended as well
            for rank in range(self._ranks.size):
                text = None if rank == self._ranks.rank else self._found(rank, 0)
                if text is not None:
                    return self._because(rank, place, text)
        return ""

    def _because(self, rank: int, place: str, text: str) -> str:
        return (
            f"{self._ranks.name(self._ranks.rank)}: {place} can't finish, because "
            f"{self._ranks.name(rank)} stopped with an error of its own: {text}"
        )

    def _found(self, rank: int, grace_s: float) -> str | None:
        if found := self._text(self._key("inside", rank)):
            step, _, text = found.partition(" ")
            if int(step) == self._step:
                return text
        for key in self._outside_keys(rank):
            text = self._text(key)
            if not text:
                self._seen.pop(key, None)
                continue
            first_s = self._seen.setdefault(key, perf_counter())
            if perf_counter() - first_s >= min(grace_s, self._ranks.timeout_s):
                return text
        return None

    def _text(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _key(self, what: str, rank: int) -> str:
        return f"{self._serial}/{what}/{rank}"

    def _outside_keys(self, rank: int) -> tuple[str, str]:
        """Return the keys of a rank's errors in this model and in any of the group."""
        return self._key("outside", rank), f"any/{rank}"

    def close(self) -> None:
        """End the watch."""
        self._ended.set()


def text_of(error: BaseException) -> str:
    """Return an error's type and its first line."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"


def _watch(refusals: weakref.ref[Refusals], ended: threading.Event) -> None:
    while not ended.wait(_POLL_S):
        found = refusals()
        if found is None:
            return
        try:
            found.look()
        except RuntimeError:
            return  # the store is gone, which the next request reports
        del found
