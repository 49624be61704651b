"""Loaders made in place, other calls of backward, and the batch size in a step."""

from __future__ import annotations

import pytest

from stretto.convert import Kind
from support.conversions import STEP, convert, open_notes, refused

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(8, 2))
"""


def step_of(line, size="16", head=HEAD, named=False):
    """A script whose step has one more line, with batches of a size."""
    sized = f"batch_size = {size}\n" if named else ""
    given = "batch_size" if named else size
    return (
        f"{head}{sized}loader = DataLoader(data, batch_size={given}, shuffle=True)\n"
        f"for epoch in range(2):\n    for (x,) in loader:\n        {line}\n{STEP}"
    )


def test_a_loader_made_in_the_loop_gets_the_epoch():
    loop = (
        "for epoch in range(2):\n    for (x,) in DataLoader(data, 4, shuffle=True):\n"
    )
    after = convert(HEAD + loop + STEP).after
    assert (
        "for (x,) in with_epoch(DataLoader(data, per_rank(4), "
        "sampler=DistributedSampler(data, shuffle=True)), epoch):\n"
    ) in after
    assert after.count("def with_epoch(") == 1
    assert "import itertools\n" in after


IN_PLACE = """\
for _ in range(2):
    for (x,) in DataLoader(data, batch_size=4, shuffle=True):
"""

BY_A_FUNCTION = """\
def made():
    return DataLoader(data, batch_size=4, shuffle=True)

for _ in range(2):
    for (x,) in made():
"""

BEFORE_THE_LOOP = """\
for _ in range(2):
    loader = DataLoader(data, batch_size=4, shuffle=True)
    for (x,) in loader:
"""


@pytest.mark.parametrize("loop", [IN_PLACE, BY_A_FUNCTION, BEFORE_THE_LOOP])
def test_a_loader_made_for_each_pass_has_another_order_in_each(loop):
    """A new sampler counts from zero, so it cannot count the passes."""
    after = convert(HEAD + loop + STEP).after
    assert "sampler.epoch + 1" not in after
    assert after.count("with_epoch(") == 2, after  # its definition, and one call


def test_the_loader_of_an_evaluation_may_be_made_in_its_loop():
    loop = (
        "for epoch in range(2):\n    for (x,) in DataLoader(data, 4, shuffle=True):\n"
    )
    evaluation = (
        "total = 0\nwith torch.no_grad():\n"
        "    for (x,) in DataLoader(data, batch_size=4):\n"
        "        total += model(x).sum().item()\nprint(total)\n"
    )
    after = convert(HEAD + loop + STEP + evaluation).after
    assert "in share_of(DataLoader(data, batch_size=4)):" in after
    assert "total = sum_over_ranks(total)" in after


@pytest.mark.parametrize(
    "line",
    [
        "seen[0] += 1",
        "left -= 1",
        "kept = seen.append(x)",
        "print(x, file=log)",
        "any(last := x)",
    ],
)
def test_an_evaluation_that_keeps_more_than_sums_is_whole_on_all_ranks(line):
    before = "total, left, seen, log, last = 0, 9, [0], None, None\n"
    evaluation = (
        f"{before}with torch.no_grad():\n"
        "    for (x,) in DataLoader(data, batch_size=4):\n"
        f"        total += model(x).sum().item()\n        {line}\n"
        "print(total, left, seen, last)\n"
    )
    loop = (
        "for epoch in range(2):\n    for (x,) in DataLoader(data, 4, shuffle=True):\n"
    )
    after = convert(HEAD + loop + STEP + evaluation).after
    assert "share_of(" not in after
    assert "in as_on_rank0(DataLoader(data, batch_size=4)):" in after


def test_a_download_within_a_loader_s_call_is_rank_0_s_first():
    head = HEAD + "class Data(TensorDataset):\n    def __init__(self, download): ...\n"
    loader = "loader = DataLoader(Data(download=True), batch_size=4, shuffle=True)\n"
    loop = "for epoch in range(2):\n    for (x,) in loader:\n"
    after = convert(head + loader + loop + STEP).after
    assert "with rank0_first():\n    dataset = Data(download=True)\nloader = " in after


def test_a_loop_over_no_loader_is_named():
    loop = "for epoch in range(2):\n    for x in batches:\n"
    said = refused(HEAD + loop + STEP)
    assert "line 8 iterates over `batches`" in said


@pytest.mark.parametrize(
    "call", ["torch.autograd.backward(loss)", "torch.autograd.backward([loss])"]
)
def test_backward_may_be_a_function_of_autograd(call):
    source = step_of("pass", "4").replace("loss.backward()", call)
    assert call in convert(source).after
    summed = source.replace(".mean()", ".sum()")
    assert "(loss * WORLD_SIZE)" in convert(summed).after


def test_backward_of_several_tensors_is_refused_with_its_line():
    source = step_of("pass", "4")
    call = "torch.autograd.backward([loss, loss])"
    said = refused(source.replace("loss.backward()", call))
    assert said.startswith("train.py:13: ")
    assert "several tensors" in said


def test_gradients_taken_by_hand_are_named():
    call = "grads = torch.autograd.grad(loss, model.parameters())"
    said = refused(step_of("pass", "4").replace("loss.backward()", call))
    assert said.startswith("train.py:13: ")
    assert "torch.autograd.grad()" in said


def test_a_branch_that_leaves_makes_no_second_backward():
    step = (
        "out = model(x)\n        if epoch == 0:\n            out.mean().backward()\n"
        "            opt.step()\n            continue\n        out.sum().backward()"
    )
    source = step_of(step, "4").replace(STEP, "        opt.step()\n")
    assert "DistributedDataParallel(model)" in convert(source).after
    both = source.replace("            continue\n", "")
    assert "a second backward()" in refused(both)


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("x = x.view(16, -1)", "x.view(per_rank(16), -1)"),
        ("y = torch.zeros(16, 1)", "torch.zeros(per_rank(16), 1)"),
        ("y = torch.zeros((16, 1))", "torch.zeros((per_rank(16), 1))"),
        ("z = torch.randn(16, 8)", "torch.randn(per_rank(16), 8)"),
        ("y = torch.full((16,), 1.0)", "torch.full((per_rank(16),), 1.0)"),
        ("y = [x[i] for i in range(16)]", "range(per_rank(16))]"),
    ],
)
def test_a_literal_batch_size_in_a_shape_becomes_this_ranks(line, becomes):
    conversion = convert(step_of(line))
    assert becomes in conversion.after
    assert any("16, the loader's batch size" in said for said in open_notes(conversion))
    named = line.replace("16", "batch_size")
    conversion = convert(step_of(named, named=True))
    assert becomes.replace("16", "batch_size") in conversion.after
    assert not open_notes(conversion)


def test_a_batch_size_that_is_another_dimension_is_listed():
    said = open_notes(convert(step_of("h = torch.zeros(1, 16, 32)")))
    assert any("line 10" in s and "per_rank(16)" in s for s in said), said


@pytest.mark.parametrize(
    "line", ["if x.size(0) != 16: continue", "if len(x) < 16: break"]
)
def test_a_batch_that_is_compared_with_the_batch_size(line):
    """Each rank's batch is smaller, so every batch would be left out."""
    after = convert(step_of(line)).after
    assert line.replace("16", "per_rank(16)") in after


def test_other_numbers_of_a_step_stay():
    for line in (
        "y = torch.zeros(8, 1)",
        "if epoch % 16 == 0: print(epoch)",
        "seen = epoch * 16",
        "y = (x / 16)",
    ):
        conversion = convert(step_of(line))
        assert "per_rank(16)" not in conversion.after.replace("=per_rank(16)", "")
        assert not open_notes(conversion), line


def test_a_sum_divided_by_the_batch_size_is_the_whole_batches_mean():
    source = step_of("pass").replace(".mean()", ".sum() / 16")
    conversion = convert(source)
    assert "(loss * WORLD_SIZE).backward()" in conversion.after
    assert not open_notes(conversion)


def test_a_batch_size_in_forward_is_found():
    net = (
        "class Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.fc = torch.nn.Linear(2, 1)\n\n"
        "    def forward(self, x):\n        return self.fc(x.view(16, 2))\n\n\n"
    )
    head = HEAD.replace("model = torch.nn.Linear(2, 1)", net + "model = Net()")
    said = open_notes(convert(step_of("pass", head=head)))
    assert any("line 10" in s and "per_rank(16)" in s for s in said), said


def test_per_rank_leaves_the_batch_size_alone():
    conversion = convert(step_of("x = x.view(16, -1)"), per_rank_batch=True)
    assert "x.view(16, -1)" in conversion.after


def test_numbers_of_parameters_are_those_of_each_rank():
    shown = "print(sum(p.sum().item() for p in model.parameters()))\n"
    after = convert(step_of("pass") + shown).after
    assert "p.sum().item() for p in" in after
    assert "sum_over_ranks" not in after


@pytest.mark.parametrize(
    "line",
    [
        "scores = model(x) @ model(x).detach().T; z = x; s = z @ z.T",
        "s = torch.mm(x, x.t())",
        "s = torch.matmul(x, x.transpose(0, 1))",
        "s = torch.cdist(x, x)",
        "losses = model(x).squeeze(); hard = losses.topk(4)",
        "s = NTXentLoss()(x)",
    ],
)
def test_samples_that_are_compared_with_each_other_are_listed(line):
    said = open_notes(convert(step_of(line, "4")))
    assert any("line 10" in s and "compares the samples" in s for s in said), said


@pytest.mark.parametrize(
    "line",
    [
        "s = x @ model.weight.T",
        "best = model(x).topk(1, dim=1)",
        "s = torch.matmul(x, x.transpose(-2, -1))",
    ],
)
def test_products_within_a_sample_are_not_listed(line):
    said = open_notes(convert(step_of(line, "4")))
    assert not any("compares the samples" in s for s in said), said


def test_a_call_of_main_on_the_line_of_its_if_is_expanded():
    body = (
        HEAD + "for epoch in range(2):\n    for (x,) in DataLoader(data, 4):\n" + STEP
    )
    lines = [f"    {line}" if line else "" for line in body.splitlines()[3:]]
    call = 'if __name__ == "__main__": main()\n'
    source = "\n".join([*body.splitlines()[:3], "def main():", *lines, call])
    after = convert(source).after
    assert 'if __name__ == "__main__":\n    join_ranks()\n' in after
    assert "    main()\n    dist.destroy_process_group()\n" in after
    compile(after, "train.py", "exec")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("DataLoader(data, batch_size=None)", "has batch_size=None"),
        ("DataLoader(data, batch_size=1, shuffle=True)", "takes one sample"),
        ("list(DataLoader(data, batch_size=4))", "a list of them"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(made, says):
    loop = "for epoch in range(2):\n    for (x,) in loader:\n"
    assert says in refused(f"{HEAD}loader = {made}\n{loop}{STEP}")


COLLATED = """\
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(8, 2))

def collate(batch):
    {body}

loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn={given})
for epoch in range(2):
    for (x,) in loader:
"""


def collated(body, given="collate"):
    """The conversion of a script whose loader makes batches by its own function."""
    return convert(COLLATED.format(body=body, given=given) + STEP)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [torch.stack([x for x, in batch if x[0] > 0])]", "leaves samples out"),
        ("return [torch.stack(list(filter(None, batch)))]", "leaves samples out"),
        ("return [torch.cat([x for x, in batch])]", "different lengths"),
        (
            "x = torch.stack(batch)\n    return [x - x.mean(0)]",
            "all samples of a batch",
        ),
        (
            "x = torch.stack(batch)\n    return [x / x.abs().max()]",
            "all samples of a b",
        ),
    ],
)
def test_a_collate_fn_that_depends_on_other_samples_is_listed(body, says):
    (note,) = open_notes(collated(body))
    assert says in note


@pytest.mark.parametrize(
    "body",
    [
        "return [torch.stack([x for x, in batch])]",
        "return [torch.cat([x.unsqueeze(0) for x, in batch], dim=0)]",
        "offsets = [len(x) for x in batch]\n    return torch.cat(batch), offsets",
        "return [pad_sequence([x for x, in batch], batch_first=True)]",
        "n = torch.tensor([len(x) for x, in batch]).max()\n    return [batch, n]",
    ],
)
def test_a_collate_fn_that_keeps_all_samples_is_not_listed(body):
    assert not [n for n in open_notes(collated(body)) if "collate_fn" in n]


def test_padding_to_the_longest_sample_of_a_rank_is_to_know():
    body = "return [pad_sequence([x for x, in batch], batch_first=True)]"
    notes = [n.text for n in collated(body).notes if n.kind is Kind.KNOW]
    assert any("pads samples to the longest of a batch" in n for n in notes)


BEFORE_A_STEP = """\
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRU(2, 1, batch_first=True)

    def init_hidden(self, n):
        return torch.zeros(1, n, 1)

    def forward(self, x, h):
        return self.cell(x, h)


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
size = 16
loader = DataLoader(TensorDataset(torch.ones(64, 3, 2)), batch_size=size)
for epoch in range(2):
    h = HIDDEN
    for (x,) in loader:
        out, h = model(x, h.detach())
        loss = out.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


@pytest.mark.parametrize(
    "made",
    [
        "torch.zeros(1, 16, 1)",
        "torch.zeros(1, size, 1).to('cpu')",
        "model.init_hidden(16)",
    ],
)
def test_a_state_of_the_batch_made_before_the_steps_is_listed(made):
    head = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\n"
    said = open_notes(convert(head + BEFORE_A_STEP.replace("HIDDEN", made)))
    assert [s for s in said if s.startswith("line 22:") and "batch size here" in s]


@pytest.mark.parametrize("made", ["torch.zeros", "next(self.parameters()).data.new"])
@pytest.mark.parametrize("place", ["    h = ", "        h = "])
def test_a_function_that_makes_a_state_of_the_batch_gets_this_ranks(place, made):
    head = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\n"
    source = head + BEFORE_A_STEP.replace("HIDDEN", "model.init_hidden(size)")
    source = source.replace("torch.zeros(1, n, 1)", f"{made}(1, n, 1)")
    if len(place) > 8:
        source = source.replace("    h = model.init_hidden(size)\n", "").replace(
            "        out, h =", "        h = model.init_hidden(size)\n        out, h ="
        )
    conversion = convert(source)
    assert f"{place}unwrap(model).init_hidden(per_rank(size))\n" in conversion.after
    assert f"{made}(1, n, 1)" in conversion.after
    assert not [s for s in open_notes(conversion) if "batch size" in s]


@pytest.mark.parametrize("where", ["with torch.no_grad():", "if epoch == 1:"])
def test_a_noise_that_the_loss_does_not_use_is_not_listed(where):
    head = f"{HEAD}size = 16\nfixed = torch.randn(size, 2)\n"
    line = f"\n        {where}\n            shown = model(fixed)"
    assert not [
        s for s in open_notes(convert(step_of(line, head=head))) if "batch size" in s
    ]


@pytest.mark.parametrize(
    "line",
    [
        "print(len(data) // batch_size + 1)",
        "print(f'{epoch * batch_size} of {len(data)}')",
        "seen = epoch * batch_size\n        print('%d' % seen)",
        "if epoch % (len(data) // batch_size) == 0:\n            print(epoch)",
    ],
)
def test_a_batch_size_that_is_only_shown_is_not_listed(line):
    conversion = convert(step_of(line, named=True))
    assert open_notes(conversion) == []
    assert line in conversion.after.replace("print0", "print")


def test_a_batch_size_that_is_not_only_shown_is_listed():
    line = "seen = epoch * batch_size\n        print(seen)\n        x = x[:seen]"
    assert any(
        "reads `batch_size`" in n
        for n in open_notes(convert(step_of(line, named=True)))
    )


def test_samples_seen_so_far_are_counted_over_ranks_under_a_name():
    line = "seen = epoch * batch_size + len(x)\n        print(seen)"
    conversion = convert(step_of(line, named=True))
    assert open_notes(conversion) == []
    assert "seen = epoch * batch_size + sum_over_ranks(len(x))" in conversion.after


@pytest.mark.parametrize(
    "given", ["model.parameters()", "[p for p in model.parameters()]"]
)
def test_the_norm_of_gradients_is_the_same_on_all_ranks(given):
    clip = (
        f"norm = torch.nn.utils.clip_grad_norm_({given}, 1.0)\n"
        "        norms.append(float(norm))"
    )
    source = step_of("pass", "4").replace(
        "        opt.step()", f"        {clip}\n        opt.step()"
    )
    conversion = convert("norms = []\n" + source + "print(sum(norms))\n")
    assert open_notes(conversion) == []
    assert "norms.append(float(norm))" in conversion.after


@pytest.mark.parametrize("name", ["size", "self.size"])
def test_a_state_that_a_method_makes_without_arguments_is_listed(name):
    head = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\n"
    source = head + BEFORE_A_STEP.replace("HIDDEN", "model.init_hidden()")
    source = source.replace("def init_hidden(self, n)", "def init_hidden(self)")
    source = source.replace("zeros(1, n, 1)", f"zeros(1, {name}, 1)")
    source = source.replace("model = Net()", "size = 16\nmodel = Net(size)")
    source = source.replace("0.1)\nsize = 16\n", "0.1)\n")
    source = source.replace(
        "__init__(self):\n        super().__init__()",
        "__init__(self, size):\n        super().__init__()\n        self.size = size",
    )
    said = open_notes(convert(source))
    assert [s for s in said if s.startswith("line 12:") and "batch size here" in s]


HELD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


class Fit:
    ones = None

    def __init__(self, bs):
        self.bs = bs
        self.net = torch.nn.Linear(2, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        {made}
        data = TensorDataset(torch.ones(64, 2))
        self.loader = DataLoader(data, batch_size=self.bs)

    def loss(self, x):
        return (self.net(x) * {read}).mean()

    def fit(self):
        for (x,) in self.loader:
            loss = {loss}
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()


Fit(16).fit()
"""
IN_STEP = "(self.net(x) * {read}).mean()"


def listed_as_held(made, read, loss):
    source = HELD.format(made=made, read=read, loss=loss.format(read=read))
    said = open_notes(convert(source))
    return [s for s in said if s.startswith("line 12:") and "batch size here" in s]


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ("self.one = torch.ones(self.bs, 1)", "self.one"),
        ("self.one = torch.ones(bs, 1)", "self.one"),
        ("self.one = torch.full((bs,), 1.0)", "self.one"),
        ("self.one = torch.arange(self.bs).double() * 0 + 1", "self.one"),
        ("self.one = torch.ones(bs, 1).to('cpu')", "self.one"),
        ("self.held = {'one': torch.ones(bs, 1)}", "self.held['one']"),
        ("self.held = dict(one=torch.ones(bs, 1))", "self.held['one']"),
        ("self.held = [torch.ones(bs, 1)]", "self.held[0]"),
        ("self.held = {}; self.held['one'] = torch.ones(bs, 1)", "self.held['one']"),
        ("self.held = []; self.held.append(torch.ones(bs, 1))", "self.held[0]"),
        ("self.net.register_buffer('one', torch.ones(bs, 1))", "self.net.one"),
    ],
)
@pytest.mark.parametrize("loss", [IN_STEP, "self.loss(x)"])
def test_a_tensor_of_the_batch_that_an_object_holds_is_listed(made, read, loss):
    assert listed_as_held(made, read, loss)


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ("self.one = torch.ones(1, 2)", "self.one"),
        ("self.held = {'one': torch.ones(2, 1)}", "self.held['one']"),
        ("self.other = torch.ones(bs, 1); self.one = 1", "self.one"),
    ],
)
def test_another_tensor_that_an_object_holds_is_not_listed(made, read):
    assert not listed_as_held(made, read, IN_STEP)


@pytest.mark.parametrize(
    ("held", "read"),
    [
        ("held = {'one': torch.ones(batch_size, 1)}", "held['one']"),
        ("held = [torch.ones(batch_size, 1)]", "held[0]"),
        ("held = {}\nheld['one'] = torch.ones(batch_size, 1)", "held['one']"),
        ("held = SimpleNamespace(one=torch.ones(batch_size, 1))", "held.one"),
        ("class held:\n    one = torch.ones(batch_size, 1)", "held.one"),
        ("held = torch.ones(batch_size, 1) * 2", "held"),
    ],
)
def test_a_tensor_of_the_batch_that_a_variable_holds_is_listed(held, read):
    head = f"{HEAD}from types import SimpleNamespace\n"
    source = step_of(f"x = x * {read}", head=head, named=True)
    said = open_notes(convert(source.replace("loader =", f"{held}\nloader =", 1)))
    assert ["batch size here" in s for s in said].count(True) == 1


def outside_steps(line):
    """A script that reads something of its training loader before the steps."""
    return step_of("pass", "4").replace("for epoch", f"{line}\nfor epoch", 1)


@pytest.mark.parametrize(
    ("line", "after"),
    [
        (
            "total = len(loader.dataset) // loader.batch_size",
            "total = len(loader.dataset) // (loader.batch_size * WORLD_SIZE)",
        ),
        ("rate = 0.1 * loader.batch_size", "0.1 * (loader.batch_size * WORLD_SIZE)"),
        ("print(loader.batch_size)", "print0((loader.batch_size * WORLD_SIZE))"),
        ("total = len(loader.sampler)", "total = len(loader.dataset)"),
        ("size = loader.batch_size", "size = (loader.batch_size * WORLD_SIZE)"),
        (
            "size = loader.batch_sampler.batch_size",
            "size = (loader.batch_sampler.batch_size * WORLD_SIZE)",
        ),
    ],
)
def test_a_size_of_a_divided_loader_is_that_of_all_ranks(line, after):
    conversion = convert(outside_steps(line))
    assert after in conversion.after
    assert open_notes(conversion) == []


def test_a_number_of_a_divided_loaders_samples_is_listed():
    line = "size = loader.sampler.num_samples\ntotal = torch.zeros(size)"
    (note,) = open_notes(convert(outside_steps(line)))
    assert note.startswith("line 8:")
    assert "since the loader is divided" in note


def test_a_size_of_a_loader_that_only_some_calls_divide_is_found_at_run_time():
    line = "def steps(of):\n    return len(of.dataset) // of.batch_size\n\n"
    line += "other = DataLoader(data, batch_size=2)\nprint(steps(loader), steps(other))"
    conversion = convert(outside_steps(line))
    assert "len(of.dataset) // whole_batch_size(of)" in conversion.after
    assert open_notes(conversion) == []


def test_a_size_of_a_loader_in_a_dict_is_that_of_all_ranks():
    line = "both = {'train': loader}\ntotal = 8 / both['train'].batch_size"
    conversion = convert(outside_steps(line))
    assert "8 / (both['train'].batch_size * WORLD_SIZE)" in conversion.after
    assert open_notes(conversion) == []


def test_a_size_of_a_loader_that_a_loop_takes_from_a_dict_is_found_at_run_time():
    line = "other = DataLoader(data, batch_size=2)\n"
    line += "both = {'train': loader, 'test': other}\n"
    line += "total = {k: 8 // v.batch_size for k, v in both.items()}"
    conversion = convert(outside_steps(line))
    assert "8 // whole_batch_size(v) for k, v" in conversion.after
    assert open_notes(conversion) == []


def test_sizes_of_a_loader_that_is_not_divided_stay():
    line = "other = DataLoader(data, batch_size=2)\n"
    line += "print(len(other.sampler) / other.batch_size)"
    assert "len(other.sampler) / other.batch_size" in convert(outside_steps(line)).after


def test_a_size_of_a_loader_stays_with_batches_of_each_rank():
    line = "total = len(loader.dataset) // loader.batch_size"
    assert line in convert(outside_steps(line), per_rank_batch=True).after


def test_a_size_of_a_loader_in_a_step_is_that_of_its_tensors():
    conversion = convert(step_of("x = x.view(loader.batch_size, -1)", "4"))
    assert "x = x.view(loader.batch_size, -1)" in conversion.after
    assert not any("this rank's part" in n for n in open_notes(conversion))


@pytest.mark.parametrize("listed", [True, False])
def test_samples_so_far_by_a_loaders_size_are_listed_unless_only_shown(listed):
    use = "opt.param_groups[0]['lr'] = 1 / seen" if listed else "print(seen)"
    source = step_of(f"seen = i * loader.batch_size\n        {use}", "4")
    source = source.replace("for (x,) in loader", "for i, (x,) in enumerate(loader)")
    said = open_notes(convert(source))
    assert any("`loader.batch_size` is this rank's" in n for n in said) is listed


@pytest.mark.parametrize("length", ["x.shape", "x.size()"])
def test_a_number_of_dimensions_is_not_a_batch_size(length):
    line = f"if len({length}) == 4:\n            x = x[:, 0, 0]"
    after = convert(step_of(line, "4")).after
    assert f"if len({length}) == 4:" in after


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("n = len(next(iter(loader))[0])", "len(next(iter(undivided(loader)))[0])"),
        (
            "first, _ = next(iter(loader))\nn = first.shape[0]",
            "next(iter(undivided(loader)))",
        ),
        (
            "for (first,) in loader:\n    break\nn = len(first)",
            "for (first,) in undivided(loader):",
        ),
        (
            (
                "def stats(of):\n    s = torch.zeros(2)\n    for (x,) in of:\n"
                "        s += x.sum(0)\n    return s\n\nn = stats(loader)"
            ),
            "for (x,) in undivided(of):",
        ),
        (
            "n = sum(len(x) for (x,) in loader)",
            "sum(len(x) for (x,) in undivided(loader))",
        ),
        (
            "first = iter(loader)\nn = len(next(first)[0])",
            "first = iter(undivided(loader))",
        ),
        ("n = len(list(loader))", "len(list(undivided(loader)))"),
        ("n = len([*loader])", "len([*undivided(loader)])"),
        (
            "n = sum(map(lambda b: len(b[0]), loader))",
            "sum(map(lambda b: len(b[0]), undivided(loader)))",
        ),
        (
            "from functools import reduce\nn = reduce(lambda a, b: a + 1, loader, 0)",
            "reduce(lambda a, b: a + 1, undivided(loader), 0)",
        ),
        (
            "from helper import mean_and_std\nn = mean_and_std(of=loader)[0]",
            "mean_and_std(of=undivided(loader))[0]",
        ),
        (
            (
                "from torch.optim.swa_utils import update_bn\nupdate_bn(loader, model)"
                "\nn = 1"
            ),
            "update_bn(undivided(loader), model)",
        ),
    ],
)
def test_what_is_taken_from_a_loader_before_the_steps_is_that_of_all_ranks(line, after):
    conversion = convert(outside_steps(f"{line}\nopt.param_groups[0]['lr'] = 0.1 * n"))
    assert after in conversion.after
    assert open_notes(conversion) == []


def test_a_pass_over_a_divided_loader_in_one_call_only_takes_all_samples():
    line = (
        "other = DataLoader(data, batch_size=4)\n\n"
        "def count(of):\n    n = 0\n    for (x,) in of:\n        n += len(x)\n"
        "    return n\n\nprint(count(loader), count(other))"
    )
    conversion = convert(outside_steps(line))
    assert "for (x,) in undivided(of):" in conversion.after
    assert "sum_over_ranks" not in conversion.after
    assert open_notes(conversion) == []


def test_ranks_share_a_pass_that_adds_up_numbers():
    line = "n = 0\nfor (x,) in loader:\n    n += len(x)\nprint(n)"
    after = convert(outside_steps(line)).after
    shared = "for (x,) in share_of(undivided(loader)):\n    n += len(x)\n"
    assert f"{shared}n = sum_over_ranks(n)" in after


@pytest.mark.parametrize(
    "line",
    [
        "from tqdm import tqdm\nbar = tqdm(loader)",
        "from more_itertools import ncycles\nit = ncycles(loader, 2)",
        "from helper import train_epoch\ntrain_epoch(loader)",
        "from helper import one_pass\none_pass(loader, opt)",
        "print(len(loader))",
    ],
)
def test_what_may_train_or_takes_no_batch_gets_a_divided_loader(line):
    assert "undivided(" not in convert(outside_steps(line)).after


def test_an_iterator_from_which_steps_continue_stays_divided():
    source = outside_steps("it = iter(loader)\nfirst = next(it)")
    source = source.replace(
        "for (x,) in loader:", "for i in range(2):\n        (x,) = next(it)"
    )
    assert "undivided" not in convert(source).after


@pytest.mark.parametrize(
    ("use", "after"),
    [
        ("if len(x) < n:\n            continue", "if len(x) < per_rank(n):"),
        ("x = x + torch.zeros(n, 2)", "torch.zeros(per_rank(n), 2)"),
    ],
)
def test_the_size_of_a_first_batch_in_a_step_is_this_ranks(use, after):
    source = step_of(use, "4")
    line = "n = len(next(iter(loader))[0])"
    source = source.replace("for epoch", f"{line}\nfor epoch", 1)
    assert after in convert(source).after


@pytest.mark.parametrize(
    ("use", "listed"),
    [
        ("x = x[:n]", True),
        ("seen = 2 * n\n        x = x[seen:]", True),
        ("opt.param_groups[0]['lr'] = 0.1 * n", False),
    ],
)
def test_the_size_of_a_first_batch_is_listed_where_a_step_cuts_with_it(use, listed):
    source = step_of(use, "4")
    line = "n = len(next(iter(loader))[0])"
    source = source.replace("for epoch", f"{line}\nfor epoch", 1)
    said = open_notes(convert(source))
    assert (
        any("reads `n`, which is the batch of all ranks" in s for s in said) is listed
    )


SAMPLED = """\
from torch.utils.data import RandomSampler, SubsetRandomSampler

def made():
    train = DataLoader(data, batch_size=4, sampler={sampler})
    valid = DataLoader(data, batch_size=4, sampler={other})
    return train, valid

loader, valid = made()
for epoch in range(2):
    for (x,) in loader:
"""


def sampled(sampler, other="None"):
    loop = SAMPLED.replace("{sampler}", sampler).replace("{other}", other)
    return HEAD + loop + STEP


def test_a_sampler_in_a_function_is_refused_with_its_line():
    said = refused(sampled("SubsetRandomSampler(range(4))"))
    assert said.startswith("train.py:10: ")
    assert "its own sampler (`SubsetRandomSampler(range(4))`)" in said
    assert "torch.utils.data.Subset" in said


def test_a_sampler_of_a_loader_that_does_not_train_is_no_reason():
    assert (
        "divided(loader)" in convert(sampled("None", "SubsetRandomSampler([1])")).after
    )


def test_the_sampler_of_shuffle_in_a_function_is_divided():
    assert "divided(loader)" in convert(sampled("RandomSampler(data)")).after
