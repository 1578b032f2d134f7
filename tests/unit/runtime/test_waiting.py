"""Lines about ranks that a rank waits for: from the ranks' activities and the time to a line."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gradsync.runtime import waiting
from gradsync.runtime.activity import Activity
from gradsync.runtime.peers import RUNS, Peers
from gradsync.runtime.store import LEFT, Presence
from gradsync.runtime.waiting import WaitReport, names, waiting_ranks

STEP, READ, BARRIER = "train.py:40 loop (step)", "data.py:7 read", "train.py:50 eval (barrier)"
BUSY = Activity(beat=0, where=READ)


class Notes:
    """Records of what ranks have noticed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)


class Run:
    """A run as rank `rank` sees it, second by second; the ranks in `silent` give no heartbeat."""

    def __init__(self, size: int = 3, rank: int = 0, host: str = "") -> None:
        self.notes, self.now, self.size, self.rank = Notes(), 0, size, rank
        there = Presence(host or socket.gethostname(), "", 4711)
        processes = {other: there for other in range(size) if other != rank}
        peers = Peers(self.notes, rank=rank, world_size=size, processes=processes)
        self.report = WaitReport(peers, report_s=10.0)
        self.silent: set[int] = set()

    def wait(
        self, until_s: int, late: Mapping[int, Activity], where: str = STEP, *, from_s: int = 0
    ) -> list[str]:
        """Wait for so long for the `late` ranks, with all others; what was said meanwhile. With
        `from_s` it is the wait of before that goes on."""
        own, said = Activity(beat=0, waits=True, where=where), []
        for second in range(from_s, until_s + 1):
            self.now += 1
            found = {
                rank: replace(late.get(rank, own), beat=0 if rank in self.silent else self.now)
                for rank in range(self.size)
            }
            mine = replace(own, since_s=float(second))
            said.append(self.report.news(mine, self.now, lambda found=found: found))
        return list(filter(None, said))

    def compute(self) -> str:
        """Let this rank go on."""
        return self.report.news(Activity(beat=0, where="train.py:1 loop"), self.now, dict)


def test_the_late_rank_is_named_once_it_is_long_and_when_it_goes_on() -> None:
    run = Run()
    assert run.wait(9, {1: BUSY}, BARRIER) == []
    assert run.compute() == ""
    assert run.wait(29, {1: BUSY}) == [
        f"waiting for rank 1 for 10 s: rank 1 (process 4711) is in {READ}; "
        f"ranks 0 and 2 wait in {STEP}"
    ]
    assert run.compute() == "rank 1 went on, after at least 10 s"
    assert run.compute() == ""


def test_it_is_said_again_ever_more_rarely() -> None:
    said = Run().wait(300, {1: BUSY})
    assert [line.split(":")[0] for line in said] == [
        f"waiting for rank 1 for {seconds} s" for seconds in (10, 30, 90, 270)
    ]


def test_only_the_lowest_rank_that_waits_speaks() -> None:
    assert Run(rank=2).wait(40, {1: BUSY}) == []
    assert len(Run(rank=1).wait(10, {0: BUSY})) == 1


def test_a_wait_is_told_again_only_after_three_times_what_ended_well_there() -> None:
    """A slow network, or an evaluation by one rank."""
    run = Run()
    said = []
    for _ in range(5):
        said += run.wait(15, {}, BARRIER)
        run.compute()
    assert len(said) == 1
    assert run.wait(44, {1: BUSY}, BARRIER) == []
    run = Run()
    run.wait(15, {}, BARRIER)
    assert len(run.wait(46, {1: BUSY}, BARRIER)) == 2  # it went on, it waits again
    run.compute()
    assert len(run.wait(11, {1: BUSY}, STEP)) == 1  # elsewhere nothing has changed


def test_a_rank_that_gets_no_processor_is_late_and_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    monkeypatch.setattr(waiting, "processor_s", lambda pid: (0.05 * run.now, 0.6 * run.now))
    monkeypatch.setattr(waiting, "process_state", lambda pid: RUNS)
    run.silent = {1}
    assert run.wait(9, {1: BUSY}) == []
    assert run.wait(10, {1: BUSY}, from_s=10) == [
        f"waiting for rank 1 for 10 s: rank 1 (process 4711) is in {READ}; "
        f"ranks 0 and 2 wait in {STEP}"
    ]
    for ran, queued in ((0.05, 0.4), (0.2, 0.7)):  # the second one holds Python's lock
        run = Run()
        run.silent = {1}
        used = (ran, queued)
        monkeypatch.setattr(
            waiting, "processor_s", lambda pid, used=used, run=run: [run.now * s for s in used]
        )
        assert "gives no sign of life" in run.wait(3, {1: BUSY})[0]


def test_a_rank_without_a_heartbeat_is_named_within_three_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "process_state", lambda pid: RUNS)
    run = Run()
    run.silent = {1}
    assert run.wait(9, {1: BUSY}) == [
        "waiting for rank 1 for 3 s: rank 1 (process 4711) gives no sign of life "
        f"({RUNS}), last seen in {READ}; ranks 0 and 2 wait in {STEP}"
    ]


def test_a_rank_of_another_host_is_named_with_it() -> None:
    run = Run(host="node-b")
    run.silent = {2}
    (line,) = run.wait(9, {2: BUSY})
    assert f"rank 2 (process 4711 on node-b) gives no sign of life, last seen in {READ};" in line


@pytest.mark.parametrize("word", [b"", LEFT])
def test_a_rank_that_has_noticed_a_failure_or_leaves_is_not_called_silent(word: bytes) -> None:
    run = Run()
    run.silent = {1}
    run.notes.values["noticed/1"] = word
    assert run.wait(40, {1: BUSY}) == []


def test_ranks_that_all_wait_are_told_apart() -> None:
    assert Run().wait(10, {}) == [
        f"all ranks have waited for 10 s, in {STEP}: the network is slow, or stands"
    ]
    assert Run().wait(10, {1: Activity(beat=0, waits=True, where=BARRIER)}) == [
        f"all ranks have waited for 10 s, in different calls: ranks 0 and 2 in {STEP}; "
        f"rank 1 in {BARRIER}"
    ]


def test_what_no_stack_shows_is_known_by_an_idle_rank_that_is_ahead() -> None:
    found = {
        0: Activity(beat=1, idle=True, issued=7),
        1: Activity(beat=1, idle=True, issued=6),  # blocked in something else
        2: Activity(beat=1, idle=False, issued=7),  # computes
    }
    assert waiting_ranks(found) == [0]
    assert waiting_ranks(found, silent=[0]) == []
    assert waiting_ranks({1: found[1]}) == []


def test_a_wait_that_was_declared_is_not_reported() -> None:
    run = Run()
    assert run.wait(100, {1: replace(BUSY, excused=True)}) == []
    run.compute()
    assert run.wait(12, {1: BUSY}) != [], "it made no long wait usual here"
    assert Run().wait(100, {1: replace(BUSY, excused=True), 2: BUSY}) != []


def test_what_follows_a_declared_wait_counts_by_itself() -> None:
    """Else a rank that saved for 30 s would be blamed at once for the moment after it."""
    saves = {1: replace(BUSY, excused=True)}
    run = Run()
    assert run.wait(30, saves) == []
    assert run.wait(33, {1: BUSY}, from_s=31) == []
    assert run.report.stuck == {}
    run.compute()
    assert run.wait(12, {1: BUSY}) != [], "it made no long wait usual here"
    run = Run()
    run.wait(30, saves)
    (line,) = run.wait(45, {1: BUSY}, from_s=31)
    assert line.startswith("waiting for rank 1 for 10 s: ")
    assert list(run.report.stuck) == [1]


def test_only_a_rank_that_is_late_and_does_not_save_is_stuck() -> None:
    run = Run()
    run.wait(9, {1: BUSY}, BARRIER)
    assert run.report.stuck == {}
    run.compute()
    run.wait(10, {1: BUSY, 2: replace(BUSY, excused=True)})
    assert list(run.report.stuck) == [1]
    run.compute()
    assert run.report.stuck == {}


def test_ranks_in_different_calls_wait_for_each_other() -> None:
    """After a stop was asked for, nothing else would end them. One that is ahead may be in the
    right place, and so may ranks that save."""
    elsewhere = Activity(beat=0, waits=True, where=BARRIER)
    for each, stuck in ((elsewhere, [1, 2]), (replace(elsewhere, issued=1), [])):
        run = Run()
        run.wait(9, {1: each})
        assert run.report.stuck == {}
        run.wait(10, {1: each}, from_s=10)
        assert list(run.report.stuck) == stuck
    run.wait(20, {1: replace(elsewhere, excused=True)}, from_s=11)
    assert run.report.stuck == {}


def test_many_names() -> None:
    assert names([3]) == "rank 3"
    assert names([0, 2, 3]) == "ranks 0, 2 and 3"
    assert names(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert names(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    run = Run(size=20)
    (line,) = run.wait(10, dict.fromkeys(range(4, 20), BUSY))
    assert line.count("process 4711") == 8
    assert "; and 8 more; ranks 0, 1, 2 and 3 wait in" in line
