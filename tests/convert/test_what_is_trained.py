"""Every model that a script trains is wrapped before its training, or refused."""

from __future__ import annotations

import pytest

from stretto.convert import Target
from support.conversions import convert, open_notes, refused

HEAD = """\
import contextlib
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from other import SAM, Warm, build_optimizer, conf

loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def unfreeze(self):
        for p in self.body.parameters():
            p.requires_grad = True


class Ours(optim.SGD):
    pass


def fit(model, opt):
    for (x,) in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()


def made(model, kind=optim.Adam):
    return kind(model.parameters())


def set_trained(model, flag):
    for p in model.parameters():
        p.requires_grad = flag
"""

GAN = """\
G, D = nn.Linear(1, 2), nn.Linear(2, 1)
opt_g = optim.Adam(G.parameters())
opt_d = {optimizer}
for (x,) in loader:
    z = torch.ones(len(x), 1)
    opt_d.zero_grad()
    (D(G(z).detach()) - D(x)).mean().backward()
    opt_d.step()
    opt_g.zero_grad()
    (-D(G(z))).mean().backward()
    opt_g.step()
"""


def wrapped(source: str) -> list[str]:
    """Return the lines of the converted script from its models on."""
    after = convert(HEAD + source).after
    return [x.strip() for x in after[after.index("def set_trained") :].splitlines()]


@pytest.mark.parametrize(
    "optimizer",
    [
        "SAM(D.parameters(), optim.SGD)",
        "getattr(optim, conf.name)(D.parameters())",
        "{'a': optim.Adam}['a'](D.parameters())",
        "Ours(list(D.parameters()))",
        "made(D)",
    ],
)
def test_an_optimizer_is_known_by_its_use(optimizer: str) -> None:
    """A model of a second optimizer of another class was trained by each rank alone."""
    found = "\n".join(wrapped(GAN.format(optimizer=optimizer)))
    assert "G = DistributedDataParallel(G" in found
    assert "D = DistributedDataParallel(D" in found


def test_a_model_handed_to_a_factory_of_another_file_is_wrapped() -> None:
    source = GAN.format(optimizer="build_optimizer(D, conf)") + "D.eval()\n"
    assert "D = DistributedDataParallel(D" in "\n".join(wrapped(source))


@pytest.mark.parametrize(
    "given", ["groups(D)", "groups(D, 1e-4)", "[*groups(D)]", "their_groups"]
)
def test_a_model_whose_parameters_a_function_groups_is_wrapped(given: str) -> None:
    groups = (
        "def groups(of, decay=0.0):\n"
        "    out = []\n"
        "    for _, p in of.named_parameters():\n"
        "        out.append({'params': [p], 'weight_decay': decay})\n"
        "    return out\n"
    )
    source = GAN.format(optimizer=f"optim.SGD({given})") + "D.eval()\n"
    later = "D = nn.Linear(1, 2), nn.Linear(2, 1)\n"
    with_groups = later + "their_groups = build_optimizer(D, 0.1)\n"
    found = "\n".join(wrapped(groups + source.replace(later, with_groups)))
    assert "D = DistributedDataParallel(D" in found


def test_an_optimizer_of_an_unknown_model_is_refused() -> None:
    text = refused(HEAD + GAN.format(optimizer="build_optimizer(conf)"))
    assert "`build_optimizer(conf)` makes an optimizer" in text


def test_a_scheduler_of_an_optimizer_is_no_optimizer() -> None:
    scheduled = "Warm(opt_g)\nopt_d.step()"
    alone = GAN.format(optimizer=scheduled).replace("    opt_d.zero_grad()\n", "")
    found = "\n".join(wrapped(alone.replace("(D(G(z).detach()) - D(x))", "G(z)")))
    assert "D = DistributedDataParallel" not in found


def test_a_model_that_is_updated_by_hand_is_refused() -> None:
    source = GAN.format(optimizer="D")
    by_hand = "    for p in D.parameters():\n        p.data.add_(p.grad, alpha=-0.1)"
    text = refused(HEAD + source.replace("    opt_d.step()", by_hand))
    assert "`D` is trained here by hand" in text


def test_a_model_that_is_added_to_an_optimizer_is_wrapped() -> None:
    source = GAN.format(optimizer="D").replace("    opt_d.step()\n", "")
    added = "opt_g.add_param_group({'params': D.parameters()})\nfor (x"
    found = "\n".join(wrapped(source.replace("for (x", added)))
    assert "D = DistributedDataParallel(D" in found


def test_part_of_a_model_that_is_added_to_its_optimizer_is_not_wrapped() -> None:
    found = wrapped(
        "net = Net()\n"
        "opt = optim.Adam(net.head.parameters())\n"
        "opt = optim.Adam(net.parameters())\n"
        "opt.add_param_group({'params': net.body.parameters()})\n"
        "fit(net, opt)\n"
    )
    assert [x for x in found if "= DistributedDataParallel" in x] == [
        "net = DistributedDataParallel(net)"
    ]


BLOCKS = {
    "if": "if conf.train:\n    {set_up}\n    fit(net, opt)\n",
    "for": "for fold in range(3):\n    {set_up}\n    fit(net, opt)\n",
    "with": "with contextlib.nullcontext():\n    {set_up}\n    fit(net, opt)\n",
    "try": "try:\n    {set_up}\n    fit(net, opt)\nfinally:\n    print('end')\n",
    "else": (
        "if conf.a:\n    {set_up}\n    fit(net, opt)\n"
        "else:\n    {set_up}\n    fit(net, opt)\n"
    ),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_that_trains_gets_a_wrapped_model(block: str) -> None:
    """The model was wrapped after the block with its optimizer, and its training."""
    set_up = "opt = optim.Adam(net.parameters())"
    found = wrapped("net = Net()\n" + BLOCKS[block].format(set_up=set_up))
    assert found[found.index("net = Net()") + 1] == "net = DistributedDataParallel(net)"
    assert len([x for x in found if "= DistributedDataParallel" in x]) == 1


def test_within_the_main_guard_a_model_is_wrapped_once_ranks_are_joined() -> None:
    found = wrapped(
        "net = Net()\n"
        'if __name__ == "__main__":\n'
        "    opt = optim.Adam(net.parameters())\n"
        "    fit(net, opt)\n"
    )
    at = found.index("net = DistributedDataParallel(net)")
    assert found[at - 1 : at + 2 : 2] == [
        "opt = optim.Adam(net.parameters())",
        "fit(net, opt)",
    ]


@pytest.mark.parametrize("block", ["if", "with", "try", "else"])
def test_each_block_wraps_the_model_that_it_creates(block: str) -> None:
    set_up = "net = Net(); opt = optim.Adam(net.parameters())"
    lines = f"def run():\n{BLOCKS[block]}run()\n".replace("\n    ", "\n        ")
    source = lines.replace("\n", "\n    ").format(set_up=set_up)
    found = wrapped(source.replace("\n    run()\n", "\nrun()\n").rstrip(" "))
    fits = [i for i, x in enumerate(found) if x == "fit(net, opt)"]
    assert len(fits) == 1 + (block == "else")
    for place in fits:
        assert found[place - 1] == "net = DistributedDataParallel(net)"


def test_a_name_that_gets_a_second_model_is_wrapped_again() -> None:
    """The second model was trained by each rank alone."""
    phase = "net = Net()\nopt = optim.Adam(net.parameters())\nfit(net, opt)\n"
    found = wrapped(phase + "torch.save(net.state_dict(), 'a')\n" + phase)
    assert found.count("net = DistributedDataParallel(net)") == 2
    assert "torch.save(unwrap(net).state_dict(), 'a')" in found


def test_a_function_that_returns_its_model_creates_no_other() -> None:
    found = wrapped(
        "def train(net):\n"
        "    fit(net, optim.Adam(net.parameters()))\n"
        "    return net\n"
        "net = Net()\n"
        "net = train(net)\n"
        "net = train(net)\n"
    )
    assert found.count("net = DistributedDataParallel(net)") == 1


def test_a_model_that_is_replaced_in_the_loop_that_trains_it_is_refused() -> None:
    text = refused(
        HEAD + "net = Net()\n"
        "opt = optim.Adam(net.parameters())\n"
        "for epoch in range(4):\n"
        "    fit(net, opt)\n"
        "    net = Net()\n"
    )
    assert "`net` becomes another model within a loop" in text


FROZEN = "net = Net()\n{freeze}\nopt = optim.Adam(net.parameters())\n"


@pytest.mark.parametrize(
    ("freeze", "later"),
    [
        ("net.body.requires_grad_(False)", "net.body.requires_grad_()"),
        ("set_trained(net.body, False)", "set_trained(net, True)"),
        ("net.requires_grad_(False)", "net.unfreeze()"),
        ("net.body.weight.requires_grad = False", "set_trained(net, conf.flag)"),
    ],
)
def test_parameters_that_are_trained_only_later_are_refused(
    freeze: str, later: str
) -> None:
    """DDP does not exchange their gradients: each rank trained them by itself."""
    source = HEAD + FROZEN.format(freeze=freeze)
    text = refused(f"{source}fit(net, opt)\n{later}\nfit(net, opt)\n")
    assert "trains parameters that were frozen before" in text
    text = refused(f"{source}for e in range(3):\n    {later}\n    fit(net, opt)\n")
    assert "trains parameters that were frozen before" in text


@pytest.mark.parametrize(
    ("freeze", "later"),
    [
        ("other = Net().requires_grad_(False)", "set_trained(net, True)"),
        ("net.body.requires_grad_(False)", "set_trained(net.body, False)"),
        ("set_trained(net, True)", "set_trained(net, True)"),
    ],
)
def test_other_settings_of_requires_grad_are_converted(freeze: str, later: str) -> None:
    source = FROZEN.format(freeze=freeze)
    found = wrapped(f"{source}fit(net, opt)\n{later}\nfit(net, opt)\n")
    assert any(x.startswith("net = DistributedDataParallel(net") for x in found)


def test_a_part_that_is_frozen_in_training_is_looked_for() -> None:
    """DDP raised in the step after."""
    source = FROZEN.format(freeze="")
    found = wrapped(f"{source}fit(net, opt)\nset_trained(net.body, False)\n")
    assert "net = DistributedDataParallel(net, find_unused_parameters=True)" in found


def test_horovod_refuses_an_optimizer_whose_step_it_does_not_know() -> None:
    """SAM changes parameters by gradients that its wrapper has not averaged yet."""
    source = "net = Net()\nopt = SAM(net.parameters(), optim.SGD)\nfit(net, opt)\n"
    assert "--to stretto" in refused(HEAD + source, target=Target.HOROVOD)


PER_SAMPLE = """\
net = Net()
opt = optim.Adam(net.parameters())
for x, y in loader:
    opt.zero_grad()
    loss = 0.0
    for i in range({length}):
        {add}
    {end}
    opt.step()
"""


@pytest.mark.parametrize(
    ("length", "add", "end"),
    [
        ("len(x)", "net(x[i : i + 1]).mean().backward()", "pass"),
        ("x.size(0)", "loss += net(x[i : i + 1]).mean()", "loss.backward()"),
        ("y.shape[0]", "loss = loss + net(x[i : i + 1]).mean()", "loss.backward()"),
    ],
)
def test_a_loop_over_samples_that_adds_up_losses_is_listed(
    length: str, add: str, end: str
) -> None:
    """Its gradients were smaller by the number of ranks, without a word."""
    source = PER_SAMPLE.format(length=length, add=add, end=end)
    notes = open_notes(convert(HEAD + source))
    assert any("adds up losses or gradients" in note for note in notes)


@pytest.mark.parametrize(
    ("length", "add", "end"),
    [
        ("3", "loss += net(x).mean()", "loss.backward()"),
        ("x.size(1)", "loss += net(x).mean()", "loss.backward()"),
        ("len(x)", "loss += net(x[i : i + 1]).mean()", "(loss / len(x)).backward()"),
        ("len(x)", "print(i)", "net(x).mean().backward()"),
    ],
)
def test_other_loops_in_a_step_are_not_listed(length: str, add: str, end: str) -> None:
    source = PER_SAMPLE.format(length=length, add=add, end=end)
    notes = open_notes(convert(HEAD + source))
    assert not any("adds up losses or gradients" in note for note in notes)


def test_one_model_under_several_names_is_wrapped_once() -> None:
    """It was wrapped in each function, one wrapper in another."""
    found = wrapped(
        "def train(model):\n"
        "    if torch.cuda.is_available():\n"
        "        model = model.cuda()\n"
        "    running = model\n"
        "    if torch.cuda.device_count() > 1:\n"
        "        running = nn.DataParallel(model).cuda()\n"
        "    opt = optim.Adam(running.parameters())\n"
        "    fit(running, opt)\n"
        "    torch.save(model.state_dict(), 'a')\n"
        "net = Net()\n"
        "print(sum(p.numel() for p in net.parameters()))\n"
        "train(net)\n"
    )
    lines = [x for x in found if "= DistributedDataParallel" in x]
    assert lines == ["running = DistributedDataParallel(running)"]
    assert "torch.save(model.state_dict(), 'a')" in found


def test_a_name_that_becomes_an_attribute_of_its_object_is_followed() -> None:
    """`outer = outer.inner` never came to an end."""
    found = wrapped(
        "outer = conf.outer()\n"
        "outer = outer.inner\n"
        "outer.step()\n"
        "net = Net()\n"
        "fit(net, optim.Adam(net.parameters()))\n"
    )
    assert "net = DistributedDataParallel(net)" in found


CONTAINERS = [
    ("nets = [net]", "nets[0](x)"),
    ("nets = {'a': net}", "nets['a'](x)"),
    ("nets = [net]", "sum(n(x) for n in nets)"),
    ("nets = nn.Sequential(net, nn.ReLU())", "nets(x)"),
    ("nets = (net,)", "sum(map(lambda n: n(x), nets))"),
]
THROUGH_A_CONTAINER = """\
for (x,) in loader:
    opt.zero_grad()
    {call}.mean().backward()
    opt.step()
with torch.no_grad():
    print(net(torch.ones(1, 2)))
"""
OPTIMIZER = "opt = optim.Adam(net.parameters())\n"


@pytest.mark.parametrize(("container", "call"), CONTAINERS)
def test_training_through_an_earlier_container_is_refused(
    container: str, call: str
) -> None:
    """The container holds the module, not its wrapper: no gradient was exchanged."""
    step = THROUGH_A_CONTAINER.format(call=call)
    text = refused(f"{HEAD}net = Net()\n{container}\n{OPTIMIZER}{step}")
    assert "`nets`, which holds `net` from before it is wrapped" in text


@pytest.mark.parametrize(("container", "call"), CONTAINERS)
def test_training_through_a_later_container_is_converted(
    container: str, call: str
) -> None:
    step = THROUGH_A_CONTAINER.format(call=call)
    found = wrapped(f"net = Net()\n{OPTIMIZER}{container}\n{step}")
    assert found.index("net = DistributedDataParallel(net)") < found.index(container)


@pytest.mark.parametrize(
    "use",
    [
        "[n.train() for n in nets]",
        "for n in nets:\n        with torch.no_grad():\n            n(x)",
        "print(len(nets), nets[0].training)",
    ],
)
def test_an_earlier_container_that_training_does_not_go_through_is_allowed(
    use: str,
) -> None:
    step = THROUGH_A_CONTAINER.format(call=f"{use}\n    net(x)")
    found = wrapped(f"net = Net()\nnets = [net]\n{OPTIMIZER}{step}")
    assert "net = DistributedDataParallel(net)" in found


NAMED = "nets = {'a': a, 'b': b}\n"


@pytest.mark.parametrize(
    "optimizers",
    [
        "opts = [optim.Adam(n.parameters()) for n in (a, b)]",
        "nets = [a, b]\nopts = [optim.Adam(n.parameters()) for n in nets]",
        f"{NAMED}opts = [optim.Adam(n.parameters()) for n in nets.values()]",
        f"{NAMED}opts = optim.Adam(nets['a'].parameters()), optim.SGD(b.parameters())",
        "opts = []\nfor n in (a, b):\n    opts.append(optim.Adam(n.parameters()))",
        "opts = [optim.Adam([p for n in (a, b) for p in n.parameters()])]",
        "opts = [optim.Adam([{'params': n.parameters()} for n in (a, b)])]",
    ],
)
def test_models_whose_parameters_a_loop_collects_are_wrapped(optimizers: str) -> None:
    found = wrapped(
        f"a, b = [Net() for _ in range(2)]\n{optimizers}\n"
        "for (x,) in loader:\n"
        "    (a(x) + b(x)).mean().backward()\n"
        "    for opt in opts:\n"
        "        opt.step()\n"
    )
    lines = [x for x in found if "= DistributedDataParallel" in x]
    assert lines == [f"{n} = DistributedDataParallel({n})" for n in "ab"]


@pytest.mark.parametrize(
    "models",
    [
        "nets = [Net(), Net()]",
        "nets = [a]\nnets.append(b)",
        "nets = [a]\nnets += [b]",
        "nets = [a, a]\nnets[1] = b",
        "nets = [a]\nconf.add(nets)",
    ],
)
def test_a_loop_over_models_that_are_not_all_known_is_refused(models: str) -> None:
    refused(
        f"{HEAD}a, b = Net(), Net()\n{models}\n"
        "opts = [optim.Adam(n.parameters()) for n in nets]\n"
        "for (x,) in loader:\n"
        "    (a(x) + b(x)).mean().backward()\n"
    )


@pytest.mark.parametrize(
    "optimizers",
    [
        "opts = [optim.Adam(a.parameters()), made(b)]",
        "opts = []\nopts.append(made(a))\nopts.append(made(b))",
        "opts = [made(n) for n in (a, b)]",
    ],
)
def test_an_optimizer_that_a_loop_steps_is_known_by_its_use(optimizers: str) -> None:
    """The second model was not wrapped, and each rank trained its own."""
    found = wrapped(
        f"a, b = Net(), Net()\n{optimizers}\n"
        "for (x,) in loader:\n"
        "    (a(x) + b(x)).mean().backward()\n"
        "    for opt in opts:\n"
        "        opt.step()\n"
    )
    lines = {x for x in found if "= DistributedDataParallel" in x}
    assert lines == {f"{n} = DistributedDataParallel({n})" for n in "ab"}


@pytest.mark.parametrize(
    "replacing",
    [
        "nn.utils.parametrizations.spectral_norm(net.body)",
        "nn.utils.parametrize.register_parametrization(net.body, 'weight', Net())",
        "for part in net.modules():\n    nn.utils.weight_norm(part)",
        "normed(net)",
        "net.head = nn.Linear(4, 1)",
    ],
)
def test_a_model_is_wrapped_once_its_parameters_are_replaced(replacing: str) -> None:
    """They were replaced in the wrapped model, and the second step failed."""
    found = wrapped(
        "def normed(m):\n    nn.utils.weight_norm(m.body)\n\n\n"
        f"net = Net()\nopt = optim.Adam(net.parameters())\n{replacing}\nfit(net, opt)\n"
    )
    assert (
        found.index("net = DistributedDataParallel(net)")
        == found.index("fit(net, opt)") - 1
    )


def test_an_optimizer_of_models_without_names_that_is_never_cleared_is_refused() -> (
    None
):
    """Only the named model was wrapped, and each rank trained its own of the others."""
    text = refused(
        f"{HEAD}c = Net()\noc = optim.Adam(c.parameters())\n"
        "opts = [made(n) for n in [Net(), Net()]]\n"
        "for (x,) in loader:\n"
        "    c(x).mean().backward()\n"
        "    oc.step()\n"
        "    for opt in opts:\n"
        "        opt.step()\n"
    )
    assert "an element of `[Net(), Net()]` (line 44)" in text


def test_models_of_a_list_are_refused_with_the_optimizers_line():
    source = (
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
        "nets = [torch.nn.Linear(2, 1) for _ in range(2)]\n"
        "opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]\n"
        "for (x,) in loader:\n    for net, opt in zip(nets, opts):\n"
        "        loss = net(x).mean()\n        opt.zero_grad()\n"
        "        loss.backward()\n        opt.step()\n"
    )
    said = refused(source)
    assert said.startswith("train.py:5: `torch.optim.SGD(")
    assert "Give each model a variable of its own" in said


HELD = """\
import torch
from types import SimpleNamespace
from torch.utils.data import DataLoader, TensorDataset

MADE
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
for (x,) in loader:
    for m, opt in zip(models, opts):
        loss = m(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            (
                "models = [torch.nn.Linear(2, 1) for _ in range(2)]\n"
                "opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]"
            ),
            "trains `m`, an element of `models` (line 6)",
        ),
        (
            (
                "models = {k: torch.nn.Linear(2, 1) for k in 'ab'}\nopts = []\n"
                "def make(net):\n"
                "    return torch.optim.SGD(net.parameters(), lr=0.1)\n\n\n"
                "for net in models.values():\n    opts.append(make(net))"
            ),
            "trains `net`, an element of `models.values()` (line 11)",
        ),
        (
            (
                "net = torch.nn.Linear(2, 1)\nmodels = []\nmodels.append(net)\n"
                "opts = [torch.optim.SGD(net.parameters(), lr=0.1)]"
            ),
            "train.py:7: `net`, which the optimizer trains, is put into",
        ),
        (
            (
                "held = SimpleNamespace(net=torch.nn.Linear(2, 1))\n"
                "models = [held.net]\n"
                "opts = [torch.optim.SGD(held.net.parameters(), lr=0.1)]"
            ),
            "trains a module that is an attribute of `held`",
        ),
    ],
)
def test_a_model_that_only_a_container_holds_is_refused_by_the_container(made, says):
    assert says in refused(HELD.replace("MADE", made))


COLLECTED = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

class Trainer:
    def __init__(self):
        self.models, self.of_all = {}, []
        self.models["a"] = torch.nn.Linear(2, 1)
        ADDED
        self.opt = torch.optim.SGD(self.of_all, lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    def train(self):
        for (x,) in self.loader:
            self.opt.zero_grad()
            self.models["a"](x).mean().backward()
            self.opt.step()

Trainer().train()
"""


@pytest.mark.parametrize(
    "added",
    [
        'self.of_all += list(self.models["a"].parameters())',
        'self.of_all.extend(self.models["a"].parameters())',
    ],
)
def test_parameters_collected_from_a_container_name_the_container(added):
    said = refused(COLLECTED.replace("ADDED", added))
    assert said.startswith("train.py:8: `torch.optim.SGD(self.of_all, lr=0.1)` trains")
    assert '`self.models["a"]`, and a model in a container cannot be wrapped' in said


TRAINER = """\
class Trainer:
    def __init__(self, net, conf):
        self.net = net
        self.opt = optim.SGD(self.net.parameters(), lr=0.1)

    def train(self):
        for (x,) in loader:
            self.opt.zero_grad()
            self.net(x).mean().backward()
            self.opt.step()


"""


@pytest.mark.parametrize(
    ("call", "want"),
    [
        (
            "Trainer(nn.Sequential(Net(), nn.ReLU()), conf).train()",
            (
                "model_2 = nn.Sequential(Net(), nn.ReLU())\n"
                "model_2 = DistributedDataParallel(model_2)\n"
                "Trainer(model_2, conf).train()\n"
            ),
        ),
        (
            "n = 1; Trainer(conf=conf, net=Net().to('cpu')).train()",
            (
                "n = 1\nmodel_2 = Net().to('cpu')\n"
                "model_2 = DistributedDataParallel(model_2)\n"
                "Trainer(conf=conf, net=model_2).train()\n"
            ),
        ),
        (
            "trainer = Trainer(\n    Net(),\n    conf,\n)\ntrainer.train()",
            (
                "model_2 = Net()\nmodel_2 = DistributedDataParallel(model_2)\n"
                "trainer = Trainer(\n    model_2,\n    conf,\n)\ntrainer.train()\n"
            ),
        ),
    ],
)
def test_a_model_made_in_a_call_gets_a_name(call: str, want: str) -> None:
    conversion = convert(f"{HEAD}{TRAINER}{call}\n")
    assert want in conversion.after
    assert open_notes(conversion) == []


def test_calls_before_a_model_get_names_too_and_keep_their_order() -> None:
    after = convert(f"{HEAD}{TRAINER}Trainer(conf=conf(), net=Net()).train()\n").after
    want = (
        "conf_2 = conf()\nmodel_2 = Net()\nmodel_2 = DistributedDataParallel(model_2)\n"
        "Trainer(conf=conf_2, net=model_2).train()\n"
    )
    assert want in after


def test_a_model_made_after_a_call_inside_another_argument_is_refused() -> None:
    call = "Trainer(conf=[conf()], net=Net()).train()"
    assert "has no name" in refused(f"{HEAD}{TRAINER}{call}\n")


WHOLE = "    for (x,) in loader:\n        net(x).mean().backward()\n"


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ("Net()", "net.head.parameters()"),
        ("Net()\nnet.head = nn.Linear(4, 2)", "net.head.parameters()"),
        ("Net()\nhead = net.head", "head.parameters()"),
        ("Net()\nother = optim.SGD(net.body.parameters())", "net.head.parameters()"),
        ("Net()", "[{'params': m.parameters()} for m in (net.body, net.head)]"),
        ("Warm()\nnet.fc = nn.Linear(4, 2)", "net.fc.parameters()"),
    ],
)
def test_the_model_that_training_calls_is_wrapped_if_parts_are_trained(made, given):
    found = wrapped(
        f"net = {made}\nopt = optim.Adam({given})\nfor epoch in range(2):\n{WHOLE}"
        "torch.save(net.state_dict(), 'a')"
    )
    lines = [x for x in found if "= DistributedDataParallel(" in x]
    assert [x.startswith("net = DistributedDataParallel(net") for x in lines] == [True]
    assert "torch.save(unwrap(net).state_dict(), 'a')" in found


PARTS = """\
class Pair({base}):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 4)
        self.two = nn.Linear(4, 1)


pair = Pair()
opt = optim.SGD([{{"params": m.parameters()}} for m in (pair.one, pair.two)])
for (x,) in loader:
    opt.zero_grad()
    pair.two(pair.one(x)).mean().backward()
    opt.step()
"""


@pytest.mark.parametrize("base", ["nn.Module", "object"])
def test_parts_that_training_calls_are_wrapped_in_the_object_that_holds_them(base):
    saved = "torch.save(pair.one.state_dict(), 'a')\n"
    conversion = convert(HEAD + PARTS.format(base=base) + saved)
    assert "self.one = DistributedDataParallel(self.one)" in conversion.after
    assert "torch.save(unwrap(pair.one).state_dict(), 'a')" in conversion.after
    renamed = [n.text for n in conversion.notes if "`Pair.one` is wrapped" in n.text]
    assert len(renamed) == (base == "nn.Module")


@pytest.mark.parametrize(
    "line",
    [
        "torch.save(pair.state_dict(), 'a')",
        "pair.load_state_dict(torch.load('a'))",
        "torch.save(pair, 'a')",
        "torch.save({'model': pair}, 'a')",
    ],
)
def test_names_of_a_module_of_which_parts_are_wrapped_are_refused(line):
    text = refused(HEAD + PARTS.format(base="nn.Module") + line + "\n")
    assert "its parameters get other names, with `module.`" in text


EVALUATED_BY_GENERATOR = """\
import copy
import torch
from torch.utils.data import DataLoader, TensorDataset

def predictions(model, loader):
    for (x,) in loader:
        yield model(x).mean()

{decorator}
def score(model, loader):
    {score}

def train():
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    val = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    net = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    shadow = copy.deepcopy(net)
    for epoch in range(2):
        for (x,) in loader:
            loss = net(x).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(score(net, val), score(shadow, val))

train()
"""


@pytest.mark.parametrize(
    "score",
    [
        "return sum([float(p) for p in predictions(model, loader)])",
        "for p in predictions(model, loader):\n        return float(p)",
    ],
)
def test_a_generator_that_only_evaluates_is_no_step(score):
    source = EVALUATED_BY_GENERATOR.format(decorator="@torch.no_grad()", score=score)
    assert "net = DistributedDataParallel(net" in convert(source).after


@pytest.mark.parametrize(
    ("decorator", "score"),
    [
        ("", "return sum([float(p) for p in predictions(model, loader)])"),
        ("@torch.no_grad()", "return predictions(model, loader)"),
        ("@torch.no_grad()", "return (float(p) for p in predictions(model, loader))"),
    ],
)
def test_a_generator_that_may_run_with_gradients_may_be_a_step(decorator, score):
    said = refused(EVALUATED_BY_GENERATOR.format(decorator=decorator, score=score))
    assert "is another name of the trained model `net`" in said
