"""A cluster of processes on this machine: start it, keep it running, end it.

A keeper starts the coordinator and one agent per emulated host, and starts again what
has ended. Each takes a lock in the cluster's folder for as long as it lives, so none
runs twice, and the kernel releases it however the process ends. An agent that finds no
keeper starts one. So any of them may be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import channel, processes
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.loop import Loop, now_s
from stretto.errors import ClusterError, Infeasible, SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
"""Between two starts of a process that ends at once."""

_STEADY_S = 10.0
_ANSWER_S = 10.0
_START_S = 30.0


@final
class _Role:
    """A process that should run."""

    def __init__(
        self, module: str, arguments: list[str], lock: Path, log: Path
    ) -> None:
        self.lock, self.log = lock, log
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s, self._pause_s = 0.0, 0.0

    def look(self) -> None:
        """Start the process if none runs and its pause has passed."""
        if self._process is not None and self._process.poll() is None:
            return
        if processes.is_locked(self.lock):  # a former keeper's
            return
        age_s = now_s() - self._started_s
        if age_s > _STEADY_S:
            self._pause_s = 0.0
        elif age_s < self._pause_s:
            return
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._started_s = now_s()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def end(self) -> None:
        """Ask the process to end, even if another keeper started it."""
        if (pid := holder_of(self.lock)) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)


def holder_of(lock: Path) -> int | None:
    """Return the process that holds a file's lock and wrote its number there."""
    if not processes.is_locked(lock):
        return None
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return None


@final
class Keeper:
    """Keeps a cluster's processes running."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        settings = folders.load_settings()
        root = str(folders.root)
        self._roles = [
            _Role(
                "stretto.cluster.server",
                [root],
                folders.coordinator_lock,
                folders.coordinator_log,
            )
        ]
        for host in settings.hosts:
            folders.host(host).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._roles.append(
                _Role(
                    "stretto.cluster.agent",
                    [root, host],
                    folders.agent_lock(host),
                    folders.host(host) / "agent.log",
                )
            )
        self._loop = Loop()

    def run(self) -> None:
        """Keep them running until a signal, then end them."""
        ends = self._loop.stop
        self._loop.on_signals(
            {
                signal.SIGCHLD: self._look,
                signal.SIGTERM: ends,
                signal.SIGINT: ends,
                signal.SIGHUP: lambda: None,
            }
        )
        self._look()
        self._loop.every(_LOOK_S, self._look)
        self._loop.run()
        deadline_s = now_s() + _ANSWER_S
        while any(holder_of(role.lock) for role in self._roles):
            for role in self._roles:
                role.end()
            if now_s() > deadline_s:
                break
            time.sleep(0.05)

    def _look(self) -> None:
        if self._folders.down.exists():
            self._loop.stop()
            return
        for role in self._roles:
            # A disk may be full, or processes may be scarce: try again later.
            with contextlib.suppress(OSError):
                role.look()


def start_keeper(folders: Folders) -> None:
    """Start a keeper unless one runs, or the cluster is to be down."""
    if folders.down.exists() or processes.is_locked(folders.keeper_lock):
        return
    processes.start_detached(
        [sys.executable, "-P", "-m", __name__, str(folders.root)], folders.keeper_log
    )


# for the command line


def start(folders: Folders, settings: Settings) -> dict[str, Any]:
    """Start a cluster and return its status once all hosts have joined.

    Raises:
        ClusterError: it runs already, or does not start.
    """
    folders.create()
    if processes.is_locked(folders.keeper_lock) or processes.is_locked(
        folders.coordinator_lock
    ):
        raise ClusterError(
            f"a cluster runs in {folders.root}: see `stretto cluster status`, end it "
            "with `stretto cluster down`, or start another with --folder"
        )
    folders.save_settings(settings)
    drained = folders.take_down_mark()
    start_keeper(folders)
    deadline_s = now_s() + _START_S
    found: dict[str, Any] = {}
    while now_s() < deadline_s:
        with contextlib.suppress(ClusterError):
            found = ask(folders, {"do": "status"}, patience_s=1.0)
            if all(row["joined"] for row in found["hosts"]):
                break
        time.sleep(0.02)
    else:
        raise ClusterError(
            f"the cluster in {folders.root} did not start within {_START_S:g} s: see "
            f"{folders.coordinator_log}"
        )
    for host in drained:
        if host in settings.hosts:
            ask(folders, {"do": "drain", "host": host, "open": True, "user": "start"})
    return ask(folders, {"do": "status"})


def ask(
    folders: Folders, message: dict[str, Any], *, patience_s: float = _ANSWER_S
) -> dict[str, Any]:
    """Return the coordinator's answer; wait a while for one that starts again.

    Raises:
        ClusterError: no cluster runs here, or it does not answer.
        StrettoError: the coordinator refused the request.
    """
    if message["do"] == "submit":
        # If the answer is lost, the same request again makes no second job.
        message = {"request": uuid.uuid4().hex} | message
    deadline_s = now_s() + patience_s
    while True:
        try:
            found = channel.request(folders.socket, message, timeout_s=_ANSWER_S)
            break
        except OSError as error:
            if not folders.settings.exists() or folders.down.exists():
                raise ClusterError(
                    f"no cluster runs in {folders.root}: run `stretto cluster start`"
                ) from error
            if now_s() > deadline_s:
                raise ClusterError(
                    f"the coordinator of {folders.root} does not answer "
                    f"({error.strerror}): see {folders.coordinator_log}"
                ) from error
            start_keeper(folders)
            time.sleep(0.05)
    if "error" in found:
        raise _refusal(str(found["error"]), int(found.get("exit", 1)))
    return found


def _refusal(text: str, exit_code: int) -> StrettoError:
    kinds = {each.exit_code: each for each in (ClusterError, SpecError, Infeasible)}
    return kinds.get(exit_code, ClusterError)(text)


def down(folders: Folders, *, timeout_s: float) -> bool:
    """End a cluster: its jobs stop with their grace, and wait for the next start.

    Returns:
        Whether all jobs had ended in time. Otherwise their supervisors end them when
        their watchdog fires.

    Raises:
        ClusterError: no cluster runs here.
    """
    status = ask(folders, {"do": "status"})
    drained = [row["host"] for row in status["hosts"] if not row["drained"]]
    for host in drained:
        ask(folders, {"do": "drain", "host": host, "user": "down"})
    deadline_s = now_s() + timeout_s
    has_ended = False
    while not has_ended and now_s() < deadline_s:
        status = ask(folders, {"do": "status"})
        has_ended = not status["attempts"]
        if not has_ended:
            time.sleep(0.05)
    folders.mark_down(drained)
    for pid in _holders(folders):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    end_s = now_s() + 2 * _ANSWER_S
    while any(_holders(folders)) and now_s() < end_s:
        time.sleep(0.02)
    return has_ended


def _holders(folders: Folders) -> Iterator[int]:
    """Yield the cluster's processes that run, the keeper first."""
    locks = [folders.keeper_lock, folders.coordinator_lock]
    locks += [folders.agent_lock(host) for host in folders.load_settings().hosts]
    for each in locks:
        if (pid := holder_of(each)) is not None:
            yield pid


def main(folder: str) -> int:
    """Run the keeper of a folder, unless one runs."""
    folders = Folders(Path(folder))
    if processes.lock_as_owner(folders.keeper_lock) is None or folders.down.exists():
        return 0
    Keeper(folders).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
