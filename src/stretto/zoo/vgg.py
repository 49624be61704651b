"""VGG: Simonyan and Zisserman, ICLR 2015, without batch normalization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.zoo.graph import Builder, image

if TYPE_CHECKING:
    from stretto.zoo.graph import LayerGraph


def vgg(name: str, convolutions: tuple[int, ...], image_size: int) -> LayerGraph:
    """Build VGG with the given numbers of 3x3 convolutions before its five poolings."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = image(3, image_size)
    place = 0
    for stage, count in enumerate(convolutions):
        channels = min(512, 64 << stage)
        for _ in range(count):
            x = net.conv(f"features.{place}", x, channels, 3, padding=1, bias=True)
            place += 2  # an activation function comes between
        x = net.pool(f"features.{place}", x, 2, stride=2)
        place += 1
    # The published classifier reads 7x7 pixels; other images are averaged to that.
    x = net.layer("pool", "avgpool", [x], (512, 7, 7))
    for place, features in ((0, 4096), (3, 4096), (6, 1000)):
        x = net.linear(f"classifier.{place}", x, features)
    return net.graph()
