"""Loops over one of several loaders, which a condition chooses."""

from __future__ import annotations

import pytest

from support.conversions import convert, open_notes, refused

HEAD = """\
import itertools
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(8, 2))
large = DataLoader(data, batch_size=4)
small = DataLoader(data, batch_size=2)
for epoch in range(2):
"""
STEP = """\
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


def script(over, before=""):
    return f"{HEAD}{before}    for (x,) in {over}:\n{STEP}"


@pytest.mark.parametrize(
    ("over", "before"),
    [
        ("(small if epoch == 0 else large)", ""),
        ("zip(small if epoch else large)", ""),
        ("(itertools.islice(small, 2) if epoch else large)", ""),
        ("batches", "    batches = iter(small if epoch else large)\n"),
        (
            "batches",
            (
                "    if epoch:\n        batches = iter(small)\n"
                "    else:\n        batches = large\n"
            ),
        ),
        ("batches", "    batches = itertools.islice(small, 2) if epoch else large\n"),
    ],
)
def test_each_loader_of_a_choice_is_divided(over, before):
    conversion = convert(script(over, before))
    for name, size in (("large", 4), ("small", 2)):
        call = f"{name} = DataLoader(data, batch_size=per_rank({size}), sampler="
        assert call in conversion.after
        assert f" {name}.sampler.set_epoch(epoch)\n" in conversion.after
    assert open_notes(conversion) == []


def test_the_epoch_of_one_loader_is_set_once():
    source = script("(itertools.islice(large, 2) if epoch else large)")
    assert convert(source).after.count("large.sampler.set_epoch(epoch)") == 1


def test_a_name_that_is_one_of_two_loaders_stays_the_name():
    source = script("chosen", "").replace(
        "for epoch", "chosen = small if data else large\nfor epoch"
    )
    after = convert(source).after
    assert "small = DataLoader(data, batch_size=per_rank(2)" in after
    assert "    chosen.sampler.set_epoch(epoch)\n    for (x,) in chosen:" in after


@pytest.mark.parametrize(
    ("over", "before"),
    [
        ("((b,) for (b,) in large)", ""),
        ("(large if epoch else [])", ""),
        ("batches", "    batches = ((b,) for (b,) in large)\n"),
    ],
)
def test_what_is_not_understood_is_named_with_a_way_out(over, before):
    said = refused(script(over, before))
    line = 12 if before else 11
    assert said.startswith(f"train.py:{line}: training loops over `{over}`")
    assert "`large` is not understood" in said
    assert "Loop over the DataLoader itself" in said


LOOP = f"for epoch in range(2):\n    for (x,) in loader:\n{STEP}"
PARTS = HEAD.replace("for epoch in range(2):\n", "")


@pytest.mark.parametrize(
    "before",
    [
        (
            "loaders = {'a': DataLoader(data, batch_size=4), 'b': small}\n"
            "loader = loaders['a']\n"
        ),
        (
            "loaders = {'a': DataLoader(data, batch_size=4), 'b': small}\n"
            "loader, test = loaders['a'], loaders['b']\n"
        ),
        (
            "loaders = {k: DataLoader(data, batch_size=4) for k in 'ab'}\n"
            "loader = loaders['a']\n"
        ),
        "loaders = [DataLoader(data, batch_size=4), small]\nloader = loaders[0]\n",
        (
            "loaders = [DataLoader(d, batch_size=4) for d in (data, 2)]\n"
            "loader = loaders[0]\n"
        ),
    ],
)
def test_a_loader_that_is_taken_out_of_a_container_is_divided(before):
    conversion = convert(PARTS + before + LOOP)
    assert "DataLoader(data, batch_size=per_rank(4)" in conversion.after.replace(
        "(d,", "(data,"
    )
    assert "small = DataLoader(data, batch_size=2)" in conversion.after
    assert "    loader.sampler.set_epoch(epoch)\n" in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    "maker",
    [
        "functools.partial(DataLoader, batch_size=4)",
        "lambda d: DataLoader(d, batch_size=4)",
    ],
)
def test_a_loader_of_a_partial_call_is_divided_whatever_its_name(maker):
    source = PARTS + f"make = {maker}\ntrain = make(data)\n" + LOOP
    source = "import functools\n" + source.replace("in loader", "in train")
    conversion = convert(source)
    assert "train = make(data)\ntrain = divided(train)\n" in conversion.after
    assert open_notes(conversion) == []


def test_a_loop_over_what_is_no_known_loader_is_named():
    source = PARTS + (
        "def run(items, opt=None):\n    for (x,) in items:\n"
        "        loss = model(x).mean()\n        if opt:\n            loss.backward()\n"
        "run(fetch(data), opt)\nwith torch.no_grad():\n    run(fetch(data))\n"
    )
    said = refused(source)
    assert "no loop around it is known to take batches from a DataLoader" in said
    assert "iterates over `items`" in said
