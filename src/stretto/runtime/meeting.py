"""Compare ranks before a model is built and before a plan is applied."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from stretto._version import __version__
from stretto.errors import CommTimeout, RankDisagreement
from stretto.schema import tensors_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.errors import StrettoError
    from stretto.runtime.agreement import Agreement, Ranks
    from stretto.runtime.routes import TensorRow
    from stretto.schema import Plan

_log = logging.getLogger(__name__)


def meet(
    agreement: Agreement,
    ranks: Ranks,
    *,
    purpose: str,
    rows: Sequence[TensorRow],
    plan: Plan | None,
    trouble: StrettoError | None,
    settings: Mapping[str, str],
) -> None:
    """Require that all ranks have the same versions, model and plan.

    ``trouble`` is the error that prevents this rank from executing the plan;
    ``settings`` are
    options that must be equal, by name.

    Raises:
        StrettoError: ``trouble``, if there is any.
        RankDisagreement: ranks differ, or another rank reports an error.
        CommTimeout: a rank did not arrive.
    """
    if ranks.size > 1:
        values = {
            "stretto": __version__,
            "torch": torch.__version__,
            "model": (
                f"{len(rows)} tensors of {sum(r.bytes for r in rows)} bytes, "
                f"{tensors_digest(rows)}"
            ),
            "plan": "no plan" if plan is None else plan.digest,
            "settings": f"timeout_s={ranks.timeout_s:g}",
            **{f"option {name}": value for name, value in settings.items()},
        }
        if trouble is not None:
            values["trouble"] = str(trouble)
        try:
            agreement.require_same(purpose, values)
        except RankDisagreement:
            if trouble is None:
                raise  # this rank's own error is more specific
    if trouble is not None:
        raise trouble
    if plan is not None and plan.ranks != ranks.size and not ranks.rank:
        _log.warning(
            "%s: the plan was made for %d ranks, but the job has %d: it is executed, "
            "but may not be the best",
            ranks.name(0),
            plan.ranks,
            ranks.size,
        )


def all_took(
    agreement: Agreement, ranks: Ranks, plan: Plan | None, trouble: Exception | None
) -> None:
    """Require that a plan's lanes are open on every rank.

    Raises:
        Exception: ``trouble``, if there is any.
        RankDisagreement: another rank failed.
        CommTimeout: a rank did not arrive.
    """
    gone = isinstance(trouble, CommTimeout)  # others have or will get the same error
    if ranks.size > 1 and not gone:
        values = {"plan": "no plan" if plan is None else plan.digest}
        if trouble is not None:
            values["trouble"] = str(trouble)
        try:
            agreement.require_same("take up a plan", values)
        except RankDisagreement:
            if trouble is None:
                raise
    if trouble is not None:
        raise trouble
