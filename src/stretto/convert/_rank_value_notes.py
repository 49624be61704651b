"""List values of a rank's own samples where a script shows or combines them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

import libcst as cst

from stretto.convert._tree import found, parts
from stretto.convert._unwrapping import EXPORTING

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.convert._edit import Work

    Differs = Callable[[cst.BaseExpression], bool]
    """Returns whether an expression's value may differ by rank, at its place."""

_COMBINING = frozenset(
    [
        "mean",
        "std",
        "var",
        "median",
        "flip",
        "roll",
        "cov",
        "corrcoef",
        "softmax",
        "log_softmax",
        "cumsum",
        "cumprod",
        "prod",
        "amax",
        "amin",
        "sort",
        "argsort",
        "logsumexp",
        "quantile",
    ]
)


class Reductions(Protocol):
    """The reductions over ranks in a script."""

    @property
    def graph(self) -> frozenset[str]:
        """Return the variables through which gradients flow."""

    @property
    def reduced_after(self) -> list[tuple[cst.CSTNode, list[str]]]:
        """Return loops, and the variables that are reduced after each."""

    def is_reduced(self, node: cst.CSTNode) -> bool:
        """Return whether an expression was reduced over ranks."""

    def is_within_reduced(self, node: cst.CSTNode) -> bool:
        """Return whether an expression, or one around it, was reduced over ranks."""


@final
class RankValueNotes:
    """Lists each place once."""

    def __init__(self, work: Work, numbers: Reductions) -> None:
        self._work, self._tree, self._numbers = work, work.tree, numbers
        self._reported: set[int] = set()

    def shown(
        self, call: cst.Call, given: list[cst.BaseExpression], differs: Differs
    ) -> None:
        """List the arguments of a call that shows or writes what differs."""
        if id(call) in self._reported:
            return
        if self._tree.called(call).startswith(EXPORTING):
            given = given[:1]  # the others are examples of inputs
        shown = [part for n in given if differs(n) for part in self._parts(n, differs)]
        if not shown:
            return
        self._reported.add(id(call))
        called = self._tree.text(call.func)[:40]
        names = list(dict.fromkeys(f"`{self._tree.text(n)[:50]}`" for n in shown))
        self._work.undecided(
            call,
            f"{', '.join(names)} in `{called}(...)`: "
            "computed from each rank's own samples, so rank 0's value is not that of "
            "one process. Reduce it over ranks (mean_over_ranks, sum_over_ranks) or "
            "gather it",
        )

    def collected(self, path: str, at: cst.CSTNode) -> None:
        """List a container that outlives the step and gets what differs."""
        if id(at) in self._reported:
            return
        self._reported.add(id(at))
        self._work.undecided(
            at,
            f"`{path}` collects values of each rank's own samples: on rank 0 "
            "it has rank 0's only. Reduce or gather them "
            "(torch.distributed.all_gather_object) before they are used",
        )

    def combined(self, call: cst.Call, differs: Differs) -> None:
        """List statistics over a batch, or another order of it, in a step."""
        if id(call) in self._reported:
            return
        full = self._tree.called(call)
        module, _, last = full.rpartition(".")
        on: cst.BaseExpression | None = None
        given = list(call.args)
        if module in ("torch", "torch.nn.functional") and last in _COMBINING and given:
            on, given = given[0].value, given[1:]
        elif isinstance(call.func, cst.Attribute) and not module.startswith("torch"):
            last = call.func.attr.value
            on = call.func.value if last in _COMBINING else None
        if on is None or not self._is_over_samples(last, given):
            return
        if self._numbers.is_within_reduced(call) or not differs(on):
            return
        if self._work.proofs.is_rowwise(call):
            return
        if last == "mean" and self._is_loss(call, on):
            return
        if "sort" in last and "len" in self._tree.text(on).lower():
            return  # for packed sequences: each sample stays the same
        self._reported.add(id(call))
        self._work.undecided(
            call,
            f"`{self._tree.text(call)[:50]}` combines the samples of a batch: each "
            "rank has its own samples only, so the step is not that of one process. "
            "Average it over ranks, or gather the samples first",
        )

    def decided(self, node: cst.CSTNode, name: str) -> None:
        """List a decision by which a rank trains more or fewer batches than others."""
        self._work.undecided(
            node,
            f"this decides on `{name}`, which differs by rank: if ranks take different "
            "branches here, they hang waiting for each other",
        )

    def saved(self, node: cst.CSTNode, name: str) -> None:
        """List a decision to write a file by a value of one rank's samples."""
        self._work.undecided(
            node,
            f"this decides on `{name}`, which is computed from each rank's own "
            "samples, whether a file is written: rank 0's value decides. Reduce it "
            "over ranks (mean_over_ranks) first",
        )

    def buffer(self, target: cst.Attribute, at: cst.CSTNode) -> None:
        """List a buffer that gets what differs."""
        if id(at) not in self._reported:
            self._reported.add(id(at))
            self._work.undecided(
                at,
                f"the buffer `{self._tree.text(target)}` is computed from each rank's "
                "own samples: before a step all ranks get rank 0's. Average over "
                "ranks what it is computed from",
            )

    def _parts(
        self, node: cst.BaseExpression, differs: Differs
    ) -> list[cst.BaseExpression]:
        """Return the parts to name: without the text and calculations around them."""
        if isinstance(
            node,
            cst.FormattedString
            | cst.ConcatenatedString
            | cst.Dict
            | cst.Tuple
            | cst.List
            | cst.BinaryOperation
            | cst.GeneratorExp
            | cst.ListComp,
        ) or (isinstance(node, cst.Call) and self._is_format(node)):
            inner = [e for e in parts(node) if differs(e)]
            if isinstance(node, cst.GeneratorExp | cst.ListComp):
                inner = inner[:1]  # what it yields, not what that is made of
            return [x for e in inner for x in self._parts(e, differs)] or [node]
        return [node]

    def _is_format(self, call: cst.Call) -> bool:
        return self._tree.method_called(call, "format", "join") is not None

    def _is_over_samples(self, last: str, given: list[cst.Arg]) -> bool:
        """Return whether the arguments of a reduction say that it is over samples."""
        place = 1 if last in ("roll", "quantile") else 0
        plain = [a for a in given if a.keyword is None]
        dims = [
            a.value
            for a in given
            if a.keyword is not None and a.keyword.value in ("dim", "dims", "axis")
        ]
        dims += [a.value for a in plain[place : place + 1]]
        if not dims:
            return last in ("std", "var", "cov", "corrcoef")
        return self._tree.text(dims[0]).strip("([ ").startswith("0")

    def _is_loss(self, call: cst.Call, on: cst.BaseExpression) -> bool:
        """Return whether a mean over samples is of one number for each of them."""
        above = self._tree.parent(call)
        if isinstance(above, cst.Attribute) and above.attr.value in (
            "mean",
            "sum",
            "item",
            "backward",
        ):
            return True
        if any(True for _ in found(on, cst.Comparison)):
            return True  # a share of the samples, which has no gradient
        names = " ".join(n.value for n in found(on, cst.Name)).lower()
        if isinstance(above, cst.Assign):
            names += self._tree.text(above.targets[0].target).lower()
        if any(word in names for word in ("loss", "kl", "nll", "err", "ce", "acc")):
            return True
        return any(
            self._tree.called(c) in ("torch.sum", "torch.mean")
            or self._tree.method_called(c, "sum", "mean") is not None
            for c in found(on, cst.Call)
        )
