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
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, final

from torch.distributed.distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.runtime.agreement import Ranks

GRACE_S = 30.0
"""Seconds that a rank may take until its next call after it refused something."""

_POLL_S = 0.5


@final
class Refusals:
    """This rank's refused calls, and a watch on the others while it waits."""

    def __init__(self, ranks: Ranks, serial: int, stop: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._store = PrefixStore(f"refused/{serial}", ranks.store)
        self._stop = stop
        self._step = 0
        self._is_published = False
        self._since: tuple[float, str] | None = None
        self._seen: dict[int, float] = {}
        self._ended = threading.Event()
        self._own = ""
        self._inside = (-1, "")
        """The step that an own error ended, and the error."""
        if ranks.size > 1:
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
        self._own = text_of(error)
        with contextlib.suppress(RuntimeError):  # without a store there is no job
            if inside:
                self._inside = self._step, self._own
                key = f"inside/{self._ranks.rank}"
                self._store.set(key, f"{self._step} {self._own}")
            if not self._is_published:
                self._store.set(f"outside/{self._ranks.rank}", self._own)
                self._is_published = True

    def is_published(self, error: BaseException | None) -> bool:
        """Return whether the others know that this error ended the step."""
        return error is not None and self._inside == (self._step, text_of(error))

    def withdraw(self) -> None:
        """Record that this rank continues."""
        if self._is_published:
            self._is_published = False
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"outside/{self._ranks.rank}")

    def given_up(self) -> str:
        """Return the error after which the other ranks stopped waiting for this one."""
        if not self._own:
            return ""
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"ended/{self._ranks.rank}"]):
                return self._own
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
                self._store.set(f"ended/{rank}", text)
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
        key = f"inside/{rank}"
        if self._store.check([key]):
            step, _, text = self._store.get(key).decode().partition(" ")
            if int(step) == self._step:
                return text
        key = f"outside/{rank}"
        if not self._store.check([key]):
            self._seen.pop(rank, None)
            return None
        first_s = self._seen.setdefault(rank, perf_counter())
        if perf_counter() - first_s < min(grace_s, self._ranks.timeout_s):
            return None
        return self._store.get(key).decode()

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
