"""What `stretto run --elastic` accepts and refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stretto.cli._elastic import elastic_job, parse_arguments, parse_limits
from stretto.cli._rank_options import check_options
from stretto.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = __file__


@pytest.mark.parametrize("text", ["4", "0:2", "3:2", "a:b", ":", "2:"])
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--elastic"):
        parse_limits(text)


def test_limits_are_the_least_and_the_most_ranks() -> None:
    assert parse_limits("2:8") == (2, 8)


def test_a_number_of_ranks_may_be_given() -> None:
    given = parse_arguments(("--nproc-per-node", "4", SCRIPT, "--x"))
    assert (given.ranks, given.script) == (4, (SCRIPT, "--x"))
    assert elastic_job("1:8", given, {}).ranks == 4
    assert elastic_job("1:8", parse_arguments((SCRIPT,)), {}).ranks == 8


def test_other_options_of_torchrun_are_refused() -> None:
    with pytest.raises(SpecError, match="--max-restarts"):
        parse_arguments(("--max-restarts=2", SCRIPT))


def test_hosts_meet_where_torchrun_would() -> None:
    options = "--nnodes=3 --node_rank 1 --master-addr a --master-port 7 --rdzv-id j"
    given = parse_arguments((*options.split(), "--nproc-per-node=2", SCRIPT))
    point = elastic_job("1:8", given, {}).meeting
    assert point is not None
    assert (point.host, point.port, point.nodes) == ("a", 7, 3)
    assert (point.node, point.job) == (1, "j")


def test_an_endpoint_is_an_address_and_a_port() -> None:
    given = parse_arguments(
        ("--nnodes=2", "--rdzv-endpoint=[fe::1]:71", "--nproc-per-node=2", SCRIPT)
    )
    point = elastic_job("1:8", given, {}).meeting
    assert point is not None
    assert (point.host, point.port, point.node) == ("fe::1", 71, None)


def test_a_launcher_with_one_rank_per_host_says_which_host_this_is() -> None:
    environment = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
    }
    given = parse_arguments(("--nproc-per-node=2", SCRIPT))
    point = elastic_job("1:8", given, environment).meeting
    assert point is not None
    assert (point.host, point.port, point.nodes, point.node) == ("h", 9, 4, 2)


def test_each_process_of_a_launcher_starts_one_rank_where_they_share_a_host() -> None:
    environment = {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    job = elastic_job("1:8", parse_arguments((SCRIPT,)), environment)
    assert (job.ranks, job.local_rank, job.local_size) == (1, 2, 4)
    assert job.meeting is not None
    assert (job.meeting.nodes, job.meeting.node, job.meeting.port) == (8, 6, 10)


def test_a_number_of_ranks_that_a_launcher_has_started_already_is_refused() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(SpecError, match="one process per host"):
        elastic_job("1:8", parse_arguments(("--nproc-per-node=2", SCRIPT)), environment)


def test_tasks_of_srun_meet_at_the_step_s_first_node() -> None:
    environment = {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[007-008]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    job = elastic_job("1:8", parse_arguments((SCRIPT,)), environment)
    assert (job.ranks, job.local_rank, job.local_size) == (1, 1, 4)
    point = job.meeting
    assert point is not None
    assert (point.host, point.nodes, point.node) == ("gpu007", 8, 5)
    assert point.job == "slurm-123456.0"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--nnodes=2", "--master-addr=a"], "--nproc-per-node"),
        (["--nnodes=2", "--nproc-per-node=2"], "--master-addr"),
        (
            ["--nnodes=2", "--node-rank=2", "--master-addr=a", "--nproc-per-node=2"],
            "must be below --nnodes, which is 2, got 2",
        ),
        (["--nnodes=x", "--nproc-per-node=2"], "--nnodes must be a number"),
        (
            ["--nnodes=2", "--rdzv-endpoint=a:70000", "--nproc-per-node=2"],
            "the port of --rdzv-endpoint must be 1 to 65535, got 70000",
        ),
        (["--nproc-per-node=9"], "not within"),
        (["--rdzv-backend=etcd", "--master-addr=a", "--nproc-per-node=1"], "static"),
    ],
)
def test_invalid_options_about_hosts_are_refused(options: list[str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        elastic_job("1:8", parse_arguments((*options, SCRIPT)), {})


def test_options_of_ranks_are_checked_before_ranks_start(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    row = [sys.executable, "-m", "stretto", "run", "--elastic", "1:1", "--plan"]
    done = subprocess.run(
        [*row, plan, SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"stretto: error: {plan}: $.kind: is missing\n"


def test_a_backend_of_lanes_is_checked_too() -> None:
    check_options("auto", "local", "")
    with pytest.raises(SpecError, match="must be one of gloo, nccl, local"):
        check_options("auto", "pigeon", "")


def test_a_keeper_loads_no_torch_to_read_its_options() -> None:
    code = (
        "import sys; from stretto.cli.run import command; "
        "context = command.make_context('run', sys.argv[1:]); "
        "assert context.params['elastic'] == '1:8', context.params; "
        "assert 'torch' not in sys.modules"
    )
    options = "--nnodes 2 --elastic 1:8 --node-rank=1 --nproc-per-node 2 --rdzv-id a"
    row = [sys.executable, "-c", code, *options.split(), SCRIPT, "--x"]
    subprocess.run(row, check=True)
