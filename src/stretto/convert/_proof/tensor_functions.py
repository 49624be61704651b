"""Functions of torch, NumPy and einops by their full names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import combined, elementwise
from stretto.convert._proof.batch_values import (
    UNSET,
    Constant,
    Count,
    Draw,
    LibraryResult,
    Linear,
    Rows,
    Seq,
    Shape,
    Unproved,
    Why,
    first_bad,
    first_rows,
    has_count,
    is_of_batch,
    with_elements,
)
from stretto.convert._proof.dimensions import (
    is_sample_dim,
    may_be_sample_dim,
    mixes_in_space,
    without_dims,
)
from stretto.convert._proof.draws import drawn
from stretto.convert._proof.equations import einops_function, einsum
from stretto.convert._proof.fixed_tensors import made
from stretto.convert._proof.given_arguments import known_ints
from stretto.convert._proof.known_names import TRUSTED_LOSSES
from stretto.convert._proof.tensor_joins import joined_along, product
from stretto.convert._proof.tensor_losses import LOSSES, functional_loss, loss
from stretto.convert._proof.tensor_methods import tensor_method
from stretto.convert._proof.tensor_names import (
    ALONG,
    DRAWS,
    ELEMENTWISE,
    LINEAR_SHAPE,
    MAKES,
    OTHER,
    REDUCING,
)

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


def tensor_function(full: str, given: CallArguments) -> Value | None:
    """Return the value of a call of a function of torch or NumPy, if it is known."""
    package, _, last = full.rpartition(".")
    if (
        not full.startswith(("torch.", "numpy.", "einops."))
        and full not in TRUSTED_LOSSES
    ):
        return None
    if full in TRUSTED_LOSSES:
        averaged = given.options.get("size_average")
        if isinstance(averaged, Constant) and averaged.value is False:
            return first_rows(given.args) or Constant()
        return Linear(0) if first_rows(given.all) is not None else Constant(grad=True)
    if full.startswith("einops."):
        return einops_function(last, given)
    if (
        last[:1].isupper()
        and last not in ("Tensor", "Variable")
        and not last.endswith("Tensor")
    ):
        return None
    if package.endswith("nn.functional") and last in LOSSES:
        return functional_loss(last, given)
    if full == "torch.autograd.grad":
        return gradients(given)
    if full.startswith(("torch.distributed", "torch.optim", "torch.utils.data")):
        return None
    if full.startswith("torch.distributions.") and last == "kl_divergence":
        return elementwise(
            [v for v in map(_of_made, given.args) if v is not None], given.node
        )
    place = first_rows(given.args[:1])
    if place is not None and mixes_in_space(last, place):
        return Unproved(Why.ACROSS, given.node)
    if last == "batch_norm":
        training = given.get("training", 5)
        still = training is None or (
            isinstance(training, Constant) and training.value is False
        )
        on = first_rows(given.args[:1])
        if on is not None and not still:
            return Unproved(Why.ACROSS, given.node)
        return on if on is not None else Constant(grad=True)
    if last == "layer_norm":
        on = first_rows(given.args[:1])
        if on is not None and on.ndim is not None and on.axis == on.ndim - 1:
            return Unproved(Why.ACROSS, given.node)
    if last == "manual_seed":
        return Constant()
    if last.endswith("Tensor") and not any(
        is_of_batch(v) for v in with_elements(given.args)
    ):
        first = given.args[0] if len(given.args) == 1 else None
        if any(has_count(v) or isinstance(v, Shape) for v in given.args):
            return made(given.args, uniform=True)
        of_data = isinstance(first, Constant) and first.value is UNSET
        return first if of_data and isinstance(first, Constant) else Constant()
    if last in DRAWS or last in ("bernoulli", "randperm"):
        return drawn(last, full, given)
    if last in ("arange", "range"):
        counted = any(isinstance(v, Count) for v in given.args)
        plain = len(given.args) == 1 or known_ints(given.args[0]) == [0]
        plain = plain and len(given.args) < 3 and "step" not in given.options
        if counted and not plain:
            return Unproved(Why.ACROSS, given.node)
        return (
            Rows(ndim=1, kind="order") if counted else Constant(shape=_length(given, 0))
        )
    if last in MAKES:
        filled = given.get("fill_value", 1)
        if last == "full" and isinstance(filled, Linear | Unproved | Draw | Count):
            return filled
        counts = [v for v in with_elements(given.args) if isinstance(v, Count)]
        if len(counts) > 1 or (counts and last == "eye"):
            return Unproved(Why.ACROSS, given.node)
        if last == "linspace":
            steps = given.get("steps", 2) or given.get("num")
            if counts and [steps] != counts:
                return Unproved(Why.COUNTED, given.node)
            return (
                Rows(ndim=1, kind="order")
                if counts
                else Constant(shape=_length(given, 2))
            )
        sizes = given.args[:1] if last in ("full", "eye") else given.args
        size = given.options.get("size", given.options.get("shape"))
        out = made(sizes if size is None else (size,), uniform=last != "eye")
        return out if last != "eye" else replace(out, shape=None)
    if last == "einsum":
        return einsum(given)
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
        return joined_along(
            "cat" if last.startswith(("cat", "conc", "vstack")) else last, given
        )
    if last == "pad_sequence":
        first = given.get("batch_first", 1)
        axis = 0 if isinstance(first, Constant) and first.value is True else 1
        return (
            Rows(axis=axis) if is_of_batch(Seq(tuple(given.args[:1]))) else Constant()
        )
    if last in ("pack_padded_sequence", "pack_sequence", "pad_packed_sequence"):
        on = first_rows(given.args[:1])
        if on is None:
            return Constant(grad=True)
        first = given.get("batch_first", 2 if last.startswith("pack_p") else 1)
        if last == "pad_packed_sequence":
            axis = 0 if isinstance(first, Constant) and first.value is True else 1
            return Seq((Rows(axis=axis), Rows(ndim=1)))
        return replace(on, axis=None, ndim=None)
    if last in ("cdist", "pdist", "corrcoef", "cov"):
        on = first_rows(given.args)
        if on is None:
            return Constant(grad=True)
        batched = last == "cdist" and on.axis == 0 and (on.ndim or 0) >= 3
        of_both = all(isinstance(v, Rows) for v in given.args[:2])
        return (
            on
            if batched or (last == "cdist" and not of_both)
            else Unproved(Why.ACROSS, given.node)
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
        at = known_ints(given.get("dim", 2)) or [
            1 if last == "cosine_similarity" else -1
        ]
        return (
            Unproved(Why.ACROSS, given.node)
            if is_sample_dim(at[0], both) or may_be_sample_dim(at[0], both)
            else without_dims(both, at)
        )
    if last == "one_hot":
        on = first_rows(given.args)
        return (
            Constant()
            if on is None
            else replace(
                on,
                ndim=None if on.ndim is None else on.ndim + 1,
                single=False,
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
            {"reduction": Constant("none"), **given.options},
            given.node,
        )
    if not given.args and given.options:
        given = replace(given, args=tuple(given.options.values()), options={})
    known = (
        last in ELEMENTWISE
        or last in ALONG
        or last in REDUCING
        or last in LINEAR_SHAPE
        or last in OTHER
    )
    if not known:
        return None
    return tensor_method(last, given)


def _length(given: CallArguments, place: int) -> tuple[int | None]:
    """Return the shape of a range, which one argument or the last says."""
    known = known_ints(given.get("steps", place))
    only = place > 0 or len(given.args) == 1
    return (known[0] if known is not None and only else None,)


def _of_made(value: Value) -> Value | None:
    """Return the samples in what a library made, or the value itself."""
    if isinstance(value, LibraryResult):
        return first_rows([value]) or first_bad([value]) or Constant(grad=True)
    return value


def gradients(given: CallArguments) -> Value:
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
        return Seq((Constant(grad=True),))
    plain = replace(inputs, raw=False, whole=False, kind="", opaque=None)
    if isinstance(of, Linear):
        return Seq((replace(plain, degree=of.degree - 1),))
    if isinstance(weights, Linear | Unproved):
        return Seq((Unproved(Why.NONLINEAR, given.node),))
    return Seq((plain,))
