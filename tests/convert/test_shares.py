"""Only what comes from a rank's own samples is reduced over ranks."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
import torch

from stretto.convert import Choices, convert_source
from stretto.convert._support import text_of
from support.conversions import convert, open_notes

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(8, 2), torch.ones(8).long())
loader = DataLoader(data, batch_size=4)
b = 4
test_x, test_y = torch.ones(6, 2), torch.ones(6).long()
test_loader = DataLoader(TensorDataset(test_x, test_y), batch_size=4)


def hits(x, y):
    return (model(x).argmax(1) == y).sum().item()


for epoch in range(2):
    total = 0.0
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
{line}
"""
RIGHT = "(model(test_x).argmax(1) == test_y)"


def with_line(line):
    source = SCRIPT.format(line=textwrap.indent(line, " " * 8))
    return convert_source(source, name="train.py", choices=Choices())


@pytest.mark.parametrize(
    "line",
    [
        f"print({RIGHT}.sum().item())",
        f"print({RIGHT}.sum().item() / len(test_y))",
        f"print({RIGHT}.sum().item() / float(test_y.size(0)))",
        f"acc = float({RIGHT}.numpy().astype(int).sum()) / float(test_y.numel())",
        "p = torch.max(model(test_x), 1)[1]\nprint((p == test_y).sum().item())",
        "t = F.cross_entropy(model(test_x), test_y, reduction='sum')\nprint(t.item())",
        "tx, ty = next(iter(test_loader))\nprint((model(tx) > 0).sum().item())",
        "for tx, ty in test_loader:\n    total += (model(tx) > 0).sum().item()",
        "print(hits(test_x, test_y))",
    ],
)
def test_what_every_rank_has_whole_is_not_summed(line):
    conversion = with_line(line)
    assert "sum_over_ranks" not in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (
            "print(step * b + len(x))",
            "print0(step * b + sum_over_ranks(len(x)))",
        ),
        (
            "print(f'{100.0 * (step * b + x.size(0)) / len(data)}')",
            "{100.0 * (step * b + sum_over_ranks(x.size(0))) / len(data)",
        ),
        ("print((x > 0).sum().item() + 1)", "sum_over_ranks((x > 0).sum().item()) + 1"),
        ("print(step * len(x))", "sum_over_ranks(step * len(x))"),
        (
            "print(step * loader.batch_size + len(x))",
            "sum_over_ranks(step * loader.batch_size + len(x))",
        ),
        ("print(1 / loss.item())", "print0(1 / mean_over_ranks(loss.item()))"),
    ],
)
def test_only_the_part_that_differs_is_reduced(line, want):
    assert want in with_line(line).after


@pytest.mark.parametrize(
    ("added", "how"),
    [
        ("(model(x).argmax(1) == y).sum().item() / len(data)", "sum"),
        ("loss.item() * x.size(0) / len(loader.dataset)", "sum"),
        ("loss.item() / len(loader)", "mean"),
        ("(model(x).argmax(1) == y).sum().item() / len(y)", "mean"),
    ],
)
def test_the_length_of_the_data_divides_and_is_not_a_count_of_the_rank(added, how):
    conversion = with_line(f"total += {added}")
    assert f"total = {how}_over_ranks(total)" in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    "line",
    [
        # A share of a number that differs by rank.
        "print((((x - y[:, None]) ** 2).sum() / (x - x.mean()).pow(2).sum()).item())",
        "kept = (y > 0).sum()\nprint(((model(x).argmax(1) == y).sum() / kept).item())",
        "print((x.sum() / torch.sum(x > 0)).item())",
        # A mean of what reads all samples.
        "print(((x - x.mean()) ** 2).mean().item())",
        "print(torch.mean((x - x.mean(dim=0)).square()).item())",
        "print((x / torch.max(x)).mean().item())",
        "print((x - 1).mean().abs().item())",
    ],
)
def test_a_share_or_mean_that_reads_what_differs_by_rank_is_listed(line):
    asked = open_notes(with_line(line))
    assert len(asked) == 1
    assert "is a mean or a sum" in asked[0]


@pytest.mark.parametrize(
    "line",
    [
        "print(((x - x.mean(1, keepdim=True)) ** 2).mean().item())",
        "print((model(x).max(1)[1] == y).float().mean().item())",
        "print((x - 1).abs().mean().item())",
    ],
)
def test_a_mean_of_what_reads_one_sample_is_the_mean_of_ranks(line):
    assert open_notes(with_line(line)) == []


def test_the_root_of_a_mean_is_listed():
    asked = open_notes(with_line("print(loss.sqrt().item())"))
    assert len(asked) == 1
    assert "`loss.sqrt().item()` is a mean or a sum" in asked[0]


@pytest.mark.parametrize(
    "setting", ['"inf"', '"-inf"', 'CONFIG["rate"]', 'CONFIG.get("rate", "0.1")']
)
def test_settings_are_no_numbers_of_a_rank(setting):
    conversion = with_line(f"print(float({setting}))")
    assert f"print0(float({setting}))" in conversion.after
    assert open_notes(conversion) == []


def test_a_number_of_a_step_that_a_dict_keeps_is_reduced_or_listed():
    conversion = with_line('kept = {"loss": loss}\nprint(float(kept["loss"]))')
    assert "mean_over_ranks" in conversion.after


@pytest.mark.parametrize("kept", ['kept["loss"] = loss', "kept.update(loss=loss)"])
def test_an_element_that_a_step_sets_is_no_setting(kept):
    source = SCRIPT.format(
        line=textwrap.indent(f'{kept}\nprint(float(kept["loss"]))', " " * 8)
    ).replace("for epoch", "kept = {}\nfor epoch", 1)
    conversion = convert_source(source, name="train.py", choices=Choices())
    assert 'mean_over_ranks(float(kept["loss"]))' in conversion.after


def test_a_mean_of_equal_integers_stays_an_integer():
    """``"{:d}".format(label.item())`` failed in the converted script."""
    text = text_of("_reduced", horovod=False, per_rank_batch=False, seeds=())

    def all_reduce(total):
        total *= 2

    names = {"torch": torch, "dist": SimpleNamespace(all_reduce=all_reduce)}
    exec(compile(text, "inserted", "exec"), names)
    assert f"{names['_reduced']([7], 2):d}" == "7"
    assert names["_reduced"]([7, 2.0], 1) == [14, 4.0]
    assert isinstance(names["_reduced"]([2.0], 2), float)


@pytest.mark.parametrize("count", ["len(x)", "x.shape[0]", "x.size(0)"])
@pytest.mark.parametrize("added", ["share", "right / COUNT"])
def test_parts_of_a_mean_that_is_reduced_are_not_reduced_too(count, added):
    after = with_line(
        "right = (model(x).argmax(1) == y).sum().item()\n"
        f"share = right / {count}\ntotal += {added.replace('COUNT', count)}"
    ).after
    assert "right = (model(x)" in after
    assert "= sum_over_ranks(" not in after
    assert "total = mean_over_ranks(total)" in after


SUM_FORMS = (
    "total = total + {}",
    "total = {} + total",
    "total: float = total + {}",
    "total = torch.add(total, {})",
    "total = total.add({})",
    "total = total + 0 + {}",
)
TERMS = (
    "loss.detach()",
    "(model(x).argmax(1) == y).sum()",
)
READS = (
    "print(float(total / len(data)))",
    "mean = (total / len(data)).item()\n    print(f'{mean:.4f}')",
    "print(f'{(total / count).item():.4f}')",
    "print(total / count)",
)


def summed(added, read):
    plus = "+=" if "+=" in added else "= count +"
    line = f"{added}\ncount {plus} 1"
    script = SCRIPT.replace("total = 0.0", "total = 0.0\n    count = 0")
    text = script.format(line=textwrap.indent(line, " " * 8)) + f"    {read}\n"
    conversion = convert_source(text, name="train.py", choices=Choices())
    lines = conversion.after.partition("        opt.step()\n")[2].splitlines()
    return [s for s in lines if not s.startswith("        ")], open_notes(conversion)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("form", SUM_FORMS)
def test_every_form_of_a_sum_is_reduced_once(form, term, read):
    want = summed(f"total += {term}", read)
    assert summed(form.format(term), read) == want


def test_a_sum_with_parts_of_two_kinds_is_reduced_part_by_part():
    after = with_line("total += (x > 0).sum().item()\ntotal += 1").after
    assert "total += sum_over_ranks((x > 0).sum().item())" in after
    assert "total = sum_over_ranks(total)" not in after


TRAINED = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
"""
BEGUN = """\
for epoch in range(2):
    seen = {begin}
    for (x,) in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
        seen += len(x)
    print(seen)
"""


def test_a_sum_that_begins_at_zero_is_reduced_once():
    assert (
        "    seen = sum_over_ranks(seen)\n"
        in convert(TRAINED + BEGUN.format(begin="0")).after
    )


@pytest.mark.parametrize("begin", ["5", "epoch", "-1", "float(3)"])
def test_a_sum_that_may_begin_elsewhere_counts_its_beginning_once(begin):
    after = convert(TRAINED + BEGUN.format(begin=begin)).after
    assert "        seen += sum_over_ranks(len(x))\n" in after
    assert "seen = sum_over_ranks(seen)" not in after


SCORED = """\
test = DataLoader(TensorDataset(torch.ones(9, 2)), batch_size=4)
for (x,) in loader:
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
count = {begin}
with torch.no_grad():
    for (x,) in test:
        count += model(x).argmax(1).sum().item()
print(count)
"""


@pytest.mark.parametrize(("begin", "divided"), [("0", True), ("7", False)])
def test_an_evaluation_is_divided_if_its_sums_begin_at_zero(begin, divided):
    after = convert(TRAINED + SCORED.format(begin=begin)).after
    assert ("count = sum_over_ranks(count)" in after) == divided


EVALUATED = """\
    right = 0.0
    for x, y in test_loader:
        with torch.no_grad():
            out = model(x)
        right += (out.argmax(1) == y).float().mean()
    print(right / len(test_loader))
"""


def test_what_is_set_without_gradient_in_a_whole_evaluation_is_equal_on_all_ranks():
    source = SCRIPT.format(line="        out = model(x)") + EVALUATED
    conversion = convert(source)
    assert open_notes(conversion) == []
    assert "for x, y in as_on_rank0(test_loader):" in conversion.after


def test_what_may_not_be_set_may_still_be_a_ranks_own():
    source = SCRIPT.format(line="        out = model(x)") + EVALUATED.replace(
        "with torch.no_grad():", "if len(x) == 4:"
    )
    assert len(open_notes(convert(source))) == 1


def test_an_entry_names_all_values_of_its_call():
    asked = open_notes(with_line('print(f"{x.max()} {y.max()}", x.min(), y.min())'))
    assert len(asked) == 1
    for name in ("x.max()", "y.max()", "x.min()", "y.min()"):
        assert f"`{name}`" in asked[0]
