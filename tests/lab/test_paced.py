"""The fallback: connections capped on loopback."""

from __future__ import annotations

import json
import statistics
import sys

import pytest

from stretto.lab import LabSpec, launch, run_lab
from stretto.lab.ports import free_port

pytestmark = pytest.mark.lab

MBIT = 125_000


@pytest.mark.parametrize("opener", [0, 1])
def test_each_connection_is_capped_and_no_link_is(lab, programs, opener):
    medians = {}
    for flows in (1, 4):
        done = lab.run(
            *["--mode", "paced", "--hosts", 2, "--link", "100mbit"],
            *["--flow", "80mbit", "--timeout", 50],
            *["--", "python", programs / "flows.py", flows, opener, 1.2, 3],
            env={"FLOWS_PORT": str(free_port())},
        )
        assert done.returncode == 0, done.stderr
        assert "paced mode" in done.stderr
        medians[flows] = statistics.median(map(sum, json.loads(done.stdout)))
    # The thread that paces may find a new socket late: what slipped through before
    # then was more, never less.
    assert 0.85 * 80 * MBIT < medians[1] < 1.4 * 80 * MBIT
    assert medians[4] / medians[1] == pytest.approx(4, rel=0.3)


def test_without_a_flow_rate_nothing_is_paced(lab):
    done = lab.run(
        *["--mode", "paced", "--hosts", 2, "--", "python", "-c"],
        "import threading; print(threading.active_count())",
    )
    assert done.stdout == "1\n"
    assert "nothing is capped" in done.stderr


def test_the_users_own_sitecustomize_still_runs(lab, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.seen = 1")
    done = lab.run(
        *["--mode", "paced", "--hosts", 2, "--flow", "80mbit", "--", "python", "-c"],
        "import threading; print(seen, threading.active_count())",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout == "1 2\n", done.stderr


@pytest.mark.parametrize(
    ("missing", "package"), [("nft", "nftables"), ("tc", "iproute2")]
)
def test_missing_tools_are_announced_with_their_packages(
    monkeypatch, tmp_path, capfd, missing, package
):
    for tool in {"ip", "tc", "nft"} - {missing}:
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launch, "_SYSTEM_FOLDERS", str(tmp_path))
    said = []
    status = run_lab(
        LabSpec(hosts=2, link_bytes_per_s=1e8),
        [sys.executable, "-c", "import os; print(os.environ['STRETTO_LAB_MODE'])"],
        announce=said.append,
    )
    assert status == 0
    assert capfd.readouterr().out == "paced\n"
    assert missing in said[0]
    assert package in said[0]
    assert "paced mode" in said[1]


def test_two_at_once_meet_at_different_ports(lab):
    # The first holds its port while the second looks for one.
    code = (
        "import os, socket, sys, time\n"
        "s = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "print('up', flush=True)\n"
        "while not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.01)"
    )
    gate = lab.temporary.parent / "gate"
    command = ["--mode", "paced", "--hosts", 1, "--", "python", "-c", code, gate]
    with lab.start(*command) as first, lab.start(*command) as second:
        assert first.stdout.readline() == "up\n"
        assert second.stdout.readline() == "up\n"
        gate.write_text("")
        for process in (first, second):
            process.communicate(timeout=30)
            assert process.returncode == 0
