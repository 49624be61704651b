"""Paths made of what differs by rank: rank 0's on all ranks, or refused."""

from __future__ import annotations

import pytest

from stretto.convert import Kind, Target
from support.conversions import TRAINING, convert, refused

IMPORTS = """\
import datetime
import os
import tempfile
import time
import uuid
import torch
from torch.utils.data import DataLoader, TensorDataset

"""


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("out = tempfile.mkdtemp()", "of_rank0(lambda: tempfile.mkdtemp())"),
        (
            'out = os.path.join("runs", time.strftime("%H%M"))',
            'of_rank0(lambda: time.strftime("%H%M"))',
        ),
        (
            'out = f"runs/{uuid.uuid4().hex}"\nos.makedirs(out)',
            'f"runs/{of_rank0(lambda: uuid.uuid4()).hex}"',
        ),
        (
            "now = datetime.datetime.now()\nos.makedirs('runs/' + now.strftime('%H'))",
            "now = of_rank0(lambda: datetime.datetime.now())",
        ),
        (
            'def name(t):\n    return os.path.join("a", str(t))\n\nname(time.time())',
            "name(of_rank0(lambda: time.time()))",
        ),
    ],
)
def test_a_path_is_made_of_rank_0s_value(line, becomes):
    source = f"{IMPORTS}{line}\n{TRAINING}"
    after = convert(source).after
    assert becomes in after
    assert "dist.broadcast_object_list(held, src=0)" in after
    horovod = convert(source, target=Target.HOROVOD).after
    assert "held = hvd.broadcast_object(held, root_rank=0)" in horovod
    compile(after, "train.py", "exec")


@pytest.mark.parametrize(
    "line",
    [
        "start = time.time()\nprint(time.time() - start)",
        'print(f"begun {datetime.datetime.now()}")',
        "torch.save(torch.ones(1), f'{time.time()}.pt')",
        "seconds = time.time() - 5\nos.makedirs('runs')",
    ],
)
def test_a_time_that_names_no_path_stays(line):
    assert "of_rank0" not in convert(f"{IMPORTS}{line}\n{TRAINING}").after


def test_a_temporary_folder_is_one_for_all_ranks():
    body = TRAINING.replace("\n", "\n    ").rstrip()
    source = f"{IMPORTS}with tempfile.TemporaryDirectory() as tmp:\n    {body}\n"
    after = convert(source).after
    assert (
        "with folder_of_rank0(lambda: tempfile.TemporaryDirectory()) as tmp:" in after
    )
    kept = f"{IMPORTS}tmp = tempfile.TemporaryDirectory()\n{TRAINING}"
    assert refused(kept).startswith("train.py:9: TemporaryDirectory()")


def test_a_temporary_file_is_refused_with_its_line():
    line = "with tempfile.NamedTemporaryFile() as f:\n    pass\n"
    said = refused(f"{IMPORTS}{line}{TRAINING}")
    assert said.startswith("train.py:9: tempfile.NamedTemporaryFile()")


def test_a_path_made_before_the_ranks_are_joined_is_refused():
    body = "def main():\n    " + TRAINING.replace("\n", "\n    ").rstrip()
    start = '\n\n\nif __name__ == "__main__":\n    main()\n'
    line = "OUT = tempfile.mkdtemp()\n\n\n"
    said = refused(f"{IMPORTS}{line}{body}{start}")
    assert said.startswith("train.py:9: ")
    assert "joined only after this line" in said
    inside = body.replace("def main():\n", f"def main():\n    {line.rstrip()}\n")
    assert "of_rank0(lambda: " in convert(f"{IMPORTS}{inside}{start}").after


def test_a_path_named_in_a_step_is_listed():
    step = "        os.makedirs(f'runs/{uuid.uuid4()}')\n"
    folder = (
        "        out = f'runs/{uuid.uuid4()}'\n        y = os.path.join(out, 'a')\n"
    )
    conversion = convert(f"{IMPORTS}{TRAINING}{folder}")
    said = [str(n) for n in conversion.notes if n.kind is Kind.OPEN]
    assert any("make it once, before the loops" in s for s in said)
    assert "of_rank0" not in convert(f"{IMPORTS}{TRAINING}{step}").after


def test_a_name_set_in_a_look_for_a_file_is_listed():
    look = "if os.path.exists(path := 'a.pt'):\n    torch.load(path)\n"
    source = f"{IMPORTS}{look}{TRAINING}torch.save(model, 'a.pt')\n"
    conversion = convert(source)
    assert "if os.path.exists(path := 'a.pt'):" in conversion.after
    said = [n.text for n in conversion.notes if n.kind is Kind.OPEN]
    assert ["each rank looks for this file by itself" in text for text in said] == [
        True
    ]


def test_a_name_set_in_a_path_of_rank_0_is_refused():
    line = "out = tempfile.mkdtemp(dir=(base := '.'))\nprint(base)\n"
    assert "Set the name in a line before" in refused(f"{IMPORTS}{line}{TRAINING}")
