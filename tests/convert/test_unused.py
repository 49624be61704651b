"""Models of which a step leaves parameters without a gradient."""

from __future__ import annotations

import textwrap

import pytest

from stretto.convert import Choices, Kind, convert_source
from support.conversions import STEP, convert

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nets import Other


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.one = nn.Linear(4, 1)
        self.two = nn.Linear(4, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, flag=None):
{forward}


net = Net()
opt = torch.optim.Adam(net.parameters())
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
for epoch in range(2):
    state = None
    for (x,) in loader:
        opt.zero_grad()
{step}
        opt.step()
"""
HEADS = """\
h = self.body(x).relu()
return self.one(h), self.two(h)
"""
BOTH = "return self.two(self.one(self.body(x)))"
MEAN = "loss = net(x).mean()\nloss.backward()"
ADVERSARIAL = """\
valid, _ = net(x)
one_loss = valid.mean()
one_loss.backward()
_, label = net(x)
two_loss = label.mean()
two_loss.backward()
"""
SAME_NAME = """\
a, b = net(x)
loss = a.mean()
loss.backward()
a, b = net(x)
loss = b.mean()
loss.backward()
"""


def script(forward, step):
    return SCRIPT.format(
        forward=textwrap.indent(forward, " " * 8), step=textwrap.indent(step, " " * 8)
    )


def looks(source):
    conversion = convert_source(source, name="train.py", choices=Choices())
    said = [n for n in conversion.notes if "without a gradient" in str(n)]
    assert all(n.kind is Kind.KNOW for n in said)
    assert bool(said) == ("find_unused_parameters=True)" in conversion.after)
    return bool(said)


@pytest.mark.parametrize(
    ("forward", "step"),
    [
        (HEADS, ADVERSARIAL),
        (HEADS, SAME_NAME),
        (HEADS, "a, _ = net(x)\na.mean().backward()"),
        (HEADS, "a, b = net(x)\nprint(b)\na.mean().backward()"),
        (HEADS, "a = net(x)[0]\na.mean().backward()"),
        ("x = self.body(x)\nreturn self.one(x)", MEAN),
        ("x = self.body(x)\nreturn self.one(x) if flag else self.two(x)", MEAN),
        (
            "if flag is not None:\n    x = self.body(x)\nreturn self.two(self.one(x))",
            MEAN,
        ),
    ],
)
def test_unused_parameters_are_looked_for(forward, step):
    assert looks(script(forward, step))


@pytest.mark.parametrize(
    ("forward", "step"),
    [
        (BOTH, MEAN),
        (HEADS, "a, b = net(x)\nloss = a.mean() + b.mean()\nloss.backward()"),
        (
            "out = self.two(self.one(self.body(x)))\nreturn out, out.mean()",
            "_, loss = net(x)\nloss.backward()",
        ),
        (
            f"if flag is not None:\n    x = self.drop(x)\n{BOTH}",
            MEAN,
        ),
        (f"if self.training:\n    x = self.one(x)\n{BOTH}", MEAN),
        (
            "out = self.two(self.one(self.body(x)))\nreturn out, flag",
            "out, state = net(x, state)\nloss = out.mean()\nloss.backward()",
        ),
    ],
)
def test_models_whose_parameters_all_get_gradients_are_not_searched(forward, step):
    assert not looks(script(forward, step))


def test_the_outputs_of_a_model_of_another_file_are_not_known():
    source = script(HEADS, "a, _ = net(x)\na.mean().backward()")
    assert looks(source.replace("net = Net()", "net = Other()"))
    step = "a, state = net(x, state)\nloss = a.mean()\nloss.backward()"
    assert not looks(script(HEADS, step).replace("net = Net()", "net = Other()"))


def test_a_layer_of_torch_computes_all_outputs_from_all_parameters():
    step = "a, _ = net(x)\na.mean().backward()"
    assert not looks(script(HEADS, step).replace("net = Net()", "net = nn.LSTM(2, 2)"))


def test_several_optimizers_over_parts_of_a_model_leave_the_others_out():
    source = script(BOTH, MEAN + "\n" + MEAN.replace("loss", "other")).replace(
        "opt = torch.optim.Adam(net.parameters())\n",
        "opt = torch.optim.Adam([p for n, p in net.named_parameters() if 'one' in n])\n"
        "more = torch.optim.Adam([p for n, p in net.named_parameters() if 'two' in n])"
        "\n",
    )
    assert looks(source)


@pytest.mark.parametrize(
    "forward",
    [
        "with torch.no_grad():\n    h = self.body(x)\nreturn self.two(self.one(h))",
        "return self.two(self.one(self.body(x).relu().detach()))",
        "h = self.body(x)\nreturn self.two(self.one(h.detach()))",
    ],
)
def test_layers_to_which_forward_lets_no_gradient_through_are_searched(forward):
    assert looks(script(forward, MEAN))


def test_a_layer_that_forward_also_reads_with_gradients_is_not_cut_off():
    forward = "h = self.body(x)\nreturn self.two(self.one(h - h.mean().detach()))"
    assert not looks(script(forward, MEAN))


def test_a_layer_that_is_replaced_inside_another_runs_in_every_forward():
    after = convert(REPLACED + STEP).after
    assert "find_unused_parameters" not in after


REPLACED = """\
import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

class Twins(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.resnet = torchvision.models.resnet18(weights=None)
        self.resnet.conv1 = torch.nn.Conv2d(1, 64, 7)
        self.last = torch.nn.Linear(1000, 1)

    def forward(self, x):
        return self.last(self.resnet(x))

model = Twins()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 1, 32, 32)), batch_size=4)
for epoch in range(2):
    for (x,) in loader:
"""
