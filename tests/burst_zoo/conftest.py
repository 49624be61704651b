"""Persistent ranks: processes that stay for the session and check one case at a time.

Starting four interpreters with torch takes seconds, a case takes a fraction of one.
Groups of 1 to 4 of the ranks exist throughout; a case says how many it wants.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto.lab.ports import free_port
from support.ranks import rank_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4
_FOLDER = Path(__file__).parent


class Pool:
    """Ranks that execute functions of this folder's modules."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts = 0

    def __call__(
        self, module: str, function: str, *arguments: Any, timeout_s: float = 200.0
    ) -> list[tuple[str, Any]]:
        """``("value", result)`` or ``("error", (type, message, trace))`` by rank."""
        if not self._processes:
            self._start()
        request = pickle.dumps((module, function, arguments))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(struct.pack("<q", len(request)) + request)
            process.stdin.flush()
        found: list[Any] = [None] * SIZE
        threads = [
            threading.Thread(target=self._read, args=(rank, found), daemon=True)
            for rank in range(SIZE)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank in range(SIZE) if found[rank] is None]
        if late:
            self.close()
            text = "\n".join(
                (self._folder / f"{self._starts}-{rank}.log").read_text()[-2000:]
                for rank in late
            )
            pytest.fail(f"ranks {late} did not answer within {timeout_s} s\n{text}")
        if any(kind == "error" for kind, _ in found):
            self.close()  # a rank that raised may have left others inside a collective
        return found

    def _read(self, rank: int, found: list[Any]) -> None:
        stream = self._processes[rank].stdout
        assert stream is not None
        head = stream.read(8)
        if len(head) == 8:
            found[rank] = pickle.loads(stream.read(struct.unpack("<q", head)[0]))

    def _start(self) -> None:
        self._starts += 1
        port = free_port()
        for rank in range(SIZE):
            log = (self._folder / f"{self._starts}-{rank}.log").open("wb")
            environment = rank_environment(rank, SIZE, port) | {"HF_HUB_OFFLINE": "1"}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(_FOLDER / "zoo_rank.py")],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )
            log.close()

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._processes = []


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(tmp_path_factory.mktemp("zoo"))
    yield made
    made.close()
