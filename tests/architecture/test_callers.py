"""The callers that docstrings name import the file that they are said to call."""

from __future__ import annotations

import ast
import functools
import re

from support.source_trees import trees

DEFAULTS = {
    "stretto.burst": {"stretto.burst.executor", "stretto.burst.parts"},
    "stretto.burst.tracing": {"stretto.burst.tracing.operations"},
}
"""The users of a package's files unless a line of its docstring says otherwise."""


@functools.cache
def docstrings():
    return {name: ast.get_docstring(tree) or "" for name, tree in trees().items()}


def imports_of(node):
    """What a file imports to run, in functions too, but not for types alone."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{name.name}" for name in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child)


@functools.cache
def importers():
    """Every module's importers."""
    found = {name: set() for name in trees()}
    for user, tree in trees().items():
        for name in {*imports_of(tree)} & found.keys():
            found[name].add(user)
    return found


def resolved(package, name):
    """The module of a name in a package's docstring, or the name itself."""
    for full in (
        f"{package}.{name}",
        f"{package.rpartition('.')[0]}.{name}",
        f"stretto.{name}",
    ):
        if full in docstrings():
            return full
    return name


def items_of(package):
    """What a package's list says of each of its files: the name, and the text."""
    listed = re.findall(
        r"^- (.*?)(?=^- |^$|\Z)", docstrings()[package], flags=re.M | re.S
    )
    for line in listed:
        for item in re.split(r"; (?=`)", " ".join(line.split())):
            head, _, text = item.partition(": ")
            for name in re.findall(r"`(\w+)`", head):
                if f"{package}.{name}" in docstrings():
                    yield name, text


def claims_of(package):
    """Pairs of a file and the callers, one of which must import it."""
    for name, text in items_of(package):
        module = f"{package}.{name}"
        claim = re.search(r"\(for ([^)]*)\)", text)
        if claim:
            for caller in re.findall(r"`([\w.]+)`", claim[1]):
                yield module, {resolved(package, caller)}
        default = DEFAULTS.get(package, set())
        if default and module not in default and not (claim and " too" not in claim[1]):
            yield module, default


def is_used(module, callers):
    """Whether one of some callers imports a module, or a part of it."""
    users = {
        user
        for name, found in importers().items()
        if f"{name}.".startswith(f"{module}.")
        for user in found
    }
    return any(f"{user}.".startswith(f"{name}.") for user in users for name in callers)


def test_callers_in_packages_lists_import_the_files():
    claims = [claim for package in docstrings() for claim in claims_of(package)]
    assert len(claims) > 100
    assert [claim for claim in claims if not is_used(*claim)] == []


def test_callers_in_a_module_s_docstring_import_it():
    wrong = [
        (module, caller)
        for module, text in docstrings().items()
        for sentence in re.findall(
            r"Called (?:by|in) .*?(?:\.(?= |$)|;)", " ".join(text.split())
        )
        for caller in re.findall(r"`(stretto\.[\w.]+)`", sentence)
        if not is_used(module, {caller})
    ]
    assert wrong == []
