"""Where unit tests are: in folders by package, and in files by module."""

from __future__ import annotations

import ast
from pathlib import Path

from conftest import FOLDERS_TURNS, TAKE_TURNS
from support.source_trees import PACKAGE

TESTS = Path(__file__).parents[1]
UNIT = TESTS / "unit"
FILES = sorted(UNIT.rglob("test_*.py"))


def modules_of(folder):
    """The modules and packages in a folder, without a leading underscore."""
    return {
        path.stem.removeprefix("_"): path
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def package_of(file):
    return PACKAGE / file.parent.relative_to(UNIT)


def name_of(file):
    return file.stem.removeprefix("test_")


def test_each_folder_is_a_package():
    folders = {package_of(file) for file in FILES}
    assert {f for f in folders if not (f / "__init__.py").exists()} == set()


def test_files_have_a_module_s_name_or_a_docstring():
    others = [f for f in FILES if name_of(f) not in modules_of(package_of(f))]
    assert others
    assert [f for f in others if not ast.get_docstring(ast.parse(f.read_text()))] == []


def test_files_with_the_name_of_a_module_further_down_are_in_its_folder():
    misplaced = {
        file.relative_to(UNIT): module.relative_to(PACKAGE)
        for file in FILES
        if name_of(file) not in modules_of(package_of(file)) and file.parent != UNIT
        for module in package_of(file).rglob("*.py")
        if module.stem.removeprefix("_") == name_of(file)
    }
    assert misplaced == {}


def test_files_and_folders_that_take_turns_exist():
    assert [name for name in TAKE_TURNS if not (TESTS / name).is_file()] == []
    assert [name for name in FOLDERS_TURNS if not (TESTS / name).is_dir()] == []
