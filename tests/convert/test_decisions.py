"""Decisions that ranks may take differently, so that they wait for each other."""

from __future__ import annotations

import re

import pytest

from stretto.convert import Target
from support.conversions import STEP, convert, open_notes

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


EVALUATION = (
    """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from other import evaluate

model = torch.nn.Sequential(torch.nn.{layer}, torch.nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
val = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4, shuffle=True)
for epoch in range(9):
    model.train()
    for (x,) in loader:
"""
    + STEP
    + """\
    {evaluation}
    out = []
    {context}
        for (x,) in val:
            out.append(model(x).mean())
    if sum(out) > 3:
        break
"""
)


@pytest.mark.parametrize(
    ("evaluation", "after"),
    [
        ("model.eval()", "buffers_of_rank0(model).eval()"),
        ("model.train(False)", "buffers_of_rank0(model).train(False)"),
        ("model.train(epoch > 9)", "buffers_of_rank0(model).train(epoch > 9)"),
        ("model.train(True)", "model.train(True)"),
        ("r = evaluate(model)", "r = evaluate(unwrap(buffers_of_rank0(model)))"),
    ],
)
@pytest.mark.parametrize("context", ["with torch.no_grad():", "if epoch > 1:"])
def test_ranks_evaluate_with_buffers_and_random_numbers_of_rank_0(
    evaluation, after, context
):
    source = EVALUATION.format(
        evaluation=evaluation, context=context, layer="BatchNorm1d(2)"
    )
    converted = convert(source).after
    assert f"\n    {after}\n" in converted
    assert "\n        for (x,) in as_on_rank0(val):\n" in converted
    compile(converted, "train.py", "exec")


def test_a_model_without_buffers_evaluates_as_it_is():
    source = EVALUATION.format(
        evaluation="model.eval()", context="if epoch > 1:", layer="Linear(2, 2)"
    )
    assert "buffers_of_rank0" not in convert(source).after


def test_buffers_are_sent_through_horovod():
    source = EVALUATION.format(
        evaluation="model.eval()", context="if epoch > 1:", layer="BatchNorm1d(2)"
    )
    converted = convert(source, target=Target.HOROVOD).after
    assert "hvd.broadcast_(buffer.detach(), root_rank=0)" in converted
    assert "dist." not in converted


IN_A_SHARE = (
    """\
def scores(of, x):
    {first}
    return of(x)
for epoch in range(2):
    for (x,) in loader:
"""
    + STEP
    + """\
    total = 0
    with torch.no_grad():
        for (x,) in val:
            {second}
            total += scores(model, x).sum().item()
    print(total)
"""
)


@pytest.mark.parametrize(
    ("first", "second"), [("of.eval()", "pass"), ("pass", "model.eval()")]
)
def test_buffers_are_not_sent_in_a_loop_over_shares(first, second):
    head = EVALUATION.format(evaluation="", context="", layer="BatchNorm1d(2)")
    source = head.partition("for epoch")[0] + IN_A_SHARE
    converted = convert(source.format(first=first, second=second)).after
    assert "buffers_of_rank0(of)" not in converted
    assert f"\n    {first}\n" in converted
    assert f"\n            {second}\n" in converted
    if second == "model.eval()":
        assert "\n        buffers_of_rank0(model)\n        for (x,) in" in converted


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        (
            "r = [model(x) for (x,) in val]",
            "r = [model(x) for (x,) in as_on_rank0(val)]",
        ),
        (
            "r = sum(x for (x,) in enumerate(val))",
            "r = sum(x for (x,) in enumerate(val))",
        ),
        (
            "keep(evaluate(model, val))",
            "keep(evaluate(unwrap(buffers_of_rank0(model)), as_on_rank0(val)))",
        ),
        (
            "evaluate(model, loader)",
            "evaluate(unwrap(buffers_of_rank0(model)), undivided(loader))",
        ),
        ("r = model.eval()(x)", "r = buffers_of_rank0(model).eval()(x)"),
        (
            "torch.save(scores(), 'a')",
            "(torch.save, OnRank0())[RANK > 0](scores(), 'a')",
        ),
        (
            "with open('a', 'w') as file: file.write(scores())",
            "with open(rank0_file('a'), 'w') as file: file.write(scores())",
        ),
    ],
)
def test_all_ranks_evaluate_in_other_forms(lines, after):
    head = EVALUATION.format(evaluation=lines, context="if 1:", layer="BatchNorm1d(2)")
    scores = "def scores():\n    return [model(x) for (x,) in val]\n"
    source = head.partition("    out = []")[0].replace(
        "for epoch", scores + "for epoch"
    )
    converted = convert(source).after
    assert f"\n    {after}\n" in converted
    compile(converted, "train.py", "exec")


def test_batches_of_a_generator_are_those_of_rank_0_once():
    source = EVALUATION.format(evaluation="", context="", layer="Linear(2, 2)")
    source = source.partition("    out = []")[0].replace(
        "for epoch",
        "@torch.no_grad()\ndef outputs():\n    for (x,) in val:\n"
        "        yield model(x)\nfor epoch",
    )
    source += (
        "    total = 0\n    with torch.no_grad():\n        for y in outputs():\n"
        "            total += y.sum().item()\n    print(total)\n"
    )
    converted = convert(source).after
    assert "    for (x,) in as_on_rank0(val):\n" in converted
    assert "share_of(" not in converted
    assert "sum_over_ranks(total)" not in converted


def test_a_model_of_layers_made_elsewhere_may_have_buffers():
    source = EVALUATION.format(
        evaluation="model.eval()", context="if epoch > 1:", layer="Linear(2, 2)"
    )
    made = "layers = [torch.nn.BatchNorm1d(2)]\nmodel = torch.nn.Sequential(*layers)\n"
    source = re.sub(r"model = torch.*\n", made, source, count=1)
    assert "buffers_of_rank0(model).eval()" in convert(source).after


EPOCHS_WITH_NEXT = (
    """\
def train_epoch():
    model.train()
    for (x,) in loader:
"""
    + STEP
    + """\
held = iter(val)
for epoch in range(2):
    first = next(held)
    train_epoch()
    model.eval()
    out = []
    with torch.no_grad():
        for (x,) in val:
            out.append(model(x).mean())
    if sum(out) > 3:
        break
"""
)


def test_a_loop_that_calls_a_function_that_trains_is_not_over_shares():
    head = EVALUATION.format(evaluation="", context="", layer="BatchNorm1d(2)")
    converted = convert(head.partition("for epoch")[0] + EPOCHS_WITH_NEXT).after
    assert "buffers_of_rank0(model).eval()" in converted
    assert "in as_on_rank0(val):" in converted
