"""Models as layers: what they compute together, and what is refused."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing import proof
from stretto.burst.tracing.layers import INPUT
from stretto.errors import PlanMismatch, SpecError
from stretto.schema.burst import BatchTime, Layer, LayerProfile
from stretto.testing.models import VGG, InceptionV3, Transformer, WideResNet

MODELS = {
    "vgg11": (lambda: VGG(11, width=4, dense=16, image=16, classes=5), (3, 16, 16)),
    "vgg16": (lambda: VGG(16, width=4, dense=16, image=32, classes=5), (3, 32, 32)),
    "wrn": (lambda: WideResNet(width=2, classes=5), (3, 32, 32)),
    "inception": (lambda: InceptionV3(width=0.05, classes=5), (3, 75, 75)),
    "transformer": (lambda: Transformer(width=16, heads=2, context=8), None),
}


def example(shape, batch=3):
    generator = torch.Generator().manual_seed(batch)
    if shape is None:
        return torch.randint(0, 256, (batch, 8), generator=generator)
    return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)


def run(graph, x):
    values = {INPUT: x}
    for node in graph.nodes:
        values[node.name] = node.module(*[values[name] for name in node.inputs])
        assert values[node.name].shape == (len(x), *node.output_shape)
        assert values[node.name].dtype == node.output_dtype
    return values[graph.output]


def assert_same_step(model, graph, x):
    """Outputs, gradients and running statistics of the layers are the model's."""
    twin = copy.deepcopy(model)
    names = [name for node in graph.nodes for name in node.parameter_names]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    torch.manual_seed(1)
    whole = twin(x)
    whole.square().sum().backward()
    torch.manual_seed(1)
    parts = run(graph, x)
    parts.square().sum().backward()
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    twins = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, twins[name].grad, rtol=1e-9, atol=0)
    twins = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, twins[name], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_layers_one_after_another_are_the_model(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    graph = capture(model, (example(shape),))
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    assert_same_step(model, graph, example(shape, 3))
    model.zero_grad()
    for node in graph.nodes:
        node.module.eval()
    model.eval()
    with torch.no_grad():
        x = example(shape, 5)  # another batch than the example's
        assert torch.equal(run(graph, x), model(x))


def test_the_models_have_their_papers_parameters():
    with torch.device("meta"):
        made = [VGG(11), VGG(16), WideResNet(), InceptionV3()]
    counts = [sum(p.numel() for p in model.parameters()) for model in made]
    assert counts == [132_863_336, 138_357_544, 126_886_696, 23_834_568]


def test_layers_are_those_that_multiply_and_joins():
    vgg = capture(MODELS["vgg16"][0]().double(), (example((3, 32, 32)),))
    assert len(vgg.nodes) == 16
    assert all(len(node.inputs) == 1 for node in vgg.nodes)
    assert [node.has_dropout for node in vgg.nodes[-3:]] == [True, True, False]
    inception = capture(MODELS["inception"][0]().double(), (example((3, 75, 75)),))
    assert max(len(node.inputs) for node in inception.nodes) == 4
    assert inception.by_name["stem.0.0"].num_batch_norms == 1
    assert not any(node.has_batch_norm for node in vgg.nodes)
    # attention keeps its heads together: no tensor between has a row for each sample
    transformer = capture(MODELS["transformer"][0]().double(), (example(None),))
    assert "blocks.0.qkv" in transformer.by_name
    assert all(node.output_shape for node in transformer.nodes)


def test_a_graphs_digest_is_its_profiles():
    graph = capture(MODELS["wrn"][0]().double(), (example((3, 32, 32)),))
    times = (BatchTime(samples=1, forward_s=1.0, backward_s=1.0),)
    profile = LayerProfile(
        name="wrn",
        device="none",
        layers=tuple(
            Layer(
                name=node.name,
                inputs=tuple(name for name in node.inputs if name != INPUT),
                parameter_bytes=node.parameter_bytes,
                activation_bytes=node.activation_bytes,
                times=times,
            )
            for node in graph.nodes
        ),
    )
    assert profile.digest == graph.digest


def test_joined_layers_are_the_model_too():
    torch.manual_seed(0)
    make, shape = MODELS["vgg11"]
    model = make().double()
    graph = capture(model, (example(shape),))
    names = [node.name for node in graph.nodes]
    wanted = ["+".join(names[:3]), *names[3:6], "+".join(names[6:])]
    small = graph.joined(wanted)
    assert [node.name for node in small.nodes] == wanted
    assert graph.joined(names) is graph
    assert_same_step(model, small, example(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[1:], "'features.0' is missing"),
        (lambda names: ["other", *names], "'other' is not in it"),
        (lambda names: [*names, names[0]], "missing or duplicate"),
    ],
)
def test_names_of_another_model_are_refused(change, message):
    graph = capture(MODELS["vgg11"][0]().double(), (example((3, 16, 16)),))
    with pytest.raises(PlanMismatch, match=message):
        graph.joined(change([node.name for node in graph.nodes]))


def test_layers_apart_can_not_be_joined():
    graph = capture(MODELS["wrn"][0]().double(), (example((3, 32, 32)),))
    names = [node.name for node in graph.nodes]
    apart = ["+".join((names[0], names[5])), *names[1:5], *names[6:]]
    with pytest.raises(SpecError, match=r"would (give 2 tensors|have to wait)"):
        graph.joined(apart)


class Shapes(nn.Module):
    """Sizes from the input, a mask, fixed parameters, two readers of the input."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 1]))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x, gain=None, *, twice=True):
        batch, length, _ = x.shape
        left = self.one(x).view(batch * length, -1) * self.mask
        left = left.reshape(batch, length, 6) * self.scale
        right = self.two(x)
        right += left
        right = nn.functional.dropout(self.act(right), 0.5, training=self.training)
        if gain is not None:
            right = right * gain
        if twice:
            right = right * 2
        where = torch.arange(length, device=x.device).to(right.dtype)
        return right + where[:, None]


def test_sizes_masks_and_keywords_are_followed():
    torch.manual_seed(0)
    model = Shapes().double()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    graph = capture(model, (x,), {"twice": False})
    assert graph.nodes[0].inputs == (INPUT,)
    assert sum(INPUT in node.inputs for node in graph.nodes) == 1
    assert any(node.has_dropout for node in graph.nodes)
    assert "mask" in {name for node in graph.nodes for name in node.buffer_names}
    for node in graph.nodes:
        node.module.eval()
    model.eval()
    with torch.no_grad():
        for batch in (4, 3, 1):
            y = torch.randn(batch, 5, 6, dtype=torch.float64)
            assert torch.equal(run(graph, y), model(y, twice=False))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:  # BREAKS
            return self.layer(x)
        return x


class Counting(Branching):
    def forward(self, x):
        x = self.layer(x)
        return x[x[:, 0] > 0]  # BREAKS


class Mixing(Branching):
    def forward(self, x):
        x = self.layer(x)
        return x - x.mean(0)  # BREAKS


class Aliasing(Branching):
    def forward(self, x):
        x = self.layer(x)
        part = x[:, 1:]
        x.data[:, 0] = 0  # BREAKS
        return x * part.sum(1, keepdim=True)


class Counter(Branching):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.layer(x) * self.calls  # BREAKS


class Swapping(Branching):
    def forward(self, x):
        return self.layer(x).transpose(0, 1)  # BREAKS


@pytest.mark.parametrize(
    "kind", [Branching, Counting, Mixing, Aliasing, Counter, Swapping]
)
def test_what_can_not_be_captured_is_refused_with_its_line(kind):
    lines, start = inspect.getsourcelines(kind)
    number = start + next(i for i, text in enumerate(lines) if "BREAKS" in text)
    with pytest.raises(SpecError) as caught:
        capture(kind(), (torch.randn(4, 4),))
    if kind is not Swapping:  # its output as a whole is what is wrong
        assert f"test_graph.py:{number}" in str(caught.value), caught.value


def test_layers_that_share_a_parameter_are_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 2)
            self.three.weight = self.one.weight

        def forward(self, x):
            return self.head(self.three(self.two(self.one(x))))

    graph = capture(Tied(), (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["one", "head"]
    assert sorted(graph.nodes[0].parameter_names) == [
        "one.bias",
        "one.weight",
        "three.bias",
        "two.bias",
        "two.weight",
    ]


def test_words_of_all_samples_as_an_output_are_refused_with_the_way_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 9)

        def forward(self, x):
            return self.head(x).view(-1, 9)

    with pytest.raises(SpecError, match=r"this one has 5 for each\. Return it with"):
        capture(Model(), (torch.randn(3, 5, 4),))


def test_an_input_tensor_with_rows_is_needed():
    class Two(nn.Module):
        def forward(self, *, a=None, b=None):
            return a

    with pytest.raises(SpecError, match="an input tensor with a row for each sample"):
        capture(Two(), ())
    different = {"a": torch.ones(2, 2), "b": torch.ones(3, 2)}
    with pytest.raises(SpecError, match="every input tensor must have a row"):
        capture(Two(), (), different)


class Fancy(nn.Module):
    """Several inputs and outputs, modes, a function with its own backward, writes."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, *, mask, label):
        h = self.one(x) + nn.functional.one_hot(label, 4)
        h[:, 0] = h[:, 0] * 2
        with torch.no_grad():
            frozen = self.two(h)
        h = Negated.apply(h).masked_fill(mask, 0.0)
        return {"main": self.three(h + frozen), "parts": [h, label * 2], "kept": None}


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_inputs_outputs_modes_and_functions_are_kept():
    torch.manual_seed(0)
    model = Fancy().double()

    def inputs(batch):
        return (torch.randn(batch, 4, dtype=torch.float64),), {
            "mask": torch.rand(batch, 4) > 0.5,
            "label": torch.randint(0, 4, (batch,)),
        }

    graph = capture(model, *inputs(3))
    args, kwargs = inputs(5)
    twin = copy.deepcopy(model)
    whole = twin(*args, **kwargs)
    parts = graph.results.unpack(run(graph, graph.arguments.pack(args, kwargs)))
    assert list(parts) == ["main", "parts", "kept"]
    assert parts["kept"] is None
    assert torch.equal(parts["parts"][1], whole["parts"][1])
    for output in (whole, parts):
        (output["main"].sum() + output["parts"][0].square().sum()).backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(SpecError, match="other arguments than the example's"):
        graph.arguments.pack(args, kwargs | {"more": True})


class Gated(nn.Module):
    """Mixes samples behind a gate that is zero at first."""

    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        h = self.layer(x)
        return h + self.gate * torch.softmax(h, 0)  # BREAKS


def test_mixed_samples_are_found_behind_zeros_and_state_is_kept():
    lines, start = inspect.getsourcelines(Gated)
    number = start + next(i for i, text in enumerate(lines) if "BREAKS" in text)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Gated())
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    with pytest.raises(SpecError, match=f"test_graph.py:{number}.*mixes samples"):
        capture(model, (torch.randn(3, 4, generator=torch.Generator()),))
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_norm_that_averages_over_all_batches_is_captured_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    graph = capture(model, (torch.randn(2, 4),))
    assert [node.num_batch_norms for node in graph.nodes] == [1]
    assert model[1].momentum is None
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("flips", [False, True])
def test_the_rows_checked_tell_every_flip_and_rotation_of_rows(step, flips):
    if step == 0 and not flips:
        return  # each row stays where it is

    def source(row, rows):
        return (rows - 1 - row + step) % rows if flips else (row - step) % rows

    def is_missed(part):
        return all(
            part[source(place, len(part))] == source(row, 5)
            for place, row in enumerate(part)
        )

    assert not all(is_missed(part) for part in (proof._SOME, proof._REST))
