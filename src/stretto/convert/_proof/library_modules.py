"""Calls of networks and layers that a library made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import elementwise
from stretto.convert._proof.batch_values import (
    UNSET,
    Constant,
    Draw,
    Item,
    LibraryResult,
    Linear,
    OneOf,
    Rows,
    Seq,
    Unproved,
    Why,
    first_bad,
    first_rows,
    has_count,
    is_list_of_samples,
    with_elements,
)
from stretto.convert._proof.dimensions import (
    is_sample_dim,
    may_be_sample_dim,
    mixes_in_space,
    without_dims,
)
from stretto.convert._proof.given_arguments import known_ints
from stretto.convert._proof.known_names import TRUSTED, TRUSTED_LOSSES
from stretto.convert._proof.tensor_losses import made_loss

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


_ROWWISE_PACKAGES = ("torchvision", "timm", "torchaudio", "lpips", "kornia", "torch")
"""Packages whose networks return a row for each sample."""


_SAME_SHAPE = frozenset(
    [
        *("Identity", "Dropout", "ReLU", "BatchNorm1d", "Tanh", "Sigmoid", "LayerNorm"),
        *("GELU", "SiLU", "ELU", "SELU", "CELU", "LeakyReLU", "PReLU", "ReLU6", "Mish"),
        *("Softplus", "Hardtanh", "Hardswish", "Softsign", "LogSigmoid", "GroupNorm"),
        *("RMSNorm", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"),
    ]
)
"""Layers whose result has the shape of what they get."""


_RECURRENT = ("RNN", "LSTM", "GRU")


_ATTENDING = (
    "MultiheadAttention",
    "Transformer",
    "TransformerEncoder",
    "TransformerDecoder",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
)


def module_call(made: LibraryResult, given: CallArguments, *, trusted: bool) -> Value:
    """Return what an object that a library made returns for its arguments."""
    known = made_loss(made, given)
    if known is not None:
        return known
    node = given.node
    full, last = made.name, made.name.rpartition(".")[2]
    values = with_elements(given.all)
    if has_count(made):
        return Unproved(Why.COUNTED, node)
    if full in TRUSTED_LOSSES:
        return Linear(0) if first_rows(values) is not None else Constant(grad=True)
    if (bad := first_bad(values)) is not None:
        return bad
    if any(is_list_of_samples(v) for v in given.all):
        is_trusted = trusted or full.startswith(TRUSTED)
        return Rows(opaque=node, trusted=is_trusted)
    if any(isinstance(v, Item) for v in values):
        placed = any(isinstance(v, Item) and v.place for v in values)
        return Unproved(Why.ACROSS, node) if placed else Item()
    own = first_rows([made])
    rows = first_rows(given.args[:1]) or first_rows(values)
    if rows is None:
        if any(isinstance(v, Linear) for v in values):
            return Unproved(Why.NONLINEAR, node)
        if own is not None:
            return replace(own, raw=False, whole=False, opaque=node)
        if any(isinstance(v, Draw) for v in values):
            return Draw()
        counted = any(isinstance(v, Constant) and v.counted for v in values)
        return Constant(grad=True, counted=counted)
    if full.startswith("torch.nn."):
        return _layer_call(made, last, rows, given)
    if rows.shifted is not None:
        return Unproved(Why.ACROSS, rows.shifted)
    if full.startswith(_ROWWISE_PACKAGES) and "detection" not in full:
        return replace(rows, ndim=None, raw=False, whole=False, kind="", opaque=None)
    is_trusted = trusted or full.startswith(TRUSTED)
    return Rows(
        opaque=node, trusted=is_trusted, axis=rows.axis or 0, copies=rows.copies
    )


def _has_state_of_batch(given: CallArguments) -> bool:
    """Return whether a layer gets a second tensor of three dimensions."""
    states = with_elements(given.args[1:2])
    return any(
        (isinstance(v, Constant) and v.shape is not None and len(v.shape) == 3)
        or (isinstance(v, Rows) and v.ndim == 3 and v.layer is None)
        for v in states
    )


def _layer_call(
    made: LibraryResult, last: str, rows: Rows, given: CallArguments
) -> Value:
    """Return what a layer of torch returns for a tensor of samples."""
    node = given.node
    if rows.shifted is not None:
        return Unproved(Why.ACROSS, rows.shifted)
    if rows.kind == "order":
        return Unproved(Why.ACROSS, node)
    out = replace(rows, raw=False, whole=False, kind="")
    first = made.option("batch_first")
    if last in ("TransformerEncoder", "TransformerDecoder") and made.args:
        inner = made.args[0]
        layers = inner.values if isinstance(inner, OneOf) else (inner,)
        options = [
            v.option("batch_first") for v in layers if isinstance(v, LibraryResult)
        ]
        first = options[0] if options else Constant()
    is_first = isinstance(first, Constant) and first.value is True
    unknown = isinstance(first, Constant) and first.value is UNSET
    if last in (*_RECURRENT, *_ATTENDING):
        recurrent = last in _RECURRENT
        given_rows = recurrent or first_rows(given.args[:1]) is not None
        first_axis = rows.axis == 0 and not is_first and not unknown
        one_sequence = rows.ndim == 2 and rows.axis is not None
        if (first_axis or one_sequence) and given_rows:
            bad = Unproved(Why.ACROSS, node)
            several = recurrent or last == "MultiheadAttention"
            return Seq((bad, bad)) if several else bad
        shown = rows.ndim is not None or rows.least > 2 or rows.axis != 0
        if not shown and given_rows and not _has_state_of_batch(given):
            given.unsure.add(node)
            out = replace(out, layer=node, rank=3)
        out = replace(out, ndim=3 if out.ndim is None else out.ndim, thin=False)
        state: Value = replace(out, axis=1 if out.axis is not None else None)
        if last == "LSTM":
            return Seq((out, Seq((state, state))))
        if recurrent:
            return Seq((out, state))
        return Seq((out, out)) if last == "MultiheadAttention" else out
    if last == "LSTMCell":
        return Seq((out, out))
    if last in ("Softmax", "LogSoftmax", "Softmin", "GLU"):
        dims = known_ints(made.option("dim", 0)) or [1 if last != "GLU" else -1]
        unsure = any(may_be_sample_dim(d, out) for d in dims)
        if unsure or any(is_sample_dim(d, out) for d in dims):
            return Unproved(Why.UNREAD if unsure else Why.ACROSS, node)
        return out
    if mixes_in_space(last.lower(), out):
        return Unproved(Why.ACROSS, node)
    if last == "Linear":
        size = known_ints(made.option("out_features", 1))
        least = max(out.least, 2) if out.axis == 0 else out.least
        return replace(out, thin=False, single=size == [1], least=least)
    if last == "LayerNorm" and out.ndim is not None and out.axis == out.ndim - 1:
        return Unproved(Why.ACROSS, node)
    if last in ("CosineSimilarity", "PairwiseDistance"):
        both = elementwise(given.args[:2], node)
        return without_dims(both, [1]) if isinstance(both, Rows) else both
    if last == "Flatten":
        start = known_ints(made.option("start_dim", 0)) or [1]
        return replace(out, axis=0, ndim=1) if start[0] == 0 else replace(out, ndim=2)
    if last == "Embedding":
        ndim = None if out.ndim is None else out.ndim + 1
        return replace(out, ndim=ndim, least=out.least + 1, single=False)
    if last in ("Bilinear",):
        return elementwise(given.args, node)
    if last == "AdaptiveLogSoftmaxWithLoss":
        return Seq((out, Linear(0)))
    if last in _SAME_SHAPE:
        return out
    spatial = ("Conv", "BatchNorm", "Max", "Avg", "AdaptiveMax", "AdaptiveAvg")
    if last.startswith(spatial) and last[-2:] in ("1d", "2d", "3d"):
        ndim = int(last[-2]) + 2 if out.axis == 0 else out.ndim
        return replace(out, ndim=out.ndim or ndim, thin=False, single=False)
    return replace(out, ndim=None, single=False)
