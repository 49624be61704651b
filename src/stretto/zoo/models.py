"""The papers' models by name, each with its builder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from stretto.errors import SpecError
from stretto.zoo.convolutional import densenet, resnet, vgg, xception
from stretto.zoo.graph import ModelGraph
from stretto.zoo.inception import inception_v3, inception_v4
from stretto.zoo.transformer import bert, gpt2, transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One architecture that can be generated."""

    size: int
    """The default height and width of its images, or number of tokens."""

    build: Callable[[str, int], ModelGraph]


_MODELS = {
    "resnet50": Model(size=224, build=lambda n, s: resnet(n, (3, 4, 6, 3), s)),
    "resnet101": Model(size=224, build=lambda n, s: resnet(n, (3, 4, 23, 3), s)),
    "resnet152": Model(size=224, build=lambda n, s: resnet(n, (3, 8, 36, 3), s)),
    "wide-resnet101-2": Model(
        size=224, build=lambda n, s: resnet(n, (3, 4, 23, 3), s, width=128)
    ),
    "densenet201": Model(size=224, build=lambda n, s: densenet(n, (6, 12, 48, 32), s)),
    "vgg11": Model(size=224, build=lambda n, s: vgg(n, (1, 1, 2, 2, 2), s)),
    "vgg16": Model(size=224, build=lambda n, s: vgg(n, (2, 2, 3, 3, 3), s)),
    "inception-v3": Model(size=299, build=inception_v3),
    "inception-v4": Model(size=299, build=inception_v4),
    "xception": Model(size=299, build=xception),
    "bert-base": Model(size=64, build=lambda n, s: bert(n, 12, 768, s)),
    "bert-large": Model(size=128, build=lambda n, s: bert(n, 24, 1024, s)),
    "gpt2-xl": Model(size=1024, build=lambda n, s: gpt2(n, 48, 1600, s)),
    "transformer": Model(size=880, build=transformer),
}

MODELS = tuple(_MODELS)
"""Names of all models."""


def model(name: str, size: int | None = None) -> ModelGraph:
    """Return the layers of a model.

    Args:
        name: one of ``MODELS``.
        size: height and width of its images, or tokens of its sequences; ``None``: the
            model's default.

    Raises:
        SpecError: the name is unknown, or the size is too small for its windows.
    """
    if name not in _MODELS:
        raise SpecError(f"model must be one of {', '.join(_MODELS)}, got {name!r}")
    if size is not None and size < 1:
        raise SpecError(f"size of {name} must be >= 1, got {size}")
    return _built(name, size or _MODELS[name].size)


@cache
def _built(name: str, size: int) -> ModelGraph:
    return _MODELS[name].build(name, size)
