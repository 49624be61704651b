"""A rank's connection to its host's keeper."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from stretto import variable_names
from stretto.cluster.channel import connected, encoded
from stretto.errors import SpecError, StrettoError
from stretto.members.wire import (
    view_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from stretto.members.view import View

_CONNECT_S = 10.0


@final
class MemberClient:
    """Receives views in a thread, and reports what the keeper can't see."""

    _made: ClassVar[set[tuple[str, int]]] = set()

    def __init__(self, path: Path, member: int, *, joins: bool = False) -> None:
        """Connect.

        Args:
            path: the keeper's socket.
            member: this rank's id.
            joins: whether the job trained before this rank was started.

        Raises:
            StrettoError: no keeper listens there.
        """
        self.member, self.joins = member, joins
        try:
            self._socket = connected(path, timeout_s=_CONNECT_S)
        except OSError as error:
            raise StrettoError(
                f"the keeper of this host does not answer at {path}: {error}. It ends "
                "with `stretto run`; start the job again."
            ) from error
        self._socket.settimeout(None)
        self._changed = threading.Condition()
        self._newest: View | None = None
        self._is_lost = False
        self._on_view: Callable[[View], None] = lambda _: None
        self._on_end: Callable[[int], None] = lambda _: None
        self._on_drain: Callable[[], None] = lambda: None
        self.drains = False
        """Whether SIGTERM lets this rank leave between two steps."""

        self._thread = threading.Thread(
            target=self._read, name="stretto-member", daemon=True
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return the client of a rank that a keeper has started, else ``None``.

        Raises:
            SpecError: this process has one.
            StrettoError: no keeper listens.
        """
        path = environment.get(variable_names.KEEPER)
        if path is None:
            return None
        member = int(environment[variable_names.MEMBER])
        if (path, member) in cls._made:
            raise SpecError(
                "under --elastic a process has one stretto.Elastic or elastic Horovod "
                "function, which its keeper follows: use one for all phases of "
                "training, or start a job for each phase"
            )
        cls._made.add((path, member))
        return cls(Path(path), member, joins=variable_names.JOINS in environment)

    def start(
        self,
        address: str,
        *,
        on_view: Callable[[View], None],
        on_end: Callable[[int], None],
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """Report that this rank can train.

        Args:
            address: ``host:port`` of the store that this rank can serve.
            on_view: called in another thread with each new view.
            on_end: called in that thread with a generation that another rank has
                left after a failure.
            on_drain: called in that thread when this rank is to leave.
        """
        self._on_view, self._on_end, self._on_drain = on_view, on_end, on_drain
        self._thread.start()
        self.ready(address)

    def ready(self, address: str) -> None:
        """Report again that this rank can train, after a view without it.

        Args:
            address: ``host:port`` of the store that this rank can serve.
        """
        self._send({"ready": self.member, "address": address})

    def failed(self, generation: int) -> None:
        """Report that a collective of a generation can't end."""
        self._send({"failed": generation})

    def entered(self, generation: int) -> None:
        """Report that this rank trains in a generation."""
        self._send({"entered": generation, "drains": self.drains})

    def drained(self, members: Iterable[int]) -> None:
        """Report that members, with this rank, leave between two steps."""
        self._send({"drained": list(members)})

    def left(self) -> None:
        """Report that this rank has finished training."""
        self._send({"left": self.member})

    @property
    def newest(self) -> View | None:
        """The newest view that is known."""
        return self._newest

    def next_view(self, after: int, *, timeout_s: float) -> View:
        """Wait for a view.

        Args:
            after: the generation that the view must follow.
            timeout_s: how long to wait.

        Raises:
            StrettoError: none comes in time, or the keeper has ended.
        """
        deadline = time.perf_counter() + timeout_s
        with self._changed:
            while self._newest is None or self._newest.generation <= after:
                left_s = deadline - time.perf_counter()
                if self._is_lost:
                    raise StrettoError(
                        "this host's keeper has ended, and the membership with it"
                    )
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise StrettoError(
                        f"no new membership was decided in {timeout_s:g} s: too few "
                        "ranks or hosts are left, or ranks have not started"
                    )
            return self._newest

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the reader notices a lost keeper
            self._socket.sendall(encoded(message))

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._socket.makefile("rb"):
                message = json.loads(line)
                if "end" in message:
                    self._on_end(message["end"])
                if "drain" in message:
                    self._on_drain()
                if "stacks" in message:
                    _print_stacks()
                if (view := view_of(message)) is None:
                    continue
                with self._changed:
                    self._newest = view
                    self._changed.notify_all()
                self._on_view(view)
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()


def _print_stacks() -> None:
    """Print where each thread is: the keeper takes this rank for one that hangs."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
