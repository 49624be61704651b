"""Decisions that ranks may take differently, so that they wait for each other."""

from __future__ import annotations

import pytest

from support.conversions import convert, open_notes

HEAD = """\
import random
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
val = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
loss = torch.tensor(9.0)
"""

STEPS = """\
{start}for (x,) in loader:
{first}    loss = model(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def decisions(source: str) -> list[str]:
    notes = open_notes(convert(HEAD + source))
    return [n for n in notes if "decides on" in n]


def in_epochs(header: str, steps: str, last: str = "") -> str:
    body = steps + last
    return header + "".join(f"    {x}\n" for x in body.splitlines())


PLAIN = STEPS.format(start="", first="")
EPOCHS = "for epoch in range(9):\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (in_epochs(EPOCHS, PLAIN, "if loss < 0.1:\n    break\n"), "loss"),
        (in_epochs("while loss > 0.1:\n", PLAIN), "loss"),
        (in_epochs("while loss.item() > 0.1:\n", PLAIN), "loss"),
        (STEPS.format(start="", first="    if x.sum() < 0:\n        continue\n"), "x"),
        (
            STEPS.format(
                start="", first="    if torch.rand(1) < 0.1:\n        continue\n"
            ),
            "torch.rand(1)",
        ),
        (
            "def train():\n"
            + "".join(f"    {x}\n" for x in PLAIN.splitlines())
            + "        if loss < 0.1:\n            return\ntrain()\n",
            "loss",
        ),
    ],
)
def test_a_decision_that_ends_training_on_one_rank_is_listed(
    source: str, name: str
) -> None:
    (note,) = decisions(source)
    assert f"this decides on `{name}`, which differs by rank" in note


@pytest.mark.parametrize(
    "source",
    [
        in_epochs(EPOCHS, PLAIN, "if loss.item() < 0.1:\n    break\n"),
        in_epochs(EPOCHS, PLAIN, "if epoch > 3:\n    break\n"),
        STEPS.format(
            start="", first="    if random.random() < 0.1:\n        continue\n"
        ),
        STEPS.format(start="", first="    if len(x) < 4:\n        continue\n"),
        STEPS.format(
            start="", first="    n = x.size(0)\n    if n < 4:\n        continue\n"
        ),
        in_epochs(
            EPOCHS,
            PLAIN,
            "for (x,) in val:\n    if model(x).sum() > 3:\n        continue\n"
            "    print(epoch)\n",
        ),
    ],
)
def test_other_decisions_are_not_listed(source: str) -> None:
    assert decisions(source) == []
