"""No rank uses a folder before it exists."""

from __future__ import annotations

import pytest

from support.conversions import TRAINING, convert

HEAD = """\
import os
import shutil
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
out = "runs"
"""


def lines_of(text, after=""):
    """The lines of a conversion that concern folders."""
    made = convert(HEAD + text + TRAINING + after).after.splitlines()
    return [x for x in made if "mkdir" in x or "makedirs" in x or "barrier" in x]


@pytest.mark.parametrize(
    ("made", "becomes"),
    [
        ("os.makedirs(out)", "os.makedirs(out, exist_ok=True)"),
        ("os.mkdir(out)", "os.makedirs(out, exist_ok=True)"),
        ("os.makedirs(out, exist_ok=True)", "os.makedirs(out, exist_ok=True)"),
    ],
)
@pytest.mark.parametrize("check", ["os.path.exists", "os.path.isdir"])
def test_a_folder_that_a_branch_makes_is_made_by_all(made, becomes, check):
    text = f"if not {check}(out):\n    {made}\n"
    assert lines_of(text) == [f"    {becomes}"]


def test_a_folder_of_a_path_object_is_made_by_all():
    text = "path = Path(out)\nif not path.exists():\n    path.mkdir(parents=True)\n"
    assert lines_of(text) == ["    path.mkdir(parents=True, exist_ok=True)"]


def test_a_folder_that_may_exist_is_made_by_all():
    assert lines_of("os.makedirs(out, exist_ok=True)\n") == [
        "os.makedirs(out, exist_ok=True)"
    ]


@pytest.mark.parametrize("error", ["FileExistsError", "OSError", "OSError as e"])
def test_a_folder_whose_error_is_passed_over_is_made_by_all(error):
    text = f"try:\n    os.makedirs(out)\nexcept {error}:\n    pass\n"
    assert lines_of(text) == ["    os.makedirs(out, exist_ok=True)"]


def test_ranks_wait_for_a_folder_that_must_be_new():
    assert lines_of("os.makedirs(out)\n") == ["    os.makedirs(out)", "dist.barrier()"]


def test_ranks_wait_for_a_folder_that_is_removed_before():
    text = "if os.path.exists(out):\n    shutil.rmtree(out)\n"
    text += "os.makedirs(out, exist_ok=True)\n"
    assert lines_of(text)[-2:] == [
        "    os.makedirs(out, exist_ok=True)",
        "dist.barrier()",
    ]


def test_only_rank_0_makes_a_folder_for_each_epoch():
    after = "        os.makedirs(f'{out}/{epoch}', exist_ok=True)\n"
    made = convert(HEAD + TRAINING + after).after
    assert "if RANK == 0:\n            os.makedirs(f'{out}/{epoch}', exist" in made
