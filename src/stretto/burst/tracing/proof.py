"""Check captured layers by computing: do they equal the model, and keep rows apart?

# Note [What is checked]
Random inputs and perturbed parameters are used, twice with other numbers. The layers
one after another must return the outputs and gradients of the module itself. Each layer
on some of the rows, in another order, and on the rest must return these rows of its
output and of its inputs' gradients, with parameters' gradients that add up. So must
each operation in it, because what it mixes may meet a factor that is zero now: that of
a schedule, a counter, or a random mask. Each is also run with other values than the
layer's, for which what it mixes may be zero: see ``other_values``. A backward that is
not torch's own is also checked with large and small gradients, with those of a sample
that are not finite, and with many rows. Parameters are perturbed because an effect may
vanish behind a zero at initialization. Batch norms use fixed statistics for the second
check, and random numbers are replaced by constants: the executor joins the first over
ranks and draws the second by sample. Since the executor computes with other tensors
than the module's own, the module is also run once with its own, which get the perturbed
values: its code may compare them with one that is held elsewhere, and decide by that
what it returns, or only what gradients it gives.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from stretto.burst.hooks import HOOKS, HOOKS_OF_ALL, code_of, place_of
from stretto.burst.tracing.around import around_now
from stretto.burst.tracing.backward_reads import BackwardReads
from stretto.burst.tracing.behavior import behavior_of
from stretto.burst.tracing.caches import keep_attributes
from stretto.burst.tracing.custom_backward import own_backwards_in, with_own_backward
from stretto.burst.tracing.dropout_rows import by_sample, not_outside
from stretto.burst.tracing.equal_layers import EqualLayers, kinds_of
from stretto.burst.tracing.failing_backward import line_in_backward
from stretto.burst.tracing.fakes import swapped
from stretto.burst.tracing.gradient_rounding import GradientRounding, largest_gradient
from stretto.burst.tracing.graph_reach import GraphReach
from stretto.burst.tracing.layer_runs import (
    Twins,
    as_real,
    edges_of,
    fixed_norms,
    fresh_buffers,
    gradients_of,
    gradients_of_layer,
    graph_of,
    has_gradient,
    largest_of,
    leaf_of,
    lent_values,
    run_layer,
    trace_layer,
    twin_of,
    without_hooks,
)
from stretto.burst.tracing.layers import INPUT
from stretto.burst.tracing.other_values import other_values
from stretto.burst.tracing.own_rows import OtherRows
from stretto.burst.tracing.packing import tensors_in
from stretto.burst.tracing.proven import Proven
from stretto.burst.tracing.questions import (
    Questions,
    collectives_refused,
    seeds_refused,
)
from stretto.burst.tracing.reads import may_return
from stretto.burst.tracing.recordings import OTHER_TYPE, is_of_types
from stretto.burst.tracing.replaced import replaced_in
from stretto.burst.tracing.sample_positions import source_line_of
from stretto.burst.tracing.source_lines import line_of_forward, source_line_in
from stretto.burst.tracing.torch_modules import BatchNorm
from stretto.burst.tracing.trial import (
    VALUES,
    ConstantDraws,
    RandomInputs,
    RecordedResults,
    tolerance_of,
    without_inner_dropout,
)
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stretto.burst.tracing.layers import LayerGraph, LayerNode

_SOME = (3, 0, 1, 4)
_REST = (2,)
"""Rows in an order that no flip or rotation of the rows maps onto itself."""

_ROWS = len(_SOME) + len(_REST)
_EVERY = tuple(range(_ROWS))

_MANY_ROWS, _MAX_ROWS, _MANY_NUMBERS = 13, 1009, 1 << 16
_MAX_ROWS_BACK = 4099
"""Limits on the rows of the check with many of them. Tensors of small rows get enough
rows to hold about ``_MANY_NUMBERS`` numbers."""

_SCALES = (1e4, 1e-4)
"""Scales of gradients, because a backward may treat large or small ones differently."""

_NOISES = (1.0, 0.1, 0.0)
"""Sizes of perturbations, relative to the usual; smaller ones where it gives NaN."""

_Whole = tuple[Tensor, list[Tensor | None] | None]
"""The module's output, and its parameters' gradients if they were computed."""

_Found = tuple[Tensor, list[Tensor | None], dict[int, Tensor]]
"""A layer's output, and gradients of its inputs and of its parameters."""


def require_equal(
    graph: LayerGraph,
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> tuple[frozenset[str], list[GraphReach]]:
    """Check captured layers against the module, and that they keep samples apart.

    Returns:
        Names of parameters that get no gradient at all, because a backward that is not
        torch's own returns ``None``; and for each of several outputs the parameters
        that the module's own graph reaches.

    Raises:
        SpecError: naming the line from which they differ.
    """
    examples = graph.arguments.tensors(example_inputs, dict(kwargs or {}))
    device = examples[0].device
    devices = [device] if device.type == "cuda" else []
    mixed: list[SpecError] = []
    missing: list[frozenset[str]] = []
    reached: list[GraphReach] = []
    reads, around = None, around_now()
    own_backward = with_own_backward(graph.nodes)
    if graph.ambient.grad and own_backward:
        reads = BackwardReads(module)
    replaced = _owned_by(module) - graph.held_elsewhere - graph.decided
    kinds = kinds_of(graph.nodes, replaced, own_backward)
    check_with = partial(_checked, graph, module, examples, reads, kinds, own_backward)
    with (
        torch.random.fork_rng(devices=devices),
        keep_attributes(module),
        seeds_refused(),
        collectives_refused(),
    ):
        for seed in (1, 2):
            found, check = check_with(seed)
            missing.append(check.missing)
            pairs = zip(check.reached, reached or check.reached, strict=True)
            reached = [one.joined(before) for one, before in pairs]
            if found is None:
                break
            mixed.append(found)
        behavior = behavior_of(graph, module, examples)
    if len(mixed) == 2:
        raise mixed[0]
    changing = graph.changed_hooks()
    for name, hook in changing.items():
        if may_return(code_of(hook)):
            raise SpecError(
                f"{place_of(hook)}{name} changes its own state in each call, so what "
                "it returns may change at any time: change it in the training loop, "
                "between steps"
            )
    watch, active = (reads.watch(), reads.active) if reads is not None else (None, ())
    graph.note_proven(Proven(module, watch, active, changing, around, behavior))
    return frozenset.intersection(*missing), reached


def run_module(
    graph: LayerGraph, module: nn.Module, examples: Sequence[Tensor]
) -> None:
    """Run a module's forward and backward on random rows, as a check does.

    Raises:
        Exception: the module's own, if it can't compute with any of the values.
    """
    device = examples[0].device
    devices = [device] if device.type == "cuda" else []
    first: Exception | None = None
    with (
        torch.random.fork_rng(devices=devices),
        keep_attributes(module),
        graph.caches_restored(),
    ):
        for noise in _NOISES:
            numbers = RandomInputs(1, noise=noise, values=graph.results.trial_values)
            try:
                _Check(graph, module, list(examples), numbers, None).run_module()
            except StrettoError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's code
                first = first or error
                continue
            return
    assert first is not None  # noqa: S101
    raise first


def _checked(
    graph: LayerGraph,
    module: nn.Module,
    examples: list[Tensor],
    reads: BackwardReads | None,
    kinds: Mapping[str, Hashable],
    own_backward: frozenset[str],
    seed: int,
) -> tuple[SpecError | None, _Check]:
    """Check with values that the model can compute with, if any.

    Perturbed parameters may give NaN, which would hide everything, and an input may
    hold values for which other columns have no place, or that depend on each other.
    """
    first: Exception | None = None
    blind: _Check | None = None
    for noise, values in itertools.product(_NOISES, VALUES):
        numbers = RandomInputs(seed, noise=noise, values=values)
        check = _Check(graph, module, examples, numbers, reads, kinds, own_backward)
        try:
            with graph.caches_restored():
                found = check.run()
                graph.note_caches()
        except OtherRows as error:
            first = first or error
            continue
        except SpecError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code
            first = first or error
            continue
        if found is not None or not check.hidden:
            graph.results.trial_values = values
            return found, check
        blind = check
    if blind is not None:
        if blind.is_blind:
            raise SpecError(
                f"{blind.hidden} for random rows like the example's, "
                f"so the layers of {graph.name} can't be checked: give an example "
                "of usual values"
            )
        return None, blind
    assert first is not None  # noqa: S101
    if isinstance(first, OtherRows):
        raise first
    text = (str(first).splitlines() or [""])[0]
    line = source_line_in(first, "")
    if not line:  # in backward, unless the user's code is in the trace
        line = line_in_backward(partial(run_module, graph, module, examples))
        if line:
            text = text.partition(" Hint: ")[0]
            raise SpecError(
                f"{line}: backward fails for random rows like the example's "
                f"({type(first).__name__}: {text}), so the layers of {graph.name} "
                "can't be checked. Don't change a tensor in place whose value an "
                "operation before needs in backward (write h = h.clone() before it), "
                "and use operations that have a backward"
            ) from first
    where = f"{line}: " if line else line_of_forward(module) or f"{graph.name}: "
    way = (
        f"Forward must take 1 to {_ROWS} samples of values like the example's: give an "
        "example of several different rows, as in training"
    )
    if "only supports boolean masks" in text:
        way = "Give a mask of type bool, such as mask.bool()"
    elif is_of_types(first):
        way = OTHER_TYPE
    raise SpecError(
        f"{where}computing with random rows like the "
        f"example's fails ({type(first).__name__}: {text}), so the layers of "
        f"{graph.name} can't be checked. {way}"
    ) from first


def _owned_by(module: nn.Module) -> frozenset[int]:
    return frozenset(id(x) for x in (*module.parameters(), *module.buffers()))


@final
class _Check:
    def __init__(
        self,
        graph: LayerGraph,
        module: nn.Module,
        examples: list[Tensor],
        numbers: RandomInputs,
        reads: BackwardReads | None,
        kinds: Mapping[str, Hashable] | None = None,
        own_backward: frozenset[str] = frozenset(),
    ) -> None:
        self._graph, self._module = graph, module
        self._reads = reads
        # Parameters that are as in the program may be zeros.
        self._kinds = kinds if kinds and numbers.perturbs else {}
        self._own_backward = own_backward
        self._examples = examples
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        """The module's own tensors by the id of those with perturbed values."""
        self._questions = Questions(examples[0].device)
        self._numbers = numbers
        self.hidden = ""
        """A layer with NaN among its values or gradients, which hide differences; if it
        has no others, the line that gives them, and what it gives."""
        self.is_blind = False
        """Whether a layer gives nothing but NaN."""
        self._is_coarse = graph.uses_half
        # Tensors from elsewhere are read by the module itself as they are.
        self._owned = _owned_by(module)
        self._held_elsewhere = graph.held_elsewhere
        self._known: dict[str, _Found] = {}
        self._cotangent: Tensor | None = None
        self._needing: set[str] = set()
        """Layers whose output needs a gradient."""
        self.missing: frozenset[str] = frozenset()
        """Names of the parameters that got no gradient from the module itself."""
        self.reached: list[GraphReach] = []
        """For each of several outputs, the parameters that the module's graph has."""

    def _near(
        self,
        found: Tensor,
        wanted: Tensor,
        largest: float | None = None,
        rounding: float = 0.0,
    ) -> bool:
        """Return whether values are equal up to rounding, relative to the largest."""
        found, wanted = found.detach(), wanted.detach()
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return False
        if found.is_complex():
            found, wanted = as_real(found), as_real(wanted)
        if torch.equal(found, wanted):
            return True
        if not found.is_floating_point():
            return False
        scale = max(largest_of(wanted), 0.0 if largest is None else largest)
        limit = tolerance_of(self._graph.precision_of(found.dtype))
        limit = max(limit * scale, rounding) or 1e-30
        return bool(torch.allclose(found, wanted, rtol=0.0, atol=limit, equal_nan=True))

    def _near_gradient(
        self,
        found: Tensor,
        wanted: Tensor,
        largest: float | None,
        rounding: GradientRounding,
        times: int = 1,
    ) -> bool:
        """Return whether gradients are equal up to the rounding of a layer."""
        return self._near(found, wanted, largest, times * rounding.usual) or self._near(
            found, wanted, largest, times * rounding.measured
        )

    def run(self) -> SpecError | None:
        """Return the error if samples are mixed."""
        parts: dict[int, tuple[str, nn.Module]] = {}
        for name, part in self._module.named_modules():
            parts[id(part)] = (name, part)
        for node in self._graph.nodes:
            for name, part in node.module.named_modules():
                parts.setdefault(id(part), (name, part))
        with (
            swapped(parts.values(), self._perturbed),
            without_inner_dropout(self._module),
            torch.set_grad_enabled(self._graph.ambient.grad),
        ):
            packed = self._inputs()
            with self._questions.answered():
                wanted, whole = self._whole(packed)
                own = self._with_own_tensors(packed) if self._numbers.is_first else None
            with self._observed(part for _, part in parts.values()):
                values, grads, cotangents = self._layers(packed)
            if self._reads is not None:
                self._reads.require_unchanged()
            self._compare(packed, (wanted, values[self._graph.output]), whole, grads)
            self._require_same(packed, own, (wanted, whole))
            self._find_hidden(packed, values, cotangents)
            with fixed_norms(parts.values()):
                return self._rows(values, cotangents)

    def _observed(self, parts: Iterable[nn.Module]) -> AbstractContextManager[None]:
        if self._reads is None:
            return contextlib.nullcontext()
        return self._reads.observed(parts)

    def _around_noted(self) -> AbstractContextManager[None]:
        """Record what modes and hooks around forward read."""
        if self._reads is None or not around_now():
            return contextlib.nullcontext()
        return self._reads.noted_around()

    def _noted(self, output: Tensor) -> AbstractContextManager[None]:
        if self._reads is None:
            return contextlib.nullcontext()
        return self._reads.noted(output)

    def _find_hidden(
        self, packed: Tensor, values: dict[str, Tensor], cotangents: dict[str, Tensor]
    ) -> None:
        blind = ""
        for node in self._graph.nodes:
            needed = cotangents if node.name in self._needing else {}
            for found in (values.get(node.name), needed.get(node.name)):
                if found is None or not found.numel() or not has_gradient(found):
                    continue
                nan = found.isnan()
                if bool(nan.any()):
                    self.hidden = self.hidden or node.name
                    if bool(nan.all()):
                        self.is_blind = True
                        blind = blind or self._first_nan(node, values)
        if self.is_blind:
            line = blind or self._first_nan_back(packed)
            what = "NaN" if blind else "gradients of NaN"
            self.hidden = f"{line}: gives only {what}"

    def _first_nan(self, node: LayerNode, values: dict[str, Tensor]) -> str:
        """Return the line of a layer's first operation that gives NaN, if one does."""
        for op, value in trace_layer(node, values, _EVERY).items():
            if not isinstance(value, Tensor) or not has_gradient(value):
                continue
            if op.meta.get("place") and bool(value.isnan().any()):
                return source_line_of(op)
        return ""

    def _first_nan_back(self, packed: Tensor) -> str:
        """Return the line of the first operation whose backward gives NaN."""
        results = RecordedResults()
        with fresh_buffers(self._module):
            self._again(packed, results)
        for one in reversed(results.found):
            if one.grad is not None and bool(one.grad.isnan().any()):
                return results.line_reading(one)
        return line_of_forward(self._module).removesuffix(": ") or self._graph.name

    def _perturbed(self, tensor: Tensor) -> Tensor:
        made = self._made_of(tensor)
        if id(tensor) in self._owned:
            self._own[id(made)] = tensor, made
        return made

    def _made_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._held_elsewhere:
            return tensor
        with torch.no_grad():
            made = tensor.detach().clone()
            if not has_gradient(made) or id(tensor) not in self._owned:
                pass
            elif id(tensor) in self._graph.decided:
                pass  # forward would decide otherwise
            elif isinstance(tensor, nn.Parameter):
                made += self._numbers.noise_for(made)
            else:
                made = self._numbers.other_buffer(made)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def _inputs(self) -> Tensor:
        examples = [example.detach() for example in self._examples]
        rows = self._numbers.rows(examples, _ROWS)
        return self._graph.arguments.packing.pack(rows)

    # The model and its layers.

    def run_module(self) -> None:
        """Run forward and backward of the module alone."""
        with (
            swapped(self._module.named_modules(), self._perturbed),
            without_inner_dropout(self._module),
            torch.enable_grad(),
            fresh_buffers(self._module),
            ConstantDraws(),
        ):
            args, kwargs = self._graph.arguments.unpack(self._inputs())
            leaves = pytree.tree_leaves(self._module.forward(*args, **kwargs))
            outputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            grads = [self._numbers.normal(x.shape, x) for x in outputs]
            torch.autograd.backward(outputs, grads)

    def _whole(self, packed: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        args, kwargs = self._graph.arguments.unpack(packed)
        with fresh_buffers(self._module), ConstantDraws():
            with self._around_noted():
                output = self._module.forward(*args, **kwargs)
            self._note_reached(tensors_in(output))
            wanted = self._graph.results.packed(output, len(packed))
            parameters = self._trained()
            if not wanted.requires_grad:
                return wanted, [None for _ in parameters]
            self._cotangent = self._cotangent_of(wanted)
            with self._noted(wanted):
                grads = gradients_of(wanted, self._cotangent, parameters)
        return wanted, grads

    def _note_reached(self, outputs: list[Tensor]) -> None:
        if len(outputs) > 1:
            names = {id(p): name for name, p in self._module.named_parameters()}
            self.reached = [GraphReach.of(output, names) for output in outputs]

    def _with_own_tensors(
        self, packed: Tensor, around: RecordedResults | None = None
    ) -> _Whole | None:
        """Return the module's results with its own tensors, lent the perturbed values.

        None if a tensor's type can't be lent values.
        """

        def own_of(made: Tensor) -> Tensor:
            return self._own[id(made)][0] if id(made) in self._own else made

        with (
            swapped(self._module.named_modules(), own_of),
            lent_values(self._own.values()) as is_lent,
            without_hooks(self._module.parameters()),
        ):
            return self._again(packed, around) if is_lent else None

    def _again(self, packed: Tensor, around: RecordedResults | None = None) -> _Whole:
        """Return the module's results; what it changes is restored."""
        devices = [packed.device] if packed.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            keep_attributes(self._module),
            self._graph.caches_restored(),
            ConstantDraws(),
        ):
            args, kwargs = self._graph.arguments.unpack(packed)
            with around or contextlib.nullcontext():
                output = self._module.forward(*args, **kwargs)
            found = self._graph.results.packed(output, len(packed))
            grads = self._gradients_apart(found)
            return found.detach().clone(), grads

    def _gradients_apart(self, output: Tensor) -> list[Tensor | None] | None:
        """Return the gradients of parameters, which keep theirs; None: it can't."""
        parameters = self._trained()
        if not output.requires_grad or self._cotangent is None or not parameters:
            return [None for _ in parameters]
        try:
            found = torch.autograd.grad(
                edges_of([output]),
                edges_of(parameters),
                [self._cotangent],
                allow_unused=True,
            )
        except RuntimeError as error:
            if "use_reentrant=True" in str(error):
                return None
            raise
        return [None if g is None else g.to_dense() for g in found]

    def _require_same(self, packed: Tensor, own: _Whole | None, wanted: _Whole) -> None:
        """Require that nothing depends on which objects the module's tensors are."""
        if own is None:
            return
        what = "result"
        if self._near(own[0], wanted[0]):
            if self._near_gradients(own[1], wanted[1]):
                return
            what = "gradient"
        raise SpecError(
            f"{self._line_of_own(packed)}forward of {self._graph.name} gives another "
            f"{what} with the module's own parameters and buffers than with others of "
            "equal values, so it depends on which tensor objects they are (`is`, "
            "`id()`, `in` or a key), and layers are computed with others: compare "
            "names, or decide in __init__"
        )

    def _near_gradients(
        self, found: list[Tensor | None] | None, wanted: list[Tensor | None] | None
    ) -> bool:
        if found is None or wanted is None:
            return True
        largest = max(map(largest_of, wanted), default=0.0)
        for parameter, have, want in zip(self._trained(), found, wanted, strict=True):
            if have is None and want is None:
                continue
            zero = torch.zeros_like(parameter)
            if not self._near(
                zero if have is None else have, zero if want is None else want, largest
            ):
                return False
        return True

    def _require_repeatable(self, packed: Tensor) -> None:
        """Refuse a module that gives other results for equal values."""
        found = RecordedResults(), RecordedResults()
        wholes = []
        for around in found:
            with fresh_buffers(self._module):
                wholes.append(self._again(packed, around))
        (one, grads_one), (two, grads_two) = wholes
        what = "results"
        if self._near(one, two):
            if self._near_gradients(grads_one, grads_two):
                return
            what = "gradients in backward"
        raise SpecError(
            f"{self._line_between(*found)}gives other {what} in each call for equal "
            "values, as random numbers of Python or NumPy and the time do: ranks "
            "would compute others than one process. Draw random numbers with torch "
            "in forward, for each sample, and change other values between steps"
        )

    def _line_of_own(self, packed: Tensor) -> str:
        """Return the first line whose result depends on the tensors' identity."""
        mine, others = RecordedResults(), RecordedResults()
        self._with_own_tensors(packed, mine)
        with fresh_buffers(self._module):
            self._again(packed, others)
        return self._line_between(mine, others)

    def _line_between(self, mine: RecordedResults, others: RecordedResults) -> str:
        """Return the first line that gives another result, or another gradient."""
        for one, two in zip(mine.found, others.found, strict=False):
            if one.line != two.line or (one.value is None) != (two.value is None):
                return f"{one.line}: "
            if one.value is None or two.value is None:
                continue
            if one.is_tracked != two.is_tracked or not self._near(one.value, two.value):
                return f"{one.line}: "
        for one, two in zip(reversed(mine.found), reversed(others.found), strict=False):
            if one.grad is None or two.grad is None:
                continue
            if not self._near(one.grad, two.grad):
                return f"{mine.line_reading(one)}: "
        return line_of_forward(self._module)

    def _trained(self) -> list[Tensor]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _cotangent_of(self, output: Tensor) -> Tensor:
        made = self._numbers.normal(output.shape, output)
        packing = self._graph.results.packing
        assert packing is not None  # noqa: S101
        for part in packing.parts if not packing.is_one else ():
            if not part.dtype.is_floating_point:
                made[:, part.start : part.start + part.length] = 0
        return made

    def _layers(
        self, packed: Tensor
    ) -> tuple[dict[str, Tensor], dict[int, Tensor], dict[str, Tensor]]:
        """Return layers' outputs, gradients by parameter and of layers' outputs."""
        values = {INPUT: packed}
        runs: dict[str, tuple[list[Tensor], Tensor, dict[int, Twins]]] = {}
        for node in self._graph.nodes:
            inputs = [leaf_of(values[name], name) for name in node.inputs]
            twins: dict[int, Twins] = {}
            with swapped(node.module.named_modules(), partial(twin_of, twins)):
                output = run_layer(node, inputs)
            runs[node.name] = inputs, output, twins
            values[node.name] = output.detach()
            trains = any(p.requires_grad for p in node.module.parameters())
            if trains or not self._needing.isdisjoint(node.inputs):
                self._needing.add(node.name)
        grads: dict[int, Tensor] = {}
        cotangents: dict[str, Tensor] = {}
        last = runs[self._graph.output][1]
        if last.requires_grad:
            if self._cotangent is None:  # only an input needs a gradient
                self._cotangent = self._cotangent_of(last)
            cotangents[self._graph.output] = self._cotangent
        for node in reversed(self._graph.nodes):
            inputs, output, twins = runs.pop(node.name)
            if node.name not in cotangents or not output.requires_grad:
                continue
            parameters = {key: twin for key, (_, twin) in twins.items()}
            to_inputs, to_parameters = gradients_of_layer(
                inputs, output, cotangents[node.name], parameters
            )
            self._require_in_twins(node, twins)
            if not any(isinstance(m, BatchNorm) for m in node.module.modules()):
                self._known[node.name] = (output.detach(), to_inputs, to_parameters)
            for name, grad in zip(node.inputs, to_inputs, strict=True):
                if grad is not None:
                    had = cotangents.get(name)
                    cotangents[name] = grad if had is None else had + grad
            for key, grad in to_parameters.items():
                grads[key] = grad if key not in grads else grads[key] + grad
        return values, grads, cotangents

    def _require_in_twins(self, node: LayerNode, twins: dict[int, Twins]) -> None:
        """Require that gradients reach exactly the tensors that forward used."""
        if any(tensor.grad is not None for tensor, _ in twins.values()):
            op = next((n for n in graph_of(node).nodes if n.meta.get("place")), None)
            place = "" if op is None else f"{source_line_of(op)}: "
            raise SpecError(
                f"{place}layer {node.name!r} runs modules again in backward, whose "
                "gradients would be counted twice: compute them in forward, or use "
                "torch.utils.checkpoint"
            )

    def _compare(
        self,
        packed: Tensor,
        outputs: tuple[Tensor, Tensor],
        whole: list[Tensor | None],
        grads: dict[int, Tensor],
    ) -> None:
        name = self._graph.name
        wanted, found = outputs
        if not self._near(found, wanted):
            self._refuse_answers("outputs")
            # Names the line if forward decides by the number of samples.
            self._graph.require_count(_ROWS)
            self._require_repeatable(packed)
            raise SpecError(
                f"{line_of_forward(self._module)}the captured layers of {name} give "
                f"other outputs than {name} itself: "
                "its forward does something that is not captured, such as reading or "
                f"changing state that is not one of its tensors. {self._report()}"
            )
        largest = max(
            (float(g.abs().max()) for g in whole if g is not None and g.numel()),
            default=0.0,
        )
        named = {id(p): n for n, p in self._module.named_parameters()}
        trained = list(zip(self._trained(), whole, strict=True))
        self.missing = frozenset(named[id(p)] for p, want in trained if want is None)
        for parameter, want in trained:
            have = grads.get(id(parameter))
            zero = torch.zeros_like(parameter)
            if not self._near(
                zero if have is None else have, zero if want is None else want, largest
            ):
                self._refuse_answers("gradients")
                self._require_repeatable(packed)
                for hook in (h for k in HOOKS[2:] for h in HOOKS_OF_ALL[k].values()):
                    raise SpecError(
                        f"{place_of(hook)}a hook of all modules changes gradients of "
                        f"modules in {name} that are no layers, and would not be "
                        "called for them: register it on modules, which makes them "
                        "layers"
                    )
                raise SpecError(
                    f"{line_of_forward(self._module)}the captured layers of {name} "
                    "give parameter "
                    f"{named[id(parameter)]!r} another gradient than {name} itself: "
                    f"its forward does something that is not captured. {self._report()}"
                )

    def _report(self) -> str:
        """Return what the program did that may be the cause, and what to do."""
        if found := list(replaced_in(self._module)):
            return (
                f"The program has replaced {', '.join(found[:3])}, which layers and "
                "stretto call, too. Leave PyTorch's own as they are, and do what these "
                "add in a forward of the model's; if it fails without them, please "
                "report the model"
            )
        if any(map(is_parametrized, self._module.modules())):
            return (
                "If it calls layers within torch.nn.utils.parametrize.cached(), leave "
                "that out; otherwise please report the model"
            )
        return "Please report the model"

    def _refuse_answers(self, what: str) -> None:
        """Refuse code that asked for ranks, see Note [Questions about the job]."""
        if place := self._questions.place():
            raise SpecError(
                f"{place}. The {what} of {self._graph.name} depend on it, and a burst "
                "model computes those of one process: scale or decide outside of the "
                "model"
            )

    # Rows.

    def _rows(
        self, values: dict[str, Tensor], cotangents: dict[str, Tensor]
    ) -> SpecError | None:
        equal = EqualLayers(self._graph.nodes, self._kinds, values, cotangents)
        for node in self._graph.nodes:
            if equal.may_skip(node):
                continue
            full = self._known.get(node.name)
            full = full or self._part(node, values, cotangents, _EVERY)
            trace = trace_layer(node, values, _EVERY)
            found = self._operations(node, values, full[0], trace)
            found = found or self._wide(node, values, full[0])
            found = found or self._rows_of(node, values, cotangents, full)
            given = cotangents.get(node.name)
            if found is None and given is not None and node.name in self._own_backward:
                found = self._wide_backward(node, values, cotangents, full)
                for scale in () if self._is_coarse else _SCALES:
                    scaled = {node.name: given * scale}
                    whole = self._part(node, values, scaled, _EVERY)
                    found = found or self._rows_of(node, values, scaled, whole)
                found = found or self._not_finite(node, values, given)
            if found is not None:
                return found
            equal.note_checked(node, trace, given)
        return None

    def _operations(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        output: Tensor,
        full: dict[fx.Node, Any],
    ) -> SpecError | None:
        """Return where an operation inside a layer gives other rows for some.

        Args:
            node: the layer.
            values: outputs of all layers.
            output: this layer's.
            full: its operations' results on all rows.
        """
        many = self._many_rows(node, values, output, _MAX_ROWS)
        some = trace_layer(node, values, _SOME)
        op = self._first_other(full, some, _SOME)
        op = op or self._first_other(full, trace_layer(node, values, many), many)
        op = op or self._first_mixing_others(node, values, full, some)
        if op is None:
            return None
        if op.target is by_sample:
            return not_outside(source_line_of(op))
        return _mixing(f"{source_line_of(op)}: {op.name!r}", way=_way_of(op))

    def _first_mixing_others(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        full: dict[fx.Node, Any],
        some: dict[fx.Node, Any],
    ) -> fx.Node | None:
        """Return the first operation that mixes rows of other values; see the note."""
        for others in other_values(node, full, self._numbers):
            op = self._first_other(
                others.traces(values, full, _EVERY),
                others.traces(values, some, _SOME),
                _SOME,
            )
            if op is not None:
                return op
        return None

    def _first_mixing(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        orders: Sequence[Sequence[int]],
    ) -> fx.Node | None:
        """Return the first operation that gives other rows for one of the orders."""
        full = trace_layer(node, values, _EVERY)
        for rows in orders:
            op = self._first_other(full, trace_layer(node, values, rows), rows)
            if op is not None:
                return op
        return None

    def _first_other(
        self,
        full: dict[fx.Node, Any],
        some: dict[fx.Node, Any],
        rows: Sequence[int],
    ) -> fx.Node | None:
        exact: set[fx.Node] = set()
        index = torch.tensor(rows, device=self._examples[0].device)
        for op, want in full.items():
            if op.op == "placeholder":
                exact.add(op)
            if "samples" not in op.meta and exact.issuperset(op.all_input_nodes):
                exact.add(op)  # sizes, positions, several results
            if "samples" not in op.meta or op not in some:
                continue
            side, each = op.meta["samples"]
            value = some[op]
            if not isinstance(want, Tensor) or not isinstance(value, Tensor):
                continue
            if op.target is by_sample and self._may_be_inside(op, full, some, index):
                return op
            is_input_exact = exact.issuperset(op.all_input_nodes)
            for way in _rows_in(want, side, each, index):
                if torch.equal(value, way):
                    exact.add(op)
                elif not self._near(value, way, largest_of(want)):
                    continue
                break
            else:
                # A comparison of values that differ by rounding may differ.
                if is_input_exact or has_gradient(want):
                    return op
        return None

    def _may_be_inside(
        self,
        op: fx.Node,
        full: dict[fx.Node, Any],
        some: dict[fx.Node, Any],
        index: Tensor,
    ) -> bool:
        """Return whether samples may be in several places of what a dropout gets."""
        given, side, each, *_ = op.args
        assert isinstance(given, fx.Node)  # noqa: S101
        assert isinstance(side, int)  # noqa: S101
        assert isinstance(each, int)  # noqa: S101
        want, value = full[given], some[given]
        ways = _rows_in(want, side, each, index)
        return sum(self._near(value, way, largest_of(want)) for way in ways) > 1

    def _rows_of(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        cotangents: dict[str, Tensor],
        full: _Found,
        *,
        extreme: bool = False,
    ) -> SpecError | None:
        parts = []
        rounding = self._rounding(node, values, cotangents, extreme=extreme)
        for rows in (_SOME, _REST):
            try:
                part = self._part(node, values, cotangents, rows)
            except Exception as error:  # noqa: BLE001 - such as shapes for one row
                return self._fails(node, values, error)
            found = self._other_rows(node, values, rounding, full, part, rows)
            if found is not None:
                return found
            parts.append(part)
        largest = max((largest_of(g) for g in full[2].values()), default=0.0)
        for key, grad in full[2].items():
            added = sum(
                (p[2][key] for p in parts if key in p[2]), torch.zeros_like(grad)
            )
            if not self._near_gradient(added, grad, largest, rounding):
                return self._mixes(node, values, backward=True)
        return None

    def _many_rows(
        self, node: LayerNode, values: dict[str, Tensor], full: Tensor, most: int
    ) -> list[int]:
        taken = [values[name] for name in node.inputs]
        numbers = sum(x.numel() for x in (*taken, full)) // _ROWS
        count = min(most, max(_MANY_ROWS, _MANY_NUMBERS // max(1, numbers)))
        return self._numbers.order(_ROWS, count)

    def _wide_backward(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        cotangents: dict[str, Tensor],
        full: _Found,
    ) -> SpecError | None:
        """Return where many rows of a few kinds have other gradients than their kind.

        Parameters' gradients are the sum of those of each row alone.
        """
        rows = self._many_rows(node, values, full[0], _MAX_ROWS_BACK)
        try:
            _, inputs, grads = self._part(node, values, cotangents, tuple(rows))
            alone = [self._part(node, values, cotangents, (i,))[2] for i in _EVERY]
        except Exception as error:  # noqa: BLE001 - the user's code
            return self._fails(node, values, error)
        rounding, many = self._rounding(node, values, cotangents), len(rows)
        for mine, kinds in zip(inputs, full[1], strict=True):
            if mine is None or kinds is None:
                continue
            most = largest_of(kinds)
            if not self._near_gradient(mine, kinds[rows], most, rounding, many):
                return self._mixes(node, values, backward=True)
        for key, grad in grads.items():
            terms = [
                rows.count(i) * one[key] for i, one in enumerate(alone) if key in one
            ]
            added = sum(terms, torch.zeros_like(grad))
            largest = sum(largest_of(term) for term in terms)
            if not self._near_gradient(grad, added, largest, rounding, many):
                return self._mixes(node, values, backward=True)
        return None

    def _not_finite(
        self, node: LayerNode, values: dict[str, Tensor], given: Tensor
    ) -> SpecError | None:
        """Return where a sample's extreme gradients change others'."""
        for extreme in _extremes_of(given):
            cotangents = {node.name: extreme}
            try:
                whole = self._part(node, values, cotangents, _EVERY)
                self._part(node, values, cotangents, _REST)
            except (Exception, SystemExit):  # noqa: BLE001
                continue  # code that ends training there does so in one process too
            found = self._rows_of(node, values, cotangents, whole, extreme=True)
            if found is not None:
                return found
            if self._changes_others(node, values, cotangents):
                return self._mixes(node, values, backward=True)
        return None

    def _changes_others(
        self, node: LayerNode, values: dict[str, Tensor], cotangents: dict[str, Tensor]
    ) -> bool:
        """Return whether gradients of `_SOME` depend on those of `_REST`.

        Also those of the batch: one value that is not finite hides others in the sums
        that are parameters' gradients.
        """
        try:
            _, whole, _ = self._part(node, values, cotangents, _EVERY, to_batch=True)
            _, alone, _ = self._part(node, values, cotangents, _SOME, to_batch=True)
        except (Exception, SystemExit):  # noqa: BLE001 - the batch may need no gradient
            return False
        rows = list(_SOME)
        usual = {name: given[rows] for name, given in cotangents.items()}
        rounding = self._rounding(node, values, usual, extreme=True)
        return not all(
            self._near_gradient(mine, all_rows[rows], None, rounding)
            for mine, all_rows in zip(alone, whole, strict=True)
            if mine is not None and all_rows is not None
        )

    def _wide(
        self, node: LayerNode, values: dict[str, Tensor], full: Tensor
    ) -> SpecError | None:
        """Return where many rows, each of a few kinds, differ from their kind's row.

        An effect that reaches further than `_ROWS` rows does not show with so few.
        """
        taken = [values[name] for name in node.inputs]
        rows = self._many_rows(node, values, full, _MAX_ROWS)
        try:
            with torch.no_grad():
                output = run_layer(node, [x[rows] for x in taken])
        except Exception as error:  # noqa: BLE001 - the user's code
            return self._fails(node, values, error)
        if self._near(output, full[rows], largest_of(full)):
            return None
        return self._mixes(node, values, rows=rows)

    def _other_rows(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        rounding: GradientRounding,
        full: _Found,
        part: _Found,
        rows: tuple[int, ...],
    ) -> SpecError | None:
        output, to_inputs, _ = part
        if output.shape[:1] != (len(rows),) or not self._near(
            output, full[0][list(rows)], largest_of(full[0])
        ):
            return self._mixes(node, values)
        for mine, all_rows in zip(to_inputs, full[1], strict=True):
            if (mine is None) != (all_rows is None):
                return self._mixes(node, values)
            if mine is None or all_rows is None:
                continue
            largest = largest_of(all_rows)
            if not self._near_gradient(mine, all_rows[list(rows)], largest, rounding):
                return self._mixes(node, values, backward=True)
        return None

    def _rounding(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        cotangents: dict[str, Tensor],
        *,
        extreme: bool = False,
    ) -> GradientRounding:
        """Return the tolerance for gradients that are sums of canceling terms.

        It is not measured with ``extreme`` ones, which give large values inside.
        """

        def run(inputs: Mapping[str, Tensor], given: Tensor) -> list[Tensor | None]:
            found = self._part(node, dict(inputs), {node.name: given}, _EVERY)
            return [*found[1], *found[2].values()]

        def largest_inside() -> float:
            inputs = [leaf_of(values[name], name) for name in node.inputs]
            output = run_layer(node, inputs)
            if not output.requires_grad:
                return 0.0
            found = [*inputs, *node.module.parameters()]
            leaves = [x for x in found if x.requires_grad]
            given = cotangents[node.name]
            return largest_gradient(output, lambda: gradients_of(output, given, leaves))

        inputs = {name: values[name] for name in node.inputs}
        given = cotangents.get(node.name)
        if extreme:
            return GradientRounding(inputs, given)
        return GradientRounding(inputs, given, run, largest_inside)

    def _part(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        cotangents: dict[str, Tensor],
        rows: tuple[int, ...],
        *,
        to_batch: bool = False,
    ) -> _Found:
        inputs = [
            leaf_of(values[name][list(rows)], "" if to_batch else name)
            for name in node.inputs
        ]
        output = run_layer(node, inputs)
        if node.name not in cotangents or not output.requires_grad:
            return output.detach(), [None for _ in inputs], {}
        if output.shape[:1] != (len(rows),):
            return output.detach(), [None for _ in inputs], {}
        some = cotangents[node.name][list(rows)]
        parameters = {id(p): p for p in node.module.parameters() if p.requires_grad}
        to_inputs, to_parameters = gradients_of_layer(inputs, output, some, parameters)
        return output.detach(), to_inputs, to_parameters

    def _mixes(
        self,
        node: LayerNode,
        values: dict[str, Tensor],
        *,
        backward: bool = False,
        rows: Sequence[int] = (),
    ) -> SpecError:
        place, way = f"layer {node.name!r}", _LOSS
        if not backward:
            place = self._line(node, values, rows)
            way = _way_of(self._first_mixing(node, values, _compared(rows)))
        else:
            lines = _lines_of(own_backwards_in(node))
            if lines := lines or _lines_of(graph_of(node).nodes)[:1]:
                place = f"{' or '.join(lines)}: {place}"
            if (hook := _hook_in(node)) is not None:
                place = f"{place_of(hook)}layer {node.name!r} with its hooks"
        return _mixing(place, backward=backward, way=way)

    def _fails(
        self, node: LayerNode, values: dict[str, Tensor], error: Exception
    ) -> SpecError:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        return SpecError(
            f"{self._line(node, values)}: fails on some of the samples where it works "
            f"on {_ROWS} ({type(error).__name__}: {text}): a rank may have only one "
            "sample. Keep the batch as the first dimension, and name the dimensions "
            "of squeeze()"
        )

    def _line(
        self, node: LayerNode, values: dict[str, Tensor], rows: Sequence[int] = ()
    ) -> str:
        """Return the first operation of a layer that gives other rows for some."""
        op = self._first_mixing(node, values, _compared(rows))
        if op is not None:
            return f"{source_line_of(op)}: {op.name!r}"
        for op in reversed(graph_of(node).nodes):
            if op.meta.get("place"):
                return f"{source_line_of(op)}: layer {node.name!r}"
        return f"layer {node.name!r}"


def _extremes_of(given: Tensor) -> Iterator[Tensor]:
    """Yield gradients of which a sample's may make a backward drop or limit all.

    A matrix product makes NaN of a row of infinities, but not of a single one, or of
    large numbers.
    """
    if not given.is_floating_point():
        return
    rows = list(_REST)
    for number in (math.nan, math.inf, math.sqrt(torch.finfo(given.dtype).max)):
        extreme = given.clone()
        extreme[rows] = number
        yield extreme
    for number in (math.inf, -math.inf) if given.numel() else ():
        extreme = given.clone()
        for row in rows:
            extreme[(row, *(0 for _ in given.shape[1:]))] = number
        yield extreme


def _hook_in(node: LayerNode) -> Any:
    """Return a hook of a layer's modules; of backward, if there is one."""
    for kind in reversed(HOOKS):
        for part in node.module.modules():
            for hook in getattr(part, kind).values():
                return hook
    return None


_LOSS = (
    "Keep the batch as the first dimension, and compute what depends on other samples "
    "in the loss"
)
_NORM = (
    "Call a torch.nn module, whose statistics ranks compute together, such as "
    "BatchNorm2d(channels, affine=False, track_running_stats=False)"
)


def _way_of(op: fx.Node | None) -> str:
    """Return what to do about an operation that mixes samples."""
    return _NORM if op is not None and op.target is functional.batch_norm else _LOSS


def _lines_of(ops: Iterable[fx.Node]) -> list[str]:
    """Return the lines of operations, in order."""
    return list(dict.fromkeys(source_line_of(n) for n in ops if n.meta.get("place")))


def _compared(rows: Sequence[int]) -> tuple[Sequence[int], ...]:
    return (rows,) if rows else (_SOME, _REST)


def _mixing(place: str, *, backward: bool = False, way: str = _LOSS) -> SpecError:
    if backward:
        return SpecError(
            f"{place}: it mixes samples in backward: a gradient for one sample depends "
            "on others, which may be on other ranks. Let backwards of your own, and "
            "hooks on gradients, compute each sample alone: no norm or mean over the "
            "whole batch"
        )
    return SpecError(
        f"{place}: it mixes samples: its output for one sample depends on "
        f"others, which may be on other ranks. {way}"
    )


def _rows_in(tensor: Tensor, side: int, each: int, index: Tensor) -> Iterator[Tensor]:
    """Yield the parts for some rows, in all ways in which a dimension may hold them.

    Args:
        tensor: The result for all rows.
        side: The dimension that follows the number of samples.
        each: How many of its elements one sample has.
        index: The numbers of the rows.
    """
    if tensor.shape[side] != each * _ROWS:
        return
    index = index.to(tensor.device)
    for outer in _divisors(each):
        parts = tensor.unflatten(side, (outer, _ROWS, each // outer))
        yield parts.index_select(side + 1, index).flatten(side, side + 2)


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})
