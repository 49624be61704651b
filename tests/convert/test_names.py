"""Converted scripts define every name that they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.convert import (
    Choices,
    Evaluation,
    Target,
    convert_source,
    script_of_notebook,
)
from stretto.convert import _reading as reading
from stretto.convert import _support as support
from stretto.errors import SpecError, StrettoError
from support.conversions import TRAINING, convert, open_notes

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.[pi]*"))
IMPORTS = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("print(x)", {"x"}),
        ("def f():\n    return x", {"x"}),
        ("class A:\n    x = 1\n    def f(self):\n        return x", {"x"}),
        ("def f():\n    global x\n    x = 1\nprint(x)", set()),
        ("from os import path as x\nprint(x, __file__)", set()),
        ("[x for x in range(3)]", set()),
        ("with x() as y:\n    y()", {"x"}),
        ("await x()", {"x"}),
    ],
)
def test_names_that_nothing_defines(source, names):
    assert reading.undefined(source, "train.py") == names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "choices",
    [
        Choices(),
        Choices(target=Target.DDP, evaluation=Evaluation.RANK0),
        Choices(target=Target.HOROVOD, per_rank_batch=True),
    ],
    ids=lambda c: c.target.value,
)
def test_every_name_of_a_converted_script_is_defined(path, choices):
    source = path.read_text()
    if path.suffix == ".ipynb":
        source = script_of_notebook(source, name=path.name)
    try:
        after = convert_source(source, name=path.name, choices=choices).after
    except SpecError:
        pytest.skip("its form is not supported for this target")
    assert reading.undefined(after, path.name) <= {"get_ipython"}


@pytest.mark.parametrize("name", [n for n in support.order() if n != "join_ranks"])
@pytest.mark.parametrize("horovod", [False, True])
def test_what_a_generated_function_reads_is_listed_as_its_need(name, horovod):
    text = support.text_of(
        name, horovod=horovod, per_rank_batch=False, seeds=("torch.manual_seed(seed)",)
    )
    needs = {*support.NEEDS.get(name, ()), *support.NAMES, "os", "torch", "hvd"}
    needs |= {"per_rank"} if name == "divided" else set()
    assert reading.undefined(text, name) <= needs


def test_a_function_that_is_not_inserted_is_an_internal_error(monkeypatch):
    monkeypatch.setattr(support, "order", lambda: ["join_ranks", "per_rank"])
    with pytest.raises(
        StrettoError, match="uses print0, seed_equally without a definition"
    ):
        convert_source(
            IMPORTS + TRAINING + "    print(epoch)\n",
            name="train.py",
            choices=Choices(),
        )


def test_a_data_set_named_after_a_dataloader_has_a_plain_name():
    text = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
    text += TRAINING.replace("loader =", "train_dataloader =")
    after = convert(text.replace("in loader:", "in train_dataloader:")).after
    assert "train_dataset = TensorDataset(torch.ones(8, 2))\n" in after


def test_the_progress_of_a_bar_is_not_listed():
    text = "import torch\nfrom tqdm import tqdm\n"
    text += "from torch.utils.data import DataLoader, TensorDataset\n"
    text += "bar = tqdm(total=16)\n" + TRAINING + "        bar.update(x.shape[0])\n"
    assert not [note for note in open_notes(convert(text)) if "bar" in note]
