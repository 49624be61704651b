"""Ranks are joined before the first statement that needs them."""

from __future__ import annotations

import pytest

from stretto.convert import Target
from support.conversions import convert

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

data = {data}
"""
SEEDED = HEAD.format(data="TensorDataset(torch.ones(8, 2))") + "torch.manual_seed(0)\n"
TRAINER = """\


class Trainer:
    def __init__(self):
        self.net = torch.nn.Linear(2, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_size=4)

    def fit(self):
        for epoch in range(2):
            for (x,) in self.loader:
                loss = self.net(x).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()


"""


@pytest.mark.parametrize(
    ("calls", "first"),
    [
        ("trainer = Trainer()\nprint('made')\ntrainer.fit()\n", "trainer = Trainer()"),
        ("Trainer().fit()\n", "Trainer().fit()"),
        (
            "def make():\n    return Trainer()\n\n\nt = make()\nt.fit()\n",
            "t = make()",
        ),
        (
            "t = Trainer()\nif __name__ == '__main__':\n    t.fit()\n",
            "t = Trainer()",
        ),
    ],
)
@pytest.mark.parametrize("target", ["stretto", "ddp", "horovod"])
def test_ranks_are_joined_before_a_call_that_makes_the_model(calls, first, target):
    after = convert(SEEDED + TRAINER + calls, target=Target(target)).after
    assert f"\njoin_ranks()\n{first}\n" in after
    assert after.count("\njoin_ranks()") == 1


FUNCTION = """\


def main():
    net = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4)
    for (x,) in loader:
        loss = net(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == '__main__':
    main()
"""


def test_ranks_are_joined_before_a_download_of_the_module():
    after = convert(HEAD.format(data="Digits(download=True)") + FUNCTION).after
    assert "\njoin_ranks()\nseed_equally()\nwith rank0_first():\n    data" in after


def test_ranks_are_joined_before_a_loader_of_a_function():
    source = SEEDED + FUNCTION.replace(
        "    loader = DataLoader(data, batch_size=4)\n", ""
    )
    made = "def loaders():\n    return DataLoader(data, batch_size=4)\n\n\n"
    source = source.replace("def main", f"{made}loader = loaders()\n\n\ndef main")
    after = convert(source).after
    assert after.index("\njoin_ranks()\n") < after.index("\nloader = loaders()\n")


def test_ranks_draw_equal_data_where_the_script_sets_no_seed():
    drawn = HEAD.format(data="TensorDataset(torch.randn(8, 2))")
    after = convert(drawn + FUNCTION).after
    assert "\njoin_ranks()\nseed_equally()\ndata = " in after


def test_data_that_draws_nothing_stays_before_the_entry():
    after = convert(SEEDED + FUNCTION).after
    assert "if __name__ == '__main__':\n    join_ranks()\n    main()\n" in after
