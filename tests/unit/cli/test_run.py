from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import zipfile
from functools import partial

import pytest
from click.testing import CliRunner

from stretto.cli.run import command
from stretto.errors import SpecError, StrettoError
from support.plans import plan_in_turn

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def stretto_run(*arguments, folder=None, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "stretto", "run", *map(str, arguments)],
        env={**environment, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def as_rank_0(*arguments, folder=None):
    return stretto_run(*arguments, folder=folder, RANK="0", WORLD_SIZE="1")


def plain_python(*arguments, folder):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


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


@pytest.mark.parametrize(
    "options",
    [
        ("--nproc-per-node", 2, "--plan", "ddp"),
        ("--plan=ddp", "--nproc-per-node=2"),
        ("--nproc_per_node", 2, "--standalone", "--plan", "ddp"),
        ("--nproc-per", 2, "--plan", "ddp", "--"),
        ("--plan", "ddp", "--", "--nproc-per-node", 2),
    ],
)
def test_stretto_s_options_and_torchrun_s_come_in_any_order(script, options):
    path = script(
        "import os, sys, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "words = [os.environ['STRETTO_PLAN'], *sys.argv[1:]]\n"
        "(here / ('rank' + os.environ['RANK'])).write_text(' '.join(words))\n"
    )
    done = stretto_run(*options, path, "--plan", "theirs", "--", "5")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (path.parent / f"rank{rank}").read_text() == "ddp --plan theirs -- 5"


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


def test_torchrun_options_of_a_background_are_refused_with_their_own_reason(script):
    done = stretto_run("--background", "cpu:0", "--nproc-per-node", 2, script(""))
    assert done.returncode == 2
    assert "with --background the script is one process" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--plan", "none.json", "neither auto, ddp nor a file"),
        ("--trace", "no/such/folder/t.json", "does not exist"),
        ("--save-plan", ".", "is a folder"),
        ("--lane-backend", "pigeon", "--lane-backend must be one of gloo, nccl, local"),
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


MAIN = """
import re, sys
main = sys.modules["__main__"]
assert vars(main) is globals()
own = {n: v for n, v in globals().items() if n.startswith("__")}
own["__builtins__"] = type(own["__builtins__"])
text = re.sub("0x[0-9a-f]+", "", repr(sorted(own.items())))
print(text, sys.argv, sys.path[:2])
"""


@pytest.fixture
def program(tmp_path):
    """Write a program as script, package, module and archive; return its folder."""

    def write(text):
        package = tmp_path / "job"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for path in (tmp_path / "train.py", package / "train.py"):
            path.write_text(text)
        (package / "__main__.py").write_text(text)
        with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
            archive.writestr("__main__.py", text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["job/../train.py"],
        ["train.zip"],
        ["-m", "job"],
        ["-m", "job.train"],
    ],
)
def test_the_main_module_is_that_of_plain_python(program, words):
    folder = program(MAIN)
    expected = plain_python(*words, "--lr", "3", folder=folder)
    done = as_rank_0(*words, "--lr", "3", folder=folder)
    assert done.stdout == expected.stdout != "", done.stderr


AT_THE_END = """
import atexit, os, pickle, sys, threading
from pathlib import Path

class Net: pass

def save(how):
    assert pickle.loads(pickle.dumps(Net())).__class__ is Net
    print(how, sys.argv[1:], flush=True)

def save_late():
    threading.main_thread().join()
    save("thread")

atexit.register(save, "atexit")
threading.Thread(target=save_late).start()
os.chdir("/")
print(Path(__file__).read_text() != "")
"""


@pytest.mark.parametrize("words", [["train.py"], ["-m", "job.train"]])
def test_a_script_s_classes_last_until_the_process_ends(program, words):
    folder = program(AT_THE_END)
    launched = stretto_run("--nproc-per-node", 1, *words, "7", folder=folder)
    for done in (as_rank_0(*words, "7", folder=folder), launched):
        assert done.returncode == 0, done.stderr
        lines = ["True", "thread ['7']", "atexit ['7']"]
        assert done.stdout.splitlines() == lines, done.stderr


FAILING = """
import atexit, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

def save():
    time.sleep(1)
    print("saved", flush=True)

log = open(sys.argv[1], "w")
log.write("not flushed yet")
atexit.register(print, "atexit")
ThreadPoolExecutor().submit(save)

def load():
    raise ValueError("the data end here")

if __name__ == "__main__":
    load()
"""


@pytest.mark.parametrize("words", [["train.py"], ["-m", "job.train"]])
def test_an_error_of_a_script_ends_it_as_plain_python(program, words):
    folder = program(FAILING)
    expected = plain_python(*words, "log", folder=folder)
    assert expected.stdout.splitlines() == ["saved", "atexit"]
    for run in (as_rank_0, partial(stretto_run, "--nproc-per-node", 1)):
        (folder / "log").unlink()
        done = run(*words, "log", folder=folder)
        assert done.returncode == expected.returncode == 1
        assert done.stdout == expected.stdout
        assert expected.stderr in re.sub(r"(?m)^\[rank0\]: ?", "", done.stderr)
        assert (folder / "log").read_text() == "not flushed yet"


def test_an_interrupt_ends_a_script_by_its_signal_as_plain_python(program):
    folder = program(
        "import atexit\natexit.register(print, 1)\nraise KeyboardInterrupt"
    )
    expected = plain_python("train.py", folder=folder)
    done = as_rank_0("train.py", folder=folder)
    assert done.returncode == expected.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == (expected.stdout, expected.stderr)


def test_an_error_in_a_script_s_text_is_shown_as_by_plain_python(program):
    folder = program("x = = 2\n")
    expected = plain_python("train.py", folder=folder)
    done = as_rank_0("train.py", folder=folder)
    assert done.stderr.strip().endswith(expected.stderr.strip())
    assert done.returncode == 1


REFUSED_OPTIONS = (
    (("--nproc-per-node", "x"), "Unsupported nproc_per_node value: x"),
    (("--nproc-per-node", "0"), "--nproc-per-node and --monitor-interval"),
    (("--nnodes", "0"), "min_nodes must be > 0"),
    (("--nnodes", "1:x"), "'x'"),
    (("--max-restarts", "-1"), "max_restarts must be >= 0"),
    (("--redirects", "9"), "9 does not match"),
    (("--rdzv-conf", "x"), "option 'x' must have a value"),
    (("--rdzv-backend", "none"), "'none' is not registered"),
    (("--master-port", "99999"), "must be an integer between"),
    (("--log-dir", "/proc/none", "--redirects", "3"), "/proc/none"),
)


@pytest.fixture
def launcher(monkeypatch):
    """Return a function that runs the command in this process, outside any rank."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STRETTO_PLAN", "auto")  # the command sets it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as does torchrun
    return partial(CliRunner().invoke, command)


REFUSED_PLANS = [
    ("", {}, "plan.json"),
    ('{"kind": "workload", "schema_version": 1, "made_by": "us"}', {}, "kind"),
    (plan_in_turn([["w"]], overlap="halves"), {}, "'halves'"),
    (plan_in_turn([["w"]], algorithm="tree"), {}, "algorithm 'tree'"),
    (plan_in_turn([["w"]]), {"STRETTO_OVERLAP": "forward"}, "made for it"),
]


@pytest.mark.parametrize(("plan", "variables", "reason"), REFUSED_PLANS)
def test_a_plan_that_no_model_can_run_with_is_refused_before_ranks_start(
    plan, variables, reason, script, launcher, monkeypatch, tmp_path
):
    """Each rank started, and reported it for itself."""
    file = tmp_path / "plan.json"
    file.write_text(plan) if isinstance(plan, str) else plan.save(file)
    monkeypatch.setattr("stretto.cli.run._launch", lambda *_, **__: pytest.fail("ran"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = launcher(["--plan", str(file), str(script("print()"))])
    assert isinstance(done.exception, StrettoError), done.exception
    assert reason in str(done.exception)


@pytest.mark.parametrize(("options", "reason"), REFUSED_OPTIONS)
def test_values_that_torchrun_refuses_are_errors_of_one_line(
    options, reason, script, launcher
):
    """A traceback of torchrun's code was shown for each of these."""
    done = launcher([*options, str(script("print()"))])
    assert isinstance(done.exception, SpecError), done.exception
    assert reason in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_port_in_use_is_an_error_of_one_line(script, launcher):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = ("--rdzv-backend", "static", "--master-port", port)
        done = launcher([*options, str(script("print()"))])
    assert isinstance(done.exception, StrettoError), done.exception
    assert "--master-port" in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_script_that_torchrun_would_run_by_its_path_runs(script):
    path = script("print('ran', __name__)")
    done = stretto_run("--standalone", "--run-path", path)
    assert done.returncode == 0, done.stderr
    assert "ran __main__" in done.stdout
