"""Passes that do not train count each sample once."""

from __future__ import annotations

import pytest

from support.conversions import convert, open_notes

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sets = {k: TensorDataset(torch.ones(9, 2)) for k in ("train", "val")}
loaders = {k: DataLoader(sets[k], batch_size=4) for k in ("train", "val")}
"""
PHASES = """\
for epoch in range(2):
    for phase in ("train", "val"):
        total = 0.0
        for (x,) in loaders[phase]:
            with torch.set_grad_enabled(phase == "train"):
                loss = model(x).mean()
{step}
            total += loss.item() * len(x)
        print(total / len(sets[phase]))
"""
STEP = """\
{before}
{indent}opt.zero_grad()
{indent}loss.backward()
{indent}opt.step()"""


def phases(before, indent=4):
    lines = STEP.format(before=before, indent=" " * indent).splitlines()
    step = "\n".join(" " * 16 + line for line in lines)
    return convert(HEAD + PHASES.format(step=step))


@pytest.mark.parametrize(
    ("before", "indent", "condition"),
    [
        ('if phase == "train":', 4, 'phase == "train"'),
        ("if model.training and epoch > 0:", 4, "model.training and epoch > 0"),
        ('if phase != "train":\n    continue', 0, 'not (phase != "train")'),
        ('if phase == "val":\n    pass\nelse:', 4, 'not (phase == "val")'),
        ('if phase == "train" and loss > 0:', 4, 'phase == "train"'),
        ("opt.steps = 1\nif opt.used:", 4, "opt.used"),
    ],
)
def test_a_pass_that_does_not_train_gives_each_rank_all_samples(
    before, indent, condition
):
    after = phases(before, indent).after
    assert (
        f"        trains = {condition}\n"
        "        for (x,) in batches_of_pass(loaders[phase], trains):\n"
    ) in after
    reduced = "        if trains:\n            total = sum_over_ranks(total)\n"
    assert reduced in after


@pytest.mark.parametrize(
    "before", ["if loss > 0:", "if True:", "opt.on = x\nif opt.on:"]
)
def test_what_each_step_decides_is_no_condition_of_a_pass(before):
    conversion = phases(before)
    assert "batches_of_pass" not in conversion.after
    assert any("counts a few samples twice" in text for text in open_notes(conversion))


def test_a_number_in_a_step_is_reduced_only_where_a_pass_trains():
    step = '{}if phase == "train":\n{}    loss.backward()\n{}print(loss.item())'
    source = HEAD + PHASES.format(step=step.format(*[" " * 16] * 3))
    want = "print0((mean_over_ranks(loss.item()) if trains else loss.item()))"
    assert want in convert(source).after


LOOP = """\
count = 0
{around}for (x,) in loaders["val"]:
    {indent}count += {value}
print(count)
for epoch in range(2):
    for (x,) in loaders["train"]:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
"""


@pytest.mark.parametrize(
    ("around", "value", "want"),
    [
        ("", "len(x)", "share_of(undivided("),
        ("with torch.no_grad():\n    ", "model(x).sum().item()", "share_of(undivided("),
        ("", "model(x).sum().item()", "in undivided("),
    ],
)
def test_an_evaluation_of_a_divided_loader_takes_each_sample_once(around, value, want):
    indent = "    " if around else ""
    conversion = convert(HEAD + LOOP.format(around=around, indent=indent, value=value))
    assert want in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    ("before", "indent", "whole"),
    [
        ('if phase == "train":', 4, True),
        ('if "train" == phase and epoch > 0:', 4, True),
        ('if phase != "train":\n    continue', 0, True),
        ('if not phase == "val":', 4, True),
        ("if epoch > 0:", 4, False),
        ('if phase != "test":', 4, False),
    ],
)
def test_a_loader_of_passes_that_never_train_stays_whole(before, indent, whole):
    lines = STEP.format(before=before, indent=" " * indent).splitlines()
    step = "\n".join(" " * 16 + line for line in lines)
    source = HEAD.replace(
        HEAD.splitlines()[-1],
        'large = DataLoader(sets["train"], batch_size=4)\n'
        'small = DataLoader(sets["val"], batch_size=3)\n'
        'loaders = {"train": large, "val": small}',
    )
    conversion = convert(source + PHASES.format(step=step))
    assert 'large = DataLoader(sets["train"], batch_size=per_rank(4)' in (
        conversion.after
    )
    small = 'small = DataLoader(sets["val"], batch_size=3)\n'
    assert (small in conversion.after) is whole
    line = ":\n            loaders[phase].sampler.set_epoch(epoch)\n"
    assert (line in conversion.after) is whole
    assert open_notes(conversion) == []
