"""The callers that docstrings name are those that import the file, and no others.

A package's docstring lists its files. ``(for X, Y and Z)`` names all modules that
import a file, packages for all below them; ``(shared)`` stands for more than three. In
the packages of `DEFAULTS`, a file with neither has the callers that the docstring
says, and ``too`` adds others to them. Imports for types alone do not count, nor do
those with which a package's ``__init__`` offers names: who imports these calls the file
that defines them.
"""

from __future__ import annotations

import ast
import functools
import re

from support.source_trees import trees

DEFAULTS = {
    "stretto.burst": {"stretto.burst.executor", "stretto.burst.parts"},
    "stretto.burst.checks": {"stretto.burst.parts", "stretto.burst.forward_exchange"},
    "stretto.burst.tracing": {"stretto.burst.tracing.operations"},
}
"""The callers of a package's files unless a line of its docstring says otherwise."""

NAMES = r"`[\w.]+`(?:(?:,|,? and) `[\w.]+`)*"
CLAIM = re.compile(rf"\(for (?:({NAMES})( too)?(?:,? and programs)?|programs)\)")
"""How a docstring names callers."""


@functools.cache
def docstrings():
    return {name: ast.get_docstring(tree) or "" for name, tree in trees().items()}


def is_for_types(node):
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imports_of(body, *, types=False):
    """The imports in statements, in functions too: local name, and full name."""
    for node in body:
        if is_for_types(node) and not types:
            continue
        if isinstance(node, ast.Import):
            yield from ((name.asname, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"
        for field in ("body", "cases", "handlers", "orelse", "finalbody"):
            yield from imports_of(getattr(node, field, ()), types=types)


def names_used(tree):
    """The full names that a file imports or reads from a package that it imports."""
    imported = [*imports_of(tree.body)]
    yield from (full for _, full in imported)
    used = {local: full for local, full in imported if full in packages()}
    for node in ast.walk(tree) if used else ():
        match node:
            case ast.Attribute(value=ast.Name(id=local)) if local in used:
                yield f"{used[local]}.{node.attr}"


@functools.cache
def packages():
    return {name.rpartition(".")[0] for name in trees()} & trees().keys()


def public_names(package):
    """The names in a package's ``__all__``."""
    for node in trees()[package].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {*ast.literal_eval(node.value)}
    return set()


@functools.cache
def offered():
    """Names that packages offer, and the full names from which they have them."""
    return {
        f"{package}.{name}": full
        for package in packages()
        for public in [public_names(package)]
        for _, full in imports_of(trees()[package].body, types=True)
        if (name := full.rpartition(".")[2]) in public
    }


def defining(full):
    """The module that defines a name, or None outside of the package."""
    while full not in trees() and full in offered():
        full = offered()[full]
    return next(
        (name for name in (full, full.rpartition(".")[0]) if name in trees()), None
    )


@functools.cache
def importers():
    """Every module's importers."""
    found = {name: set() for name in trees()}
    for user, tree in trees().items():
        for full in names_used(tree):
            if offered().get(f"{user}.{full.rpartition('.')[2]}") == full:
                continue
            module = defining(full)
            if module and module != user:
                found[module].add(user)
    return found


def users_of(module):
    """The modules outside of a file or package that import it, or a part of it."""
    return {
        user
        for name, found in importers().items()
        if is_within(name, module)
        for user in found
        if not is_within(user, module)
    }


def is_within(name, package):
    return f"{name}.".startswith(f"{package}.")


def resolved(package, name):
    """The module of a name in a package's docstring, or the name itself."""
    for full in (
        f"{package}.{name}",
        f"{package.rpartition('.')[0]}.{name}",
        f"stretto.{name}",
        name,
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
            names = re.findall(r"`(\w+)`", head)
            yield (
                [f"{package}.{n}" for n in names if f"{package}.{n}" in docstrings()],
                text,
            )


def differences(package):
    """Where a package's docstring and the imports differ: file, and what is wrong."""
    default = DEFAULTS.get(package, set())
    for modules, text in items_of(package):
        claim = CLAIM.search(text)
        for module in modules:
            if module in default:
                continue
            users = users_of(module)
            if "(shared)" in text:
                if len(users) <= 3:
                    yield module, "not shared by more than three", sorted(users)
                continue
            named = {
                resolved(package, name)
                for name in re.findall(r"`([\w.]+)`", claim[1] or "" if claim else "")
            }
            optional = default if not claim or claim[2] else set()
            if not claim and not default:
                continue
            if len(named) > 3:
                yield module, "more than three: shared", sorted(users)
            unnamed = {
                user
                for user in users
                if not any(is_within(user, name) for name in named | optional)
            }
            if unnamed:
                yield module, "unnamed callers", sorted(unnamed)
            groups = [{name} for name in named] + [optional] * bool(optional)
            unused = [
                sorted(group)
                for group in groups
                if not any(is_within(user, n) for user in users for n in group)
            ]
            if unused:
                yield module, "named, not importing it", unused


def test_callers_in_packages_lists_are_those_that_import_the_files():
    found = [found for package in docstrings() for found in differences(package)]
    assert found == []


def test_packages_lists_name_callers_in_one_form():
    """A claim in another form, or of no file of the list, would not be checked."""
    checked = {
        package: sum(
            len(CLAIM.findall(text)) + text.count("(shared)")
            for modules, text in items_of(package)
            if modules
        )
        for package in packages()
    }
    written = {
        package: len(re.findall(r"\(for\b|\(shared\)", docstrings()[package]))
        for package in packages()
    }
    assert sum(checked.values()) > 100
    assert {p for p in packages() if checked[p] != written[p]} == set()


def called_by(module):
    """The modules that a module's docstring names as its callers."""
    return {
        caller
        for sentence in re.findall(
            r"Called (?:by|in) .*?(?:\.(?= |$)|;)",
            " ".join(docstrings()[module].split()),
        )
        for caller in re.findall(r"`(stretto\.[\w.]+)`", sentence)
    }


def test_callers_in_a_module_s_docstring_are_those_that_import_it():
    stated = {module: callers for module in trees() if (callers := called_by(module))}
    assert len(stated) > 10
    assert {
        module: (sorted(callers), sorted(users_of(module)))
        for module, callers in stated.items()
        if users_of(module) != callers
    } == {}
