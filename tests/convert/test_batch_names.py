"""Which names in a step are the loader's batch size, and which this rank's."""

from __future__ import annotations

import pytest

from support.conversions import STEP, convert, open_notes

HEAD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

batch_size = 16
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=batch_size)
"""

LOOP = "for epoch in range(2):\n    for (x,) in loader:\n"


def step(*lines, before=""):
    """A script whose step has more lines, and whose functions come first."""
    return HEAD + before + LOOP + "".join(f"        {x}\n" for x in lines) + STEP


def noise_of(script):
    """The noise of a converted script, and what it says about it."""
    conversion = convert(script)
    line = next(x for x in conversion.after.splitlines() if "randn(" in x)
    said = [note for note in open_notes(conversion) if "whether `" in note]
    return line.strip(), said


NOISE = "z = torch.randn(batch_size, 3)"
DIVIDED = "z = torch.randn(per_rank(batch_size), 3)"


@pytest.mark.parametrize(
    "line",
    [
        "batch_size = x.size(0)",
        "batch_size = x.shape[0]",
        "batch_size, width = x.shape",
        "batch_size = len(x)",
        "batch_size = min(batch_size, x.size(0))",
        "batch_size: int = x.size(0)",
        "(batch_size := x.size(0))",
        "width = batch_size = x.size(0)",
        "for batch_size in [x.size(0)]: pass\n        batch_size = len(x)",
        "n = x.size(0)\n        batch_size = n",
    ],
)
def test_a_name_that_the_step_sets_to_its_length_stays(line):
    assert noise_of(step(line, NOISE)) == (NOISE, [])


def test_a_name_that_no_line_of_the_step_sets_is_divided():
    assert noise_of(step(NOISE)) == (DIVIDED, [])


def test_a_name_that_only_another_function_sets_is_divided():
    before = "def show(x):\n    batch_size = x.size(0)\n    print(batch_size)\n"
    assert noise_of(step(NOISE, before=before)) == (DIVIDED, [])


def test_a_comprehensions_own_name_stays():
    line = "z = [torch.randn(batch_size, 3) for batch_size in [x.size(0)]]"
    assert noise_of(step(line)) == (line, [])


@pytest.mark.parametrize(
    "line",
    [
        "if epoch: batch_size = x.size(0)",
        "batch_size //= 2",
        "batch_size = batch_size // 2",
        "batch_size = x.size(0) if epoch else batch_size",
        "for batch_size in range(len(x)): pass",
        "try: batch_size = x.size(0)\n        except IndexError: pass",
    ],
)
def test_a_name_that_may_be_both_is_listed(line):
    text, said = noise_of(step(line, NOISE))
    assert text == NOISE
    assert len(said) == 1
    assert "or this rank's part already (line 10 sets it too)" in said[0]


def test_a_name_that_is_set_after_its_use_is_listed():
    """The second step reads what the first one set."""
    text, said = noise_of(step(NOISE, "batch_size = x.size(0)"))
    assert text == NOISE
    assert "line 11 sets it too" in said[0]


FUNCTION = "def sample(batch_size, width):\n    return torch.randn(batch_size, width)\n"


def test_a_parameter_with_this_ranks_length_stays():
    script = step("z = sample(x.size(0), 3)", before=FUNCTION)
    assert noise_of(script) == ("return torch.randn(batch_size, width)", [])


def test_a_parameter_with_the_batch_size_gives_this_ranks_part():
    after = convert(step("z = sample(batch_size, 3)", before=FUNCTION)).after
    assert "torch.randn(batch_size, width)" in after
    assert "sample(per_rank(batch_size), 3)" in after


def test_a_parameter_of_a_step_does_not_depend_on_later_calls():
    script = step("z = sample(x.size(0), 3)", before=FUNCTION)
    script += "print(sample(batch_size, 3))\n"
    assert noise_of(script) == ("return torch.randn(batch_size, width)", [])


def test_a_default_that_no_call_changes_is_listed_or_divided():
    before = "def sample(batch_size=16):\n    return torch.randn(batch_size, 3)\n"
    script = step("z = sample()", before=before)
    assert noise_of(script) == ("return torch.randn(per_rank(batch_size), 3)", [])


def test_a_forwards_parameter_with_this_ranks_length_stays():
    before = (
        "class Noise(torch.nn.Module):\n    def forward(self, batch_size):\n"
        "        return torch.randn(batch_size, 3)\nnoise = Noise()\n"
    )
    script = step("z = noise(x.size(0))", before=before)
    assert noise_of(script) == ("return torch.randn(batch_size, 3)", [])


def test_a_global_name_that_a_function_sets_is_listed():
    before = "def measure(x):\n    global batch_size\n    batch_size = x.size(0)\n"
    text, said = noise_of(step("measure(x)", NOISE, before=before))
    assert text == NOISE
    assert "line 10 sets it too" in said[0]


IN_A_CLASS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

class Run:
    def __init__(self):
        self.batch_size = 16
        self.data = TensorDataset(torch.ones(64, 2))
        self.loader = DataLoader(self.data, batch_size=self.batch_size)
        self.model = torch.nn.Linear(2, 1)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self):
        for (x,) in self.loader:
            {line}
            z = torch.randn(self.batch_size, 2)
            loss = self.model(z - x).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

run = Run()
run.train()
"""


@pytest.mark.parametrize(
    ("line", "size"),
    [("pass", "per_rank(self.batch_size)"), ("self.batch_size = x.size(0)", None)],
)
def test_an_attribute_is_what_was_set_last(line, size):
    text, said = noise_of(IN_A_CLASS.replace("{line}", line))
    assert text == f"z = torch.randn({size or 'self.batch_size'}, 2)"
    assert not said


def test_an_attribute_of_arguments_is_what_was_set_last():
    script = step("args.batch_size = x.size(0)", NOISE).replace(
        "batch_size = 16\n",
        "import argparse\nargs = argparse.Namespace(batch_size=16)\n",
    )
    script = script.replace("=batch_size)", "=args.batch_size)")
    script = script.replace("randn(batch_size", "randn(args.batch_size")
    assert noise_of(script) == ("z = torch.randn(args.batch_size, 3)", [])


def test_a_comparison_with_this_ranks_length_stays():
    after = convert(step("batch_size = len(x)", "if len(x) < batch_size: break")).after
    assert "if len(x) < batch_size: break" in after


def test_a_main_function_follows_its_own_name():
    body = HEAD.partition("\n\n")[2] + LOOP
    body += f"        batch_size = x.shape[0]\n        {NOISE}\n{STEP}"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    script = f"{HEAD.partition('batch_size')[0]}def main():\n{lines}main()\n"
    assert noise_of(script) == (NOISE, [])


def sized(before, line):
    """What a script's line becomes, and what is said about it."""
    lines = [x for x in HEAD.splitlines() if "batch_size" not in x]
    head = ["import os", "from functools import partial", *lines]
    head.append("data = TensorDataset(torch.ones(64, 2))")
    text = "\n".join(head) + f"\n{before}{LOOP}        {line}\n{STEP}"
    conversion = convert(text)
    number = next(i for i, x in enumerate(text.splitlines()) if x.strip() == line)
    said = [n for n in open_notes(conversion) if n.startswith(f"line {number + 1}:")]
    return conversion.after, said


FOLLOWED = {
    "an entry": ("C = {'n': 16}\n", "DataLoader(data, batch_size=C['n'])", "C['n']"),
    "an inner entry": (
        "C = {'data': dict(n=16)}\n",
        "DataLoader(data, batch_size=C['data']['n'])",
        "C['data']['n']",
    ),
    "an entry by get": (
        "C = dict(n=16)\n",
        "DataLoader(data, batch_size=C.get('n', 8))",
        "C['n']",
    ),
    "an entry of what a function returns": (
        "def read(name='a'):\n    return {'a': dict(n=16)}[name]\nC = read()\n",
        "DataLoader(data, batch_size=C['n'])",
        "C['n']",
    ),
    "an entry that is stored later": (
        "C = {}\nC['n'] = 16\n",
        "DataLoader(data, batch_size=C['n'])",
        "C['n']",
    ),
    "a name for an entry": (
        "C = {'n': 16}\nsize = C['n']\n",
        "DataLoader(data, batch_size=size)",
        "C['n']",
    ),
    "attributes as a dict": (
        "from argparse import Namespace\na = Namespace(n=16)\n",
        "DataLoader(data, batch_size=vars(a)['n'])",
        "a.n",
    ),
    "keyword arguments": (
        "N = 16\nkw = {'batch_size': N}\nkw.update({'shuffle': True})\n",
        "DataLoader(data, **kw)",
        "N",
    ),
    "keyword arguments of dict()": (
        "kw = dict(batch_size=16)\n",
        "DataLoader(data, **kw)",
        "kw['batch_size']",
    ),
    "keyword arguments that a function passes on": (
        "N = 16\ndef make(d, **kw):\n    return DataLoader(d, **kw)\n",
        "make(data, batch_size=N)",
        "N",
    ),
    "a default": (
        "N = 16\ndef make(size=N):\n    return DataLoader(data, batch_size=size)\n",
        "make()",
        "N",
    ),
    "a conversion": ("N = 16\n", "DataLoader(data, batch_size=int(N))", "N"),
    "a product": ("N = 8\n", "DataLoader(data, batch_size=N * 2)", "N * 2"),
    "a choice": (
        "N, small = 16, False\n",
        "DataLoader(data, batch_size=4 if small else N)",
        "N",
    ),
    "an assignment": ("N = 16\n", "DataLoader(data, batch_size=(n := N))", "N"),
    "a function": (
        "def size():\n    return 16\n",
        "DataLoader(data, batch_size=size())",
        "size()",
    ),
    "a variable of the environment": (
        "",
        "DataLoader(data, batch_size=int(os.environ['N']))",
        "int(os.environ['N'])",
    ),
    "functools.partial": (
        "N = 16\nmake = partial(DataLoader, batch_size=N)\n",
        "make(data)",
        "N",
    ),
    "a lambda": (
        "N = 16\nmake = lambda d: DataLoader(d, batch_size=N)\n",
        "make(data)",
        "N",
    ),
    "an object under two names": (
        "class C:\n    n = 16\nc = C()\nd = c\n",
        "DataLoader(data, batch_size=c.n)",
        "d.n",
    ),
}


@pytest.mark.parametrize(("before", "made", "size"), FOLLOWED.values(), ids=FOLLOWED)
def test_a_batch_size_is_followed_into_a_comparison(before, made, size):
    line = f"if len(x) < {size}: continue"
    after, said = sized(f"{before}loader = {made}\n", line)
    assert said == []
    assert f"if len(x) < per_rank({size}): continue" in after


@pytest.mark.parametrize(("before", "made", "size"), FOLLOWED.values(), ids=FOLLOWED)
def test_a_batch_size_is_followed_into_a_shape(before, made, size):
    after, said = sized(f"{before}loader = {made}\n", f"x = x.view({size}, -1)")
    assert said == []
    assert f"x = x.view(per_rank({size}), -1)" in after


NAMED = "N = 16\nloader = DataLoader(data, batch_size=N)\n"


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("if x.numel() < N: continue", "if x.numel() < per_rank(N): continue"),
        ("if x.size()[0] != N: continue", "if x.size()[0] != per_rank(N): continue"),
        ("if (n := len(x)) < N: continue", "if (n := len(x)) < per_rank(N): continue"),
        (
            "if len(x) not in (N,): continue",
            "if len(x) not in (per_rank(N),): continue",
        ),
        ("if x.shape != (N, 2): continue", "if x.shape != (per_rank(N), 2): continue"),
        ("assert len(x) == N", "assert len(x) == per_rank(N)"),
    ],
)
def test_a_length_is_found_in_a_comparison(line, becomes):
    assert becomes in sized(NAMED, line)[0]


UNCLEAR = {
    "a part of the batch": (NAMED, "if len(x) < N // 2: continue"),
    "a remainder": (NAMED, "if len(x) % N: continue"),
    "a multiple of a length": (NAMED, "if len(x) * 2 < N: continue"),
    "a shape under a name": (NAMED + "s = (N, 1)\n", "x = x + torch.ones(s)"),
    "a factor of the batch": (
        "N = 8\nloader = DataLoader(data, batch_size=N * 2)\n",
        "if len(x) <= N: continue",
    ),
    "the same number": (
        "N = 16\nloader = DataLoader(data, batch_size=16)\n",
        "if len(x) < N: continue",
    ),
    "arguments of another file": (
        "import kept\nloader = DataLoader(data, **kept.options())\n",
        "if len(x) < kept.N: continue",
    ),
    "arguments that are not followed": (
        "a = (data, 16)\nloader = DataLoader(*a)\n",
        "if len(x) < 16: continue",
    ),
    "a number beside one that is not known": (
        "import kept\nloader = DataLoader(data, batch_size=kept.N)\n",
        "if len(x) < 16: continue",
    ),
}


@pytest.mark.parametrize(("before", "line"), UNCLEAR.values(), ids=UNCLEAR)
def test_a_size_that_may_be_the_batch_is_listed(before, line):
    after, said = sized(before, line)
    assert line in after
    assert len([note for note in said if "per_rank(" in note]) == 1


OTHER = {
    "another number": (NAMED, "if len(x) < 4: continue"),
    "a single sample": (
        "import kept\nloader = DataLoader(data, batch_size=kept.N)\n",
        "if len(x) < 2: continue",
    ),
    "another entry": (
        "C = {'n': 16, 'm': 2}\nloader = DataLoader(data, batch_size=C['n'])\n",
        "x = x + torch.zeros(C['m'])",
    ),
    "another argument": (
        "import kept\nloader = DataLoader(data, batch_size=kept.args.n)\n",
        "x = x + torch.zeros(kept.args.m)",
    ),
    "a number of collected values": (
        "kept = []\nloader = DataLoader(data, batch_size=int(os.environ['N']))\n",
        "if len(kept) > 100: break",
    ),
    "a size of the loader": (NAMED, "if len(x) < loader.batch_size: continue"),
}


@pytest.mark.parametrize(("before", "line"), OTHER.values(), ids=OTHER)
def test_another_number_of_a_step_stays(before, line):
    after, said = sized(before, line)
    assert line in after
    assert said == []


LAMBDAS = """\
import torch
from types import SimpleNamespace
from torch.utils.data import DataLoader, TensorDataset

class Options:
    def __init__(self):
        self.bs = 16

{maker}
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(64, 2))
loader = {call}
"""


@pytest.mark.parametrize(
    ("maker", "call", "size"),
    [
        ("o = Options()", "get(data, o)", "o.bs"),
        ("o = Options()", "get(data, c=o)", "o.bs"),
        ("o = SimpleNamespace(bs=16)", "get(data, o)", "o.bs"),
        ("o = 16", "sized(data, o)", "o"),
        ("o = {'bs': 16}", "entry(data, o)", "o['bs']"),
        ("o = 16", "preset(data)", "o"),
    ],
)
def test_a_loaders_size_is_followed_through_a_lambda(maker, call, size):
    functions = (
        "get = lambda ds, c: DataLoader(ds, batch_size=c.bs)\n"
        "sized = lambda ds, n: DataLoader(ds, batch_size=n)\n"
        "entry = lambda ds, c: DataLoader(ds, batch_size=c['bs'])\n"
        "preset = lambda ds, n=o: DataLoader(ds, batch_size=n)\n"
    )
    head = LAMBDAS.format(maker=f"{maker}\n{functions}", call=call)
    line = f"        z = torch.randn({size}, 3)\n"
    after = convert(head + LOOP + line + STEP).after
    assert f"z = torch.randn(per_rank({size}), 3)\n" in after
