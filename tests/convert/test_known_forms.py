"""Common forms of scripts that a conversion knows, without notes that are untrue."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from torch.utils.data import DataLoader

from support.conversions import convert, open_notes

SCRIPT = """\
import csv
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

{before}
data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
model = {model}
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4)
{setting}
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
{step}
{after}
"""
STEP = """\
opt.zero_grad()
loss = F.mse_loss(model(x), y)
loss.backward()
opt.step()
"""


def script(
    step: str = STEP,
    *,
    before: str = "",
    setting: str = "",
    after: str = "",
    model: str = "nn.Linear(2, 1)",
) -> str:
    return SCRIPT.format(
        step=textwrap.indent(step, " " * 8),
        before=before,
        setting=setting,
        after=after,
        model=model,
    )


STOPPER = """\
class Stopper:
    def __init__(self, trace_func=print):
        self.trace_func = trace_func

    def __call__(self, loss):
        self.trace_func("loss", loss)

"""


@pytest.mark.parametrize(
    ("setting", "converted"),
    [
        ("say = print", "say = print0"),
        ("stopper = Stopper(trace_func=print)", "Stopper(trace_func=print0)"),
        ("list(map(print, [1]))", "map(print0, [1])"),
    ],
)
def test_print_as_a_value_prints_on_rank_0(setting, converted):
    after = convert(script(before=STOPPER, setting=setting)).after
    assert converted in after
    assert "def __init__(self, trace_func=print0):" in after


def test_a_script_s_own_print_stays_a_value():
    own = "def print(*values):\n    pass\n"
    after = convert(script(before=own, setting="say = print")).after
    assert "say = print\n" in after


@pytest.mark.parametrize("file", ["log = csv.writer({})", "log = {}"])
@pytest.mark.parametrize("mode", ["'w'", "mode='a', newline=''"])
def test_a_file_that_stays_open_is_written_on_rank_0(file, mode):
    conversion = convert(script(setting=file.format(f"open('log.csv', {mode})")))
    assert f"open(rank0_file('log.csv'), {mode})" in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize("opened", ["open('a', 'x')", "open('a', 'w+')", "p.open('w')"])
def test_a_file_that_may_be_read_or_must_be_new_is_listed(opened):
    notes = open_notes(convert(script(setting=f"log = {opened}")))
    assert ["opens a file for writing on every rank" in note for note in notes] == [
        True
    ]


def test_a_file_that_is_open_during_training_is_written_on_rank_0():
    source = textwrap.indent(STEP + "f.write(f'{loss.item()}')\n", " " * 8)
    loop = f"for epoch in range(2):\n    for x, y in loader:\n{source}"
    block = "with open('log', 'w') as f:\n" + textwrap.indent(loop, "    ")
    before, _, _ = script().partition("for epoch")
    conversion = convert(before + block)
    assert "with open(rank0_file('log'), 'w') as f:" in conversion.after
    assert "f.write(f'{mean_over_ranks(loss.item())}')" in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ("torch.save(model.state_dict(), path := 'a.pt')", "torch.save"),
        ("torch.save({'n': (path := 'a')}, os.path.join('a', 'b'))", "torch.save"),
        ("model.save_pretrained(path := 'a')", "unwrap(model).save_pretrained"),
        ("np.save(str(path := 'a'), np.zeros(2))", "np.save"),
    ],
)
def test_all_ranks_set_a_name_in_a_call_of_rank_0(line, function):
    imports = "import os\nimport numpy as np"
    conversion = convert(script(before=imports, after=f"{line}\nprint(path)"))
    assert f"\n({function}, OnRank0())[RANK > 0](" in conversion.after
    assert open_notes(conversion) == []


def test_all_ranks_set_a_name_in_a_writer_s_call():
    setting = "w = SummaryWriter(path := 'a')\nprint(path)"
    imports = "from torch.utils.tensorboard import SummaryWriter"
    after = convert(script(before=imports, setting=setting)).after
    assert "w = (SummaryWriter, OnRank0())[RANK > 0](path := 'a')\n" in after


def test_a_name_of_a_lambda_in_a_call_of_rank_0_is_its_own():
    line = "np.save('a', (lambda: (path := 'a'))())"
    after = convert(script(before="import numpy as np", after=line)).after
    assert f"if RANK == 0:\n    {line}\n" in after


BLOCK = "with open('log', 'w') as f:\n    {}\n{}"


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("f.write(text := 'a')", "print(text)"),
        ("text = 'a'; f.write(text)", "print(text)"),
        ("n = f.write('a')", "def show():\n    print(n)\nshow()"),
        ("for line in 'ab': f.write(line)", "print(line)"),
        ("f.write('a')", "f.close()"),
        ("model.seen = f.write('a')", "print(model.seen)"),
    ],
)
def test_all_ranks_set_a_name_in_a_block_that_writes(line, read):
    conversion = convert(script(after=BLOCK.format(line, read)))
    assert "\nwith open(rank0_file('log'), 'w') as f:" in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("f.write(text := 'a')", "text = 'b'\nprint(text)"),
        ("text = 'a'; f.write(text)", "def show(text):\n    print(text)\nshow('b')"),
        ("for line in 'ab': f.write(line)", "for line in 'ab': print(line)"),
        ("f.write('a')", "with open('log') as f: print(f.read())"),
        ("(n, m) = f.write('a'), 1", "n, (m, *k) = 1, (2, 3)"),
    ],
)
def test_a_block_whose_names_no_other_line_reads_is_rank_0s(line, read):
    after = convert(script(after=BLOCK.format(line, read))).after
    assert "if RANK == 0:\n    with open('log', 'w') as f:" in after


def test_a_block_that_sets_a_name_and_cannot_write_nothing_is_listed():
    block = "with open('log', 'x') as f:\n    f.write(text := 'a')\nprint(text)"
    notes = open_notes(convert(script(after=block)))
    assert any("because the block sets `text` for" in note for note in notes)


def test_ranks_wait_before_they_read_what_rank_0_wrote():
    read = "log.close()\nprint(open('log.csv').read())"
    conversion = convert(script(setting="log = open('log.csv', 'w')", after=read))
    assert "dist.barrier()\nprint0(open('log.csv').read())" in conversion.after


ACCUMULATED = """\
loss = F.mse_loss(model(x), y)
(loss / micro_steps).backward()
if (i + 1) % micro_steps == 0:
    opt.step()
    opt.zero_grad()
"""


def test_a_number_of_micro_steps_that_divides_the_loss_is_equal_on_all_ranks():
    conversion = convert(script(ACCUMULATED, setting="micro_steps = 2"))
    assert open_notes(conversion) == []
    shown = convert(
        script(ACCUMULATED + "print(micro_steps)", setting="micro_steps = 2")
    )
    assert "print0(micro_steps)" in shown.after


QUANTIZED = """\
class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        z = self.first(x)
        commitment = F.mse_loss(z, x) + 0.25 * F.mse_loss(x, z)
        return self.last(z), commitment

"""
TWO_LOSSES = """\
out, extra = model(x)
loss = F.mse_loss(out, y) + extra
opt.zero_grad()
loss.backward()
opt.step()
"""


@pytest.mark.parametrize(
    ("step", "after", "converted"),
    [
        ("total = extra.item()", "", "total = mean_over_ranks(extra.item())"),
        ("print(float(extra))", "", "print0(mean_over_ranks(float(extra)))"),
        ("", "    print(extra.item())", "print0(mean_over_ranks(extra.item()))"),
    ],
)
def test_a_second_loss_that_the_model_returns_is_shown_to_be_a_mean(
    step, after, converted
):
    source = script(
        TWO_LOSSES + step, before=QUANTIZED, model="Quantized()", after=after
    )
    conversion = convert(source)
    assert converted in conversion.after
    assert open_notes(conversion) == []


def test_a_second_loss_that_is_added_up_is_shown_to_be_a_mean():
    source = script(
        TWO_LOSSES + "total += extra.item()",
        before=QUANTIZED,
        model="Quantized()",
        setting="total = 0.0",
    )
    assert open_notes(convert(source)) == []


def test_a_second_loss_that_is_no_mean_is_listed():
    net = QUANTIZED.replace("0.25 * F.mse_loss(x, z)", "F.mse_loss(x, z).sqrt()")
    source = script(TWO_LOSSES + "print(extra.item())", before=net, model="Quantized()")
    notes = open_notes(convert(source))
    assert any("`extra.item()` is a mean or a sum" in note for note in notes)


CENTERED = STEP.replace("model(x)", "model(x - every.mean(0))")


@pytest.mark.parametrize(
    ("options", "notes"),
    [("batch_size=8", 0), ("batch_size=8, shuffle=False", 0), ("8, shuffle=True", 1)],
)
def test_a_batch_of_an_undivided_loader_in_order_is_the_same_on_each_rank(
    options, notes
):
    first = f"every, _ = next(iter(DataLoader(data, {options})))"
    conversion = convert(script(CENTERED, setting=first))
    assert len(open_notes(conversion)) == notes


HIDDEN = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        weight = next(self.parameters())
        h = weight.new({sizes}).zero_()
        return self.last(self.cell(x, h))

"""


@pytest.mark.parametrize(("sizes", "notes"), [("len(x), 3", 0), ("[len(x), 3.0]", 1)])
def test_new_with_sizes_makes_a_tensor_and_with_a_list_takes_elements(sizes, notes):
    source = script(before=HIDDEN.format(sizes=sizes), model="Net()")
    assert len(open_notes(convert(source))) == notes


def test_losses_in_a_dict_are_reduced_where_they_are_added_up():
    step = (
        STEP.replace(
            "opt.zero_grad", 'losses = {"a": F.mse_loss(model(x), y)}\nopt.zero_grad'
        )
        + "for name, part in losses.items():\n    sums[name] += part.item()\n"
    )
    conversion = convert(script(step, setting='sums = {"a": 0.0}'))
    assert "sums[name] += mean_over_ranks(part.item())" in conversion.after
    assert open_notes(conversion) == []


CENTERS = """\
class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 2))
        self.last = nn.Linear(2, 1)

    def forward(self, x, labels):
        near = x - self.places.index_select({dim}, labels)
        return self.last((near**2).sum(1, keepdim=True) + x)

"""


@pytest.mark.parametrize(("dim", "notes"), [("0", 0), ("1", 1)])
def test_rows_chosen_for_each_sample_are_rows_of_samples(dim, notes):
    step = STEP.replace("model(x)", "model(x, y.view(-1).long())")
    source = script(step, before=CENTERS.format(dim=dim), model="Centers()")
    assert len(open_notes(convert(source))) == notes


def test_two_losses_of_one_name_are_a_sum_and_a_mean():
    added = STEP + "print(loss.item())\ntotal += loss.item()\n"
    loop = "for epoch in range(2):\n    for x, y in loader:\n"
    summed = added.replace("model(x), y", "model(x), y, reduction='sum'")
    source = script(
        summed,
        setting="total = 0.0",
        after=loop + textwrap.indent(added, " " * 8),
    )
    conversion = convert(source)
    _, _, rest = conversion.after.partition("print0(sum_over_ranks(loss.item()))")
    assert "total += sum_over_ranks(loss.item())" in rest
    assert "print0(mean_over_ranks(loss.item()))" in rest
    assert "total += mean_over_ranks(loss.item())" in rest
    assert open_notes(conversion) == []


RETURNED = """\
def make_loaders():
    return {"train": DataLoader(data, batch_size=4), "val": DataLoader(data, 4)}

"""


def test_loaders_that_a_function_returns_in_a_container_are_divided_each():
    source = script(before=RETURNED, setting="loaders = make_loaders()")
    source = source.replace("enumerate(loader)", 'enumerate(loaders["train"])')
    conversion = convert(source)
    assert "loaders = divided(loaders)" in conversion.after
    names: dict[str, Any] = {"WORLD_SIZE": 2, "RANK": 1}
    _, _, function = conversion.after.partition("def divided(")
    imports = "from torch.utils.data import *\n"
    before = imports + "def per_rank(size):\n    return size // WORLD_SIZE\n"
    exec(f"{before}def divided({function.partition(chr(10) * 3)[0]}", names)
    loader = DataLoader(range(8), batch_size=4)
    for parts in (
        [*names["divided"]({"train": loader, "val": loader}).values()],
        names["divided"]([loader, loader]),
        names["divided"]((loader, loader)),
    ):
        assert [list(part.sampler) for part in parts] == [[1, 3, 5, 7]] * 2
        assert [part.batch_size for part in parts] == [2, 2]
