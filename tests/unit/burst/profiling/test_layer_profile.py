"""Layer profiles of real modules, and what is measured in training put into them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.profiling.factory import made_by
from stretto.burst.profiling.layer_profile import _names_joined, profile
from stretto.burst.profiling.layer_rounds import LayerRounds
from stretto.cli.burst import command
from stretto.cost.burst_times import updated
from stretto.errors import NoisyProfile, PlanMismatch, SpecError
from stretto.schema.burst import LayerProfile, LayerTiming
from stretto.testing.models import VGG, WideResNet
from support.burst_graphs import chain_of, random_profile

CALM = {"max_spread_ratio": 1e9, "repetitions": 2, "warmup": 1}


def vgg():
    return VGG(11, width=4, dense=64, image=16, classes=5)


@pytest.fixture(scope="module")
def profiled():
    """A model, its inputs and its profile, and what profiling has changed."""
    torch.manual_seed(0)
    model = vgg()
    model.features[0].weight.grad = torch.ones_like(model.features[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = (torch.randn(3, 3, 16, 16),)
    state = torch.random.get_rng_state()
    found = profile(
        model,
        inputs,
        batch=10,
        gpus=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        loss=lambda out: out.square().mean(),
        min_layer_s=0.0,
        **CALM,
    )
    changed = [
        n for n, v in model.state_dict().items() if not torch.equal(v, before[n])
    ]
    if not torch.equal(torch.random.get_rng_state(), state):
        changed.append("the generator")
    return model, inputs, found, changed


def test_a_profile_leaves_the_model_and_the_generator_alone(profiled):
    model, _, _, changed = profiled
    assert changed == []
    assert torch.equal(model.features[0].weight.grad, torch.ones(4, 3, 3, 3))
    assert model.features[3].weight.grad is None


def test_a_profile_has_the_samples_of_every_width(profiled):
    _, _, found, _ = profiled
    assert [time.samples for time in found.whole] == [3, 5, 10]
    for layer in found.layers:
        assert [time.samples for time in layer.times] == [3, 5, 10]
        assert all(t.forward_s > 0 and t.backward_s > 0 for t in layer.times)
        assert layer.update_s > 0


def test_a_profile_is_of_the_captured_layers(profiled):
    model, inputs, found, _ = profiled
    assert found.digest == capture(model, inputs).digest
    assert found.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert found.input_bytes == 4 * 3 * 16 * 16


def test_the_layers_times_add_up_to_the_whole_step_s(profiled):
    """By measurement, or by scaling that the profile names."""
    _, _, found, _ = profiled
    assert 0 <= found.outside_s < 1.0
    for at, whole in enumerate(found.whole):
        times = [layer.times[at] for layer in found.layers]
        total = sum(t.forward_s + t.backward_s for t in times)
        step_s = whole.forward_s + whole.backward_s
        assert total == pytest.approx(step_s, rel=0.11)
        over = found.provenance["layers_over_whole"][str(whole.samples)]
        is_scaled = str(whole.samples) in found.provenance["scaled_by"]
        assert is_scaled == (abs(over - 1) > 0.1)


def test_samples_beyond_the_examples_are_like_them_and_each_another():
    # Else a processor that knows two images foresees every branch of pooling 64.
    model, seen = vgg(), {}
    model.register_forward_pre_hook(
        lambda _, inputs: seen.update({len(inputs[0]): inputs[0].clone()})
    )
    x = torch.randn(2, 3, 16, 16)
    profile(model, (x,), batch=8, gpus=2, **CALM)
    assert set(seen) == {4, 5, 8}  # 5 for what ranks compare (`tracing.behavior`)
    rows = seen[8]
    assert torch.equal(rows[:2], x)
    assert len({row.numpy().tobytes() for row in rows}) == 8
    for i, row in enumerate(rows):
        assert torch.equal(row.flatten().sort()[0], x[i % 2].flatten().sort()[0])


def test_short_layers_are_joined_along_chains_alone():
    model = WideResNet(width=2, blocks=(1, 1), classes=3)
    x = torch.randn(2, 3, 32, 32)
    graph = capture(model, (x,))
    names = _names_joined(graph, {node.name: 1.0 for node in graph.nodes}, 0.5)
    assert names == [node.name for node in graph.nodes]
    names = _names_joined(graph, {node.name: 1.0 for node in graph.nodes}, 99.0)
    small = graph.joined(names)
    assert [node.name for node in small.nodes] == names
    # what is left parts and joins: no two layers in a row with one way between them
    for node in small.nodes:
        for name in node.inputs:
            readers = [n for n in small.nodes if name in n.inputs]
            assert len(node.inputs) > 1 or len(readers) > 1 or name == "input"
    found = profile(model, (x,), batch=2, gpus=1, min_layer_s=99.0, **CALM)
    assert [layer.name for layer in found.layers] == names
    assert found.digest == small.digest


def test_rounds_that_a_busy_machine_disturbed_are_left_out():
    quiet, busy = [1.0, 1.01, 1.02, 1.0], [1.6, 2.4, 3.1, 5.0]
    totals = [busy[0], quiet[0], busy[1], *quiet[1:3], busy[2], busy[3], quiet[3]]
    rounds = LayerRounds(None, None, torch.mean)
    rounds.wholes[4] = [(total / 4, total * 3 / 4) for total in totals]
    rounds.layers["layer", 4] = [(total, 0.0) for total in totals]
    assert rounds.spread_ratio(4) > 0.35
    found = rounds.closest(4)
    assert found.layers["layer", 4] == [(total, 0.0) for total in quiet]
    assert found.whole_s(4) == pytest.approx((1.005 / 4, 1.005 * 3 / 4))
    assert found.spread_ratio(4) < 0.03
    assert len(rounds.wholes[4]) == 8


def test_a_busy_machine_makes_profile_repeat(monkeypatch):
    """The first rounds differ as on a busy machine; then it is quiet."""
    real, runs = LayerRounds.run, []

    def disturbed(self, count, rows, *, keep):
        real(self, count, rows, keep=keep)
        if keep and self.whole is not None:
            runs.append(count)
            factor = 0.5 + len(runs) if len(runs) <= 4 else 1e-3
            self.wholes[count][-1] = (factor, factor)

    monkeypatch.setattr(LayerRounds, "run", disturbed)
    found = profile(vgg(), (torch.randn(2, 3, 16, 16),), batch=2, gpus=1, warmup=0,
                    repetitions=4, max_spread_ratio=0.1)  # fmt: skip
    assert len(runs) == 8
    assert found.whole[0].forward_s == 1e-3


def test_rounds_that_differ_too_much_are_refused():
    with pytest.raises(NoisyProfile, match="stop other programs"):
        profile(vgg(), (torch.randn(2, 3, 16, 16),), batch=2, gpus=1, warmup=0,
                repetitions=3, max_spread_ratio=0.0)  # fmt: skip
    with pytest.raises(SpecError, match="repetitions must be >= 2"):
        profile(vgg(), (torch.randn(2, 3, 16, 16),), batch=2, gpus=1, repetitions=1)


# measured in training


@pytest.fixture
def chain():
    return random_profile(random.Random(0), chain_of(3), 8)


def timing(layer, samples, forward_s, backward_s):
    return LayerTiming(
        layer=layer, samples=samples, forward_s=forward_s, backward_s=backward_s
    )


def test_measured_times_replace_the_profiles_and_scale_what_lies_around(chain):
    had = {t.samples: t for t in chain.layers[1].times}
    found = updated(
        chain,
        [
            timing("l1", 2, 2 * had[2].forward_s, 3 * had[2].backward_s),
            timing("l1", 8, 4 * had[8].forward_s, 3 * had[8].backward_s),
            timing("l1", 8, 4 * had[8].forward_s, 3 * had[8].backward_s),
            timing("l1", 8, 99.0, 99.0),  # the median leaves it out
        ],
    )
    assert found.layers[0] == chain.layers[0]
    assert found.digest == chain.digest
    new = {t.samples: t for t in found.layers[1].times}
    assert new[2].forward_s == pytest.approx(2 * had[2].forward_s)
    assert new[8].forward_s == pytest.approx(4 * had[8].forward_s)
    assert new[1].forward_s == pytest.approx(2 * had[1].forward_s)
    assert new[4].forward_s == pytest.approx(3 * had[4].forward_s)  # half of the way
    for samples, time in new.items():
        assert time.backward_s == pytest.approx(3 * had[samples].backward_s)
    assert updated(found, []).layers == found.layers


def test_a_new_number_of_samples_is_added(chain):
    some = replace(chain.layers[0], times=chain.layers[0].times[::7])
    small = replace(chain, layers=(some, *chain.layers[1:]))
    at = small.layers[0].time_of(3)
    found = updated(small, [timing("l0", 3, at[0], at[1])])
    assert [t.samples for t in found.layers[0].times] == [1, 3, 8]
    assert found.layers[0].time_of(8) == small.layers[0].time_of(8)


def test_times_of_another_model_are_refused(chain):
    with pytest.raises(PlanMismatch, match="'other', which is missing from 'random'"):
        updated(chain, [timing("other", 1, 1.0, 1.0)])


# from the command line

FACTORY = """
import torch
from torch import nn
def make():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, (torch.randn(2, 8),), lambda out: out.sum()
def odd():
    return 3
def three():
    return 1, (2,)
def needs(width):
    return make()
def text_for_loss():
    return *make()[:2], "loss"
def made_optimizer():
    model, inputs, loss = make()
    return model, inputs, loss, torch.optim.SGD(model.parameters(), lr=0.1)
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, 4)
    def forward(self, *, x):
        y = self.one(x)
        return {"logits": self.two(y.tanh()), "word": x.argmax(1)}
def named():
    return Named(), {"x": torch.randn(2, 8)}
"""


def test_the_command_profiles_what_a_function_makes(tmp_path):
    (tmp_path / "train_me.py").write_text(FACTORY)
    out = tmp_path / "p.json"
    args = [f"{tmp_path}/train_me.py:make", "-o", str(out), "--gpus", "2", "--batch"]
    done = CliRunner().invoke(
        command, ["profile", *args, "8", "--rounds", "2", "--max-spread", "1e9"]
    )
    assert done.exit_code == 0, done.output
    assert "2 samples" not in done.output
    found = LayerProfile.load(out)
    assert [time.samples for time in found.whole] == [4, 8]
    planned = CliRunner().invoke(
        command, ["plan", str(out), "--gpus", "2", "--batch", "8"]
    )
    assert planned.exit_code == 0, planned.output
    assert "idle GPU time" in planned.output
    assert "the best single width" in planned.output


def test_the_command_takes_keyword_arguments_and_outputs_of_several_tensors(tmp_path):
    (tmp_path / "train_me.py").write_text(FACTORY)
    out = tmp_path / "p.json"
    args = [f"{tmp_path}/train_me.py:named", "-o", str(out), "--gpus", "2", "--batch"]
    done = CliRunner().invoke(
        command, ["profile", *args, "4", "--rounds", "2", "--max-spread", "1e9"]
    )
    assert done.exit_code == 0, done.output
    assert LayerProfile.load(out).whole[0].backward_s > 0


def test_a_model_that_gives_no_floats_needs_a_loss():
    class Index(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 3)

        def forward(self, x):
            return self.one(x).argmax(1)

    with pytest.raises(SpecError, match="pass a loss that takes its output"):
        profile(Index(), (torch.randn(2, 4),), batch=2, gpus=1, **CALM)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("made", "FACTORY must be PATH.py:FUNCTION"),
        ("nowhere.py:make", "no such file"),
        ("no_such_module_here:make", "there is no module"),
        ("{}:missing", "has no function 'missing'"),
        ("{}:odd", r"must return \(model, example_inputs\).*returned int"),
        ("{}:three", "must return a torch.nn.Module"),
        ("{}:needs", "called without arguments, but its function needs some"),
        ("{}:text_for_loss", "must return as loss a function.*returned str"),
        ("{}:made_optimizer", "must return as optimizer a function.*returned SGD"),
    ],
)
def test_what_makes_no_model_is_refused(tmp_path, name, message):
    (tmp_path / "train_me.py").write_text(FACTORY)
    with pytest.raises(SpecError, match=message):
        made_by(name.format(tmp_path / "train_me.py"))


def test_example_inputs_may_be_any_mapping(tmp_path):
    (tmp_path / "train_me.py").write_text(
        "import collections, torch\n"
        "def make():\n"
        "    inputs = collections.UserDict(input=torch.zeros(2, 3))\n"
        "    return torch.nn.Linear(3, 4), inputs\n"
    )
    _, (args, kwargs), *_ = made_by(f"{tmp_path}/train_me.py:make")
    assert args == ()
    assert list(kwargs) == ["input"]


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        (torch.zeros(2, 4), {}, r"must be a tuple .*got Tensor: pass \(x,\)"),
        (3, {}, "must be a tuple .*got int"),
        ((), {"kwargs": 3}, "keyword arguments of forward must be a dictionary"),
        (None, {"loss": lambda out: out}, r"must be one number.*shape \(2, 4\)"),
        (None, {"loss": lambda out: out.detach().sum()}, "without a gradient"),
        (None, {"loss": lambda out: 3.0}, "must be one number.*got float"),
        (None, {"optimizer": lambda p: "x"}, "must return an optimizer.*got str"),
    ],
)
def test_arguments_of_another_kind_are_refused(given, more, message):
    model = nn.Sequential(nn.Linear(4, 4))
    inputs = (torch.randn(2, 4),) if given is None else given
    with pytest.raises(SpecError, match=message):
        profile(model, inputs, batch=2, gpus=1, **more, **CALM)


def test_a_missing_model_or_one_with_nothing_to_train_is_refused():
    inputs = (torch.randn(2, 4),)
    with pytest.raises(SpecError, match="Module, got None"):
        profile(None, inputs, batch=2, gpus=1, **CALM)
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(SpecError, match="Linear has no parameter to train"):
        profile(model, inputs, batch=2, gpus=1, **CALM)


def test_an_input_of_another_width_is_refused_without_a_log(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(SpecError, match="same reduction dim"):
        capture(model, (torch.randn(2, 5),))
    assert not caplog.records


def test_a_layer_that_needs_no_gradient_is_timed_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    found = profile(
        model, (torch.randn(2, 4),), batch=2, gpus=1, min_layer_s=0.0, **CALM
    )
    assert len(found.layers) == 2


def test_example_inputs_without_rows_are_one_sentence():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(SpecError, match="have no sample: pass at least one row"):
        profile(model, (torch.zeros(0, 6),), batch=4, gpus=2, **CALM)
