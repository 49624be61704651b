"""A wrapped model given to code that reads it, in another file or a library."""

from __future__ import annotations

import pytest

from stretto.convert import Choices, convert_source
from stretto.errors import SpecError
from support.conversions import TRAINING, open_notes

IMPORTS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from helpers import compute_loss, evaluate, show, train_epoch, work

"""
MODEL = "torch.nn.Linear(2, 1)"
SCRIPT = (
    IMPORTS
    + TRAINING.replace(MODEL, f"torch.nn.Sequential({MODEL})")
    + "        {line}\n"
)


def with_line(line):
    source = SCRIPT.format(line=line)
    return convert_source(source, name="train.py", choices=Choices())


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("score = evaluate(model, x)", "evaluate(unwrap(model), x)"),
        ("score = evaluate(net=model)", "evaluate(net=unwrap(model))"),
        ("with torch.no_grad(): work(model)", "work(unwrap(model))"),
        ("kind = isinstance(model, torch.nn.Linear)", "isinstance(unwrap(model), "),
        ("n = getattr(model, 'n', 0)", "getattr(unwrap(model), 'n', 0)"),
        ("n = len(model)", "len(unwrap(model))"),
        ("w = model[0].weight", "unwrap(model)[0].weight"),
        ("torch.onnx.export(model, x, 'a')", "torch.onnx.export(unwrap(model)"),
        ("text = f'{model}'", "f'{unwrap(model)}'"),
        ("for layer in model: show(layer)", "for layer in unwrap(model):"),
    ],
)
def test_code_that_reads_a_model_gets_it_without_the_wrapper(line, want):
    conversion = with_line(line)
    assert want in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    "line", ["train_epoch(model, loader, opt)", "work(model)", "evaluate(model, opt)"]
)
def test_a_function_of_another_file_that_may_train_is_listed(line):
    conversion = with_line(line)
    assert line in conversion.after
    (note,) = open_notes(conversion)
    assert "which is in another file, trains `model`" in note


def test_a_loss_that_another_file_computes_keeps_the_wrapper():
    conversion = with_line("more = evaluate(model, x); more.backward()")
    assert "evaluate(model, x)" in conversion.after
    assert any("trains `model`" in note for note in open_notes(conversion))


@pytest.mark.parametrize("line", ["y = model[0](x)", "for f in model: x = f(x)"])
def test_training_through_layers_that_the_wrapper_does_not_see_is_refused(line):
    with pytest.raises(SpecError, match="DistributedDataParallel does not see"):
        with_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "sample = model.generate(x)",
        "loss = model.generate(x)",
        "sample = model.generate(x).detach().cpu()",
    ],
)
def test_a_method_beside_a_forward_in_each_step_is_not_refused(line):
    """It was, also where it draws a sample to show; gradients are exchanged."""
    conversion = with_line(line)
    assert line.replace("model", "unwrap(model)") in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    "forward",
    [
        "if epoch:\n            out = model(x)\n        loss = model.loss(x)",
        "loss = (epoch and model(x)).mean() + model.loss(x)",
        "for y in x:\n            out = model(y)\n        loss = model.loss(x)",
        "loss = model.loss(x)\n        loss.backward()\n        loss = model(x).mean()",
        "loss = model.loss(x)\n        with torch.no_grad():\n            model(x)",
    ],
)
def test_a_method_in_a_step_that_may_have_no_forward_is_refused(forward):
    source = SCRIPT.format(line="pass").replace("loss = model(x).mean()", forward)
    source = source.replace("epoch in range(2):", "epoch in range(2):\n    model(x)")
    with pytest.raises(SpecError, match="DistributedDataParallel does not see"):
        convert_source(source, name="train.py", choices=Choices())


def test_a_method_after_a_forward_in_either_branch_is_not_refused():
    forward = (
        "if epoch:\n            out = model(x)\n        else:\n"
        "            out = model(x + 1)\n        loss = model.loss(out)"
    )
    source = SCRIPT.format(line="pass").replace("loss = model(x).mean()", forward)
    after = convert_source(source, name="train.py", choices=Choices()).after
    assert "loss = unwrap(model).loss(out)" in after


def test_a_method_beside_a_forward_that_may_leave_out_a_layer_is_refused():
    """DistributedDataParallel would take the layer for unused, and backward fails."""
    net = (
        "class Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a = torch.nn.Linear(2, 1)\n"
        "        self.b = torch.nn.Linear(2, 1)\n"
        "    def forward(self, x, both=False):\n"
        "        return self.a(x) + self.b(x) if both else self.a(x)\n"
        "    def loss(self, x):\n        return self.b(x).mean()\n\n"
    )
    source = IMPORTS + net + TRAINING.replace(MODEL, "Net()")
    source = source.replace("model(x).mean()", "model(x).mean() + model.loss(x)")
    with pytest.raises(SpecError, match="DistributedDataParallel does not see"):
        convert_source(source, name="train.py", choices=Choices())
