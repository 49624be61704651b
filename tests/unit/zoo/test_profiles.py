"""Layer profiles for burst planning."""

from __future__ import annotations

import pytest

from stretto import zoo
from stretto.errors import SpecError
from stretto.schema.burst import LayerProfile


def total_s(profile, samples):
    return sum(layer.compute_s(samples) for layer in profile.layers)


@pytest.mark.parametrize("name", ["vgg16", "inception-v3", "resnet50", "densenet201"])
def test_profiles_are_sound(name, tmp_path):
    made = zoo.layer_profile(name)
    assert made.parameter_bytes == 4 * zoo.model(name).elements
    # One layer begins and one ends, so that plans over branches are possible.
    assert sum(not layer.inputs for layer in made.layers) == 1
    read = {i for layer in made.layers for i in layer.inputs}
    assert [x.name for x in made.layers if x.name not in read] == [made.layers[-1].name]
    made.save(tmp_path / "p.json")
    assert LayerProfile.load(tmp_path / "p.json") == made


@pytest.mark.parametrize(
    ("name", "times_ms"),
    [("vgg16", {1: 3.35, 32: 51.4, 64: 100.7}), ("inception-v3", {1: 6.9, 32: 40.9})],
)
def test_published_sums(name, times_ms):
    made = zoo.layer_profile(name)
    for samples, time_ms in times_ms.items():
        assert 1e3 * total_s(made, samples) == pytest.approx(time_ms, rel=2e-3)


def test_more_samples_take_longer():
    made = zoo.layer_profile("vgg16")
    times = [total_s(made, n) for n in (1, 2, 3, 4, 8, 24, 64, 128, 256)]
    assert times == sorted(times)


def test_normalizations_count_with_their_convolutions():
    names = [layer.name for layer in zoo.layer_profile("resnet50").layers]
    assert "layer1.0.conv1" in names
    assert "layer1.0.bn1" not in names
    # Those of dense blocks read what many others read too.
    names = [layer.name for layer in zoo.layer_profile("densenet201").layers]
    assert "features.denseblock1.denselayer1.norm1" in names
    assert "features.denseblock1.denselayer1.norm2" not in names


def test_wrong_arguments_are_refused():
    with pytest.raises(SpecError, match="samples must be at least one number"):
        zoo.layer_profile("vgg16", samples=())
    with pytest.raises(SpecError, match="device must be one of"):
        zoo.layer_profile("vgg16", device="abacus")
