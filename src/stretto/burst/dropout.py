"""Random numbers that depend on a sample, not on the rank that computes it.

A sample's mask comes from a generator seeded by the model's seed, the step, the module,
which of its calls this is, and the sample's number in the global batch. So every plan
and number of ranks drops the same values, and so does one process. The mask differs
from that of ``torch.manual_seed``.

# Note [A repeated state]
A program that sets its generator to an earlier state and runs forward again, such as
one that caches gradients, must get the earlier masks. So a forward that drops draws one
number from each rank's default generator, which also moves the generator on. If all
ranks draw the numbers of an earlier forward, its step is used again. Generators may
differ by rank: a forward is repeated if every rank repeats its own state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, fx, nn

from stretto.burst.boundary import in_checkpoint
from stretto.burst.tracing.torch_modules import DROPS_ELEMENTS, Dropout, drops_rows
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.sim.sample_layout import Numbers


_ALPHA = -1.7580993408473766
"""Value to which self-normalizing networks drop (Klambauer et al., 2017)."""

_MIN_OFFSET = 4
"""Step of the offset of a CUDA generator."""

_KEPT = 2**16
"""Number of forwards that a repeated state of the generator may repeat."""


@final
class Draws:
    """State from which the random numbers of a forward are derived."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.step = 0
        """Number of forwards so far that train or draw."""
        self._device = device
        self._repeated = 0
        """The step whose numbers the running forward draws."""
        self._steps: OrderedDict[int, int] = OrderedDict()
        """By what ranks drew from their generators, see Note [A repeated state]."""
        self.samples: Numbers | None = None
        """The numbers of the running layer's samples on this rank."""
        self.layer = ""
        """The name of the running layer."""
        self._calls: Counter[str] = Counter()
        """How often each dropout module has been called in the running layer."""
        self.is_still = False
        """Whether dropout modules run unchanged, for a comparison."""

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Let dropout modules run unchanged and count no step."""
        step, self.is_still = self.step, True
        try:
            yield
        finally:
            self.step, self.is_still = step, False

    def next_number(self, *, is_drawing: bool) -> int:
        """Return this rank's number of the next forward, for `follow`.

        Args:
            is_drawing: whether the forward draws; the same on all ranks.
        """
        if not is_drawing or self.is_still:
            return 0
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index]
            offset = generator.get_offset()
            generator.set_offset(offset + _MIN_OFFSET)
            return hash((generator.initial_seed(), offset)) | 1
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        return int(drawn) or 1

    def follow(self, numbers: Sequence[int]) -> None:
        """Begin a forward with the numbers of all ranks; choose its step."""
        self._repeated = self.step
        if not any(numbers):
            return
        state = hash(tuple(numbers))
        self._repeated = self._steps.pop(state, self.step)
        self._steps[state] = self._repeated
        if len(self._steps) > _KEPT:
            self._steps.popitem(last=False)

    def begin(self, layer: str, samples: Numbers) -> None:
        """Begin a layer's computation on these of this rank's samples."""
        self.layer, self.samples = layer, samples
        self._calls.clear()

    def next_call(self, name: str) -> int:
        """Count a call of a dropout module and return its number in this layer."""
        self._calls[name] += 1
        return self._calls[name] - 1

    def seeds(self, name: str) -> list[int]:
        """Return one seed for each sample of the running layer."""
        assert self.samples is not None  # noqa: S101
        text = f"{self.seed}/{self._repeated}/{name}"
        base = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        # Generators on the CPU take 32 bits; an odd factor gives each sample its own.
        return [
            (base + 0x9E3779B1 * int(number)) & 0xFFFFFFFF for number in self.samples
        ]


@final
class DropoutDraw:
    """Replaces the ``forward`` of one dropout module."""

    def __init__(self, module: Any, name: str, draws: Draws) -> None:
        self.module = module
        self.name = name
        self.draws = draws
        self.layers: dict[str, int] = {}
        """The layers that call the module, numbered in the order of the forward."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the module's output, with each sample's own mask."""
        if self.draws.is_still:
            made: Tensor = type(self.module).forward(self.module, x)
            return made
        p = float(self.module.p)
        if not self.module.training or p == 0:
            return x
        if in_checkpoint():  # else refused when the model was captured
            raise StrettoError(
                f"{self.name!r} is in a checkpoint, which would draw other masks in "
                "backward, and its p was 0 when the model was captured: move it out of "
                "the checkpoint"
            )
        # Each call has masks of its own, whichever layers the calls are in.
        layer = self.layers[self.draws.layer]
        call = self.draws.next_call(self.name)
        seeds = self.draws.seeds(f"{self.name}/{layer}/{call}")
        if len(seeds) != x.shape[0]:
            raise StrettoError(
                f"{self.name!r} drops from a tensor of {x.shape[0]} rows where its "
                f"layer has {len(seeds)} samples: samples' masks can't be separated. "
                "Put the dropout where the first dimension is the batch"
            )
        kept = self._kept(x, 1.0 - p, seeds)
        if isinstance(self.module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            if p == 1.0:
                return x * 0
            scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
            mixed: Tensor = (x * kept + _ALPHA * (1 - kept) - _ALPHA * p) * scale
            return mixed
        out: Tensor = x * (kept if p == 1.0 else kept / (1.0 - p))
        return out

    def _kept(self, x: Tensor, chance: float, seeds: list[int]) -> Tensor:
        """Return 1 where a value is kept; one for each value, channel or row."""
        shape = x.shape
        if not isinstance(self.module, DROPS_ELEMENTS):
            sides = 1 if drops_rows(self.module, x.dim()) else 2
            shape = torch.Size((*x.shape[:sides], *(1 for _ in x.shape[sides:])))
        kept = torch.empty(shape, dtype=x.dtype, device=x.device)
        generator = torch.Generator(device=x.device)
        for row, seed in zip(kept, seeds, strict=True):
            row.bernoulli_(chance, generator=generator.manual_seed(seed))
        return kept


def dropouts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the dropout modules within a layer."""
    for name, part in module.named_modules():
        if isinstance(part, Dropout):
            yield name, part


def draws_otherwise(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers other than by dropout modules."""
    return isinstance(module, fx.GraphModule) and any(
        node.meta.get("draws") for node in module.graph.nodes
    )


def one_by_one(
    module: nn.Module, inputs: list[Tensor], name: str, draws: Draws
) -> Tensor:
    """Return a layer's output, with each sample computed alone under its own seed.

    Slow, but correct for anything the layer draws: for attention with inner dropout.
    """
    device = inputs[0].device
    devices = [device] if device.type == "cuda" else []
    samples, found = draws.samples, []
    assert samples is not None  # noqa: S101
    with torch.random.fork_rng(devices=devices):
        for row, seed in enumerate(draws.seeds(name)):
            torch.manual_seed(seed)
            draws.begin(name, samples[row : row + 1])  # for its dropout modules
            found.append(module(*(x[row : row + 1] for x in inputs)))
    draws.begin(name, samples)
    return torch.cat(found)
