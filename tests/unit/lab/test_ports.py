"""Ports to meet at: below those of outgoing connections, and each given once."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stretto.errors import LabError
from stretto.lab import ports

if TYPE_CHECKING:
    from pathlib import Path


def test_ports_lie_outside_what_outgoing_connections_get() -> None:
    low, high = ports.span(ports._EPHEMERAL)
    found = [ports.free_port() for _ in range(100)]
    assert len(set(found[-64:])) == 64
    assert all(low <= port < high for port in found)
    with socket.create_server(("127.0.0.1", found[-1])):
        pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768\t60999\n", (20768, 32768)),
        ("9000 65000", (1024, 9000)),
        ("1024 50000", (50001, 62001)),
        ("1024 60999", (61000, 65536)),
        ("1024 65535", (53536, 65536)),
        ("what?", (20768, 32768)),
        (None, (20768, 32768)),
    ],
)
def test_the_kernels_range_is_kept_clear_of(
    tmp_path: Path, text: str | None, expected: tuple[int, int]
) -> None:
    file = tmp_path / "ip_local_port_range"
    if text is not None:
        file.write_text(text)
    assert ports.span(file) == expected


def test_a_port_in_use_or_given_to_another_process_is_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        monkeypatch.setattr(ports, "span", lambda _file: (used, used + 1))
        with pytest.raises(LabError, match="is free; see what listens"):
            ports.free_port()

    monkeypatch.undo()
    code = (
        "from stretto.lab import ports; print(ports.free_port(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        given = int(other.stdout.readline())
        monkeypatch.setattr(ports, "span", lambda _file: (given, given + 1))
        with pytest.raises(LabError):
            ports.free_port()
        other.communicate(b"\n", timeout=30)
    assert ports.free_port() == given  # its claim has ended with it
