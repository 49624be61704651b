"""A model as layers that can run on different ranks, each a module of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import fx, nn

from stretto.burst.tracing import grouping
from stretto.burst.tracing.caches import restored
from stretto.burst.tracing.classify import Traced
from stretto.burst.tracing.recorder import leaves_of
from stretto.burst.tracing.source_lines import line_of_forward
from stretto.burst.tracing.torch_modules import BatchNorm
from stretto.errors import PlanMismatch, SpecError
from stretto.schema.burst import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from stretto.burst.tracing.cached_values import FirstValues
    from stretto.burst.tracing.packing import Arguments, PackedResults
    from stretto.burst.tracing.proven import Proven
    from stretto.burst.tracing.reads import Ambient

INPUT = "input"
"""The name under which layers read the model's input."""

_PLAIN = (torch.Tensor, nn.Parameter)

JOINED = "+"
"""Separates the names of layers that were joined into one."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LayerNode:
    """One layer: takes tensors with a row for each sample, returns one such tensor."""

    name: str

    inputs: tuple[str, ...]
    """Layers whose outputs it takes, in the order of its arguments, or `INPUT`."""

    module: nn.Module
    """Returns the layer's output for its inputs. It holds the original's parameters,
    buffers and submodules themselves, under their names in the original."""

    parameter_names: tuple[str, ...]
    """Qualified as in the original module."""

    buffer_names: tuple[str, ...]

    parameter_bytes: int

    output_shape: tuple[int, ...]
    """Shape of one sample."""

    output_dtype: torch.dtype

    num_batch_norms: int

    has_dropout: bool

    keeps_state: bool
    """Whether each training forward changes buffers independently of the samples, as a
    spectral norm does."""

    @property
    def has_batch_norm(self) -> bool:
        """Whether it normalizes over the batch."""
        return self.num_batch_norms > 0

    @property
    def activation_bytes(self) -> int:
        """Bytes of its output for one sample."""
        return bytes_of(self.output_shape, self.output_dtype)

    def tensors(self) -> list[Tensor]:
        """Return its parameters and buffers, in one order on all ranks."""
        return [*self.module.parameters(), *self.module.buffers()]

    def trained_and_changed(self) -> list[Tensor]:
        """Return its parameters, and the buffers that its forward changes."""
        if self.keeps_state:
            return self.tensors()
        found: list[Tensor] = list(self.module.parameters())
        for part in self.module.modules():
            if isinstance(part, BatchNorm):
                found += part.buffers()
        return found


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LayerGraph:
    """A model's layers in an order in which they can run; the last returns its output.

    Only one layer reads the model's input. The graph holds for the modes of the model
    at capture, and for the values that its code read then; see `outdated`.
    """

    name: str

    nodes: tuple[LayerNode, ...]

    input_shape: tuple[int, ...]
    """Shape of one sample."""

    input_dtype: torch.dtype

    _traced: Traced = field(repr=False)

    _groups: tuple[tuple[fx.Node, ...], ...] = field(repr=False)

    @property
    def arguments(self) -> Arguments:
        """Packs a call's arguments into the one tensor that layers read."""
        return self._traced.arguments

    @property
    def results(self) -> PackedResults:
        """Unpacks the last layer's output into the model's."""
        return self._traced.results

    @property
    def ambient(self) -> Ambient:
        """The modes around the call for which it was captured."""
        return self._traced.ambient

    @property
    def constants(self) -> frozenset[str]:
        """Names of the tensors that no module of the model holds."""
        return self._traced.constants

    @property
    def held_elsewhere(self) -> frozenset[int]:
        """The ids of parameters that forward reads from containers.

        Other tensors in the modules' place would not be read.
        """
        return frozenset(
            id(parameter)
            for node in self.nodes
            for name, parameter in node.module.named_parameters()
            if name in self.constants
        )

    @property
    def decided(self) -> frozenset[int]:
        """The ids of tensors by whose values forward decides, see `constant_values`."""
        return self._traced.decided

    def outdated(self) -> str | None:
        """Return a value that forward read and that changed since, or None."""
        return self._traced.outdated()

    def layers_outdated(self) -> str | None:
        """Return such a value that a run of forward's code does not show, or None."""
        return self._traced.layers_outdated()

    @property
    def proven(self) -> Proven | None:
        """The inputs of the last check of the layers; None without one."""
        return self._traced.proven

    def note_proven(self, proven: Proven | None) -> None:
        """Record that the layers were checked, also those of joined layers."""
        self._traced.proven = proven
        if proven is not None and proven.changing:
            self._traced.watch = self._traced.watch.without(proven.changing)
            if (watch := self._traced.watch_of_layers) is not None:
                self._traced.watch_of_layers = watch.without(proven.changing)

    def changed_hooks(self) -> dict[str, Any]:
        """Return hooks on values that changed their own state, by their names."""
        return self._traced.watch.changed_hooks()

    def unproven(self) -> str | None:
        """Return what the last check of the layers depends on and changed, or None."""
        proven = self._traced.proven
        return None if proven is None else proven.changed()

    def changed_since(self, first: FirstValues) -> str | None:
        """Return a cache whose first value layers no longer compute, or None."""
        cached = self._traced.cached
        return first.changed(cached) if self._traced.caches and cached else None

    def note_caches(self) -> None:
        """Record what layers keep in caches, after a check ran them on values.

        Raises:
            SpecError: it depends on values of samples or parameters.
        """
        cached = self._traced.cached
        if cached is not None and (name := cached.note_inside()) is not None:
            raise SpecError(
                f"forward of {self.name} keeps {name!r} from its first call, in a "
                "module with hooks, and computes other values for other samples or "
                "parameters: compute it in each call, or keep it in a buffer"
            )

    def caches_restored(self) -> AbstractContextManager[None]:
        """Begin with caches of constants as at capture, and restore them afterwards."""
        return restored(self._traced.caches)

    @property
    def can_rerun(self) -> bool:
        """Whether forward's code can run again and be compared, see `rerun`."""
        return self._traced.rerun is not None

    def rerun_difference(self) -> str | None:
        """Return where forward's code now calls something else, or None."""
        rerun = self._traced.rerun
        if rerun is None:
            return None
        place = rerun.difference()
        if rerun.has_kept:
            self._traced.watch = self._traced.watch.followed()
        return place

    def difference(self) -> str | None:
        """Return where forward now does something else than at capture, or None.

        A module of torch that runs as one operation runs as it is, also with another
        forward, which would be recorded as several.

        Raises:
            SpecError: it can't be recorded now.
        """
        if leaves_of(self._traced.module) != self._traced.leaves:
            return None
        return self._traced.counts_known.difference()

    def require_gradients_known(self, batch: torch.Tensor) -> None:
        """Require that an input needs no gradient if forward acts on it.

        Raises:
            SpecError: it does; the message names the line.
        """
        place = self._traced.without_gradient
        if place and batch.requires_grad:
            raise SpecError(
                f"{place}: reads whether a tensor needs a gradient, and the input "
                "needs one, unlike at capture: decide by an attribute or an argument "
                "of forward, or call the model with an input that needs none"
            )

    def one_tensor_as(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return which inputs are one object, or one that forward reads elsewhere.

        Each is a pair of a number of an input and the number or name of the other.
        """
        held = self._traced.watch.tensors
        first: dict[int, int] = {}
        found: list[Any] = []
        for number, tensor in enumerate(inputs):
            if id(tensor) in held:
                found.append((number, held[id(tensor)]))
            other = first.setdefault(id(tensor), number)
            if other != number:
                found.append((number, other))
        return tuple(found)

    def require_layout_known(self, tensors: Sequence[torch.Tensor]) -> None:
        """Require that inputs are contiguous if forward acts on it, as at capture.

        Raises:
            SpecError: one is not; the message names the line.
        """
        place = self._traced.reads_layout
        if place and not all(tensor.is_contiguous() for tensor in tensors):
            raise SpecError(
                f"{place}: reads how a tensor lies in memory, and an input is not "
                "contiguous, unlike at capture: call the model with x.contiguous(), or "
                "leave out what reads it"
            )
        place = self._traced.reads_offset
        if place and any(tensor.storage_offset() for tensor in tensors):
            raise SpecError(
                f"{place}: reads where in its storage a tensor begins, and an input "
                "does not begin there at its start, unlike at capture: call the model "
                "with x.clone(), or leave out what reads it"
            )

    def require_unread_attributes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Require that forward reads none of the attributes that a program set.

        Layers compute with other tensors, which do not have them.

        Raises:
            SpecError: an input has one whose name forward contains.
        """
        names = self._traced.names
        for tensor in tensors:
            if not (held := vars(tensor)):
                continue
            if names is None:
                read = type(tensor) in _PLAIN
            else:
                read = not names.isdisjoint(held)
            if read:
                found = [key for key in held if names is None or key in names]
                raise SpecError(
                    f"{line_of_forward(self._traced.module)}an input has the attribute "
                    f"{found[0]!r}, which forward of {self.name} may read, and layers "
                    "compute with other tensors: pass its value as an argument, or "
                    "delete the attribute"
                )

    def require_count(self, count: int) -> None:
        """Require that the forward does the same for a number of samples in all.

        It is recorded again for each number that is new.

        Raises:
            SpecError: it does something else; the message names the line.
        """
        self._traced.counts_known.require(count)

    @property
    def uses_half(self) -> bool:
        """Whether some operation computes with fewer than 32 bits."""
        return self._traced.uses_half

    def precision_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type whose rounding results of a type have; None: a half's.

        An operation with fewer bits may be behind a result with more.
        """
        if self._traced.uses_half or dtype not in (torch.float32, torch.float64):
            return None
        return torch.float32 if self._traced.uses_single else dtype

    @cached_property
    def semantics(self) -> str:
        """Digest of all operations and their constants, the same on all ranks."""
        return _short("\n".join(text for text, _ in self._traced.semantics))

    @property
    def semantics_number(self) -> int:
        """`semantics` as a number of at most 56 bits, for exchanges between ranks."""
        return int(self.semantics[-14:], 16)

    def operations(self) -> list[tuple[str, str]]:
        """Return a digest of each operation, and its place in the user's code."""
        return [(_short(text), place) for text, place in self._traced.semantics]

    @cached_property
    def by_name(self) -> dict[str, LayerNode]:
        """The layers by name."""
        return {node.name: node for node in self.nodes}

    @property
    def output(self) -> str:
        """Name of the layer that returns the model's output."""
        return self.nodes[-1].name

    @property
    def input_bytes(self) -> int:
        """Bytes of the model's input for one sample."""
        return bytes_of(self.input_shape, self.input_dtype)

    @cached_property
    def digest(self) -> str:
        """Digest of this model's layer profile: of names, edges and sizes."""
        return digest_of(
            (
                node.name,
                tuple(name for name in node.inputs if name != INPUT),
                node.parameter_bytes,
                node.activation_bytes,
            )
            for node in self.nodes
        )

    def joined(self, names: Iterable[str]) -> LayerGraph:
        """Return the same model with layers joined, as a profile or a plan names them.

        A joined layer's name is that of its layers with ``+`` between.

        Raises:
            PlanMismatch: the names are not those of this model's layers.
            SpecError: the joined layers can't be one layer.
        """
        wanted = list(names)
        if wanted == [node.name for node in self.nodes]:
            return self
        left = {n.name: g for n, g in zip(self.nodes, self._groups, strict=True)}
        order = {op: i for i, op in enumerate(self._traced.ops)}
        given: dict[tuple[fx.Node, ...], str] = {}
        for name in wanted:
            ops: list[fx.Node] = []
            for part in [name] if name in self.by_name else name.split(JOINED):
                if part not in left:
                    raise self._mismatch(part)
                ops += left.pop(part)
            given[tuple(sorted(ops, key=order.__getitem__))] = name
        if left:
            raise self._mismatch(next(iter(left)))
        return layers_of(self._traced, list(given), self.name, given)

    def named_like(self, other: LayerGraph) -> LayerGraph:
        """Return the same layers with the names of another capture's, if they match.

        Layers match if they have the same parameters, buffers, connections and outputs
        in the same order. Their operations may differ, and a name may be that of an
        operation: where a program replaces the forward of one of PyTorch's classes, its
        modules are recorded as operations.
        """
        base = layers_of(
            other._traced,
            grouping.groups_of(other._traced),
            other.name,
            {},
        )
        if list(map(_kind_of, _numbered(self))) != list(map(_kind_of, _numbered(base))):
            return self
        names = [node.name for node in base.nodes]
        given = dict(zip(self._groups, names, strict=True))
        found = layers_of(self._traced, list(self._groups), self.name, given)
        return found if [node.name for node in found.nodes] == names else self

    def apart_from(self, other: LayerGraph) -> LayerGraph:
        """Return the same layers, with new names for those that join another's layers.

        Such a layer has the parameters of several layers of the other capture and the
        name of one of them: a dropout separates layers in training only, for instance.
        """
        names = {}
        for node in self.nodes:
            held = other.layers_with(node)
            if len(held) > 1 and node.name in held:
                names[node.name] = JOINED.join(held)
        if not names:
            return self
        given = {
            group: names.get(node.name, node.name)
            for node, group in zip(self.nodes, self._groups, strict=True)
        }
        return layers_of(self._traced, list(self._groups), self.name, given)

    def layers_with(self, node: LayerNode) -> list[str]:
        """Return the layers that have parameters of another capture's layer."""
        held = {id(p) for p in node.module.parameters()}
        return [
            own.name
            for own in self.nodes
            if any(id(p) in held for p in own.module.parameters())
        ]

    def _mismatch(self, name: str) -> PlanMismatch:
        what = "is missing or duplicate" if name in self.by_name else "is not in it"
        return PlanMismatch(
            f"the profile or plan is of another model than this {self.name}, with "
            f"{len(self.nodes)} layers from {self.nodes[0].name!r} to {self.output!r}: "
            f"layer {name!r} {what}. Run `stretto burst profile` again"
        )


def _numbered(graph: LayerGraph) -> list[tuple[LayerNode, tuple[int, ...]]]:
    """Return layers with the numbers of those that they read; -1 is the input."""
    numbers = {node.name: i for i, node in enumerate(graph.nodes)} | {INPUT: -1}
    return [
        (node, tuple(numbers[name] for name in node.inputs)) for node in graph.nodes
    ]


def _kind_of(numbered: tuple[LayerNode, tuple[int, ...]]) -> tuple[Any, ...]:
    node, reads = numbered
    return (
        reads,
        sorted(node.parameter_names),
        sorted(node.buffer_names),
        node.output_shape,
        node.output_dtype,
        node.num_batch_norms,
    )


def _short(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def norm_calls(node: LayerNode) -> list[str]:
    """Return the batch norms that a layer calls, in order."""
    graph = node.module.graph
    assert isinstance(graph, fx.Graph)  # noqa: S101
    return [name for op in graph.nodes for name in op.meta.get("norms", ())]


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    count = 1
    for side in shape:
        count *= side
    return count * dtype.itemsize


def layers_of(
    traced: Traced,
    groups: list[tuple[fx.Node, ...]],
    name: str,
    names: Mapping[tuple[fx.Node, ...], str],
) -> LayerGraph:
    """Return groups of operations as layers; ``names`` are those of joined groups."""
    layers = grouping.ordered(traced, groups)
    of = grouping.names_of(traced, layers, names, reserved=INPUT)
    number = {op: i for i, group in enumerate(layers) for op in group}
    users, positions = grouping.users_of(traced), grouping.positions_of(traced)
    nodes = []
    for i, group in enumerate(layers):
        result = grouping.output_of(traced, group, of[i], users)
        module, reads = grouping.module_of(traced, group, result, positions)
        shape, dtype = traced.shapes[result]
        parameters = dict(module.named_parameters())
        nodes.append(
            LayerNode(
                name=of[i],
                inputs=tuple(
                    INPUT if op is traced.source else of[number[op]] for op in reads
                ),
                module=module,
                parameter_names=tuple(parameters),
                buffer_names=tuple(key for key, _ in module.named_buffers()),
                parameter_bytes=sum(p.nbytes for p in parameters.values()),
                output_shape=shape,
                output_dtype=dtype,
                num_batch_norms=grouping.count_batch_norms(module),
                has_dropout=grouping.has_dropout(module),
                keeps_state=any(
                    op.meta.get("keeps_state") for op in module.graph.nodes
                ),
            )
        )
    shape, dtype = traced.shapes[traced.source]
    return LayerGraph(
        name=name,
        nodes=tuple(nodes),
        input_shape=shape,
        input_dtype=dtype,
        _traced=traced,
        _groups=tuple(layers),
    )
