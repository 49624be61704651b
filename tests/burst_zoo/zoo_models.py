"""Models, each with the expectation that it trains exactly, or is refused and why.

A factory is a function of no arguments; the decorator names its data. All numbers are
float64. ``refused`` is a part of the sentence that the user gets.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Data = Any  # Callable[[int, torch.Generator], Inputs]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    data: Data
    refused: str | None = None
    names_line: bool = True
    draws: bool = False
    """Random numbers follow samples: one process is a burst model on one rank."""
    prepare: Callable[[nn.Module], Any] | None = None
    copies: bool = True
    change: Callable[[nn.Module, int], Any] | None = None
    """Called before each step with the model and the step's number."""
    shares: tuple[str, str] = ("even", "uneven")
    limit: float = 1e-9
    """Relative difference; more where the model computes with fewer bits."""


CASES: dict[str, Case] = {}


def right(data: Data, **more: Any) -> Any:
    """The model must train as one process does."""

    def add(make: Any) -> Any:
        name = getattr(make, "__name__", str(make))
        CASES[name] = Case(name=name, make=make, data=data, **more)
        return make

    return add


def refused(data: Data, sentence: str, **more: Any) -> Any:
    """The model must be refused with such a sentence."""
    return right(data, refused=sentence, **more)


def vectors(*shape: int) -> Data:
    return lambda batch, draw: (
        (torch.randn(batch, *shape, generator=draw),),
        {},
    )


def tokens(length: int = 6, words: int = 20) -> Data:
    return lambda batch, draw: (
        (torch.randint(0, words, (batch, length), generator=draw),),
        {},
    )


def mlp(width: int = 8, out: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 12),
        nn.SiLU(),
        nn.Linear(12, 12),
        nn.SiLU(),
        nn.Linear(12, out),
    )


flat = vectors(8)
image = vectors(3, 8, 8)
sequence = vectors(5, 8)


# ---------------------------------------------------------------- plain architectures


@right(flat)
def plain_mlp() -> nn.Module:
    return mlp()


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))
            if before != after or stride != 1
            else nn.Identity()
        )
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.down(x)
        return self.act(out)


@right(image)
def residual_network() -> nn.Module:
    return nn.Sequential(
        ConvBlock(3, 4),
        ConvBlock(4, 4),
        ConvBlock(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


class ReadsContainers(nn.Module):
    """Reads registered parameters from a dictionary, a list and by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 6) / 3)
        self.second = nn.Parameter(torch.randn(6, 6) / 3)
        self.bias = nn.Parameter(torch.zeros(6))
        self.held = {"first": self.first, "more": [self.second, self.bias]}
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        second, bias = self.held["more"]
        h = torch.tanh(x @ self.held["first"])
        return self.last(functional.silu(h @ second + bias) + self.bias)


@right(flat, copies=False)
def parameters_read_from_containers() -> nn.Module:
    return ReadsContainers()


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(3 + 4 * i),
                nn.SiLU(),
                nn.Conv2d(3 + 4 * i, 4, 3, padding=1),
            )
            for i in range(3)
        )
        self.head = nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return self.head(torch.cat(seen, 1).mean((2, 3)))


@right(image)
def dense_network() -> nn.Module:
    return DenseNet()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = functional.silu(self.one(x))
        low = functional.silu(self.two(high))
        return self.out(torch.cat((high, self.up(low)), 1))


@right(image)
def u_network() -> nn.Module:
    return UNet()


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        gate = torch.sigmoid(self.up(functional.silu(self.down(x.mean((-1, -2))))))
        return self.head((x * gate[:, :, None, None]).flatten(2).mean(-1))


@right(image)
def squeeze_and_excite() -> nn.Module:
    return SqueezeExcite()


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool = True, zeros: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(7, 3)
        self.zeros = zeros

    def forward(self, x: Tensor) -> Tensor:
        state = None
        if self.zeros:
            zeros = torch.zeros(2, x.shape[0], 7)
            state = (zeros, zeros)
        out, _ = self.lstm(self.embed(x), state)
        return self.head(out[:, -1])


@right(sequence)
def lstm_batch_first() -> nn.Module:
    return Recurrent()


@right(sequence)
def lstm_with_zero_state() -> nn.Module:
    return Recurrent(zeros=True)


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.size(0), 7)
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
        return self.head(state)


@right(sequence)
def gru_cell_loop() -> nn.Module:
    return CellLoop()


class TinyGPT(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.places = nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.size()
        x = self.words(ids) + self.places(torch.arange(t, device=ids.device))
        q, k, v = self.qkv(self.norm1(x)).split(8, dim=2)
        q, k, v = (z.view(b, t, 2, 4).transpose(1, 2) for z in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, 8))
        return self.head(x + self.mlp(self.norm2(x)))


@right(tokens())
def tiny_gpt() -> nn.Module:
    return TinyGPT()


@right(tokens())
def tied_embedding_and_head() -> nn.Module:
    return TinyGPT(tied=True)


@right(sequence)
def torch_encoder_batch_first() -> nn.Module:
    return nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Linear(8, 3),
    )


class PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.gamma = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1) + self.places
        n = self.norm(x)
        x = x + self.gamma * self.attention(n, n, n, need_weights=False)[0]
        return self.head(x[:, 0])


@right(image)
def vision_transformer() -> nn.Module:
    return PatchTransformer()


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.same(self.first(x)))
        return self.last(torch.tanh(self.same(x)))


@right(flat)
def module_called_twice() -> nn.Module:
    return Twice()


class Tied(nn.Module):
    """An autoencoder that decodes by the transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.encode = nn.Linear(8, 4)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encode(torch.tanh(self.first(x))))
        return self.last(functional.linear(h, self.encode.weight.t()))


@right(flat)
def tied_autoencoder() -> nn.Module:
    return Tied()


class TiedByMemory(nn.Module):
    """A part of the first weight, without a gradient, is the last weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(8, 8), nn.Linear(8, 8), mlp()
        part = self.one.weight.detach()[:5]
        if how == "buffer":
            self.register_buffer("part", part)
        else:
            self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.last(h) + h @ self.part.t()


@right(flat, copies=False)  # a deepcopy of a parameter has memory of its own
def a_buffer_that_is_a_part_of_a_weight() -> nn.Module:
    return TiedByMemory("buffer")


@right(flat, copies=False)  # a deepcopy of a parameter has memory of its own
def an_attribute_that_is_a_part_of_a_weight() -> nn.Module:
    return TiedByMemory("attribute")


# ------------------------------------------------------------ several inputs, outputs


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x) * self.right(y)))


@right(
    lambda n, g: (
        (torch.randn(n, 8, generator=g), torch.randn(n, 4, generator=g)),
        {},
    )
)
def two_inputs() -> nn.Module:
    return TwoInputs()


class ImageAndLabel(nn.Module):
    """A conditional model: floats and integers, one by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.body = mlp()

    def forward(self, x: Tensor, *, label: Tensor) -> Tensor:
        return self.body(x + self.embed(label))


@right(
    lambda n, g: (
        (torch.randn(n, 8, generator=g),),
        {"label": torch.randint(0, 5, (n,), generator=g)},
    )
)
def floats_and_integers() -> nn.Module:
    return ImageAndLabel()


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x, mask = self.embed(batch["ids"]), batch["mask"]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~mask)
        kept = mask.to(x.dtype)[..., None]
        pooled = (x * kept).sum(1) / kept.sum(1)
        return {"logits": self.head(pooled), "pooled": pooled}


def masked_tokens(batch: int, draw: torch.Generator) -> Inputs:
    ids = torch.randint(0, 20, (batch, 6), generator=draw)
    lengths = torch.randint(2, 7, (batch, 1), generator=draw)
    return ({"ids": ids, "mask": torch.arange(6) < lengths},), {}


@right(masked_tokens)
def dictionary_with_mask() -> nn.Module:
    return MaskedAttention()


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))
        self.aux, self.main = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.one(x))
        early = self.aux(x)
        x = torch.tanh(self.three(torch.tanh(self.two(x))))
        return self.main(x), early


@right(flat)
def auxiliary_head() -> nn.Module:
    return Auxiliary()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(8, 8), mlp(4, 8)

    def forward(self, x: Tensor) -> Any:
        mean, log_var = self.encode(x).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        return self.decode(mean + noise * torch.exp(0.5 * log_var)), mean, log_var


@right(flat, draws=True)
def variational_autoencoder() -> nn.Module:
    return Variational()


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


@refused(flat, "mixes samples")
def loss_inside() -> nn.Module:
    return LossInside()


# --------------------------------------------------------- contexts, functions, hooks


class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = mlp(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.backbone(x))
        return self.head(x)


@right(flat)
def backbone_under_no_grad() -> nn.Module:
    return FrozenBackbone()


class Momentum(nn.Module):
    """A branch whose target has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.online, self.target = nn.Linear(8, 8), mlp(), mlp()

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        wanted = torch.no_grad()(lambda: self.target(x) * 2)()
        return self.online(x) - wanted


@right(flat)
def target_branch_under_no_grad() -> nn.Module:
    return Momentum()


class HalfCast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.one(x)
        return self.two(h.to(x.dtype))


@right(flat)
def autocast_region() -> nn.Module:
    return HalfCast().float().requires_grad_()


CASES["autocast_region"] = Case(
    name="autocast_region",
    make=lambda: HalfCast().float(),
    data=lambda n, g: ((torch.randn(n, 8, generator=g).float(),), {}),
    limit=3e-2,
)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = mlp(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return {"label": self.one(x), "domain": self.two(Reverse.apply(x, 0.3))}


@right(flat)
def gradient_reversal() -> nn.Module:
    return Adversarial()


class Stop(torch.autograd.Function):
    """Pass values, but no gradient; a graph doesn't show that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = mlp(8, 8), nn.Linear(2, 2)
        self.one, self.two = nn.Linear(8, 3), mlp(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.one(Stop.apply(self.body(x))), self.two(x)


@right(flat)
def function_without_gradients() -> nn.Module:
    return Stopped()


class StoppedWhole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(8, 8), mlp(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Stop.apply(self.body(x)))


@right(flat)
def function_without_gradients_before_the_only_output() -> nn.Module:
    return StoppedWhole()


STOPS = {"now": False}


class StopAtTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None if STOPS["now"] else grad


class StoppedAtTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(8, 8), mlp(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(StopAtTimes.apply(self.body(x)))


def _stop(_model: nn.Module, step: int) -> None:
    STOPS["now"] = step == 0


@right(flat, change=_stop)
def function_that_begins_to_give_gradients() -> nn.Module:
    STOPS["now"] = True  # while it is captured
    return StoppedAtTimes()


class WrittenWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), mlp(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) * 2
        with torch.no_grad():
            h.add_(x.tanh())
            h[:, 0] = x[:, 1]
        return self.head(h)


@right(flat)
def write_without_gradients() -> nn.Module:
    return WrittenWithoutGradients()


class RepeatedParameters(nn.Module):
    """Repeats each row of parameters once for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(8, 8), mlp(8, 3)
        self.token = nn.Parameter(torch.randn(1, 4, 8))
        self.outer = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)[:, None] * torch.repeat_interleave(self.token, len(x), dim=0)
        outer = self.outer.repeat_interleave(x.shape[0], 0).view(3, len(x), 8)
        return self.head(h.sum(1) + (outer * x).sum(0))


@right(flat)
def parameters_repeated_row_by_row() -> nn.Module:
    return RepeatedParameters()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = Straight.apply(self.one.weight * 8) / 8
        x = functional.linear(x, weight, self.one.bias)
        return self.two(torch.tanh(Straight.apply(x * 16) / 16))


@right(flat)
def straight_through_quantization() -> nn.Module:
    return Quantized()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x + (
                block(x)
                if i == 0
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return x


@right(flat)
def checkpointing() -> nn.Module:
    return Checkpointed(reentrant=False)


@right(flat)
def reentrant_checkpointing() -> nn.Module:
    return Checkpointed(reentrant=True)


class Dropping(nn.Module):
    def __init__(self, training: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.flag = training

    def forward(self, x: Tensor) -> Tensor:
        flag = self.training if self.flag is None else self.flag
        x = functional.dropout(torch.tanh(self.one(x)), 0.5, training=flag)
        return self.two(functional.dropout(x, 0.3, flag))


@right(flat)
def functional_dropout_never() -> nn.Module:
    return Dropping(training=False)


@right(flat, draws=True)
def functional_dropout_in_training() -> nn.Module:
    return Dropping(training=None)


@right(flat, draws=True, prepare=lambda m: m.eval())
def functional_dropout_always() -> nn.Module:
    return Dropping(training=True)


@right(flat, draws=True)
def dropout_modules() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.Dropout(0.4),
        nn.Linear(8, 8),
        nn.AlphaDropout(0.2),
        nn.Linear(8, 3),
    )


class FoldedDropout(nn.Module):
    """A dropout where samples are not alone in the first dimension."""

    def __init__(self, there: Any, back: Any, drop: Any = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 3)
        self.there, self.back = there, back
        self.drop = nn.Dropout(0.4) if drop is None else drop

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.there(torch.tanh(self.one(x))))
        return self.two(self.back(h + 1, x))


def _folded(h: Tensor) -> Tensor:
    return h.reshape(-1, h.shape[2])


def _unfolded(h: Tensor, x: Tensor) -> Tensor:
    return h.view(*x.shape[:2], -1)


@right(sequence, draws=True)
def dropout_of_folded_rows() -> nn.Module:
    return FoldedDropout(_folded, _unfolded)


@right(sequence, draws=True)
def dropout_in_place_of_folded_rows() -> nn.Module:
    return FoldedDropout(
        lambda h: _folded(h + 0.5),  # tanh needs its own result in backward
        _unfolded,
        lambda h: functional.dropout(h, 0.4, True, True),
    )


@refused(sequence, "use operations that have a backward")
def dropout_in_place_of_what_backward_needs() -> nn.Module:
    return FoldedDropout(
        _folded, _unfolded, lambda h: functional.dropout(h, 0.4, True, True)
    )


@right(sequence, draws=True)
def dropout_of_time_before_samples() -> nn.Module:
    return FoldedDropout(
        lambda h: h.transpose(0, 1),
        lambda h, _x: h.transpose(0, 1),
        nn.AlphaDropout(0.4),
    )


class FoldedHeads(nn.Module):
    """Attention with heads beside samples, and a dropout of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = (
            nn.Linear(8, 24),
            nn.Linear(8, 3),
            nn.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        rows = (
            part.view(b, t, 2, 4).transpose(1, 2).reshape(b * 2, t, 4)
            for part in self.qkv(x).chunk(3, -1)
        )
        q, k, v = rows
        weights = self.drop(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1))
        h = torch.bmm(weights, v).view(b, 2, t, 4).transpose(1, 2)
        return self.out(h.reshape(b, t, 8))


@right(sequence, draws=True)
def dropout_of_folded_heads() -> nn.Module:
    return FoldedHeads()


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.out = (
            nn.Conv2d(3, 4, 3),
            nn.Dropout2d(0.5),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.conv(x.flatten(0, 1)))).mean((2, 3))
        return self.out(h.view(*x.shape[:2], -1))


@right(vectors(3, 3, 6, 6), draws=True)
def dropout_of_channels_of_frames() -> nn.Module:
    return Frames()


class DropsInPlace(nn.Module):
    """Drops everything from a part, so that no masks differ, and ignores the result."""

    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(8, 6), nn.Linear(6, 3), drop

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x)) * 2
        self.drop(h[:, :2])
        self.drop(h.view(-1, 2, 3)[..., 2])
        return self.two(h)


@right(flat)
def dropout_in_place_of_a_part() -> nn.Module:
    return DropsInPlace(lambda h: functional.dropout(h, 1.0, inplace=True))


@right(flat)
def dropout_module_in_place_of_a_part() -> nn.Module:
    return DropsInPlace(nn.Dropout(1.0, inplace=True))


@refused(sequence, "not its outer part")
def dropout_of_samples_inside_a_fold() -> nn.Module:
    return FoldedDropout(
        lambda h: h.transpose(0, 1).reshape(-1, 6),
        lambda h, x: h.view(x.shape[1], x.shape[0], 6).transpose(0, 1),
    )


@refused(sequence, "whose values do not show it")
def dropout_of_ones_inside_a_fold() -> nn.Module:
    return FoldedDropout(
        lambda h: torch.ones_like(h).transpose(0, 1).reshape(-1, 6),
        lambda h, x: h.view(x.shape[1], x.shape[0], 6).transpose(0, 1),
    )


@right(image, prepare=lambda m: m[0].eval())
def frozen_statistics() -> nn.Module:
    return nn.Sequential(
        ConvBlock(3, 4), ConvBlock(4, 4), nn.Flatten(), nn.Linear(256, 3)
    )


@right(flat, prepare=lambda m: m[1].eval())
def dropout_in_eval() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))


@right(flat, prepare=lambda m: m[0].requires_grad_(requires_grad=False))
def frozen_layer() -> nn.Module:
    return mlp()


@right(flat, prepare=lambda m: m.register_forward_hook(lambda _m, _i, out: out * 3))
def hook_of_the_root() -> nn.Module:
    return mlp()


@right(
    flat,
    prepare=lambda m: m.register_forward_pre_hook(lambda _m, i: (i[0] * 0.5,)),
)
def pre_hook_of_the_root() -> nn.Module:
    return mlp()


def _double(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * 2


@right(flat, prepare=lambda m: m[2].register_forward_hook(_double))
def hook_of_a_layer() -> nn.Module:
    return mlp()


@right(flat, prepare=lambda m: m[1].register_forward_hook(_double))
def hook_of_a_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), mlp(8, 8), nn.Linear(8, 2))


def _halve(_module: nn.Module, grads: Any, _outputs: Any) -> Any:
    return tuple(None if g is None else g / 2 for g in grads)


@right(flat, prepare=lambda m: m[1].register_full_backward_hook(_halve))
def backward_hook_of_a_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), mlp(8, 8), nn.Linear(8, 2))


@right(flat)
def weight_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


@right(flat)
def spectral_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)),
    )


class Adapter(nn.Module):
    """Low rank, with a zero at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


@right(flat)
def low_rank_adapter() -> nn.Module:
    return Adapter()


class Noisy(nn.Module):
    """Writes into parts of a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h[:, 2:4] = 0.5 * h[:, 4:6]
        h.mul_(2).clamp_(-0.9, 0.9)
        h.tanh_()
        return self.two(h)


@right(flat)
def writes_in_place() -> nn.Module:
    return Noisy()


class OnlineBuffer(nn.Module):
    """Output steps collected in a tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        state = x.new_zeros(b, c)
        outs = torch.zeros(b, t, 3)
        for i in range(t):
            state = torch.tanh(self.cell(torch.cat((x[:, i], state), 1)))
            outs[:, i] = self.head(state)
        return outs


@right(sequence)
def fills_zeros() -> nn.Module:
    return OnlineBuffer()


# ----------------------------------------------------------------- folded rows, norms


class FoldedNorm(nn.Module):
    """Per-frame statistics: rows of the norm are frames, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = (
            nn.Linear(8, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        h = self.norm(self.one(x).reshape(b * t, 6))
        return self.two(torch.tanh(h)).view(b, t, 3)


@right(sequence)
def norm_over_folded_rows() -> nn.Module:
    return FoldedNorm()


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 6),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        return self.head(self.frame(x.flatten(0, 1)).view(b, t, -1).mean(1))


@right(vectors(3, 3, 6, 6))
def video_frames() -> nn.Module:
    return Video()


@right(flat)
def batch_norms_of_every_kind() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6),
        nn.BatchNorm1d(6, affine=False),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Linear(6, 3),
    )


class NormOfTable(nn.Module):
    """Normalizes node embeddings, which are the same for all samples."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(8, 6), nn.Linear(6, 6), mlp(3)
        self.nodes = nn.Parameter(torch.randn(3, 6))
        self.norm = nn.BatchNorm1d(6, momentum=momentum)
        self.of_samples = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.of_samples(self.two(torch.tanh(self.one(x))))
        return self.last(h @ self.norm(self.nodes).t())


@right(flat)
def norm_of_a_table() -> nn.Module:
    return NormOfTable()


@right(flat, shares=("one", "uneven"))
def cumulative_norm_of_a_table() -> nn.Module:
    return NormOfTable(momentum=None)


@right(flat)
def norm_of_a_table_in_a_module_with_hooks() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), NormOfTable(), nn.Linear(5, 3))
    model[1].register_forward_hook(lambda _module, _given, out: out * 2)
    return model


@refused(flat, "normalizes samples and a tensor that is the same")
def norm_of_a_table_and_of_samples() -> nn.Module:
    model = NormOfTable()
    model.of_samples = model.norm
    return model


@right(vectors(6, 4))
def other_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(6, 6, 1),
        nn.InstanceNorm1d(6, affine=True),
        nn.GroupNorm(2, 6),
        nn.Conv1d(6, 4, 1),
        nn.LayerNorm(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.batch_norm(self.one(x), None, None, training=True)
        return self.two(h)


@refused(flat, "mixes samples")
def functional_batch_norm() -> nn.Module:
    return FunctionalNorm()


# ------------------------------------------------------------ what the check could miss


class NotANumber(nn.Module):
    """Perturbed as usual, its parameter gives NaN, which hides that it mixes rows."""

    def __init__(self, own: float, *, mixes: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.rho, self.mixes = nn.Parameter(torch.tensor(own)), mixes

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) * (1 - self.rho**2).sqrt()
        return self.two(x.softmax(0) if self.mixes else x)


@refused(flat, "mixes samples")
def mixing_behind_a_root() -> nn.Module:
    return NotANumber(0.99, mixes=True)


@right(flat)
def root_near_its_end() -> nn.Module:
    return NotANumber(0.9, mixes=False)


class AlwaysNaN(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return self.two((-1 - self.one(x).square()).sqrt().softmax(self.dim))


@refused(flat, "gives only NaN")
def nothing_but_nan() -> nn.Module:
    return AlwaysNaN(1)


class NaNGradients(nn.Module):
    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if self.drops:
            h = torch.cat([h / 0 * 0, h], 1)[:, 8:]
        else:
            h = h + 0 * (h - h.detach()).sqrt()
        return self.two(h)


@refused(flat, "gives only gradients of NaN")
def nothing_but_gradients_of_nan() -> nn.Module:
    return NaNGradients()


@refused(flat, "gives only NaN")
def gradients_of_nan_through_dropped_columns() -> nn.Module:
    return NaNGradients(drops=True)


@refused(flat, "'softmax' mixes samples")
def mixing_of_nothing_but_nan() -> nn.Module:
    return AlwaysNaN(0)


class BeyondMargin(nn.Module):
    """Reads the sample before each, where that exceeds a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x + functional.relu(x - 20).roll(1, 0))


@refused(flat, "'roll' mixes samples")
def mixing_of_rare_values() -> nn.Module:
    return BeyondMargin()


class FlatWords(nn.Module):
    """Reads a word of each sample by its place among the words of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        first = torch.arange(len(x)) * x.shape[1]
        last = (x[..., 0] > 0).sum(1).clamp(min=1) - 1
        best = x[..., 1].argmax(1)
        words = x.flatten(0, 1)
        return self.two(words[first + last] * words.index_select(0, first + best))


@right(sequence)
def words_by_their_place_in_the_batch() -> nn.Module:
    return FlatWords()


class WarmUp(nn.Module):
    """Mixes rows with a weight that is zero until a program raises it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("alpha", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x + self.alpha * x.softmax(0))


@refused(flat, "mixes samples")
def mixing_behind_a_zero() -> nn.Module:
    return WarmUp()


class Teacher(nn.Module):
    """Holds a module that is not one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = [mlp().requires_grad_(requires_grad=False)]

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            wanted = self.teacher[0](x)
        return self.student(x), wanted


@right(flat)
def teacher_in_a_list() -> nn.Module:
    return Teacher()


class Fields(nn.Module):
    """Columns of one tensor with vocabularies of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(30, 4), nn.Embedding(3, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.user(x[:, 0]), self.item(x[:, 1])], 1))


def _two_columns(batch: int, draw: torch.Generator) -> Any:
    columns = [
        torch.randint(20, 30, (batch,), generator=draw),
        torch.randint(0, 3, (batch,), generator=draw),
    ]
    return (torch.stack(columns, 1),), {}


@right(_two_columns)
def columns_of_categories() -> nn.Module:
    return Fields()


class SingleInside(nn.Module):
    """Computes with fewer bits than its output has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).float().sigmoid().double())


@right(flat, limit=1e-5)
def single_precision_inside() -> nn.Module:
    return SingleInside()


class EachSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.two(self.one(row).tanh()) for row in x])


@refused(flat, "depends on the number of samples")
def loop_over_samples() -> nn.Module:
    return EachSample()


class SparseGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("edges", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.two((self.edges @ self.one(x).t()).t())


@refused(flat, "'edges' is a sparse tensor", names_line=False)
def sparse_buffer() -> nn.Module:
    return SparseGraph()


def _twice(x: Tensor) -> Tensor:
    return x * 2 + 1


class CallsScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.scripted = torch.jit.script(_twice)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.scripted(self.one(x)))


@refused(flat, "remove the decorator", copies=False)
def scripted_function() -> nn.Module:
    return CallsScripted()


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.two)(self.one(x))


@refused(flat, "torch.vmap and torch.func")
def mapped_function() -> nn.Module:
    return Mapped()


# ---------------------------------------------------------------------- rows are mixed


class Between(nn.Module):
    """Two layers and a function between them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(torch.tanh(self.one(x))))


MIXING: dict[str, Any] = {
    "softmax": lambda h: torch.softmax(h, 0),
    "normalize": lambda h: functional.normalize(h, dim=0),
    "sort": lambda h: h.sort(0).values,
    "cumsum": lambda h: h.cumsum(0),
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "gram": lambda h: h @ h.t() @ h,
    "distances": lambda h: torch.cdist(h, h) @ h,
    "row_numbers": lambda h: h + torch.arange(h.shape[0])[:, None],
    "divided_by_batch": lambda h: h / h.shape[0],
    "minus_mean": lambda h: h - h.mean(0),
    "minus_kept_mean": lambda h: h - h.mean(0, keepdim=True),
    "global_max": lambda h: h / h.abs().max(),
    "layer_norm_of_batch": lambda h: functional.layer_norm(h, h.shape),
    "permuted_rows": lambda h: h[torch.arange(h.shape[0] - 1, -1, -1)],
    "neighbors": lambda h: torch.nn.functional.conv1d(
        h.t()[None], torch.ones(8, 8, 3), padding=1
    )[0].t(),
    "reshaped": lambda h: h.reshape(8, -1).t(),
    "in_batch_contrast": lambda h: (
        h * torch.eye(h.shape[0]).sum(1, keepdim=True) + (h @ h.t()).softmax(1) @ h
    ),
    "attention_over_batch": lambda h: functional.scaled_dot_product_attention(
        h[None], h[None], h[None]
    )[0],
}
for _name, _function in MIXING.items():
    CASES[f"mixes_{_name}"] = Case(
        name=f"mixes_{_name}",
        make=lambda function=_function: Between(function),
        data=flat,
        refused="",
    )


@refused(vectors(5, 8), "mixes samples")
def lstm_over_the_batch() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), LastOf(nn.LSTM(8, 8)), nn.Linear(8, 3))


class LastOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@refused(sequence, "mixes samples", names_line=False)
def encoder_over_the_batch() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        nn.Linear(8, 3),
    )


class ZeroGate(nn.Module):
    """Rows mix behind a gate that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.two(h + self.gate * torch.softmax(h, 0))


@refused(flat, "mixes samples")
def mixes_behind_zero() -> nn.Module:
    return ZeroGate()


# -------------------------------------------------------------- decisions and constants


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() > 0.3:  # noqa: TID251
                x = x + torch.tanh(layer(x))
        return x


@refused(flat, "")
def layer_drop() -> nn.Module:
    return LayerDrop()


class TensorDrop(LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) > 0.3:
                x = x + torch.tanh(layer(x))
        return x


@refused(flat, "")
def layer_drop_by_torch() -> nn.Module:
    return TensorDrop()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) * math.exp(-0.1 * self.calls)


@refused(flat, "call")
def counter_in_forward() -> nn.Module:
    return Counter()


class CountingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) * torch.exp(-0.1 * self.calls)


@refused(flat, "buffer")
def counting_buffer() -> nn.Module:
    return CountingBuffer()


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return self.two(h - self.mean)


@refused(flat, "")
def running_mean_of_its_own() -> nn.Module:
    return RunningMean()


class StatisticsBeforeNorm(nn.Module):
    """Reads a norm's statistics as they were before the batch updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), mlp()

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean.clone()
        return self.two(self.norm(self.one(x)) - before)


@right(flat)
def statistics_read_before_their_norm() -> nn.Module:
    return StatisticsBeforeNorm()


class ConstantNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + 0.1 * torch.randn(8))


@refused(flat, "random")
def noise_shared_by_samples() -> nn.Module:
    return ConstantNoise()


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if h.sum() > 0:
            h = -h
        return self.two(h)


@refused(flat, "value")
def branches_on_values() -> nn.Module:
    return ByValue()


class RankConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = 1.0 + torch.distributed.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale)


@refused(flat, "", names_line=False)
def constant_that_differs_by_rank() -> nn.Module:
    return RankConstant()


class PlainTensor(nn.Module):
    """A constant that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = torch.linspace(0.5, 1.5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale)


@right(flat)
def plain_tensor_attribute() -> nn.Module:
    return PlainTensor()


class StoredLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.penalty = mlp(), None

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        self.penalty = out.square().mean(1)
        return out


@refused(flat, "penalty")
def tensor_stored_by_forward() -> nn.Module:
    return StoredLoss()


class HookedTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.1)
        return self.two(h)


@refused(flat, "register_hook")
def tensor_hook_in_forward() -> nn.Module:
    return HookedTensor()


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.two(h[h[:, 0] > 0])


@refused(flat, "")
def rows_chosen_by_value() -> nn.Module:
    return Selected()


class Stochastic(nn.Module):
    """Drops a branch of some samples, as ConvNeXt and ViT do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(8, 8), mlp(8, 8)

    def drop(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 0.6
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        mask = keep + torch.rand(shape, dtype=x.dtype, device=x.device)
        return x.div(keep) * mask.floor_()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.one(x))
        return x + self.drop(self.two(x))


@right(flat, draws=True)
def stochastic_depth() -> nn.Module:
    return Stochastic()


class Experts(nn.Module):
    """A soft mixture: every expert sees every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(mlp(8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,beo->bo", weights, outs)


@right(flat)
def mixture_of_experts() -> nn.Module:
    return Experts()


class Fold(nn.Module):
    """Groups of a convolution that are samples, and inputs that are viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.style = nn.Linear(5, 3)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        count = x.shape[0]
        weight = self.weight[None] * self.style(style).view(count, 1, 3, 1, 1)
        y = functional.conv2d(
            x.view(1, count * 3, 8, 8), weight.view(-1, 3, 3, 3), groups=count
        )
        return self.out(functional.silu(y.view(count, 4, 6, 6)))


@right(
    lambda batch, draw: (
        (
            torch.randn(batch, 3, 8, 8, generator=draw),
            torch.randn(batch, 5, generator=draw),
        ),
        {},
    )
)
def modulated_convolution() -> nn.Module:
    return Fold()


def _filled(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    for i in range(h.shape[1]):
        out[:, i] = h[:, i] * i
    return out


def _normal_rsample(h: Tensor) -> Tensor:
    mean, spread = h.chunk(2, 1)
    return torch.distributions.Normal(mean, spread.exp()).rsample().repeat(1, 2)


def _noised(h: Tensor) -> Tensor:
    level = torch.randint(0, 9, (h.shape[0],)) / 9
    return h * level[:, None] + torch.randn_like(h) * (1 - level[:, None])


APART: dict[str, Any] = {
    "powers": lambda h: h**2 + 2**h + 1 / (h**2 + 1),
    "constant_cast_to_input": lambda h: (
        h + torch.arange(8).to(h) + torch.arange(8).type_as(h) + h.new_tensor([1.0])
    ),
    "empty_and_filled": _filled,
    "normal_log_prob": lambda h: torch.distributions.Normal(0.0, 1.0).log_prob(h),
}
"""Functions that keep samples apart."""

for _name, _function in APART.items():
    CASES[_name] = Case(
        name=_name, make=lambda function=_function: Between(function), data=flat
    )

DRAWING: dict[str, Any] = {
    "normal_rsample": _normal_rsample,
    "gumbel_softmax": lambda h: functional.gumbel_softmax(h, hard=True),
    "random_levels_of_noise": _noised,
}
"""Functions that draw random numbers for each sample."""

for _name, _function in DRAWING.items():
    CASES[_name] = Case(
        name=_name,
        make=lambda function=_function: Between(function),
        data=flat,
        draws=True,
    )


def _write_late_rows(h: Tensor) -> Tensor:
    h = h.clone()
    h[6:] = 0
    return h


BY_PLACE: dict[str, Any] = {
    "many_samples_otherwise": lambda h: h * 2 if h.shape[0] > 64 else h,
    "first_samples_otherwise": lambda h: torch.cat((h[:64] * 2, h[64:])),
    "late_samples_written": _write_late_rows,
}
"""Functions that treat a sample by its place, or by how many there are: rows of a small
batch are equal."""

for _name, _function in BY_PLACE.items():
    CASES[_name] = Case(
        name=_name,
        make=lambda function=_function: Between(function),
        data=flat,
        refused="",
    )


class ComputesAgain(torch.autograd.Function):
    """Runs a module, and again in backward, where it reads the module's parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module, *_: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: Tensor = part(x)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        held = list(ctx.part.parameters())
        with torch.enable_grad():
            to_x, *rest = torch.autograd.grad(ctx.part(x), [x, *held], grad)
        return to_x, None, *rest


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = ComputesAgain.apply(self.first(x), self.part, *self.part.parameters())
        found: Tensor = self.last(h)
        return found


@right(flat)
def gradients_within_a_functions_backward() -> nn.Module:
    return Reversible()


@right(flat)
def squeezed_sample() -> nn.Module:
    return Between(lambda h: h[:, None].squeeze())


# ---------------------------------------------------------- changes between the steps


def _freeze_norms(model: nn.Module, step: int) -> None:
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.train(mode=step < 1)


@right(image, change=_freeze_norms)
def statistics_frozen_later() -> nn.Module:
    return frozen_statistics()


@right(
    flat, draws=True, change=lambda m, step: setattr(m[1], "training", step % 2 == 0)
)
def dropout_switched_between_steps() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))


class Scheduled(nn.Module):
    """Reads a schedule from everywhere that a program may keep it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        _advance(None, 0)  # a rank may have trained another case before
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.kind = kind
        self.epoch, self.weights, self.options = 0, [1.0, 1.0], Options()
        self.mask = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x, self.one.weight, self.one.bias)
        if self.kind == "number":
            h = h * (1 + self.epoch)
        elif self.kind == "branch" and self.epoch > 0:
            h = torch.tanh(h)
        elif self.kind == "list":
            h = h * self.weights[1]
        elif self.kind == "object":
            h = h * self.options.scale
        elif self.kind == "global":
            h = h * EPOCH
        elif self.kind == "tensor":
            h = h * self.mask
        elif self.kind == "class":
            h = h * Options.shared
        return self.two(h)


class Options:
    shared = 1.0

    def __init__(self) -> None:
        self.scale = 1.0


EPOCH = 1
SCALES = [1.0, 1.0]


def scaled_by_global(h: Tensor) -> Tensor:
    return h * EPOCH


def scaled_by_list(h: Tensor) -> Tensor:
    return h * SCALES[1]


def scaled_by_class(h: Tensor) -> Tensor:
    return h * Options.shared


def _closing() -> tuple[Any, Any]:
    scale = 1.0

    def scaled(h: Tensor) -> Tensor:
        return h * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return scaled, change


SCALED_BY_CLOSURE = _closing()
HELPERS = {
    "global": scaled_by_global,
    "list": scaled_by_list,
    "class": scaled_by_class,
    "closure": SCALED_BY_CLOSURE[0],
}


class Helped(nn.Module):
    """Calls a helper, which reads a schedule where the module's own code does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        _advance(None, 0)  # a rank may have trained another case before
        self.one, self.two, self.kind = nn.Linear(8, 8), nn.Linear(8, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.two(HELPERS[self.kind](self.one(x)))


def _advance(model: Any, step: int) -> None:
    global EPOCH
    EPOCH = 1 + step
    SCALES[1] = Options.shared = 1.0 + step
    SCALED_BY_CLOSURE[1](1.0 + step)
    if isinstance(model, Scheduled):
        model.epoch = step
        model.weights[1] = model.options.scale = EPOCH
        model.mask = torch.full((8,), 1.0 + step)


for _name in HELPERS:
    CASES[f"helper_reads_a_{_name}"] = Case(
        name=f"helper_reads_a_{_name}",
        make=lambda kind=_name: Helped(kind),
        data=flat,
        change=_advance,
    )


for _name in ("number", "branch", "list", "object", "global", "tensor"):
    CASES[f"schedule_in_a_{_name}"] = Case(
        name=f"schedule_in_a_{_name}",
        make=lambda kind=_name: Scheduled(kind),
        data=flat,
        change=_advance,
    )


def _hook_once(model: Any, step: int) -> None:
    if step == 1:
        model[1].register_forward_hook(_double)


@refused(flat, "changed after", names_line=False, change=_hook_once)
def hook_of_a_block_added_later() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), mlp(8, 8), nn.Linear(8, 2))


class CountsUntil(nn.Module):
    """A warm-up whose end no capture sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) if self.calls < 100 else 2 * self.body(x)


@refused(flat, "'calls' in each call", names_line=False)
def counter_with_a_late_effect() -> nn.Module:
    return CountsUntil()


@right(flat, shares=("one", "uneven"))
def spectral_norm_on_ranks_without_samples() -> nn.Module:
    return spectral_norm()


@right(image, shares=("one", "uneven"))
def older_spectral_norm_and_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Flatten(),
        nn.utils.spectral_norm(nn.Linear(144, 3)),
    )


class DropPathBlock(nn.Module):
    """Batch norm followed by stochastic depth, as in EfficientNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        if self.training:
            h = h / 0.7 * (torch.rand(len(h), 1, 1, 1) + 0.7).floor()
        return x + h


@right(image, draws=True, shares=("uneven", "one"))
def batch_norm_and_drop_path() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1),
        DropPathBlock(),
        DropPathBlock(),
        nn.Flatten(),
        nn.Linear(256, 3),
    )


class CheckpointedInside(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(8, 8), reentrant
        self.drop = nn.Dropout(0.5)

    def _run(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=self.reentrant)


@refused(
    flat,
    "use_reentrant",
    prepare=lambda m: m[1].register_forward_hook(_double),
)
def reentrant_checkpoint_in_a_hooked_block() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), CheckpointedInside(reentrant=True), nn.Linear(8, 2)
    )


@refused(
    flat,
    "checkpoint",
    prepare=lambda m: m[1].register_forward_hook(_double),
)
def checkpointed_dropout_in_a_hooked_block() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), CheckpointedInside(reentrant=False), nn.Linear(8, 2)
    )


class ByPlace(nn.Module):
    """What a sample gets depends on its place in the batch."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.after(self.change(self.before(x)))
        return h


@refused(flat, "place in the batch")
def masks_late_samples() -> nn.Module:
    return ByPlace(lambda h: h * (torch.arange(h.shape[0]) < 6)[:, None])


@refused(flat, "depends on the number of samples")
def decides_on_the_batch() -> nn.Module:
    return ByPlace(lambda h: h * 2 if h.shape[0] == 9 else h)


def _split_by_heads(h: Tensor) -> Tensor:
    heads = torch.cat(h.split(4, 1), 0)
    return torch.cat((heads * heads.sigmoid()).split(h.shape[0], 0), 1)


@right(flat)
def splits_heads_of_the_batch() -> nn.Module:
    return ByPlace(_split_by_heads)


@right(flat)
def asks_for_a_gradient() -> nn.Module:
    return ByPlace(lambda h: h * h.detach().requires_grad_())


class AsksForInput(nn.Module):
    """The caller may read the input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.requires_grad_())
        return found


@refused(flat, "requires_grad_")
def asks_for_the_inputs_gradient() -> nn.Module:
    return AsksForInput()


@right(flat)
def takes_as_many_as_there_are() -> nn.Module:
    return ByPlace(lambda h: h[: h.shape[0]] + h)


def _picked(h: Tensor) -> Tensor:
    index = h.argmax(1) + torch.arange(h.shape[0]) * h.shape[1]
    return h.reshape(-1)[index][:, None] * h


@right(flat)
def picks_from_flat_rows() -> nn.Module:
    return ByPlace(_picked)


class Changing(nn.Module):
    """Changes what it holds, or the state of the random numbers, in forward."""

    def __init__(self, change: Callable[[Changing, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 5)
        self.target = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.after(self.change(self, self.before(x)))
        return h


def _follow(model: Changing, h: Tensor) -> Tensor:
    pairs = zip(model.before.parameters(), model.target.parameters(), strict=True)
    for p, q in pairs:
        q.data.mul_(0.9).add_(p.data, alpha=0.1)
    return h - model.target(h)


@refused(flat, "writes into the parameter 'target.weight'")
def momentum_encoder_in_forward() -> nn.Module:
    return Changing(_follow)


def _clip(model: Changing, h: Tensor) -> Tensor:
    with torch.no_grad():
        model.before.weight.view(-1).clamp_(-0.2, 0.2)
    return h


@refused(flat, "writes into the parameter 'before.weight'")
def clips_its_weights() -> nn.Module:
    return Changing(_clip)


@refused(
    flat,
    "writes into the parameter '0.before.weight'",
    prepare=lambda m: m[0].register_forward_hook(_double),
)
def clips_its_weights_in_a_hooked_block() -> nn.Module:
    return nn.Sequential(Changing(_clip), nn.Linear(5, 5))


class Decaying(Changing):
    """Has another scale in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.9
        return super().forward(x)


@refused(flat, "replaces, adds or removes its parameter or buffer 'scale'")
def replaces_its_buffer() -> nn.Module:
    return Decaying(lambda _model, h: h)


def _part_of_buffer(model: Changing, h: Tensor) -> Tensor:
    model.scale.view(2, 4)[0].add_(1)
    return h


@refused(flat, "writes into the parameter or buffer")
def writes_a_part_of_its_buffer() -> nn.Module:
    return Changing(_part_of_buffer)


def _seeded(_model: Changing, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.rand_like(h)


@refused(flat, "sets a seed", draws=True)
def seeds_in_forward() -> nn.Module:
    return Changing(_seeded)


def _own_generator(_model: Changing, h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return h + torch.rand(h.shape, generator=generator)


@refused(flat, "generator of its own", draws=True)
def draws_from_its_own_generator() -> nn.Module:
    return Changing(_own_generator)


def _without_positive(_model: Changing, h: Tensor) -> Tensor:
    h = h.clone()
    h[h.sum(1) > 0] = 0
    return h


@right(flat)
def writes_where_a_mask_says() -> nn.Module:
    return Changing(_without_positive)


class Numbers(nn.Module):
    """Layers give masks and whole numbers, through which no gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.before(x)
        mask, best = h.gt(0), h.argmax(1)
        h = torch.tanh(self.after(h))
        return h * best[:, None] + h * mask[:, :4], mask.any(1)


@right(flat)
def masks_and_numbers_between_layers() -> nn.Module:
    return Numbers()


@right(flat)
def masks_and_numbers_twice() -> nn.Module:
    return Chained()


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Numbers(), nn.Linear(4, 8), Numbers()

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.one(x)
        h, other = self.three(self.two(h))
        found: Tensor = h * (mask & other)[:, None]
        return found


# ---------------------------------------------------------------------- Hugging Face


def _transformers() -> Any:
    import transformers

    return transformers


def _quiet(model: Any) -> nn.Module:
    model.config.use_cache = False
    return model.double()


_TEXT = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _ids(batch: int, draw: torch.Generator) -> Inputs:
    return (), {"input_ids": torch.randint(0, 20, (batch, 6), generator=draw)}


def _ids_and_mask(batch: int, draw: torch.Generator) -> Inputs:
    (batched,), _ = masked_tokens(batch, draw)
    return (), {"input_ids": batched["ids"], "attention_mask": batched["mask"].long()}


def _pixels(batch: int, draw: torch.Generator) -> Inputs:
    return (), {"pixel_values": torch.randn(batch, 3, 32, 32, generator=draw)}


@right(_ids)
def hf_bert() -> nn.Module:
    hf = _transformers()
    return _quiet(hf.BertForSequenceClassification(hf.BertConfig(**_TEXT, **_STILL)))


@right(_ids_and_mask)
def hf_bert_with_mask() -> nn.Module:
    return hf_bert()


@right(_ids, draws=True)
def hf_bert_with_dropout() -> nn.Module:
    hf = _transformers()
    return _quiet(
        hf.BertForSequenceClassification(
            hf.BertConfig(**_TEXT, attention_probs_dropout_prob=0.0)
        )
    )


@right(_ids)
def hf_gpt2() -> nn.Module:
    hf = _transformers()
    config = hf.GPT2Config(
        vocab_size=20,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _quiet(hf.GPT2LMHeadModel(config))


@right(_ids)
def hf_gpt2_untied() -> nn.Module:
    hf = _transformers()
    config = hf.GPT2Config(
        vocab_size=20,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return _quiet(hf.GPT2LMHeadModel(config))


@right(_ids)
def hf_llama() -> nn.Module:
    hf = _transformers()
    config = hf.LlamaConfig(**_TEXT, num_key_value_heads=2, use_cache=False)
    return _quiet(hf.LlamaForCausalLM(config))


def _mixtral(experts: str) -> nn.Module:
    hf = _transformers()
    config = hf.MixtralConfig(
        **_TEXT,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        use_cache=False,
    )
    model = _quiet(hf.MixtralForCausalLM(config))
    model.set_experts_implementation(experts)
    return model


@right(_ids)
def hf_mixtral_of_batched_experts() -> nn.Module:
    return _mixtral("batched_mm")


@refused(_ids, "set_experts_implementation('batched_mm')", names_line=False)
def hf_mixtral_of_grouped_experts() -> nn.Module:
    return _mixtral("grouped_mm")


@refused(_ids, "set_experts_implementation('batched_mm')", names_line=False)
def hf_mixtral_of_experts_by_index() -> nn.Module:
    return _mixtral("eager")


@right(_pixels)
def hf_vit() -> nn.Module:
    hf = _transformers()
    text = {k: v for k, v in _TEXT.items() if "vocab" not in k and "max_" not in k}
    config = hf.ViTConfig(**text, **_STILL, image_size=32, patch_size=16)
    return _quiet(hf.ViTForImageClassification(config))


@right(_pixels)
def hf_resnet() -> nn.Module:
    hf = _transformers()
    config = hf.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        hidden_act="silu",
    )
    return _quiet(hf.ResNetForImageClassification(config))


@right(_pixels)
def hf_convnext() -> nn.Module:
    hf = _transformers()
    config = hf.ConvNextConfig(
        hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], num_stages=4
    )
    return _quiet(hf.ConvNextForImageClassification(config))


@right(_pixels, draws=True)
def hf_convnext_with_drop_path() -> nn.Module:
    hf = _transformers()
    config = hf.ConvNextConfig(
        hidden_sizes=[4, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_stages=4,
        drop_path_rate=0.3,
    )
    return _quiet(hf.ConvNextForImageClassification(config))


@right(_pixels)
def hf_mobilevit() -> nn.Module:
    hf = _transformers()
    config = hf.MobileViTConfig(
        image_size=32,
        patch_size=2,
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 8],
        num_attention_heads=2,
        **_STILL,
        classifier_dropout_prob=0.0,
    )
    return _quiet(hf.MobileViTForImageClassification(config))


# ------------------------------------------------- norms and dropouts of the user's own


class TimesTwo(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


class KeepsHalf(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + 1 if self.training else x


class WithPart(nn.Module):
    """A block of which a part is a module of the user's."""

    def __init__(self, first: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = first, part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x))


def _with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _m, _i, out: out)
    return module


def _after_images(block: nn.Module) -> nn.Module:
    return nn.Sequential(block, nn.SiLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


@refused(image, "a forward of its own", copies=False)
def own_batch_norm_in_a_hooked_block() -> nn.Module:
    return _after_images(_with_hook(WithPart(nn.Conv2d(3, 4, 3), TimesTwo(4))))


@refused(image, "a forward of its own", copies=False)
def own_batch_norm_with_a_hook() -> nn.Module:
    return _after_images(WithPart(nn.Conv2d(3, 4, 3), _with_hook(TimesTwo(4))))


@refused(image, "replaces the forward of", copies=False)
def batch_norm_with_a_forward_set_in_a_hooked_block() -> nn.Module:
    norm: Any = nn.BatchNorm2d(4)
    norm.forward = lambda x: nn.BatchNorm2d.forward(norm, x) * 2
    return _after_images(_with_hook(WithPart(nn.Conv2d(3, 4, 3), norm)))


@refused(flat, "a forward of its own", copies=False)
def own_dropout_in_a_hooked_block() -> nn.Module:
    block = _with_hook(WithPart(nn.Linear(8, 6), KeepsHalf(0.3)))
    return nn.Sequential(block, nn.Linear(6, 3))


@right(flat)
def own_dropout_without_hooks() -> nn.Module:
    block = WithPart(nn.Linear(8, 6), KeepsHalf(0.3))
    return nn.Sequential(block, nn.Linear(6, 3))


@right(image)
def torch_batch_norm_in_a_hooked_block() -> nn.Module:
    return _after_images(_with_hook(WithPart(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))))


class DropsWeight(nn.Module):
    """A dropout of a weight of as many rows as a rank may have samples."""

    def __init__(self, rows: int, drop: Any) -> None:
        super().__init__()
        self.one, self.drop = nn.Linear(8, 6), drop
        self.weight = nn.Parameter(torch.randn(rows, 6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.one(x), self.drop(self.weight))


@refused(flat, "the first dimension must be the batch")
def functional_dropout_of_a_weight() -> nn.Module:
    return DropsWeight(3, lambda w: functional.dropout(w, 0.5))


@refused(flat, "the first dimension must be the batch")
def dropout_module_of_a_weight() -> nn.Module:
    return DropsWeight(3, nn.Dropout(0.5))


@refused(flat, "the first dimension must be the batch", copies=False)
def dropout_module_of_a_weight_in_a_hooked_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), _with_hook(DropsWeight(3, nn.Dropout(0.5))))


@right(flat, draws=True)
def dropout_of_turned_rows() -> nn.Module:
    return Between(lambda h: functional.dropout(h.t(), 0.5).t())


class ClipsGradient(torch.autograd.Function):
    """Limits the norm of all rows' gradients, where it is large."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * (500 / grads[0].norm()).clamp(max=1)


class DoublesForMany(torch.autograd.Function):
    """Gives other gradients where there are many rows."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 2 if len(grads[0]) > 1200 else grads[0]


@refused(flat, "it mixes samples in backward")
def clips_large_gradients() -> nn.Module:
    return Between(lambda h: ClipsGradient.apply(h))


@refused(flat, "it mixes samples in backward")
def other_gradients_for_many_rows() -> nn.Module:
    return Between(lambda h: DoublesForMany.apply(h))


def _clip_large(_module: nn.Module, grads: Any, _outputs: Any) -> Any:
    return (grads[0] * (500 / grads[0].norm()).clamp(max=1),)


@refused(
    flat,
    "it mixes samples in backward",
    names_line=False,
    prepare=lambda m: m[1].register_full_backward_hook(_clip_large),
)
def backward_hook_that_clips_large_gradients() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _capacity(h: Tensor) -> Tensor:
    """Keep the first words of those chosen in the order of the flattened batch."""
    flat_rows = h.reshape(-1, 2)
    chosen = (flat_rows[:, :1] > 0).long()
    kept = (chosen.cumsum(0) <= 100_000).to(h.dtype)
    return (flat_rows * kept).view_as(h)


@refused(flat, "each sample depends on those before it")
def capacity_of_a_flattened_batch() -> nn.Module:
    return Between(_capacity)


@refused(flat, "each sample depends on those before it")
def capacity_of_a_batch_in_a_hooked_block() -> nn.Module:
    return nn.Sequential(_with_hook(Between(_capacity)), nn.Linear(3, 2))


@right(flat)
def running_sum_within_samples() -> nn.Module:
    return Between(lambda h: h.cumsum(1) + h.view(-1, 2, 4).cumsum(1).flatten(1))


class GivesComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight)
        return torch.fft.rfft(self.one(x), dim=-1) * weight


@right(flat)
def complex_output() -> nn.Module:
    return GivesComplex()


class Conjugated(nn.Module):
    """Layers pass on tensors whose memory is only marked as conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(6, 6, dtype=torch.complex128) for _ in range(5)
        )
        self.register_buffer("phase", torch.randn(6, dtype=torch.complex128).conj())
        self.shift = torch.randn(6, dtype=torch.complex128).conj()
        self.scale = nn.Parameter(torch.randn(6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = (part(x) * self.phase + self.shift).tanh().conj()
        return torch.view_as_real((x * self.scale.conj()).resolve_conj())


def conjugated(batch: int, draw: torch.Generator) -> Inputs:
    return (torch.randn(batch, 6, dtype=torch.complex128, generator=draw).conj(),), {}


@right(conjugated)
def conjugated_between_layers() -> nn.Module:
    return Conjugated()


@right(conjugated, shares=("one", "even"))
def conjugated_between_layers_on_one_share() -> nn.Module:
    return Conjugated()


class HasScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.two = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@refused(flat, "torch.jit.script", copies=False)
def scripted_module() -> nn.Module:
    return HasScripted()


class GivesDictionary(nn.Module):
    """The first of a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.hidden(x))
        return {"hidden": h, "more": (self.mean(h), h.argmax(1))}


class TakesDictionary(nn.Module):
    """The second of a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean = nn.Linear(6, 5), nn.Linear(3, 5)

    def forward(self, given: dict[str, Any]) -> dict[str, Tensor]:
        mean, best = given["more"]
        return {"out": self.hidden(given["hidden"]) + self.mean(mean) * best[:, None]}


__all__ = ["CASES", "Case", "contextlib"]


class Guarded(nn.Module):
    """A linear layer between two others, with a norm beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mean", torch.zeros(5))

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.tanh(self.first(x))))


@refused(vectors(6), "is not used, but it updates the module's buffers")
def norm_whose_output_is_not_used() -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            self.norm(h)
            return h

    return Model()


@refused(vectors(6), "is not used, but it updates the module's buffers")
def norm_used_in_evaluation_alone() -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            z = self.norm(h)
            return h if self.training else z

    return Model()


@refused(vectors(6), "writes into the buffer 'mean' of another")
def hook_that_writes_another_modules_buffer() -> nn.Module:
    model = Guarded()

    def note(_module: Any, _args: Any, given: Tensor) -> None:
        with torch.no_grad():
            model.mean.mul_(0.9).add_(given.mean(0), alpha=0.1)

    model.first.register_forward_hook(note)
    return model


@refused(vectors(6), "update its statistics twice")
def norm_in_a_reentrant_checkpoint() -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            return checkpoint(self.norm, h, use_reentrant=True)

    return Model()


@right(vectors(6))
def module_named_self() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self = nn.Linear(6, 6)
            self.out = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.self(torch.tanh(self.out(self.self(x)))))

    return Model()


def spectral_norm_in_a_checkpoint(spectral: Any, *, use_reentrant: bool) -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            return checkpoint(self.norm, h, use_reentrant=use_reentrant)

    model = Model()
    model.norm = spectral(nn.Linear(5, 5))
    return model


@refused(vectors(6), "it would update '_u' twice")
def spectral_norm_in_a_plain_checkpoint() -> nn.Module:
    return spectral_norm_in_a_checkpoint(
        nn.utils.parametrizations.spectral_norm, use_reentrant=False
    )


@refused(vectors(6), "it would update 'weight_u' twice")
def spectral_norm_in_a_reentrant_checkpoint() -> nn.Module:
    return spectral_norm_in_a_checkpoint(nn.utils.spectral_norm, use_reentrant=True)


@refused(vectors(6), "share memory", names_line=False)
def parameters_that_share_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.data[:4])
    return model


@right(vectors(6))
def batch_norm_function_with_fixed_statistics() -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            return functional.batch_norm(
                h, self.mean, self.mean + 2, self.norm.weight, self.norm.bias
            )

    return Model()


@right(vectors(6))
def weight_standardized_by_batch_norm() -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            weight = functional.batch_norm(
                self.second.weight.reshape(1, 4, -1), None, None, training=True
            )
            return h + functional.linear(h, weight.reshape(4, 5)).sum(1, keepdim=True)

    return Model()


@refused(vectors(6), "call the model once before", names_line=False)
def hooks_installed_in_the_first_forward() -> nn.Module:
    class Model(Guarded):
        installed = False

        def between(self, h: Tensor) -> Tensor:
            if not self.installed:
                self.installed = True
                self.second.register_forward_hook(lambda _m, _a, given: given * 2)
            return h

    return Model()


@right(vectors(6))
def constants_cached_in_a_dictionary() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Tensor] = {}

        def between(self, h: Tensor) -> Tensor:
            if "one" not in self.cache:
                self.cache["one"] = torch.arange(5.0).to(h)
            return h * self.cache["one"]

    return Model()


@refused(vectors(6), "keeps a tensor in its attribute or variable 'cache'")
def cache_in_a_dictionary() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Tensor] = {}

        def between(self, h: Tensor) -> Tensor:
            if "one" not in self.cache:
                self.cache["one"] = self.norm.weight.detach().cos()
            return h * self.cache["one"]

    return Model()


@right(vectors(6))
def a_detached_branch() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Linear(5, 5)

        def between(self, h: Tensor) -> Tensor:
            return h + self.norm(self.aside(torch.tanh(h))).detach()

    return Model()


@right(vectors(6))
def parameters_behind_an_index_alone() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.choice = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
            self.table = nn.Embedding(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table(self.choice(x).argmax(1))

    return Model()


@right(vectors(6))
def outputs_that_no_gradient_reaches() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            with torch.no_grad():
                aside = self.aside(x)
            return {
                "out": super().forward(x),
                "index": self.aside(x) > 0,
                "aside": aside,
            }

    return Model()


@right(vectors(6))
def a_norm_without_weights_that_is_called_twice() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5, affine=False)
            self.inner = nn.Linear(5, 5)

        def between(self, h: Tensor) -> Tensor:
            return self.norm(self.inner(h)) + torch.sigmoid(self.norm(h))

    return Model()


@right(vectors(6))
def functional_call_of_a_part() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.gate = nn.Parameter(torch.rand(5, 1))

        def between(self, h: Tensor) -> Tensor:
            weight = self.inner.weight * self.gate
            return torch.func.functional_call(self.inner, {"weight": weight}, (h,))

    return Model()


@refused(vectors(6), "a name that torch.fx reserves")
def a_part_with_a_reserved_name() -> nn.Module:
    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__()
            self.graph = nn.Linear(5, 5)

        def between(self, h: Tensor) -> Tensor:
            return self.graph(h)

    return Model()


@right(vectors(6))
def writes_through_views() -> nn.Module:
    class Model(Guarded):
        def between(self, h: Tensor) -> Tensor:
            made = torch.empty_like(h)
            made[:, :2].copy_(h[:, 3:])
            made[:, 2:].copy_(self.norm(h)[:, :3])
            made[:, 0] += 1.0
            return made

    return Model()


@right(vectors(6), shares=("uneven", "uneven"))
def norms_before_other_tokens() -> nn.Module:
    """PyTorch's backward is wrong for the last rank's only row, see known issues."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, 5 * 8), nn.Linear(40, 2)
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
            self.train()

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norms[1].eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.embed(x).view(-1, 5, 8)
            for conv, norm in zip(self.convs, self.norms, strict=True):
                image = tokens[:, 1:].permute(0, 2, 1).view(-1, 8, 2, 2)
                rest = norm(conv(image)).view(-1, 8, 4).permute(0, 2, 1)
                tokens = torch.cat((tokens[:, :1], rest), 1)
            return self.head(tokens.flatten(1))

    return Model()


class NormThenActivation(nn.BatchNorm2d):
    """Repeats torch's forward, and calls an activation, as timm's norms do."""

    def __init__(self, channels: int, **more: Any) -> None:
        super().__init__(channels, **more)
        self.activation = nn.ReLU(inplace=True)
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            0.1 if self.momentum is None else self.momentum,
            self.eps,
        )
        statistic = self.running_mean.view(-1, 1, 1) * self.num_batches_tracked
        return self.activation(x + self.shift + 0.1 * statistic)


@right(image)
def batch_norms_that_repeat_torchs_forward() -> nn.Module:
    norm = NormThenActivation(4, momentum=0.3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        norm,
        nn.Conv2d(4, 4, 3, padding=1),
        norm,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@refused(image, "writes into the parameter or buffer")
def batch_norm_with_a_momentum_of_its_own() -> nn.Module:
    norm = NormThenActivation(4, momentum=None)
    return _after_images(WithPart(nn.Conv2d(3, 4, 3), norm))
