"""Random numbers for samples that all ranks draw equally are listed."""

from __future__ import annotations

import pytest

from support.conversions import STEP, convert, open_notes

HEAD = """\
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

random.seed(1)
np.random.seed(1)
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)

class Points(Dataset):
    rng = None

    def __init__(self, change=None):
        self.x = torch.ones(64, 2)
        self.start = random.random()
        self.change = change

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = self.x[index]
        {line}
        return self.change(x) if self.change else x

{more}
loader = DataLoader({data}, batch_size=16{given})
for epoch in range(2):
    for x in loader:
"""


def drawn(line="pass", more="", data="Points()", given=""):
    """The draws that a conversion lists."""
    text = HEAD.replace("{line}", line).replace("{more}", more)
    text = text.replace("{data}", data).replace("{given}", given)
    said = open_notes(convert(text + STEP))
    return [s.partition("`")[2].partition("`")[0] for s in said if "draws num" in s]


@pytest.mark.parametrize(
    "draw",
    [
        "random.randint(0, 63)",
        "random.choice(self.x)",
        "np.random.randint(64)",
        "torch.randint(64, (1,), generator=self.rng)",
    ],
)
def test_a_draw_in_a_data_set_is_listed(draw):
    assert drawn(f"other = {draw}") == [draw]


@pytest.mark.parametrize(
    "line",
    [
        "other = torch.randint(64, (1,))",
        "random.seed(index)",
        "pass",
        "random.seed(index); other = random.random()",
        "other = np.random.RandomState(index).rand()",
        "rng = np.random.RandomState(index)\n        other = rng.rand()",
    ],
)
def test_what_is_not_equal_on_all_ranks_is_not_listed(line):
    assert drawn(line) == []


def test_a_draw_that_a_method_of_the_data_set_makes_is_listed():
    more = "def other():\n    return random.random()\n"
    assert drawn("other()", more) == ["random.random()"]


def test_workers_have_seeds_of_their_own():
    assert drawn("random.random()", given=", num_workers=2") == []
    assert drawn("random.random()", given=", num_workers=0") == ["random.random()"]


AS_FUNCTION = "def flip(x):\n    return x if random.random() < 0.5 else -x\n"
AS_CLASS = (
    "class Flip:\n    def __call__(self, x):\n"
    "        return x if random.random() < 0.5 else -x\nflip = Flip()\n"
)
AS_LAMBDA = "flip = lambda x: x if random.random() < 0.5 else -x\n"


@pytest.mark.parametrize("flip", [AS_FUNCTION, AS_CLASS, AS_LAMBDA])
def test_a_draw_in_a_transform_is_listed(flip):
    assert drawn(more=flip, data="Points(change=flip)") == ["random.random()"]


def test_a_draw_in_a_composed_transform_is_listed():
    more = AS_CLASS + "from torchvision import transforms\n"
    more += "change = transforms.Compose([Flip()])\n"
    assert drawn(more=more, data="Points(change)") == ["random.random()"]


def test_a_draw_in_collate_fn_is_listed():
    more = (
        "def collate(batch):\n    scale = random.random()\n"
        "    return torch.stack(batch) * scale\n"
    )
    assert drawn(more=more, given=", collate_fn=collate") == ["random.random()"]


def test_a_draw_for_a_loader_that_a_function_makes_is_listed():
    more = "def made():\n    return DataLoader(Points(), batch_size=16)\n"
    text = HEAD.replace("{line}", "random.random()").replace("{more}", more)
    text = text.replace("DataLoader({data}, batch_size=16{given})", "made()")
    said = open_notes(convert(text + STEP))
    assert any("`random.random()` draws numbers" in s for s in said)


def test_a_seeded_generator_of_a_data_set_is_listed():
    more = "RNG = np.random.default_rng(1)\n"
    assert drawn("RNG.random()", more) == ["RNG.random()"]
    assert drawn("RNG.random()", more, given=", num_workers=2") == ["RNG.random()"]
    assert drawn("RNG.random()", "RNG = np.random.default_rng()\n") == []
