"""A keeper with ranks that train nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stretto import variable_names
from stretto.errors import SpecError
from stretto.lab.ports import free_port
from stretto.members.client import MemberClient
from stretto.members.keeper import _Rank
from stretto.members.progress import Doing, Progress
from stretto.members.view import Member, View, why_over
from stretto.members.wire import view_message, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEEPER = """
import sys
from stretto.members import keeper
keeper.STOPPED_S = 0.2
job = keeper.ElasticJob(
    command=(sys.executable, sys.argv[1]), ranks=3, min_ranks=int(sys.argv[2]),
    max_ranks=3, replaces=False,
)
sys.exit(keeper.RankKeeper(job).run())
"""

RANK = """
import os, signal, sys
from stretto.members.client import MemberClient
client = MemberClient.of_environment()
assert "torch" not in sys.modules
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
view = client.next_view(0, timeout_s=60)
if client.member == 0:
    os.kill(os.getpid(), signal.SIGNAL)
if 0 in view.ids:
    view = client.next_view(view.generation, timeout_s=60)
text = f"view {view.generation} {view.ids} {view.members[0].address}"
os.write(1, f"{text}\\n".encode())  # at once: other ranks write there too
client.left()
"""


def run_programs(
    folder: Path, keeper: str, rank: str, least: int
) -> subprocess.CompletedProcess[str]:
    """Run a keeper's program with that of its ranks."""
    files = folder / "keeper.py", folder / "rank.py"
    for file, program in zip(files, (keeper, rank), strict=True):
        file.write_text(program)
    return subprocess.run(
        [sys.executable, *map(str, files), str(least)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def run_keeper(
    folder: Path, signal: str, least: int
) -> subprocess.CompletedProcess[str]:
    return run_programs(folder, KEEPER, RANK.replace("SIGNAL", signal), least)


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_ranks_get_a_view_without_one_that_was_killed_or_stopped(
    tmp_path: Path, signal: str
) -> None:
    ended = run_keeper(tmp_path, signal, least=2)
    assert ended.stdout.splitlines() == ["view 2 (1, 2) h:1"] * 2
    assert ended.returncode == 0


def test_a_job_with_too_few_ranks_ends_with_the_status_of_the_lost_one(
    tmp_path: Path,
) -> None:
    ended = run_keeper(tmp_path, "SIGKILL", least=3)
    assert ended.returncode == 128 + 9
    assert "2 ranks are left, of at least 3" in ended.stderr


FAILING = """
import os, pathlib, sys, time
from stretto.members.client import MemberClient
client = MemberClient.of_environment()
folder = pathlib.Path(sys.argv[0]).parent
if client.joins:
    (folder / f"failed{client.member}").touch()
    sys.exit(STATUS)
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
client.entered(client.next_view(0, timeout_s=60).generation)
if client.member == 2 or HOW == "all":
    sys.exit(4)
while not (folder / "failed5").exists():
    time.sleep(0.01)
time.sleep(0.5)  # another one would be started meanwhile
client.left()
"""


def run_failing(
    folder: Path, how: str, *, status: int = 3
) -> subprocess.CompletedProcess[str]:
    """Run ranks of which some end by an error of their own, newcomers with a status."""
    driver, rank = folder / "keeper.py", folder / "rank.py"
    driver.write_text(KEEPER.replace("replaces=False", "replaces=True"))
    rank.write_text(FAILING.replace("HOW", repr(how)).replace("STATUS", str(status)))
    return subprocess.run(
        [sys.executable, str(driver), str(rank), "1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("status", [3, 0])
def test_ranks_that_fail_before_they_join_are_not_started_forever(
    tmp_path: Path, status: int
) -> None:
    ended = run_failing(tmp_path, "one", status=status)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in tmp_path.glob("failed*")) == [
        *("failed3", "failed4", "failed5")
    ]


def test_a_job_ends_whose_ranks_all_have_an_error_of_their_own(tmp_path: Path) -> None:
    ended = run_failing(tmp_path, "all")
    assert ended.returncode == 4
    assert "the last rank that had trained ended by an error" in ended.stderr


EARLY = """
import os, pathlib, sys, time
from stretto import variable_names
from stretto.members.client import MemberClient
from stretto.members.progress import Doing, ProgressWriter

client = MemberClient.of_environment()
folder = pathlib.Path(sys.argv[0]).parent
if client.joins:
    (folder / "started").touch()
    time.sleep(60)
if client.member == 1 and not ENTERS:
    sys.exit(0)
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
view = client.next_view(0, timeout_s=60)
client.entered(view.generation)
page = ProgressWriter(os.environ[variable_names.PROGRESS])
page.steps = 5
page.note(Doing.ANYTHING)
if client.member == 1:
    (folder / "ends").touch()
    sys.exit(0)
while not (folder / "ends").exists():
    time.sleep(0.01)
client.failed(view.generation)  # its collective with member 1
view = client.next_view(view.generation, timeout_s=60)
client.entered(view.generation)
if TRAINS:
    page.steps = 6
    page.note(Doing.ANYTHING)
    while not (folder / "started").exists():
        time.sleep(0.01)
"""


def run_early(
    folder: Path, least: int, *, enters: bool = True, trains: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run three ranks of which one ends with status 0, in step 5."""
    keeper = KEEPER.replace("replaces=False", f"replaces={least < 3}")
    rank = EARLY.replace("ENTERS", str(enters)).replace("TRAINS", str(trains))
    return run_programs(folder, keeper, rank, least)


def test_a_rank_that_ends_with_status_0_while_others_train_is_replaced(
    tmp_path: Path,
) -> None:
    ended = run_early(tmp_path, 2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("ended with exit status 0 in step 5, and others") == 1
    assert "member 3 is started in its place" in ended.stderr


def test_a_rank_that_ends_with_status_0_may_leave_too_few(tmp_path: Path) -> None:
    ended = run_early(tmp_path, 3)
    assert ended.returncode == 1
    assert "2 ranks are left, of at least 3: the job ends" in ended.stderr


def test_a_rank_that_finishes_first_is_not_lost(tmp_path: Path) -> None:
    ended = run_early(tmp_path, 3, trains=False)
    assert ended.returncode == 0, ended.stderr
    assert "exit status 0" not in ended.stderr


def test_a_rank_that_ends_with_status_0_before_training_ends_the_job(
    tmp_path: Path,
) -> None:
    ended = run_early(tmp_path, 2, enters=False)
    assert ended.returncode == 1
    assert "before all had called stretto.Elastic" in ended.stderr


LEAVING = """
import pathlib, sys, time
from stretto.members.client import MemberClient
client = MemberClient.of_environment()
folder = pathlib.Path(sys.argv[0]).parent
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
view = client.next_view(0, timeout_s=60)
client.entered(view.generation)
if client.member == 2:
    client.drained([2])
    while len(list(folder.glob("done*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.5)  # the others end first
    sys.exit(143)
if 2 in view.ids:
    client.next_view(view.generation, timeout_s=60)
(folder / f"done{client.member}").touch()
"""


def test_a_rank_that_leaves_and_ends_last_does_not_fail_the_job(tmp_path: Path) -> None:
    driver, rank = tmp_path / "keeper.py", tmp_path / "rank.py"
    driver.write_text(KEEPER)
    rank.write_text(LEAVING)
    ended = subprocess.run(
        [sys.executable, str(driver), str(rank), "1"], timeout=100, check=False
    )
    assert ended.returncode == 0


def test_a_process_has_one_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keeper"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    monkeypatch.setattr(MemberClient, "_made", set())
    environment = {variable_names.KEEPER: str(path), variable_names.MEMBER: "0"}
    client = MemberClient.of_environment(environment)
    assert client is not None
    with pytest.raises(SpecError, match=r"a process has one stretto\.Elastic"):
        MemberClient.of_environment(environment)
    client._socket.close()
    listener.close()


def why_two_ranks_parted(newest: View | None, *, has_ended: bool) -> str:
    members = tuple(Member(id=each, keeper=0) for each in (0, 2))
    view, error = View(generation=3, members=members), RuntimeError("Broken pipe\nat")
    return why_over(view, newest, error, has_ended=has_ended)


def test_why_a_view_is_over_names_who_is_not_in_the_next_one() -> None:
    newest = View(generation=4, members=(Member(id=0, keeper=0),))
    why = why_two_ranks_parted(newest, has_ended=True)
    assert why == "membership 4 follows it without member 2"


def test_why_a_view_is_over_that_was_ended_on_purpose() -> None:
    why = why_two_ranks_parted(None, has_ended=True)
    assert why == "another rank has left it, or can't reach a member"


def test_why_a_view_is_over_for_a_reason_of_this_rank_s() -> None:
    assert why_two_ranks_parted(None, has_ended=False) == "Broken pipe"


def test_a_view_survives_its_line() -> None:
    view = View(generation=3, members=(Member(id=4, keeper=1, address="a:1"),))
    assert view_of(view_message(view)) == view
    assert view_of({"end": 3}) is None


HOST = """
import functools, sys
from stretto.members import keeper, meeting
# A busy machine may give a keeper no time for some seconds.
keeper.VotePolicy = functools.partial(keeper.VotePolicy, silent_s=8.0)
number, port, nodes, job, rank, local = sys.argv[1:]
point = meeting.MeetingPoint(
    host="127.0.0.1", port=int(port), nodes=int(nodes),
    node=None if number == "-" else int(number), job=job, local=local,
)
elastic = keeper.ElasticJob(
    command=(sys.executable, rank), ranks=1, min_ranks=1, max_ranks=8,
    replaces=False, meeting=point,
)
sys.exit(keeper.RankKeeper(elastic).run())
"""

TOGETHER = """
import os, sys, time
from stretto.members.client import MemberClient
client = MemberClient.of_environment()
place = os.environ["RANK"], os.environ["WORLD_SIZE"]
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
view = client.next_view(0, timeout_s=60)
print("view", view.ids, *place, flush=True)
while sys.stdin.readline().strip():
    view = client.next_view(view.generation, timeout_s=60)
    print("view", view.ids, flush=True)
client.left()
"""


class Hosts:
    """Keepers of several hosts, each with one rank that prints its views."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "keeper.py").write_text(HOST)
        (folder / "rank.py").write_text(TOGETHER)
        self.keepers: list[subprocess.Popen[str]] = []

    def start(
        self, number: int | str, nodes: int, *, job: str = "j", local: str = "127.0.0.1"
    ) -> subprocess.Popen[str]:
        row = [str(number), str(self.port), str(nodes), job]
        script, rank = str(self.folder / "keeper.py"), str(self.folder / "rank.py")
        keeper = subprocess.Popen(
            [sys.executable, script, *row, rank, local],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.keepers.append(keeper)
        return keeper

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.communicate()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


def line(keeper: subprocess.Popen[str]) -> str:
    assert keeper.stdout is not None
    return keeper.stdout.readline().strip()


def say(keeper: subprocess.Popen[str], text: str) -> None:
    assert keeper.stdin is not None
    keeper.stdin.write(text + "\n")
    keeper.stdin.flush()


def test_hosts_form_one_view_and_lose_and_gain_hosts(hosts: Hosts) -> None:
    first, second, third = (hosts.start(n, 3) for n in range(3))
    assert [line(k) for k in (first, second, third)] == [
        f"view (0, 1, 2) {rank} 3" for rank in range(3)
    ]
    third.kill()
    say(first, "next")
    say(second, "next")
    assert line(first) == line(second) == "view (0, 1)"
    say(first, "next")
    say(second, "next")
    later = hosts.start(2, 3)
    assert line(later) == "view (0, 1, 30000) 0 1"
    assert line(first) == line(second) == "view (0, 1, 30000)"
    for keeper in (first, second, later):
        say(keeper, "")
    assert [k.wait(100) for k in (first, second, later)] == [0, 0, 0]


def test_a_host_of_another_job_is_refused(hosts: Hosts) -> None:
    first, stranger = hosts.start(0, 2), hosts.start(1, 2, job="other")
    assert stranger.stderr is not None
    assert "refuses this one: its job or its token" in stranger.stderr.readline()
    second = hosts.start("-", 2, local="127.0.0.2")
    assert line(first) == "view (0, 1) 0 2"
    assert line(second) == "view (0, 1) 1 2"


def test_a_rank_lost_before_training_ends_the_job_on_all_hosts(hosts: Hosts) -> None:
    (hosts.folder / "rank.py").write_text(
        "import os, sys, time\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    first, second = hosts.start(0, 2), hosts.start(1, 2)
    assert (first.wait(100), second.wait(100)) == (7, 7)


LATE_LINKS = """
from stretto.members.peers import KeeperNetwork
dial = KeeperNetwork._dial
KeeperNetwork._dial = lambda self, *given: self._loop.call_in(
    2.0, lambda: dial(self, *given)
)
"""


def test_hosts_that_are_not_connected_yet_hear_of_a_rank_lost(hosts: Hosts) -> None:
    (hosts.folder / "keeper.py").write_text(LATE_LINKS + HOST)
    (hosts.folder / "rank.py").write_text(
        "import os, sys, time\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    first, second = hosts.start(0, 2), hosts.start(1, 2)
    assert (first.wait(100), second.wait(100)) == (7, 7)


DRAINING = """
import sys, threading
from stretto.members.client import MemberClient
client = MemberClient.of_environment()
asked = threading.Event()
client.start(
    f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None,
    on_drain=asked.set,
)
view = client.next_view(0, timeout_s=60)
client.entered(view.generation)
print("view", view.ids, flush=True)

def leave():
    asked.wait()
    client.drained([client.member])

threading.Thread(target=leave, daemon=True).start()
view = client.next_view(view.generation, timeout_s=60)
print("view", view.ids, flush=True)
if client.member not in view.ids:
    sys.exit(143)
sys.stdin.readline()
client.left()
"""


def test_a_keeper_that_gets_sigterm_lets_its_ranks_leave_in_order(hosts: Hosts) -> None:
    (hosts.folder / "rank.py").write_text(DRAINING)
    started = [hosts.start(number, 3) for number in range(3)]
    assert [line(keeper) for keeper in started] == ["view (0, 1, 2)"] * 3
    started[0].terminate()
    assert [line(keeper) for keeper in started] == ["view (1, 2)"] * 3
    assert started[0].wait(100) == 128 + 15
    for keeper in started[1:]:
        say(keeper, "")
    assert [keeper.wait(100) for keeper in started[1:]] == [0, 0]


HANGING = """
import os, sys, time
from stretto.members.client import MemberClient
from stretto import variable_names
from stretto.members.progress import Doing, ProgressWriter
client = MemberClient.of_environment()
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
view = client.next_view(0, timeout_s=60)
client.entered(1)
page = ProgressWriter(os.environ[variable_names.PROGRESS])
page.limit_s = 0.2
page.note(Doing.COMPUTING if client.member == 0 else Doing.WAITING)

def compute_forever():
    time.sleep(60)

if client.member == 0:
    compute_forever()
view = client.next_view(view.generation, timeout_s=60)
os.write(1, f"view {view.ids}\\n".encode())
client.left()
"""


def test_a_rank_that_computes_on_while_others_wait_is_killed(tmp_path: Path) -> None:
    driver, rank = tmp_path / "keeper.py", tmp_path / "rank.py"
    driver.write_text(KEEPER)
    rank.write_text(HANGING)
    ended = subprocess.run(
        [sys.executable, str(driver), str(rank), "2"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout.splitlines() == ["view (1, 2)"] * 2
    assert "while others wait: it is killed" in ended.stderr
    assert " in compute_forever" in ended.stderr


def test_a_rank_is_hanging_only_while_it_computes() -> None:
    late = {"for_s": 31.0, "limit_s": 30.0}
    assert Progress(doing=Doing.COMPUTING, **late).hangs
    assert not Progress(doing=Doing.WAITING, **late).hangs
    assert Progress(doing=Doing.WAITING, **late).waits_long
    assert not Progress(doing=Doing.ANYTHING, **late).hangs
    assert not Progress(doing=Doing.COMPUTING, for_s=29.0, limit_s=30.0).hangs


def test_a_signal_leaves_the_end_of_a_process_to_its_keeper() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    rank = _Rank(0, 0, process, joins=False)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    rank.signal(signal.SIGKILL)
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)
    assert found is not None
    assert found.si_status == 0
    process.returncode = 0
