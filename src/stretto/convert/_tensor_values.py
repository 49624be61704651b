"""What torch's functions and methods make of abstract values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._batch_values import (
    NONE,
    UNSET,
    Alt,
    Bad,
    Count,
    Draw,
    Fixed,
    Item,
    Iter,
    Linear,
    Made,
    Ref,
    Rows,
    Seq,
    Shape,
    Value,
    Why,
    combined,
    first_bad,
    first_rows,
    is_of_batch,
    joined,
    rows_with_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_LINEAR_SHAPE = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "clone",
        "contiguous",
        "detach",
        "requires_grad_",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "flatten",
        "expand",
        "repeat",
        "transpose",
        "t",
        "permute",
        "view_as",
        "reshape_as",
        "expand_as",
        "neg",
        "negative",
        "nan_to_num",
        "detach_",
        "retain_grad",
        "squeeze_",
        "unsqueeze_",
        "ravel",
        "share_memory_",
        "pin_memory",
        "movedim",
        "swapaxes",
        "data",
        "T",
        "real",
        "tolist",
        "numpy",
    ]
)
"""Methods and attributes that keep what is linear linear."""

_MOVING = frozenset(
    ["to", "cuda", "cpu", "float", "long", "int", "detach", "clone", "contiguous"]
)

_ELEMENTWISE = frozenset(
    [
        "abs",
        "exp",
        "log",
        "log2",
        "log10",
        "log1p",
        "expm1",
        "sigmoid",
        "relu",
        "relu_",
        "tanh",
        "clamp",
        "clamp_",
        "clip",
        "clamp_min",
        "clamp_max",
        "pow",
        "sqrt",
        "rsqrt",
        "square",
        "neg",
        "negative",
        "float",
        "to",
        "cuda",
        "cpu",
        "type",
        "long",
        "int",
        "detach",
        "detach_",
        "clone",
        "contiguous",
        "half",
        "double",
        "bool",
        "bfloat16",
        "requires_grad_",
        "masked_fill",
        "masked_fill_",
        "fill_",
        "add",
        "add_",
        "sub",
        "sub_",
        "mul",
        "mul_",
        "div",
        "div_",
        "true_divide",
        "multiply",
        "subtract",
        "divide",
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
        "greater",
        "less",
        "equal_",
        "logical_not",
        "logical_and",
        "logical_or",
        "logical_xor",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "floor",
        "ceil",
        "round",
        "sign",
        "erf",
        "erfinv",
        "lgamma",
        "digamma",
        "reciprocal",
        "fmod",
        "remainder",
        "lerp",
        "addcmul",
        "addcdiv",
        "addcdiv_",
        "addcmul_",
        "isnan",
        "isinf",
        "isfinite",
        "nan_to_num",
        "where",
        "maximum",
        "minimum",
        "fmin",
        "fmax",
        "xlogy",
        "hypot",
        "copysign",
        "type_as",
        "view_as_complex",
        "view_as_real",
        "angle",
        "conj",
        "real",
        "imag",
        "leaky_relu",
        "leaky_relu_",
        "gelu",
        "elu",
        "elu_",
        "silu",
        "mish",
        "softplus",
        "logsigmoid",
        "hardtanh",
        "relu6",
        "hardswish",
        "hardsigmoid",
        "selu",
        "celu",
        "prelu",
        "softsign",
        "tanhshrink",
        "softshrink",
        "hardshrink",
        "threshold",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "rrelu",
        "local_response_norm",
        "interpolate",
        "upsample",
        "grid_sample",
        "affine_grid",
        "pad",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "lp_pool1d",
        "lp_pool2d",
        "max_unpool2d",
        "pixel_shuffle",
        "pixel_unshuffle",
        "unfold",
        "fold",
        "linear",
        "embedding",
        "group_norm",
        "instance_norm",
        "scaled_dot_product_attention",
        "from_numpy",
        "as_tensor",
        "tensor",
        "asarray",
        "FloatTensor",
        "LongTensor",
        "Tensor",
        "DoubleTensor",
        "IntTensor",
        "BoolTensor",
        "Variable",
        "numpy",
        "data_ptr",
        "retain_grad",
        "pin_memory",
        "share_memory_",
        "tril",
        "triu",
        "tril_",
        "triu_",
        "diag_embed",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "rot90",
        "zero_",
        "new_tensor",
        "checkpoint",
        "apply_",
        "map_",
        "tolist",
        "array",
        "float32",
        "int64",
        "float16",
        "byte",
        "short",
        "char",
        "checkpoint_sequential",
        "checkpoint_activations",
        "inplace",
        "softmax_",
        "copy_",
        "logit",
        "log_",
        "exp_",
        "sqrt_",
        "pow_",
        "abs_",
        "sigmoid_",
        "tanh_",
        "neg_",
        "round_",
        "bernoulli",
        "normal_",
        "uniform_",
        "random_",
        "masked_scatter",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "unflatten",
        "fft",
        "ifft",
        "fft2",
        "ifft2",
        "rfft",
        "irfft",
        "rfft2",
        "irfft2",
        "fftn",
        "ifftn",
        "rfftn",
        "irfftn",
        "fftshift",
        "ifftshift",
        "stft",
        "istft",
        "grad_fn",
        "is_floating_point",
        "addmv",
        "addbmm",
        "quantize_per_tensor",
        "fake_quantize",
        "swiglu",
        "rms_norm",
        "group_norm_",
        "zeros_like",
        "ones_like",
        "rand_like",
        "randn_like",
        "empty_like",
        "full_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
    ]
)
"""Functions and methods whose result has a row for each row of their arguments."""

_ALONG = frozenset(
    [
        "softmax",
        "log_softmax",
        "softmin",
        "gumbel_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "flip",
        "roll",
        "argsort",
        "normalize",
        "glu",
        "sort",
        "topk",
        "kthvalue",
        "fliplr",
        "flipud",
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "index_select",
        "index_add",
        "index_add_",
        "index_fill_",
        "diff",
        "renorm",
        "take_along_dim",
        "unfold_",
    ]
)
"""Functions that combine the elements of one dimension, and keep it."""

_REDUCING = frozenset(
    [
        "mean",
        "sum",
        "std",
        "var",
        "norm",
        "max",
        "min",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "median",
        "mode",
        "logsumexp",
        "prod",
        "all",
        "any",
        "nanmean",
        "nansum",
        "quantile",
        "count_nonzero",
        "std_mean",
        "var_mean",
        "vector_norm",
        "matrix_norm",
        "nanmedian",
    ]
)
"""Functions that remove a dimension, or all."""

_DEFAULT_DIMS = {
    "normalize": 1,
    "glu": -1,
    "gumbel_softmax": -1,
    "argsort": -1,
    "sort": -1,
    "topk": -1,
    "kthvalue": -1,
    "softmax": 1,
    "log_softmax": 1,
    "softmin": 1,
    "diff": -1,
    "flipud": 0,
    "fliplr": 1,
}

_DIM_PLACES = {
    "gumbel_softmax": 5,
    "normalize": 2,
    "topk": 1,
    "kthvalue": 1,
    "norm": 1,
    "vector_norm": 2,
    "roll": 1,
    "quantile": 1,
    "matrix_norm": 99,
    "diff": 1,
}
"""Place of the dimension after the tensor, if it is not the first."""

_DRAWS = frozenset(["rand", "randn", "randint", "normal", "multinomial", "poisson"])
_MAKES = frozenset(["zeros", "ones", "empty", "full", "eye", "linspace"])

_LOSSES = frozenset(
    [
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "poisson_nll_loss",
        "gaussian_nll_loss",
        "soft_margin_loss",
        "multilabel_margin_loss",
        "multi_margin_loss",
        "multilabel_soft_margin_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
        "cosine_embedding_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
        "ctc_loss",
    ]
)
_LOSS_CLASSES = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "NLLLoss2d": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "KLDivLoss": "kl_div",
    "PoissonNLLLoss": "poisson_nll_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MarginRankingLoss": "margin_ranking_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss",
    "TripletMarginLoss": "triplet_margin_loss",
    "TripletMarginWithDistanceLoss": "triplet_margin_with_distance_loss",
    "CTCLoss": "ctc_loss",
}
_REMOVING = frozenset(["cross_entropy", "nll_loss", "ctc_loss"])
"""Losses without a dimension of classes."""

_TRUSTED_LOSSES = {
    "timm.loss.LabelSmoothingCrossEntropy",
    "timm.loss.SoftTargetCrossEntropy",
    "timm.loss.BinaryCrossEntropy",
    "pytorch_msssim.ssim",
    "pytorch_msssim.ms_ssim",
    "pytorch_msssim.SSIM",
    "pytorch_msssim.MS_SSIM",
    "torchcrf.CRF",
}
"""Losses of other packages that are means over samples as they are."""

TRUSTED = (
    "transformers",
    "peft",
    "diffusers",
    "pytorch_pretrained_bert",
    "pytorch_transformers",
    "trl",
    "adapters",
)
"""Packages whose models return the mean loss."""

_ROWWISE_PACKAGES = ("torchvision", "timm", "torchaudio", "lpips", "kornia", "torch")
"""Packages whose networks return a row for each sample."""

_RECURRENT = ("RNN", "LSTM", "GRU")
_ATTENDING = (
    "MultiheadAttention",
    "Transformer",
    "TransformerEncoder",
    "TransformerDecoder",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The arguments of a call, and where it is."""

    node: cst.Call
    args: tuple[Value, ...]
    options: Mapping[str, Value]
    in_step: bool
    """Whether ranks draw their own random numbers by then."""
    repeated: set[cst.Call] = field(default_factory=set)
    """Gets the calls that draw the same numbers on each rank for its samples."""

    def get(self, name: str, place: int = -1) -> Value | None:
        """Return an argument, given by name or by position."""
        if name in self.options:
            return self.options[name]
        return self.args[place] if 0 <= place < len(self.args) else None

    @property
    def all(self) -> list[Value]:
        """Return the values of all arguments."""
        return [*self.args, *self.options.values()]


def with_elements(values: Iterable[Value]) -> list[Value]:
    """Return values, and those in tuples and lists in place of these."""
    out: list[Value] = []
    for value in values:
        if isinstance(value, Seq):
            out += with_elements(value.items)
        elif isinstance(value, Iter):
            out.append(value.item)
        elif isinstance(value, Alt):
            out += with_elements(value.values)
        else:
            out.append(value)
    return out


def elementwise(values: Iterable[Value], node: cst.CSTNode) -> Value:
    """Return the value of a function of the elements of its arguments."""
    out: Value = Fixed()
    given = [
        v
        for v in with_elements(values)
        if isinstance(v, Fixed | Rows | Linear | Item | Count | Draw | Bad)
    ]
    if (bad := first_bad(given)) is not None:
        return bad
    for value in given:
        if isinstance(value, Linear):
            return Bad(Why.NONLINEAR, node)
        if isinstance(value, Rows) and value.shifted is not None:
            return Bad(Why.ACROSS, value.shifted)
        if isinstance(value, Rows) and value.degree:
            return Bad(Why.NONLINEAR, node)
    grad = False
    for value in given:
        if isinstance(value, Fixed):
            grad = grad or value.grad
            continue
        if isinstance(value, Count):
            continue
        out = combined("?", out, value, node) if out != Fixed() else value
        if isinstance(out, Bad):
            return out
    if isinstance(out, Rows):
        return replace(out, raw=False, whole=False, kind="")
    return Fixed(grad=grad) if isinstance(out, Fixed) else out


# Dimensions


def _ints(value: Value | None) -> list[int] | None:
    """Return the numbers that a value certainly is."""
    if isinstance(value, Fixed) and isinstance(value.value, int):
        return [int(value.value)]
    if isinstance(value, Seq):
        out: list[int] = []
        for part in value.items:
            inner = _ints(part)
            if inner is None:
                return None
            out += inner
        return out
    return None


def _hits(dim: int, on: Rows) -> bool:
    """Return whether a dimension is that of the samples."""
    if on.axis is None:
        return False
    if dim < 0 and on.ndim is None:
        return on.thin and dim == -1 and on.axis == 0
    if dim < 0:
        return on.ndim is not None and dim + on.ndim == on.axis
    return dim == on.axis


def _without(on: Rows, dims: list[int]) -> Rows:
    """Return a tensor without dimensions that are not of samples."""
    axis, ndim = on.axis, on.ndim
    if axis is not None:
        axis -= sum(1 for d in dims if 0 <= d < on.axis) if on.axis else 0
        if ndim is not None and on.axis:
            axis -= sum(1 for d in dims if d < 0 and d + ndim < on.axis)
    return replace(
        on,
        axis=axis,
        ndim=None if ndim is None else max(ndim - len(dims), 1),
        raw=False,
        whole=False,
        kind="",
    )


def reduced(name: str, on: Rows, given: Given) -> Value:
    """Return what ``mean``, ``sum`` and similar functions make of a tensor."""
    node = given.node
    place = _DIM_PLACES.get(name, 0) + 1
    dim = given.get("dim", place) or given.get("axis")
    if name in ("max", "min") and isinstance(dim, Rows):
        return elementwise(given.args, node)
    if name == "norm" and "dim" not in given.options and len(given.args) < 3:
        dim = None
    dims = _ints(dim)
    known = dims is not None or (isinstance(dim, Fixed) and dim.value is not None)
    over_all = dim is None or (isinstance(dim, Fixed) and dim.value is None)
    keep = given.get("keepdim", place + 1) or given.get("keepdims")
    kept = isinstance(keep, Fixed) and keep.value is True
    pair = not over_all and name in ("max", "min", "median", "mode", "kthvalue")
    if over_all or (dims is not None and any(_hits(d, on) for d in dims)):
        if name in ("mean", "nanmean") and on.copies:
            if on.opaque is not None and not on.trusted and _is_loss_name(on.opaque):
                return Bad(Why.UNREAD, on.opaque)
            if not on.even or name == "nanmean":
                return Bad(Why.SELECTED, node)
            return Linear(on.degree)
        if name in ("sum", "nansum"):
            return Linear(on.degree + 1)
        bad = Bad(Why.ACROSS, node)
        return Seq((bad, bad)) if pair else bad
    if on.shifted is not None and name not in ("mean", "sum"):
        return Bad(Why.ACROSS, on.shifted)
    if not known and dims is None and on.axis is not None:
        return replace(on, raw=False, whole=False, kind="")
    if name not in ("mean", "sum", "nansum") and on.degree:
        return Bad(Why.NONLINEAR, node)
    out = replace(on, raw=False, whole=False, kind="")
    if not kept and dims is not None:
        out = _without(on, dims)
    if name in ("all", "any"):
        out = replace(out, kind="bool")
    return Seq((out, out)) if pair else out


def _is_loss_name(node: cst.CSTNode) -> bool:
    """Return whether a call is, by its name, of a loss."""
    if not isinstance(node, cst.Call):
        return False
    func = node.func
    name = ""
    if isinstance(func, cst.Name):
        name = func.value
    elif isinstance(func, cst.Attribute):
        name = func.attr.value
    name = name.lower()
    return any(word in name for word in ("loss", "criteri", "crit", "objective"))


def _along(name: str, on: Rows, given: Given) -> Value:
    """Return what a function along one dimension makes of a tensor."""
    node = given.node
    place = _DIM_PLACES.get(name, 0) + 1
    dim = given.get("dim", place) or given.get("dims", place) or given.get("axis")
    dims = _ints(dim)
    if dims is None:
        default = _DEFAULT_DIMS.get(name)
        dims = [default] if default is not None and dim is None else []
    pair = name in ("sort", "topk", "kthvalue")
    if any(_hits(d, on) for d in dims):
        if name in ("flip", "roll", "argsort", "sort", "index_select", "flipud"):
            order = replace(on, kind="order", raw=False, whole=False)
            if name == "argsort":
                return order
            if name == "sort" and on.raw:
                return Seq((on, order))
            if name == "sort":
                return Seq((Bad(Why.ACROSS, node), order))
        bad = Bad(Why.ACROSS, node)
        return Seq((bad, bad)) if pair else bad
    if name not in ("flip", "roll", "cumsum"):
        if on.shifted is not None:
            return Bad(Why.ACROSS, on.shifted)
        if on.degree:
            return Bad(Why.NONLINEAR, node)
    out: Value = replace(on, raw=False, whole=False, kind="")
    if name.startswith(("gather", "scatter", "index", "take")):
        others = [v for v in given.args[1:] if isinstance(v, Rows)]
        for other in others:
            if isinstance(out, Rows):
                out = rows_with_rows("?", out, replace(other, ndim=out.ndim), node)
    if name == "kthvalue" and isinstance(out, Rows):
        out = _without(out, dims)
    return Seq((out, out)) if pair else out


def resolved(dim: int, ndim: int | None) -> int | None:
    """Return a dimension counted from the front, if that is known."""
    if dim >= 0:
        return dim
    return None if ndim is None else dim + ndim


def reshaped(on: Rows, sizes: list[Value], node: cst.CSTNode) -> Value:
    """Return a tensor with another shape."""
    if len(sizes) == 1:
        if isinstance(sizes[0], Shape):
            of = sizes[0].of
            return replace(on, axis=of.axis, ndim=of.ndim, raw=False, whole=False)
        if isinstance(sizes[0], Seq):
            sizes = list(sizes[0].items)
        elif isinstance(sizes[0], Iter) or not isinstance(sizes[0], Fixed | Count):
            return replace(on, ndim=None, raw=False, whole=False)
    new = replace(on, ndim=len(sizes), raw=False, whole=False, thin=False)
    counts = [i for i, s in enumerate(sizes) if isinstance(s, Count)]
    if counts:
        return replace(new, axis=counts[0])
    free = [i for i, s in enumerate(sizes) if _ints(s) == [-1]]
    if any(isinstance(s, Iter) for s in sizes):
        return replace(on, ndim=None, raw=False, whole=False)
    if free == [0]:
        return replace(new, axis=0)
    if free and all(_ints(s) == [1] for s in sizes[: free[0]]):
        return replace(new, axis=free[0])
    if on.axis == 0 and sizes and _ints(sizes[0]) != [1]:
        return replace(new, axis=0)  # a batch size, which becomes this rank's
    return replace(new, axis=None)


_CUT = ("squeeze", "squeeze_", "unsqueeze", "unsqueeze_")


def _moved(name: str, on: Rows, given: Given) -> Value | None:
    """Return what a function that changes a shape makes of a tensor."""
    rest = list(given.args[1:])
    plain = replace(on, raw=False, whole=False, thin=False)
    dims = _ints(Seq(tuple(rest))) if rest else None
    named = _ints(given.options.get("dim"))
    dims = dims if named is None else named
    if name in ("view", "reshape", "view_as", "reshape_as", "unflatten"):
        if name.endswith("_as"):
            of = first_rows(rest)
            return plain if of is None else replace(plain, axis=of.axis, ndim=of.ndim)
        return reshaped(on, rest, given.node)
    if name in ("flatten", "ravel"):
        start = given.get("start_dim", 1)
        first = (_ints(start) or [0])[0] if start is not None else 0
        if first == 0:
            return replace(plain, axis=0, ndim=1)
        ndim = 2 if first == 1 and given.get("end_dim", 2) is None else None
        return replace(plain, ndim=ndim)
    if name in ("squeeze", "squeeze_"):
        if dims is None:
            axis = 0 if on.axis is not None else None
            if on.ndim == 1:
                return plain
            return replace(plain, axis=axis, ndim=None, thin=True)
        at = resolved(dims[0], on.ndim)
        ndim = None if on.ndim is None else on.ndim - 1
        if on.ndim is None and at in (None, 1):
            return replace(plain, ndim=None, thin=at == 1 and on.axis == 0)
        below = at is not None and on.axis is not None and at < on.axis
        if below and on.axis is not None:
            return replace(plain, axis=on.axis - 1, ndim=ndim)
        return replace(plain, ndim=ndim)
    if name in ("unsqueeze", "unsqueeze_"):
        ndim = None if on.ndim is None else on.ndim + 1
        at = dims[0] if dims else None
        if at is not None and at < 0:
            at = None if ndim is None else at + ndim
        if at is not None and on.axis is not None and at <= on.axis:
            return replace(plain, axis=on.axis + 1, ndim=ndim)
        return replace(plain, ndim=ndim)
    if name in ("transpose", "swapaxes", "transpose_", "swapdims"):
        if dims is None or len(dims) != 2 or on.axis is None:
            return replace(plain, axis=None if dims is None else on.axis)
        a, b = (resolved(d, on.ndim) for d in dims)
        if on.axis == a:
            return replace(plain, axis=b)
        return replace(plain, axis=a if on.axis == b else on.axis)
    if name in ("t", "T", "adjoint"):
        if on.axis is None:
            return plain
        if on.ndim == 1:
            return plain
        last = 2 if on.ndim is None else on.ndim
        return replace(plain, axis=last - 1 - on.axis, ndim=last)
    if name in ("mT", "H", "mH"):
        return plain
    if name in ("permute", "movedim"):
        if dims is None or on.axis is None or name == "movedim":
            return replace(plain, axis=None)
        if on.axis in dims:
            return replace(plain, axis=dims.index(on.axis), ndim=len(dims))
        back = on.axis - len(dims)
        at = dims.index(back) if back in dims else None
        return replace(plain, axis=at, ndim=len(dims))
    if name in ("expand", "expand_as", "repeat", "tile", "broadcast_to"):
        if name == "expand_as" or not rest:
            of = first_rows(rest)
            return replace(plain, ndim=None if of is None else of.ndim)
        sizes = list(rest[0].items) if isinstance(rest[0], Seq) else rest
        if len(rest) == 1 and isinstance(rest[0], Shape | Iter):
            return replace(plain, ndim=None)
        ndim = len(sizes)
        if on.ndim is not None and on.axis is not None:
            return replace(plain, axis=on.axis + ndim - on.ndim, ndim=ndim)
        counts = [i for i, s in enumerate(sizes) if isinstance(s, Count)]
        across = [i for i in counts if i != on.axis]
        repeats = name in ("repeat", "tile") and on.axis is not None
        if repeats and (across or (counts and name == "repeat")):
            return Bad(Why.ACROSS, given.node)
        return replace(plain, ndim=ndim)
    if name == "repeat_interleave":
        return replace(plain, ndim=plain.ndim)
    return None


# Several tensors


def _joined_along(name: str, given: Given) -> Value | None:
    """Return what ``cat`` and ``stack`` make of a tuple or a list."""
    parts = given.get("tensors", 0)
    node = given.node
    dim = given.get("dim", 1) or given.get("axis")
    at = (_ints(dim) or [0])[0] if dim is not None else 0
    if isinstance(dim, Fixed) and dim.value is UNSET:
        at = 1
    if isinstance(parts, Alt):
        return joined(
            [
                _joined_along(
                    name,
                    replace(
                        given,
                        args=(v, *given.args[1:]),
                        options={"dim": dim or Fixed(0)},
                    ),
                )
                or Fixed()
                for v in parts.values
            ],
            node,
        )
    if isinstance(parts, Iter):
        item = parts.item
        if isinstance(item, Item):
            return Rows(degree=item.degree)
        values: tuple[Value, ...] = (item,)
        several = True
    elif isinstance(parts, Seq):
        values, several = parts.items, len(parts.items) != 1
    elif isinstance(parts, Rows):
        return replace(parts, raw=False, whole=False)
    else:
        return None
    if (bad := first_bad(values)) is not None:
        return bad
    rows = [v for v in with_elements(values) if isinstance(v, Rows)]
    if not rows:
        linear = [v for v in values if isinstance(v, Linear)]
        if linear:
            same = all(v == linear[0] for v in linear)
            return linear[0] if same else Linear(linear[0].degree, mixed=True)
        return Fixed(grad=any(isinstance(v, Fixed) and v.grad for v in values))
    if any(isinstance(v, Linear) for v in values):
        return Bad(Why.UNREAD, node)
    first: Value = rows[0]
    for other in rows[1:]:
        if not isinstance(first, Rows):
            return first
        degree = first.degree == other.degree
        first = (
            rows_with_rows("?", first, other, node) if degree else Bad(Why.MIXED, node)
        )
    if not isinstance(first, Rows):
        return first
    if name == "stack":
        ndim = None if first.ndim is None else first.ndim + 1
        if at < 0:
            return replace(first, ndim=ndim)
        moved = first.axis is not None and at <= first.axis
        axis = first.axis + 1 if moved and first.axis is not None else first.axis
        return replace(first, axis=axis, ndim=ndim)
    if name in ("hstack", "column_stack"):
        return replace(first, ndim=2 if name == "column_stack" else first.ndim)
    if _hits(at, first):
        fixed = [v for v in values if isinstance(v, Fixed)]
        if fixed:
            return Bad(Why.UNREAD, node)
        copies = sum(r.copies for r in rows) if not (several and len(rows) == 1) else 0
        return replace(first, copies=copies or 1)
    return first


def _parts(name: str, on: Rows, given: Given) -> Value:
    """Return what ``chunk``, ``split`` and ``unbind`` make of a tensor."""
    node = given.node
    dim = given.get("dim", 2 if name != "unbind" else 1) or given.get("axis")
    at = (_ints(dim) or [0])[0] if dim is not None else 0
    size = given.get("chunks" if name == "chunk" else "split_size_or_sections", 1)
    plain = replace(on, raw=False, whole=False)
    if isinstance(dim, Fixed) and dim.value is UNSET:
        return Iter(plain)
    if not _hits(at, on):
        out = _without(on, [at]) if name == "unbind" else plain
        pieces = _ints(size)
        if name == "chunk" and pieces and 1 < pieces[0] <= 8:
            return Seq((out,) * pieces[0])
        if isinstance(size, Seq) and name == "split":
            return Seq((out,) * len(size.items))
        return Iter(out)
    if name == "unbind":
        return Iter(Item(on.degree), samples=True)
    one = replace(plain, copies=1)
    if name == "chunk" and on.copies > 1 and _ints(size) == [on.copies]:
        return Seq((one,) * on.copies)
    sized = size if isinstance(size, Count) else None
    if isinstance(size, Seq) and all(isinstance(s, Count) for s in size.items):
        return Seq((one,) * len(size.items))
    if sized is not None and sized.exact:
        return Seq((one,) * on.copies) if on.copies > 1 else Iter(one)
    if isinstance(size, Fixed) and size.value is UNSET and on.copies > 1:
        return Seq((one,) * on.copies)  # a batch size, which is listed
    return Bad(Why.ACROSS, node)


def product(a: Value, b: Value, node: cst.CSTNode, *, dot: bool = False) -> Value:
    """Return the value of a matrix product."""
    if (bad := first_bad([a, b])) is not None:
        return bad
    if isinstance(a, Alt) or isinstance(b, Alt):
        return elementwise([a, b], node)
    if isinstance(a, Rows) and isinstance(b, Rows):
        shifted = a.shifted or b.shifted
        if shifted is not None:
            return Bad(Why.ACROSS, shifted)
        flat = a.ndim == 2 or b.ndim == 2 or a.ndim == 1 or b.ndim == 1
        if (a.ndim == 1 and b.ndim == 1) or dot:
            return Linear(a.degree + b.degree + 1)
        if a.axis is not None and b.axis is not None and (flat or a.axis != b.axis):
            if a.ndim == 2 and b.ndim == 2 and a.axis == 1 and b.axis == 0:
                return Linear(a.degree + b.degree + 1)
            return Bad(Why.ACROSS, node)
        return rows_with_rows("*", replace(a, ndim=None), replace(b, ndim=None), node)
    if isinstance(a, Rows) and isinstance(b, Fixed):
        if a.axis is not None and a.ndim is not None and a.axis == a.ndim - 1:
            return Linear(a.degree + 1)
        return replace(a, raw=False, whole=False)
    if isinstance(a, Fixed) and isinstance(b, Rows):
        if b.ndim is not None and b.axis == max(b.ndim - 2, 0):
            return Linear(b.degree + 1)
        return replace(b, raw=False, whole=False)
    return combined("*", a, b, node)


def _einsum(given: Given) -> Value:
    node = given.node
    text = given.args[0] if given.args else None
    values = list(given.args[1:])
    equation = text.value if isinstance(text, Fixed) else None
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return elementwise(values, node)
    left, _, right = equation.replace(" ", "").partition("->")
    letters = set()
    degree = 0
    out: Rows | None = None
    for names, value in zip(left.split(","), values, strict=False):
        if isinstance(value, Bad):
            return value
        if isinstance(value, Rows) and names:
            axis = 0 if value.axis is None else value.axis
            letters.add(names[axis] if axis < len(names) else names[0])
            degree += value.degree
            out = value if out is None else out
            if value.shifted is not None:
                return Bad(Why.ACROSS, value.shifted)
        elif isinstance(value, Linear):
            return Bad(Why.NONLINEAR, node)
    if out is None:
        return Fixed(grad=True)
    if len(letters) > 1:
        return Bad(Why.ACROSS, node)
    letter = letters.pop()
    if letter not in right:
        return Linear(degree + 1)
    return Rows(
        axis=right.index(letter), ndim=len(right), degree=degree, opaque=out.opaque
    )


# Losses


def _text(value: Value | None) -> str | None:
    return (
        value.value
        if isinstance(value, Fixed) and isinstance(value.value, str)
        else None
    )


def loss(
    name: str,
    inputs: list[Value],
    options: Mapping[str, Value],
    node: cst.CSTNode,
    *,
    weights: Iterable[Value | None] = (),
) -> Value:
    """Return the value of one of torch's losses."""
    inputs = with_elements(inputs)
    if (
        bad := first_bad([*inputs, *(w for w in weights if w is not None)])
    ) is not None:
        return bad
    if any(isinstance(w, Linear) for w in weights):
        return Bad(Why.NONLINEAR, node)
    for value in inputs:
        if isinstance(value, Linear):
            return Bad(Why.NONLINEAR, node)
        if isinstance(value, Rows) and value.shifted is not None:
            return Bad(Why.ACROSS, value.shifted)
        if isinstance(value, Rows) and value.degree:
            return Bad(Why.NONLINEAR, node)
    averaged = options.get("size_average")
    each = options.get("reduce")
    reduction = options.get("reduction")
    how = "mean"
    if isinstance(each, Fixed) and each.value is False:
        how = "none"
    elif isinstance(averaged, Fixed) and averaged.value is False:
        how = "sum"
    elif reduction is not None:
        known = _text(reduction)
        if known is None and not (
            isinstance(reduction, Fixed) and reduction.value is None
        ):
            return Bad(Why.UNREAD, node)
        how = known or "mean"
    if any(isinstance(v, Item) for v in inputs):
        mixed = any(isinstance(v, Rows) for v in inputs)
        return Bad(Why.ACROSS, node) if mixed else Item()
    rows = [v for v in inputs if isinstance(v, Rows)]
    if not rows:
        grad = any(isinstance(v, Fixed) and v.grad for v in inputs)
        return Draw() if any(isinstance(v, Draw) for v in inputs) else Fixed(grad=grad)
    together: Value = rows[0]
    if name in _REMOVING:
        together = replace(rows[0], kind="")
    else:
        for other in rows[1:]:
            if not isinstance(together, Rows):
                return together
            together = rows_with_rows("?", together, other, node)
    if not isinstance(together, Rows):
        return together
    if how == "none":
        ndim = together.ndim
        if name in _REMOVING and ndim is not None:
            ndim = 1 if ndim == 2 else ndim - 1
        return replace(
            together, ndim=ndim, raw=False, whole=False, opaque=None, kind=""
        )
    if how == "sum":
        return Linear(1)
    if not together.even:
        return Bad(Why.SELECTED, node)
    if how == "batchmean" and together.axis not in (0, None):
        return Bad(Why.NONLINEAR, node)
    return Linear(0)


_WEIGHTS = ("weight", "pos_weight")


def _functional_loss(name: str, given: Given) -> Value:
    count = {
        "gaussian_nll_loss": 3,
        "cosine_embedding_loss": 3,
        "triplet_margin_loss": 3,
        "triplet_margin_with_distance_loss": 3,
        "margin_ranking_loss": 3,
        "ctc_loss": 2,
    }.get(name, 2)
    inputs = list(given.args[:count])
    inputs += [
        v
        for key, v in given.options.items()
        if key
        in (
            "input",
            "target",
            "input1",
            "input2",
            "anchor",
            "positive",
            "negative",
            "log_probs",
            "targets",
            "var",
        )
    ]
    weights = [given.options.get(w) for w in _WEIGHTS]
    options = dict(given.options)
    if len(given.args) > count and name != "ctc_loss":
        for value in given.args[count:]:
            text = _text(value)
            if text in ("sum", "none", "mean", "batchmean"):
                options.setdefault("reduction", value)
            elif isinstance(value, Fixed) and value.value is False:
                return Bad(Why.UNREAD, given.node)
            elif isinstance(value, Linear | Bad):
                weights.append(value)
            elif isinstance(value, Rows):
                inputs.append(value)
    if isinstance(options.get("weight"), Rows):
        inputs.append(options["weight"])
    return loss(name, inputs, options, given.node, weights=weights)


def made_loss(made: Made, given: Given) -> Value | None:
    """Return the value of a call of an object of one of torch's losses."""
    last = made.name.rpartition(".")[2]
    if not made.name.startswith("torch.nn.") or last not in _LOSS_CLASSES:
        return None
    options = dict(made.options)
    for value in made.args:
        text = _text(value)
        if text in ("sum", "none", "mean", "batchmean"):
            options.setdefault("reduction", value)
        elif isinstance(value, Fixed) and value.value is False and last != "KLDivLoss":
            return Bad(Why.UNREAD, made.node)
    weights: list[Value | None] = [options.get(w) for w in _WEIGHTS]
    weights += [v for v in made.args if isinstance(v, Linear | Bad)]
    inputs = list(given.args)
    if last == "CTCLoss":
        inputs = inputs[:2]
    inputs += list(given.options.values())
    if isinstance(options.get("weight"), Rows):
        inputs.append(options["weight"])
    return loss(_LOSS_CLASSES[last], inputs, options, given.node, weights=weights)


# Calls


def function(full: str, given: Given) -> Value | None:
    """Return the value of a call of a function of torch or NumPy, if it is known."""
    package, _, last = full.rpartition(".")
    if (
        not full.startswith(("torch.", "numpy.", "einops."))
        and full not in _TRUSTED_LOSSES
    ):
        return None
    if full in _TRUSTED_LOSSES:
        averaged = given.options.get("size_average")
        if isinstance(averaged, Fixed) and averaged.value is False:
            return first_rows(given.args) or Fixed()
        return Linear(0) if first_rows(given.all) is not None else Fixed(grad=True)
    if full.startswith("einops."):
        return _einops(last, given)
    if (
        last[:1].isupper()
        and last not in ("Tensor", "Variable")
        and not last.endswith("Tensor")
    ):
        return None
    if package.endswith("nn.functional") and last in _LOSSES:
        return _functional_loss(last, given)
    if full == "torch.autograd.grad":
        return _gradient(given)
    if full.startswith(("torch.distributed", "torch.optim", "torch.utils.data")):
        return None
    if full.startswith("torch.distributions.") and last == "kl_divergence":
        return elementwise(
            [v for v in map(_of_made, given.args) if v is not None], given.node
        )
    if last == "batch_norm":
        training = given.get("training", 5)
        still = training is None or (
            isinstance(training, Fixed) and training.value is False
        )
        on = first_rows(given.args[:1])
        if on is not None and not still:
            return Bad(Why.ACROSS, given.node)
        return on if on is not None else Fixed(grad=True)
    if last == "layer_norm":
        on = first_rows(given.args[:1])
        if on is not None and on.ndim is not None and on.axis == on.ndim - 1:
            return Bad(Why.ACROSS, given.node)
    if last == "manual_seed":
        return Fixed()
    if last.endswith("Tensor") and not any(
        is_of_batch(v) for v in with_elements(given.args)
    ):
        return Fixed()  # of a shape
    if last in _DRAWS or last in ("bernoulli", "randperm"):
        return _drawn(last, full, given)
    if last in ("arange", "range"):
        counted = any(isinstance(v, Count) for v in given.args)
        return Rows(ndim=1, kind="order") if counted else Fixed()
    if last in _MAKES:
        filled = given.get("fill_value", 1)
        if last == "full" and isinstance(filled, Linear | Bad | Draw | Count):
            return filled
        return Fixed()
    if last == "einsum":
        return _einsum(given)
    if last in (
        "stack",
        "cat",
        "concat",
        "concatenate",
        "hstack",
        "vstack",
        "column_stack",
        "dstack",
    ):
        return _joined_along(
            "cat" if last.startswith(("cat", "conc", "vstack")) else last, given
        )
    if last == "pad_sequence":
        first = given.get("batch_first", 1)
        axis = 0 if isinstance(first, Fixed) and first.value is True else 1
        return Rows(axis=axis) if is_of_batch(Seq(tuple(given.args[:1]))) else Fixed()
    if last in ("pack_padded_sequence", "pack_sequence", "pad_packed_sequence"):
        on = first_rows(given.args[:1])
        if on is None:
            return Fixed(grad=True)
        first = given.get("batch_first", 2 if last.startswith("pack_p") else 1)
        if last == "pad_packed_sequence":
            axis = 0 if isinstance(first, Fixed) and first.value is True else 1
            return Seq((Rows(axis=axis), Rows(ndim=1)))
        return replace(on, axis=None, ndim=None)
    if last in ("cdist", "pdist", "corrcoef", "cov"):
        on = first_rows(given.args)
        if on is None:
            return Fixed(grad=True)
        batched = last == "cdist" and on.axis == 0 and (on.ndim or 0) >= 3
        of_both = all(isinstance(v, Rows) for v in given.args[:2])
        return (
            on
            if batched or (last == "cdist" and not of_both)
            else Bad(Why.ACROSS, given.node)
        )
    if last in ("matmul", "mm", "bmm", "dot", "mv", "inner") and len(given.args) >= 2:
        return product(given.args[0], given.args[1], given.node, dot=last == "dot")
    if last in ("addmm", "baddbmm") and len(given.args) >= 3:
        inner = product(given.args[1], given.args[2], given.node)
        return combined("+", given.args[0], inner, given.node)
    if last in ("cosine_similarity", "pairwise_distance"):
        both = elementwise(given.args[:2], given.node)
        if not isinstance(both, Rows):
            return both
        at = _ints(given.get("dim", 2)) or [1 if last == "cosine_similarity" else -1]
        return Bad(Why.ACROSS, given.node) if _hits(at[0], both) else _without(both, at)
    if last == "one_hot":
        on = first_rows(given.args)
        return (
            Fixed()
            if on is None
            else replace(
                on,
                ndim=None if on.ndim is None else on.ndim + 1,
                raw=False,
                whole=False,
            )
        )
    if last == "checkpoint":
        return None
    if last in ("sigmoid_focal_loss",):
        return loss(
            "mse_loss",
            list(given.args[:2]),
            {"reduction": Fixed("none"), **given.options},
            given.node,
        )
    if not given.args and given.options:
        given = replace(given, args=tuple(given.options.values()), options={})
    known = (
        last in _ELEMENTWISE
        or last in _ALONG
        or last in _REDUCING
        or last in _LINEAR_SHAPE
        or last in _OTHER
    )
    if not known:
        return None
    return tensor_method(last, given)


_OTHER = frozenset(
    [
        "chunk",
        "split",
        "unbind",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "reshape",
        "flatten",
        "t",
        "repeat_interleave",
        "masked_select",
        "tile",
        "broadcast_to",
        "movedim",
        "swapaxes",
        "outer",
        "diag",
        "diagonal",
        "trace",
        "cross",
        "ger",
        "nonzero",
        "bincount",
        "unique",
        "take",
        "index_put",
        "index_put_",
        "item",
        "numel",
        "size",
        "dim",
        "numel",
        "searchsorted",
        "bucketize",
        "histc",
        "meshgrid",
        "broadcast_tensors",
        "split_with_sizes",
        "tensor_split",
        "ravel",
        "kron",
        "logdet",
        "slogdet",
        "det",
        "inverse",
        "svd",
        "eig",
        "eigh",
        "qr",
        "cholesky",
        "pinverse",
        "expand",
    ]
)


def _of_made(value: Value) -> Value | None:
    if isinstance(value, Made):
        return first_rows([value]) or first_bad([value]) or Fixed(grad=True)
    return value


def _einops(last: str, given: Given) -> Value | None:
    on = first_rows(given.args[:1])
    text = _text(given.get("pattern", 1))
    if on is None:
        return Fixed(grad=True)
    if text is None or "->" not in text or on.axis is None:
        return replace(on, ndim=None, raw=False, whole=False)
    left, _, right = text.partition("->")
    before, after = _groups(left), _groups(right)
    name = before[on.axis][0] if on.axis < len(before) and before[on.axis] else None
    if name is None:
        return replace(on, ndim=None, raw=False, whole=False)
    for place, group in enumerate(after):
        if name in group:
            first = place if group[0] == name or True else None
            return replace(on, axis=first, ndim=len(after), raw=False, whole=False)
    if last == "reduce":
        how = _text(given.get("reduction", 2))
        if how in ("mean", "sum"):
            return Linear(on.degree + (how == "sum"))
    return Bad(Why.ACROSS, given.node)


def _groups(text: str) -> list[list[str]]:
    out: list[list[str]] = []
    inside = False
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            inside = True
            out.append([])
        elif word == ")":
            inside = False
        elif inside:
            out[-1].append(word)
        else:
            out.append([word])
    return out


def _gradient(given: Given) -> Value:
    """Return gradients of outputs for inputs, in a tuple."""
    of, to = given.get("outputs", 0), given.get("inputs", 1)
    weights = given.get("grad_outputs", 2)
    if (bad := first_bad([v for v in (of, to) if v is not None])) is not None:
        return Seq((bad,))
    inputs = first_rows([to]) if to is not None else None
    of = with_elements([of])[0] if of is not None else None
    if inputs is None:
        if isinstance(of, Linear):
            return Seq((of,))
        if isinstance(of, Rows):
            return Seq((Linear(of.degree + 1),))
        return Seq((Fixed(grad=True),))
    plain = replace(inputs, raw=False, whole=False, kind="", opaque=None)
    if isinstance(of, Linear):
        return Seq((replace(plain, degree=of.degree - 1),))
    if isinstance(weights, Linear | Bad):
        return Seq((Bad(Why.NONLINEAR, given.node),))
    return Seq((plain,))


def numpy_drawn(given: Given) -> Value:
    """Return random numbers of NumPy, which are the same on all ranks."""
    values = list(given.all)
    size = given.options.get("size")
    if size is None and values:
        size = values[-1]
    if isinstance(size, Ref):
        return Fixed()
    sizes = list(size.items) if isinstance(size, Seq) else [size]
    if given.in_step and any(isinstance(s, Count | Shape) for s in sizes):
        given.repeated.add(given.node)
        return Rows()
    return Fixed()


def _drawn(last: str, full: str, given: Given) -> Value:
    """Return random numbers: each rank draws its own once training has begun."""
    if full.startswith("numpy."):
        return numpy_drawn(given)
    if last == "randperm":
        return Rows(ndim=1, kind="order") if given.in_step else Fixed()
    if last in ("bernoulli", "multinomial", "poisson", "normal") and (
        rows := first_rows(given.args)
    ):
        return replace(rows, raw=False, whole=False)
    if not given.in_step:
        return Fixed()
    sizes = list(given.args)
    size = given.get("size")
    if size is not None:
        sizes = [size]
    elif last == "randint":
        sizes = [v for v in sizes if isinstance(v, Seq | Shape | Iter)]
    elif last == "normal":
        sizes = list(sizes[2:])
    if len(sizes) == 1 and isinstance(sizes[0], Seq):
        sizes = list(sizes[0].items)
    generator = given.options.get("generator")
    repeated = generator is not None and generator != NONE
    first = sizes[0] if sizes else None
    if isinstance(first, Shape):
        out: Value = replace(first.of, raw=False, whole=False, kind="", opaque=None)
    elif first is None or _ints(first) == [1]:
        out = Draw()
        if len(sizes) > 1 and isinstance(sizes[1], Count):
            out = Rows(axis=1, ndim=len(sizes))
    else:
        counts = [i for i, s in enumerate(sizes) if isinstance(s, Count)]
        out = Rows(axis=counts[0] if counts else 0, ndim=len(sizes))
    if repeated and isinstance(out, Rows):
        given.repeated.add(given.node)
    return out


def tensor_method(name: str, given: Given) -> Value | None:
    """Return the value of a method of a tensor, the first argument."""
    if not given.args:
        return Fixed()
    on = given.args[0]
    node = given.node
    if isinstance(on, Alt):
        return joined(
            [
                tensor_method(name, replace(given, args=(v, *given.args[1:])))
                or Fixed()
                for v in on.values
            ],
            node,
        )
    if isinstance(on, Seq | Iter) and name in (
        "tensor",
        "as_tensor",
        "array",
        "asarray",
        "FloatTensor",
        "LongTensor",
        "Tensor",
        "mean",
        "sum",
        "max",
        "min",
        "std",
    ):
        inner = _joined_along("stack", replace(given, options={}, args=(on,)))
        if inner is not None and is_of_batch(inner):
            if name in ("mean", "sum", "max", "min", "std"):
                return tensor_method(
                    name, replace(given, args=(inner, *given.args[1:]))
                )
            return inner
        return Fixed()
    if isinstance(on, Bad):
        pair = name in ("sort", "topk", "max", "min") and len(given.args) > 1
        return Seq((on, on)) if pair else on
    if name in ("item",):
        return on
    if isinstance(on, Linear):
        return _linear_method(name, on, given)
    if isinstance(on, Item):
        return on
    rest = list(given.args[1:])
    if isinstance(on, Rows):
        out = _rows_method(name, on, given)
        if out is not None:
            return out
        return None
    if isinstance(on, Draw):
        if name in ("normal_", "uniform_", "random_"):
            return on
        return elementwise([on, *rest], node)
    if isinstance(on, Count):
        return (
            on
            if name in ("float", "to", "long", "int", "clone", "tensor", "as_tensor")
            else Bad(Why.UNREAD, node)
        )
    # A value without samples, with others that may have some.
    if name in ("matmul", "mm", "bmm", "mv", "dot") and rest:
        return product(on, rest[0], node)
    if name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
        return Rows() if given.in_step else on
    if name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like"):
        return Fixed()
    if name in ("repeat", "expand") and any(
        isinstance(v, Count) for v in with_elements(rest)
    ):
        return Fixed(grad=isinstance(on, Fixed) and on.grad)
    others = [v for v in with_elements(rest) if is_of_batch(v)]
    if name in ("max", "min") and not others and len(given.args) > 1:
        return Seq((Fixed(), Fixed()))
    if name in ("sort", "topk"):
        return Seq((Fixed(), Fixed()))
    if name in ("mul", "mul_", "multiply"):
        return combined("*", on, rest[0], node) if rest else on
    if name in ("add", "add_", "sub", "sub_"):
        return combined("+", on, rest[0], node) if rest else on
    if others:
        if name in ("index_select", "gather", "take"):
            return (
                replace(others[0], raw=False, whole=False, kind="")
                if isinstance(others[0], Rows)
                else others[0]
            )
        return elementwise([on, *rest], node)
    grad = isinstance(on, Fixed) and on.grad and name not in ("detach", "item", "data")
    return Fixed(grad=grad)


def _linear_method(name: str, on: Linear, given: Given) -> Value:
    node = given.node
    rest = list(given.args[1:])
    if name in _LINEAR_SHAPE or name in (
        "mean",
        "sum",
        "cumsum",
        "select",
        "diag",
        "trace",
        "diagonal",
        "chunk",
        "split",
        "unbind",
    ):
        return on
    if name in ("add", "add_", "sub", "sub_") and rest:
        return combined("+", on, rest[0], node)
    if name in ("mul", "mul_", "multiply") and rest:
        return combined("*", on, rest[0], node)
    if name in ("div", "div_", "true_divide", "divide") and rest:
        return combined("/", on, rest[0], node)
    if name in ("size", "dim", "numel"):
        return Fixed()
    return Bad(Why.NONLINEAR, node)


_ARITHMETIC = {
    "add": "+",
    "add_": "+",
    "sub": "-",
    "sub_": "-",
    "subtract": "-",
    "mul": "*",
    "mul_": "*",
    "multiply": "*",
    "div": "/",
    "div_": "/",
    "divide": "/",
    "true_divide": "/",
}


def _rows_method(name: str, on: Rows, given: Given) -> Value | None:
    node = given.node
    rest = list(given.args[1:])
    plain = replace(on, raw=False, whole=False)
    if name in ("size",):
        if not rest and "dim" not in given.options:
            return Shape(on)
        dims = _ints(given.get("dim", 1))
        if dims is None:
            return Fixed()
        return size_of(on, dims[0])
    if name in ("numel", "nelement", "__len__"):
        return Count(1, exact=False) if on.even else Bad(Why.SELECTED, node)
    if name in ("dim", "ndimension", "get_device", "element_size"):
        return Fixed() if on.ndim is None else Fixed(on.ndim)
    if name in _ARITHMETIC and rest:
        return combined(_ARITHMETIC[name], on, rest[0], node)
    if name in ("matmul", "mm", "bmm", "mv", "dot") and rest:
        return product(on, rest[0], node, dot=name == "dot")
    if name in _REDUCING:
        return reduced(name, on, given)
    if name in _ALONG:
        return _along(name, on, given)
    if name in ("chunk", "split", "unbind", "tensor_split", "split_with_sizes"):
        return _parts(name, on, given)
    moved = _moved(name, on, given)
    if moved is not None:
        return moved
    if name in (
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
        "bool",
        "logical_not",
        "logical_and",
        "logical_or",
        "isnan",
        "isfinite",
        "isinf",
    ):
        out = elementwise([on, *rest], node)
        return replace(out, kind="bool") if isinstance(out, Rows) else out
    if name == "masked_select":
        return replace(plain, even=False, ndim=1, axis=0)
    if name == "select":
        dims = _ints(given.get("dim", 1)) or [1]
        return Bad(Why.ACROSS, node) if _hits(dims[0], on) else _without(on, dims)
    if name == "narrow":
        dims = _ints(given.get("dim", 1)) or [1]
        return Bad(Why.ACROSS, node) if _hits(dims[0], on) else plain
    if name in (
        "outer",
        "ger",
        "cdist",
        "cov",
        "corrcoef",
        "trace",
        "det",
        "svd",
        "kron",
    ):
        return Bad(Why.ACROSS, node)
    if name in ("diag", "diagonal"):
        return (
            Bad(Why.ACROSS, node)
            if on.ndim in (None, 2) and not given.options
            else plain
        )
    if name in ("nonzero", "unique", "bincount", "histc"):
        return replace(plain, even=False, ndim=None)
    if name in (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_tensor",
    ):
        filled = given.get("fill_value", 1)
        if isinstance(filled, Linear | Bad):
            return Bad(Why.ACROSS, node)
        if name.startswith("new_"):
            return Fixed()
        return replace(plain, kind="", shifted=None, degree=0, opaque=None)
    if name == "where":
        return elementwise([on, *rest], node)
    if name in _MOVING:
        return replace(on, whole=False)
    if name in _LINEAR_SHAPE:
        return plain
    if name in ("requires_grad_", "register_hook", "backward"):
        return plain
    if name in _ELEMENTWISE or name in ("log_prob", "rsample", "sample"):
        return elementwise([on, *rest, *given.options.values()], node)
    return None


def size_of(on: Rows, dim: int) -> Value:
    """Return the size of one dimension of a tensor."""
    if _hits(dim, on) or (on.axis is None and dim == 0):
        return (
            Count()
            if on.even and on.copies == 1
            else Count(exact=False)
            if on.even
            else Bad(Why.SELECTED, on.opaque or cst.Name("x"))
        )
    return Fixed()


def module(made: Made, given: Given, *, trusted: bool) -> Value:
    """Return what an object that a library made returns for its arguments."""
    known = made_loss(made, given)
    if known is not None:
        return known
    node = given.node
    full, last = made.name, made.name.rpartition(".")[2]
    values = with_elements(given.all)
    if full in _TRUSTED_LOSSES:
        return Linear(0) if first_rows(values) is not None else Fixed(grad=True)
    if (bad := first_bad(values)) is not None:
        return bad
    if any(isinstance(v, Item) for v in values):
        return Item()
    own = first_rows([made])
    rows = first_rows(given.args[:1]) or first_rows(values)
    if rows is None:
        if any(isinstance(v, Linear) for v in values):
            return Bad(Why.NONLINEAR, node)
        if own is not None:
            return replace(own, raw=False, whole=False, opaque=node)
        return Draw() if any(isinstance(v, Draw) for v in values) else Fixed(grad=True)
    if full.startswith("torch.nn."):
        return _layer(made, last, rows, given)
    if rows.shifted is not None:
        return Bad(Why.ACROSS, rows.shifted)
    if full.startswith(_ROWWISE_PACKAGES) and "detection" not in full:
        return replace(rows, ndim=None, raw=False, whole=False, kind="", opaque=None)
    is_trusted = trusted or full.startswith(TRUSTED)
    return Rows(
        opaque=node, trusted=is_trusted, axis=rows.axis or 0, copies=rows.copies
    )


def _layer(made: Made, last: str, rows: Rows, given: Given) -> Value:
    node = given.node
    if rows.shifted is not None:
        return Bad(Why.ACROSS, rows.shifted)
    out = replace(rows, raw=False, whole=False, kind="")
    first = made.option("batch_first")
    if last in ("TransformerEncoder", "TransformerDecoder") and made.args:
        inner = made.args[0]
        layers = inner.values if isinstance(inner, Alt) else (inner,)
        options = [v.option("batch_first") for v in layers if isinstance(v, Made)]
        first = options[0] if options else Fixed()
    is_first = isinstance(first, Fixed) and first.value is True
    unknown = isinstance(first, Fixed) and first.value is UNSET
    if last in (*_RECURRENT, *_ATTENDING):
        recurrent = last in _RECURRENT
        known = rows.axis == 0 and rows.ndim != 2
        given_rows = recurrent or first_rows(given.args[:1]) is not None
        if known and not is_first and not unknown and given_rows:
            bad = Bad(Why.ACROSS, node)
            several = recurrent or last == "MultiheadAttention"
            return Seq((bad, bad)) if several else bad
        state: Value = replace(out, axis=1 if out.axis is not None else None, ndim=None)
        if last == "LSTM":
            return Seq((out, Seq((state, state))))
        if recurrent:
            return Seq((out, state))
        return Seq((out, out)) if last == "MultiheadAttention" else out
    if last == "LSTMCell":
        return Seq((out, out))
    if last in ("Softmax", "LogSoftmax", "Softmin", "GLU"):
        dims = _ints(made.option("dim", 0)) or [1 if last != "GLU" else -1]
        return Bad(Why.ACROSS, node) if any(_hits(d, out) for d in dims) else out
    if last == "LayerNorm" and out.ndim is not None and out.axis == out.ndim - 1:
        return Bad(Why.ACROSS, node)
    if last in ("CosineSimilarity", "PairwiseDistance"):
        both = elementwise(given.args[:2], node)
        return _without(both, [1]) if isinstance(both, Rows) else both
    if last == "Flatten":
        start = _ints(made.option("start_dim", 0)) or [1]
        return replace(out, axis=0, ndim=1) if start[0] == 0 else replace(out, ndim=2)
    if last == "Embedding":
        return replace(out, ndim=None if out.ndim is None else out.ndim + 1)
    if last in ("Bilinear",):
        return elementwise(given.args, node)
    if last == "AdaptiveLogSoftmaxWithLoss":
        return Seq((out, Linear(0)))
    if last in ("Identity", "Linear", "Dropout", "ReLU", "BatchNorm1d"):
        return out
    return replace(
        out,
        ndim=out.ndim if last.startswith(("Conv", "BatchNorm", "Max", "Avg")) else None,
    )
