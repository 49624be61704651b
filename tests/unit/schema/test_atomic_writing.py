"""A file is written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stretto.errors import SpecError
from stretto.schema import codec


@pytest.fixture
def old(tmp_path):
    file = tmp_path / "file.json"
    file.write_bytes(b"old")
    return file


def left_alone(file):
    return file.read_bytes() == b"old" and list(file.parent.iterdir()) == [file]


def test_a_file_is_replaced_and_nothing_else_is_left(old):
    codec.write_atomically(old, b"new")
    assert old.read_bytes() == b"new"
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_no_temporary_one(
    old, monkeypatch, broken, error
):
    def fail(*_args):
        raise error

    owner = os if broken == "fsync" else Path
    monkeypatch.setattr(owner, broken, fail)
    with pytest.raises(SpecError if isinstance(error, OSError) else KeyboardInterrupt):
        codec.write_atomically(old, b"new")
    monkeypatch.undo()
    assert left_alone(old)


@pytest.mark.parametrize(
    "place", ["missing/file.json", "file.json/below.json", "\0", "x" * 300]
)
def test_a_place_that_can_not_be_written_is_named(old, place):
    target = old.parent / place
    with pytest.raises(SpecError, match="cannot be written") as caught:
        codec.write_atomically(target, b"new")
    assert str(caught.value).startswith(str(target))
    assert left_alone(old)


def test_a_folder_is_not_replaced(tmp_path):
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(SpecError, match="cannot be written"):
        codec.write_atomically(target, b"new")
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_and_the_file_behind_it_is_replaced(old):
    link = old.parent / "link.json"
    link.symlink_to(old)
    codec.write_atomically(link, b"new")
    assert link.is_symlink()
    assert old.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        codec.write_atomically(pipe, b"new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    codec.write_atomically(tmp_path / "ours", b"")
    modes = [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("plain", "ours")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("name", ["missing.json", ".", "\0"])
def test_a_file_that_can_not_be_read_is_named(tmp_path, name):
    with pytest.raises(SpecError, match="cannot be read"):
        codec.kind_in(f"{tmp_path}/{name}")
