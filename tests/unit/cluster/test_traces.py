"""Importers of traces, on samples of our own making."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest
from click.testing import CliRunner

from stretto.cli._main import group
from stretto.cluster.replay import ReplayOptions, replay
from stretto.cluster.traces import load_trace
from stretto.errors import SpecError

SPOT = """job_name,job_type,gpu_request,worker_num,submit_time,duration
a,HP,2,2,100,50
b,Spot,1,1,90,30
c,HP,0,1,95,30
"""
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,"
    "duration,queue\n"
    "1,u,v,8,8,1,COMPLETED,2020-09-01 00:00:10,x,y,3600,5\n"
    "2,u,v,0,8,1,COMPLETED,2020-09-01 00:00:00,x,y,3600,5\n"
    "3,u,v,1,8,1,FAILED,2020-09-01 00:00:00,x,y,60,5\n"
)
PAI = (
    "j1,worker,2,Terminated,1000,1600,600,29,50,V100\n"
    "j1,ps,1,Terminated,990,1500,,,25,T4\n"
    "j2,w,1,Running,5,,,,100,T4\n"
)
PHILLY = json.dumps(
    [
        {
            "status": "Pass",
            "vc": "v",
            "jobid": "1",
            "submitted_time": "2017-10-03 09:00:00",
            "attempts": [
                {
                    "start_time": "2017-10-03 09:10:00",
                    "end_time": "2017-10-03 10:10:00",
                    "detail": [
                        {"ip": "m1", "gpus": ["gpu0", "gpu1"]},
                        {"ip": "m2", "gpus": ["gpu0"]},
                    ],
                },
                {"start_time": "2017-10-03 10:20:00", "end_time": "None", "detail": []},
            ],
        },
        {"submitted_time": "2017-10-03 08:00:00", "attempts": []},
    ]
)


def rows(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    trace = load_trace(path)
    found = [(j.submit_s, j.gpus, j.duration_s, j.role) for j in trace.jobs]
    return trace.format, found, trace.skipped


def test_spot_jobs_are_backgrounds(tmp_path):
    assert rows(tmp_path, SPOT) == (
        "spot-gpu",
        [(0, 1, 30, "background"), (10, 4, 50, "foreground")],
        1,
    )


def test_helios(tmp_path):
    assert rows(tmp_path, HELIOS) == (
        "helios",
        [(0, 1, 60, None), (10, 8, 3600, None)],
        1,
    )


def test_pai_tasks_of_a_job_are_one_job_and_gpus_are_in_per_cent(tmp_path):
    assert rows(tmp_path, PAI) == ("pai", [(0, 2, 610, None)], 1)


def test_philly_takes_the_last_attempt_with_both_times(tmp_path):
    assert rows(tmp_path, PHILLY) == ("philly", [(0, 3, 3600, None)], 1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a,b\n1,2\n", "unknown kind of trace"),
        ("", "is empty"),
        ("[1]", r"\$\[0\]"),
        ("[", "is not JSON"),
        ('{"kind": "job", "name": "a"}', "is a file of kind 'job', and no trace"),
        ('{"jobs": []}', "is a JSON object, and no trace"),
        ('[{"attempts": [], "attempts": []}]', r"\$\[0\].attempts: is a duplicate key"),
        (PHILLY.replace('["gpu0"]', '"gpu0"'), r"\$\[0\]: is not a job of Philly's"),
        (SPOT.replace("job_name", "duration"), "line 1: column 'duration' is a dup"),
        (SPOT.replace("HP,2,2", "HP,x,2,2"), "line 2: has more fields than there are"),
        (SPOT.replace("HP,2,2", "HP,-2,-2"), "line 2: gpu_request must be >= 0"),
        (SPOT.replace("HP,2", "VIP,2"), "line 2: job_type must be HP or Spot"),
        (SPOT.replace("100,50", "nan,50"), "line 2: submit_time must be seconds"),
        (SPOT.replace("HP,2", "HP,x"), "line 2: gpu_request must be a finite number"),
        (SPOT + "d\n", "line 5: job_type must be HP or Spot"),
        (SPOT.replace("a,HP", "a" * 200_000 + ",HP"), "line 2: field larger"),
        (SPOT.replace("HP,2,2", "HP,1e200,1e200"), "line 2: a job with inf GPUs"),
        (SPOT.replace("100,50", "100,1e308"), "line 2: a job submitted at 100 s that"),
        (PAI.replace("600,29,50", "600,29,1e300"), "j1: a job with 2e.298 GPUs"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"submitted_time": 1}]', r"\$\[0\]: lacks 'attempts'"),
        (SPOT.splitlines()[0] + "\n", "has no job"),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(tmp_path, text, error):
    with pytest.raises(SpecError, match=error):
        rows(tmp_path, text)


@pytest.mark.parametrize("missing", ["", "None"])
def test_a_job_without_a_time_of_submission_is_skipped(tmp_path, missing):
    # As a time it would be 1970, and all others decades later.
    text = HELIOS.replace("2020-09-01 00:00:10", missing)
    assert rows(tmp_path, text) == ("helios", [(0, 1, 60, None)], 2)


def test_a_date_may_have_an_offset_of_its_time_zone(tmp_path):
    text = HELIOS.replace("2020-09-01 00:00:10", "2020-09-01 02:00:20+02:00")
    assert rows(tmp_path, text)[1][1][0] == 20


def test_a_field_may_hold_a_line_separator(tmp_path):
    text = HELIOS.replace("1,u,v,", "1,u\u2028,v,")
    assert len(rows(tmp_path, text)[1]) == 2


def test_a_trace_is_simulated_and_its_page_needs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trace, page = tmp_path / "t.csv", tmp_path / "page.html"
    trace.write_text(SPOT)
    arguments = ["cluster", "simulate", str(trace), "--gpus", "2", "--policy"]
    result = CliRunner().invoke(
        group, [*arguments, "fifo,partition", "--report", str(page), "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [row["policy"] for row in found["policies"]] == ["fifo", "partition"]
    for row in found["policies"]:
        hours = row["gpu_hours"]
        parts = hours["foreground"] + hours["background_alone"] + hours["unused"]
        assert parts == pytest.approx(hours["all"])
    text = page.read_text()
    assert "partition" in text
    assert "names no models" in text
    assert "http" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize("pack", [gzip, bz2, lzma])
def test_a_compressed_trace_is_to_be_unpacked(tmp_path, pack):
    path = tmp_path / "trace.csv"
    path.write_bytes(pack.compress(SPOT.encode()))
    with pytest.raises(SpecError, match=r"compressed with \w+: unpack it first"):
        load_trace(path)


def test_jobs_that_a_policy_never_starts_are_counted(tmp_path, monkeypatch):
    # Half of four devices are the foregrounds'.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "t.csv").write_text(SPOT.replace("HP,2,2", "HP,2,1") + "d,HP,1,3,0,9\n")
    trace = load_trace(tmp_path / "t.csv")
    found = replay(trace, ["fifo", "partition"], ReplayOptions(gpus=4))
    (line,) = (text for text in found["assumed"] if "never start" in text)
    assert "under partition" in line
    assert line.endswith(": 1.")


def test_a_file_that_cannot_be_read_is_named_once(tmp_path):
    with pytest.raises(SpecError, match=r"^\S+: cannot be read: No such file or dir"):
        load_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load_trace(tmp_path / "binary.csv")
