"""A rank that does not come: named with its line, ended in order, whatever keeps it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fork_server import Forked, run_forked, torch_ranks
from support.launchers import clean_environment, run_python

REPORT_S, TIMEOUT_S, GRACE_S = 1.0, 2.7, 0.3

RANK = f"""
import os, re, signal, sys, time
import torch, torch.distributed as dist
import gradsync as gs
from gradsync.errors import RunError
from gradsync.runtime import watch
from gradsync.runtime.watch import FailureWatch
kind, sync = sys.argv[1:]
FailureWatch.__init__.__kwdefaults__["grace_s"] = {GRACE_S}
watch._SILENT_S = 0.3

def mark(word):
    print(word, time.time(), flush=True)

def read(step, rank):
    if (rank, step) == (1, 2) and kind != "nothing":
        mark("hang")
        while kind == "spin": pass
        if kind == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if kind == "lock": re.match("(a+)+$", "a" * 60 + "b")
        if kind == "late": time.sleep(3.5)
        if kind == "barrier": dist.barrier()
    return torch.ones(2, 4)

try:
    timeout_s = 30 if kind == "late" else {TIMEOUT_S}
    wait = {REPORT_S}
    with gs.init(timeout_s=timeout_s, report_wait_s=wait, stacks_dir="stacks", threads=1) as world:
        model = torch.nn.Linear(4, 4)
        if sync == "torch":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            handle = gs.replicate(model, world, strategy=sync)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(read(step, world.rank)).sum()
            if sync == "torch":
                loss.backward()
                optimizer.step()
            else:
                handle.backward(loss, weight=2)
                handle.step(optimizer)
        if kind == "late": time.sleep(0.5)
except RunError as error:
    mark("error")
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
WAITS = {"torch": r"rank\.py:\d+ <module> \(Tensor\.backward\)"}
STEP = r"rank\.py:\d+ <module> \(GradientSync\.step\)"


@pytest.fixture(autouse=True)
def _script(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)


def line_of(kind: str) -> int:
    """Number of the script's line in which such a rank hangs."""
    lines = enumerate(RANK.splitlines(), 1)
    return next(number for number, line in lines if f'kind == "{kind}":' in line)


@contextlib.contextmanager
def ranks(folder: Path, kind: str, sync: str = "invariant") -> Iterator[list[Forked]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Forked([folder / "rank.py", kind, sync], clean_environment(each), cwd=folder)
            )
            for each in torch_ranks(2)
        ]


def stacks(folder: Path, *ranks: int) -> list[str]:
    """Text of each of these ranks' stack files; no other rank may have one."""
    texts = {path.name: path for path in (folder / "stacks").glob("*.txt")}
    assert sorted(texts) == [f"rank-{rank}.txt" for rank in ranks]
    assert {path.stat().st_mode & 0o777 for path in texts.values()} == {0o600}
    return [texts[f"rank-{rank}.txt"].read_text() for rank in ranks]


def seconds(run: Forked, word: str) -> float:
    """When the rank printed that mark."""
    found = re.search(rf"^{word} ([\d.]+)$", run.finished().stdout, re.MULTILINE)
    assert found is not None, run.finished().describe()
    return float(found[1])


def said(run: Forked, pattern: str, timeout_s: float = 20.0) -> str:
    """The line of standard error that matches, once it is there."""
    until = time.monotonic() + timeout_s
    while not (found := re.search(rf"^.*{pattern}.*$", run.finished().stderr, re.MULTILINE)):
        assert time.monotonic() < until, run.finished().describe()
        time.sleep(0.05)
    return found[0]


@pytest.mark.parametrize("sync", ["invariant", "torch"])
def test_a_rank_that_computes_for_ever(tmp_path: Path, sync: str) -> None:
    """Through shared memory, and through Gloo in a backward that waits in C++."""
    with ranks(tmp_path, "spin", sync) as (first, second):
        assert (first.wait(30), second.wait(30)) == (124, 124)
        line = line_of("spin")
        where = rf"rank 1 \(process {second.pid}\) is in rank\.py:{line} read"
        waits = WAITS.get(sync, STEP)
        assert re.search(
            rf"^gradsync: waiting for rank 1 for 2 s: {where}; rank 0 waits in {waits}$",
            said(first, "waiting for"),
        )
        reason = rf"rank 0 waited as long as it may \(timeout_s\) in {waits}; {where}"
        assert re.match(reason, said(first, "as long as"))
        assert re.search(f"error: .rank 1. rank 0 on .* failed first: {reason}", said(second, "er"))
        own = second.finished().stderr.partition("--- rank 1 was here ---")[2]
        assert f'rank.py", line {line}, in read' in own
        assert seconds(first, "error") - seconds(second, "hang") < TIMEOUT_S + 5
        assert f"; stacks of the ranks are in {tmp_path}/stacks" in said(first, "as long as")
        assert f"stacks of the ranks are in {tmp_path}/stacks" in second.finished().stderr
    waited, culprits = stacks(tmp_path, 0, 1)
    assert culprits.startswith("rank 1, process ")
    assert '--- thread MainThread\n  File "' in culprits
    assert f'{tmp_path}/rank.py", line {line}, in read\n    while kind == "spin": pass' in culprits
    assert "--- what ended its wait\nTraceback (most recent call last)" in waited
    assert 'rank.py", line' in waited
    for rank in range(2):
        flight = json.loads((tmp_path / f"stacks/rank-{rank}.flight.json").read_text())
        assert flight["entries"]


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with ranks(tmp_path, "stop") as (first, second):
        assert first.wait(30) == 124
        line = said(first, "waiting for")
        assert f"rank 1 (process {second.pid}) gives no sign of life (it is stopped, by" in line
        assert "(it is stopped, by a signal or a debugger); this rank" in said(first, "saw")
        assert second.wait(0) is None


def test_a_rank_that_holds_pythons_lock_is_named_with_its_last_place(tmp_path: Path) -> None:
    with ranks(tmp_path, "lock") as (first, _):
        told = said(first, "no sign of life")
        assert "(something holds Python's lock, or the machine swaps), last seen in ran" in told
        assert first.wait(30) == 124


@pytest.mark.parametrize("sync", ["invariant", "naive"])
def test_a_rank_that_is_killed_is_named_within_three_seconds(tmp_path: Path, sync: str) -> None:
    with ranks(tmp_path, "kill", sync) as (first, second):
        assert first.wait(30) == 1
        assert "rank(s) 1 vanished without a word" in said(first, "vanished")
        assert seconds(first, "error") - seconds(second, "hang") < 3 + 2  # the machine is shared
    (own,) = stacks(tmp_path, 0)
    assert "rank.py" in own


def test_a_rank_that_is_late_is_an_error_for_nobody(tmp_path: Path) -> None:
    with ranks(tmp_path, "late") as (first, second):
        assert (first.wait(30), second.wait(30)) == (0, 0)
        assert first.finished().stderr.count("waiting for") == 1
        assert re.search(r"rank 1 went on, after at least \d s", said(first, "went on"))
        assert second.finished().stderr == ""
    assert not (tmp_path / "stacks").exists()


def test_ranks_in_different_calls(tmp_path: Path) -> None:
    with ranks(tmp_path, "barrier") as (first, second):
        codes = {first.wait(30), second.wait(30)}
        assert codes == {124}, first.finished().describe() + second.finished().describe()
        line = line_of("barrier")
        places = (
            rf"in different calls: rank 0 in {STEP}; "
            rf"rank 1 in rank\.py:{line} read \(barrier\)"
        )
        assert re.search(rf"all ranks have waited for 2 s, {places}$", said(first, "all ranks h"))
        assert re.search(rf"all ranks wait, {places}", said(first, "as long as"))


# -- the exit code of a program -------------------------------------------------------------------

PROGRAM = """
import sys
from gradsync.errors import LatePeerError, PeerError
from gradsync.runtime.signals import end_program_as_said
sys.excepthook = lambda *_: print("shown")
put_back = end_program_as_said(leave_out_interrupts=True)
{program}
"""
LATE = "raise LatePeerError('rank 1')"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (LATE, 124),
        ("raise PeerError('rank 1', exit_code=124)", 124),
        ("raise PeerError('rank 1')", 1),
        (f"put_back()\n{LATE}", 1),
        (f"try:\n    {LATE}\nexcept LatePeerError as e:\n    raise ValueError from e", 1),
    ],
)
def test_a_program_that_a_late_rank_ends(program: str, code: int) -> None:
    text = PROGRAM.format(program=program)
    assert tuple(run_python(["-c", text]))[:2] == (code, "shown\n")


ALIKE = """
import torch, torch.distributed as dist
import gradsync as gs
with gs.init(threads=1) as world:
    if world.rank:
        raise KeyError("alike")
    dist.all_reduce(torch.ones(1))
"""


def test_an_error_of_many_ranks_has_one_traceback(tmp_path: Path) -> None:
    (script := tmp_path / "alike.py").write_text(ALIKE)
    words = ["-m", "gradsync", "launch", "--nproc-per-node=3", "--", script]
    (done,) = run_forked(words, [{"TMPDIR": str(tmp_path)}])
    assert done.returncode == 1, done.describe()
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.describe()
    assert re.search(
        r"^\[rank[12]\]:   File .*alike\.py\", line 6, in <module>", done.stderr, re.MULTILINE
    )
    assert re.search(
        r"^gradsync: error: \[rank 0\] rank [12] on \S+ failed first: KeyError: 'alike'$",
        done.stderr,
        re.MULTILINE,
    )


STUCK = """
import os, signal, sys, time
from gradsync.runtime import session
from gradsync.commands.train.loop import Trainer
real, hung = Trainer._train_step, sys.argv.pop(1)

def step(self, *arguments):
    if self.interval.steps == 2 and os.environ["RANK"] == "1":
        open(hung, "w").close()
        while True:
            time.sleep(0.01)
    return real(self, *arguments)

Trainer._train_step = step
session.SessionOptions.__init__.__kwdefaults__["report_wait_s"] = 1.0
from gradsync.commands.cli.main import main
sys.exit(main())
"""


def test_a_stop_does_not_wait_for_a_rank_that_is_stuck(tmp_path: Path) -> None:
    """It would never come to the end of its step, where ranks agree to stop."""
    script, hung = tmp_path / "stuck.py", tmp_path / "hung"
    script.write_text(STUCK)
    arguments = [hung, "train", "tiny", "--steps", "9", "--out", tmp_path / "run", "--log-every=5"]
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(Forked([script, *arguments], clean_environment(each)))
            for each in torch_ranks(2)
        )
        until = time.monotonic() + 40
        while not hung.exists():
            assert time.monotonic() < until, first.finished().describe()
            time.sleep(0.02)
        for rank in (first, second):
            rank.send_signal(signal.SIGTERM)
        assert first.wait(20) == 124
        assert second.wait(20) == 124
        where = f"rank 1 (process {second.pid}) is in {script}:11 step"
        assert re.search(
            rf"SIGTERM asked for a stop \d s ago, but {re.escape(where)}; ended without another",
            said(first, "asked for a stop"),
        )
        assert f"without another checkpoint; stacks of the ranks are in {tmp_path}/run/stacks" in (
            said(first, "asked for a stop")
        )
    assert f'{script}", line 11, in step' in (tmp_path / "run/stacks/rank-1.txt").read_text()
