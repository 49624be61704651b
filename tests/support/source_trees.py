"""The parsed files of the package, by module."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "stretto"


def module_of(file):
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def trees():
    return {
        module_of(file): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")
    }
