"""What is converted how, what is refused, and that twice is once."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stretto.cli._main import group
from stretto.convert import (
    Choices,
    Evaluation,
    Kind,
    Target,
    convert_bytes,
    script_of_notebook,
)
from stretto.errors import SpecError, StrettoError
from support.conversions import convert, open_notes, refused

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.[pi]*"))

TRAINING = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4, shuffle=True)
for epoch in range(2):
    for (x,) in loader:
        loss = model(x).mean()  # a comment
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(loss.item())
"""


def added(conversion):
    return [x[1:] for x in conversion.diff().splitlines() if x.startswith("+")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
@pytest.mark.parametrize("target", [Target.STRETTO, Target.DDP])
def test_converting_twice_changes_nothing_more(path, target):
    choices = Choices(target=target)
    once = convert_bytes(path.read_bytes(), name=path.name, choices=choices)
    assert once.changes
    again = convert_bytes(once.after.encode(), name=path.name, choices=choices)
    assert not again.changes
    assert again.diff() == ""
    assert "converted already" in again.listed()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_a_script_gets_only_the_functions_that_it_calls(path):
    once = convert_bytes(path.read_bytes(), name=path.name, choices=Choices())
    before = path.read_text()
    for name in re.findall(r"\b(?:def|class) ([A-Za-z]\w*|_[a-z]\w*)", once.after):
        if not re.search(rf"\b(def|class) {name}\b", before):
            assert len(re.findall(rf"\b{name}\b", once.after)) > 1, name


def test_lines_that_need_no_change_keep_comments_and_form():
    after = convert(TRAINING).after
    for line in TRAINING.splitlines():
        if "loader" not in line and "print" not in line:
            assert line in after.splitlines()
    removed = [x for x in convert(TRAINING).diff().splitlines() if x.startswith("-")]
    assert len(removed) == 3  # the header, the loader, the print


def test_each_part_of_the_conversion_is_there_once():
    after = convert(TRAINING).after
    for text in (
        "from stretto import DistributedDataParallel\n",
        "model = DistributedDataParallel(model)\n",
        "batch_size=per_rank(4), sampler=DistributedSampler(",
        "    loader.sampler.set_epoch(epoch)\n    for (x,) in loader:",
        "print0(mean_over_ranks(loss.item()))\n",
        "\njoin_ranks()\nseed_equally()\n",
        "\ndist.destroy_process_group()\n",
        "torch.manual_seed(torch.initial_seed() + RANK)\nfor epoch in range(2):",
    ):
        assert after.count(text) == 1, text


def test_ddp_target_needs_nothing_of_this_package():
    after = convert(TRAINING, target=Target.DDP).after
    assert "from torch.nn.parallel import DistributedDataParallel\n" in after
    assert "stretto" not in after.replace("# Distributed by stretto convert", "")


def test_horovod_target_wraps_the_optimizer():
    after = convert(TRAINING, target=Target.HOROVOD).after
    assert "import stretto.horovod.torch as hvd\n" in after
    assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n" in after
    assert (
        "opt = hvd.DistributedOptimizer(opt, "
        "named_parameters=model.named_parameters())\n"
    ) in after
    assert "DistributedDataParallel" not in after
    assert "torch.distributed as" not in after
    compile(after, "train.py", "exec")


def test_horovod_refuses_what_its_optimizer_can_not_do():
    gan = (Path(__file__).parent / "scripts/gan.py").read_text()
    assert "--to stretto" in refused(gan, target=Target.HOROVOD)
    amp = (Path(__file__).parent / "scripts/amp.py").read_text()
    assert "--to stretto" in refused(amp, target=Target.HOROVOD)


def test_per_rank_keeps_the_batch_size_and_explains_the_rate():
    conversion = convert(TRAINING, per_rank_batch=True)
    assert "batch_size=4, sampler=" in conversion.after
    assert "per_rank" not in conversion.after
    assert (
        "learning rate is left unchanged, but with N ranks each step"
        in conversion.listed()
    )


def test_rank0_evaluates_when_so_chosen():
    plain = (Path(__file__).parent / "scripts/plain.py").read_text()
    after = convert(plain, evaluation=Evaluation.RANK0).after
    assert "for data in whole_on_rank0(testloader):" in after


def test_an_evaluation_that_keeps_more_than_sums_is_left_whole_and_said():
    source = TRAINING + (
        "every = []\n"
        "with torch.no_grad():\n"
        "    for (x,) in DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4):\n"
        "        every.append(model(x))\n"
    )
    source = source.replace(
        "    for (x,) in DataLoader(", "    for (x,) in val_loader:  # DataLoader("
    ).replace("every = []", "val_loader = DataLoader(torch.ones(8, 2))\nevery = []")
    conversion = convert(source)
    assert "share_of" not in conversion.after
    said = [n for n in conversion.notes if "every rank runs all of" in n.text]
    assert [(n.line, n.kind) for n in said] == [(17, Kind.KNOW)]


def test_a_name_of_ours_in_the_script_is_left_to_it():
    source = TRAINING.replace("model", "dist").replace("epoch", "RANK")
    after = convert(source).after
    assert "import torch.distributed as dist_\n" in after
    assert "dist = DistributedDataParallel(dist)\n" in after
    assert "if RANK_ > 0:\n" in after
    assert "loader.sampler.set_epoch(RANK)\n" in after
    compile(after, "train.py", "exec")


def test_devices_with_numbers_become_this_ranks():
    source = TRAINING.replace(
        "torch.nn.Linear(2, 1)\n",
        "torch.nn.Linear(2, 1)\nmodel.to('cuda:0')\nmodel.cuda(0)\n"
        "d = torch.device('cuda', 0)\n",
    )
    after = convert(source).after
    assert 'model.to(f"cuda:{LOCAL_RANK}")\nmodel.cuda(LOCAL_RANK)\n' in after
    assert "torch.device('cuda', LOCAL_RANK)" in after
    # Wrapped only when it is where it trains.
    assert after.index("model.cuda(") < after.index("DistributedDataParallel(model)")


def test_logging_to_services_and_bars_is_rank_0s():
    source = (
        "import wandb\nfrom tqdm import tqdm\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
    ) + TRAINING.replace("in loader:", "in tqdm(loader):").replace(
        "for epoch", "wandb.init(project='x')\nwriter = SummaryWriter()\nfor epoch"
    )
    after = convert(source).after
    assert "tqdm(loader, disable=RANK != 0)" in after
    assert """mode=None if RANK == 0 else "disabled")""" in after
    assert "writer = SummaryWriter() if RANK == 0 else OnRank0()\n" in after
    assert "loader.sampler.set_epoch(epoch)\n" in after


def test_downloads_and_files_are_one_ranks():
    source = TRAINING.replace(
        "model =", "data = Digits('.', download=True)\nmodel ="
    ) + ("with open('log.txt', 'w') as f:\n    f.write('done')\n")
    after = convert(source).after
    assert "with rank0_first():\n    data = Digits('.', download=True)\n" in after
    assert "if RANK == 0:\n    with open('log.txt', 'w') as f:\n" in after


@pytest.mark.parametrize(
    "opened",
    [
        'io.open("data.txt")',
        'codecs.open("data.txt", "r", "utf-8")',
        'archive.open("a.txt")',
        'path.open("r")',
    ],
)
def test_a_file_that_is_read_is_read_on_every_rank(opened):
    opening = f"with {opened} as f:\n    text = f.read()\n"
    source = f"import codecs\nimport io\n{TRAINING}{opening}"
    after = convert(source).after
    assert f"\n{opening}" in after


@pytest.mark.parametrize(
    "opened",
    [
        'io.open("o.log", "w")',
        'codecs.open("o.log", "a", "utf-8")',
        'archive.open("a.txt", "w")',
        'path.open("w", 1)',
        'tarfile.open("a.tar", "w:gz")',
    ],
)
def test_a_file_that_is_written_is_rank_0s(opened):
    opening = f"with {opened} as f:\n    f.write('done')\n"
    source = f"import codecs\nimport io\nimport tarfile\n{TRAINING}{opening}"
    after = convert(source).after
    assert f"if RANK == 0:\n    with {opened} as f:\n" in after


def test_a_log_with_handlers_is_rank_0s():
    source = "import logging\n" + TRAINING.replace(
        "model =",
        "log = logging.getLogger()\nlog.addHandler(logging.FileHandler('x.log'))\n"
        "log.addHandler(logging.StreamHandler())\nmodel =",
    )
    after = convert(source).after
    assert "logging.FileHandler(rank0_file('x.log'))" in after
    assert (
        "log.addHandler(logging.StreamHandler())\n"
        "if RANK > 0:\n    logging.disable(logging.WARNING)\n" in after
    )


def test_a_log_whose_module_has_no_name_is_listed():
    source = "from logging import StreamHandler, getLogger\n" + TRAINING.replace(
        "model =", "getLogger().addHandler(StreamHandler())\nmodel ="
    )
    (note,) = open_notes(convert(source))
    assert "each rank shows its log" in note


def test_a_try_at_the_top_that_imports_nothing_is_no_entry():
    source = TRAINING.replace(
        "model =", "try:\n    torch.randn(1)\nexcept OSError:\n    pass\nmodel ="
    )
    after = convert(source).after
    assert after.count("\njoin_ranks()\n") == 1
    compile(after, "train.py", "exec")


def test_the_entry_is_found_with_its_comparison_either_way_around():
    body = "".join(f"    {line}\n" for line in TRAINING.splitlines()[3:])
    head = "\n".join(TRAINING.splitlines()[:2])
    for guard in ('__name__ == "__main__"', '"__main__" == __name__'):
        after = convert(f"{head}\n\nif {guard}:\n{body}").after
        assert f"if {guard}:\n    join_ranks()\n" in after


def trainer_of_tutorial():
    return (Path(__file__).parent / "scripts/tutorial.py").read_text()


def test_a_model_is_wrapped_where_it_is_on_its_device():
    after = convert(trainer_of_tutorial()).after
    assert (
        "        self.model = model.to(device)\n"
        "        self.model = DistributedDataParallel(self.model)\n"
    ) in after
    assert after.count("DistributedDataParallel(") == 1
    assert "unwrap(self.model).state_dict()" in after


def test_a_device_given_as_a_number_becomes_this_ranks():
    source = trainer_of_tutorial().replace(
        '"cuda:0" if torch.cuda.is_available() else "cpu"', "0"
    )
    assert "    main(LOCAL_RANK, 3, 2, 32)\n" in convert(source).after


def test_a_name_taken_before_the_model_is_wrapped_is_wrapped_instead():
    source = TRAINING.replace("opt =", "net = model\nopt =").replace(
        "loss = model(x)", "loss = net(x)"
    )
    after = convert(source).after
    assert "\nnet = DistributedDataParallel(net)\n" in after
    assert "model = DistributedDataParallel(" not in after


def test_a_compiled_model_is_the_one_that_is_wrapped():
    source = TRAINING.replace("opt =", "fast = torch.compile(model)\nopt =").replace(
        "loss = model(x)", "loss = fast(x)"
    )
    assert "\nfast = DistributedDataParallel(fast)\n" in convert(source).after
    later = TRAINING.replace("loader =", "fast = torch.compile(model)\nloader =")
    later = later.replace("loss = model(x)", "loss = fast(x)")
    after = convert(later).after
    assert "\nmodel = DistributedDataParallel(model)\nfast = torch." in after


def test_training_under_two_names_that_no_wrapper_covers_is_refused():
    source = TRAINING.replace("opt =", "net = model\nopt =").replace(
        "loss = model(x).mean()", "loss = net(x).mean() + model(x).mean()"
    )
    message = refused(source)
    assert "train.py:10: " in message
    assert "another name of the trained model" in message


def test_a_teacher_from_the_same_function_stays_as_it_is():
    source = TRAINING.replace(
        "model = torch.nn.Linear(2, 1)\n",
        "def build():\n    return torch.nn.Linear(2, 1)\n\n\n"
        "teacher = build().eval()\nmodel = build()\n",
    ).replace("model(x)", "(model(x) - teacher(x).detach())")
    after = convert(source).after
    assert after.count("DistributedDataParallel(") == 1
    assert "unwrap" not in after


LOSS = "loss = model(x).mean()  # a comment"


@pytest.mark.parametrize(
    ("loss", "factor"),
    [
        ("loss = model(x).sum()", True),
        ("loss = (model(x) ** 2).sum() / 8", True),
        ("loss = (model(x) ** 2).sum() / len(x)", False),
        ("loss = (model(x) ** 2).sum(1).mean()", False),
        ("loss = torch.mean(model(x))", False),
        ("loss = torch.nn.MSELoss(reduction='sum')(model(x), x[:, :1])", True),
        ("loss = torch.nn.functional.mse_loss(model(x), x[:, :1])", False),
        ("loss = penalty(model(x))", True),
        ("loss = model(x).sum()\n        loss = loss.mean()", True),
        (
            (
                "loss = model(x).mean()\n"
                "        for p in model.parameters():\n"
                "            loss = loss + p.pow(2).sum()"
            ),
            False,
        ),
    ],
)
def test_a_loss_that_is_a_sum_is_scaled_wherever_it_is_summed(loss, factor):
    source = TRAINING.replace(LOSS, loss).replace(
        "model =", "def penalty(out):\n    return (out * out).sum()\n\n\nmodel ="
    )
    conversion = convert(source)
    assert ("(loss * WORLD_SIZE).backward()" in conversion.after) is factor
    assert not [n for n in conversion.notes if "this loss" in n.text]


@pytest.mark.parametrize(
    "loss",
    [
        "loss = (model(x) - 1).norm()",
        "loss = torch.sqrt((model(x) ** 2).mean())",
        "loss = foreign(model(x))",
        "loss = (x * model(x)).sum() / x.sum()",
    ],
)
def test_a_loss_that_may_be_no_mean_is_listed(loss):
    conversion = convert(TRAINING.replace(LOSS, loss))
    asked = [
        n
        for n in conversion.notes
        if "could not show that this loss is a mean" in n.text
    ]
    assert [n.kind for n in asked] == [Kind.OPEN]
    assert "WORLD_SIZE).backward()" not in conversion.after


def test_a_sum_beside_a_weight_penalty_is_refused():
    penalty = "loss = model(x).sum() + sum(p.pow(2).sum() for p in model.parameters())"
    message = refused(TRAINING.replace(LOSS, penalty))
    assert message.startswith("train.py:11: ")
    assert "Divide the sum by the number of samples" in message


@pytest.mark.parametrize(
    "added",
    [
        "loss += 0.5 * model(x).abs().mean()",
        "part = model(x).abs().mean()\n        loss += part",
        "parts = [loss]\n        parts.append(loss)\n        loss = sum(parts)",
    ],
)
def test_what_gradients_flow_through_is_not_reduced(added):
    after = convert(TRAINING.replace(LOSS, f"{LOSS}\n        {added}")).after
    assert after.count("mean_over_ranks(") == 2  # its definition, the print
    assert added in after


@pytest.mark.parametrize(
    "second",
    [
        "(0.1 * loss).backward()",
        "(out.abs().mean()).backward()",
        "more = out * 2\n        more.mean().backward()",
    ],
)
def test_two_backwards_through_one_forward_are_refused(second):
    step = "out = model(x)\n        loss = out.mean()"
    source = TRAINING.replace(LOSS, step).replace(
        "loss.backward()", f"loss.backward(retain_graph=True)\n        {second}"
    )
    assert "a second backward() goes through `model(...)` of line 9" in refused(source)


def test_a_backward_after_another_forward_is_converted():
    source = TRAINING.replace(
        "loss.backward()", "loss.backward()\n        model(x).mean().backward()"
    )
    assert convert(source).changes
    branches = TRAINING.replace(
        "        loss.backward()\n",
        "        if epoch:\n            loss.backward()\n"
        "        else:\n            (2 * loss).backward()\n",
    )
    assert convert(branches).changes


def test_a_model_kept_in_a_list_is_refused():
    source = TRAINING.replace("model = torch.nn.Linear(2, 1)", "nets = [build()]")
    message = refused(source.replace("model", "nets[0]"))
    assert "the trained model is an element of `nets`" in message


# Refusals: one line that names a line and a next step


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", ["train.py:1:", "syntax error"]),
        ("import torch\n\0", ["train.py: syntax error", "null bytes"]),
        ("import torch\nprint 'loss'\n", ["train.py:2:", "Python 2"]),
        ("import torch\nimport tensorflow as tf\n", [":2:", "TensorFlow"]),
        ("import torch\nx = torch.ones(2)\n", ["no training loop", "Give the file"]),
        ("x = 1\n", ["does not import torch"]),
        ("import torch\nimport accelerate\n", [":2:", "Accelerate"]),
        ("import torch\nfrom transformers import Trainer\n", [":2:", "stretto run"]),
        (
            "import torch\ntorch.distributed.init_process_group('gloo')\n",
            [":2:", "distributed already"],
        ),
        (
            TRAINING.replace("shuffle=True", "sampler=mine"),
            [":6:", "its own sampler", "Subset"],
        ),
        (TRAINING.replace(", batch_size=4", ""), [":6:", "batch_size"]),
        (
            TRAINING.replace("model(x).mean()", "model.cost(x)"),
            ["nothing calls `model(...)`", "--to horovod"],
        ),
        (
            TRAINING.replace("model(x)", "(model.cost(x) if epoch else model(x))"),
            [":9:", "model.cost", "forward()"],
        ),
        (
            TRAINING.replace("in loader:", "in torch.ones(8, 1, 2):"),
            [":11:", "DataLoader"],
        ),
        (
            TRAINING.replace("opt = torch.optim.SGD", "from mine import opt\ng = dict"),
            [":12:", "no optimizer"],
        ),
        ("import horovod.mxnet as hvd\n", [":1:", "horovod.mxnet"]),
        ("from horovod import spark\n", [":1:", "horovod.spark"]),
        (
            "from horovod.tensorflow import elastic\n",
            [":1:", "horovod.tensorflow.elastic"],
        ),
        ("import keras\n", [":1:", "Keras", "docs/how-to/keras.md"]),
        ("import jax.numpy as jnp\n", [":1:", "JAX", "docs/how-to/jax.md"]),
        ("import optax\n", [":1:", "JAX", "docs/how-to/jax.md"]),
        ("from mxnet import gluon\n", [":1:", "MXNet is retired"]),
    ],
)
def test_what_is_not_understood_is_refused_by_one_line(source, words):
    message = refused(source)
    for word in words:
        assert word in message


def test_an_iterable_dataset_is_refused():
    source = TRAINING.replace(
        "model =",
        "class Stream(torch.utils.data.IterableDataset):\n    pass\n\n\n"
        "stream = Stream()\nmodel =",
    ).replace("TensorDataset(torch.ones(8, 2))", "stream")
    assert "IterableDataset" in refused(source)


def test_a_training_function_that_nothing_starts_is_refused():
    body = "".join(f"    {line}\n" for line in TRAINING.splitlines()[3:])
    source = "\n".join(TRAINING.splitlines()[:2]) + f"\n\n\ndef main():\n{body}"
    assert "nothing in this file starts" in refused(source)
    after = convert(source + "\nmain()\n").after
    assert "\njoin_ranks()\nseed_equally()\nmain()\ndist.destroy" in after


def test_another_target_than_the_scripts_own_is_refused():
    once = convert(TRAINING, target=Target.DDP).after
    assert "was converted with --to ddp" in refused(once, target=Target.HOROVOD)


# Scripts that are distributed already


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.torch as hvd\n", "import stretto.horovod.torch as hvd\n"),
        (
            "from horovod.torch import rank\n",
            "from stretto.horovod.torch import rank\n",
        ),
        (
            "import horovod.tensorflow as hvd\nimport tensorflow as tf\n",
            "import stretto.horovod.tensorflow as hvd\nimport tensorflow as tf\n",
        ),
        (
            "import horovod.tensorflow.keras as hvd\n",
            "import stretto.horovod.tensorflow.keras as hvd\n",
        ),
        (
            "from horovod import torch as h\n",
            "from stretto.horovod import torch as h\n",
        ),
        (
            "import horovod.torch\nx = horovod.torch.rank()\n",
            "import stretto.horovod.torch\nx = stretto.horovod.torch.rank()\n",
        ),
        (
            "import horovod.torch as hvd\nf(horovod=1)\nx.horovod = 2\n",
            "import stretto.horovod.torch as hvd\nf(horovod=1)\nx.horovod = 2\n",
        ),
    ],
)
def test_horovod_imports_move(before, after):
    conversion = convert(before)
    assert conversion.after == after
    assert not convert(after).changes
    assert "line 1: " in conversion.listed()


def test_horovod_scripts_do_not_become_ddp():
    message = refused("import horovod.torch as hvd\n", target=Target.DDP)
    assert "--to horovod" in message


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            (
                "from torch.nn.parallel import DistributedDataParallel as DDP\n"
                "model = DDP(model)  # wrapped\n"
            ),
            (
                "from stretto import DistributedDataParallel as DDP\n"
                "model = DDP(model)  # wrapped\n"
            ),
        ),
        (
            "import torch\nm = torch.nn.parallel.DistributedDataParallel(m)\n",
            "import torch\nimport stretto\nm = stretto.DistributedDataParallel(m)\n",
        ),
        (
            "from torch import nn\nm = nn.parallel.DistributedDataParallel(m)\n",
            (
                "from torch import nn\nimport stretto\n"
                "m = stretto.DistributedDataParallel(m)\n"
            ),
        ),
    ],
)
def test_ddp_scripts_move_to_ours(before, after):
    assert convert(before).after == after
    assert not convert(after).changes
    assert not convert(before, target=Target.DDP).changes
    assert "--to stretto" in refused(before, target=Target.HOROVOD)


# Notebooks


def notebook():
    path = Path(__file__).parent / "scripts/notebook.ipynb"
    return path.read_text()


def test_a_notebook_keeps_all_but_the_changed_cells():
    before = json.loads(notebook())
    conversion = convert_bytes(
        notebook().encode(), name="notebook.ipynb", choices=Choices()
    )
    after = json.loads(conversion.after)
    assert {k: v for k, v in before.items() if k != "cells"} == {
        k: v for k, v in after.items() if k != "cells"
    }
    changed = [
        number
        for number, (old, new) in enumerate(
            zip(before["cells"], after["cells"], strict=True)
        )
        if old != new
    ]
    assert changed == [1, 3, 4, 6, 7]
    for old, new in zip(before["cells"], after["cells"], strict=True):
        assert {k: v for k, v in old.items() if k != "source"} == {
            k: v for k, v in new.items() if k != "source"
        }
    sources = ["".join(c["source"]) for c in after["cells"]]
    assert sources[1].startswith("%matplotlib inline\nimport torch\n")
    assert sources[2] == "!echo nothing to install"
    assert sources[6].startswith("%%time\n")
    assert "3 lines of magics are kept" in conversion.listed()
    assert "cell 5, line 2: `model` wrapped" in conversion.listed()
    assert conversion.after.endswith("}\n")


def test_a_step_that_another_function_returns_is_refused_with_its_name():
    source = """\
import torch
from torch.utils.data import DataLoader


def make_step(model, opt):
    def train_step(x):
        loss = model(x).mean()
        loss.backward()
        opt.step()

    return train_step


model = torch.nn.Linear(2, 1)
step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x in DataLoader(torch.ones(8, 2), batch_size=4):
    step(x)
"""
    with pytest.raises(SpecError, match="nothing in this file calls `train_step` by"):
        convert(source)


def test_a_notebook_may_define_functions_before_it_imports():
    book = json.loads(notebook())
    first = {"cell_type": "code", "metadata": {}, "outputs": [], "source": []}
    first["source"] = ["def twice(x):\n", "    return 2 * x\n"]
    book["cells"].insert(0, first)
    data = json.dumps(book).encode()
    conversion = convert_bytes(data, name="n.ipynb", choices=Choices())
    assert json.loads(conversion.after)["cells"][0] == first
    first["source"] = ["torch = __import__('torch')\n", "torch.manual_seed(0)\n"]
    with pytest.raises(SpecError, match="code runs before the first import"):
        convert_bytes(json.dumps(book).encode(), name="n.ipynb", choices=Choices())


def test_only_the_start_of_a_statement_in_a_notebook_can_be_a_magic():
    """A second line that begins with ``%`` is an operator, or text of a string."""
    book = json.loads(notebook())
    code = """\
print('epoch %d, "lr'
      % (3), r"\\(", 'it\\'s (')
rest = (7
% 4
)
text = '''
!not a shell
really?
'''
rest = rest \\
% 4
"""
    magics = """\
!pip install \\
  --quiet nothing
?print
if rest:
    # isn't (
    !echo \\
  more
"""
    book["cells"][2]["source"] = code + magics
    conversion = convert_bytes(
        json.dumps(book).encode(), name="n.ipynb", choices=Choices()
    )
    after = json.loads(conversion.after)["cells"][2]["source"]
    assert after.startswith("print0('epoch %d")
    assert after.removeprefix("print0") == (code + magics).removeprefix("print")
    run = script_of_notebook(conversion.after, name="n.ipynb")
    assert code.removeprefix("print") in run
    ast.parse(run)


def test_an_error_in_a_notebook_names_its_cell():
    broken = json.loads(notebook())
    broken["cells"][4]["source"] = ["x = 1\n", "y = (\n"]
    with pytest.raises(SpecError, match=r"n.ipynb: cell 5, line 2: syntax error"):
        convert_bytes(json.dumps(broken).encode(), name="n.ipynb", choices=Choices())


@pytest.mark.parametrize("text", ["{", "[]", '{"worksheets": []}'])
def test_what_is_no_notebook_is_refused(text):
    with pytest.raises(SpecError, match="not a notebook"):
        convert_bytes(text.encode(), name="n.ipynb", choices=Choices())


# The command


def run(*arguments):
    """Runs the command in this process; its errors as they reach `main`."""
    return CliRunner().invoke(group, ["convert", *map(str, arguments)])


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def test_check_says_by_its_exit_code_whether_something_would_change(script):
    result = run(script, "--check")
    assert result.exit_code == 3
    assert "+model = DistributedDataParallel(model)" in result.output
    assert "line 5: `model` wrapped" in result.output
    script.write_text(convert(TRAINING).after)
    assert run(script, "--check").exit_code == 0


def test_without_an_output_nothing_is_written(script):
    result = run(script)
    assert result.exit_code == 0
    assert "nothing written: name a file with -o" in result.output
    assert list(script.parent.iterdir()) == [script]


def test_an_output_that_exists_is_kept_unless_forced(script, tmp_path):
    out = tmp_path / "out.py"
    assert run(script, "-o", out).exit_code == 0
    assert out.read_text() == convert(TRAINING).after
    out.write_text("mine")
    error = run(script, "-o", out).exception
    assert isinstance(error, SpecError)
    assert "--force" in str(error)
    assert out.read_text() == "mine"
    assert run(script, "-o", out, "--force").exit_code == 0
    assert out.read_text() == convert(TRAINING).after


def test_folders_missing_files_and_other_encodings_are_refused(tmp_path):
    assert "is a folder" in str(run(tmp_path).exception)
    assert "cannot be read" in str(run(tmp_path / "none.py").exception)
    (tmp_path / "l.py").write_bytes("x = 1\ny = 'é'\n".encode("latin-1"))
    assert "l.py:2: a script must be UTF-8" in str(run(tmp_path / "l.py").exception)


def test_a_script_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "b.py").write_bytes(TRAINING.encode("utf-8-sig"))
    assert run(tmp_path / "b.py").exit_code == 0


def test_ends_of_lines_stay(tmp_path):
    path, out = tmp_path / "w.py", tmp_path / "o.py"
    path.write_bytes(TRAINING.replace("\n", "\r\n").encode())
    assert run(path, "-o", out).exit_code == 0
    data = out.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n")


def test_the_command_ends_with_2_and_one_line_for_what_it_refuses(tmp_path):
    path = tmp_path / "t.py"
    path.write_text("import tensorflow\n")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "stretto", "convert", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stderr.splitlines()
    reported = [x for x in lines if not x.startswith("import time:")]
    assert done.returncode == 2
    assert len(reported) == 1
    assert reported[0].startswith("stretto: error: t.py:1: imports tensorflow")
    imported = {x.rpartition("|")[2].strip() for x in lines}
    assert "libcst" in imported
    assert "torch" not in imported


def test_a_model_saved_whole_is_the_module_inside():
    after = convert(TRAINING + "torch.save(model, 'all.pt')\n").after
    assert "if RANK == 0:\n    torch.save(unwrap(model), 'all.pt')\n" in after


def test_shown_numbers_are_all_ranks_or_said_not_to_be():
    shown = (
        "        part = x.mean()\n        other = score(x)\n"
        '        print(f"{part:.3f} {other} {loss}")\n'
    )
    conversion = convert(TRAINING.replace("        opt.step()\n", shown))
    assert "{mean_over_ranks(part):.3f} {other} {mean_over_ranks(loss)}" in (
        conversion.after
    )
    asked = [n for n in conversion.notes if n.kind is Kind.OPEN]
    assert [n.line for n in asked] == [14]
    assert "`other`" in asked[0].text


@pytest.mark.parametrize("late", ["import os\n", "def f():\n    import os\n", ""])
@pytest.mark.parametrize("early", ["import os\n", "import os.path\n", ""])
def test_the_inserted_block_imports_what_is_not_imported_above_it(early, late):
    after = convert(early + TRAINING + late).after
    block = after[: after.index("RANK = int(os")]
    assert block.count("import os\n") + block.count("import os.path\n") == 1


def test_modules_imported_late_are_not_seeded_before_their_import():
    seeds = "import random\nimport numpy as np\n"
    late = convert(TRAINING + "def f():\n    import random\n" + seeds).after
    begun = late[: late.index("\nmodel = ")]
    assert "random.seed(int(seed))" not in begun
    early = convert(seeds + TRAINING).after
    assert "    random.seed(int(seed))\n    np.random.seed(int(seed))" in early


@pytest.mark.parametrize(
    "copied",
    ["copy.deepcopy(model)", "torch.optim.swa_utils.AveragedModel(model)"],
)
def test_a_copied_model_is_a_copy_of_the_module_inside(copied):
    begin, loop, rest = TRAINING.partition("for epoch")
    source = f"import copy\n{begin}ema = {copied}\n{loop}{rest}"
    after = convert(source).after
    assert after.index("model = DistributedDataParallel(model)") < after.index("ema =")
    assert f"ema = {copied.replace('(model)', '(unwrap(model))')}\n" in after


@pytest.mark.parametrize(
    ("loss", "asked"),
    [
        ("torch.nn.functional.cross_entropy(model(x), x, weight=w)", 1),
        ("torch.nn.functional.nll_loss(model(x), x, w)", 1),
        ("torch.nn.CrossEntropyLoss(w)(model(x), x)", 1),
        ("torch.nn.CrossEntropyLoss(weight=None)(model(x), x)", 0),
        ("torch.nn.functional.cross_entropy(model(x), x)", 0),
    ],
)
def test_a_mean_weighted_by_class_is_reported(loss, asked):
    conversion = convert(TRAINING.replace("model(x).mean()", loss))
    texts = [n.text for n in conversion.notes if n.kind is Kind.OPEN]
    assert sum("weighted by class" in t for t in texts) == asked


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ("scale = torch.nn.Parameter(torch.ones(1))", "[*model.parameters(), scale]"),
        (
            "scale = torch.ones(1).requires_grad_()",
            "list(model.parameters()) + [scale]",
        ),
        (
            (
                "scale = torch.ones(1, requires_grad=True)\n"
                "groups = [{'params': model.parameters()}, {'params': [scale]}]"
            ),
            "groups",
        ),
    ],
)
def test_tensors_trained_outside_every_module_are_refused(made, given):
    source = TRAINING.replace("opt =", f"{made}\nopt =").replace(
        "SGD(model.parameters()", f"SGD({given}"
    )
    message = refused(source)
    assert "the optimizer also trains `scale`" in message
    assert "--to horovod" in message
    assert "unwrap" not in convert(source, target=Target.HOROVOD).after


def test_an_added_group_and_an_optimizer_of_its_own_are_no_way_around():
    made = "scale = torch.nn.Parameter(torch.ones(1))\n"
    for more in (
        "opt.add_param_group({'params': [scale]})\n",
        "other = torch.optim.SGD([scale], lr=0.1)\n",
    ):
        source = TRAINING.replace("loader =", made + more + "loader =")
        assert "`scale`" in refused(source)


def test_tensors_of_one_batch_may_be_optimized_in_the_step():
    inner = (
        "        shift = torch.zeros_like(x).requires_grad_()\n"
        "        own = torch.optim.SGD([shift], lr=0.1)\n"
    )
    source = TRAINING.replace(
        "        opt.zero_grad()\n", inner + "        opt.zero_grad()\n"
    )
    assert "DistributedDataParallel(model)" in convert(source).after


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (
            "    if epoch: torch.save(model.state_dict(), 'm.pt')\n",
            "    if epoch:\n        if RANK == 0:\n            torch.save(",
        ),
        (
            "    # kept\n    last = epoch; torch.save(model, 'm.pt'); n = 1\n",
            "    # kept\n    last = epoch\n    if RANK == 0:\n        torch.save(",
        ),
    ],
)
def test_a_save_that_shares_its_line_is_rank_0s(line, kept):
    conversion = convert(TRAINING + line)
    assert kept in conversion.after
    assert "\n    n = 1\n" in conversion.after or "n = 1" not in line
    assert not [n for n in conversion.notes if "writes on every rank" in n.text]
    compile(conversion.after, "train.py", "exec")


@pytest.mark.parametrize(
    "metric",
    [
        "sum(model(x).sum().item() for (x,) in loader)",
        "[float(model(x).mean()) for i, (x,) in enumerate(loader)]",
        "max({k: x.max() for k, (x,) in enumerate(iter(loader))}.values())",
    ],
)
@pytest.mark.parametrize("in_step", [True, False])
def test_a_comprehension_over_a_divided_loader_is_whole_or_listed(metric, in_step):
    line = f"    print({metric})\n"
    shown = "    print(loss.item())\n"
    conversion = convert(TRAINING.replace(shown, "    " + line if in_step else line))
    asked = [n for n in conversion.notes if "differs by rank" in n.text]
    assert [n.line for n in asked if n.kind is Kind.OPEN] == ([13] if in_step else [])
    assert ("undivided(loader)" in conversion.after) is not in_step


def test_a_comprehension_over_a_whole_loader_needs_no_note():
    source = TRAINING + (
        "test = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
        "print(sum(model(x).sum().item() for (x,) in test))\n"
    )
    assert not [n for n in convert(source).notes if "differs by rank" in n.text]


def test_statements_that_share_a_line_are_split_where_something_is_inserted():
    source = TRAINING.replace(
        "lr=0.1)\nloader =", "lr=0.1); a = 1; b = 2  # two\nloader ="
    ).replace("\nopt =", "; opt =", 1)
    source = source.replace("DataLoader(TensorDataset(", "DataLoader(Data(")
    source = source.replace("a = 1;", "a = 1; y = 3;").replace("\nloader", "; loader")
    source = source.replace("# two", "")
    after = convert(source).after
    compile(after, "train.py", "exec")
    kept = (
        "model = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model = DistributedDataParallel(model)\n"
        "a = 1\ny = 3\nb = 2\n"
        "dataset = Data(torch.ones(8, 2))\n"
    )
    assert kept in after


@pytest.mark.parametrize(
    "line",
    [
        "a = 1; b = 2 ;c = 3  # kept\n",
        "if epoch: a = 1; b = 2  # kept\n",
        "class Done(Exception): pass\n",
        "try: a = 1\nexcept ValueError: pass\nelse: b = 2;\n",
    ],
)
def test_statements_that_share_a_line_stay_where_nothing_is_inserted(line):
    source = TRAINING.replace("model =", f"epoch = 0\n{line}model =")
    assert line in convert(source).after


def test_a_changed_expression_does_not_split_its_line():
    source = TRAINING + "    last = epoch; print(last)\n"
    assert "    last = epoch; print0(last)\n" in convert(source).after


@pytest.mark.parametrize(
    ("write", "read"),
    [
        ("with open('log', 'w') as f: json.dump(losses, f)", "json.load(open('log'))"),
        ("np.save('a.npy', x)", "np.load('a.npy')"),
        ("frame.to_csv(out + '/a')", "pd.read_csv(out + '/a')"),
        ("Path('a').write_text('x')", "open('a').read()"),
        ("json.dump(x, Path('a').open('w'))", "Path('a').read_text()"),
    ],
)
def test_ranks_read_a_file_after_rank_0_has_written_it(write, read):
    imports = (
        "import json\nfrom pathlib import Path\nimport numpy as np\n"
        "import pandas as pd\n"
    )
    source = imports + TRAINING
    after = convert(f"{source}{write}\nfound = {read}\n").after
    assert f"dist.barrier()\nfound = {read}\n" in after
    for earlier in (f"found = {read}\n{source}{write}\n", f"{source}{write}\n"):
        assert "dist.barrier()" not in convert(earlier).after
    guarded = convert(f"{source}{write}\nwith open('copy', 'w') as to: {read}\n")
    assert "dist.barrier()" not in guarded.after


def test_notes_name_the_scripts_line_also_after_lines_that_are_split():
    source = "import os; import sys\nif os: a = 1; b = 2\n" + TRAINING.replace(
        LOSS, "loss = (model(x) - 1).norm()"
    )
    notes = [n for n in convert(source).notes if "show that this loss" in n.text]
    assert [n.line for n in notes] == [11]
    broken = source.replace("(model(x) - 1)", "model.cost(x)")
    assert "train.py:6: " in refused(broken)


def test_a_one_line_function_is_a_place_to_insert():
    source = TRAINING.replace(
        "model =",
        "def build(): net = torch.nn.Linear(2, 1); return net\n\n\nmodel =",
        1,
    ) + ("def load(): return torch.load('m.pt')\n\n\ntorch.save(model, 'm.pt')\n")
    after = convert(source).after
    assert "def build(): net = torch.nn.Linear(2, 1); return net\n" in after
    assert "def load():\n    dist.barrier()\n    return torch.load(" in after


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ("dict(model=model.state_dict())", "dict(model=unwrap(model).state_dict())"),
        ("dict(model=model)", "dict(model=unwrap(model))"),
        ("pack(model=1, other=model)", "pack(model=1, other=unwrap(model))"),
    ],
)
def test_a_keyword_with_the_models_name_stays(saved, kept):
    after = convert(TRAINING + f"torch.save({saved}, 'all.pt')\n").after
    assert f"torch.save({kept}, 'all.pt')" in after


def test_a_converted_text_that_is_not_python_is_an_internal_error(monkeypatch):
    from stretto.convert import _script

    monkeypatch.setattr(_script, "_distributed", lambda *_: ("f(a(b)=1)\n", []))
    with pytest.raises(StrettoError, match=r"^train.py: internal error") as raised:
        convert(TRAINING)
    assert "\n" not in str(raised.value)
    assert "nothing is written" in str(raised.value)


FUNCTOR = """\
class Saver:
    def __call__(self, value, net):
        self.keep(net)

    def keep(self, net):
        torch.save(net.state_dict(), "best.pt")


saver = Saver()
"""


@pytest.mark.parametrize("call", ["saver(epoch, model)", "Saver()(epoch, model)"])
def test_the_parameters_of_an_object_that_is_called_are_followed(call):
    source = TRAINING.replace("model =", f"{FUNCTOR}model =", 1) + f"    {call}\n"
    assert "torch.save(unwrap(net).state_dict()" in convert(source).after


def test_objects_that_call_each_other_are_followed_without_end():
    source = TRAINING.replace(
        "model =",
        "class A:\n    def __call__(self, other): return other(self)\n"
        "class B:\n    def __call__(self, other): return other(self)\n"
        "a, b = A(), B()\na(b)\nb(a)\nmodel =",
        1,
    )
    assert "DistributedDataParallel(model)" in convert(source).after


@pytest.mark.parametrize("base", ["", "(DataLoader)"])
def test_a_loader_of_the_scripts_own_class_is_refused(base):
    source = TRAINING.replace(
        "model =",
        f"class Moved{base}:\n"
        "    def __init__(self, dl): self.dl = dl\n"
        "    def __iter__(self):\n        yield from self.dl\n\n\nmodel =",
        1,
    ).replace("loader = DataLoader(", "loader = Moved(DataLoader(")
    message = refused(source.replace("shuffle=True)", "shuffle=True))"))
    assert "train.py:12: training takes its batches from a `Moved`" in message
    assert "Loop over the DataLoader itself" in message


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_is_written_to_a_stream_is_rank_0s(stream):
    source = f"import sys\n{TRAINING}" + f"    sys.{stream}.write(f'{{loss.item()}}')\n"
    after = convert(source).after
    assert (
        f"(sys.{stream} if RANK == 0 else OnRank0()).write("
        "f'{mean_over_ranks(loss.item())}')"
    ) in after
    assert after.count("class OnRank0") == 1


FOCAL = """\
class Focal(torch.nn.Module):
    def __init__(self, gamma=2, size_average=True, reduction="mean"):
        super().__init__()
        self.size_average = size_average
        self.reduction = reduction

    def forward(self, given):
        loss = given ** 2
        BRANCHES


"""
BY_RETURN = """\
if self.size_average:
            return loss.mean()
        else:
            return loss.sum()"""
BY_EARLY_RETURN = """\
if not self.size_average:
            return loss.sum()
        return loss.mean()"""
BY_NAME = """\
if self.reduction == "mean":
            loss = loss.mean()
        elif self.reduction == "sum":
            loss = loss.sum()
        return loss"""
BY_VALUE = "return loss.mean() if self.size_average else loss.sum()"


@pytest.mark.parametrize(
    ("branches", "given", "kind"),
    [
        (BY_RETURN, "", "mean"),
        (BY_RETURN, "size_average=False", "sum"),
        (BY_RETURN, "2, False", "sum"),
        (BY_RETURN, "size_average=flag", "listed"),
        (BY_EARLY_RETURN, "", "mean"),
        (BY_EARLY_RETURN, "2, False", "sum"),
        (BY_EARLY_RETURN, "**options", "listed"),
        (BY_NAME, "", "mean"),
        (BY_NAME, "reduction='sum'", "sum"),
        (BY_NAME, "reduction=flag", "listed"),
        (BY_VALUE, "", "mean"),
        (BY_VALUE, "2, False", "sum"),
        (BY_VALUE, "2, flag", "listed"),
    ],
)
def test_a_loss_whose_constructor_chooses_mean_or_sum(branches, given, kind):
    source = TRAINING.replace(
        "model =",
        FOCAL.replace("BRANCHES", branches) + f"focal = Focal({given})\nmodel =",
        1,
    ).replace(LOSS, "loss = focal(model(x))")
    conversion = convert(source)
    asked = [n for n in conversion.notes if "show that this loss" in n.text]
    assert bool(asked) is (kind == "listed")
    assert ("(loss * WORLD_SIZE).backward()" in conversion.after) is (kind == "sum")


@pytest.mark.parametrize(
    "returned",
    [
        "1 - (2 * (p * p).sum() + 1) / (p.sum() + p.sum() + 1)",
        "(1 - (2 * p.sum() + 1) / (p.sum() + 1)).mean()",
        "(p.sum((0, 2)) / p.sum((0, 2))).mean()",
        "torch.sqrt(p.mean())",
        "torch.log(p.mean(0)).sum()",
        "((p - p.mean()) ** 2).sum()",
    ],
)
def test_a_loss_class_that_returns_no_mean_is_listed(returned):
    source = TRAINING.replace(
        "model =",
        "class Dice(torch.nn.Module):\n    def forward(self, p):\n"
        f"        return {returned}\n\n\nmodel =",
        1,
    ).replace(LOSS, "loss = Dice()(model(x))")
    conversion = convert(source)
    asked = [n.text for n in conversion.notes if n.kind is Kind.OPEN]
    assert any("show that this loss" in t or "combines the" in t for t in asked), asked


@pytest.mark.parametrize(
    "loss",
    [
        "out = model(x)\n        loss = -(out[:, :2].softmax(1).log()).sum(1).mean()",
        "loss = model(x).mean(0).mean()",
    ],
)
def test_a_mean_of_a_models_output_is_not_listed(loss):
    conversion = convert(TRAINING.replace(LOSS, loss))
    assert not [n for n in conversion.notes if "show that this loss" in n.text]
    assert "WORLD_SIZE).backward()" not in conversion.after


# Values of each rank's own samples


def opened(source):
    return open_notes(convert(source))


def step(lines, before="", after=""):
    """A script with more lines before the epochs, in the step and after an epoch."""
    inner = "".join(f"        {x}\n" for x in lines.splitlines())
    outer = "".join(f"    {x}\n" for x in after.splitlines())
    source = TRAINING.replace("model =", f"{before}model =", 1)
    return (
        source.replace("        opt.step()\n", f"        opt.step()\n{inner}") + outer
    )


METER = """\
class Meter:
    sum = count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n


def accuracy(out):
    return [(out > 0).double().mean(0)]


def hits(out):
    return (out > 0).sum()


meter = Meter()
"""


@pytest.mark.parametrize(
    ("lines", "before", "after", "words"),
    [
        ("acc, = accuracy(model(x))\nmeter.update(acc[0], 2)", METER, "", "acc[0]"),
        ("kept.extend(model(x).tolist())", "kept = []\n", "", "`kept` collects"),
        ("kept.append(model(x).detach())", "kept = []\n", "", "`kept` collects"),
        (
            "for a in x.long():\n    conf[a] += 1",
            "conf = torch.zeros(9)\n",
            "",
            "`conf` collects",
        ),
        ("sums['x'] += model(x)", "sums = {'x': 0}\n", "", "`sums` collects"),
        (
            "count(x)",
            "seen = 0\ndef count(x):\n    global seen\n    seen += len(x)\n",
            "print(seen)",
            "`seen` in `print",
        ),
        (
            "report(a=loss)",
            (
                "def report(**kw):\n"
                "    print(', '.join(f'{float(v)}' for v in kw.values()))\n"
            ),
            "",
            "`float(v)` in `print",
        ),
        ("", "", "print(loss)", "`loss` in `print"),
        ("", "", "print(x.shape[0], epoch)", "`x.shape[0]` in `print"),
        ("", "", "print(loss.detach().numpy())", "`loss.detach().numpy()` in"),
        ("", "", "print(v := x.max())", "in `print"),
        ("pass", "import json\n", "json.dump(x.tolist(), f)", "`x.tolist()` in"),
        ("pass", "", "torch.save({'x': x}, 'x.pt')", "`x` in `torch.save"),
        ("holder.loss = model(x)", "holder = Holder()\n", "show(holder)\n", None),
        ("foreign.keep(model(x))", "import foreign\n", "", "`model(x)` in `foreign"),
        (
            "pass",
            (
                "def estimate():\n"
                "    out = {}\n"
                "    for name, d in (('train', loader), ('val', None)):\n"
                "        it = iter(d)\n"
                "        x, = next(it)\n"
                "        out[name] = model(x).mean().item()\n"
                "    return out\n"
            ),
            "print(estimate())",
            "`estimate()` in `print",
        ),
    ],
)
def test_a_value_of_a_ranks_samples_is_listed_where_it_leaves_the_step(
    lines, before, after, words
):
    if words is None:
        before = "class Holder: pass\ndef show(h):\n    print(h.loss)\n" + before
        words = "`h.loss` in `print"
        before = before.replace("class Holder: pass", HOLDER)
        lines = "holder.set(model(x))"
        words = "in `holder.set"
    asked = opened(step(lines, before, after))
    assert len(asked) == 1, asked
    assert words in asked[0]


HOLDER = """\
class Holder:
    def set(self, loss):
        self.loss = loss


"""


def test_an_attribute_that_a_callback_prints_is_listed():
    source = (
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\n"
        "class Trainer:\n"
        "    def __init__(self, net, opt, data):\n"
        "        self.net, self.opt, self.data = net, opt, data\n"
        "        self.callbacks = []\n\n"
        "    def run(self):\n"
        "        for (x,) in self.data:\n"
        "            self.loss = self.net(x).mean()\n"
        "            self.opt.zero_grad()\n"
        "            self.loss.backward()\n"
        "            self.opt.step()\n"
        "            for callback in self.callbacks:\n"
        "                callback(self)\n\n\n"
        "def show(trainer):\n"
        "    print(trainer.loss.item())\n\n\n"
        "net = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
        "trainer = Trainer(net, opt, data)\n"
        "trainer.callbacks.append(show)\n"
        "trainer.run()\n"
    )
    asked = opened(source)
    assert len(asked) == 1, asked
    assert asked[0].startswith("line 21: `trainer.loss.item()` in `print")


@pytest.mark.parametrize(
    ("lines", "before", "after"),
    [
        ("kept.append(loss.item())", "kept = []\n", "print(kept)"),
        ("kept = []\nkept.append(model(x))", "", ""),
        ("total += loss.item()", "total = 0\n", "print(total / len(loader))"),
        ("meter.update(loss.item(), x.size(0))", METER, "print(meter.sum)"),
        ("print(x.shape[1], x.dtype, x is None)", "", ""),
        ("step = epoch", "", "print(step, len(loader), opt.param_groups)"),
        ("pass", "", "torch.save(model.state_dict(), 'm.pt')"),
        ("loss = loss.item()", "", "print(loss)"),
        (
            "pass",
            "",
            "with torch.no_grad():\n    print(model(torch.ones(2, 2)).max())",
        ),
        ("pass", "", "print(sum(x for x in [1, 2]))"),
    ],
)
def test_what_is_equal_on_all_ranks_is_not_listed(lines, before, after):
    assert opened(step(lines, before, after)) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = x - x.mean(0)",
        "x = (x - 1) / x.std(0)",
        "x = x / torch.std(x, dim=0)",
        "x = x / x.std()",
        "x = x + x.flip(0)",
        "x = x + torch.roll(x, 1, 0)",
    ],
)
def test_statistics_of_a_batch_in_a_step_are_listed(line):
    asked = opened(TRAINING.replace(LOSS, f"{line}\n        {LOSS}"))
    assert len(asked) == 1, asked
    assert "combines the samples of a batch" in asked[0]


@pytest.mark.parametrize(
    "line",
    ["x = x - x.mean(1, keepdim=True)", "x = x.flip(1)", "part = x.sum(1).mean(0)"],
)
def test_statistics_of_each_sample_are_not_listed(line):
    assert opened(TRAINING.replace(LOSS, f"{line}\n        {LOSS}")) == []


def test_a_buffer_computed_from_the_batch_is_listed():
    source = TRAINING.replace(
        "model = torch.nn.Linear(2, 1)",
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.line = torch.nn.Linear(2, 1)\n"
        "        self.register_buffer('seen', torch.zeros(2))\n\n"
        "    def forward(self, x):\n"
        "        self.seen = self.seen + x.sum(0)\n"
        "        return self.line(x)\n\n\n"
        "model = Net()",
    )
    asked = opened(source)
    assert len(asked) == 1, asked
    assert asked[0].startswith("line 11: the buffer `self.seen`")


@pytest.mark.parametrize(
    "count", ["x.numel()", "len(x)", "x.size(0)", "x.shape[0]", "n"]
)
def test_counts_given_beside_reduced_numbers_are_summed(count):
    source = step(f"n = len(x)\nmeter.update(loss.item(), {count})", METER)
    assert f"update(mean_over_ranks(loss.item()), sum_over_ranks({count}))" in (
        convert(source).after
    )


def test_results_of_functions_given_beside_reduced_numbers_are_reduced():
    source = step("meter.update(loss.item(), hits(model(x)))", METER)
    assert "sum_over_ranks(hits(model(x))))" in convert(source).after


def test_other_dimensions_are_no_counts():
    source = step("meter.update(loss.item(), x.size(1))", METER)
    assert "update(mean_over_ranks(loss.item()), x.size(1))" in convert(source).after


def test_the_sum_of_a_mean_over_samples_is_averaged():
    after = convert(step("print(x.mean(0).sum().item())")).after
    assert "mean_over_ranks(x.mean(0).sum().item())" in after


EVALUATED = """\
def check(data):
    n = 0
    with torch.no_grad():
        for (x,) in data:
            n += x.size(0)
    print(n)


"""


def test_a_loop_over_divided_and_whole_loaders_gets_all_samples():
    source = step("pass", EVALUATED, "check(loader)")
    assert "for (x,) in share_of(undivided(data)):" in convert(source).after
    whole = "test = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
    both = source.replace("for epoch", f"{whole}for epoch") + "check(test)\n"
    assert opened(both) == []
    assert "for (x,) in undivided(data):" in convert(both).after


@pytest.mark.parametrize(
    ("layer", "listed"),
    [
        ("torch.nn.Linear(2, 1)", False),
        ("torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Tanh())", False),
        ("torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Tanh())", True),
        ("zoo.make(2, 1)", True),
    ],
)
def test_only_buffers_that_a_model_may_have_are_listed(layer, listed):
    source = TRAINING.replace("model(x).mean()", "(model(x) + model(-x)).mean()")
    source = "import zoo\n" + source.replace("torch.nn.Linear(2, 1)", layer)
    notes = [n for n in convert(source).notes if "so its buffers are not" in n.text]
    assert bool(notes) is listed


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("tqdm.write('end')", "(tqdm if RANK == 0 else OnRank0()).write('end')"),
        ("bar.write('end')", "(bar if RANK == 0 else OnRank0()).write('end')"),
    ],
)
def test_only_rank_0_prints_past_a_bar(line, after):
    source = "from tqdm import tqdm\n" + TRAINING.replace(
        "    for (x,) in loader:", "    bar = tqdm(loader)\n    for (x,) in bar:"
    )
    conversion = convert(source + f"    {line}\n")
    assert f"\n    {after}\n" in conversion.after
    assert "only rank 0 writes to " in conversion.listed()


@pytest.mark.parametrize(
    ("line", "after"),
    [
        (
            "progress_bar(epoch, loss.item())",
            "(progress_bar, OnRank0())[RANK > 0](epoch, mean_over_ranks(loss.item()))",
        ),
        ("pprint.pprint(epoch)", "(pprint.pprint, OnRank0())[RANK > 0](epoch)"),
        ("log = CSVLogger('a')", "log = CSVLogger('a') if RANK == 0 else OnRank0()"),
        ("log = Logger('a').name", "log = Logger('a').name"),
        ("net = ProgressiveGAN()", "net = ProgressiveGAN()"),
        ("net.progress()", "net.progress()"),
        ("log = csv.DictWriter(f, [])", "log = csv.DictWriter(f, [])"),
        ("own_progress()", "own_progress()"),
        ("a = progress_bar(epoch)", "a = progress_bar(epoch)"),
    ],
)
def test_only_rank_0_shows_and_writes_through_another_file(line, after):
    source = (
        "import csv, pprint\nfrom other import progress_bar, CSVLogger, Logger\n"
        "def own_progress():\n    print(1)\n" + TRAINING + f"    {line}\n"
    )
    converted = convert(source).after
    assert f"\n    {after}\n" in converted
    compile(converted, "train.py", "exec")


def test_another_files_logger_whose_values_are_used_is_listed():
    source = "from other import Logger\n" + TRAINING
    notes = open_notes(convert(source + "log = Logger('a')\nif log.best:\n    pass\n"))
    assert len(notes) == 1
    assert "`Logger('a')` of another file may write or print on every rank" in notes[0]
