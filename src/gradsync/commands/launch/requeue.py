"""Ends or requeues the Slurm job after the ranks have ended.

    python -m gradsync.commands.launch.requeue --status CODE --seconds S --history FILE
        [--run-dir DIR]

The last line of every job script. Exit code 75 in the run's `exit.json` means: stopped, checkpoint
written, start again (torchrun and mpirun change exit codes, the file does not). It then asks Slurm
to requeue the job, unless

- the last turns made no progress: stopping and starting endlessly would only cost;
- the job is no longer RUNNING: it was cancelled, and Slurm would revive even a cancelled job.

Runs without torch; returns the exit code of the job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals

from gradsync.commands.launch.request import STOPPED
from gradsync.commands.launch.slurm import ask, own_words, state_of
from gradsync.core.files import json_text, read_object, write_text
from gradsync.errors import GradsyncError
from gradsync.runtime import environ

_FRUITLESS_TURNS = 3
LONG_TURN_S = 300.0
"""If no steps are counted, a turn of this length counts as progress, seconds."""

_TOLD_TO_STOP = (128 + Signals.SIGUSR1, 128 + Signals.SIGTERM)
"""Exit statuses of ranks that a signal ended before they installed handlers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """How one turn of the job ended."""

    code: int  # exit code of the run
    steps: int | None  # optimizer steps in its checkpoint; None if unknown
    seconds: float  # duration


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Records of the job's earlier turns."""

    steps: int = 0  # optimizer steps after the last turn
    fruitless: int = 0  # turns in a row without a step


@dataclass(frozen=True, kw_only=True, slots=True)
class RequeueDecision:
    """The decision after a turn."""

    again: bool  # ask for another turn
    history: History  # for the next turn
    note: str = ""  # a line to print


def decide(turn: Turn, history: History) -> RequeueDecision:
    """Decide on another turn: no after three in a row without a step."""
    if turn.code != STOPPED:
        return RequeueDecision(again=False, history=history)
    if turn.steps is None:
        fruitful = turn.seconds >= LONG_TURN_S
        what = f"ended within {LONG_TURN_S:.0f} s"
    else:
        fruitful = turn.steps > history.steps
        what = f"brought no step beyond {history.steps}"
    after = History(
        steps=max(history.steps, turn.steps or 0),
        fruitless=0 if fruitful else history.fruitless + 1,
    )
    if after.fruitless >= _FRUITLESS_TURNS:
        note = (
            f"not requeued: {after.fruitless} turn(s) in a row {what}. Is --time too short for "
            "start-up and one step, or is the job stopped by hand? `scontrol requeue` tries again"
        )
        return RequeueDecision(again=False, history=History(steps=after.steps), note=note)
    return RequeueDecision(again=True, history=after)


def read_turn(run_dir: Path | None, status: int, seconds: float) -> Turn:
    """The turn that just ended, from the run directory if there is one, else from `status`."""
    note = {} if run_dir is None else read_object(run_dir / "exit.json")
    code = note.get("exit_code")
    if not isinstance(code, int):
        # A stop before the start counts as stopped.
        code = STOPPED if status in _TOLD_TO_STOP else status
        return Turn(code=code, steps=None if run_dir is None else 0, seconds=seconds)
    assert run_dir is not None
    steps = read_object(run_dir / "summary.json").get("steps")
    return Turn(code=code, steps=steps if isinstance(steps, int) else 0, seconds=seconds)


def main(argv: Sequence[str]) -> int:
    """See the module's docstring."""
    options = _parse(argv)
    turn = read_turn(options.run_dir, options.status, options.seconds)
    before = read_object(options.history)
    history = History(steps=before.get("steps", 0), fruitless=before.get("fruitless", 0))
    decision = decide(turn, history)
    if decision.note:
        _say(decision.note)
    if turn.code == STOPPED:
        try:
            write_text(options.history, json_text(asdict(decision.history)))
        except OSError as error:  # uncounted turns could repeat endlessly
            _say(f"not requeued: cannot write {options.history} ({error.strerror})")
            return turn.code
    if decision.again:
        _requeue(turn)
    return turn.code


def _requeue(turn: Turn) -> None:
    """Ask Slurm for another turn; print the result."""
    try:
        job = _own_job()
        state = state_of(job)
        if state != "RUNNING":
            _say(f"not requeued: job {job} is being ended from outside ({state})")
            return
        at = "" if turn.steps is None else f" after step {turn.steps}"
        _say(f"stopped{at} with a checkpoint; asking Slurm for another turn of job {job}")
        done = ask(["scontrol", "requeue", job])
    except GradsyncError as error:
        _say(f"not requeued: {error}")
        return
    if done.returncode != 0:
        _say(
            f"not requeued, Slurm says: {own_words(done.stderr)}; submit the script again, and "
            "the run goes on from its checkpoint if --out names its directory"
        )


def _own_job() -> str:
    """This job's id. SLURM_JOB_ID of an array task is the id of the whole array. Requeueing that
    would start all tasks again, so tasks use their number."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradsync.commands.launch.requeue", description=__doc__)
    parser.add_argument("--status", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path)
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(f"gradsync: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
