"""The board: marks, claims, and files that other processes left."""

from __future__ import annotations

import errno
import itertools
import os
import struct
import subprocess
import sys
import threading

import pytest

from stretto.background import board as board_module
from stretto.background.board import (
    COMPUTING,
    FREE,
    WAITING,
    BackgroundStatus,
    Board,
    file_of,
    is_running,
    own_start,
    runtime_folder,
)
from stretto.background.windows import Window
from stretto.errors import BackgroundError, SpecError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def boards():
    made = []

    def make(device="cpu"):
        made.append(Board(device))
        return made[-1]

    yield make
    for board in made:
        board.close()


@pytest.fixture
def other():
    """Another living process, and one that has ended."""
    living = subprocess.Popen(["sleep", "60"])
    ended = subprocess.Popen(["true"])
    ended.wait()
    yield living, ended
    living.kill()
    living.wait()


def start_of(pid):
    return int(board_module.stat_row(pid)[1])


def test_the_folder_is_the_users_own(folder):
    assert runtime_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_usual_folder_is_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.delenv("STRETTO_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "stretto").mkdir(mode=0o755)
    assert runtime_folder().stat().st_mode & 0o777 == 0o700


def test_a_named_folder_is_left_as_it_is(folder):
    folder.mkdir()
    folder.chmod(0o755)
    Board("cpu").close()
    assert folder.stat().st_mode & 0o777 == 0o755
    assert file_of("cpu", "board").stat().st_mode & 0o777 == 0o600


def test_a_named_folder_to_which_others_write_is_refused_and_left_as_it_is(folder):
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(BackgroundError, match=r"others may write.*set STRETTO_RUN"):
        Board("cpu")
    assert folder.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("module", ["mmap.mmap", "fcntl.flock"])
def test_a_file_system_that_cannot_share_is_one_clear_error(monkeypatch, module):
    def refuses(*_):
        raise OSError(errno.ENODEV, "No such device")

    package, _, name = module.partition(".")
    monkeypatch.setattr(getattr(board_module, package), name, refuses)
    with pytest.raises(BackgroundError, match=r"No such device\): set STRETTO_RUN"):
        Board("cpu")


def test_a_folder_that_is_a_link_or_a_file_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackgroundError, match="not a folder of this user"):
        Board("cpu")
    folder.unlink()
    folder.write_text("")
    with pytest.raises(BackgroundError, match="STRETTO_RUNTIME_DIR"):
        Board("cpu")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may create everything")
def test_a_folder_that_cannot_be_created_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", "/proc/stretto")
    with pytest.raises(BackgroundError, match="cannot be created"):
        Board("cpu")


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(board_module.os, "geteuid", lambda: 12345)
    with pytest.raises(BackgroundError, match="not a folder of this user"):
        Board("cpu")


def test_a_runtime_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("STRETTO_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # as `su` leaves it
    assert board_module._folder_path() == tmp_path / "stretto"
    monkeypatch.setattr(board_module.os, "geteuid", lambda: 12345)
    assert board_module._folder_path().name == "stretto-12345"


@pytest.mark.parametrize("name", ["", "../cpu", "cpu:", "a b", "cpu:0:1", "cpu/0"])
def test_names_that_are_no_devices_are_refused(name):
    with pytest.raises(SpecError, match="device is named"):
        Board(name)


def test_marks_arrive_in_order_with_their_kinds(boards):
    writer, reader = boards(), boards()
    writer.claim_foreground()
    first = reader.last_number
    writer.mark(1, COMPUTING)
    writer.mark(1, WAITING, writer.kind_number("all-reduce"))
    writer.mark(2, WAITING, writer.kind_number("receive"))
    marks = reader.marks_after(first)
    assert [(m.step, m.state, m.kind) for m in marks] == [
        (1, COMPUTING, "other"),
        (1, WAITING, "all-reduce"),
        (2, WAITING, "receive"),
    ]
    assert [m.number for m in marks] == [first + 1, first + 2, first + 3]
    times = [m.time_s for m in marks]
    assert times == sorted(times)
    assert reader.marks_after(marks[-1].number) == []


def test_only_the_last_marks_are_kept_and_lost_ones_show_in_the_numbers(boards):
    writer, reader = boards(), boards()
    writer.claim_foreground()
    for step in range(2000):
        writer.mark(step, COMPUTING)
    marks = reader.marks_after(5)
    assert len(marks) == board_module._MARKS - 1
    assert marks[0].number > 6
    assert marks[-1].step == 1999


def test_marks_of_several_threads_are_never_mixed(boards):
    writer, reader = boards(), boards()
    writer.claim_foreground()
    begin, done = reader.last_number, []
    kinds = [writer.kind_number(f"kind {i}") for i in range(4)]

    def write(which):
        for _ in range(3000):
            writer.mark(which, WAITING, kinds[which])
        done.append(which)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    seen = 0
    while len(done) < 4 or seen == 0:
        for mark in reader.marks_after(reader.last_number - 50):
            if mark.number > begin:
                seen += 1
                assert mark.kind == f"kind {mark.step}"
    for thread in threads:
        thread.join()


def test_a_mark_that_is_being_written_is_not_returned(boards):
    board = boards()
    board.claim_foreground()
    board.mark(7, COMPUTING)
    at = board_module._RING_AT + 64 * (board.last_number % board_module._MARKS)
    assert [m.step for m in board.marks_after(board.last_number - 1)] == [7]
    board.words[at // 8] += 512  # the next write to this place has begun
    assert board.marks_after(board.last_number - 1) == []


def test_more_kinds_than_there_is_room_for_become_one(boards):
    board = boards()
    board.claim_foreground()
    numbers = [board.kind_number(f"kind {i}") for i in range(40)]
    assert len({n for n in numbers if n}) == 23
    assert numbers[-1] == 0
    board.mark(1, WAITING, numbers[-1])
    assert board.marks_after(board.last_number - 1)[0].kind == "other"
    long = "ä" * 40
    assert boards("cpu:1").kind_number(long) == 1


def test_kinds_of_earlier_foregrounds_take_no_room(boards):
    earlier = boards()
    earlier.claim_foreground()
    for i in range(40):
        earlier.kind_number(f"batch {i}")
    earlier.release_foreground()
    writer, reader = boards(), boards()
    writer.claim_foreground()
    writer.mark(1, WAITING, writer.kind_number("all-reduce"))
    assert reader.marks_after(reader.last_number - 1)[0].kind == "all-reduce"


def test_windows_are_passed_on_the_longest_if_there_are_too_many(boards):
    writer, reader = boards(), boards()
    assert reader.windows() == ()
    some = (
        Window(begin_s=0.5, length_s=0.25, kind="redistribution"),
        Window(begin_s=1.5, length_s=0.75, kind="synchronization"),
    )
    writer.set_windows(some)
    assert reader.windows() == some
    many = [Window(begin_s=i, length_s=1.0 + i % 7, kind="a") for i in range(300)]
    writer.set_windows(many)
    kept = reader.windows()
    assert len(kept) == board_module._MAX_WINDOWS
    assert min(w.length_s for w in kept) >= 5.0
    assert [w.begin_s for w in kept] == sorted(w.begin_s for w in kept)


def test_the_background_publishes_what_it_does(boards):
    foreground, background = boards(), boards()
    assert foreground.background() is None
    background.claim_background()
    background.publish(BackgroundStatus(lease_begin_s=1.5, tasks=7, loss=0.25))
    assert foreground.background() == (
        os.getpid(),
        BackgroundStatus(lease_begin_s=1.5, tasks=7, loss=0.25),
    )
    assert foreground.background_runs()
    background.release_background()
    assert foreground.background() is None


def test_marks_are_asked_for_by_a_background_and_no_longer_when_it_leaves(boards):
    foreground, background = boards(), boards()
    foreground.claim_foreground()
    assert not foreground.is_read
    background.claim_background()
    assert foreground.is_read
    foreground.clear_ended_reader()
    assert foreground.is_read
    background.release_background()
    assert not foreground.is_read


def test_a_reader_that_has_ended_is_cleared(boards, other):
    board = boards()
    _, ended = other
    board.words[board_module.READER] = ended.pid
    board.clear_ended_reader()
    assert not board.is_read
    # An id that was given to another process.
    board.words[board_module.READER] = os.getpid()
    board.words[board_module._READER_STARTED] = own_start() + 1
    board.clear_ended_reader()
    assert not board.is_read


@pytest.mark.parametrize("role", ["foreground", "background"])
def test_a_second_process_in_a_role_is_refused_with_the_firsts_id(boards, other, role):
    board = boards()
    word = getattr(board_module, f"_{role.upper()}")
    claim = getattr(board, f"claim_{role}")
    living, ended = other
    board.words[word], board.words[word + 1] = living.pid, start_of(living.pid)
    with pytest.raises(BackgroundError) as caught:
        claim()
    assert str(caught.value) == (
        f"device cpu has a {role} already, process {living.pid}: end it, or name "
        "another device"
    )
    board.words[word] = ended.pid
    claim()
    assert board.words[word] == os.getpid()


def test_a_device_is_free_after_its_foregrounds_process_has_ended(boards, other):
    board = boards()
    living, ended = other
    word = board_module._FOREGROUND
    board.words[word], board.words[word + 1] = living.pid, start_of(living.pid)
    assert not board.clear_ended_foreground()
    assert board.has_foreground
    board.words[word] = ended.pid
    assert board.clear_ended_foreground()
    assert not board.has_foreground


def test_a_foreground_that_leaves_says_so(boards):
    foreground, background = boards(), boards()
    foreground.claim_foreground()
    assert background.foreground_pid == os.getpid()
    foreground.release_foreground()
    assert not background.has_foreground
    assert background.marks_after(background.last_number - 1)[0].state == FREE


@pytest.mark.parametrize("size", [1, 50, 96, 4096])
def test_a_truncated_board_is_replaced(boards, folder, size):
    board = boards()
    path, inode = board.path, board.path.stat().st_ino
    data = path.read_bytes()[:size]
    path.unlink()
    path.write_bytes(data)
    if not data.startswith(board_module._MAGIC):
        with pytest.raises(BackgroundError, match="is not a board: remove it"):
            boards()
        return
    again = boards()
    again.claim_foreground()
    assert path.stat().st_size == board_module._SIZE
    assert path.stat().st_ino != inode or size


def test_an_empty_file_becomes_a_board(boards, folder):
    path = file_of("cpu", "board")
    path.touch()
    boards().claim_foreground()
    assert path.stat().st_size == board_module._SIZE


def test_a_foreign_file_is_refused_and_left_as_it_is(boards):
    path = file_of("cpu", "board")
    path.write_bytes(b"something else" * 10000)
    with pytest.raises(BackgroundError, match=f"{path} is not a board: remove it"):
        boards()
    assert path.read_bytes().startswith(b"something else")


def test_what_is_not_a_file_is_refused(boards):
    path = file_of("cpu", "board")
    path.mkdir()
    with pytest.raises(BackgroundError, match="cannot be opened"):
        boards()
    path.rmdir()
    path.symlink_to("/etc/hostname")
    with pytest.raises(BackgroundError, match="cannot be opened"):
        boards()


def rewrite_header(path, **changes):
    names = ("magic", "version", "size", "boot", "namespace")
    data = bytearray(path.read_bytes())
    row = dict(zip(names, board_module._HEADER.unpack_from(data), strict=True))
    board_module._HEADER.pack_into(data, 0, *(row | changes).values())
    path.write_bytes(data)


def test_a_board_of_an_earlier_boot_is_replaced(boards):
    board = boards()
    board.mark(3, COMPUTING)
    rewrite_header(board.path, boot=1)
    again = boards()
    assert again.last_number == 0


def test_a_board_of_another_namespace_of_processes_is_refused(boards):
    rewrite_header(boards().path, namespace=1)
    with pytest.raises(BackgroundError, match="another namespace of process ids"):
        boards()


def test_a_board_that_ended_processes_of_another_namespace_left_is_replaced(boards):
    board = boards()
    board.mark(3, COMPUTING)
    rewrite_header(board.path, namespace=1)
    board.close()
    assert boards().last_number == 0


def test_a_board_that_another_process_has_open_is_not_replaced(boards):
    board = boards()
    board.close()
    code = "import sys; from stretto.background.board import Board; b = Board('cpu')"
    code += "; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as holder:
        holder.stdout.readline()
        rewrite_header(board.path, namespace=1)
        with pytest.raises(BackgroundError, match="another namespace of process ids"):
            boards()
        holder.stdin.close()


@pytest.mark.parametrize("role", ["READER", "_FOREGROUND"])
def test_a_process_that_takes_an_ended_ones_role_meanwhile_keeps_it(
    boards, monkeypatch, role
):
    board, word = boards(), getattr(board_module, role)
    board.words[word], board.words[word + 1] = 4, 100

    def replaced(pid, started):
        board.words[word], board.words[word + 1] = 4, 200  # its id is used again
        return False

    monkeypatch.setattr(board_module, "is_running", replaced)
    board.clear_ended_reader()
    assert not board.clear_ended_foreground()
    assert board.words[word] == 4


def test_a_role_is_left_while_another_process_holds_the_lock(boards, other):
    _, ended = other
    board = boards()
    board.words[board_module.READER] = ended.pid
    with boards()._locked():  # it may have been stopped within
        board.clear_ended_reader()
    assert board.is_read
    board.clear_ended_reader()
    assert not board.is_read


@pytest.mark.parametrize("act", ["open", "claim"])
def test_a_board_that_stays_locked_is_refused(boards, monkeypatch, act):
    monkeypatch.setattr(board_module, "_LOCK_S", 0.01)
    board = boards()
    with (
        boards()._locked(),  # it may have been stopped within
        pytest.raises(BackgroundError, match="is locked by another process"),
    ):
        boards() if act == "open" else board.claim_foreground()
    board.claim_foreground()


def test_a_board_of_another_version_is_replaced_unless_it_is_used(boards, other):
    living, ended = other
    board = boards()
    word = board_module._BACKGROUND
    board.words[word], board.words[word + 1] = living.pid, start_of(living.pid)
    rewrite_header(board.path, version=99)
    with pytest.raises(BackgroundError, match=f"used by process {living.pid}"):
        boards()
    board.words[word] = ended.pid
    assert boards().words[word] == 0


def test_no_space_for_a_board_is_one_clear_error(boards, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board_module.os, "posix_fallocate", full)
    with pytest.raises(BackgroundError, match="no space for the board"):
        boards()


def test_a_process_is_known_by_its_start(other):
    living, ended = other
    assert is_running(os.getpid(), own_start())
    assert is_running(living.pid, start_of(living.pid))
    assert not is_running(living.pid, start_of(living.pid) + 1)
    assert not is_running(ended.pid, 0)
    assert not is_running(0, 0)


def test_the_places_of_the_board_do_not_overlap():
    b = board_module
    places = [
        (0, b._HEADER.size),
        (8 * b.READER, 8 * (b._BACKGROUND_STARTED + 1)),
        (b._STATUS_AT, b._STATUS_AT + b._STATUS.size),
        (b._KINDS_AT, b._KINDS_AT + b._KIND_BYTES * b._MAX_KINDS),
        (b._WINDOWS_AT, b._WINDOWS_AT + 24 + b._MAX_WINDOWS * b._WINDOW.size),
        (b._RING_AT, b._SIZE),
    ]
    for (_, end), (begin, _) in itertools.pairwise(places):
        assert end <= begin
    assert b._MARK.size <= b._MARK_BYTES
    assert struct.calcsize("=Q") == 8


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:1", "2,5", "cuda:5"),
        ("cuda", "3", "cuda:3"),
        ("cuda:0", "GPU-8f2a", "cuda:GPU-8f2a"),
        ("cuda:1", "", "cuda:1"),
        ("cuda:4", "2,5", "cuda:4"),
        ("cpu:1", "2,5", "cpu:1"),
        ("exclusive:a", "0", "exclusive:a"),
    ],
)
def test_a_gpu_has_one_board_whatever_number_processes_give_it(
    device: str, visible: str, expected: str
) -> None:
    assert board_module.physical_name(device, visible) == expected


@pytest.mark.parametrize("number", [2**64 - 1, 2**63, 511])
def test_no_number_in_a_file_keeps_a_process_from_its_board(boards, number):
    board = boards()
    for at in range(12, len(board.words)):
        board.words[at] = number
    board.words[board_module._LAST_MARK] = number
    board.claim_foreground()
    board.claim_background()
    board.set_windows((Window(begin_s=0.0, length_s=1.0, kind="network"),))
    board.mark(1, WAITING, board.kind_number("network"))
    board.publish(BackgroundStatus())
    board.marks_after(board.last_number - 1)
    assert board.windows()
    assert board.background() is not None


@pytest.mark.parametrize("role", ["foreground", "background"])
def test_a_process_that_runs_another_program_claims_its_role_again(
    boards, role, monkeypatch
):
    """After exec the process has its id and start, and nothing else."""
    former = boards()
    claim = f"claim_{role}"
    getattr(former, claim)()
    with pytest.raises(BackgroundError, match="which is this one"):
        getattr(boards(), claim)()
    monkeypatch.setattr(board_module, "_claimed", set())
    board, before = boards(), former.last_number
    getattr(board, claim)()
    if role == "foreground":
        states = [mark.state for mark in board.marks_after(before)]
        assert states == [FREE, COMPUTING]  # a background begins to learn again
