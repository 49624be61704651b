"""Comprehensions that train become ``for`` statements."""

from __future__ import annotations

import pytest

from stretto.convert._comprehensions import unrolled
from stretto.convert._tree import ScriptTree, found
from support.conversions import convert, open_notes, refused

libcst = pytest.importorskip("libcst")

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


def step(batch):
    (x,) = batch
    loss = model(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
for epoch in range(2):
"""


def script(*lines):
    return HEAD + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (
            "losses = [step(b) for b in loader]  # train",
            "losses = []\nfor b in loader:  # train\n    losses.append(step(b))\n",
        ),
        ("[step(b) for b in loader]", "for b in loader:\n    step(b)\n"),
        (
            "mean = sum([step(b) for b in loader]) / len(loader)",
            (
                "results = []\nfor b in loader:\n    results.append(step(b))\n"
                "mean = sum(results) / len(loader)\n"
            ),
        ),
        (
            "mean = sum(step(b) for b in loader) / len(loader)",
            (
                "results = []\nfor b in loader:\n    results.append(step(b))\n"
                "mean = sum(results) / len(loader)\n"
            ),
        ),
        (
            "losses: list = [step(b) for b in loader if b]",
            (
                "losses: list = []\nfor b in loader:\n    if b:\n"
                "        losses.append(step(b))\n"
            ),
        ),
        (
            "[step(b) for _ in range(2) for b in loader]",
            "for _ in range(2):\n    for b in loader:\n        step(b)\n",
        ),
        (
            "loader = [step(b) for b in loader]",
            (
                "results = []\nfor b in loader:\n    results.append(step(b))\n"
                "loader = results\n"
            ),
        ),
        (
            "[step(b) for b in loader]\nb = 1",
            "for b_2 in loader:\n    step(b_2)\nb = 1\n",
        ),
    ],
)
def test_the_for_statement_of_a_comprehension(line, lines):
    tree = ScriptTree(libcst.parse_module(f"{line}\n"))
    made = unrolled(tree, next(found(tree.module, libcst.BaseComp)))
    assert made is not None
    assert made.module.code == lines


@pytest.mark.parametrize(
    "line",
    [
        "a = f(1, [step(b) for b in loader])",
        "a = g() + sum(step(b) for b in loader)",
        "a = (step(b) for b in loader)",
        "a = any(step(b) for b in loader)",
        "a = {step(b) for b in loader}",
        "a = {b: step(b) for b in loader}",
        "a = 1; b = [step(c) for c in loader]",
        "a += sum(step(b) for b in loader)",
        "a = c and [step(b) for b in loader]",
        "a = [step(b)  # here\n     for b in loader]",
        "[step(b) +\n 1 for b in loader]",
        "if [step(b) for b in loader]:\n    pass",
    ],
)
def test_where_a_for_statement_would_change_the_order(line):
    tree = ScriptTree(libcst.parse_module(f"{line}\n"))
    assert unrolled(tree, next(found(tree.module, libcst.BaseComp))) is None


def test_lines_are_those_of_the_script():
    source = "a = 1\nb = [\n    step(x)\n    for x in loader\n]\n\nc = 2\n"
    tree = ScriptTree(libcst.parse_module(source))
    made = unrolled(tree, next(found(tree.module, libcst.BaseComp)))
    assert made is not None
    lines = [made.shown_line(part) for part in made.module.body]
    assert lines == [1, 2, 2, 7]


def test_a_comprehension_that_trains_is_a_training_loop():
    conversion = convert(script("losses = [step(b) for b in loader]", "print(losses)"))
    assert open_notes(conversion) == []
    assert (
        "    losses = []\n"
        "    loader.sampler.set_epoch(epoch)\n"
        "    for b in loader:\n"
        "        losses.append(step(b))\n"
        "    print0(losses)\n"
    ) in conversion.after
    assert "return mean_over_ranks(loss.item())" in conversion.after


def test_notes_below_it_name_the_scripts_lines():
    conversion = convert(script("losses = [step(b) for b in loader]", "exit()"))
    assert "line 19: the process group ends after this" not in conversion.listed()
    begun = [n.line for n in conversion.notes if "written as a `for`" in n.text]
    assert begun == [18]


@pytest.mark.parametrize(
    "line",
    [
        "for loss in (step(b) for b in loader): pass",
        "print(epoch, [step(b) for b in loader])",
    ],
)
def test_a_comprehension_that_is_refused_is_to_be_a_for_statement(line):
    said = refused(script(line))
    assert said.startswith("train.py:18: training runs in `")
    assert said.endswith("Write it as a `for` statement: `for b in loader:`")


def test_an_evaluation_in_a_comprehension_stays_one():
    line = "print([model(x).mean().item() for (x,) in loader])"
    source = script("for b in loader:", "    step(b)") + line + "\n"
    assert "print0([model(x)" in convert(source).after
