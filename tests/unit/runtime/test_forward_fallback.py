"""Code in a process that prevents overlap with the next forward."""

from __future__ import annotations

import sys
import types
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING, Any

import pytest

from stretto.runtime.ddp_reducer import ReplaceableReducerDDP
from stretto.runtime.forward import fallback

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_seen_modules", {})
    monkeypatch.setattr(fallback, "_counted", 0)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"\0libtorch_python.so\0", True), (b"\0libtorch_cpu.so\0", False)],
)
def test_an_extension_that_links_torch_s_python_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, named: bool
) -> None:
    file = tmp_path / f"kernels{EXTENSION_SUFFIXES[0]}"
    file.write_bytes(content)
    module = types.ModuleType("kernels")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "kernels", module)
    assert ("the extension kernels" in str(fallback.new_reader())) is named


def test_a_module_that_is_imported_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fallback.new_reader() is None
    file = tmp_path / f"late{EXTENSION_SUFFIXES[0]}"
    file.write_bytes(b"libtorch_python.so")
    module = types.ModuleType("late_kernels")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "late_kernels", module)
    assert "late_kernels" in str(fallback.new_reader())


def test_a_model_whose_ranks_may_change_ends_its_steps_whole() -> None:
    model: Any = types.SimpleNamespace(_changes_ranks=True)
    why = ReplaceableReducerDDP._why_backward(model, [])
    assert "stretto.Elastic" in str(why)
