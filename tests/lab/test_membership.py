"""Which ranks stay together when hosts and links fail, without training anything."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("namespaces")]


def views_of(lab, programs, folder, faults, *, hosts, views):
    """Return each member's views, as ids by generation."""
    options = [word for fault in faults for word in ("--fault", fault)]
    done = lab.run(
        *["--hosts", hosts, "--timeout", 80, "--grace", 1, "--logs", folder / "logs"],
        *[*options, "--", "python", programs / "keeper.py", folder, views],
        timeout=100,
        env={"TMPDIR": str(folder)},
    )
    logs = [path.read_text() for path in sorted((folder / "logs").glob("*.log"))]
    assert done.returncode == 0, (done.stderr, logs)
    return {
        int(path.stem): {
            row[0]: row[1] for row in map(json.loads, path.read_text().splitlines())
        }
        for path in folder.glob("*.jsonl")
    }


def test_hosts_leave_while_a_direction_fails_and_return_after(lab, programs, tmp_path):
    faults = [
        "disconnect host3 at step 5 for 1 s",  # too short to matter
        "drop-input host3 at step 30 for 6 s",
        "drop-output host2 at step 210 for 6 s",
    ]
    found = views_of(lab, programs, tmp_path, faults, hosts=4, views=5)
    wanted = {
        1: [0, 1, 2, 3],
        2: [0, 1, 2],
        3: [0, 1, 2, 3],
        4: [0, 1, 3],
        5: [0, 1, 3, 2],
    }
    assert found[0] == found[1] == wanted


def test_the_first_host_may_be_lost_and_another_joins(lab, programs, tmp_path):
    faults = ["kill host0 at step 5"]
    found = views_of(lab, programs, tmp_path, faults, hosts=3, views=2)
    assert found[1] == found[2] == {1: [0, 1, 2], 2: [1, 2]}
    assert found[0] == {1: [0, 1, 2]}
