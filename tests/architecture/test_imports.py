"""Permitted imports of each package, and what starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANNING_HALF = [
    "stretto",
    "stretto.errors",
    "stretto.units",
    "stretto.schema",
    "stretto.cost",
    "stretto.zoo",
    "stretto.sim",
    "stretto.planners",
    "stretto.report",
    "stretto.convert",
    "stretto.tune",
    "stretto.cluster.coordinator",
    "stretto.background.foreground",
    "stretto.background.lease",
    "stretto.cli",
]
WITHOUT_TORCH = [
    "cluster",
    "compare",
    "convert",
    "lab",
    "plan",
    "report",
    "reproduce",
    "simulate",
    "zoo",
]
"""Commands that people start on machines without torch."""


def python(*args):
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def loads_torch(code):
    """Whether a fresh interpreter that runs the code has torch afterward."""
    done = python("-c", f"{code}\nimport sys\nprint('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] == "True"


def test_import_directions_hold():
    command = "from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_check_sees_torch():
    assert loads_torch("import torch")


@pytest.mark.parametrize("module", PLANNING_HALF)
def test_the_planning_half_is_imported_without_torch(module):
    assert not loads_torch(f"import {module}")


@pytest.mark.parametrize("command", WITHOUT_TORCH)
def test_planning_commands_are_imported_without_torch(command):
    assert not loads_torch(f"import stretto.cli.{command}")


def test_help_is_printed_without_torch():
    done = python("-X", "importtime", "-m", "stretto", "--help")
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "stretto.cli._main" in imported
    assert "torch" not in imported


def imports_in_functions(file):
    """Every import in a function: its line, the module, and whether a reason is near.

    The reason is a comment on the line, or above the first of the imports there.
    """
    text = file.read_text()
    lines = ["", *text.splitlines()]
    nodes = ast.walk(ast.parse(text))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    for node in {n for each in functions for n in ast.walk(each)}:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names]
            module = names[0] if isinstance(node, ast.Import) else node.module
            first = node.lineno
            while lines[first - 1].lstrip().startswith(("import ", "from ")):
                first -= 1
            has_reason = "#" in lines[node.lineno] or "#" in lines[first - 1]
            yield node.lineno, module, has_reason


def test_imports_in_functions_follow_the_rule():
    """ARCHITECTURE.md, under Layers, says which ones need no comment."""
    source = ROOT / "src" / "stretto"
    found = []
    for file in source.rglob("*.py"):
        if file.is_relative_to(source / "cli"):
            continue
        for line, module, has_reason in imports_in_functions(file):
            top = module.partition(".")[0]
            is_ours = top in {"stretto", "torch", *sys.stdlib_module_names}
            if is_ours and not has_reason:
                found.append(f"{file.relative_to(ROOT)}:{line}: {module}")
    assert not found, "import at the top of the file, or add the reason as a comment"
