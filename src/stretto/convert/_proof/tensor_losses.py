"""Losses of torch, as functions and as objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import has_size, rows_with_rows
from stretto.convert._proof.batch_values import (
    Constant,
    Draw,
    Item,
    Linear,
    Rows,
    Unproved,
    Why,
    first_bad,
    first_nonlinear,
    with_elements,
)
from stretto.convert._proof.given_arguments import known_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import libcst as cst

    from stretto.convert._proof.batch_values import LibraryResult, Value
    from stretto.convert._proof.given_arguments import CallArguments


LOSSES = frozenset(
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


_WEIGHTS = ("weight", "pos_weight")


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
        return Unproved(Why.NONLINEAR, node)
    if (bad := first_nonlinear(inputs, node)) is not None:
        return bad
    averaged = options.get("size_average")
    each = options.get("reduce")
    reduction = options.get("reduction")
    how = "mean"
    if isinstance(each, Constant) and each.value is False:
        how = "none"
    elif isinstance(averaged, Constant) and averaged.value is False:
        how = "sum"
    elif reduction is not None:
        known = known_text(reduction)
        if known is None and not (
            isinstance(reduction, Constant) and reduction.value is None
        ):
            return Unproved(Why.UNREAD, node)
        how = known or "mean"
    if any(isinstance(v, Item) for v in inputs):
        mixed = any(isinstance(v, Rows) for v in inputs)
        placed = any(isinstance(v, Item) and v.place for v in inputs)
        return Unproved(Why.ACROSS, node) if mixed or placed else Item()
    rows = [v for v in inputs if isinstance(v, Rows)]
    if not rows:
        if any(isinstance(v, Draw) for v in inputs):
            return Draw()
        grad = any(isinstance(v, Constant) and v.grad for v in inputs)
        counted = any(isinstance(v, Constant) and v.counted for v in inputs)
        if counted and how == "sum":
            return Linear(1)
        return Constant(grad=grad, counted=counted and how == "none")
    together: Value = rows[0]
    like = rows[0]
    if name in _REMOVING and like.axis == 0:
        like = replace(like, ndim=1)
    if any(isinstance(v, Constant) and has_size(v, like) for v in inputs):
        return Unproved(Why.SIZED, node)
    if name in _REMOVING:
        if any(r.sorted is not rows[0].sorted for r in rows):
            return Unproved(Why.ACROSS, node)
        together = replace(rows[0], kind="")
    else:
        for other in rows[1:]:
            if not isinstance(together, Rows):
                return together
            together = rows_with_rows("?", together, other, node)
    if not isinstance(together, Rows):
        return together
    if how == "none":
        if name in _REMOVING:
            together = _without_classes(together, rows[1:])
        return replace(together, raw=False, whole=False, opaque=None, kind="")
    if how == "sum":
        return Linear(1)
    if not together.even:
        return Unproved(Why.SELECTED, node)
    if how == "batchmean" and together.axis not in (0, None):
        return Unproved(Why.NONLINEAR, node)
    return Linear(0)


def _without_classes(on: Rows, targets: list[Rows]) -> Rows:
    """Return a tensor without its dimension of classes."""
    if on.ndim is not None:
        return replace(on, ndim=max(on.ndim - 1, 1))
    if any(t.ndim == 1 for t in targets):
        return replace(on, ndim=1)
    least = max(1, on.least - 1, *(t.least for t in targets))
    known = any(t.ndim is not None for t in targets)
    return replace(on, least=least, thin=least < 2 and not known and on.axis == 0)


def functional_loss(name: str, given: CallArguments) -> Value:
    """Return the value of a call of one of torch's loss functions."""
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
    if name in ("cross_entropy", "nll_loss") and len(inputs) > 1:
        given.show_rank(inputs[0], 2 if isinstance(inputs[1], Rows) else 0)
    weights = [given.options.get(w) for w in _WEIGHTS]
    options = dict(given.options)
    if len(given.args) > count and name != "ctc_loss":
        for value in given.args[count:]:
            text = known_text(value)
            if text in ("sum", "none", "mean", "batchmean"):
                options.setdefault("reduction", value)
            elif isinstance(value, Constant) and value.value is False:
                return Unproved(Why.UNREAD, given.node)
            elif isinstance(value, Linear | Unproved):
                weights.append(value)
            elif isinstance(value, Rows):
                inputs.append(value)
    if isinstance(options.get("weight"), Rows):
        inputs.append(options["weight"])
    return loss(name, inputs, options, given.node, weights=weights)


def made_loss(made: LibraryResult, given: CallArguments) -> Value | None:
    """Return the value of a call of an object of one of torch's losses."""
    last = made.name.rpartition(".")[2]
    if not made.name.startswith("torch.nn.") or last not in _LOSS_CLASSES:
        return None
    options = dict(made.options)
    for value in made.args:
        text = known_text(value)
        if text in ("sum", "none", "mean", "batchmean"):
            options.setdefault("reduction", value)
        elif (
            isinstance(value, Constant) and value.value is False and last != "KLDivLoss"
        ):
            return Unproved(Why.UNREAD, made.node)
    weights: list[Value | None] = [options.get(w) for w in _WEIGHTS]
    weights += [v for v in made.args if isinstance(v, Linear | Unproved)]
    inputs = list(given.args)
    if last in ("CrossEntropyLoss", "NLLLoss") and len(inputs) > 1:
        given.show_rank(inputs[0], 2 if isinstance(inputs[1], Rows) else 0)
    if last == "CTCLoss":
        inputs = inputs[:2]
    inputs += list(given.options.values())
    if isinstance(options.get("weight"), Rows):
        inputs.append(options["weight"])
    return loss(_LOSS_CLASSES[last], inputs, options, given.node, weights=weights)
