"""``stretto cluster``: what its commands print, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from stretto.cli import main
from stretto.cli._cluster_jobs import _Log
from stretto.cluster import engine_local, processes
from stretto.cluster.folders import Folders
from stretto.cluster.job_files import read_job
from stretto.errors import ClusterError, SpecError
from support.clusters import WAITS, await_file, await_that

if TYPE_CHECKING:
    from collections.abc import Iterator

Run = Any


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a cluster that `stretto cluster start` has started."""
    folder = tmp_path_factory.mktemp("cluster") / "c"
    options = ["--local", "2", "--kind", "cpu", "--report", "0.1"]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "start", *options, "--folder", str(folder)])
    assert not ended.value.code
    yield folder
    folders = Folders(folder)
    rows = engine_local.ask(folders, {"do": "list"})["jobs"]
    for row in rows:
        engine_local.ask(folders, {"do": "stop", "job": row["job"]})
    assert engine_local.down(folders, timeout_s=60.0)


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command; it returns exit code and both outputs."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["cluster", *map(str, words), "--folder", str(root)])
        code = ended.value.code
        assert code is None or isinstance(code, int)
        found = capsys.readouterr()
        return code or 0, found.out, found.err

    return call


def job_file(folder: Path, script: str = "true", **fields: Any) -> Path:
    body = {
        "kind": "job",
        "schema_version": 1,
        "made_by": "test",
        "name": "tiny",
        "role": "foreground",
        "command": ["/bin/sh", "-c", script],
        "launch": "direct",
        "directory": ".",
        "gpus": {"minimum": 1, "maximum": 1},
        "restart": {"attempts": 0, "backoff_s": 0.1, "grace_s": 30.0},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(body | fields))
    return path


def submitted(run: Run, path: Path) -> str:
    code, out, err = run("submit", path)
    assert code == 0, err
    return str(out.strip())


def await_end(run: Run, job: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(json.loads(run("show", job, "--json")[1]))
        return found["state"] in ("done", "failed", "stopped")

    await_that(has_ended, lambda: str(found))
    return found


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["status", "list --all", "events --json", "logs JOB"])
def test_output_on_a_full_disk_ends_with_one_line(
    root: Path, run: Run, tmp_path: Path, words: str
) -> None:
    job = submitted(run, job_file(tmp_path, "echo hello"))
    await_that(lambda: "hello" in run("logs", job)[1], lambda: "it has no log")
    names = words.replace("JOB", job).split()
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "stretto", "cluster", *names, "--folder", str(root)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    why = "the output cannot be written: No space left on device"
    assert (found.returncode, found.stderr) == (1, f"stretto: error: {why}\n")


def test_a_stop_of_a_job_that_has_ended_says_so(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path))
    await_end(run, job)
    assert run("stop", job) == (0, f"{job} has ended already: done\n", "")
    found = json.loads(run("stop", job, "--json")[1])
    assert found == {"stopping": [], "ended": [job]}


def test_an_answer_of_an_earlier_release_is_called_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"jobs": [{"job": "a-1", "state": "running"}]}
    monkeypatch.setattr(engine_local.channel, "request", lambda *_, **__: answers)
    code, _, err = run("list")
    assert code == ClusterError.exit_code
    assert "answer to 'list' has no 'name': it is of an earlier release" in err
    assert "`stretto cluster down`, then `stretto cluster start`" in err


def test_a_relative_folder_begins_at_the_job_file(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path, "pwd"))
    assert await_end(run, job)["directory"] == str(tmp_path)
    assert run("logs", job)[1] == f"{tmp_path}\n"


def test_logs_follow_a_job_to_its_end(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path, "sleep 0.3; echo last"))
    assert run("logs", job, "-f")[1] == "last\n"


def test_logs_follow_a_job_through_its_restarts(run: Run, tmp_path: Path) -> None:
    script = "echo begin; [ -e again ] && exit 0; touch again; printf cut; exit 1"
    restart = {"attempts": 1, "backoff_s": 0.1}
    job = submitted(run, job_file(tmp_path, script, restart=restart))
    rows = [json.loads(row) for row in run("logs", job, "-f", "--json")[1].splitlines()]
    found = [(row["attempt"], row["line"]) for row in rows]
    assert found == [(1, "begin"), (1, "cut"), (2, "begin")]


def test_a_log_is_followed_to_the_end_of_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _Log(tmp_path, 0, 1, is_json=True)
    path, text = tmp_path / "rank0.log", "größe\u2028\n".encode()
    for size in (3, len(text)):  # the first cuts a character
        path.write_bytes(text[:size])
        log.copy(is_last=False)
    assert [
        json.loads(row)["line"] for row in capsys.readouterr().out.split("\n")[:-1]
    ] == ["größe\u2028"]


def test_logs_as_json_name_rank_and_attempt(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path, "echo a; echo b"))
    assert await_end(run, job)["code"] == 0
    lines = [json.loads(line) for line in run("logs", job, "--json")[1].splitlines()]
    assert lines[1] == {"rank": 0, "attempt": 1, "line": "b"}


def test_a_file_nested_too_deep_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    code, _, err = run("submit", tmp_path / "deep.json")
    assert (code, "deep.json" in err) == (2, True)


def test_a_missing_rank_of_a_log_is_named(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path))
    await_end(run, job)
    code, _, err = run("logs", job, "--rank", 3)
    assert (code, "rank 3 of attempt 1 has no log" in err) == (2, True)


def test_show_says_why_a_job_waits(run: Run, tmp_path: Path) -> None:
    gpus = {"minimum": 2, "maximum": 2}
    path = job_file(tmp_path, f"touch ready; {WAITS}", gpus=gpus)
    first = submitted(run, path)
    await_file(tmp_path / "ready")
    second = submitted(run, path)
    assert "plan:       data parallel" in run("show", first)[1]
    assert "waits:      needs 2 devices, 0 are free" in run("show", second)[1]
    assert "waiting" in run("list")[1]
    why = f"{second}: has not started; it is waiting, needs 2 devices, 0 are free"
    code, _, err = run("logs", second)
    assert (code, why in err) == (2, True)
    assert run("stop", first, second)[0] == 0
    assert await_end(run, second)["state"] == "stopped"


def test_show_prints_a_failures_last_lines(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path, "echo what went wrong; exit 4"))
    await_end(run, job)
    out = run("show", job)[1]
    assert "| what went wrong" in out
    assert "exit status: 4" in out


def test_status_lists_hosts_and_devices(run: Run) -> None:
    def is_idle() -> bool:  # a job that another test stopped may still be ending
        jobs = json.loads(run("list", "--json")[1])["jobs"]
        return all(job["state"] in ("done", "failed", "stopped") for job in jobs)

    await_that(is_idle, lambda: run("status")[1])
    found = json.loads(run("status", "--json")[1])
    assert [d["name"] for d in found["hosts"][0]["devices"]] == ["cpu:0", "cpu:1"]
    assert "host0: ready\n  cpu:0: free" in run("status")[1]


def test_events_continue_after_a_number(run: Run, tmp_path: Path) -> None:
    await_end(run, submitted(run, job_file(tmp_path)))
    rows = [json.loads(line) for line in run("events", "--json")[1].splitlines()]
    later = run("events", "--since", rows[-2]["seq"], "--json")[1]
    assert [json.loads(line) for line in later.splitlines()] == rows[-1:]
    assert rows[-1]["kind"] == "done"


def test_a_job_that_can_never_fit_is_exit_code_3(run: Run, tmp_path: Path) -> None:
    path = job_file(tmp_path, gpus={"minimum": 3, "maximum": 3})
    code, _, err = run("submit", path)
    assert (code, "needs 3 devices, the cluster has 2" in err) == (3, True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gpus": {"minimum": -1, "maximum": 1}}, "$.gpus.minimum"),
        ({"directory": "nowhere"}, "$.directory: no such folder: "),
        ({"directory": "a" * 300}, "$.directory: no such folder: "),
        ({"directory": "a\0b"}, "$.directory: must not contain the character NUL"),
        ({"directory": "\ud800"}, "surrogate"),
        ({"directory": "loop"}, "$.directory: no such folder: "),
        ({"launch": "torchrun", "command": ["a" * 300]}, "no such script: "),
        ({"command": ["no-such-program"]}, "'no-such-program' is missing or cannot"),
        ({"launch": "stretto run", "command": ["no.py"]}, "no such script: "),
        ({"launch": "torchrun", "command": ["-m"]}, "names no module after -m"),
        ({"after": ["tiny"]}, "cannot start after itself"),
        ({"after": ["unknown-job"]}, "unknown-job"),
        ({"surprise": 1}, "surprise"),
        ({"burst": {"factory": "no.py:make"}}, "$.burst.factory: no such file"),
        ({"environment": {"RANK": "1"}}, "RANK is set by the cluster"),
    ],
)
def test_a_broken_job_file_is_exit_code_2_and_names_the_place(
    run: Run, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = run("submit", job_file(tmp_path, **fields))
    assert (code, expected in err) == (2, True), err


def test_a_duplicate_key_of_a_job_file_is_named(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    twice = '"minimum": 1, "minimum": 1'
    path.write_text(path.read_text().replace('"minimum": 1', twice))
    with pytest.raises(SpecError, match=r"\$\.gpus\.minimum: is a duplicate key"):
        read_job(path)


def test_another_users_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", Mock(side_effect=PermissionError))  # root may
    with pytest.raises(ClusterError, match="is another user's: give another with"):
        Folders(tmp_path).check_access()


def test_a_refusal_does_not_control_the_terminal(run: Run, tmp_path: Path) -> None:
    _, _, err = run("submit", job_file(tmp_path, directory="\x1b[31m"))
    assert "no such folder" in err
    assert "\x1b" not in err


def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    folder.mkdir()
    with pytest.raises(SpecError, match="its path is not UTF-8"):
        read_job(job_file(folder))


def test_paths_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "ünï").mkdir()
    path = job_file(tmp_path / "ünï")
    code = (
        "import sys; from pathlib import Path\n"
        "from stretto.cluster.job_files import read_job\n"
        "print(ascii(read_job(Path(sys.argv[1])).directory), sys.flags.utf8_mode)"
    )
    strict = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for python, mode in ([sys.executable], 0), (processes.PYTHON, 1):
        found = subprocess.run(
            [*python, "-c", code, path],
            env=os.environ | strict,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        assert found == f"{str(path.parent)!a} {mode}\n"


def test_nothing_is_submitted_if_one_of_several_files_is_broken(
    run: Run, tmp_path: Path
) -> None:
    good = job_file(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    before = run("list", "--all", "--json")[1]
    assert run("submit", good, tmp_path / "bad.json")[0] == 2
    assert run("list", "--all", "--json")[1] == before


def test_what_was_submitted_before_a_refusal_is_printed(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    good = job_file(tmp_path)
    large = job_file(tmp_path / "other", gpus={"minimum": 3, "maximum": 3})
    code, out, _ = run("submit", good, large, "--json")
    assert (code, [row["file"] for row in json.loads(out)["jobs"]]) == (3, [str(good)])


def test_no_job_is_stopped_if_a_name_is_unknown(run: Run, tmp_path: Path) -> None:
    job = submitted(run, job_file(tmp_path, WAITS))
    code, out, err = run("stop", job, "no-such-job")
    assert (code, out, "no-such-job" in err) == (2, "", True)
    kinds = run("events", "--job", job)[1]
    assert "stop-requested" not in kinds
    assert run("stop", job, job)[1] == f"stopping {job}\n"


def test_a_huge_job_file_is_refused(run: Run, tmp_path: Path) -> None:
    path = job_file(tmp_path)
    path.write_text(path.read_text() + " " * (4 << 20))
    code, _, err = run("submit", path)
    assert (code, "a job file has at most 4194304" in err) == (2, True)


def test_an_unknown_host_is_named(run: Run) -> None:
    code, _, err = run("drain", "nowhere")
    assert (code, "nowhere" in err) == (2, True)


def test_without_a_cluster_the_next_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "list", "--folder", str(tmp_path / "none")])
    assert ended.value.code == 1
    assert "run `stretto cluster start`" in capsys.readouterr().err


def test_more_hosts_than_devices_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--local", "1", "--hosts", "2", "--folder", str(tmp_path / "c")]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "start", *options])
    assert ended.value.code == 2
    assert "more hosts than the 1 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--interface", "10.0.0.5"], "give --ray, without an address"),
        (["--ray", "h:1", "--interface", "10.0.0.5"], "give --ray, without an address"),
        (["--insecure"], "give --ray HOST:PORT"),
        (["--ray", "h:1", "--hosts", "2"], "--hosts 2: describes this machine's"),
        (["--ray", "h:1", "--kind", "cpu"], "--kind cpu: describes this machine's"),
    ],
)
def test_an_option_without_effect_is_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "start", *options, "--folder", str(tmp_path / "c")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_jobs_that_need_larger_devices_are_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--folder", str(tmp_path / "c")]

    def call(*words: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["cluster", *words, *options])
        return ended.value.code

    sizes = ["--local", "1", "--kind", "cpu", "--device-memory", "1KiB"]
    assert not call("start", *sizes)
    try:
        assert not call("submit", str(job_file(tmp_path, memory_bytes=1024)))
        assert call("submit", str(job_file(tmp_path, memory_bytes=1025))) == 3
    finally:
        assert not call("down")
    assert "has 0 of that memory" in capsys.readouterr().err


def test_a_watchdog_of_few_heartbeats_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--watchdog", "2", "--folder", str(tmp_path / "c")]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "start", *options])
    assert ended.value.code == 2
    assert "at least five heartbeats" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--network", "--collocation"])
def test_a_cluster_does_not_start_with_a_file_that_is_invalid(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}")
    options = ["--local", "1", "--folder", str(tmp_path / "c")]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "start", *options, option, str(file)])
    assert ended.value.code == 2
    assert f"{file}: $.kind: is missing" in capsys.readouterr().err
