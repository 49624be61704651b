"""Loaders that get into a dict, a list or an object in any way."""

from __future__ import annotations

import pytest

from support.conversions import convert, open_notes, refused

SCRIPT = """\
import types
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(8, 2))
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
fit = DataLoader(data, batch_size=4)
{before}
for epoch in range(2):
    for (x,), (y,) in zip(fit, {over}):
        loss = model(x).mean() + model(y).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
{after}
"""
MADE = "DataLoader(data, batch_size=6)"
DIVIDED = (
    "DataLoader(data, batch_size=per_rank(6), "
    "sampler=DistributedSampler(data, shuffle=False))"
)


def script(before, over="loaders['extra']", after=""):
    return SCRIPT.format(before=before, over=over, after=after)


@pytest.mark.parametrize(
    ("before", "over"),
    [
        (f"loaders = {{}}\nloaders['extra'] = {MADE}", "loaders['extra']"),
        (f"loaders = dict()\nloaders['extra'] = {MADE}", "loaders['extra']"),
        (f"loaders = {{'a': fit}}\nloaders['extra'] = {MADE}", "loaders['extra']"),
        (f"loaders = {{}}\nloaders.setdefault('extra', {MADE})", "loaders['extra']"),
        (f"loaders = {{}}\nloaders.update({{'extra': {MADE}}})", "loaders['extra']"),
        (f"loaders = {{}}\nloaders.update(extra={MADE})", "loaders['extra']"),
        (f"loaders = {{}}\nloaders |= {{'extra': {MADE}}}", "loaders['extra']"),
        (f"loaders = {{}}\nloaders['extra'], n = {MADE}, 1", "loaders['extra']"),
        (f"loaders = {{}}\nmore = {MADE}\nloaders['extra'] = more", "loaders['extra']"),
        (
            f"loaders = {{}}\nfor n in ('extra', 'b'):\n    loaders[n] = {MADE}",
            "loaders['extra']",
        ),
        (
            f"loaders = {{}}\ndef add(to):\n    to['extra'] = {MADE}\nadd(loaders)",
            "loaders['extra']",
        ),
        (f"loaders = []\nloaders.append({MADE})", "loaders[0]"),
        (f"loaders = []\nloaders.insert(0, {MADE})", "loaders[0]"),
        (f"loaders = []\nloaders.extend([{MADE}])", "loaders[0]"),
        (f"loaders = []\nloaders += [{MADE}]", "loaders[-1]"),
        (f"loaders = [1]\nloaders.insert(0, {MADE})", "loaders[0]"),
        (f"a, *loaders = 1, {MADE}", "loaders[0]"),
        (f"*loaders, a = {MADE}, 1", "loaders[0]"),
        (f"c = types.SimpleNamespace()\nc.extra = {MADE}", "c.extra"),
        (f"loaders = {{'extra': {MADE}}}", "loaders.get('extra')"),
        (f"loaders = {{'extra': {MADE}}}\nd = loaders.pop('extra')", "d"),
    ],
)
def test_a_loader_of_a_container_is_divided(before, over):
    conversion = convert(script(before, over))
    assert DIVIDED in conversion.after
    assert open_notes(conversion) == []


@pytest.mark.parametrize(
    ("returned", "store", "converted"),
    [
        (MADE, "loaders['extra'] = make()", "loaders['extra'] = divided(make())"),
        (
            f"{MADE}, 1",
            "loaders['extra'], n = make()",
            "\nloaders['extra'] = divided(loaders['extra'])\n",
        ),
    ],
)
def test_a_loader_that_a_function_returns_into_a_container_is_divided(
    returned, store, converted
):
    before = f"def make():\n    return {returned}\nloaders = {{}}\n{store}"
    assert converted in convert(script(before)).after


def test_a_loader_under_another_key_stays_whole():
    before = f"loaders = {{}}\nloaders['extra'] = {MADE}\nloaders['test'] = {MADE}"
    after = convert(script(before)).after
    assert f"loaders['extra'] = {DIVIDED}\nloaders['test'] = {MADE}\n" in after


@pytest.mark.parametrize(
    ("before", "over"),
    [
        (f"parts = {{'extra': {MADE}}}\nloaders = {{**parts}}", "loaders['extra']"),
        (f"loaders = []\nloaders = loaders + [{MADE}]", "loaders[0]"),
        (f"c = types.SimpleNamespace(extra={MADE})", "c.extra"),
        (f"c = types.SimpleNamespace()\nsetattr(c, 'extra', {MADE})", "c.extra"),
        (f"loaders = [{MADE}]", "*loaders"),
        (f"loaders = [1, {MADE}]", "loaders[-1]"),
        (f"loaders = {{'extra': {MADE}}}\nd = list(loaders.values())[0]", "d"),
        (f"loaders = {{'extra': {MADE}}}\nd = next(iter(loaders.values()))", "d"),
        (
            (
                f"c = types.SimpleNamespace()\nc.extra = {MADE}\n"
                "def get(of):\n    return of.extra"
            ),
            "get(c)",
        ),
        (f"d = wrap({MADE})", "d"),
        (f"d = {MADE}", "wrap(d)"),
    ],
)
def test_a_loader_whose_batches_are_taken_in_another_way_is_listed(before, over):
    conversion = convert(script(before, over))
    listed = open_notes(conversion)
    assert MADE in conversion.after
    assert listed
    assert all("not followed" in note for note in listed)


def test_a_loader_of_a_container_that_training_does_not_name_is_not_listed():
    before = f"others = {{}}\nothers['test'] = {MADE}\nd = {MADE}"
    assert open_notes(convert(script(before, "d"))) == []


def test_the_length_of_another_loader_is_no_use_of_its_batches():
    before = f"others = {{}}\nothers['test'] = {MADE}\nd = {MADE}\nn = len(d)"
    assert open_notes(convert(script(before, "d, range(n * len(d))"))) == []


def test_numbers_of_a_loop_over_all_loaders_of_a_container_are_listed():
    before = f"loaders = {{}}\nloaders['extra'] = {MADE}"
    after = (
        "    total = 0.0\n    for name, part in loaders.items():\n"
        "        for (x,) in part:\n            total += model(x).sum().item()\n"
        "    print(total)\n"
    )
    conversion = convert(script(before, after=after))
    assert open_notes(conversion) or "over_ranks(total)" in conversion.after


PHASES = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(8, 2))
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loaders = {}
loaders["train"] = DataLoader(data, batch_size=4)
loaders["val"] = DataLoader(data, batch_size=2)
for epoch in range(2):
    for phase in ("train", "val"):
        for (x,) in loaders[phase]:
            loss = model(x).mean()
            if phase == "train":
                opt.zero_grad()
                loss.backward()
                opt.step()
"""


def test_the_loader_of_a_phase_that_evaluates_stays_whole():
    after = convert(PHASES).after
    assert 'loaders["train"] = DataLoader(data, batch_size=per_rank(4)' in after
    assert 'loaders["val"] = DataLoader(data, batch_size=2)\n' in after


def test_a_starred_argument_alone_is_refused():
    source = script(f"loaders = (fit, {MADE})", "1").replace(
        "zip(fit, 1)", "zip(*loaders)"
    )
    assert "no loop around it is known to take batches" in refused(source)


BATCHES = """\
sizes = []
for epoch in range(2):
    for (x,) in loaders['extra']:
        if len(x) < 6:
            continue
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


def test_the_batch_size_of_a_loader_of_a_container_is_followed():
    before = f"loaders = {{}}\nloaders['extra'] = {MADE}\n"
    head = SCRIPT.partition("{before}")[0]
    after = convert(f"{head}{before}{BATCHES}").after
    assert "        if len(x) < per_rank(6):\n" in after


STEP = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(8, 2))

class Run:
    def __init__(self):
        self.net = torch.nn.Linear(2, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_size=4)
        self.more = []
        self.more.append(DataLoader(data, batch_size=6))

    def step(self, x):
        loss = self.net(x).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()

    def fit(self):
        for (x,) in self.loader:
            self.step(x)
        return self


run = {made}
for epoch in range(2):
    for (x,) in run.more[0]:
        run.step(x)
"""


def test_a_loader_of_a_loop_that_trains_and_is_not_known_is_listed():
    conversion = convert(STEP.replace("{made}", "Run().fit()"))
    (note,) = open_notes(conversion)
    assert note.startswith("line 12: what takes the batches of this loader, which is")


def test_a_loader_of_an_object_of_the_script_is_divided():
    conversion = convert(STEP.replace("{made}", "Run()\nrun.fit()"))
    assert "DataLoader(data, batch_size=per_rank(6)" in conversion.after
    assert open_notes(conversion) == []
