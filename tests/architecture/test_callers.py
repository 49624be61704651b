"""The callers that docstrings name are those that import the file, and no others.

A package's docstring lists its files, and each has a claim. ``(for X, Y and Z)`` names
all modules that import a file, packages for all below them, and ``programs`` are those
of users, which import a name from the package. ``(shared, for instance by X and Y)``
stands for more than three. Where the docstring has the sentence "Unless a line says
otherwise, only `X` ... import a file", a file without a claim has these callers, and
``too`` adds others to them.

Imports for types alone do not count, nor do those with which a package's ``__init__``
offers names: who imports these calls the file that defines them. A module that has
another's full name in a string, as for ``python -m``, imports it.
"""

from __future__ import annotations

import ast
import functools
import re

from support.source_trees import trees

NAMES = r"`[\w.]+`(?:(?:,|,? and) `[\w.]+`)*"
CLAIM = re.compile(rf"\(for (?:({NAMES})( too)?(?:,? and programs)?|programs)\)")
"""How a docstring names callers."""

SHARED = re.compile(rf"\(shared, for instance by ({NAMES})\)")
"""How it names two of more than three."""


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


def names_in_strings(user, tree):
    """Modules whose full names a file has in strings, whole or with a fixed start."""
    strings, starts = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]):
                starts |= {start} if start.startswith("stretto.") else set()
            case ast.Constant(value=str(text)):
                strings.add(text)
    full = {text.partition(":")[0] for text in strings}
    full |= {f"{start}{text}" for start in starts for text in strings}
    return {
        name
        for name in full & trees().keys() - packages()
        if not (user in packages() and name in homes_in(user))
    }


@functools.cache
def homes_in(package):
    """Modules from which a package offers names."""
    return {
        defining(full)
        for name, full in offered().items()
        if name.rpartition(".")[0] == package
    }


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
        for module in names_in_strings(user, tree) - {user}:
            found[module].add(user)
    return found


@functools.cache
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


@functools.cache
def default_of(package):
    """The callers that a package's docstring gives to files of no other claim."""
    sentence = re.search(
        r"Unless a line says otherwise, .*?(?=\.(?: |$))",
        " ".join(docstrings()[package].split()),
    )
    names = re.findall(r"`([\w.]+)`", sentence[0]) if sentence else ()
    return {resolved(package, name) for name in names}


def differences(package):
    """Where a package's docstring and the imports differ: file, and what is wrong."""
    default = default_of(package)
    for modules, text in items_of(package):
        claim = CLAIM.search(text)
        for module in modules:
            if module in default:
                continue
            users = users_of(module)
            if shared := SHARED.search(text):
                if len(users) <= 3:
                    yield module, "not shared by more than three", sorted(users)
                yield from (
                    (module, "named, not importing it", name)
                    for name in re.findall(r"`([\w.]+)`", shared[1])
                    if resolved(package, name) not in users
                )
                continue
            named = {
                resolved(package, name)
                for name in re.findall(r"`([\w.]+)`", claim[1] or "" if claim else "")
            }
            optional = default if not claim or claim[2] else set()
            if not claim and not default:
                continue
            if len(named) > 3:
                yield module, "more than three", claim_for(module)
            words = re.sub(r"`[^`]*`", "", claim[0]) if claim else ""
            if "programs" in words and not is_for_programs(module):
                yield module, "only stretto uses it", sorted(users)
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


@functools.cache
def is_for_programs(module):
    """Whether a package offers a name of this file, or none of stretto's needs it."""
    return not users_of(module) or any(
        is_within(defining(full) or "", module) for full in offered().values()
    )


def shortest(package, module):
    """The shortest name of a module that a package's docstring can use."""
    parts = module.split(".")
    return next(
        name
        for i in range(len(parts) - 1, -1, -1)
        if resolved(package, name := ".".join(parts[i:])) == module
    )


def uses(module, user):
    """How often a file reads the names that it imports from another."""
    tree = trees()[user]
    local = {
        (short or full).partition(".")[0]
        for short, full in imports_of(tree.body)
        if defining(full) == module
    }
    return sum(isinstance(n, ast.Name) and n.id in local for n in ast.walk(tree))


def claim_for(module):
    """The text to write after a file in its package's docstring."""
    package = module.rpartition(".")[0]
    users = users_of(module)
    programs = "programs" if is_for_programs(module) else ""
    if len(users) > 3:
        most = sorted(users, key=lambda user: (-uses(module, user), user))[:2]
        first, second = (shortest(package, user) for user in most)
        return f"(shared, for instance by `{first}` and `{second}`)"
    names = [f"`{shortest(package, user)}`" for user in sorted(users)]
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"(for {', and '.join(filter(None, [listed, programs]))})"


def test_every_file_has_named_callers():
    """The text is that to write in the package's docstring, with what a file is for."""
    named = {
        module
        for package in packages()
        for modules, text in items_of(package)
        for module in modules
        if default_of(package) or CLAIM.search(text) or SHARED.search(text)
    }
    assert {
        module: f"`{module.rpartition('.')[2]}`: ... {claim_for(module)}"
        for module in trees()
        if module.rpartition(".")[0] in packages()
        and module not in packages() | named | {"stretto.__main__"}
        and not called_by(module)
    } == {}


def test_callers_in_packages_lists_are_those_that_import_the_files():
    found = [found for package in docstrings() for found in differences(package)]
    assert found == []


def test_packages_lists_name_callers_in_one_form():
    """A claim in another form, or of no file of the list, would not be checked."""
    checked = {
        package: sum(
            len(CLAIM.findall(text)) + len(SHARED.findall(text))
            for modules, text in items_of(package)
            if modules
        )
        for package in packages()
    }
    written = {
        package: len(re.findall(r"\((?:for|shared)\b", docstrings()[package]))
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
