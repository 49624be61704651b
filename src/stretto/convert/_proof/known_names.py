"""Names of Python and of libraries that have rules of their own."""

BUILTINS = frozenset(
    [
        "print",
        "len",
        "range",
        "enumerate",
        "zip",
        "sum",
        "max",
        "min",
        "float",
        "int",
        "abs",
        "round",
        "bool",
        "complex",
        "pow",
        "list",
        "tuple",
        "sorted",
        "set",
        "reversed",
        "iter",
        "frozenset",
        "next",
        "map",
        "filter",
        "getattr",
        "setattr",
        "dict",
        "isinstance",
        "hasattr",
        "callable",
        "issubclass",
        "type",
        "id",
        "any",
        "all",
        "str",
        "repr",
        "open",
        "input",
        "super",
        "format",
        "vars",
        "dir",
        "hash",
        "ord",
        "chr",
        "divmod",
        "slice",
        "object",
        "property",
        "staticmethod",
        "classmethod",
        "Exception",
        "ValueError",
        "RuntimeError",
        "NotImplementedError",
        "KeyboardInterrupt",
        "exit",
        "quit",
    ]
)

SAME = frozenset(
    [
        "torch.jit.script",
        "torch.jit.trace",
        "torch.nn.utils.spectral_norm",
        "torch.nn.utils.weight_norm",
        "torch.nn.utils.parametrizations.spectral_norm",
        "torch.nn.utils.parametrizations.weight_norm",
        "torch.optim.swa_utils.AveragedModel",
        "torch.autograd.Variable",
        "torch.autograd.variable.Variable",
    ]
)
"""Functions that return what they are given, or something that computes the same."""

PASSING = frozenset(["scale", "scale_loss", "to_device", "prepare", "send_to_device"])
"""Methods that return the tensor that they are given, or a fixed multiple of it."""

TENSOR_NAMES = frozenset(
    [
        "matmul",
        "mm",
        "bmm",
        "dot",
        "mv",
        "mul",
        "mul_",
        "add",
        "add_",
        "sub",
        "sub_",
        "div",
        "div_",
        "copy_",
        "index_add_",
        "scatter",
        "scatter_",
        "scatter_add",
        "index_add",
        "index_add_",
        "scatter_add_",
        "gather",
        "index_select",
        "masked_fill",
        "masked_fill_",
        "fill_",
        "where",
        "expand_as",
        "view_as",
        "type_as",
        "repeat",
        "expand",
        "pow",
        "to",
        "eq",
        "ne",
        "gt",
        "lt",
        "ge",
        "le",
        "max",
        "min",
        "new_zeros",
        "new_ones",
        "new_full",
        "reshape",
        "view",
        "index_copy_",
        "index_fill_",
        "lerp_",
        "lerp",
        "addmm",
        "addcmul",
        "clamp",
        "multiply",
        "sum",
        "mean",
    ]
)
"""Methods by which a value that cannot be read is taken for a tensor."""

TRUSTED_LOSSES = {
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


GENERATORS = frozenset(
    [
        *("numpy.random.default_rng", "numpy.random.Generator"),
        *("numpy.random.RandomState", "random.Random"),
    ]
)
"""Objects that draw random numbers, the same ones on each rank."""
