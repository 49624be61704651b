"""What launchers' variables say."""

from __future__ import annotations

import pytest

from stretto.errors import SpecError
from stretto.members.launchers import (
    Launcher,
    first_host,
    launcher_of,
    loss_warning,
    placement_of,
    tasks_of_node,
)

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, Launcher.TORCHRUN),
        (SRUN, Launcher.SRUN),
        (SRUN | {"TORCHELASTIC_RUN_ID": "none"}, Launcher.TORCHRUN),
        ({"RAY_JOB_ID": "01000000", "RANK": "0"}, Launcher.RAY),
        ({"STRETTO_LAB": "1", "TORCHELASTIC_RUN_ID": "lab"}, Launcher.OTHER),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Launcher.OTHER),
    ],
)
def test_launchers_are_distinguished(
    environment: dict[str, str], launcher: Launcher
) -> None:
    assert launcher_of(environment) is launcher


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[001-003,7],big1", "gpu001"),
        ("r[1-2]n[3,5]-ib", "r1n3-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(names: str, first: str) -> None:
    assert first_host(names) == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "any"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        SRUN | {"SLURM_PROCID": "x"},
    ],
)
def test_a_variable_that_is_no_number_is_named(wrong: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=r"must be a whole number|see RANK"):
        placement_of(wrong)


def test_tasks_of_each_node() -> None:
    assert [tasks_of_node("4(x2),1", node) for node in range(4)] == [4, 4, 1, None]
    assert tasks_of_node("", 0) is None


def test_a_batch_script_is_no_task_of_srun() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert placement_of(batch) is None
    assert placement_of(SRUN) is not None
    assert placement_of(SRUN | {"SLURM_NTASKS": "1"}) is None


def test_a_rank_s_variables_come_before_those_of_srun() -> None:
    place = placement_of(SRUN | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert place is not None
    assert (place.rank, place.size, place.local_rank) == (3, 4, 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun ... -m stretto run --elastic"),
        (SRUN, "srun ... stretto run --elastic"),
        ({"RAY_JOB_ID": "1"}, "max_failures=N"),
        ({}, "which the launcher has started. To continue"),
    ],
)
def test_a_warning_says_what_a_loss_does_and_what_to_start_instead(
    environment: dict[str, str], words: str
) -> None:
    assert words in loss_warning(environment, has_snapshots=False)


def test_a_warning_says_where_a_restarted_job_begins() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    assert "from step 0" in loss_warning(torchrun, has_snapshots=False)
    assert "from the newest snapshot" in loss_warning(torchrun, has_snapshots=True)
