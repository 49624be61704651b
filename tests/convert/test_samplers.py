"""Samplers that draw what ``shuffle`` draws, and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from stretto.convert import _support
from support.conversions import convert, open_notes, refused

SCRIPT = """\
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

data = TensorDataset(torch.ones(8, 2))
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
for epoch in range(2):
    for (x,) in loader:
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


@pytest.mark.parametrize(
    ("sampler", "shuffle"),
    [
        ("RandomSampler(data)", True),
        ("SequentialSampler(data)", False),
        ("RandomSampler(data_source=data)", True),
        ("torch.utils.data.RandomSampler(data, replacement=False)", True),
        ("RandomSampler(data, num_samples=len(data))", True),
        ("RandomSampler(data, False, None, None)", True),
    ],
)
@pytest.mark.parametrize("before", ["", "sampler = {0}\n"])
def test_a_plain_sampler_is_what_shuffle_draws(before, sampler, shuffle):
    given = "sampler" if before else sampler
    made = f"loader = DataLoader(data, sampler={given}, batch_size=4)"
    conversion = convert(SCRIPT.format(before=before.format(sampler) + made))
    drawn = f"sampler=DistributedSampler(data, shuffle={shuffle})"
    expected = f"loader = DataLoader(data, {drawn}, batch_size=per_rank(4))"
    assert expected in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    "made",
    [
        "DataLoader(data, sampler=RandomSampler(data, replacement=True), batch_size=4)",
        "DataLoader(data, sampler=RandomSampler(data, num_samples=4), batch_size=4)",
        "DataLoader(data, sampler=RandomSampler(data, True), batch_size=4)",
        "DataLoader(data, sampler=RandomSampler(data, generator=g), batch_size=4)",
        "DataLoader(data, sampler=RandomSampler(data[:4]), batch_size=4)",
        "DataLoader(data, sampler=SequentialSampler(other), batch_size=4)",
        "DataLoader(data, sampler=choose(data), batch_size=4)",
        "DataLoader(data, 4, False, RandomSampler(other))",
        "DataLoader(data, batch_sampler=RandomSampler(data))",
        "DataLoader(data, 4, shuffle=not g, sampler=RandomSampler(data))",
    ],
)
def test_another_sampler_is_refused(made):
    said = refused(SCRIPT.format(before=f"g = None\nother = data\nloader = {made}"))
    assert "the training loader has its own " in said


def test_a_sampler_of_data_that_has_changed_is_refused():
    before = (
        "sampler = RandomSampler(data)\n"
        "data = torch.utils.data.Subset(data, range(16))\n"
        "loader = DataLoader(data, sampler=sampler, batch_size=4)"
    )
    assert "the training loader has its own sampler" in refused(
        SCRIPT.format(before=before)
    )


@pytest.mark.parametrize("more", ["replacement=True", "num_samples=4"])
def test_such_a_sampler_of_a_function_is_refused(more):
    before = (
        "def make(data):\n    return DataLoader(\n"
        f"        data, batch_size=4, sampler=RandomSampler(data, {more}))\n"
        "loader = make(data)"
    )
    assert "the training loader has its own sampler" in refused(
        SCRIPT.format(before=before)
    )


class Backwards(RandomSampler):
    def __iter__(self):
        return iter(range(len(self) - 1, -1, -1))


@pytest.mark.parametrize(
    ("sampler", "error"),
    [
        (RandomSampler(range(8), replacement=True), ValueError),
        (RandomSampler(range(8), num_samples=4), ValueError),
        (SequentialSampler(range(4)), ValueError),
        (Backwards(range(8)), TypeError),
    ],
)
def test_the_running_script_does_not_divide_such_a_loader(sampler, error):
    names: dict[str, Any] = {"WORLD_SIZE": 2, "RANK": 1, "torch": torch}
    exec("from torch.utils.data import *", names)
    text = _support.text_of("divided", horovod=False, per_rank_batch=False, seeds=())
    exec(text, names)
    loader = DataLoader(range(8), batch_size=4, sampler=sampler)
    with pytest.raises(error, match="cannot divide"):
        names["divided"](loader)
