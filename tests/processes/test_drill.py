"""Faults planted in real ranks: who is named, and that nothing is lost; a seeded choice of them."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from gradsync.commands.train.faults import FAULTS, FaultPlan, named
from support import more_faults
from support.fork_server import WITH_RANKS, Forked, run_forked, torch_ranks
from support.launchers import clean_environment
from support.small_run import summary_of

TINY = (
    *("tiny", "--steps=6", "--dtype=fp32", "--device=cpu"),
    *("--eval.every=0", "--checkpoint.every=2"),
    *("--model.n-layer=1", "--model.n-embd=48", "--model.block-size=16", "--eval.max-tokens=64"),
    *("--tokens-per-update=128", "--micro-batch-size=1", "--sample-tokens=0"),
)
QUICK = ("kill", "nan", "skip-collective", "drop-leaf", "flip-bit", "disk-full")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert [code for code, _ in train(folder, None)] == [0, 0]
    return summary_of(folder / "run")["weights_sha256"]


def train(folder: Path, plan: FaultPlan | None, *flags: str) -> list[tuple[int | None, str]]:
    """Exit code and standard error of two ranks."""
    work = {"flags": [*TINY, *flags, f"--out={folder}/run"], "fault": plan and asdict(plan)}
    (folder / "work.json").write_text(json.dumps(work))
    command = ["-m", "support.more_faults", "drill", "--worker", folder / "work.json"]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Forked(command, clean_environment(variables)))
            for variables in torch_ranks(2)
        ]
        return [(rank.wait(40), rank.finished().stderr) for rank in ranks]


@pytest.mark.parametrize("kind", QUICK)
def test_the_rank_is_named_and_no_bit_is_lost(tmp_path: Path, undisturbed: str, kind: str) -> None:
    random = Random(kind)
    phase = random.choice(FAULTS[kind].phases)
    rank = 0 if phase == "save" else random.randrange(2)
    plan = FaultPlan(kind=kind, rank=rank, step=random.randint(2, 4), phase=phase)
    flags = more_faults.FLAGS.get(kind, ())
    ends = train(tmp_path, plan, *flags)
    lines = "".join(stderr for _, stderr in ends).splitlines()
    said = [ranks for line in lines if (ranks := named(FAULTS[kind], line)) is not None]
    either = {0, 1} if kind == "flip-bit" else {rank}  # no majority
    assert either in said, lines
    code = -9 if kind == "kill" else FAULTS[kind].code
    assert ends[rank][0] == code, lines
    assert ends[1 - rank][0] in (1, FAULTS[kind].code), lines
    assert [code for code, _ in train(tmp_path, None, *flags)] == [0, 0]
    assert summary_of(tmp_path / "run")["weights_sha256"] == undisturbed


@pytest.mark.parametrize(("rank", "phase"), [(0, "reduce"), (1, "backward")])
def test_a_run_that_goes_on_without_a_rank(undisturbed: str, rank: int, phase: str) -> None:
    words = ["drill", "--fault=kill", f"--rank={rank}", "--step=3", f"--phase={phase}", "--json"]
    words += [f"--expect={undisturbed}", "--", *TINY, "--nproc-per-node=3", "--on-loss=shrink"]
    done = run_forked(["-m", "gradsync", *words], [WITH_RANKS], timeout_s=100)[0].ok()
    verdict = json.loads(done.stdout)
    assert (verdict["exit_code"], verdict["left"], verdict["broken"]) == (0, [], [])
    assert verdict["went_on_from"] is None
    assert "2 rank(s) repeat it" in done.stderr


def test_a_rank_that_was_started_again_joins() -> None:
    """Rank 0, which writes the run's files; with an evaluation every few steps."""
    words = ["drill", "--fault=kill", "--rank=0", "--step=3", "--json", "--", *TINY, "--steps=60"]
    words += ["--nproc-per-node=3", "--on-loss=shrink", "--rejoin=1", "--eval.every=7"]
    done = run_forked(["-m", "gradsync", *words], [WITH_RANKS], timeout_s=100)[0].ok()
    verdict = json.loads(done.stdout)
    assert (verdict["exit_code"], verdict["left"], verdict["broken"]) == (0, [], [])
    assert "rank(s) 0 join; 3 rank(s) go on" in done.stderr


def test_a_loss_is_written_down(tmp_path: Path) -> None:
    """By the rank that takes the place of rank 0."""
    flags = [*TINY, "--on-loss=shrink", f"--out={tmp_path}/run"]
    work = {"flags": flags, "fault": asdict(FaultPlan(kind="kill", rank=0, step=3, phase="reduce"))}
    (tmp_path / "work.json").write_text(json.dumps(work))
    words = ["launch", "--nproc-per-node", 2, "--on-loss", "shrink", "--", "-m", "gradsync"]
    worker = ["drill", "--worker", tmp_path / "work.json"]
    run_forked(["-m", "gradsync", *words, *worker], [WITH_RANKS])[0].ok()
    (line,) = (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert (told["kind"], told["rank"], told["host"]) == ("lost", [0], [socket.gethostname()])
    assert told["step"] == 3
    assert 0 < told["seconds"] < 30


@pytest.mark.parametrize(("rank", "launched"), [(1, True), (0, True), (0, False)])
def test_a_lost_host_is_written_down(rank: int, launched: bool, tmp_path: Path) -> None:
    """For the job script, which has the next turn without it; even if nobody was launched by us, so
    that rank 0 takes the store with it."""
    flags = [*TINY, f"--out={tmp_path}/run"]
    fault = FaultPlan(kind="kill", rank=rank, step=3, phase="reduce")
    (tmp_path / "work.json").write_text(json.dumps({"flags": flags, "fault": asdict(fault)}))
    words = ["launch", "--nproc-per-node", 3, "--", "-m", "gradsync"] if launched else []
    worker = ["drill", "--worker", tmp_path / "work.json"]
    ranks = [WITH_RANKS] if launched else torch_ranks(3)
    done = run_forked(["-m", "gradsync", *words, *worker], ranks)
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (done[-1].returncode, ended["exit_code"]) == (1, 1)
    assert ended["lost_hosts"] == socket.gethostname()
    assert len((tmp_path / "run" / "incidents.jsonl").read_text().splitlines()) == 1


def test_the_command(undisturbed: str) -> None:
    """A whole drill: its own ranks, a signal to one of them, and the way on."""
    words = ["drill", "--fault=sigterm", "--step=3", "--json", f"--expect={undisturbed}", "--"]
    command = ["-m", "gradsync", *words, *TINY]
    done = run_forked(command, [WITH_RANKS], timeout_s=100)[0].ok()
    verdict = json.loads(done.stdout)
    assert (verdict["exit_code"], verdict["left"], verdict["broken"]) == (75, [], [])
    assert (verdict["went_on_from"], verdict["steps_lost"]) == (3, 0)
    assert "s  step 3/6  loss" in done.stderr
