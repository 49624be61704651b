"""Inception-v3 and v4: Szegedy et al., CVPR 2016 and AAAI 2017.

A module is a table: each branch is a chain of convolutions, which may end in a fork.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.zoo.graph import Builder, ModelGraph, image

if TYPE_CHECKING:
    from stretto.zoo.graph import Size, Value

_Step = tuple[str, int, "Size", int]
"""Name within the module, channels, kernel, stride; strides above 1 have no padding."""

_Branch = tuple["_Step | str | tuple[_Step, ...]", ...]
"""Consecutive steps: a convolution, ``mean`` or ``reduce`` (poolings), or a fork of
convolutions that all read the same input and end the branch."""


def inception_v3(name: str, image_size: int) -> ModelGraph:
    """Build Inception-v3 without its auxiliary classifier."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = _conv(net, "Conv2d_1a_3x3", image(3, image_size), 32, 3, stride=2)
    x = _conv(net, "Conv2d_2a_3x3", x, 32, 3)
    x = _conv(net, "Conv2d_2b_3x3", x, 64, 3, padding=1)
    x = net.pool("maxpool1", x, 3, stride=2)
    x = _conv(net, "Conv2d_3b_1x1", x, 80, 1)
    x = _conv(net, "Conv2d_4a_3x3", x, 192, 3)
    x = net.pool("maxpool2", x, 3, stride=2)
    modules = [
        ("Mixed_5b", _v3_a(32)),
        ("Mixed_5c", _v3_a(64)),
        ("Mixed_5d", _v3_a(64)),
        ("Mixed_6a", _V3_B),
        ("Mixed_6b", _v3_c(128)),
        ("Mixed_6c", _v3_c(160)),
        ("Mixed_6d", _v3_c(160)),
        ("Mixed_6e", _v3_c(192)),
        ("Mixed_7a", _V3_D),
        ("Mixed_7b", _V3_E),
        ("Mixed_7c", _V3_E),
    ]
    for at, branches in modules:
        x = _module(net, at, x, branches)
    net.linear("fc", net.global_pool("avgpool", x), 1000)
    return net.graph()


def inception_v4(name: str, image_size: int) -> ModelGraph:
    """Inception-v4."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = _conv(net, "features.0", image(3, image_size), 32, 3, stride=2)
    x = _conv(net, "features.1", x, 32, 3)
    x = _conv(net, "features.2", x, 64, 3, padding=1)
    modules = [
        (("reduce",), (("conv", 96, 3, 2),)),
        _V4_STEM,
        ((("conv", 192, 3, 2),), ("reduce",)),
        *[_V4_A] * 4,
        _V4_REDUCE_A,
        *[_V4_B] * 7,
        _V4_REDUCE_B,
        *[_V4_C] * 3,
    ]
    for place, branches in enumerate(modules, start=3):
        x = _module(net, f"features.{place}", x, branches)
    net.linear("last_linear", net.global_pool("avgpool", x), 1000)
    return net.graph()


def _conv(
    net: Builder,
    name: str,
    x: Value,
    channels: int,
    kernel: Size,
    *,
    stride: int = 1,
    padding: Size = 0,
) -> Value:
    x = net.conv(f"{name}.conv", x, channels, kernel, stride=stride, padding=padding)
    return net.batch_norm(f"{name}.bn", x)


def _step(net: Builder, module: str, x: Value, step: _Step) -> Value:
    name, channels, kernel, stride = step
    high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    # "!" after a name marks a convolution of stride 1 without padding.
    padded = stride == 1 and not name.endswith("!")
    padding = (high // 2, wide // 2) if padded else 0
    return _conv(
        net,
        f"{module}.{name.rstrip('!')}",
        x,
        channels,
        kernel,
        stride=stride,
        padding=padding,
    )


def _module(net: Builder, name: str, x: Value, branches: tuple[_Branch, ...]) -> Value:
    ends: list[Value] = []
    for number, branch in enumerate(branches):
        y = x
        fork: list[Value] = []
        for step in branch:
            if step == "mean":
                y = net.pool(f"{name}.pool{number}", y, 3, padding=1)
            elif step == "reduce":
                y = net.pool(f"{name}.pool{number}", y, 3, stride=2)
            elif isinstance(step[0], tuple):
                fork = [_step(net, name, y, part) for part in step]  # type: ignore[arg-type]
            else:
                y = _step(net, name, y, step)  # type: ignore[arg-type]
        ends += fork or [y]
    return net.concat(f"{name}.concat", ends)


def _v3_a(pool_channels: int) -> tuple[_Branch, ...]:
    return (
        (("branch1x1", 64, 1, 1),),
        (("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 1)),
        (
            ("branch3x3dbl_1", 64, 1, 1),
            ("branch3x3dbl_2", 96, 3, 1),
            ("branch3x3dbl_3", 96, 3, 1),
        ),
        ("mean", ("branch_pool", pool_channels, 1, 1)),
    )


_V3_B: tuple[_Branch, ...] = (
    (("branch3x3", 384, 3, 2),),
    (
        ("branch3x3dbl_1", 64, 1, 1),
        ("branch3x3dbl_2", 96, 3, 1),
        ("branch3x3dbl_3", 96, 3, 2),
    ),
    ("reduce",),
)


def _v3_c(inner: int) -> tuple[_Branch, ...]:
    return (
        (("branch1x1", 192, 1, 1),),
        (
            ("branch7x7_1", inner, 1, 1),
            ("branch7x7_2", inner, (1, 7), 1),
            ("branch7x7_3", 192, (7, 1), 1),
        ),
        (
            ("branch7x7dbl_1", inner, 1, 1),
            ("branch7x7dbl_2", inner, (7, 1), 1),
            ("branch7x7dbl_3", inner, (1, 7), 1),
            ("branch7x7dbl_4", inner, (7, 1), 1),
            ("branch7x7dbl_5", 192, (1, 7), 1),
        ),
        ("mean", ("branch_pool", 192, 1, 1)),
    )


_V3_D: tuple[_Branch, ...] = (
    (("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 2)),
    (
        ("branch7x7x3_1", 192, 1, 1),
        ("branch7x7x3_2", 192, (1, 7), 1),
        ("branch7x7x3_3", 192, (7, 1), 1),
        ("branch7x7x3_4", 192, 3, 2),
    ),
    ("reduce",),
)

_V3_E: tuple[_Branch, ...] = (
    (("branch1x1", 320, 1, 1),),
    (
        ("branch3x3_1", 384, 1, 1),
        (("branch3x3_2a", 384, (1, 3), 1), ("branch3x3_2b", 384, (3, 1), 1)),
    ),
    (
        ("branch3x3dbl_1", 448, 1, 1),
        ("branch3x3dbl_2", 384, 3, 1),
        (("branch3x3dbl_3a", 384, (1, 3), 1), ("branch3x3dbl_3b", 384, (3, 1), 1)),
    ),
    ("mean", ("branch_pool", 192, 1, 1)),
)

_V4_STEM: tuple[_Branch, ...] = (
    (("branch0.0", 64, 1, 1), ("branch0.1!", 96, 3, 1)),
    (
        ("branch1.0", 64, 1, 1),
        ("branch1.1", 64, (1, 7), 1),
        ("branch1.2", 64, (7, 1), 1),
        ("branch1.3!", 96, 3, 1),
    ),
)

_V4_A: tuple[_Branch, ...] = (
    (("branch0", 96, 1, 1),),
    (("branch1.0", 64, 1, 1), ("branch1.1", 96, 3, 1)),
    (
        ("branch2.0", 64, 1, 1),
        ("branch2.1", 96, 3, 1),
        ("branch2.2", 96, 3, 1),
    ),
    ("mean", ("branch3.1", 96, 1, 1)),
)

_V4_REDUCE_A: tuple[_Branch, ...] = (
    (("branch0", 384, 3, 2),),
    (("branch1.0", 192, 1, 1), ("branch1.1", 224, 3, 1), ("branch1.2", 256, 3, 2)),
    ("reduce",),
)

_V4_B: tuple[_Branch, ...] = (
    (("branch0", 384, 1, 1),),
    (
        ("branch1.0", 192, 1, 1),
        ("branch1.1", 224, (1, 7), 1),
        ("branch1.2", 256, (7, 1), 1),
    ),
    (
        ("branch2.0", 192, 1, 1),
        ("branch2.1", 192, (7, 1), 1),
        ("branch2.2", 224, (1, 7), 1),
        ("branch2.3", 224, (7, 1), 1),
        ("branch2.4", 256, (1, 7), 1),
    ),
    ("mean", ("branch3.1", 128, 1, 1)),
)

_V4_REDUCE_B: tuple[_Branch, ...] = (
    (("branch0.0", 192, 1, 1), ("branch0.1", 192, 3, 2)),
    (
        ("branch1.0", 256, 1, 1),
        ("branch1.1", 256, (1, 7), 1),
        ("branch1.2", 320, (7, 1), 1),
        ("branch1.3", 320, 3, 2),
    ),
    ("reduce",),
)

_V4_C: tuple[_Branch, ...] = (
    (("branch0", 256, 1, 1),),
    (
        ("branch1_0", 384, 1, 1),
        (("branch1_1a", 256, (1, 3), 1), ("branch1_1b", 256, (3, 1), 1)),
    ),
    (
        ("branch2_0", 384, 1, 1),
        ("branch2_1", 448, (3, 1), 1),
        ("branch2_2", 512, (1, 3), 1),
        (("branch2_3a", 256, (1, 3), 1), ("branch2_3b", 256, (3, 1), 1)),
    ),
    ("mean", ("branch3.1", 256, 1, 1)),
)
