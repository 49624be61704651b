"""Convolutional networks, except for the Inception family.

- VGG: Simonyan and Zisserman, ICLR 2015, without batch normalization.
- Residual networks: He et al., CVPR 2016; wide ones: Zagoruyko and Komodakis, 2016. As
  in most libraries, a block's stride is on its 3x3 convolution.
- Densely connected networks: Huang et al., CVPR 2017.
- Xception: Chollet, CVPR 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.zoo.graph import Builder, image

if TYPE_CHECKING:
    from stretto.zoo.graph import ModelGraph, Value

_DENSE_GROWTH = 32
_DENSE_BOTTLENECK = 4


def vgg(name: str, convolutions: tuple[int, ...], image_size: int) -> ModelGraph:
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


def resnet(
    name: str, blocks: tuple[int, ...], image_size: int, *, width: int = 64
) -> ModelGraph:
    """Build a residual network of bottleneck blocks.

    Args:
        name: the graph's name.
        blocks: number of blocks of each of the four stages.
        image_size: height and width of its images.
        width: channels of the first stage's 3x3 convolutions; 128 in the wide ones.
    """
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = net.conv("conv1", image(3, image_size), 64, 7, stride=2, padding=3)
    x = net.pool("maxpool", net.batch_norm("bn1", x), 3, stride=2, padding=1)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            x = _bottleneck(
                net,
                f"layer{stage + 1}.{block}",
                x,
                inner=width << stage,
                channels=256 << stage,
                stride=stride,
            )
    net.linear("fc", net.global_pool("avgpool", x), 1000)
    return net.graph()


def _bottleneck(
    net: Builder, name: str, x: Value, *, inner: int, channels: int, stride: int
) -> Value:
    y = net.batch_norm(f"{name}.bn1", net.conv(f"{name}.conv1", x, inner, 1))
    y = net.conv(f"{name}.conv2", y, inner, 3, stride=stride, padding=1)
    y = net.batch_norm(f"{name}.bn2", y)
    y = net.batch_norm(f"{name}.bn3", net.conv(f"{name}.conv3", y, channels, 1))
    skip = x
    if x.shape[0] != channels:
        skip = net.conv(f"{name}.downsample.0", x, channels, 1, stride=stride)
        skip = net.batch_norm(f"{name}.downsample.1", skip)
    return net.add(f"{name}.add", [y, skip])


def densenet(name: str, blocks: tuple[int, ...], image_size: int) -> ModelGraph:
    """Build a network of dense blocks with the given numbers of layers."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = net.conv("features.conv0", image(3, image_size), 64, 7, stride=2, padding=3)
    x = net.batch_norm("features.norm0", x)
    x = net.pool("features.pool0", x, 3, stride=2, padding=1)
    for number, count in enumerate(blocks, start=1):
        for inner in range(1, count + 1):
            at = f"features.denseblock{number}.denselayer{inner}"
            y = net.batch_norm(f"{at}.norm1", x)
            y = net.conv(f"{at}.conv1", y, _DENSE_BOTTLENECK * _DENSE_GROWTH, 1)
            y = net.batch_norm(f"{at}.norm2", y)
            y = net.conv(f"{at}.conv2", y, _DENSE_GROWTH, 3, padding=1)
            x = net.concat(f"{at}.concat", [x, y])
        if number < len(blocks):
            at = f"features.transition{number}"
            x = net.batch_norm(f"{at}.norm", x)
            x = net.conv(f"{at}.conv", x, x.shape[0] // 2, 1)
            x = net.pool(f"{at}.pool", x, 2, stride=2)
    x = net.batch_norm("features.norm5", x)
    net.linear("classifier", net.global_pool("avgpool", x), 1000)
    return net.graph()


def xception(name: str, image_size: int) -> ModelGraph:
    """Build Xception with its entry, middle and exit flow."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = net.conv("conv1", image(3, image_size), 32, 3, stride=2)
    x = net.conv("conv2", net.batch_norm("bn1", x), 64, 3)
    x = net.batch_norm("bn2", x)
    x = _xception_block(net, "block1", x, (128, 128), stride=2, relu_first=False)
    x = _xception_block(net, "block2", x, (256, 256), stride=2)
    x = _xception_block(net, "block3", x, (728, 728), stride=2)
    for number in range(4, 12):
        x = _xception_block(net, f"block{number}", x, (728, 728, 728), stride=1)
    x = _xception_block(net, "block12", x, (728, 1024), stride=2)
    x = net.batch_norm("bn3", _separable(net, "conv3", x, 1536))
    x = net.batch_norm("bn4", _separable(net, "conv4", x, 2048))
    net.linear("fc", net.global_pool("avgpool", x), 1000)
    return net.graph()


def _separable(net: Builder, name: str, x: Value, channels: int) -> Value:
    """Add a convolution of each channel, then one over the channels of each pixel."""
    y = net.conv(f"{name}.conv1", x, x.shape[0], 3, padding=1, groups=x.shape[0])
    return net.conv(f"{name}.pointwise", y, channels, 1)


def _xception_block(
    net: Builder,
    name: str,
    x: Value,
    channels: tuple[int, ...],
    *,
    stride: int,
    relu_first: bool = True,
) -> Value:
    y, place = x, 1 if relu_first else 0
    for width in channels:
        y = _separable(net, f"{name}.rep.{place}", y, width)
        y = net.batch_norm(f"{name}.rep.{place + 1}", y)
        place += 3
    skip = x
    if stride > 1:
        y = net.pool(f"{name}.pool", y, 3, stride=stride, padding=1)
        skip = net.conv(f"{name}.skip", x, channels[-1], 1, stride=stride)
        skip = net.batch_norm(f"{name}.skipbn", skip)
    return net.add(f"{name}.add", [y, skip])
