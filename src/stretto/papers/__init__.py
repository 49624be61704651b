"""The papers' tables and figures that can be recomputed, beside the published ones.

`stretto reproduce` calls this package.

- `aiacc`, `asc`, `libra`, `deeppool`: one paper each (for `papers`).
- `deeppool_literal`: DeepPool's algorithm as printed (for `deeppool`).
- `result`: what a reproduction returns (shared, for instance by `asc` and `libra`).
- `shared`: helpers of several (for `aiacc`, `asc` and `libra`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.papers.aiacc import aiacc_training
from stretto.papers.asc import asc_wfbp
from stretto.papers.deeppool import deeppool
from stretto.papers.libra import libra_paper
from stretto.papers.result import (
    Correction,
    Figure,
    Omission,
    Reproduction,
    Series,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_PAPERS: dict[str, Callable[[], Reproduction]] = {
    "asc-wfbp": asc_wfbp,
    "libra": libra_paper,
    "aiacc": aiacc_training,
    "deeppool": deeppool,
}

PAPERS = tuple(_PAPERS)
"""The papers by name."""


def reproduce(paper: str) -> Reproduction:
    """Recompute a paper's figures.

    Raises:
        SpecError: no paper has this name.
    """
    if paper not in _PAPERS:
        raise SpecError(f"paper must be one of {', '.join(_PAPERS)}, got {paper!r}")
    return _PAPERS[paper]()


__all__ = [
    "PAPERS",
    "Correction",
    "Figure",
    "Omission",
    "Reproduction",
    "Series",
    "reproduce",
]
