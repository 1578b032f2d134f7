"""A session on real processes: what it sets up, what it undoes, and whose failure it shows."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.errors import ConfigError, PeerError, RendezvousError, RunError
from gradsync.runtime.network import own_address
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.runtime.store import LEFT, host_store, wait_until
from support.fork_server import free_port, run_forked, torch_ranks
from support.rank_session import open_session

EXPORTED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "GLOO_SOCKET_IFNAME",
)


def exported() -> dict[str, str]:
    return {name: os.environ[name] for name in EXPORTED if name in os.environ}


def sum_of_ranks(rank: int) -> float:
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return value.item()


def listening_elsewhere() -> list[str]:
    """Addresses beyond loopback on which this process listens."""
    found = psutil.Process().net_connections(kind="inet")
    listening = [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
    return [address for address in listening if not address.startswith("127.")]


# -- set up and undone ----------------------------------------------------------------------------


def look_around(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    before = dict(os.environ)
    folder = Path(f"{store_path}-tmp")
    folder.mkdir(exist_ok=True)
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        session = open_session(rank, world_size, store_path, threads=2)
        with session as world:
            inside = {
                "world": world,
                "exported": exported(),
                "others": {name for name in os.environ if os.environ[name] != before.get(name)},
                "threads": (torch.get_num_threads(), session.threads),
                "group": dist.is_initialized(),
                "sum": sum_of_ranks(rank) if world.is_distributed else None,
                "listens": listening_elsewhere(),
                "notes": [path.name for path in folder.rglob("*.json")],
            }
    return inside | {
        "undone": dict(os.environ) == before,
        "threads after": torch.get_num_threads(),
        "group after": dist.is_initialized(),
    }


def test_inside_and_after(pool: Any) -> None:
    results = pool.run(look_around, 2)
    for rank, seen in enumerate(results):
        port = seen["exported"].pop("MASTER_PORT")
        assert 1 <= int(port) <= 65_535
        assert port == results[0]["exported"].get("MASTER_PORT", port)
        assert seen["exported"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert seen["others"] == set(EXPORTED)
        assert (seen["world"].rank, seen["world"].world_size) == (rank, 2)
        assert seen["world"].device == torch.device("cpu")
        assert seen["threads"] == (2, 2)
        assert seen["group"]
        assert seen["sum"] == 1.0
        assert seen["listens"] == []
        assert seen["notes"] == []  # the published port is of no use any more
        assert seen["undone"]
        assert seen["threads after"] == 1
        assert not seen["group after"]


def test_a_session_that_is_not_entered_has_no_world() -> None:
    """Its one rank would else train alone, beside others that do the same."""
    with pytest.raises(ConfigError, match=r"write `with gs.init\(\) as world:`"):
        _ = gs.init(device="cpu").world


def test_ranks_that_never_met_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    gs.init(device="cpu")
    for worlds in ([], [gs.World.from_process_group()]):
        with pytest.raises(RunError, match="launcher says that there are 2 ranks, but no process"):
            gs.replicate(torch.nn.Linear(2, 2), *worlds)
    gs.replicate(torch.nn.Linear(2, 2), gs.World()).close()


def test_one_rank_has_no_group_and_exports_nothing(pool: Any) -> None:
    (seen,) = pool.run(look_around, 1)
    assert not seen["group"]
    assert seen["exported"] == {}
    assert seen["others"] == set()
    assert seen["threads"] == (2, 2)
    assert seen["threads after"] == 1


def backends(rank: int, world_size: int, store_path: str) -> list[str]:
    """Results of several backends, one session each: a sum, or the error."""
    said = []
    for name in ("mpi", "cpu:gloo"):
        try:
            with open_session(rank, world_size, store_path, backend=name):
                said.append(f"{name} {sum_of_ranks(rank) if world_size > 1 else 1.0}")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_backend_is_refused_on_one_rank_as_on_two(pool: Any) -> None:
    (alone,) = pool.run(backends, 1)
    assert pool.run(backends, 2) == [alone] * 2
    assert "backend 'mpi' needs a torch built from source with MPI" in alone[0]


def draw(rank: int, world_size: int, store_path: str, seed: int | None) -> float:
    torch.manual_seed(100 + rank)
    with open_session(rank, world_size, store_path, seed=seed):
        return torch.rand(()).item()


def test_a_seed_is_the_same_on_all_ranks(pool: Any) -> None:
    first, second = pool.run(draw, 2, 5)
    assert first == second
    assert first == torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    first, second = pool.run(draw, 2, None)
    assert first != second  # left alone


def with_a_group_of_ones_own(rank: int, world_size: int, store_path: str) -> str:
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size
    )
    dist.barrier()  # the first to leave would close a connection that the other one is still making
    try:
        with pytest.raises(RunError) as caught:
            open_session(rank, world_size, store_path).open()
        assert dist.is_initialized()  # not ours to end
    finally:
        dist.destroy_process_group()
    return str(caught.value)


def test_a_group_that_exists_is_not_taken_over(pool: Any) -> None:
    for message in pool.run(with_a_group_of_ones_own, 2):
        assert message.startswith("a process group exists already")


# -- failures -------------------------------------------------------------------------------------


def alone(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    if rank:
        return {}
    before = dict(os.environ)
    folder = Path(f"{store_path}-tmp")
    folder.mkdir()
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        session = open_session(0, world_size, store_path, threads=2, rendezvous_timeout_s=1.0)
        with pytest.raises(RendezvousError) as caught:
            session.open()
    return {
        "message": str(caught.value),
        "notes": [path.name for path in folder.rglob("*.json")],
        "undone": dict(os.environ) == before and not dist.is_initialized(),
        "threads": torch.get_num_threads(),
    }


def test_a_meeting_that_fails_leaves_nothing(pool: Any) -> None:
    seen = pool.run(alone, 2)[0]
    assert "rank 0 waited in vain for rank(s) 1 of 2" in seen["message"]
    assert seen["notes"] == []
    assert seen["undone"]
    assert seen["threads"] == 1


def stumble(rank: int, number: int, kind: type[Exception]) -> None:
    raise kind(f"rank {rank}: recv from storage {number}: connection reset")


def some_fail(
    rank: int, world_size: int, store_path: str, who: tuple[int, ...], kind: type[Exception]
) -> dict[str, Any]:
    """The error of each rank when `who` fail while the others communicate, or are done (rank 0)."""
    before, started = dict(os.environ), time.monotonic()
    seen: dict[str, Any] = {}
    try:
        with open_session(rank, world_size, store_path):
            if rank in who:
                stumble(rank, 41 + 1, kind)
            if rank != 0:
                sum_of_ranks(rank)
    except PeerError as error:
        seen = {
            "message": str(error),
            "rank": error.rank,
            "traceback": error.traceback_text,
            "context": error.__suppress_context__,
        }
    except kind as error:
        seen = {"own": str(error)}
    undone = dict(os.environ) == before and not dist.is_initialized()
    return seen | {"undone": undone, "took_s": time.monotonic() - started}


@pytest.mark.parametrize("kind", [OSError])
def test_the_others_raise_that_ranks_failure(pool: Any, kind: type[Exception]) -> None:
    results = pool.run(some_fail, 3, (1,), kind)
    assert results[1]["own"] == "rank 1: recv from storage 42: connection reset"
    for seen in (results[0], results[2]):
        assert seen["message"].startswith("rank 1 on ")
        assert f"first: {kind.__name__}: rank 1: recv from storage 42: conn" in seen["message"]
        assert "in stumble" in seen["traceback"]
        assert seen["traceback"].rstrip() in seen["message"]
        assert seen["rank"] == 1
        assert seen["context"]  # the broken connection is only a consequence
        assert seen["undone"]
        assert seen["took_s"] < 8  # less than the wait at the end, on the rank that was done


def leave_early(rank: int, world_size: int, store_path: str, code: Any) -> str:
    """Rank 1 leaves by SystemExit; what rank 0 learns of it."""
    session = open_session(rank, world_size, store_path)
    if rank == 1:
        with pytest.raises(SystemExit) as caught, session:
            raise SystemExit(code)
        return repr(caught.value.code)
    try:
        with session:
            assert session._meeting is not None
            records, limit_s = session._meeting.records, time.monotonic() + 10
            assert wait_until(
                lambda: records.get("noticed/1") == LEFT or records.get("failure") is not None,
                limit_s,
            )
            if records.get("failure"):
                sum_of_ranks(rank)
    except PeerError as error:
        return str(error).partition("\n")[0].partition("failed first: ")[2]
    return "orderly"


@pytest.mark.parametrize(
    ("code", "learnt"), [(75, "orderly"), (None, "orderly"), ("no luck", "SystemExit: no luck")]
)
def test_which_exits_are_orderly(pool: Any, code: Any, learnt: str) -> None:
    assert pool.run(leave_early, 2, code) == [learnt, repr(code)]


def wait_in_vain(
    rank: int, world_size: int, store_path: str, leaves: bool
) -> tuple[str, str, float]:
    """Rank 1 does not come to the collective: it is late, or leaves in good order."""
    session = open_session(rank, world_size, store_path, timeout_s=0.5)
    started = time.monotonic()
    try:
        with session:
            assert session._meeting is not None
            records = session._meeting.records
            if rank == 0:
                if leaves:
                    wait_until(lambda: records.get("noticed/1") == LEFT, time.monotonic() + 10)
                sum_of_ranks(rank)
            elif not leaves:
                until = time.monotonic() + 10
                assert wait_until(lambda: records.get("failure") is not None, until)
    except RunError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def test_a_collective_takes_no_longer_than_it_may(pool: Any) -> None:
    (kind, message, seconds), (others, told, _) = pool.run(wait_in_vain, 2, False, timeout_s=20.0)
    assert kind == "LatePeerError"
    assert "rank 0 waited as long as it may (timeout_s) in " in message
    assert "500ms" in message
    assert 0.4 < seconds < 10.0
    assert others == "PeerError"
    assert message in told


def asked_at_the_second_step(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    before = signal.getsignal(signal.SIGTERM)
    model, stops, asked = torch.nn.Linear(2, 1), [], []
    with open_session(rank, world_size, store_path, catch_stop=True) as world:
        sync = gs.replicate(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if (rank, step) == (1, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            sync.backward(model(torch.ones(1, 2)).sum(), weight=1)
            stops.append(sync.step(optimizer).stop)
            asked.append(world.should_stop)
        sync.close()
    after = signal.signal(signal.SIGTERM, before)  # a signal that was had is ignored from now on
    return {"stops": stops, "asked": asked, "put back": after == before}


def test_a_signal_is_an_answer_of_the_step(pool: Any) -> None:
    first, second = pool.run(asked_at_the_second_step, 2)
    assert first == {"stops": [False, True, True], "asked": [False] * 3, "put back": True}
    assert second == {"stops": first["stops"], "asked": [False, True, True], "put back": False}


def leave_at_once(rank: int, world_size: int, store_path: str) -> bool:
    """Rank 0 is slow to connect; returns whether it had connected when this rank could leave."""
    connected, left = Path(f"{store_path}-connected"), Path(f"{store_path}-left")
    connect = dist.init_process_group

    def slowly(*args: Any, **named: Any) -> None:
        connect(*args, **named)
        if rank == 0:
            wait_until(left.exists, time.monotonic() + 0.5)
            connected.touch()

    with (
        mock.patch.object(dist, "init_process_group", slowly),
        open_session(rank, world_size, store_path),
    ):
        left.touch()
        return connected.exists()


def test_no_rank_leaves_while_others_connect(pool: Any) -> None:
    """Gloo would fail in a rank whose peer closes a connection that it is still making."""
    assert pool.run(leave_at_once, 2) == [True, True]


def test_a_rank_that_has_left_is_not_called_dead(pool: Any) -> None:
    (kind, message, _), (others, _, _) = pool.run(wait_in_vain, 2, True, timeout_s=20.0)
    assert (kind, others) == ("LostPeerError", "")
    assert message.startswith("rank(s) 1 had left in good order while rank 0 still communicates")


def press(rank: int, world_size: int, store_path: str) -> tuple[list[str], str]:
    """Ctrl-C on all ranks at once."""
    lines: list[str] = []
    with mock.patch("gradsync.runtime.signals._say", lines.append):
        try:
            with open_session(rank, world_size, store_path):
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            return lines, repr(error.__traceback__ and error.__cause__)


def test_one_rank_says_where_ctrl_c_hit(pool: Any) -> None:
    for world_size in (1, 2):
        results = pool.run(press, world_size)
        said = [line for lines, _ in results for line in lines]
        assert [cause for _, cause in results] == ["None"] * world_size
        assert len(said) == 1
        assert re.fullmatch(
            r"gradsync: (rank [01] )?interrupted \(Ctrl-C\) in /.*test_session.py:\d+\n", said[0]
        )


# -- a store that outlives its processes ----------------------------------------------------------


def restarted(
    rank: int, world_size: int, store_path: str, port: int, generation: int, come: tuple[int, ...]
) -> tuple[float, bool] | str:
    """As torchrun starts a worker: its agent serves the store, and keeps it over restarts."""
    if rank not in come:
        return "dead"
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(generation),
    }
    patience = 20.0 if len(come) == world_size else 1.0
    options = SessionOptions(device="cpu", threads=1, rendezvous_timeout_s=patience)
    session = Session(options, env=env)
    try:
        with session:
            assert session._meeting is not None
            noticed = session._meeting.records.get(f"noticed/{1 - rank}")
            return sum_of_ranks(rank), noticed is not None  # of this session
    except RendezvousError as error:
        return str(error)


def test_keys_of_a_dead_generation_do_not_disturb(pool: Any) -> None:
    server = host_store("127.0.0.1", 0, one_host=True)
    dead, waited = pool.run(restarted, 2, server.port, 0, (1,))
    assert dead == "dead"
    assert "rank 1 waited 1 s for rank 0 on this host" in waited
    assert pool.run(restarted, 2, server.port, 1, (0, 1)) == [(1.0, False)] * 2
    # The same workers open another session: nothing of the first one is mistaken for theirs.
    assert pool.run(restarted, 2, server.port, 1, (0, 1)) == [(1.0, False)] * 2


def given_address(rank: int, world_size: int, store_path: str, address: str, port: int) -> float:
    env = {**open_session(rank, world_size, store_path)._env}
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    options = SessionOptions(device="cpu", threads=1, rendezvous_timeout_s=5.0)
    with Session(options, env=env):
        return sum_of_ranks(rank)


@pytest.mark.parametrize("address", ["127.0.1.1", own_address(), "localhost"])
def test_one_host_under_any_of_its_addresses(pool: Any, address: str) -> None:
    """mpirun on one node with MASTER_ADDR=$(hostname): rank 0 listens on loopback only."""
    assert pool.run(given_address, 2, address, free_port()) == [1.0, 1.0]


# -- what a program does to its group, and in a child ---------------------------------------------

FORKS = """
import os, sys
import torch
import torch.distributed as dist
import gradsync as gs

def exits(): sys.exit(3)
def raises(): raise ValueError("the child's own")
def leaves_at_once(): os._exit(4)
def destroys():
    dist.destroy_process_group()
    sys.exit(5)
def outlives():
    os.read(reader, 1)  # returns when the parent has ended
    os._exit(0)

reader, writer = os.pipe()
with gs.init(threads=1) as world:
    some = gs.group([0, 1])
    if world.is_main:
        codes = []
        for act in (exits, raises, leaves_at_once, destroys, outlives):
            if (child := os.fork()) == 0:
                os.close(writer)
                act()
            if act is not outlives:
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(codes)
    sync = gs.replicate(model := torch.nn.Linear(4, 4), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: t.clone() for name, t in sync.replica.full_weights().items()}
    start, (stepped, step) = before["weight"].clone(), os.pipe()
    if world.is_main and (child := os.fork()) == 0:
        os.read(stepped, 1)
        same = torch.equal(before["weight"], start), torch.equal(model.weight, start)
        os._exit(10 * same[0] + same[1])
    sync.backward(model(torch.ones(2, 4)).square().mean(), weight=2, reduction="mean")
    sync.step(optimizer)
    if world.is_main:
        os.write(step, b"x")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for comm in (some, gs.group(range(world.world_size))):
        comm.all_reduce(total := torch.ones(1)).wait()
        sys.stdout.write(f"sum {total.item()}\\n")
"""


def test_a_forked_child_is_no_rank(tmp_path: Path) -> None:
    """It ends as it wants to, its error is its own, and the ranks go on."""
    script = tmp_path / "script.py"
    script.write_text(FORKS)
    first, second = (rank.ok() for rank in run_forked([script], torch_ranks(2)))
    # Its copy of the weights is as it was; the weights themselves lie in shared memory.
    assert sorted(first.stdout.splitlines()) == ["10", "[3, 1, 4, 5]"] + 2 * ["sum 2.0"]
    assert second.stdout.splitlines() == 2 * ["sum 2.0"]
    assert first.stderr.count("Traceback") == 1
    assert "ValueError: the child's own" in first.stderr
    assert second.stderr == ""


def destroy(rank: int, world_size: int, store_path: str) -> bool:
    """Destroy the session's group within its block."""
    session = open_session(rank, world_size, store_path)
    with session:
        sum_of_ranks(rank)
        dist.destroy_process_group()
        assert session.watch is not None
        beat = session.watch._doing.beat
        assert wait_until(lambda: session.watch._doing.beat > beat + 1, time.monotonic() + 10)
    return dist.is_initialized()


@pytest.mark.parametrize(("release", "said"), [("2.16.0+cpu", True), ("2.15.1", False)])
def test_a_torch_that_was_not_tested_is_said(
    release: str, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    with gs.init(threads=1):
        pass
    found = [record.getMessage() for record in caplog.records if "newer than" in record.message]
    assert len(found) == said
    assert all("torch 2.16.0+cpu is newer than 2.15" in each for each in found)


def test_a_group_that_the_program_destroys(pool: Any) -> None:
    assert pool.run(destroy, 2) == [False, False]
