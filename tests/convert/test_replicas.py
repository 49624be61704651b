"""What makes the models of ranks differ, though gradients are equal, is listed."""

from __future__ import annotations

import pytest

from support.conversions import convert, open_notes, refused

HEAD = """\
import os
import random
import time
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import functional_call
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

X = torch.ones(8, 2)
ds = TensorDataset(X)
loader = DataLoader(ds, batch_size=4, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


def reset(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight)


"""

NOISY = """\
class Noisy(optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p))


"""

TRAINING = """\
model, aux = Net(), Net()
opt = optim.SGD(model.parameters(), lr=0.1)
opt_aux = optim.SGD(aux.parameters(), lr=0.1)
{setup}
for epoch in range(2):
{epoch}
    for (x,) in loader:
        opt.zero_grad()
        loss = model(x).mean()
        (loss + aux(x).mean()).backward()
{step}
        opt.step()
"""


def notes_on(setup: str = "", epoch: str = "", step: str = "") -> list[str]:
    def lines(text: str, by: int) -> str:
        return "".join(" " * by + x + "\n" for x in text.splitlines())

    source = TRAINING.format(
        setup=setup, epoch=lines(epoch, 4), step=lines(step, 8)
    ).replace("\n\n", "\n")
    return open_notes(convert(HEAD + source))


@pytest.mark.parametrize(
    "change",
    [
        "model.head.reset_parameters()",
        "nn.init.xavier_uniform_(model.head.weight)",
        "model.apply(reset)",
        "model.load_state_dict(Net().state_dict())",
        "for p in model.parameters():\n    p.data.add_(torch.randn_like(p))",
        "for p in model.parameters():\n    p.data += torch.randn(p.shape)",
        "for p, q in zip(model.parameters(), Net().parameters()):\n    p.data.add_(q)",
        "for m in model.modules():\n    reset(m)\n    m.weight.data.normal_()",
    ],
)
def test_random_changes_of_parameters_in_training_are_listed(change: str) -> None:
    (note,) = notes_on(epoch=change)
    assert "changes parameters or gradients by random numbers" in note


@pytest.mark.parametrize(
    "change",
    [
        "for p in model.parameters():\n    p.grad += torch.randn_like(p)",
        "for p in model.parameters():\n    p.grad.add_(torch.normal(0, 1, p.shape))",
    ],
)
def test_random_changes_of_gradients_are_listed(change: str) -> None:
    (note,) = notes_on(step=change)
    assert "changes parameters or gradients by random numbers" in note


@pytest.mark.parametrize(
    "change",
    [
        "for p in model.parameters():\n    p.grad *= loss.detach()",
        "for p in model.parameters():\n    p.grad = p.grad * x.mean()",
    ],
)
def test_changes_of_gradients_by_a_ranks_samples_are_listed(change: str) -> None:
    assert any(
        "values of each rank's own samples, so" in n for n in notes_on(step=change)
    )


@pytest.mark.parametrize(
    ("setup", "epoch", "step"),
    [
        ("model.apply(reset)", "", ""),
        ("nn.init.normal_(model.head.weight)", "", ""),
        ("", "model.head.weight.data.zero_()", ""),
        ("", "nn.init.zeros_(model.head.weight)", ""),
        ("", "other = Net()\nother.apply(reset)", ""),
        ("", "", "for p in model.parameters():\n    p.grad.mul_(0.5)"),
        ("", "", "for p in model.parameters():\n    p.grad *= loss.item()"),
        ("", "", "noise = torch.randn_like(x)"),
        ("", "opt.param_groups[0]['lr'] = 0.1 / (epoch + 1)", ""),
        ("", "opt.param_groups[0]['lr'] = random.random()", ""),
        ("stop = 3", "if epoch > stop:\n    break", ""),
        ("", "time.sleep(0)", ""),
    ],
)
def test_equal_changes_are_not_listed(setup: str, epoch: str, step: str) -> None:
    assert notes_on(setup, epoch, step) == []


def test_an_optimizer_that_adds_noise_is_listed() -> None:
    source = TRAINING.format(setup="", epoch="", step="")
    source = source.replace("optim.SGD(model", "Noisy(model").replace("\n\n", "\n")
    (note,) = open_notes(convert(HEAD + NOISY + source))
    assert "changes parameters or gradients by random numbers" in note


@pytest.mark.parametrize(
    "value",
    ["torch.rand(1).item()", "0.1 * torch.rand(1)", "0.1 / (1 + loss.detach())"],
)
def test_a_learning_rate_that_differs_by_rank_is_listed(value: str) -> None:
    notes = notes_on(step=f"for g in opt.param_groups:\n    g['lr'] = {value}")
    assert any("ranks train with different settings" in n for n in notes)


@pytest.mark.parametrize(
    "hook",
    [
        "for p in model.parameters():\n    p.register_hook(lambda g: g.clamp(-1, 1))",
        "model.head.weight.register_hook(lambda g: g / g.norm())",
        "for p in model.parameters():\n    p.register_post_accumulate_grad_hook(reset)",
    ],
)
def test_a_hook_that_sees_a_ranks_own_gradient_is_listed(hook: str) -> None:
    (note,) = notes_on(setup=hook)
    assert "before the average over ranks" in note


STORING = """\
store = {}
def hook(module, given, out):
    store["h"] = out.pow(2).mean().sqrt()
model.body.register_forward_hook(hook)
"""


@pytest.mark.parametrize(
    "hook",
    [
        "model.body.register_forward_hook(lambda m, i, o: o / o.norm())",
        "model.body.register_forward_pre_hook(lambda m, i: (i[0] - i[0].mean(0),))",
        "model.body.register_full_backward_hook(lambda m, i, o: (i[0] / i[0].norm(),))",
        STORING,
    ],
)
def test_a_hook_of_a_module_that_may_mix_samples_is_listed(hook: str) -> None:
    (note,) = notes_on(setup=hook)
    assert "which stretto does not follow" in note


def test_a_hook_of_a_tensor_that_may_mix_samples_is_listed() -> None:
    step = "out = model(x)\nout.register_hook(lambda g: g / g.norm())"
    assert any("the hook may change a gradient" in n for n in notes_on(step=step))


@pytest.mark.parametrize(
    "hook",
    [
        "model.body.register_forward_hook(lambda m, i, o: store.append(o))",
        "model.body.register_full_backward_hook(lambda m, i, o: None)",
        "x.register_hook(lambda g: -g)",
        "x.register_hook(lambda g: g * 0.5)",
    ],
)
def test_a_hook_that_keeps_samples_apart_is_not_listed(hook: str) -> None:
    assert notes_on(setup=f"store = []\n{hook}") == []


def test_gradients_that_nothing_exchanges_are_listed() -> None:
    step = "g = torch.autograd.grad(model(x).mean(), list(model.parameters()))"
    (note,) = notes_on(step=step)
    assert "only those of backward() are exchanged" in note


def test_gradients_of_inputs_are_not_listed() -> None:
    assert notes_on(step="g = torch.autograd.grad(model(x).mean(), x)[0].norm()") == []


TRIAL = """\
def train(data, rate):
    model = Net()
    opt = optim.SGD(model.parameters(), lr=rate)
    for epoch in range(2):
        for (x,) in DataLoader(data, batch_size=4, shuffle=True):
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()


"""


@pytest.mark.parametrize(
    "trial",
    [
        "train(ds, 10 ** torch.empty(1).uniform_(-3, -1).item())",
        "rate = torch.rand(1).item()\n    train(ds, rate)",
        "data, _ = random_split(ds, [4, 4])\n    train(data, 0.1)",
        "few = torch.randint(0, 8, (8,))\n    train(Subset(ds, few.tolist()), 0.1)",
    ],
)
def test_a_trial_with_a_drawn_value_is_listed(trial: str) -> None:
    notes = open_notes(convert(f"{HEAD}{TRIAL}for trial in range(3):\n    {trial}\n"))
    assert any("since training began" in note for note in notes)


@pytest.mark.parametrize(
    "trial",
    [
        "train(ds, 10 ** np.random.uniform(-3, -1))",
        "train(random_split(ds, [4, 4], generator=torch.Generator())[0], 0.1)",
    ],
)
def test_a_trial_with_an_equal_value_is_not_listed(trial: str) -> None:
    source = f"{HEAD}{TRIAL}for trial in range(3):\n    {trial}\n"
    assert open_notes(convert(source)) == []


def test_a_data_set_drawn_in_training_is_listed() -> None:
    epoch = (
        "loader = DataLoader(Subset(ds, torch.randperm(8)[:4].tolist()), batch_size=4)"
    )
    (note,) = notes_on(epoch=epoch)
    assert "ranks divide different data sets" in note


def test_training_on_drawn_samples_beside_a_loader_is_listed() -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "def step(x):\n    opt.zero_grad()\n    model(x).mean().backward()\n"
        "    opt.step()\n"
        "for epoch in range(2):\n    for i in torch.randperm(8).tolist():\n"
        "        step(X[i])\n    for (x,) in loader:\n        step(x)\n"
    )
    assert any(
        "other samples on each rank" in n for n in open_notes(convert(HEAD + source))
    )


@pytest.mark.parametrize(
    ("setup", "test"),
    [
        ("begin = time.time()", "time.time() - begin > 60"),
        ("begin = time.perf_counter()", "60 < time.perf_counter() - begin"),
    ],
)
def test_a_time_limit_is_listed(setup: str, test: str) -> None:
    (note,) = notes_on(setup=setup, epoch=f"if {test}:\n    break")
    assert "decides on the clock" in note


def test_a_decision_on_numbers_that_samples_draw_too_is_listed() -> None:
    source = (
        "class Noise:\n    def __getitem__(self, i):\n"
        "        return X[i] + random.random()\n\n"
        "    def __len__(self):\n        return 8\n\n\n"
    )
    skip = "        if random.random() < 0.5:\n            continue\n"
    rest = TRAINING.format(setup="", epoch="", step="").replace("\n\n", "\n")
    line = "    for (x,) in loader:\n"
    rest = rest.replace(line, line + skip)
    notes = open_notes(convert(HEAD + source + rest))
    assert any("only if all have drawn equally often" in n for n in notes)
    assert not open_notes(convert(HEAD + rest))


def test_a_model_chosen_by_a_drawn_number_is_listed() -> None:
    step = "(aux if torch.rand(1) < 0.5 else model)(x).mean().backward()"
    assert any("chooses a model by a value" in n for n in notes_on(step=step))


SKIPPING = """\
model = Net()
opt = optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    try:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
    except {error}:
        {handled}
"""


@pytest.mark.parametrize("error", ["RuntimeError", "Exception as e"])
def test_a_step_whose_error_is_skipped_is_listed(error: str) -> None:
    source = SKIPPING.format(error=error, handled="continue")
    (note,) = open_notes(convert(HEAD + source))
    assert "an error in a step is skipped here" in note


def test_an_error_that_ends_training_is_not_listed() -> None:
    for error, handled in (("KeyboardInterrupt", "break"), ("RuntimeError", "raise")):
        source = SKIPPING.format(error=error, handled=handled)
        assert open_notes(convert(HEAD + source)) == []


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ("bank = torch.zeros(8, 1)", "bank[:4] = out.detach()"),
        ("bank = torch.zeros(8, 1)", "bank.index_copy_(0, x[0].long(), out.detach())"),
        ("bank = []", "bank.append(out.detach())"),
    ],
)
def test_a_memory_of_past_samples_that_a_loss_uses_is_listed(
    made: str, kept: str
) -> None:
    source = (
        f"model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n{made}\n"
        "for (x,) in loader:\n    out = model(x)\n    opt.zero_grad()\n"
        "    loss = out.mean() + (out * bank[0]).mean()\n    loss.backward()\n"
        f"    opt.step()\n    {kept}\n"
    )
    notes = open_notes(convert(HEAD + source))
    assert any("`bank` collects values of each rank's own samples" in n for n in notes)


def test_a_file_written_by_a_ranks_own_loss_is_listed() -> None:
    source = TRAINING.format(setup="", epoch="", step="").replace("\n\n", "\n")
    source += "    if loss < 1:\n        torch.save(model.state_dict(), 'best.pt')\n"
    (note,) = open_notes(convert(HEAD + source))
    assert "rank 0's value decides" in note


def test_parameters_given_by_name_are_refused() -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "for (x,) in loader:\n    fast = dict(model.named_parameters())\n"
        "    loss = functional_call(model, fast, (x,)).mean() + model(x).mean()\n"
        "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
    )
    assert "computes `model` with other parameters" in refused(HEAD + source)


@pytest.mark.parametrize("extra", ["scale", "holder.scale", "*several"])
def test_a_tensor_outside_every_module_is_refused(extra: str) -> None:
    source = (
        "class Holder:\n    def __init__(self):\n"
        "        self.scale = torch.zeros(1, requires_grad=True)\n"
        "holder = Holder()\nscale = torch.zeros(1, requires_grad=True)\n"
        "several = nn.ParameterList([nn.Parameter(torch.zeros(1))])\n"
        "model = Net()\n"
        f"opt = optim.SGD([*model.parameters(), {extra}], lr=0.1)\n"
        "for (x,) in loader:\n    loss = model(x).mean()\n"
        "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
    )
    assert "a tensor outside every module" in refused(HEAD + source)


@pytest.mark.parametrize(
    ("before", "taken"),
    [
        ("others = iter(more)", "next(others)"),
        ("", "next(iter(more))"),
    ],
)
def test_a_second_loader_of_a_step_is_divided(before: str, taken: str) -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        f"more = DataLoader(ds, batch_size=8, shuffle=True)\n{before}\n"
        f"for (x,) in loader:\n    (u,) = {taken}\n"
        "    loss = model(x).mean() + model(u).mean()\n"
        "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
    )
    after = convert(HEAD + source).after
    assert "more = DataLoader(ds, batch_size=per_rank(8), sampler=" in after


def test_models_that_one_function_trains_one_after_another_are_wrapped() -> None:
    source = (
        "def fit(net, opt):\n    for (x,) in loader:\n        opt.zero_grad()\n"
        "        net(x).mean().backward()\n        opt.step()\n\n\n"
    ) + "".join(
        f"{name} = Net()\nopt = optim.SGD({name}.parameters(), lr=0.1)\n"
        f"for epoch in range(2):\n    fit({name}, opt)\n"
        for name in ("first", "second")
    )
    after = convert(HEAD + source).after
    for name in ("first", "second"):
        assert after.count(f"{name} = DistributedDataParallel({name}") == 1


def test_a_loader_that_a_step_begins_again_has_another_order_each_time() -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "batches = iter(loader)\nfor step in range(9):\n    try:\n"
        "        (x,) = next(batches)\n    except StopIteration:\n"
        "        batches = iter(loader)\n        (x,) = next(batches)\n"
        "    opt.zero_grad()\n    model(x).mean().backward()\n    opt.step()\n"
    )
    line = "loader.sampler.set_epoch(loader.sampler.epoch + 1)\n"
    after = convert(HEAD + source).after
    assert f"\n{line}batches = iter(loader)" in after
    assert f"        {line}        batches = iter(loader)" in after


def test_a_model_made_after_another_was_trained_is_wrapped_once() -> None:
    step = "    opt.zero_grad()\n    {}(x).mean().backward()\n    opt.step()\n"
    source = "".join(
        f"{name} = Net()\nopt = optim.SGD({name}.parameters(), lr=0.1)\n"
        f"for (x,) in loader:\n{step.format(name)}"
        for name in ("teacher", "student")
    )
    after = convert(HEAD + source).after
    assert after.count("student = DistributedDataParallel(") == 1
    assert after.count("teacher = DistributedDataParallel(") == 1


def test_the_loss_by_which_lbfgs_decides_is_the_mean_over_ranks() -> None:
    source = (
        "model = Net()\nopt = optim.LBFGS(model.parameters())\n"
        "for (x,) in loader:\n    def closure():\n        opt.zero_grad()\n"
        "        loss = model(x).mean()\n        loss.backward()\n"
        "        return loss\n    opt.step(closure)\n"
    )
    assert "return mean_over_ranks(loss)" in convert(HEAD + source).after


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        ("", "sum(F.mse_loss(model(a), a[:1]) for a in x)"),
        ("", "F.mse_loss(model(x), x[:, :1], None, None, 'sum')"),
        ("crit = nn.MSELoss(None, None, 'sum')", "crit(model(x), x[:, :1])"),
        ("", "(model(x) - x[:, :1]).pow(2).sum() / 4"),
    ],
)
def test_other_forms_of_a_sum_are_multiplied(made: str, loss: str) -> None:
    source = (
        f"model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n{made}\n"
        f"for (x,) in loader:\n    loss = {loss}\n    opt.zero_grad()\n"
        "    loss.backward()\n    opt.step()\n"
    )
    assert "(loss * WORLD_SIZE).backward()" in convert(HEAD + source).after


def test_a_backward_of_each_samples_loss_is_a_sum() -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "for (x,) in loader:\n    opt.zero_grad()\n"
        "    loss = (model(x) - x[:, :1]) ** 2\n"
        "    loss.backward(torch.ones_like(loss))\n    opt.step()\n"
    )
    after = convert(HEAD + source).after
    assert "(loss * WORLD_SIZE).backward(torch.ones_like(loss))" in after


def test_a_sum_divided_by_the_loaders_batch_size_is_a_mean() -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "for (x,) in loader:\n    opt.zero_grad()\n"
        "    loss = ((model(x) - x[:, :1]) ** 2).sum() / loader.batch_size\n"
        "    loss.backward()\n    opt.step()\n"
    )
    assert "WORLD_SIZE).backward()" not in convert(HEAD + source).after


@pytest.mark.parametrize("whole", ["len(ds)", "len(X)", "X.size(0)", "X.shape[0]"])
def test_a_sum_divided_by_the_size_of_all_data_is_no_mean(whole: str) -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "for (x,) in loader:\n    opt.zero_grad()\n"
        f"    loss = ((model(x) - x[:, :1]) ** 2).sum() / {whole}\n"
        "    loss.backward()\n    opt.step()\n"
    )
    conversion = convert(HEAD + source)
    multiplied = "WORLD_SIZE).backward()" in conversion.after
    assert multiplied or any("show that this loss" in n for n in open_notes(conversion))


def test_a_product_of_vectors_of_samples_is_a_sum() -> None:
    source = (
        "model = Net()\nopt = optim.SGD(model.parameters(), lr=0.1)\n"
        "for (x,) in loader:\n    err = model(x)[:, 0]\n    loss = err @ err\n"
        "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
    )
    conversion = convert(HEAD + source)
    assert open_notes(conversion) == []
    assert "(loss * WORLD_SIZE).backward()" in conversion.after


@pytest.mark.parametrize(
    "part", ["F.softmax(out, dim=0)", "out.amax(0)", "out.cumsum(0)", "out.prod(0)"]
)
def test_more_operations_over_samples_are_listed(part: str) -> None:
    notes = notes_on(step=f"out = model(x)\nother = {part}")
    assert any("combines the samples of a batch" in n for n in notes)


def test_a_file_that_one_rank_makes_is_looked_for_by_rank_0() -> None:
    setup = (
        "if os.path.exists('a.pt'):\n    X = torch.load('a.pt')\n"
        "else:\n    torch.save(X, 'a.pt')"
    )
    source = TRAINING.format(setup=setup, epoch="", step="").replace("\n\n", "\n")
    after = convert(HEAD + source).after
    assert "if of_rank0(lambda: os.path.exists('a.pt')):" in after
    assert "        torch.save(X, 'a.pt')\ndist.barrier()\n" in after
