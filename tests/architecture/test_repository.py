"""What holds for every file of the repository."""

from __future__ import annotations

import ast
import builtins
import fnmatch
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import stretto
from stretto._version import TORCH_REQUIREMENT
from stretto.cli._main import group
from support.frameworks import is_missing

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MACHINE_PATHS = re.compile(
    r"(?<![\w./-])/(?:work|root|home/\w+|Users/\w+)/[\w.-]|file:///"
)
"""Places of one machine, which mean nothing on another."""


def test_pytest_enters_every_folder_of_tests(pytestconfig):
    """Its default list of folders to leave out has every one named dist."""
    left_out = pytestconfig.getini("norecursedirs")
    assert pytestconfig.getini("testpaths") == ["tests"]
    for file in tracked():
        path = file.relative_to(ROOT)
        if path.parts[0] == "tests" and file.name.startswith("test_"):
            assert not any(
                fnmatch.fnmatch(part, pattern)
                for part in path.parts[:-1]
                for pattern in left_out
            ), path


def tracked():
    done = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout: " + done.stderr.decode(errors="replace"))
    names = done.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts():
    for file in tracked():
        data = file.read_bytes()
        if b"\0" not in data and file != Path(__file__):
            yield file.relative_to(ROOT), data.decode()


def test_one_module_spells_the_names_of_environment_variables():
    """In code; help texts and docstrings may name them."""
    spelled_in = {
        f"{file.relative_to(ROOT / 'src/stretto')}: {node.value}"
        for file in SOURCES
        if file.name != "variable_names.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"STRETTO_[A-Z0-9_]+=?", node.value)
    }
    # Python loads this file by its name, before a program can import the package.
    own = "lab/pacing/sitecustomize.py: STRETTO_LAB_PACING_BYTES_PER_S"
    assert spelled_in == {own}


def test_every_name_of_an_environment_variable_is_used():
    names = (ROOT / "src/stretto/variable_names.py").read_text()
    code = "".join(file.read_text() for file in SOURCES)
    unused = [
        name
        for name in re.findall(r"^(\w+) = ", names, re.M)
        if not re.search(rf"\bvariable_names\.{name}\b", code)
    ]
    assert unused == []


def test_no_module_imports_another_s_private_names():
    """Nor a private module of another package, except `_api`, which has a layer."""
    found = []
    for file in SOURCES:
        package = file.parent.relative_to(ROOT / "src").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.partition(".")[0] != "stretto":
                continue
            home = ROOT / "src" / node.module.replace(".", "/")
            is_own = package.split(".")[:2] == node.module.split(".")[:2]
            for name in (alias.name for alias in node.names):
                is_module = (home / name).is_dir() or (home / f"{name}.py").is_file()
                allowed = name == "_api" or (is_own and is_module)
                if re.match("_[^_]", name) and not allowed:
                    found.append(f"{file.name}: {node.module}: {name}")
    assert found == []


def test_ruff_reads_programs_in_python_whose_names_have_no_suffix():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    programs = [
        str(file)
        for file, text in texts()
        if not file.suffix and re.match(r"#!.*\bpython", text)
    ]
    assert sorted(programs) == settings["extend-include"]


def test_the_hook_for_language_reads_what_the_check_reads():
    """The check itself reads all these folders, the hook a commit of each."""
    (pattern,) = re.findall(
        r"id: language\n.*?files: (\S+)",
        (ROOT / ".pre-commit-config.yaml").read_text(),
        re.S,
    )
    (folders,) = re.findall(
        r"^FOLDERS = (\(.*\))", (ROOT / "scripts/language").read_text(), re.M
    )
    for folder in ast.literal_eval(folders):
        assert re.search(pattern, f"{folder}/x.py"), folder
    assert re.search(pattern, "README.md")


def test_documents_name_files_that_exist():
    files = [str(file) for file, _ in texts()]
    missing = [
        f"{file}: {name}"
        for file, text in texts()
        if file.suffix == ".md" and file.name != "CHANGELOG.md"
        for name in re.findall(r"`([a-z_][a-z_0-9/]*\.py)`", text)
        if not any(known.endswith(f"/{name}") or known == name for known in files)
    ]
    assert missing == []


def test_no_file_names_a_place_of_one_machine():
    found = [
        f"{file}:{number}: {line.strip()[:80]}"
        for file, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert found == []


def test_the_search_for_places_finds_them():
    for text in ("see /work/x/train.py", "'/root/x'", "cd /home/me/x"):
        assert MACHINE_PATHS.search(text)
    for text in ("a/work/b", "/tmp/x", "https://x/root/y", "home/work/"):
        assert not MACHINE_PATHS.search(text)


def test_only_backends_spell_the_name_of_nccl():
    """Everything else asks the registry of backends."""
    backends = ROOT / "src/stretto/runtime/backends"
    places = [
        str(file.relative_to(ROOT))
        for file in SOURCES
        if '"nccl"' in file.read_text() and file.parent != backends
    ]
    assert places == []
    assert '"nccl"' in (backends / "nccl.py").read_text()


@pytest.mark.parametrize(
    "package", ["burst", "burst/checks", "burst/profiling", "burst/tracing"]
)
def test_a_package_lists_what_its_files_are_for(package):
    folder = ROOT / "src/stretto" / package
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    listed = re.findall(r"^- (.*?): ", text, re.M)
    names = {name for line in listed for name in re.findall(r"`(\w+)`", line)}
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert names == files


def test_a_package_names_its_files():
    """So a reader finds where a file belongs and what calls it."""
    missing = []
    for init in sorted((ROOT / "src/stretto").glob("*/**/__init__.py")):
        files = {file.stem for file in init.parent.glob("*.py")} - {"__init__"}
        files |= {inner.parent.name for inner in init.parent.glob("*/*.py")}
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        unnamed = files - set(re.findall(r"`(\w+)`", text))
        missing += [f"{init.parent.name}/{name}" for name in sorted(unnamed)]
    assert missing == []


OTHERS_NAMES = {
    "STRETTO_PLAN_CACHE",
    "UninitializedParameter",
    "_extract_tensors",
    "jax.lax.scan",
    "logging.lastResort",
    "ml_dtypes",
    "module.",
    "pyproject.toml",
    "pytest.mark.parametrize",
    "socket.gethostname",
}
"""What docstrings name that is not the package's; names of torch need no entry."""


def words_of(file):
    """The names in a file's code, and the comments and docstrings beside it."""
    text = file.read_text()
    names, prose = set(), re.findall(r"#.*", text)
    for node in ast.walk(ast.parse(text)):
        names |= {
            getattr(node, key)
            for key in ("id", "attr", "name", "arg", "asname")
            if isinstance(getattr(node, key, None), str)
        }
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.append(str(node.value.value))
    return names, prose


def test_docstrings_and_comments_name_what_exists():
    """A name in single backticks that a later change has removed misleads readers."""
    known, named = set(dir(builtins)), {}
    for file in SOURCES:
        names, prose = words_of(file)
        known |= {part for name in names for part in name.split(".")}
        known |= {file.stem, file.parent.name}
        for text in prose:
            for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text):
                named.setdefault(name, file.relative_to(ROOT).as_posix())
    missing = {
        name: file
        for name, file in named.items()
        if not name.startswith(("torch.", "dist.")) and name not in OTHERS_NAMES
        if not set(name.split(".")) <= known
    }
    assert missing == {}


def test_no_tracked_file_is_large():
    assert [f for f in tracked() if f.stat().st_size > 2**20] == []


def test_the_type_marker_is_there():
    assert (Path(stretto.__file__).parent / "py.typed").is_file()


def test_one_version_everywhere():
    version = stretto.__version__
    assert importlib.metadata.version("stretto") == version
    assert version in CliRunner().invoke(group, ["--version"]).output
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", version)


def test_a_development_version_has_unreleased_changes_and_a_release_its_section():
    changes = ROOT / "CHANGELOG.md"
    if changes not in tracked():
        pytest.skip("the changelog is not beside the tests")
    version, text = stretto.__version__, changes.read_text()
    wanted = "Unreleased" if version.endswith(".dev0") else version
    newest = re.search(r"^## \[?([^]\s]+)", text, flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == wanted


def imported_by(file):
    """The packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def imports_of_ours(file):
    """Yield the modules and names that a file imports of stretto and of its tests."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [name.name for name in node.names]
            modules = [node.module]
        elif isinstance(node, ast.Import):
            names, modules = [], [name.name for name in node.names]
        else:
            continue
        for module in modules:
            if module.split(".")[0] in ("stretto", "support"):
                yield module, names


def is_module(name):
    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_what_programs_import_exists(folder):
    """No other test runs most of them."""
    missing = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for name, names in imports_of_ours(file):
            if is_missing(name):
                continue
            if not is_module(name):
                missing.append(f"{file.name}: {name}")
                continue
            module = importlib.import_module(name)
            missing += [
                f"{file.name}: {name}.{part}"
                for part in names
                if not hasattr(module, part)
                and not (hasattr(module, "__path__") and is_module(f"{name}.{part}"))
            ]
    assert missing == []


def test_the_packages_ask_for_what_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    asked = {
        re.split(r"[<>=\[]", line)[0].strip().lower()
        for lines in groups
        for line in lines
    }
    known = {
        "scikit-learn": "sklearn",
        "import-linter": "importlinter",
        "tensorflow-cpu": "tensorflow",
    }
    asked = {known.get(name, name.replace("-", "_")) for name in asked}
    found = set().union(*map(imported_by, SOURCES))
    assert found - set(sys.stdlib_module_names) - {"stretto"} - asked == set()


def test_messages_name_the_torch_that_the_package_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert TORCH_REQUIREMENT in project["dependencies"]


EXTRAS = {
    "hypothesis": "testing/strategies.py",
    "jax": "jax/",
    "keras": ("keras/", "horovod/keras3/", "horovod/tensorflow/"),
    "libcst": "convert/",
    "optax": "jax/",
    "optuna": "tune/techniques/aiacc.py",
    "ray": "cluster/engine_ray.py",
    "sklearn": "demo/tasks.py",
    "tensorflow": "horovod/tensorflow/",
}
"""Packages that extras install, and where alone they are imported."""


def test_the_package_itself_imports_its_own_requirements_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
    core |= {*sys.stdlib_module_names, "stretto"}
    for file in SOURCES:
        where = file.relative_to(ROOT / "src" / "stretto").as_posix()
        for name in imported_by(file) - core:
            assert where.startswith(EXTRAS[name]), f"{where} imports {name}"


def modules():
    names = ["stretto"]
    for found in pkgutil.walk_packages(stretto.__path__, "stretto."):
        last = found.name.rpartition(".")[2]
        if last in ("__main__", "sitecustomize"):  # which run when imported
            continue
        if is_missing(found.name):
            continue
        names.append(found.name)
    return names


@pytest.mark.parametrize("name", modules())
def test_every_public_name_is_documented(name):
    module = importlib.import_module(name)
    private = any(part.startswith("_") for part in name.split("."))
    if not private or name.endswith("_api"):
        assert (module.__doc__ or "").strip(), name
    exported = getattr(module, "__all__", None)
    for public in exported or [n for n in vars(module) if not n.startswith("_")]:
        value = getattr(module, public)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not (value.__module__ or "").startswith("stretto"):
            continue
        doc = (value.__doc__ or "").strip()
        assert doc, f"{name}.{public}"
        # A dataclass without a docstring gets its signature as one.
        assert not doc.startswith(f"{public}("), f"{name}.{public}"


def test_docstrings_begin_with_no_clause_used_as_a_noun():
    """Such as "What the sender needs", see CONTRIBUTING.md."""
    begins = re.compile(r'^\s*"""What(?:ever)? ', re.MULTILINE)
    found = [file for file in SOURCES if begins.search(file.read_text("utf-8"))]
    assert found == []


def test_what_a_package_exports_exists_once():
    """Ruff keeps the names sorted."""
    for name in modules():
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", None)
        if exported is None:
            continue
        assert len(set(exported)) == len(exported), name
        assert [n for n in exported if not hasattr(module, n)] == [], name
