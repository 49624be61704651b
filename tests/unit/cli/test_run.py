from __future__ import annotations

import os
import subprocess
import sys

import pytest

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def stretto_run(*arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "stretto", "run", *map(str, arguments)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def as_rank_0(*arguments):
    return stretto_run(*arguments, RANK="0", WORLD_SIZE="1")


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


def test_a_script_finds_our_class_under_every_name_of_ddp(script):
    path = script(
        "import sys, torch\n"
        "from torch.nn.parallel import DistributedDataParallel as A\n"
        "from torch.nn.parallel.distributed import DistributedDataParallel as B\n"
        "assert A is B is torch.nn.parallel.DistributedDataParallel\n"
        "print(A.__module__, sys.argv[1:], __name__)\n"
    )
    done = as_rank_0(path, "--lr", "3")
    assert done.stdout == "stretto._api.ddp ['--lr', '3'] __main__\n", done.stderr


def test_torchrun_options_launch_that_many_ranks(script):
    path = script(
        "import os, sys, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / ('rank' + os.environ['RANK'])).write_text(' '.join(sys.argv[1:]))\n"
    )
    done = stretto_run("--nproc-per-node", 2, path, "--epochs", 5)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (path.parent / f"rank{rank}").read_text() == "--epochs 5"


def test_the_status_of_a_failed_rank_is_passed_on(script):
    done = stretto_run("--nproc-per-node", 2, script("import sys; sys.exit(5)"))
    assert done.returncode == 5
    assert "failed with exit status 5" in last_line(done)


@pytest.mark.parametrize("run", [stretto_run, as_rank_0])
def test_a_missing_script_is_one_line_and_exit_2(run, tmp_path):
    done = run(tmp_path / "none.py")
    assert done.returncode == 2
    assert last_line(done) == f"stretto: error: {tmp_path / 'none.py'}: no such script"


def test_torchrun_options_within_a_launched_rank_are_refused(script):
    done = as_rank_0("--nproc-per-node", 2, script(""))
    assert done.returncode == 2
    assert "Put SCRIPT first" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--plan", "none.json", "neither auto, ddp nor a file"),
        ("--trace", "no/such/folder/t.json", "does not exist"),
    ],
)
def test_files_are_checked_before_anything_starts(script, option, value, says):
    done = stretto_run(option, value, script("print('ran')"))
    assert done.returncode == 2
    assert says in done.stderr.replace("\n", " ")
    assert "ran" not in done.stdout


@pytest.mark.parametrize("command", ["run", "probe"])
def test_a_network_interface_that_does_not_exist_is_named_at_once(script, command):
    path = script("print('ran')")
    arguments = [path] if command == "run" else ["-o", path.with_suffix(".json")]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "stretto", command, *map(str, arguments)],
        env=environment | {"GLOO_SOCKET_IFNAME": "lo,nope0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "names network interface 'nope0', which this host lacks" in last_line(done)
    assert "it has lo" in last_line(done)
    assert done.stdout == ""
