"""Evaluations that share the step's function with training count each sample once."""

from __future__ import annotations

import pytest

from support.conversions import convert, open_notes, refused

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
val = DataLoader(TensorDataset(torch.ones(9, 2)), batch_size=3)
"""
FUNCTION = """\


def step(batch, {flag}):
    (x,) = batch
    loss = model(x).mean()
    if {test}:
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item() * len(x)


"""
LOOPS = """\
for epoch in range(2):
    for batch in loader:
        {train}
    model.eval()
    total = 0.0
    {around}
        for batch in val:
            total += {evaluate}
    model.train()
    print(total / 9)
"""
VALUE = "loss.item() * len(x)"


def step(flag="train=True", test="train"):
    return FUNCTION.format(flag=flag, test=test)


def loops(train, evaluate, around="with torch.no_grad():"):
    return LOOPS.format(train=train, evaluate=evaluate, around=around)


CALLS = [
    ("train=True", "train", "step(batch)", "step(batch, train=False)"),
    ("train=True", "train", "step(batch)", "step(batch, False)"),
    ("train=False", "train", "step(batch, True)", "step(batch)"),
    ("optimizer=None", "optimizer is not None", "step(batch, opt)", "step(batch)"),
    ("mode='fit'", "mode == 'fit'", "step(batch)", "step(batch, mode='test')"),
    ("test=False", "(not test)", "step(batch)", "step(batch, test=True)"),
]


@pytest.mark.parametrize("around", ["with torch.no_grad():", "if True:"])
@pytest.mark.parametrize(("flag", "test", "train", "evaluate"), CALLS)
def test_a_loop_whose_calls_do_not_train_is_not_divided(
    flag, test, train, evaluate, around
):
    text = HEAD + step(flag, test) + loops(train, evaluate, around)
    conversion = convert(text)
    assert "val = DataLoader(TensorDataset(torch.ones(9, 2)), batch_size=3)" in (
        conversion.after
    )
    reduced = f"return (sum_over_ranks({VALUE}) if {test} else {VALUE})"
    assert reduced in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize("test", ["model.training", "torch.is_grad_enabled()"])
def test_a_call_without_gradients_does_not_train(test):
    text = HEAD + step("more=None", test) + loops("step(batch)", "step(batch)")
    after = convert(text).after
    assert "for batch in as_on_rank0(val):" in after
    assert f"return (sum_over_ranks({VALUE}) if {test} else {VALUE})" in after


METHODS = """\


class Trainer:
    def __init__(self):
        self.on = True

    def step(self, batch, train=True):
        (x,) = batch
        loss = model(x).mean()
        if not {test}:
            return loss.item() * len(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item() * len(x)


trainer = Trainer()
"""


def test_a_method_that_returns_before_the_backward_does_not_train():
    calls = loops("trainer.step(batch)", "trainer.step(batch, train=False)")
    after = convert(HEAD + METHODS.format(test="train") + calls).after
    assert "for batch in as_on_rank0(val):" in after
    assert f"return (sum_over_ranks({VALUE}) if train else {VALUE})" in after


def test_a_flag_whose_value_does_not_show_is_listed():
    calls = loops("trainer.step(batch)", "trainer.step(batch)", "if True:")
    conversion = convert(HEAD + METHODS.format(test="self.on") + calls)
    assert any(
        "whether each pass of this loop trains" in t for t in open_notes(conversion)
    )


def test_a_function_between_hands_on_the_flag():
    between = "def both(batch, train):\n    return step(batch, train)\n\n\n"
    calls = loops("both(batch, True)", "both(batch, False)", "if True:")
    after = convert(HEAD + step() + between + calls).after
    assert "for batch in as_on_rank0(val):" in after
    assert f"return (sum_over_ranks({VALUE}) if train else {VALUE})" in after


PHASES = """\
loaders = {"train": loader, "val": val}
for epoch in range(2):
    for phase in ("train", "val"):
        is_train = phase == "train"
        total = 0.0
        for batch in loaders[phase]:
            total += step(batch, is_train)
        print(total)
"""
RUN = """\
def run(data, train=True):
    total = 0.0
    for batch in data:
        total += step(batch, train)
    return total


for epoch in range(2):
    print(run(loader), run(val, train=False))
"""


@pytest.mark.parametrize(
    ("loop", "condition", "batches"),
    [
        (PHASES, "is_train", "loaders[phase]"),
        (RUN, "train", "data"),
        (loops("step(batch)", "step(batch, model.training)"), None, "val"),
    ],
)
def test_a_flag_that_a_loop_knows_decides_its_passes(loop, condition, batches):
    after = convert(HEAD + step() + loop).after
    if condition is None:
        assert f"in as_on_rank0({batches})" in after
    else:
        assert f"trains = {condition}\n" in after
        assert f"in batches_of_pass({batches}, trains)" in after
        assert f"return (sum_over_ranks({VALUE}) if train else {VALUE})" in after


def test_an_evaluation_of_the_training_loader_takes_all_samples():
    calls = loops("step(batch)", "step(batch, train=False)").replace(
        "in val", "in loader"
    )
    assert "for batch in undivided(loader):" in convert(HEAD + step() + calls).after


def test_branches_that_both_train_decide_nothing():
    both = step("twice", "twice").replace(
        "    return",
        "    else:\n        loss.backward()\n        opt.step()\n    return",
    )
    text = HEAD + both + loops("step(batch, x)", "step(batch, y)", "if True:")
    assert open_notes(convert(text)) == []


def test_a_script_in_which_no_call_trains_is_refused():
    calls = loops("step(batch, False)", "step(batch, train=False)")
    assert "so nothing trains" in refused(HEAD + step() + calls)
