"""What a rank finds on its host, and who may have such hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import stretto

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("namespaces")]


def test_hosts_find_each_other_by_name_and_only_each_other(lab):
    code = (
        "import json, os, socket\n"
        "print(json.dumps([socket.gethostname()]\n"
        "  + [socket.gethostbyname(name) for name in ('host0', 'host1')]\n"
        "  + [socket.gethostbyaddr('10.77.0.2')[0]]\n"
        "  + sorted(os.listdir('/proc/sys/net/ipv4/conf'))))"
    )
    done = lab.run("--hosts", 2, "--", "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        *["host0", "10.77.0.1", "10.77.0.2", "host1"],
        *["all", "default", "eth0", "lo"],
    ]


def test_processes_outside_are_not_seen(lab):
    done = lab.run(
        "--hosts", 1, "--", "bash", "-c", f"kill -0 {os.getpid()} || ls /proc"
    )
    assert done.returncode == 0
    pids = [name for name in done.stdout.split() if name.isdigit()]
    assert 1 <= len(pids) < 10


def test_ddp_over_gloo_crosses_the_emulated_network(lab, programs, tmp_path):
    done = lab.run(
        *["--hosts", 4, "--link", "1gbit", "--flow", "300mbit", "--timeout", 100],
        *["--", "python", programs / "ddp.py"],
        timeout=110,
        # torch leaves a cache there.
        env={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ranks"] == 4
    assert result["agree"]
    # DDP's all-reduce and ours, each 2 * (4 - 1) / 4 of the gradient per rank.
    least = 2 * 1.5 * result["gradient_bytes"]
    assert result["sent_bytes"]["eth0"] > least
    assert result["sent_bytes"]["lo"] < 0.1 * least


def test_connections_share_no_class_before_all_are_taken(lab, tmp_path):
    # Every mark in turn, whether the host opened the connection or answered.
    code = """
import os, pathlib, socket, subprocess, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(os.environ["READY"])
address = os.environ["STRETTO_LAB_ADDRESSES"].split(",")
kept = []
server = socket.create_server((address[rank], 6000), backlog=64)
(folder / str(rank)).touch()
while not (folder / str(1 - rank)).exists():  # a refused attempt would take a mark
    time.sleep(0.01)
for _ in range(20):
    kept.append(socket.create_connection((address[1 - rank], 6000)))
for _ in range(20):
    kept.append(server.accept()[0])
for each in kept:
    each.sendall(b"x")
time.sleep(0.5)
shown = subprocess.run(["tc", "-s", "class", "show", "dev", "eth0"],
    capture_output=True, text=True, check=True,
    env=os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}).stdout
used = 0
for block in shown.split("class htb ")[1:]:
    name = block.split()[0]
    packets = int(block.split(" bytes ")[1].split()[0])
    used += packets > 0 and int(name.split(":")[1], 16) >= 0x100
print(used)
time.sleep(0.5)
"""
    done = lab.run(
        *["--hosts", 2, "--timeout", 30, "--", "python", "-c", code],
        env={"READY": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "40\n"


@pytest.mark.skipif(
    os.geteuid() != 0, reason="the other tests ran without root already"
)
def test_root_without_capabilities_uses_a_user_namespace(lab):
    # As in a container that allows user namespaces. Without CAP_SETFCAP the kernel
    # lets no process map user 0.
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is needed to give up rights")
    bare = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"]
    if subprocess.run([*bare, "unshare", "-Urn", "true"], check=False).returncode != 0:
        pytest.skip("user namespaces are not allowed here")
    done = lab.run(
        *["--mode", "namespaces", "--hosts", 2, "--flow", "300mbit"],
        *["--", "cat", "/proc/self/uid_map"],
        prefix=bare,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0", "1"]


@pytest.mark.skipif(
    os.geteuid() != 0, reason="the other tests ran without root already"
)
def test_anyone_may_have_a_lab_where_user_namespaces_are_allowed(lab, programs):
    # setpriv itself still has root's rights when it looks for the program; env not.
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env"]
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is needed to become another user")
    if (
        subprocess.run([*nobody, "unshare", "-Urn", "true"], check=False).returncode
        != 0
    ):
        pytest.skip("user namespaces are not allowed to everyone here")
    python = _python_for_anyone(nobody)
    # The checkout may lie where only its owner may look.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(Path(stretto.__file__).parent, folder / "stretto")
        shutil.copy(programs / "flows.py", folder)
        (folder / "run.py").write_text(
            "import sys\n"
            "from stretto.lab import LabSpec, run_lab\n"
            "spec = LabSpec(hosts=2, link_bytes_per_s=125e6, flow_bytes_per_s=37.5e6)\n"
            "sys.exit(run_lab(spec, sys.argv[1:], mode='namespaces'))\n"
        )
        folder.chmod(0o755)
        done = subprocess.run(
            [
                *[*nobody, python, folder / "run.py"],
                *[python, folder / "flows.py", "1", "1", "1.2", "3"],
            ],
            env={
                "PYTHONPATH": name,
                "PYTHONDONTWRITEBYTECODE": "1",
                "STRETTO_TEST_MARK": lab.mark,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    rates = sorted(sum(rates) for rates in json.loads(done.stdout))
    assert rates[1] == pytest.approx(37.5e6, rel=0.1)


def _python_for_anyone(prefix):
    candidates = [sys.executable, *map(shutil.which, ("/usr/bin/python3", "python3"))]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in filter(None, candidates):
        done = subprocess.run(
            [*prefix, python, "-c", check], capture_output=True, check=False
        )
        if done.returncode == 0:
            return python
    pytest.skip("no Python 3.11 that another user may run")
    return None
