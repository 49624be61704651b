"""A class or function of the script is no library's, whatever its name."""

from __future__ import annotations

import pytest

from stretto.convert import Target
from support.conversions import convert, open_notes, refused

SCRIPT = """\
import torch
import torch.utils.data
from torch.utils.data import TensorDataset

{before}
data = TensorDataset(torch.ones(8, 2))
model = torch.nn.Linear(2, 1)
{optimizer}
loader = torch.utils.data.DataLoader(data, batch_size=4)
{setting}
for epoch in range(2):
    for (x,) in {over}:
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
SGD = "opt = torch.optim.SGD(model.parameters(), lr=0.1)"


def script(*, before="", setting="", over="loader", optimizer=SGD):
    return SCRIPT.format(before=before, setting=setting, over=over, optimizer=optimizer)


@pytest.mark.parametrize("name", ["SummaryWriter", "Experiment", "CometLogger"])
def test_a_class_of_the_script_with_a_writers_name_is_made_on_all_ranks(name):
    before = f"class {name}:\n    def fit(self):\n        return self\n"
    source = script(before=before, setting=f"run = {name}()\n{name}().fit()")
    conversion = convert(source)
    assert f"\nrun = {name}()\n{name}().fit()\n" in conversion.after
    assert "OnRank0" not in conversion.after


@pytest.mark.parametrize(
    "line",
    [
        "from sacred import Experiment",
        "from experiments import Experiment",
        "from .experiments import Experiment",
        "def Experiment(name):\n    return name",
    ],
)
def test_an_experiment_of_another_module_is_made_on_all_ranks(line):
    after = convert(script(before=line, setting="run = Experiment('a')")).after
    assert "\nrun = Experiment('a')\n" in after


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("from comet_ml import Experiment", "Experiment('a')"),
        ("import comet_ml", "comet_ml.Experiment('a')"),
        ("from tensorboardX import SummaryWriter as Log", "Log('a')"),
        ("from torch.utils.tensorboard import *", "SummaryWriter('a')"),
    ],
)
def test_a_librarys_writer_is_made_on_rank_0(line, made):
    after = convert(script(before=line, setting=f"run = {made}")).after
    assert f"\nrun = {made} if RANK == 0 else OnRank0()\n" in after


def test_a_loader_class_of_the_script_is_not_torchs():
    before = (
        "class DataLoader:\n    def __init__(self, data, batch_size):\n"
        "        self.data = data\n    def __iter__(self):\n"
        "        return iter([(torch.ones(4, 2),)])\n"
    )
    setting = "mine = DataLoader(data, batch_size=4)"
    said = refused(script(before=before, setting=setting, over="mine"))
    assert "training takes its batches from a `DataLoader`, a class of this" in said


@pytest.mark.parametrize(
    "before",
    [
        (
            "class RandomSampler:\n    def __init__(self, data):\n        pass\n"
            "    def __iter__(self):\n        return iter([1, 2])\n"
        ),
        "from samplers import RandomSampler\n",
    ],
)
def test_a_sampler_of_the_script_chooses_its_own_samples(before):
    before += (
        "def make(data):\n    return torch.utils.data.DataLoader(\n"
        "        data, batch_size=4, sampler=RandomSampler(data))\n"
    )
    said = refused(script(before=before, setting="mine = make(data)", over="mine"))
    assert "has its own sampler (`RandomSampler(data)`)" in said


@pytest.mark.parametrize(
    "before", ["class tqdm:\n    pass\n", "def tqdm(batches):\n    return batches\n"]
)
def test_a_bar_of_the_script_gets_no_arguments(before):
    after = convert(script(before=before, setting="bar = tqdm([1])")).after
    assert "\nbar = tqdm([1])\n" in after


def test_a_wrapper_class_of_the_script_may_do_anything_to_batches():
    before = (
        "class tqdm:\n    def __init__(self, it):\n        self.it = it\n"
        "    def __iter__(self):\n        return iter([])\n"
    )
    said = refused(script(before=before, over="tqdm(loader)"))
    assert "how that takes its batches from the DataLoader `loader` is not" in said


def test_keywords_of_a_function_of_the_script_need_not_be_attributes():
    before = (
        "class Sizes:\n    pass\n"
        "def edict(bs):\n    sizes = Sizes()\n    sizes.bs = 2 * bs\n    return sizes\n"
        "ns = edict(bs=5)\n"
    )
    setting = "sized = torch.utils.data.DataLoader(data, batch_size=ns.bs)"
    source = script(before=before, setting=setting, over="sized").replace(
        "        loss =", "        if len(x) < 5:\n            continue\n        loss ="
    )
    assert "len(x) < per_rank(5)" not in convert(source).after


def test_the_scripts_own_print_prints_on_rank_0():
    before = "def print(text):\n    sys.stderr.write(text)\nimport sys\n"
    after = convert(script(before=before, setting="print('begin')")).after
    assert "\nprint0('begin')\n" in after


def test_horovod_does_not_wrap_what_only_has_the_name_of_an_optimizer():
    before = (
        "class SGD:\n    def __init__(self, params, lr):\n"
        "        self.params = list(params)\n"
        "    def zero_grad(self):\n        pass\n    def step(self):\n        pass\n"
    )
    source = script(before=before, optimizer="opt = SGD(model.parameters(), lr=0.1)")
    said = refused(source, target=Target.HOROVOD)
    assert "makes an optimizer of a class that Horovod's may not average" in said
    assert open_notes(convert(source)) == []
