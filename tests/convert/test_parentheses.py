"""An expression that is inserted into another one stays whole."""

from __future__ import annotations

import pytest

from stretto.convert import _support
from support.conversions import convert

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

args = [1]
"""
TRAINING = """\
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
for epoch in range(2):
    for (x,) in loader:
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
ON_RANK_0 = "SummaryWriter('a') if RANK == 0 else OnRank0()"


@pytest.mark.parametrize(
    "line",
    [
        "w = SummaryWriter('a') if args else None",
        "SummaryWriter('a').note('start')",
        "w = args or SummaryWriter('a')",
        "w = not SummaryWriter('a')",
        "w = SummaryWriter('a')['part']",
        "w = list(map(str, (*SummaryWriter('a'), 1)))",
        "w = max(*SummaryWriter('a'), 1)",
        "w = lambda: SummaryWriter('a')",
        "w = [SummaryWriter('a') for _ in args]",
        "with SummaryWriter('a') as w: pass",
        "if (w := SummaryWriter('a')): pass",
        "for w in SummaryWriter('a'): pass",
        "w = (SummaryWriter('a')\n     .child)",
    ],
)
def test_a_writer_of_rank_0_has_parentheses_inside_an_expression(line):
    after = convert(f"{HEAD}{line}\n{TRAINING}").after
    assert line.replace("SummaryWriter('a')", f"({ON_RANK_0})") in after


@pytest.mark.parametrize(
    "line",
    [
        "w = SummaryWriter('a')",
        "w: object = SummaryWriter('a')",
        "w = [SummaryWriter('a'), None]",
        "w = {'a': SummaryWriter('a')}",
        "w = dict(a=SummaryWriter('a'))",
        "def make():\n    return SummaryWriter('a')",
        "def make(w=SummaryWriter('a')):\n    return w",
    ],
)
def test_a_writer_that_is_a_whole_value_has_no_parentheses(line):
    after = convert(f"{HEAD}{line}\n{TRAINING}").after
    assert line.replace("SummaryWriter('a')", ON_RANK_0) in after


@pytest.mark.parametrize(
    ("backward", "converted"),
    [
        (
            "torch.autograd.backward(loss + loss)",
            "torch.autograd.backward(((loss + loss) * WORLD_SIZE))",
        ),
        (
            "torch.autograd.backward([loss + loss])",
            "torch.autograd.backward([((loss + loss) * WORLD_SIZE)])",
        ),
    ],
)
def test_all_terms_of_a_summed_loss_are_multiplied(backward, converted):
    script = TRAINING.replace(".mean()", ".sum()").replace("loss.backward()", backward)
    assert converted in convert(HEAD + script).after


def test_what_data_parallel_contained_keeps_its_place_in_an_expression():
    script = TRAINING.replace(
        "model = torch.nn.Linear(2, 1)",
        "nets = [torch.nn.Linear(2, 1)]\n"
        "model = torch.nn.DataParallel(\n    nets[0]\n    if args\n    else nets[-1]\n"
        ").to('cpu')",
    )
    after = convert(HEAD + script).after
    assert "model = (nets[0]\n    if args\n    else nets[-1]).to('cpu')" in after


@pytest.mark.parametrize(
    "use", ["note['a']", "note['a'].child(1)", "list(note)", "note.x['a'] or 1"]
)
def test_a_writer_of_other_ranks_accepts_keys_and_loops(use):
    names: dict[str, object] = {}
    text = _support.text_of("OnRank0", horovod=False, per_rank_batch=False, seeds=())
    exec(text, names)
    exec(f"note = OnRank0()\nnote['a'] = 1\n{use}", names)
