"""Generated models against published counts and known implementations."""

from __future__ import annotations

import pytest

from stretto import zoo
from stretto.errors import SpecError

# Tensors, parameters in millions, GMAC of one sample's forward.
TABLE = {
    "resnet50": (161, 25.557, 4.09),
    "resnet101": (314, 44.549, 7.80),
    "resnet152": (467, 60.193, 11.51),
    "wide-resnet101-2": (314, 126.887, 22.75),
    "densenet201": (604, 20.014, 4.29),
    "vgg11": (22, 132.863, 7.61),
    "vgg16": (32, 138.358, 15.47),
    "inception-v3": (284, 23.835, 5.71),
    "inception-v4": (449, 42.680, 12.25),
    "xception": (156, 22.856, 8.36),
    "bert-base": (206, 110.106, 7.05),
    "bert-large": (398, 336.226, 43.6),
    "gpt2-xl": (580, 1557.611, 1753),
    "transformer": (253, 66.5, 72.7),
}


@pytest.mark.parametrize("name", TABLE)
def test_counts_are_the_published_ones_to_their_digits(name):
    tensors, params_m, gmac = TABLE[name]
    graph = zoo.model(name)
    assert len(graph.parameters) == tensors
    assert round(graph.elements / 1e6, len(str(params_m).split(".")[1])) == params_m
    digits = len(str(gmac).split(".")[1]) if "." in str(gmac) else 0
    assert round(graph.macs / 1e9, digits) == gmac


def test_the_table_has_every_model():
    assert set(TABLE) == set(zoo.MODELS)


def test_counts_at_other_image_sizes():
    assert round(zoo.model("inception-v4", 224).macs / 1e9, 2) == 6.12
    # 72.05 where the last stage is counted at 12x12 pixels; a convolution padded as
    # all libraries pad it leaves 13x13.
    assert round(zoo.model("wide-resnet101-2", 400).macs / 1e9, 2) == 73.07


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("wide-resnet101-2", 126_886_696),
        ("densenet201", 20_013_928),
        ("vgg11", 132_863_336),
        ("vgg16", 138_357_544),
        ("inception-v3", 23_834_568),
        ("inception-v4", 42_679_816),
        ("xception", 22_855_952),
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameters_to_the_last_one(name, elements):
    """Counts that the authors' and the common implementations state."""
    assert zoo.model(name).elements == elements


@pytest.mark.parametrize("name", zoo.MODELS)
def test_graphs_are_whole(name):
    graph = zoo.model(name)
    names = [p.name for p in graph.parameters]
    assert len(set(names)) == len(names)
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)
    read = {i for layer in graph.layers for i in layer.inputs}
    for i, layer in enumerate(graph.layers):
        assert all(j < i for j in layer.inputs), layer.name
        assert layer.output_elements > 0
    ends = [x.name for i, x in enumerate(graph.layers) if i not in read]
    # Only what is scored stays unread.
    assert len(ends) <= 2, ends


def test_inception_v3_has_eleven_modules_with_branches():
    graph = zoo.model("inception-v3")
    modules = [x for x in graph.layers if x.kind == "concat"]
    assert len(modules) == 11
    assert {len(x.inputs) for x in modules} == {3, 4, 6}


def test_names_and_shapes_are_those_of_pytorch():
    shapes = {p.name: p.shape for p in zoo.model("resnet50").parameters}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert shapes["layer4.2.bn3.bias"] == (2048,)
    assert shapes["fc.weight"] == (1000, 2048)
    shapes = {p.name: p.shape for p in zoo.model("vgg16").parameters}
    assert shapes["features.28.weight"] == (512, 512, 3, 3)
    assert shapes["classifier.0.weight"] == (4096, 25088)
    shapes = {p.name: p.shape for p in zoo.model("inception-v3").parameters}
    assert shapes["Mixed_6c.branch7x7dbl_2.conv.weight"] == (160, 160, 7, 1)
    shapes = {p.name: p.shape for p in zoo.model("bert-base").parameters}
    assert shapes["bert.embeddings.word_embeddings.weight"] == (30522, 768)
    assert shapes["cls.predictions.bias"] == (30522,)
    shapes = {p.name: p.shape for p in zoo.model("gpt2-xl").parameters}
    assert shapes["transformer.h.47.mlp.c_fc.weight"] == (1600, 6400)
    assert shapes["transformer.wpe.weight"] == (1024, 1600)


def test_a_residual_network_runs_as_in_pytorch():
    """The same layers, made by PyTorch, have the same shapes."""
    torch = pytest.importorskip("torch")
    graph = zoo.model("resnet50")
    weights = {p.name: p.shape for p in graph.parameters}
    with torch.device("meta"):
        value = {-1: torch.empty(1, 3, 224, 224)}
        for i, layer in enumerate(graph.layers):
            if layer.kind != "conv":
                continue
            shape = weights[f"{layer.name}.weight"]
            stride = 2 if layer.name == "conv1" else 1
            if "layer" in layer.name and layer.output_elements // shape[0] < (
                layer.input_elements // shape[1]
            ):
                stride = 2
            size = round((layer.input_elements / shape[1]) ** 0.5)
            conv = torch.nn.Conv2d(
                shape[1], shape[0], shape[2:], stride, shape[2] // 2, bias=False
            )
            value[i] = conv(torch.empty(1, shape[1], size, size))
            assert value[i].numel() == layer.output_elements, layer.name
            macs = value[i].numel() * shape[1] * shape[2] * shape[3]
            assert macs == layer.macs


def test_unknown_names_and_sizes_are_refused():
    with pytest.raises(SpecError, match="model must be one of resnet50"):
        zoo.model("alexnet")
    with pytest.raises(SpecError, match="size of vgg16 must be >= 1, got -3"):
        zoo.model("vgg16", -3)
    with pytest.raises(SpecError, match="images are too small"):
        zoo.model("inception-v3", 40)
