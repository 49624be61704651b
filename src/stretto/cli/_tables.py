"""Text in aligned columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: Container[int] = ()) -> str:
    """Return rows as lines of aligned columns, two spaces apart.

    Args:
        rows: The cells of each row; all rows have equally many.
        left: The columns that are aligned at the left; the others are at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
