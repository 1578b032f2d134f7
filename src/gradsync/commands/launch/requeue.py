"""Ends or requeues the Slurm job after the ranks have ended.

    python -m gradsync.commands.launch.requeue --status CODE --seconds S --history FILE
        [--run-dir DIR]

The last line of every job script. Exit code 75 in the run's `exit.json` means: stopped, checkpoint
written, start again (torchrun and mpirun change exit codes, the file does not). It then asks Slurm
to requeue the job; so it does after ranks vanished, and leaves their hosts out. Not if

- the last turns made no progress: stopping and starting endlessly would only cost;
- the job is no longer RUNNING: it was cancelled, and Slurm would revive even a cancelled job.

Runs without torch; returns the exit code of the job.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIG_IGN, Signals, signal

from gradsync.core.files import json_text, read_object, write_text
from gradsync.errors import GradsyncError, LaunchError, RunError
from gradsync.runtime import environ

STOPPED = 75
"""Stopped after a signal with the checkpoint written; start the command again."""

_TOLD_TO_STOP = (128 + Signals.SIGUSR1, 128 + Signals.SIGTERM)
"""Exit statuses of ranks that a signal ended before they installed handlers."""

_FRUITLESS_TURNS = 3
_LEFT_OUT_TURNS = 3  # a host may be repaired, and a job without hosts never starts
_LONG_TURN_S = 300.0  # if no steps are counted, a turn of this length counts as progress
_TIMEOUT_S = 60


def ask(*argv: str) -> str:
    """Run one of Slurm's commands; what it printed.

    Raises:
        LaunchError: this machine has no Slurm.
        RunError: Slurm refused (with its message), or does not answer.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {argv[0]} on this machine: submit on a login node of the cluster; "
            "--dry-run shows the script anywhere, and gradsync launch needs no Slurm"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{argv[0]} did not answer within {_TIMEOUT_S} s; is Slurm up?") from None
    if done.returncode != 0:
        words = "; ".join(done.stderr.strip().splitlines())
        raise RunError(f"Slurm refused {argv[0]}: {words}")
    return done.stdout


def read_turn(run_dir: Path | None, status: int) -> tuple[int, int | None]:
    """Exit code and optimizer steps of the turn that just ended, from the run directory if there is
    one, else from `status`; None for unknown steps."""
    code = None if run_dir is None else read_object(run_dir / "exit.json").get("exit_code")
    if run_dir is None or not isinstance(code, int):
        # A stop before the start counts as stopped.
        code = STOPPED if status in _TOLD_TO_STOP else status
        return code, None if run_dir is None else 0
    steps = read_object(run_dir / "summary.json").get("steps")
    return code, steps if isinstance(steps, int) else 0


def main(argv: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="gradsync.commands.launch.requeue", description=__doc__)
    parser.add_argument("--status", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args(argv)
    code, steps = read_turn(options.run_dir, options.status)
    ended = {} if options.run_dir is None else read_object(options.run_dir / "exit.json")
    # Slurm's names have no domain.
    lost = [host.partition(".")[0] for host in str(ended.get("lost_hosts", "")).split(",") if host]
    if code == STOPPED or lost:
        try:
            # A turn that lost ranks has not written its steps.
            said = _requeue(options.history, None if lost else steps, options.seconds, lost)
        except OSError as error:  # uncounted turns could repeat endlessly
            said = f"not requeued: cannot write {options.history} ({error.strerror})"
        except GradsyncError as error:
            said = (
                f"not requeued: {error}; submit the script again, and the run goes on from its "
                "checkpoint if --out names its directory"
            )
        if said:
            print(f"gradsync: {said}", file=sys.stderr, flush=True)
    return code


def _requeue(history: Path, steps: int | None, seconds: float, lost: list[str]) -> str:
    """Count the turn and ask Slurm for another one without the `lost` hosts; returns why it was not
    asked, or "".

    `history` holds the steps after the last turn, how many turns in a row brought none, the hosts
    that each of the last turns lost, and those that the user left out.
    """
    before = read_object(history)
    # SLURM_JOB_ID of an array task is the id of the whole array. Requeueing that would start all
    # tasks again, so tasks use their number.
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
    shown = ask("scontrol", "--oneliner", "show", "job", job)
    own = re.findall(r"\sExcNodeList=([^\s(]+)", shown)  # "(null)" for none
    left_out = before.get("left_out", own)
    turns = [lost, *before.get("lost", [])]
    changes, turns = any(turns), turns[:_LEFT_OUT_TURNS]
    reached = before.get("steps", 0)
    if steps is None:
        fruitful, what = seconds >= _LONG_TURN_S, f"ended within {_LONG_TURN_S:.0f} s"
    else:
        fruitful, what = steps > reached, f"brought no step beyond {reached}"
    fruitless = 0 if fruitful else before.get("fruitless", 0) + 1
    given_up = fruitless >= _FRUITLESS_TURNS
    # Requeued by hand, the job has its turns again.
    after = {"steps": max(reached, steps or 0), "fruitless": 0 if given_up else fruitless}
    after |= {"lost": turns, "left_out": left_out} if any(turns) else {}
    write_text(history, json_text(after))
    if given_up:
        return (
            f"not requeued: {fruitless} turn(s) in a row {what}. Is --time too short for start-up "
            "and one step, or is the job stopped by hand? `scontrol requeue` tries again"
        )
    found = re.search(r"\sJobState=(\S+)", shown)
    state = found[1] if found else "gone"
    if state != "RUNNING":
        return f"not requeued: job {job} is being ended from outside ({state})"
    at = "" if steps is None else f" after step {steps}"
    what = f"lost {', '.join(lost)}, to be left out" if lost else f"stopped{at} with a checkpoint"
    line = f"gradsync: {what}; asking Slurm for another turn of job {job}"
    print(line, file=sys.stderr, flush=True)  # Slurm may end this process at once
    if changes:  # then it must not: Slurm excludes hosts of pending jobs only
        signal(Signals.SIGTERM, SIG_IGN)
    ask("scontrol", "requeue", job)
    if changes:
        hosts = ",".join([*left_out, *(host for turn in turns for host in turn)])
        try:
            ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={hosts}")
        except RunError as error:
            return f"requeued, but with the lost host(s): {error}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
