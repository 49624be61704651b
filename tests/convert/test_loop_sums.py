"""What a training loop adds up is reduced once over ranks, in each form and type."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stretto.convert._support import text_of
from support.conversions import convert, open_notes

SCRIPT = """\
from collections import Counter, defaultdict
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def run(model, loader, opt, epoch):
{begin}
    for x, y in loader:
        out = model(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
{step}
{end}


torch.manual_seed(0)
np.random.seed(0)
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(8, 2), torch.ones(8).long())
loader = DataLoader(data, batch_size=4)
for epoch in range(2):
    run(model, loader, opt, epoch)
"""
LOSS = "loss.item() * len(x)"


def script(begin, step, end="pass"):
    return convert(
        SCRIPT.format(
            begin=textwrap.indent(begin, " " * 4),
            step=textwrap.indent(step, " " * 8),
            end=textwrap.indent(end, " " * 4),
        )
    )


BEGINS = [
    "s = {'loss': 0.0, 'n': 0}",
    "s = dict(loss=0.0, n=0)",
    "s = defaultdict(float)",
    "s = defaultdict(lambda: 0.0)",
    "s = Counter()",
]
RATIO = "print(s['loss'] / s['n'])"


@pytest.mark.parametrize("begin", BEGINS)
def test_elements_of_a_dict_are_summed_once_after_the_loop(begin):
    made = script(begin, f"s['loss'] += {LOSS}\ns['n'] += len(x)", RATIO)
    line = "\n    s['loss'], s['n'] = sum_over_ranks(s['loss'], s['n'])\n"
    assert line in made.after
    assert f"        s['loss'] += {LOSS}\n" in made.after
    assert open_notes(made) == []


@pytest.mark.parametrize("begin", ["s = [0.0, 0]", "s = [0.0] * 2"])
def test_elements_of_a_list_are_summed_once_after_the_loop(begin):
    made = script(begin, f"s[0] += {LOSS}\ns[1] += len(x)", "print(s[0] / s[1])")
    assert "\n    s[0], s[1] = sum_over_ranks(s[0], s[1])\n" in made.after
    assert open_notes(made) == []


def test_elements_that_add_up_means_are_averaged():
    made = script("s = {'loss': 0.0}", "s['loss'] += loss.item()", "print(s['loss'])")
    assert "s['loss'] = mean_over_ranks(s['loss'])" in made.after


@pytest.mark.parametrize(
    ("begin", "step"),
    [
        # It may not begin at 0, or is read in the loop.
        ("s = load()", f"s['loss'] += {LOSS}\ns['n'] += len(x)"),
        (
            "s = {'loss': 0.0, 'n': 0}",
            f"s['loss'] += {LOSS}\ns['n'] += len(x)\nprint(s['loss'] / s['n'])",
        ),
        (
            "s = {}",
            f"s['loss'] = s.get('loss', 0) + {LOSS}\ns['n'] = s.get('n', 0) + len(x)",
        ),
    ],
)
def test_elements_are_reduced_in_each_step_where_they_cannot_be_later(begin, step):
    made = script(begin, step, RATIO)
    assert f"sum_over_ranks({LOSS})" in made.after
    assert "sum_over_ranks(len(x))" in made.after
    assert open_notes(made) == []


def test_no_element_is_reduced_where_one_is_not_understood():
    step = f"s['loss'] += {LOSS}\ns['q'] += np.median(out.numpy())\ns['n'] += len(x)"
    made = script("s = {'loss': 0.0, 'q': 0.0, 'n': 0}", step, RATIO)
    assert "_over_ranks(" not in made.after
    assert all("`s` collects values" in note for note in open_notes(made))
    assert len(open_notes(made)) == 3


@pytest.mark.parametrize(
    "step",
    [
        "s += [{}]",
        "s = s + [{}]",
        "s += [{{'loss': {}}}]",
    ],
)
def test_what_is_appended_to_a_list_is_reduced_and_not_the_list(step):
    made = script("s = []", step.format("loss.item()"), "print(len(s), s)")
    assert step.format("mean_over_ranks(loss.item())") in made.after
    assert "s = mean_over_ranks" not in made.after
    assert "print0(len(s), s)" in made.after


def test_what_is_added_to_a_text_is_reduced_and_not_the_text():
    made = script("s = ''", "s += f'{loss.item():.3f}'", "print(s)")
    assert "s += f'{mean_over_ranks(loss.item()):.3f}'" in made.after


@pytest.mark.parametrize(
    ("begin", "step"),
    [
        ("s = np.zeros(2)", f"s += [{LOSS}, len(x)]"),
        ("s = np.zeros(2)", f"s[0] += {LOSS}\ns[1] += len(x)"),
        ("s = torch.zeros(2, 2)", "s += torch.bincount(2 * y + y).view(2, 2)"),
        ("s = np.zeros(4)", "s += np.bincount((2 * y + y).numpy(), minlength=4)"),
        (
            "s = torch.zeros(2, 2)",
            "for t, p in zip(y, out.argmax(1)):\n    s[t, p] += 1",
        ),
        (
            "s = torch.zeros(2)",
            "for c in range(2):\n    s[c] += ((out.argmax(1) == c) & (y == c)).sum()",
        ),
    ],
)
def test_an_array_is_summed_once_after_the_loop(begin, step):
    made = script(begin, step, "print(s)")
    assert "\n    s = sum_over_ranks(s)\n" in made.after
    assert made.after.count("sum_over_ranks(") == 2  # with its definition
    assert open_notes(made) == []


@pytest.mark.parametrize(
    "end",
    [
        "iou = s.diag() / s.sum(1)\nreturn iou.mean().item()",
        "return (s.diag() / s.sum(1)).sum().item()",
        "print(s.float().std().item())",
        "print(round(s.sum().item() / 8, 5))",
    ],
)
def test_a_function_of_a_sum_over_ranks_is_not_reduced_again(end):
    made = script("s = torch.zeros(2, 2)", "s += torch.bincount(y).view(2, 2)", end)
    assert "mean_over_ranks" not in made.after
    assert made.after.count("sum_over_ranks(") == 2
    assert open_notes(made) == []


def test_a_function_of_a_sum_that_is_not_reduced_is_listed():
    made = script(
        "s = torch.zeros(2, 2)",
        "s += histogram(y, out)",
        "iou = s.diag() / s.sum(1)\nreturn iou.mean().item()",
    )
    asked = [n for n in open_notes(made) if "is computed from `s`" in n]
    assert len(asked) == 1
    assert "which is not that of one process" in asked[0]


def test_a_sum_of_a_method_that_is_read_in_a_calculation_is_reduced_once():
    made = script(
        "s = torch.zeros(1)", f"s += {LOSS}", "print(round(s.item() / len(data), 5))"
    )
    assert made.after.count("sum_over_ranks(") == 2


@pytest.mark.parametrize(
    ("begin", "step", "want"),
    [
        ("a, n = 0.0, 0", f"a, n = a + {LOSS}, n + len(x)", "a, n"),
        ("n = 0", "n += (k := len(y))", "n"),
    ],
)
def test_other_forms_of_a_sum(begin, step, want):
    made = script(begin, step, "print(n)")
    assert f"\n    {want} = sum_over_ranks({want})\n" in made.after
    assert f"        {step}\n" in made.after
    assert open_notes(made) == []


def test_arrays_keep_their_shape_and_type():
    text = text_of("_reduced", horovod=False, per_rank_batch=False, seeds=())

    def all_reduce(total):
        total *= 2

    names = {"torch": torch, "dist": SimpleNamespace(all_reduce=all_reduce)}
    exec(compile(text, "inserted", "exec"), names)
    given = [torch.arange(4).view(2, 2), np.ones((1, 3), dtype="float32"), 1.5]
    matrix, row, number = names["_reduced"](given, 1)
    assert torch.equal(matrix, 2 * given[0])
    assert row.dtype == np.float32
    assert row.tolist() == [[2.0, 2.0, 2.0]]
    assert number == 3.0


SUM_OF_A_FUNCTION = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    for epoch in range(2):
        mae = {begin}
        for (x,) in loader:
            loss = model(x).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            mae += {added}
        print(f"{shown}")

main()
"""


@pytest.mark.parametrize(
    ("begin", "added", "shown"),
    [
        (
            "torch.tensor(0.0)",
            "(model(x) - x[:, :1]).abs().sum().detach()",
            "{mae.item() / len(loader.dataset):.6f}",
        ),
        ("0.0", "model(x).abs().sum().item()", "{mae / len(loader.dataset):.6f}"),
        ("0", "(model(x) > 0).sum()", "{100 * mae / len(loader.dataset):.6f}"),
    ],
)
def test_a_sum_that_is_reduced_after_its_loop_is_not_reduced_again(begin, added, shown):
    source = SUM_OF_A_FUNCTION.format(begin=begin, added=added, shown=shown)
    conversion = convert(source)
    assert "        mae = sum_over_ranks(mae)\n" in conversion.after
    assert f'print0(f"{shown}")' in conversion.after
    assert open_notes(conversion) == []
