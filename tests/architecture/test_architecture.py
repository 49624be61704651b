"""What ARCHITECTURE.md says of packages and layers holds for the code."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE = ROOT / "src/stretto"


def top_of(file):
    """The package or single module of stretto that a file belongs to."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_by(file):
    """What a file imports of stretto, for types and in functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "stretto":
            found = [f"stretto.{name.name}" for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module or ""]
        else:
            continue
        yield from (n.split(".")[1] for n in found if n.startswith("stretto."))


def names():
    """Every package, and the module `script`."""
    found = {p.parent.name for p in PACKAGE.glob("*/__init__.py")} - {"testing"}
    return {*found, "script"}


@functools.cache
def packages():
    """Each package's imports of others."""
    imports = {name: set() for name in names()}
    for file in PACKAGE.rglob("*.py"):
        if top_of(file) in imports:
            imports[top_of(file)] |= {*imported_by(file)} & imports.keys()
    return {name: others - {name} for name, others in imports.items()}


def rows():
    """The table's rows: imports and importers by package."""
    found = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch(r"`\w+`", cells[0]):
            found[cells[0].strip("`")] = [
                set(re.findall(r"`(\w+)`", cell)) for cell in cells[2:]
            ]
    return found


def cell(some):
    """A cell of the table, packages in the order of its rows."""
    order = [*rows(), *sorted(packages())]
    return ", ".join(f"`{name}`" for name in sorted(some, key=order.index)) or "-"


def test_the_table_has_every_package():
    assert rows().keys() == packages().keys()


@pytest.mark.parametrize("name", sorted(names()))
def test_the_table_says_what_a_package_imports_and_what_imports_it(name):
    imports, importers = rows()[name]
    assert cell(imports) == cell(packages()[name])
    assert cell(importers) == cell(p for p in packages() if name in packages()[p])


def test_the_figure_has_the_layers_that_are_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (checked,) = (c["layers"] for c in contracts if c["type"] == "layers")
    layers = [frozenset(re.findall(r"\w+", line)) for line in checked]
    figure = TEXT[TEXT.index("┌") : TEXT.index("┘")]
    drawn, row = [], set()
    for line in figure.splitlines():
        if "├" in line or "└" in line:
            drawn.append(frozenset(row))
            row = set()
        else:
            row |= set(re.findall(r"\w+", line.partition("│")[2]))
    assert drawn == layers
