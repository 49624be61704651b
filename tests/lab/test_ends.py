"""However a lab ends: the right status, one explanation, and nothing left behind.

The ``lab`` fixture looks for leftovers after every test.
"""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

pytestmark = pytest.mark.lab

# A rank with a child of its own that has left its process group.
FAMILY = "setsid sleep 300 & setsid sleep 300 & echo up; wait"


@pytest.fixture(params=["namespaces", "paced"])
def mode(request):
    if request.param == "namespaces":
        request.getfixturevalue("namespaces")
    return request.param


def bash(text):
    return ["--", "bash", "-c", text]


def test_success_is_0_and_takes_the_rest_of_the_ranks_families_along(lab, mode):
    done = lab.run("--mode", mode, "--hosts", 2, *bash("setsid sleep 300 & echo hello"))
    assert done.returncode == 0
    assert done.stdout == "hello\n"


def test_rank_0_is_streamed_with_its_two_outputs_apart(lab, mode):
    text = "echo out $RANK; echo err $RANK >&2"
    done = lab.run("--mode", mode, "--hosts", 3, *bash(text))
    assert done.stdout == "out 0\n"
    assert "err 0\n" in done.stderr
    assert "err 1" not in done.stderr


@pytest.mark.parametrize(
    ("death", "status", "said"),
    [
        ("exit 7", 7, "exit status 7"),
        ("kill -KILL $$", 137, "SIGKILL"),
        ("kill -SEGV $$", 139, "SIGSEGV"),
    ],
)
def test_the_status_of_the_first_rank_that_fails(lab, mode, death, status, said):
    text = f"if [ $RANK = 1 ]; then echo last words; {death}; fi; sleep 300"
    done = lab.run("--mode", mode, "--hosts", 3, "--grace", 0.2, *bash(text))
    assert done.returncode == status
    assert "rank 1 on host1" in done.stderr
    assert said in done.stderr
    assert "last words" in done.stderr
    assert done.stderr.count("rank ") == 1


def test_the_others_may_say_what_they_saw_before_they_are_stopped(lab, mode, tmp_path):
    text = (
        "if [ $RANK = 1 ]; then exit 4; fi;"
        "sleep 0.5; echo rank 1 is gone; [ $RANK = 0 ] && exit 9; sleep 300"
    )
    logs = tmp_path / "logs"
    done = lab.run(
        *["--mode", mode, "--hosts", 3, "--grace", 2, "--logs", logs], *bash(text)
    )
    assert done.returncode == 4
    assert done.stdout == "rank 1 is gone\n"
    assert (logs / "rank2.log").read_text() == "rank 1 is gone\n"


def test_a_rank_that_ignores_the_request_to_end_is_killed(lab, mode):
    text = "trap '' TERM INT; [ $RANK = 1 ] && exit 5; while :; do sleep 1; done"
    done = lab.run("--mode", mode, "--hosts", 2, "--grace", 0, *bash(text))
    assert done.returncode == 5


def test_the_time_limit_ends_it_with_124(lab, mode):
    done = lab.run("--mode", mode, "--hosts", 2, "--timeout", 0.5, *bash("sleep 300"))
    assert done.returncode == 124
    assert "time limit of 0.5 s" in done.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_a_signal_to_the_command_ends_everything(lab, mode, number, status):
    with lab.start("--mode", mode, "--hosts", 3, *bash(FAMILY)) as process:
        assert process.stdout.readline() == "up\n"
        # stretto, launcher, (supervisor,) and 3 ranks with 2 children each.
        assert lab.wait_for(lambda: len(lab.processes()) >= 11)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == status


def test_a_graceful_signal_reaches_the_ranks(lab, mode, tmp_path):
    text = (
        f"trap 'touch {tmp_path}/saved$RANK; exit 0' INT; touch {tmp_path}/up$RANK;"
        "while :; do sleep 0.1; done"
    )
    with lab.start("--mode", mode, "--hosts", 2, *bash(text)) as process:
        lab.wait_for(lambda: len(list(tmp_path.glob("up*"))) == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


@pytest.mark.parametrize("victim", ["launcher", "supervisor"])
def test_killing_a_process_in_between_leaves_nothing_either(lab, mode, victim):
    if (mode, victim) == ("paced", "supervisor"):
        pytest.skip("the launcher is the supervisor in this mode")
    with lab.start(
        "--mode", mode, "--hosts", 2, *bash("echo up; sleep 300")
    ) as process:
        assert process.stdout.readline() == "up\n"
        ours = sorted(
            pid
            for pid, command in lab.processes().items()
            if "stretto.lab.supervisor" in command
        )
        subprocess.run(["kill", "-9", str(ours[victim == "supervisor"])], check=True)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "supervisor ended" in err


def test_a_reader_that_goes_away_ends_it(lab, mode):
    with lab.start("--mode", mode, "--hosts", 2, *bash("yes")) as process:
        assert process.stdout.readline() == "y\n"
        process.stdout.close()
        assert process.wait(30) == 128 + signal.SIGPIPE
        process.stderr.close()


def test_a_program_that_can_not_be_executed_is_one_error(lab, mode, tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF but not really")
    program.chmod(0o755)
    done = lab.run("--mode", mode, "--hosts", 2, "--", program)
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1
    assert "cannot be started" in done.stderr


def test_a_missing_program_exits_127(lab, mode):
    done = lab.run("--mode", mode, "--hosts", 2, "--", "no-such-program")
    assert done.returncode == 127


def test_logs_are_kept_for_every_rank_and_replaced(lab, mode, tmp_path):
    logs = tmp_path / "deep" / "logs"
    for word in ("first", "second"):
        text = f"echo {word} $RANK; echo more >&2"
        done = lab.run(
            *["--mode", mode, "--hosts", 2, "--ranks-per-host", 2, "--logs", logs],
            *bash(text),
        )
        assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in logs.iterdir())
    assert names == [f"rank{rank}.log" for rank in range(4)]
    for rank in range(4):
        lines = (logs / f"rank{rank}.log").read_text().splitlines()
        assert sorted(lines) == ["more", f"second {rank}"]


def test_the_end_of_a_long_log_is_shown(lab, mode):
    done = lab.run(
        *["--mode", mode, "--hosts", 2, "--grace", 0],
        *bash("[ $RANK = 1 ] || sleep 300; seq 1 1000; exit 3"),
    )
    shown = [line for line in done.stderr.splitlines() if line.startswith("  | ")]
    assert shown == [f"  | {number}" for number in range(981, 1001)]


@pytest.mark.skipif(
    shutil.which("setpriv") is None, reason="setpriv is needed to give up rights"
)
def test_without_permission_there_is_one_error_or_an_announced_fallback(lab):
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    if subprocess.run([*bare, "unshare", "-Urn", "true"], check=False).returncode == 0:
        pytest.skip("here anyone may have namespaces")
    command = ["--hosts", 2, "--flow", "80mbit", *bash("echo $STRETTO_LAB_MODE")]
    strict = lab.run("--mode", "namespaces", *command, prefix=bare)
    assert strict.returncode == 1
    assert strict.stdout == ""
    assert strict.stderr.count("error:") == 1
    assert "--mode paced" in strict.stderr
    auto = lab.run(*command, prefix=bare)
    assert auto.returncode == 0
    assert auto.stdout == "paced\n"
    assert "paced mode" in auto.stderr
    assert "80 Mbit/s" in auto.stderr
