"""`on_loss="shrink"` on two hosts: the others go on without one rank, or without a host's."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from gradsync.commands.launch import agent_rendezvous
from gradsync.commands.launch.agent_rendezvous import AgentRendezvous, Nodes
from gradsync.errors import RendezvousError
from gradsync.runtime.rejoin import group_key
from support import on_host, survivor
from support.fork_server import WITH_RANKS, run_forked
from support.launchers import Finished
from support.namespaces import two_hosts

SILENCE_S = 5.0


def launch(
    folder: Path,
    *kills: str,
    ranks: int = 2,
    rejoin: int = 0,
    variables: dict[str, str] | None = None,
    also: Sequence[dict[str, str]] = (),
) -> list[Finished]:
    """Two hosts with so many ranks each, and on `also`; how the launchers ended."""
    folder.mkdir()
    with two_hosts() as hosts:
        words = [on_host.__file__, ",".join(host.namespace for host in hosts), hosts[0].address]
        words += ["--nproc-per-node", ranks, "--on-loss", "shrink", "--rejoin", rejoin, "--"]
        # On another host a process that is merely slow looks dead after that time.
        shared = {**WITH_RANKS, "TEST_SILENCE_S": str(SILENCE_S), **(variables or {})}
        each = [{**shared, **host} for host in ({"TEST_HOST": "0"}, {"TEST_HOST": "1"}, *also)]
        return run_forked([*words, survivor.__file__, folder, "invariant", *kills], each)


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    (done,) = run_forked([survivor.__file__, folder, "invariant"])
    done.ok()
    return told(folder)[0]


@pytest.mark.launcher("namespaces")
@pytest.mark.parametrize(
    ("kills", "left", "rejoin"),
    [
        (["2:2:forward"], 3, 0),
        (["0:2:backward", "1:2:backward"], 2, 0),  # the first host's launcher serves the store
        (["2:1:reduced", "3:3:forward"], 2, 0),
        (["3:1:data", "wait:3"], 4, 1),
        (["3:2:forward:stops"], 3, 0),
        (["2:2:forward:stops", "3:2:forward"], 2, 0),  # its launcher alone can end it
    ],
    ids=str,
)
def test_hosts_go_on(
    tmp_path: Path, kills: list[str], left: int, rejoin: int, alone: dict[str, Any]
) -> None:
    runs = launch(tmp_path / "out", *kills, rejoin=rejoin)
    ends = told(tmp_path / "out")
    said = [run.stderr[-3000:] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert [end["world_size"] for end in ends] == [left] * left, said
    for end in ends:
        for name in ("sha256", "lr"):
            assert end[name] == alone[name], name
    # The launcher of the lost rank's host says so to the other one's ranks.
    waits = re.findall(r"agreed after (\d+\.\d+) s", "".join(said))
    assert waits
    assert max(map(float, waits)) < SILENCE_S or "stops" in str(kills), said


@pytest.mark.launcher("namespaces")
def test_a_host_comes_back(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Its ranks and its launcher end at once; then its line is typed again."""
    out = tmp_path / "out"
    again = {"TEST_HOST": "1", "TEST_AFTER": str(out / "host-is-lost")}
    first, lost, second = launch(out, "2:2:reduced:host", "until:4", also=[again])
    said = first.stderr[-5000:] + second.stderr[-3000:]
    assert (first.returncode, lost.returncode, second.returncode) == (0, -9, 0), said
    assert [(end["world_size"], end["sha256"]) for end in told(out)] == [(4, alone["sha256"])] * 4
    assert re.search("lost rank.s. 2, 3.*", first.stderr), said
    assert re.search("rank.s. 4 on join", second.stderr), said


@pytest.mark.launcher("namespaces")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_host_comes_new(tmp_path: Path, ranks: int, alone: dict[str, Any]) -> None:
    """One begins alone; a rank of the other one is lost and comes back, too."""
    out, size = tmp_path / "out", 2 * ranks
    kills = [f"until:{size}", f"{size - 1}+:3:data"]
    variables = {"TEST_NODES": "1:2", "GRADSYNC_TOKEN": "s" * 32}
    first, second = launch(out, *kills, ranks=ranks, rejoin=1, variables=variables)
    said = first.stderr[-5000:] + second.stderr[-5000:]
    assert (first.returncode, second.returncode) == (0, 0), said
    ends = [(end["world_size"], end["sha256"]) for end in told(out)]
    assert ends == [(size, alone["sha256"])] * size
    assert re.search(f"lost rank.s. {size - 1} .*rank.s. {size - 1} join", said, re.DOTALL), said


@pytest.mark.launcher("namespaces")
def test_when_all_are_lost_at_once(tmp_path: Path) -> None:
    runs = launch(tmp_path / "out", *(f"{rank}:2:data" for rank in range(4)))
    assert [run.returncode for run in runs] == [1, 1]


@pytest.mark.launcher("namespaces")
@pytest.mark.parametrize(
    ("dead", "how", "rejoin", "size", "code"),
    [("3", "", 1, 4, 0), ("3", "", 0, 3, 0), ("23", "", 0, 2, 1), ("23", ":stops-all", 0, 2, 1)],
)
def test_new_hosts_ranks_that_end_early(
    tmp_path: Path, dead: str, how: str, rejoin: int, size: int, code: int, alone: dict[str, Any]
) -> None:
    """They end neither the run nor the other ranks of their host."""
    out, variables = tmp_path / "out", {"TEST_NODES": "1:2", "GRADSYNC_TOKEN": "s" * 32}
    kills = [f"until:{size}", *(f"{rank}+:0:built{how}" for rank in dead)]
    kills += ["sees:3+"] * code  # else the run may be over before the last of them ends
    first, second = launch(out, *kills, rejoin=rejoin, variables=variables)
    said = first.stderr[-5000:] + second.stderr[-5000:]
    assert (first.returncode, second.returncode) in ((0, code), (0, 143 * code)), said
    ends = [(end["world_size"], end["sha256"]) for end in told(out)]
    assert ends == [(size, alone["sha256"])] * size


@pytest.mark.launcher("namespaces")
def test_a_host_that_waits_is_stopped_with_the_others(tmp_path: Path) -> None:
    """It has no checkpoint to join at."""
    out, variables = tmp_path / "out", {"TEST_NODES": "1:2", "GRADSYNC_TOKEN": "s" * 32}
    runs = launch(out, "waiter:2", "0:1:data:asks", ranks=1, variables=variables)
    assert [run.returncode for run in runs] == [75, 75], runs[0].stderr + runs[1].stderr[-3000:]


@pytest.mark.launcher("namespaces")
def test_a_host_that_waits_is_stopped_alone(tmp_path: Path, alone: dict[str, Any]) -> None:
    """The others go on, and do not wait for it."""
    out, variables = tmp_path / "out", {"TEST_NODES": "1:2", "GRADSYNC_TOKEN": "s" * 32}
    runs = launch(out, "0:1:data:sends-away", ranks=1, variables=variables)
    assert [run.returncode for run in runs] == [0, 75], runs[0].stderr + runs[1].stderr[-3000:]
    assert [(end["world_size"], end["sha256"]) for end in told(out)] == [(1, alone["sha256"])]


@pytest.mark.launcher("namespaces")
@pytest.mark.parametrize("asks", ["asks", "asks-launcher-0"])
def test_a_host_without_ranks_ends_as_the_others(tmp_path: Path, asks: str) -> None:
    """By a stop, with a checkpoint; by its own launcher, too."""
    runs = launch(tmp_path / "out", "0:1:data", "1:1:data", f"2:3:data:{asks}")
    assert [run.returncode for run in runs] == [75, 75], runs[0].stderr + runs[1].stderr[-3000:]


@pytest.mark.launcher("namespaces")
def test_a_host_that_is_cut_off(tmp_path: Path, alone: dict[str, Any]) -> None:
    """The host with the store goes on; the other one's ranks end, and name what is missing."""
    first, second = launch(tmp_path / "out", "3:2:backward:cuts")
    ends = told(tmp_path / "out")
    assert (first.returncode, second.returncode) == (0, 1), first.stderr + second.stderr[-3000:]
    assert [(end["world_size"], end["sha256"]) for end in ends] == [(2, alone["sha256"])] * 2
    assert "lost rank(s) 2, 3" in first.stderr
    assert "which serves the rendezvous store, vanished without a word" in second.stderr


@pytest.mark.launcher("namespaces")
def test_ranks_come_back_after_a_short_cut(tmp_path: Path, alone: dict[str, Any]) -> None:
    """They lose the store, which their launcher does not; neither it nor the run ends."""
    kills = ["3:2:backward:cuts", "plugs", "wait:4"]
    runs = launch(tmp_path / "out", *kills, rejoin=2, variables={"TEST_SILENCE_S": "2"})
    said = [run.stderr[-3000:] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    ends = [(end["world_size"], end["sha256"]) for end in told(tmp_path / "out")]
    assert ends == [(4, alone["sha256"])] * 4, said
    assert "which serves the rendezvous store, vanished without a word" in said[1]


@pytest.mark.parametrize(
    ("groups", "ended", "empty", "waited_s", "how"),
    [
        ({0: 0, 1: 0, 2: 0}, {}, {}, 1, None),  # they have not noticed yet
        ({0: 0, 1: 0, 2: 0}, {}, {}, 61, 1),  # nor will they
        ({0: 0, 1: 0, 2: 0}, {}, {1: 0, 2: 0}, 1, 1),  # nobody is left to notice
        ({0: 1, 1: 1, 2: 1}, {}, {1: 0, 2: 0}, 1, None),
        ({0: 0, 1: 1, 2: 0}, {}, {}, 1000, None),
        ({0: 0, 1: 1, 2: 0}, {1: 0}, {}, 1, 0),  # without the third host, too
        ({0: 0, 1: 1, 2: 1}, {1: 0}, {}, 1, None),
        ({0: 0, 1: 1, 2: 1}, {1: 0, 2: 1}, {}, 1, 0),
        ({0: 0, 1: 1, 2: 1}, {1: 75, 2: 75}, {}, 1, 75),
        ({0: 0, 1: 1, 2: 2}, {1: 0}, {}, 1, None),
        ({0: 0, 1: 1, 2: 2}, {2: 1}, {}, 1, 1),
        ({0: 0, 1: 1, 2: 2}, {}, {2: 2}, 1, 1),
        ({0: 2, 1: 2, 2: 1}, {1: 1}, {}, 1, 1),
    ],
)
def test_what_a_host_without_ranks_waits_for(
    groups: dict[int, int],
    ended: dict[int, int],
    empty: dict[int, int],
    waited_s: float,
    how: int | None,
) -> None:
    meeting = AgentRendezvous(Nodes(count=3, rank=0, address="127.0.0.1", port=0))
    meeting._store = HashStore()
    meeting._store.set(agent_rendezvous._NUMBERED, "3")
    for node, number in groups.items():
        meeting._store.set(group_key(node), str(number))
    for name, values in (("ended", ended), ("empty", empty)):
        for node, value in values.items():
            meeting._records().claim(f"{name}/{node}", str(value))
    assert meeting.how_others_end(waited_s) == how


def test_a_host_whose_ranks_have_just_joined_is_not_empty() -> None:
    meeting = AgentRendezvous(Nodes(count=2, rank=0, address="127.0.0.1", port=0))
    meeting._store = HashStore()
    for key, value in ((agent_rendezvous._NUMBERED, "2"), (group_key(0), "3"), ("joined", "1")):
        meeting._store.set(key, value)
    assert meeting.how_others_end(1, ["joined"]) is None
    assert meeting.how_others_end(1, ["other"]) == 1


def test_a_silent_store_holds_up_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a thread left that waits for it, with which Python would abort."""
    monkeypatch.setattr(agent_rendezvous, "_ANSWER_S", 0.05)
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())

    class Silent:
        def check(self, *_: object) -> bool:
            return bool(client.recv(1))

        set = get = add = check

    meeting = AgentRendezvous(
        Nodes(count=2, rank=1, address="127.0.0.1", port=server.getsockname()[1])
    )
    meeting._store = Silent()
    with server, client:
        for _ in range(3):
            assert not meeting.has_begun()
            assert not meeting.has_joined(2, "1")
            assert meeting.how_others_end(1) == 1
            assert not meeting.is_left_out(inside=True)
            meeting.say_lost(1)
        assert meeting._asking is not None
        assert meeting._asking.is_alive()
        meeting.shutdown()
        assert not meeting._asking.is_alive()


def test_a_stop_leaves_no_thread_in_torchs_code() -> None:
    """Python would abort there."""
    meeting = AgentRendezvous(Nodes(count=2, rank=0, address="127.0.0.1", port=0))
    meeting._store, meeting.stopped = HashStore(), lambda: True
    meeting._store.set(agent_rendezvous._NUMBERED, "2")
    meeting.say_ended(0)
    assert meeting._asking is not None
    assert not meeting._asking.is_alive()


def test_no_more_hosts_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was lost makes room."""
    monkeypatch.setattr(agent_rendezvous, "_LOOK_S", 0.1)
    store = HashStore()
    store.set(agent_rendezvous._NUMBERED, "1")
    store.set(group_key("last"), "0")

    def host(number: int) -> AgentRendezvous:
        meeting = AgentRendezvous(Nodes(count=1, rank=number, address="", port=0, most=2))
        meeting._store = store
        return meeting

    def live(meeting: AgentRendezvous) -> None:
        while not over[meeting._number].wait(0.01):
            meeting.is_left_out(inside=False)

    over = [threading.Event() for _ in range(4)]
    first, second, third, fourth = (host(number) for number in (0, 1, 1, 1))
    first.begin(1, range(1))
    second.next_rendezvous()
    assert second.begin(1, range(1)) == (1, 1)
    for each in (first, second):
        threading.Thread(target=live, args=[each], daemon=True).start()
    with pytest.raises(RendezvousError, match="2 hosts have ranks already, the most"):
        third.next_rendezvous()
    over[1].set()
    fourth.next_rendezvous()
    over[0].set()
    assert fourth.begin(1, range(1)) == (3, 3)
