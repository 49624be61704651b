"""The copy of a state, and the thread that writes it."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import resource
import threading
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from stretto.errors import SpecError, StrettoError
from stretto.resume import manifests, snapshots
from stretto.resume.exact_load import load_exactly
from stretto.resume.manifests import Manifest, manifests_in
from stretto.resume.snapshots import (
    JobSnapshots,
    SnapshotWriter,
    copy_of,
    read_newest,
)

if TYPE_CHECKING:
    from pathlib import Path


def manifest(step: int) -> Manifest:
    return Manifest(
        run=1,
        generation=0,
        step=step,
        epoch=0,
        done=0,
        samples=0,
        seed=0,
        ranks=1,
        file="",
        size_bytes=0,
        sha256="",
    )


def take(folder: Path, step: int, state: Any) -> None:
    writer = SnapshotWriter(folder, keep=2)
    writer.start(manifest(step), lambda: state)
    writer.wait()


def test_a_copy_shares_no_memory_with_the_state() -> None:
    weight = torch.ones(2)
    copied = copy_of({"a": [weight, (weight,)], "c": 1})
    weight.zero_()
    assert copied["a"][0].tolist() == copied["a"][1][0].tolist() == [1, 1]


def test_a_copy_keeps_a_state_dicts_metadata() -> None:
    state: Any = torch.nn.Linear(1, 1).state_dict()
    assert copy_of(state)._metadata == state._metadata


def test_a_snapshot_is_read_as_it_was_taken(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    state = [net.state_dict(), optimizer.state_dict()]
    state += [each.state_dict() for each in schedulers]
    take(tmp_path, 1, state)
    found = read_newest(tmp_path)
    assert found is not None
    assert str(found[1]) == str(state)


def test_a_damaged_snapshot_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take(tmp_path, 1, [1])
    take(tmp_path, 2, [2])
    (tmp_path / "run1-membership0-step2.pt").write_bytes(b"")
    found = read_newest(tmp_path)
    assert found is not None
    assert (found[0].step, found[1]) == (1, [1])
    assert "damaged" in caplog.text


def test_training_that_begins_again_beside_damaged_snapshots_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take(tmp_path, 1, [1])
    (tmp_path / "run1-membership0-step1.snapshot.json").write_bytes(b"{")
    assert read_newest(tmp_path) is None
    assert "is damaged or of an older version" in caplog.text
    assert "training begins again" in caplog.text


def test_a_manifest_that_cannot_be_read_now_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    take(tmp_path, 1, [1])
    monkeypatch.setattr(pathlib.Path, "read_bytes", fail)
    with pytest.raises(StrettoError, match="cannot be read: Permission denied"):
        read_newest(tmp_path)


def lost_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    "make", [pathlib.Path.mkdir, lost_link, link_to_itself, os.mkfifo]
)
@pytest.mark.parametrize("kind", ["snapshot.json", "pt"])
def test_what_is_not_a_file_leaves_the_snapshot_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, kind: str
) -> None:
    take(tmp_path, 1, [1])
    take(tmp_path, 2, [2])
    path = tmp_path / f"run1-membership0-step2.{kind}"
    path.unlink()
    make(path)
    assert step_read(tmp_path) == 1
    assert f"step2.{kind} cannot be read: it is not a file" in caplog.text


def step_read(folder: Path) -> int | None:
    found = read_newest(folder)
    return None if found is None else found[0].step


def replace_manifest(folder: Path, **values: Any) -> None:
    """Change what the manifest of the second step says."""
    path = folder / "run1-membership0-step2.snapshot.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


@pytest.mark.parametrize("name", ["../outside.pt", "/outside.pt", "", "..", "a\0b"])
def test_a_manifest_that_leads_out_of_the_folder_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = tmp_path / "in"
    take(folder, 1, [1])
    take(folder, 2, [2])
    (folder / "run1-membership0-step2.pt").rename(tmp_path / "outside.pt")
    replace_manifest(folder, file=name)
    assert step_read(folder) == 1
    assert "is not the name of a file here" in caplog.text


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_holds_no_state_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    take(tmp_path, 1, [1])
    take(tmp_path, 2, [2])
    path = tmp_path / "run1-membership0-step2.pt"
    path.write_bytes(data)
    size_bytes, sha256 = manifests.digest_of(path)
    replace_manifest(tmp_path, size_bytes=size_bytes, sha256=sha256)
    assert step_read(tmp_path) == 1
    assert "step2.pt is damaged" in caplog.text


def test_snapshots_that_a_later_job_removes_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SnapshotWriter(tmp_path, keep=1)
    take(tmp_path, 9, [9])
    take(tmp_path, 10, [10])
    for step in (1, 2):
        writer.start(manifest(step), lambda: [1])
        writer.join()
    assert caplog.text.count("are not kept") == 1


def test_an_optimizers_state_keeps_its_types() -> None:
    def made() -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.state[weight]["master"] = torch.full((2,), 1.0 + 2**-20)
        return optimizer

    one, other = made(), made()
    (weight,) = other.param_groups[0]["params"]
    other.state[weight]["master"].zero_()
    load_exactly(other, one.state_dict())
    assert other.state[weight]["master"].tolist() == [1.0 + 2**-20] * 2


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    writer = SnapshotWriter(tmp_path / "file", keep=2)
    for step in (1, 2):
        writer.start(manifest(step), lambda: [1])
        writer.join()
    assert caplog.text.count("was not written") == 1
    with pytest.raises(StrettoError, match="step 2 was not written"):
        writer.wait()


def test_a_full_disk_leaves_the_snapshot_before(tmp_path: Path) -> None:
    writer, state = SnapshotWriter(tmp_path, keep=1), torch.zeros(1 << 16)
    writer.start(manifest(1), lambda: state + 1)
    writer.join()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        writer.start(manifest(2), lambda: state + 2)
        with pytest.raises(StrettoError, match=r"File too large\. Earlier"):
            writer.wait()
        found = read_newest(tmp_path)
        assert found is not None
        assert (found[0].step, found[1][0]) == (1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.start(manifest(3), lambda: state + 3)
    writer.wait()
    assert [m.step for m in manifests_in(tmp_path)] == [3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_snapshot_is_left_out_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    written = manifests.write_whole

    def wait_and_write(*args: Any) -> None:
        goes_on.wait(30)
        written(*args)

    monkeypatch.setattr(snapshots, "write_whole", wait_and_write)
    writer = SnapshotWriter(tmp_path, keep=2)
    assert writer.start(manifest(1), lambda: [1])
    assert not writer.start(manifest(2), lambda: pytest.fail("copied"))
    goes_on.set()
    writer.wait()
    assert "step 2 is left out" in caplog.text


def test_a_class_that_torch_does_not_load_is_named(tmp_path: Path) -> None:
    take(tmp_path, 1, logging.Handler)
    with pytest.raises(StrettoError, match="add_safe_globals"):
        read_newest(tmp_path)


def test_a_snapshot_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(tmp_path, 1, [1])
    monkeypatch.setenv("STRETTO_RESUME", "never")
    job = JobSnapshots(tmp_path, every="1 step", keep=2)
    assert job.read(wanted=None) is None
    assert job.run == 2  # newer than what was not wanted
    assert job.read(wanted=True) is not None


def test_an_unknown_wish_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_RESUME", "yes")
    with pytest.raises(SpecError, match="auto or never"):
        JobSnapshots(tmp_path, every="1 step", keep=2).read(wanted=None)


def test_no_snapshot_is_no_use(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="keep must be"):
        JobSnapshots(tmp_path, every="1 step", keep=0)


def test_only_rank_0_takes_snapshots(tmp_path: Path) -> None:
    job = JobSnapshots(tmp_path, every="1 step", keep=2)
    job.take_if_due(5, lambda: manifest(5), lambda: [1], rank=1)
    job.take_if_due(0, lambda: manifest(0), lambda: [1], rank=0)
    assert not list(tmp_path.iterdir())
    job.take_if_due(5, lambda: manifest(5), lambda: [1], rank=0)
    job._writer.wait()
    assert read_newest(tmp_path) is not None


@pytest.mark.parametrize(
    "value", [numpy.float64(0.5), numpy.arange(3), numpy.bool_(True)]
)
def test_a_state_may_hold_numpy_values(tmp_path: Path, value: Any) -> None:
    take(tmp_path, 1, {"best": value})
    found = read_newest(tmp_path)
    assert found is not None
    assert type(found[1]["best"]) is type(value)
    assert numpy.array_equal(found[1]["best"], value)


def test_a_class_that_cannot_be_read_is_named_when_it_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take(tmp_path, 1, {"path": tmp_path})
    assert "holds objects of pathlib." in caplog.text


def test_a_state_whose_manifest_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = manifests.write_whole

    def write_state_only(path: Path, write_to: Any) -> None:
        if path.suffix == ".json":
            raise OSError(28, "No space left on device")
        write(path, write_to)

    monkeypatch.setattr(snapshots, "write_whole", write_state_only)
    with pytest.raises(StrettoError, match="No space left"):
        take(tmp_path, 1, {})
    assert list(tmp_path.iterdir()) == []
