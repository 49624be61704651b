"""Code in a process that prevents overlap with the next forward."""

from __future__ import annotations

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING, Any

import pytest
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from stretto.runtime.ddp_reducer import ReplaceableReducerDDP
from stretto.runtime.forward import fallback, other_threads

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


class _Monitor(threading.Thread):
    def run(self) -> None:
        self.ended.wait(60)

    ended = threading.Event()


_Monitor.__module__ = "tqdm._monitor"


def _waits(ended: threading.Event) -> None:
    ended.wait(60)


@pytest.mark.parametrize("kind", ["function", "partial", "pool", "tqdm", "stretto"])
def test_a_thread_of_the_program_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, every = set(threading.enumerate()), threading.enumerate
    monkeypatch.setattr(
        threading, "enumerate", lambda: [t for t in every() if t not in before]
    )
    ended = threading.Event()
    with ThreadPoolExecutor(thread_name_prefix="ema") as pool:
        assert other_threads.other_thread() is None
        if kind == "pool":
            pool.submit(_waits, ended)
        elif kind == "tqdm":
            _Monitor.ended = ended
            _Monitor(name="ema").start()
        else:
            target: Any = _waits if kind == "function" else partial(_waits, ended)
            given = (ended,) if kind == "function" else ()
            name = "stretto-lane" if kind == "stretto" else "ema"
            threading.Thread(target=target, args=given, name=name).start()
        found = other_threads.other_thread()
        ended.set()
        if kind in ("tqdm", "stretto"):
            assert found is None
        else:
            assert str(found).startswith("thread 'ema")
    for thread in threading.enumerate():
        thread.join()


def test_the_threads_of_torch_s_compiler_are_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, every = set(threading.enumerate()), threading.enumerate
    monkeypatch.setattr(
        threading, "enumerate", lambda: [t for t in every() if t not in before]
    )
    monkeypatch.setattr(config, "compile_threads", 2)
    pool = AsyncCompile.pool()
    pool.submit(int).result(60)
    assert {*pool._threads} & {*every()}
    assert other_threads.other_thread() is None


class _Pending:
    finished = 0

    def finish_for_thread(self) -> None:
        self.finished += 1


def test_a_thread_s_start_finishes_until_nothing_is_attached() -> None:
    start, one, two = threading.Thread.start, _Pending(), _Pending()
    other_threads.attach(one)
    other_threads.attach(two)
    for name in ("ema", "stretto-own"):
        thread = threading.Thread(target=int, name=name)
        thread.start()
        thread.join()
    other_threads.detach(one)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    other_threads.detach(two)
    assert (one.finished, two.finished) == (1, 2)
    assert threading.Thread.start is start


def test_a_model_whose_ranks_may_change_ends_its_steps_whole() -> None:
    model: Any = types.SimpleNamespace(_changes_ranks=True)
    why = ReplaceableReducerDDP._why_backward(model, [])
    assert "stretto.Elastic" in str(why)
