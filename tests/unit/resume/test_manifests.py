"""Snapshots in a folder: their order, and files that are incomplete or damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.errors import SpecError, StrettoError
from stretto.resume.manifests import (
    Interval,
    Manifest,
    digest_of,
    highest_run_in,
    manifests_in,
    remove_old,
    require_whole,
    stem_of,
    write_whole,
)

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO


def store(folder: Path, run: int, generation: int, step: int) -> Manifest:
    name = f"{stem_of(run, generation, step)}.pt"
    write_whole(folder / name, lambda file: file.write(b"state"))
    size_bytes, sha256 = digest_of(folder / name)
    manifest = Manifest(
        run=run,
        generation=generation,
        step=step,
        epoch=0,
        done=0,
        samples=0,
        seed=0,
        ranks=1,
        file=name,
        size_bytes=size_bytes,
        sha256=sha256,
    )
    data = msgspec.json.encode(manifest)
    write_whole(folder / manifest.name, lambda file: file.write(data))
    return manifest


def test_a_later_run_is_newer_than_any_step_of_an_earlier_one(tmp_path: Path) -> None:
    rows = [(2, 0, 10), (1, 3, 900), (1, 1, 950), (2, 1, 5)]
    for row in rows:
        store(tmp_path, *row)
    found = [manifest.order for manifest in manifests_in(tmp_path)]
    assert found == [(2, 1, 5), (2, 0, 10), (1, 3, 900), (1, 1, 950)]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        store(tmp_path, 1, 1, step)
    remove_old(tmp_path, keep=2)
    assert [manifest.step for manifest in manifests_in(tmp_path)] == [4, 3]
    assert len(list(tmp_path.iterdir())) == 4


def test_what_was_left_incomplete_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{stem_of(1, 1, 1)}.pt").touch()
    (tmp_path / f".{stem_of(1, 1, 2)}.pt.part77").touch()
    (tmp_path / f".{stem_of(1, 1, 4)}.pt.part77").touch()  # it may be in writing
    (tmp_path / "notes.txt").touch()
    store(tmp_path, 1, 1, 3)
    remove_old(tmp_path, keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    newest = stem_of(1, 1, 3)
    assert left == {
        "notes.txt",
        f".{stem_of(1, 1, 4)}.pt.part77",
        f"{newest}.pt",
        f"{newest}.snapshot.json",
    }


def test_a_file_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, lambda file: file.write(b"before"))

    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(path, fail)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"version": "x"}', b"\xff"]
)
def test_a_manifest_that_is_no_manifest_is_skipped(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "broken.snapshot.json").write_bytes(data)
    store(tmp_path, 1, 1, 1)
    assert len(manifests_in(tmp_path)) == 1


def test_a_damaged_snapshot_keeps_its_run_number(tmp_path: Path) -> None:
    (tmp_path / store(tmp_path, 3, 1, 1).name).write_bytes(b"")
    assert highest_run_in(tmp_path) == 3


def test_a_manifest_of_a_later_version_is_refused(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(store(tmp_path, 1, 1, 1), version=9)
    (tmp_path / manifest.name).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(StrettoError, match="later version"):
        manifests_in(tmp_path)


@pytest.mark.parametrize("data", [b"stat", b"STATE", None])
def test_a_damaged_state_is_found(tmp_path: Path, data: bytes | None) -> None:
    manifest = store(tmp_path, 1, 1, 1)
    require_whole(tmp_path, manifest)
    path = tmp_path / manifest.file
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(StrettoError, match=r"damaged|cannot be read"):
        require_whole(tmp_path, manifest)


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("100 steps", 100, None), ("1 step", 1, None), ("1.5 min", None, 90.0)],
)
def test_an_interval_is_of_steps_or_time(
    text: str, steps: int | None, seconds: float | None
) -> None:
    assert Interval.of(text) == Interval(steps, seconds)


@pytest.mark.parametrize("text", ["", "10", "0 steps", "1.5 steps", "-1 s", "1 day"])
def test_another_interval_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="every must be"):
        Interval.of(text)


def test_a_step_that_counts_is_due_after_that_many() -> None:
    interval = Interval.of("3 steps")
    assert [interval.is_due(steps=n, seconds=99) for n in (2, 3, 4)] == [
        False,
        True,
        True,
    ]
