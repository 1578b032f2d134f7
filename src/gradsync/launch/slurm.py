"""Slurm's commands and their answers; following a job; the jobs submitted from here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from gradsync.core.files import parse_json
from gradsync.errors import LaunchError, RunError
from gradsync.runtime import environ

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States that a job does not leave by itself."""

_TIMEOUT_S = 60
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_JOB_ID = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """One job in Slurm's view."""

    job: str  # its id
    name: str  # its name
    state: str  # PENDING, RUNNING, COMPLETING, COMPLETED, FAILED …
    reason: str = ""  # why it waits; "" if it does not
    nodes: str = ""  # nodes it runs or ran on
    elapsed: str = ""  # duration of this turn
    restarts: int = 0  # how often it was requeued
    exit_code: int = 0
    """Its exit code, 128 + signal if one ended it; valid only after its end."""

    @property
    def ended(self) -> bool:
        """True if it does not continue by itself."""
        return self.state in ENDED

    def describe(self) -> str:
        """`RUNNING on n[1-2], turn 2`."""
        text = self.state
        if self.nodes:
            text += f" on {self.nodes}"
        if self.reason:
            text += f" ({self.reason})"
        if self.restarts:
            text += f", turn {self.restarts + 1}"
        return f"{text}, exit code {self.exit_code}" if self.ended else text


def check_job_id(text: str) -> str:
    """`text` if it is a valid job id."""
    if _JOB_ID.fullmatch(text) is None:
        raise LaunchError(f"{text[:80]!r} is no job id; it looks like 1234")
    return text


def ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and wait for it."""
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {argv[0]} on this machine: submit on a login node of the cluster; "
            "--dry-run shows the script anywhere, and gradsync launch needs no Slurm"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{argv[0]} did not answer within {_TIMEOUT_S} s; is Slurm up?") from None


def submit(script: str) -> str:
    """Submit the job script at path `script`; returns the job's id."""
    done = ask(["sbatch", "--parsable", script])
    if done.returncode != 0:
        raise RunError(f"sbatch refused the job: {own_words(done.stderr)}")
    return check_job_id(done.stdout.partition(";")[0].strip())


def own_words(text: str) -> str:
    """Error message of a Slurm command, on one line and without its `sbatch: error:`."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in text.splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


def states_of(job: str) -> list[JobState]:
    """The job, from `scontrol`, else from `sacct`; [] if unknown."""
    shown = ask(["scontrol", "--oneliner", "show", "job", job])
    if shown.returncode == 0:
        return [parse_shown(line) for line in shown.stdout.splitlines() if line.strip()]
    sacct = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
    try:
        accounts = ask([*sacct, "--format=JobID,JobName,State,ExitCode,Elapsed,NodeList"])
    except LaunchError:
        accounts = None
    if accounts is not None and accounts.returncode == 0:
        return [parse_accounted(line) for line in accounts.stdout.splitlines() if line.strip()]
    if "Invalid job id" in shown.stderr:  # the job is long over, and there is no accounting
        return []
    raise RunError(f"Slurm does not tell about job {job}: {own_words(shown.stderr)}")


def parse_shown(line: str) -> JobState:
    """One line of `scontrol --oneliner show job`."""

    def value(name: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S*)", line)
        return "" if found is None or found[1] in ("(null)", "None", "N/A") else found[1]

    state = value("JobState")
    return JobState(
        job=value("JobId"),
        name=value("JobName"),
        state=state,
        reason=value("Reason") if state == "PENDING" else "",
        nodes=value("NodeList"),
        elapsed=value("RunTime"),
        restarts=int(value("Restarts") or 0),
        exit_code=_code(value("ExitCode"), state),
    )


def parse_accounted(line: str) -> JobState:
    """One line of `sacct --parsable2 --format=JobID,JobName,State,ExitCode,Elapsed,NodeList`."""
    job, name, state, code, elapsed, nodes = [*line.split("|"), *[""] * 6][:6]
    word = state.partition(" ")[0]  # "CANCELLED by 1000"
    nodes = "" if nodes == "None assigned" else nodes
    return JobState(
        job=job, name=name, state=word, nodes=nodes, elapsed=elapsed, exit_code=_code(code, word)
    )


def _code(text: str, state: str) -> int:
    """From Slurm's `CODE:SIGNAL`; 1 if a job failed without either."""
    code, _, signal = text.partition(":")
    number = int(code or 0) or (128 + int(signal) if int(signal or 0) else 0)
    return number or int(state in ENDED and state != "COMPLETED")


# -- following a job ------------------------------------------------------------------------------


def follow(
    job: str,
    log: Path,
    *,
    out: TextIO,
    err: TextIO | None = None,
    states: Callable[[str], list[JobState]] = states_of,
    pause: Callable[[float], None] = time.sleep,
) -> list[JobState]:
    """Follow a job until it has ended for good.

    Prints changes of state to `err` and new log text to `out`; returns the last states. Asks Slurm
    every half second at first; while nothing changes, the interval grows up to ten seconds.
    """
    err = err or sys.stderr
    told: dict[str, str] = {}
    offset, pause_s = 0, _FIRST_PAUSE_S
    while True:
        now = states(job)
        if not now:
            raise RunError(f"Slurm has forgotten job {job}; the log may tell how it ended")
        changed = False
        before = offset
        offset = copy_new(log, offset, out)
        for each in now:
            text = each.describe()
            if told.get(each.job) != text:
                told[each.job], changed = text, True
                print(f"gradsync: job {each.job} {text}", file=err, flush=True)
        if all(each.ended for each in now):
            copy_new(log, offset, out)
            return now
        quiet = not changed and offset == before
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S) if quiet else _FIRST_PAUSE_S
        pause(pause_s)


def copy_new(log: Path, offset: int, out: TextIO) -> int:
    """Copy the bytes of the file `log` after `offset` to `out`; returns the new offset."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            new = file.read()
    except OSError:  # the file does not exist yet
        return offset
    if new:
        out.write(new.decode("utf-8", errors="replace"))
        out.flush()
    return offset + len(new)


# -- jobs submitted from here ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A submitted job."""

    job: str  # slurm's id
    name: str  # its name
    script: str  # absolute path of the script
    log: str  # absolute path of the log
    run_dir: str  # run directory; "" for none
    when: str  # local time, ISO 8601


def jobs_file() -> Path:
    """`jobs.jsonl` in the cache."""
    return environ.cache_dir() / "jobs.jsonl"


def remember(job: Submitted) -> None:
    """Append a job."""
    path = jobs_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(job)) + "\n")


def remembered() -> list[Submitted]:
    """All jobs, the latest last; skips invalid lines."""
    names = {field.name for field in fields(Submitted)}
    found = []
    try:
        lines = jobs_file().read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            values = parse_json(line.encode())
        except ValueError:  # truncated by a full disk
            continue
        if isinstance(values, dict) and values.keys() == names:
            found.append(Submitted(**values))
    return found
