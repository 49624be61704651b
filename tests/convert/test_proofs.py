"""A loss is shown to be a mean or a sum over samples, or it is listed."""

from __future__ import annotations

import pytest

from stretto.convert._proof import calls
from stretto.convert._proof.script_run import TooLong
from support.conversions import convert, open_notes

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import numpy as np

data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
loader = DataLoader(data, batch_size=4)
"""

NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


"""

LOOP = """\
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
crit = nn.MSELoss()
for epoch in range(2):
    for x, y in loader:
        out = model(x)
        LOSS
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


def script(loss, *, before="", net=NET):
    """A script whose step computes a loss in one or several lines."""
    lines = "\n        ".join(loss.splitlines())
    return HEAD + net + before + LOOP.replace("LOSS", lines)


def doubts(source):
    """The notes on losses that are not shown to be means."""
    return [n for n in open_notes(convert(source)) if "show that this loss" in n]


MEANS = [
    "loss = crit(out, y)",
    "loss = F.cross_entropy(out, y.long().squeeze(1))",
    "loss = F.nll_loss(F.log_softmax(out, dim=1), y.long()[:, 0])",
    "loss = F.kl_div(F.log_softmax(out, 1), y, reduction='batchmean')",
    "loss = (F.mse_loss(out, y, reduction='none') * x[:, :1]).mean()",
    "loss = crit(out, y) + 0.1 * sum(p.abs().sum() for p in model.parameters())",
    "loss = ((out - y) ** 2).sum() / len(x)",
    "loss = ((out - y) ** 2).sum() / x.size(0)",
    "loss = ((out - y) ** 2).sum() / loader.batch_size",
    "n, c = x.shape\nloss = ((out - y) ** 2).sum() / (n * c)",
    (
        "losses = []\nfor k in range(3):\n    losses.append(crit(out * k, y))\n"
        "loss = sum(losses) / len(losses)"
    ),
    "losses = [crit(out, y), out.abs().mean()]\nloss = torch.stack(losses).sum()",
    "total = 0\nfor k in range(3):\n    total = total + crit(out, y * k)\nloss = total",
    (
        "loss = torch.zeros(1)\nfor a, b in zip(out, y):\n"
        "    loss = loss + crit(a, b)\nloss = loss / len(x)"
    ),
    "parts = {'a': crit(out, y), 'b': out.mean()}\nloss = sum(parts.values())",
    "loss = -(out - y).pow(2).exp().clamp(min=0.1).log().mean(0).mean()",
    (
        "mu, sd = out[:, :1], out.exp()\n"
        "loss = -0.5 * torch.mean(torch.sum(1 + sd - mu ** 2 - sd.exp(), dim=1), dim=0)"
    ),
    "h = x[:, None] @ x[:, :, None]\nloss = (h.squeeze(2) - y).pow(2).mean()",
    (
        "q = x.view(-1, 3, 1)\natt = (q @ q.transpose(1, 2)).softmax(-1)\n"
        "loss = (att @ q).pow(2).mean()"
    ),
    "loss = (out - y).pow(2).mean(dim=list(range(1, out.dim()))).mean()",
    (
        "h, _ = nn.LSTM(1, 4, batch_first=True)(x[:, :, None])\n"
        "w = nn.Linear(4, 1)(h).squeeze(-1).softmax(-1)\n"
        "loss = (w[:, None] @ h).mean() + crit(out, y)"
    ),
    "h = nn.Conv2d(1, 2, 1)(x[:, None, None])\nloss = h.mean((-2, -1)).pow(2).mean()",
    "loss = torch.einsum('bi,bi->b', x, x).mean() + crit(out, y)",
    "a, b = torch.cat([out, y]).chunk(2)\nloss = crit(a, b)",
    (
        "perm = torch.randperm(len(x))\nlam = np.random.beta(1, 1)\n"
        "out = model(lam * x + (1 - lam) * x[perm])\n"
        "loss = lam * crit(out, y) + (1 - lam) * crit(out, y[perm])"
    ),
    "noise = torch.randn(x.size(0), 3)\nloss = crit(model(x + noise), y)",
    "p = torch.distributions.Normal(out, 1.0)\nloss = -p.log_prob(y).mean()",
    "loss = crit(out.squeeze(), y.squeeze())",
    "x[:, 0] = 0\nx[x > 1] = 1\nloss = crit(model(x), y)",
    "i = torch.argsort(x[:, 0])\nloss = crit(model(x[i]), y[i])",
    "real = torch.full((9, 1), 0.9)[: len(x)]\nloss = crit(out, real)",
    "loss = torch.stack([crit(out[i], y[i]) for i in range(len(x))]).mean()",
    (
        "loss = 0\nfor k in range(3):\n    loss = loss + crit(out * k, y)\n"
        "    if k > 1:\n        break"
    ),
    (
        "g = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]\n"
        "loss = ((g.norm(2, dim=1) - 1) ** 2).mean()"
    ),
]


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_over_samples_is_not_listed(loss):
    source = script(loss)
    assert doubts(source) == []
    assert "WORLD_SIZE).backward()" not in convert(source).after


SIZED = [
    "z = torch.zeros(len(x), 1)\nz[:, 0] = 1",
    "z = torch.zeros(len(x), 3)\nz[torch.arange(len(x)), (y[:, 0] > 0).long()] = 1",
    "z = torch.zeros(len(x), 1)\nz[y > 0] = 1",
    "z = torch.zeros(len(x), 1)\nfor i in range(len(x)):\n    z[i] = y[i] * 2",
    "z = torch.FloatTensor(len(x), 1).fill_(1.0)",
    "z = torch.ones(len(x), 1).mean()",
    "z = torch.tensor([0.5]).repeat(len(x)).view(len(x), 1)",
    "z = model.head.weight[:, :1].expand(len(x), 1)",
    "z = torch.ones(x.shape[0], 1)",
    "z = torch.ones(len(x)).sum() / len(x)",
]


@pytest.mark.parametrize("made", SIZED)
def test_a_constant_of_the_batchs_size_is_not_listed(made):
    loss = "loss = ((out - y) ** 2 * (1 + z.mean(-1, keepdim=True))).mean()"
    assert doubts(script(f"{made}\n{loss}")) == []


COUNTED = [
    "1 / len(x) ** 0.5",
    "len(x) % 3",
    "math.sqrt(len(x))",
    "max(len(x), 3)",
    "10 - len(x)",
    "{2: 1.0, 4: 2.0}.get(len(x), 3.0)",
    "[0.1, 0.2, 0.3, 0.4, 0.5][len(x)]",
    "float(f'{len(x)}')",
    "torch.tensor(0.5) ** len(x)",
    "torch.hann_window(len(x))[:, None]",
    "Scale(len(x)).get()",
    "functools.partial(pow, len(x))(-0.5)",
    "float(Fraction(1, len(x)))",
    "w[len(x)]",
    "w[-len(x) :][:, None]",
    "w[slice(0, len(x))][:, None]",
    "w[range(len(x))][:, None]",
    "w[list(range(len(x)))][:, None]",
    "w.narrow(0, 0, len(x))[:, None]",
    "w.split(len(x))[0][:, None]",
    "w.view(len(x), -1)[:, :1]",
    "w.roll(len(x))[0]",
    "w[:: len(x)].mean()",
    "F.interpolate(w[None, None], size=len(x))[0, 0][:, None]",
    "torch.as_strided(w, (len(x), 1), (1, 1))",
    "sum(i for i in range(len(x)))",
    "torch.stack([next(rows) for _ in range(len(x))])",
    "torch.tensor([1.0, 2.0] * len(x)).sum()",
    "len('a' * len(x)) ** 0.5",
    "torch.tensor([next(turns) for _ in x])[:, None]",
    "torch.from_numpy(np.tile(np.array([1.0, 2.0]), len(x) // 2))[:, None]",
]
"""Numbers that a rank's part of a batch does not change in proportion."""

TABLES = """\
import functools, itertools, math
from fractions import Fraction
w = torch.linspace(0.1, 2, 64)
rows = iter(w)
turns = itertools.cycle([1.0, 2.0, 3.0])

class Scale:
    def __init__(self, n):
        self.n = n

    def get(self):
        return 2.0**-self.n

"""


@pytest.mark.parametrize("number", COUNTED)
def test_a_number_that_is_not_proportional_to_the_batch_is_listed(number):
    loss = f"c = {number}\nloss = ((out - y) ** 2 * c).mean()"
    assert doubts(script(loss, before=TABLES))


COUNTED_LOSSES = [
    "loss = F.smooth_l1_loss(out, y, beta=len(x) / 8)",
    "loss = crit(out.clamp(max=len(x) / 8), y)",
    "loss = crit(model(x + 0.1 * len(x)), y)",
    "loss = ((out - y) ** 2).sum() / (len(x) - 1)",
    "loss = ((out - y) ** 2).sum() / (len(x) // 3)",
    "loss = ((out - y) ** 2).sum() / len(x) ** 2",
    "loss = crit(out, y) + model.head.weight.square().sum() * len(x)",
    "loss = torch.add(crit(out, y), model.head.bias.square().sum(), alpha=len(x))",
    "n = 0\nfor row in x:\n    n += 1\nloss = ((out - y) ** 2).sum() / n",
    "loss = crit(out, y)\nfor i in range(len(x)):\n    loss = loss * 0.9",
    "loss = crit(out, y) + 0.1 * sum([model.head.bias.sum() for _ in x])",
]


@pytest.mark.parametrize("loss", COUNTED_LOSSES)
def test_a_loss_with_another_power_of_the_batchs_size_is_listed(loss):
    assert doubts(script(loss))


PLACED = [
    "z = torch.zeros(len(x), 1)\nz[0] = 1",
    "z = torch.zeros(y.shape)\nz[-1] = 1",
    "z = y.new_zeros(len(x), 1)\nz[:2] = 1",
    "z = torch.zeros(len(x), 1)\nz[0] += 1",
    "z = torch.zeros(len(x), 1)\nz[0].fill_(1)",
    "z = torch.zeros(len(x), 1)\nv = z[0]\nv += 1",
    "z = torch.zeros(len(x), 1)\nv = z.view(-1)\nv[0] = 1",
    "z = torch.zeros(len(x), 1)\nz.select(0, 0).fill_(1)",
    "z = torch.zeros(len(x), 1)\nz.__setitem__(0, 1)",
    "z = torch.zeros(len(x), 1)\nmark(z)",
    "z = torch.zeros(len(x), 1).index_fill(0, torch.tensor([0]), 1)",
    "z = torch.zeros(len(x), 1)\nfor i in range(3):\n    z[i] = i",
    "z = torch.zeros(len(x), 1)\nfor i in range(len(x)):\n    z[i] = i / 8",
    "z = torch.zeros(len(x), 1)\nfor i in range(0, len(x), 2):\n    z[i] = 1",
    "z = torch.cat([torch.ones(2, 1), torch.zeros(len(x) - 2, 1)])",
    "z = [0.0] * len(x)\nz[0] = 1.0\nz = torch.tensor(z)[:, None]",
    "z = torch.zeros(len(x), 1)\nz.T[..., 0] = 1",
    "z = torch.zeros(len(x), 1)\nz.unbind()[0].fill_(1)",
    "z = torch.zeros(len(x), 1)\nnn.init.ones_(z[:1])",
    "z = torch.zeros(len(x), 1)\nmodel.z = z\nmodel.z[0] = 1",
    "z = torch.zeros(len(x), 1)\nfor k, r in enumerate(z):\n    r += int(k == 0)",
    "z = torch.zeros(len(x), 1)\nz = torch.cat([z[:-1], torch.ones(1, 1)])",
    "z = F.pad(torch.zeros(len(x), 1)[1:], (0, 0, 1, 0), value=1.0)",
    "z = y.take(torch.tensor([0]))",
    "z = torch.tril(torch.ones_like(x))[:, :1]",
    "z = torch.triu(torch.ones(len(x), 3))[:, 2:]",
]
"""What is at a fixed place of the batch, and so once on each rank."""


@pytest.mark.parametrize("made", PLACED)
def test_a_fixed_place_of_the_batch_is_listed(made):
    mark = "def mark(t):\n    t[0] = 1\n\n"
    loss = f"{made}\nloss = ((out - y) ** 2 * (1 + z)).mean()"
    assert doubts(script(loss, before=mark))


BACKWARDS = {
    "g.mm(e.t()).mm(e)": True,
    "g / e.size(0)": True,
    "g - g.mean(0)": True,
    "g.clamp(-1, 1)": True,
    "g * torch.arange(len(e))[:, None]": True,
    "foreign(g)": True,
    "g": False,
    "g.neg() * ctx.rate": False,
    "g * (e > 0)": False,
    "g * 1.5 * (5 * e**2 - 1)": False,
}
"""Gradients of a function's own ``backward``, and whether they are listed."""

OWN_BACKWARD = """\
from elsewhere import foreign

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        ctx.save_for_backward(e)
        ctx.rate = 0.5
        return e * 2

    @staticmethod
    def backward(ctx, g):
        e, = ctx.saved_tensors
        return GRADIENT

own = Own.apply

"""


@pytest.mark.parametrize(("gradient", "listed"), BACKWARDS.items())
def test_a_backward_is_read_for_what_it_does_to_samples(gradient, listed):
    before = OWN_BACKWARD.replace("GRADIENT", gradient)
    found = doubts(script("loss = crit(own(out), y)", before=before))
    assert bool(found) is listed, found


LINEAR = """\
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, w):
        ctx.save_for_backward(e, w)
        return e.mm(w.t())

    @staticmethod
    def backward(ctx, g):
        e, w = ctx.saved_tensors
        a = b = None
        if ctx.needs_input_grad[0]:
            a = g.mm(w)
        if ctx.needs_input_grad[1]:
            b = GRADIENT
        return a, b

"""


@pytest.mark.parametrize(
    ("gradient", "listed"), [("g.t().mm(e)", False), ("g.t().mm(e) / len(e)", True)]
)
def test_a_backward_for_a_parameter_must_be_a_sum_over_samples(gradient, listed):
    before = LINEAR.replace("GRADIENT", gradient)
    loss = "loss = crit(Own.apply(x, model.body.weight).mean(1, keepdim=True), y)"
    assert bool(doubts(script(loss, before=before))) is listed


SUMS = [
    "loss = ((out - y) ** 2).sum()",
    "loss = crit(out, y) * len(x)",
    "loss = torch.sum((out - y) ** 2, dim=None)",
    "loss = torch.einsum('bi,bi->', out - y, out - y)",
    "loss = ((out - y) ** 2).sum(1).sum(0)",
    "loss = torch.stack([crit(a, b) for a, b in zip(out, y)]).sum()",
    "loss = ((out - y) ** 2).sum() / len(data)",
]


@pytest.mark.parametrize("loss", SUMS)
def test_a_sum_over_samples_is_multiplied(loss):
    source = script(loss)
    assert doubts(source) == []
    assert "(loss * WORLD_SIZE).backward()" in convert(source).after


OWN = """\
from elsewhere import foreign

def early(a, b):
    if a.mean() > 0:
        return F.mse_loss(a, b)
    return F.l1_loss(a, b)

def rooted(f):
    def inner(a, b):
        return torch.sqrt(f(a, b))
    return inner

class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        ctx.save_for_backward(e)
        return (e ** 2).sum()

    @staticmethod
    def backward(ctx, g):
        (e,) = ctx.saved_tensors
        return g * 2 * e / len(e)

def scaled(e):
    return 2 * e / len(e)

class Helped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        ctx.save_for_backward(e)
        return e ** 2

    @staticmethod
    def backward(ctx, g):
        return g * scaled(*ctx.saved_tensors)

class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        ctx.n = e.size(0)
        return e * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 / ctx.n

@rooted
def doubled(a, b):
    return F.mse_loss(a, b) * 2

"""

NEITHER = [
    "loss = (out[:, None] - out[None]).abs().mean()",
    "loss = (out[::2] - out[1::2]).abs().mean()",
    "a, b = out.chunk(2)\nloss = crit(a, b)",
    "loss = crit(out[0], y[0])",
    "loss = crit(out[:3], y[:3])",
    "loss = (torch.softmax(out.squeeze(), dim=-1) * y.squeeze()).mean()",
    "loss = F.batch_norm(out, None, None, training=True).pow(4).mean()",
    "loss = F.layer_norm(out.T, (len(x),)).pow(4).mean()",
    "loss = crit(F.normalize(out, dim=0), y)",
    (
        "w = (y <= 0).sum() / (y > 0).sum()\n"
        "loss = F.binary_cross_entropy_with_logits(out, (y > 0).float(), pos_weight=w)"
    ),
    "mask = (y > 0).float()\nloss = ((out - y) ** 2 * mask).sum() / mask.sum()",
    "loss = ((out - y) ** 2)[y > 0].mean()",
    "loss = crit(out, y)\nif y.mean() > 0:\n    loss = loss * 0.5",
    "scale = 0.5 if y.max() > 1 else 1.0\nloss = crit(out, y) * scale",
    "k = torch.randint(1, 4, (1,)).item()\nloss = crit(out, y) * k",
    "loss = torch.sqrt(crit(out, y))",
    "loss = crit(out, y) * out.mean()",
    "loss = (out.sort(0).values - y.sort(0).values).pow(2).mean()",
    "a, b = crit(out, y), out.abs().mean()\nloss = a if a > b else b",
    "a = crit(out, y)\nloss = a * 2 if a > 1 else a",
    "loss = crit(out * 2 if out.mean() > 0 else out, y)",
    "loss = early(out, y)",
    "loss = doubled(out, y)",
    (
        "loss = 0\nfor i, (a, b) in enumerate(zip(out, y)):\n    if i >= 2:\n"
        "        break\n    loss = loss + crit(a, b)\nloss = loss / len(x)"
    ),
    "loss = out.mean(out.dim() - 2).pow(2).mean()",
    "loss = (torch.eye(len(x)) @ out - y).pow(2).mean()",
    "loss = (torch.ones(len(x), len(x)) @ out - y).pow(2).mean()",
    "loss = (out - y).pow(2).mean(-2).sqrt().mean()",
    "loss = (out.squeeze(-1).softmax(-1) * y.squeeze(-1)).mean()",
    "loss = (out[:, 0].softmax(-1) * y[:, 0]).mean()",
    "o = model(x).view(-1, 2)\nloss = (o[:, 0] - o[:, 1]).pow(2).mean()",
    "loss = crit(out, y.squeeze(1))",
    "p = torch.arange(len(x) - 1, -1, -1)\nloss = crit(out + out[p], y)",
    (
        "s = torch.zeros(2, 1).scatter_add(0, (y > 0).long(), out)\n"
        "loss = s.pow(2).mean()"
    ),
    "a, b = crit(out, y), out.abs().mean()\nloss = [a, b][int(a < b)]",
    "a, b = crit(out, y), out.abs().mean()\nloss = {True: a, False: b}[bool(a > b)]",
    "a, b = crit(out, y), out.abs().mean()\nloss = sorted([a, b])[-1]",
    (
        "a, b = crit(out, y), out.abs().mean()\nmatch bool(a > b):\n"
        "    case True:\n        loss = a\n    case _:\n        loss = b"
    ),
    (
        "loss, k = crit(out, y), 0\nwhile (y > k).any():\n"
        "    loss = loss + out.abs().mean()\n    k += 1"
    ),
    "loss = crit(out, y) * len([v for v in y if v > 0]) / 8",
    "loss = crit(out, y) * sum(1 for v in y if v > 0) / 8",
    "loss = crit(out, y) * len(set((y > 0).view(-1).tolist())) / 2",
    (
        "from collections import Counter\n"
        "loss = crit(out, y) * Counter((y > 0).view(-1).tolist())[True] / 8"
    ),
    "loss = Mean.apply(out - y)",
    "loss = Helped.apply(out - y).mean()",
    "loss = Keeping.apply(out - y).mean()",
    (
        "loss = 0\nfor k in range(3):\n    loss = loss + crit(out * k, y)\n"
        "    if (out > k).all():\n        break"
    ),
    (
        "loss = crit(out, y)\nfor k in range(3):\n    if (y > k).any():\n"
        "        continue\n    loss = loss + crit(out * k, y)"
    ),
    (
        "losses = [crit(out, y)]\nif out.mean() > 0:\n    losses.append(out.mean())\n"
        "loss = sum(losses)"
    ),
    (
        "loss = 0\nfor i, (a, b) in enumerate(zip(out, y)):\n"
        "    loss = loss + crit(a, b) * i"
    ),
    "loss = sum(crit(out[i], y[i - 1]) for i in range(len(x))) / len(x)",
    "loss = sum(crit(out[i], y[i]) for i in range(len(x) - 1)) / len(x)",
    "loss = sum(w * crit(a, b) for w, a, b in zip(np.random.rand(4), out, y))",
    "loss = crit(out.squeeze(), y)",
    "x[0] = 0\nloss = crit(model(x), y)",
    "loss = torch.einsum('bi,ci', out, y).mean()",
    "h, _ = nn.LSTM(3, 4, batch_first=True)(x)\nloss = h.pow(2).mean()",
    "loss = foreign(out, y)",
    "loss = crit(out, y) + 0.1 * foreign(out)",
    "each = (out - y)[:, 0]\nloss = (each * each.roll(1)).mean()",
    "each = (out - y)[:, 0]\nloss = each.unfold(0, 2, 2).prod(1).mean()",
    "loss = out.renorm(2, 1, 1.0).mean()",
    "loss = torch.fft.fft(out, dim=0).abs().mean()",
    "loss = torch.fft.fft2(out).abs().mean()",
    "each = (out - y).pow(2).view(-1)\nloss = sum(sorted(each)[-2:])",
    "each = (out - y).pow(2).view(-1)\nloss = torch.stack(list(each)[1:]).mean()",
]


@pytest.mark.parametrize("loss", NEITHER)
def test_a_loss_that_is_no_mean_is_listed(loss):
    listed = open_notes(convert(script(loss, before=OWN)))
    assert any(
        "show that this loss" in n or "samples of a batch" in n for n in listed
    ), listed


@pytest.mark.parametrize(
    "loss",
    [
        "loss = F.cross_entropy(out, y, reduction='none').topk(2)[0].mean()",
        "each = nn.NLLLoss(reduction='none')(out, y)\nloss = each.sort()[0][:2].mean()",
        "loss = F.l1_loss(out.view(-1), y, reduction='none').topk(2)[0].mean()",
        "loss = (y.topk(2)[0] * out[:, 0]).mean()",
    ],
)
def test_the_largest_of_labels_of_unknown_dimensions_are_listed(loss):
    source = script(loss).replace("(data, ", "(Labeled(), ")
    assert len(doubts(source)) == 1


@pytest.mark.parametrize(
    "loss",
    [
        "loss = F.cross_entropy(out, y, reduction='none').mean()",
        "loss = (F.cross_entropy(out, y, reduction='none') * y).sum() / len(x)",
        "loss = F.mse_loss(out, y, reduction='none').mean(-1).mean()",
        "loss = crit(out.topk(1)[0], y)",
    ],
)
def test_means_of_labels_of_unknown_dimensions_are_not_listed(loss):
    source = script(loss).replace("(data, ", "(Labeled(), ")
    assert open_notes(convert(source)) == []


@pytest.mark.parametrize(
    "draw",
    [
        "torch.randn(len(x), 3, generator=torch.Generator().manual_seed(0))",
        "torch.tensor(np.random.normal(0, 1, (x.shape[0], 3)))",
        "torch.tensor(np.random.rand(len(x), 3))",
        "torch.tensor(np.random.default_rng(0).normal(size=x.shape))",
        "torch.tensor(np.random.RandomState(0).randn(*x.shape))",
        "torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(0))",
        "x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]",
    ],
)
def test_equal_random_numbers_of_all_ranks_for_samples_are_listed(draw):
    source = script(f"loss = crit(model(x + {draw}), y)")
    (note,) = open_notes(convert(source))
    assert "all ranks draw the same ones" in note
    assert doubts(source) == []


MIXING = [
    "x - x.mean(0)",
    "x[:, None] - x[None]",
    "F.softmax(x @ x.T, 1) @ x",
    "F.batch_norm(x, None, None, training=True)",
    "x / x.norm()",
    "x + torch.arange(x.size(0)).unsqueeze(1) * 0.1",
    "x * torch.sin(torch.arange(len(x)).float())[:, None]",
    "x * torch.linspace(0, 1, x.size(0))[:, None]",
    "x + torch.linspace(0, 1, 32)[:, None][: x.size(0)]",
    "x + self.head.weight.T.repeat(9, 3)[: len(x)]",
    "x + torch.tensor([0.1 * i for i in range(64)][: len(x)])[:, None]",
    "x + torch.arange(192.0).view(64, 3)[torch.arange(len(x))]",
    "x + torch.linspace(0, 1, 2).repeat(len(x) // 2)[:, None]",
    "F.softmax(x @ x.transpose(-2, -1), -1) @ x",
    "F.scaled_dot_product_attention(x, x, x)",
    "nn.TransformerEncoderLayer(3, 1, batch_first=True)(x)",
    "x + x[torch.argsort(x[:, 0])]",
    "x + torch.take_along_dim(x, torch.argsort(x, 0), 0)",
    "x - x.mean(-2, keepdim=True)",
    "x - x.mean((-1, -2), keepdim=True)",
    "x * F.softmax(x.sum(1), -1)[:, None]",
    "x * F.softmax(x.sum(-1), dim=-1)[:, None]",
    "torch.softmax(x @ x.mT, -1) @ x",
    "F.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
    "F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t()",
    "F.group_norm(x[None].transpose(1, 2), 1)[0].t()",
    "x.unflatten(0, (-1, 2)).mean(1, keepdim=True) + x",
]


COLLATED = [
    "lambda b: tuple(zip(*b))",
    "lambda b: ([s[0] for s in b], [s[1] for s in b])",
    "Collate()",
    "functools.partial(collate, extra=1)",
]

COLLATES = """\
import functools

def collate(b, extra):
    xs, ys = zip(*b)
    return xs, ys

class Collate:
    def __call__(self, b):
        return list(zip(*b))

loader = DataLoader(data, batch_size=4, collate_fn=FUNCTION)
"""


@pytest.mark.parametrize("function", COLLATED)
@pytest.mark.parametrize("join", ["cat", "stack"])
def test_joined_parts_of_a_list_of_samples_are_listed(function, join):
    loss = f"x, y = torch.{join}(x), torch.{join}(y)\nloss = crit(model(x), y)"
    before = COLLATES.replace("FUNCTION", function)
    assert bool(doubts(script(loss, before=before))) is (join == "cat")


DATASET = """\
from torch.utils.data import Dataset, random_split

class Pairs(Dataset):
    def __init__(self):
        self.x = torch.randn(100, 3)
        self.y = self.x @ torch.randn(SHAPE)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

train, test = random_split(Pairs(), [80, 20])
loader = DataLoader(train, batch_size=4)
"""


@pytest.mark.parametrize(("shape", "listed"), [("3, 1", False), ("3", True)])
def test_targets_of_a_data_set_that_broadcast_are_listed(shape, listed):
    """Each output is compared with the targets of all samples."""
    before = DATASET.replace("SHAPE", shape)
    assert bool(doubts(script("loss = crit(out, y)", before=before))) is listed


def test_attention_over_a_dimension_that_a_shape_shows_is_not_listed():
    mixing = "b, t, d = x.shape\n        x = F.softmax(x @ x.transpose(-2, -1), -1) @ x"
    net = NET.replace(
        "return self", f"x = x * 1\n        {mixing}\n        return self"
    )
    before = "from elsewhere import Data\nloader = DataLoader(Data(), batch_size=4)\n"
    assert doubts(script("loss = crit(out, y)", net=net, before=before)) == []


def test_a_forward_that_tests_the_number_of_samples_is_listed():
    net = NET.replace(
        "return self",
        "if x.size(0) > 2:\n            x = x * 2\n        return self",
    )
    assert doubts(script("loss = crit(out, y)", net=net))


@pytest.mark.parametrize("mixing", MIXING)
def test_a_forward_that_mixes_samples_is_listed(mixing):
    net = NET.replace("return self", f"x = {mixing}\n        return self")
    listed = open_notes(convert(script("loss = crit(out, y)", net=net)))
    assert any(
        "show that this loss" in n or "samples of a batch" in n for n in listed
    ), listed


OF_OTHERS = """\
from elsewhere import Backbone

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Backbone()
        self.parts = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return self.head(self.body(x))


"""


def test_a_module_of_another_file_in_forward_is_not_listed():
    loss = "out, mu = out, foreign(out)\nloss = crit(out, y) + mu.pow(2).mean()"
    before = "from elsewhere import foreign\n"
    assert doubts(script(loss, net=OF_OTHERS, before=before)) == []


FUNCTION = """\
def smooth(out, y, beta=0.5, reduction="mean"):
    diff = (out - y).abs()
    each = torch.where(diff < beta, diff ** 2, diff)
    if reduction == "mean":
        return each.mean()
    if reduction == "sum":
        return each.sum()
    return torch.sqrt(each.mean())


"""


@pytest.mark.parametrize(
    ("given", "listed", "multiplied"),
    [
        ("", False, False),
        (", reduction='sum'", False, True),
        (", 1.0, 'x'", True, False),
    ],
)
def test_a_function_of_the_script_is_read_for_its_arguments(given, listed, multiplied):
    source = script(f"loss = smooth(out, y{given})", before=FUNCTION)
    assert bool(doubts(source)) is listed
    assert ("loss * WORLD_SIZE" in convert(source).after) is multiplied


def test_a_note_names_the_expression_and_its_line():
    (note,) = doubts(script("loss = torch.sqrt(crit(out, y))\nloss = loss * 2"))
    assert note.startswith("line 25: ")
    assert "`torch.sqrt(crit(out, y))`" in note


def test_a_seed_set_in_every_epoch_is_listed():
    source = script("loss = crit(out, y)").replace(
        "    for x, y", "    torch.manual_seed(epoch)\n    for x, y"
    )
    (note,) = open_notes(convert(source))
    assert "sets one seed on all ranks" in note


def test_a_seed_set_before_training_is_not_listed():
    source = script("loss = crit(out, y)", before="torch.manual_seed(1)\n")
    assert open_notes(convert(source)) == []


@pytest.mark.parametrize(
    "line",
    [
        'torch.onnx.export(model, torch.randn(1, 3), "net.onnx")',
        'Image.fromarray(np.zeros((4, 4))).save("a.png")',
    ],
)
def test_only_rank_0_exports_and_saves_images(line):
    source = script("loss = crit(out, y)", before="from PIL import Image\n")
    after = convert(f"{source}{line}\n").after
    (saved,) = [n for n in after.splitlines() if ".save(" in n or ".export(" in n]
    assert saved.startswith("    ")


@pytest.mark.parametrize("error", [KeyError, TooLong, RecursionError])
def test_losses_noted_before_the_script_is_given_up_are_not_shown(error, monkeypatch):
    """What comes later in the script may change them."""
    note = calls._note_loss

    def failing(*given):
        note(*given)
        raise error

    source = script("loss = crit(out, y)")
    assert doubts(source) == []
    monkeypatch.setattr(calls, "_note_loss", failing)
    (doubt,) = doubts(source)
    assert "`loss.backward()`" in doubt


FIXED_SIZES = [
    "loss = ((out - y)[:, 0] ** 2 * torch.linspace(0.5, 1.5, 4)).mean()",
    "loss = F.mse_loss(out[:, 0], weights)",
    "loss = ((out[:, 0] - weights) ** 2).mean()",
    "loss = F.cross_entropy(out, classes)",
]


@pytest.mark.parametrize("loss", FIXED_SIZES)
def test_a_constant_with_an_element_for_each_sample_is_listed(loss):
    before = "weights = torch.zeros(4)\nclasses = torch.zeros(4).long()\n\n"
    assert doubts(script(loss, before=before))


def test_a_constant_with_an_element_for_each_feature_is_not_listed():
    before = "weights = torch.linspace(0.5, 1.5, 3)\n\n"
    assert doubts(script("loss = crit(model(x * weights), y)", before=before)) == []


@pytest.mark.parametrize(
    ("line", "listed"),
    [
        ("x = x.view(self.size, -1)", False),
        ("x = x * torch.ones(self.size)[:, None]", False),
        ("x = x.view(2, -1).view(-1, 3)", True),
        ("x = x[: self.size]", True),
        ("x = x.reshape(self.size * 2, -1).view(-1, 3)", True),
    ],
)
def test_the_batch_size_in_an_attribute_is_this_ranks_part(line, listed):
    net = NET.replace("__init__(self)", "__init__(self, size)")
    net = net.replace("self.body =", "self.size = size\n        self.body =")
    net = net.replace("return self", f"{line}\n        return self")
    source = script("loss = crit(out, y)", net=net, before="SIZE = 4\n")
    source = source.replace("model = Net()", "model = Net(SIZE)")
    source = source.replace("(data, batch_size=4)", "(data, batch_size=SIZE)")
    source = source.replace("data = Tensor", "SIZE = 4\ndata = Tensor")
    assert bool(doubts(source)) is listed
    if not listed:
        assert "per_rank(self.size)" in convert(source).after


RECURRENT = """\
from elsewhere import Data
loader = DataLoader(Data(), batch_size=4)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 3)
        self.layer = LAYER
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        FORWARD

"""

LAYERS = {
    "h, _ = self.layer(x)\n        return self.head(h)": True,
    "h, _ = self.layer(x)\n        return self.head(h[:, -1])": True,
    "h, _ = self.layer(self.embed(x))\n        return self.head(h)": True,
    "h, _ = self.layer(x)\n        return self.head(h[:, -1, :])": False,
    "n, t, w = x.shape\n        h, _ = self.layer(x)\n        return h": False,
    "x = x.transpose(1, 2)\n        h, _ = self.layer(x)\n        return h": (False),
    (
        "first = torch.zeros(1, x.size(0), 8)\n        h, _ = self.layer(x, first)\n"
        "        return self.head(h)"
    ): False,
    (
        "_, h = self.layer(x)\n"
        "        return self.head(torch.cat((h[-1], h[-1]), dim=1)[:, :8])"
    ): False,
    (
        "h, _ = self.layer(x)\n        h = h.mean(1) if len(h.shape) > 2 else h\n"
        "        return self.head(h)[:, :2]"
    ): True,
    (
        "h, _ = self.layer(x)\n        if h.dim() == 3:\n            h = h[:, -1]\n"
        "        return self.head(h)[:, :2]"
    ): True,
}
"""What a network does with a layer, and whether the layer is listed."""


@pytest.mark.parametrize(("forward", "listed"), LAYERS.items())
def test_a_layer_that_may_take_a_batch_for_one_sequence_is_listed(forward, listed):
    net = RECURRENT.replace("LAYER", "nn.GRU(3, 8, batch_first=True)")
    source = script("loss = crit(out, y)", net=net.replace("FORWARD", forward))
    notes = [n for n in open_notes(convert(source)) if "for one sequence" in n]
    assert bool(notes) is listed
    assert all("shape`" in n for n in notes)


@pytest.mark.parametrize(("loss", "listed"), [("nn.MSELoss", 1), ("nn.NLLLoss", 0)])
def test_targets_of_classes_show_that_attention_takes_a_batch(loss, listed):
    layer = "nn.TransformerEncoderLayer(8, 2, batch_first=True)"
    forward = "return self.head(self.layer(x).mean(1)).log_softmax(-1)"
    net = RECURRENT.replace("LAYER", layer).replace("FORWARD", forward)
    source = script(f"loss = {loss}()(out, y)", net=net)
    notes = [n for n in open_notes(convert(source)) if "for one sequence" in n]
    assert len(notes) == listed


@pytest.mark.parametrize("first", ["list(loader)", "tuple(loader)", "[*loader]"])
def test_a_mean_of_all_samples_is_the_same_on_each_rank(first):
    source = script("loss = crit(model(x - mean), y)")
    mean = f"batches = {first}\nmean = torch.cat([b[0] for b in batches]).mean(0)\n"
    source = source.replace("for epoch", f"{mean}for epoch", 1)
    assert mean.splitlines()[1] in source
    assert open_notes(convert(source)) == []
