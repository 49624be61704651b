"""A refusal names another option only where that accepts the script."""

from __future__ import annotations

import pytest

from stretto.convert import Target
from support.conversions import convert, refused

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x):
        return self.layer(x)
    def loss(self, x):
        return self.layer(x).mean()

net = Net()
free = torch.zeros(2, requires_grad=True)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
"""
OPT = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
STEP = """\
for epoch in range(2):
    for (x,) in loader:
        opt.zero_grad()
        {loss}.backward()
{between}        opt.step()
"""
CLIP = "        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"


def script(loss, *, opt=OPT, between=""):
    return HEAD + opt + STEP.format(loss=loss, between=between)


FREE = "opt = torch.optim.SGD([*net.parameters(), free], lr=0.1)\n"
CASES = [
    ("net.loss(x)", OPT),
    ("net.layer(x).mean()", OPT),
    ("(net(x).mean() + free.sum())", FREE),
    (
        "torch.func.functional_call(net, dict(net.named_parameters()), (x,)).mean()",
        OPT,
    ),
]


@pytest.mark.parametrize(("loss", "opt"), CASES)
def test_horovod_is_named_where_it_accepts_the_script(loss, opt):
    source = script(loss, opt=opt)
    assert refused(source).endswith(", or use --to horovod")
    convert(source, target=Target.HOROVOD)


@pytest.mark.parametrize(("loss", "opt"), CASES)
@pytest.mark.parametrize("target", [Target.STRETTO, Target.DDP])
def test_horovod_is_not_named_where_it_refuses_the_script(loss, opt, target):
    source = script(loss, opt=opt, between=CLIP)
    assert "horovod" not in refused(source, target=target)
    assert "--to stretto refuses it, too: line " in refused(
        source, target=Target.HOROVOD
    )


def test_horovods_refusal_says_why_stretto_refuses_it_too():
    said = refused(script("net.loss(x)", between=CLIP), target=Target.HOROVOD)
    assert "has not averaged them yet. --to stretto refuses it, too: line 13: " in said
    assert said.endswith("for the exchange. Call the model itself in training")


def test_horovods_refusal_names_stretto_where_it_accepts_the_script():
    source = script("net(x).mean()", between=CLIP)
    assert refused(source, target=Target.HOROVOD).endswith("Use --to stretto")
    convert(source)


@pytest.mark.parametrize("fine", [True, False])
def test_a_batch_for_each_rank_is_named_where_it_accepts_the_script(fine):
    source = script("net(x).mean()" if fine else "net.loss(x)")
    source = source.replace("batch_size=4", "batch_size=1")
    if fine:
        assert "or convert with --per-rank" in refused(source)
        convert(source, per_rank_batch=True)
    else:
        assert "--per-rank" not in refused(source)
