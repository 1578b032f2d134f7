"""`gradsync drill`: break one rank of a run on purpose, and check what gradsync promises.

undisturbed run      hash of its weights
disturbed run        who is named, in which line, after how many seconds; exit code; what is left
resumed run          continues from the last checkpoint if the disturbed run ended early: one hash?
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.cli.train import run as train
from gradsync.commands.launch.command import split
from gradsync.commands.launch.ranks import WORKER, Signals, start_ranks, until_stopped
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import parse_config
from gradsync.commands.train.faults import FAULTS, FaultPlan, named
from gradsync.core.files import counted, printable, read_object
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

_MARK = "GRADSYNC_DRILL"
"""Variable that identifies all processes which a run has started."""
_NOTE, _WORK = "fault.json", "work.json"
_SETTLE_S = 1.0
Line = tuple[float, str]
"""Time of printing, and the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillOptions:
    """Break one rank of a run on purpose: gradsync drill --fault KIND [options] -- TRAIN ARGUMENTS.

    The run is `gradsync train` with these arguments, on ranks of this host: once undisturbed, once
    disturbed, and again from its last checkpoint if that run ended early. Defaults for what the
    arguments leave open: 2 ranks, 4 steps more than --step, a checkpoint every other step, 15 s for
    a collective. Exit code 0 if all promises hold, else 1.
    """

    fault: Annotated[str, tyro.conf.arg(help=f"What happens: {', '.join(FAULTS)}.")]
    rank: int = 1
    """The rank that gets the fault."""
    step: int = 3
    """The optimizer step, from 1 on."""
    phase: str = ""
    """The moment in the step: data, backward, reduce or save; empty: the fault's usual one."""
    expect: str = ""
    """weights_sha256 of the undisturbed run, which is then skipped."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the verdict as one JSON document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one run of a drill ended."""

    code: int
    lines: list[Line]  # of launcher and ranks
    at: float  # when all ranks had ended
    weights: str  # weights_sha256; "" if it ended early
    left: list[str]  # processes and shared memory that it left


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A drill's result; seconds count from the fault."""

    plan: FaultPlan
    world_size: int
    sync: str
    line: str  # the first that names the fault's rank, or else the fault; "" for none
    named_s: float
    named_right: bool  # if two ranks differ, either may be named
    ended_s: float
    exit_code: int
    left: list[str]
    weights: str  # weights_sha256 of the undisturbed run, for --expect
    same_weights: bool  # as undisturbed, without help or after resuming
    went_on_from: int | None  # step of the checkpoint; None if it did not end early
    steps_lost: int  # finished steps that were repeated
    broken: list[str]  # promises


def run(argv: list[str]) -> int:
    """Run `gradsync drill ARGV`: 0 if all promises hold, else 1.

    Raises:
        ConfigError: unknown fault, rank or moment; started by a launcher.
        RunError: a run failed without the fault, or the fault never happened.
    """
    if argv[:1] == [WORKER]:
        work = read_object(Path(argv[1]))
        return train(work["flags"], FaultPlan(**work["fault"]) if work["fault"] else None)
    own, flags = split(argv)
    options = parse(DrillOptions, own, "drill")
    world = resolve(environ.snapshot()).world
    if world.is_distributed:
        raise ConfigError(f"{world.launcher} has started ranks: gradsync drill starts its own")
    plan = FaultPlan(kind=options.fault, rank=options.rank, step=options.step, phase=options.phase)

    def carry_out() -> int:
        verdict = drill(plan, flags, expect=options.expect, show=_show)
        print(json.dumps(asdict(verdict), indent=1) if options.as_json else describe(verdict))
        return 1 if verdict.broken else 0

    return until_stopped(world, carry_out)


def drill(
    plan: FaultPlan,
    flags: Sequence[str],
    *,
    expect: str = "",
    resume_on: int | None = None,
    module: str = "gradsync",
    show: Callable[[float, str], None] = lambda seconds, line: None,
) -> Verdict:
    """Run one drill.

    Args:
        plan: the fault.
        flags: arguments of `gradsync train`.
        expect: weights_sha256 of the undisturbed run, which is then skipped.
        resume_on: ranks of the resumed run; None for the same number.
        module: what a rank runs, as `python -m`.
        show: gets each line of the disturbed run with its time, seconds after the fault.
    """
    flags, config = _complete(plan, list(flags))
    world_size = config.nproc_per_node or 1
    if plan.rank >= world_size:
        raise ConfigError(f"--rank {plan.rank}, but the ranks are 0 to {world_size - 1}")
    with Signals() as signals, TemporaryDirectory(prefix="gradsync-drill-") as place:
        folder = Path(place)

        def start(name: str, fault: FaultPlan | None = None, ranks: int = world_size) -> Ended:
            words = [*flags, f"--nproc-per-node={ranks}", "--out", str(folder / name)]
            work = {"flags": words, "fault": fault and asdict(fault)}
            (folder / _WORK).write_text(json.dumps(work))
            command = ["drill", WORKER, str(folder / _WORK)]
            more = {"module": module, "on_loss": config.on_loss, "rejoin": config.rejoin}
            out = folder / name
            return _watched(out, lambda: start_ranks(command, ranks, signals, **more).code)

        try:
            expect = expect or _weights(start("undisturbed"))
            ended = start("disturbed", replace(plan, note=str(folder / _NOTE)))
            if not (folder / _NOTE).exists():
                raise RunError(f"the fault never came\n{_last_words(ended)}")
            came = read_object(folder / _NOTE)
            gone = f"; stacks of the ranks are in {folder / 'disturbed' / 'stacks'}"
            lines = [(at - came["at"], line.replace(gone, "")) for at, line in ended.lines]
            for each in lines:
                show(*each)
            early = bool(ended.code) or not ended.weights
            saved = _saved(folder / "disturbed") if early else None
            last = start("disturbed", ranks=resume_on or world_size) if early else ended
        finally:
            signals.hold()
    finished = came["step"] - (plan.moment != "save" and plan.kind != "sigterm")
    seconds, line, right = _named(plan, world_size, lines)
    left, same = ended.left + (last.left if early else []), _weights(last) == expect
    promise = FAULTS[plan.kind]
    goes_on = plan.kind == "kill" and config.on_loss == "shrink"
    code, within_s = 0 if goes_on else promise.code, promise.within_s + came["step_s"]
    broken = {
        "nothing names the fault": not line,
        "another rank was named": bool(line) and not right,
        f"named after {seconds:.1f} s, not {within_s:.1f}": seconds > within_s,
        f"exit code {ended.code}, not {code}": ended.code != code,
        f"left behind: {', '.join(left)}": bool(left),
        "other weights than undisturbed": not same,
    }
    return Verdict(
        plan=plan,
        world_size=world_size,
        sync=config.sync,
        line=line,
        named_s=round(seconds, 2),
        named_right=right,
        ended_s=round(ended.at - came["at"], 2),
        exit_code=ended.code,
        left=left,
        weights=expect,
        same_weights=same,
        went_on_from=saved,
        steps_lost=0 if saved is None else finished - saved,
        broken=[problem for problem, holds in broken.items() if holds],
    )


def _complete(plan: FaultPlan, flags: list[str]) -> tuple[list[str], TrainConfig]:
    """The arguments, the drill's before the user's, and the configuration that they give."""
    first = [flags.pop(0)] if flags and not flags[0].startswith("-") else []
    own = ["--nproc-per-node=2", f"--steps={plan.step + 4}", "--checkpoint.every=2"]
    own += ["--timeout-s=15", "--sample-tokens=0", "--log-every=1"]
    complete = [*first, *own, *flags]
    return complete, parse_config(complete)


def _named(plan: FaultPlan, world_size: int, lines: Sequence[Line]) -> tuple[float, str, bool]:
    """The first line that names the rank, or else the fault, and whether it names that rank."""
    found = [
        (*each, who) for each in lines if (who := named(FAULTS[plan.kind], each[1])) is not None
    ]
    right = [each for each in found if not each[2] or each[2] == {plan.rank}]
    if world_size == 2:  # if two ranks differ, each may blame the other
        right = right or [each for each in found if plan.rank in each[2]]
    seconds, line, _ = next(iter(right or found), (0.0, "", set()))
    return seconds, line, bool(right)


def describe(verdict: Verdict) -> str:
    """The verdict for people."""
    plan, went_on = verdict.plan, verdict.went_on_from
    weights = "the undisturbed run's" if verdict.same_weights else "NOT the undisturbed run's"
    if went_on is not None:
        weights += (
            f", going on from step {went_on} ({counted(verdict.steps_lost, 'step')} done again)"
        )
    rows = {
        "fault": f"{plan.kind}, rank {plan.rank} of {verdict.world_size}, step {plan.step} "
        f"({plan.moment}), sync {verdict.sync}",
        "named": f"after {verdict.named_s} s: {verdict.line}" if verdict.line else "never",
        "ended": f"after {verdict.ended_s} s, all ranks, exit code {verdict.exit_code}",
        "left": ", ".join(verdict.left) or "nothing",
        "weights": weights,
        "verdict": "; ".join(["NOT as promised", *verdict.broken][not verdict.broken :])
        or "as promised",
    }
    return "\n".join(f"{name:<9}{text}" for name, text in rows.items())


def _show(seconds: float, line: str) -> None:
    if seconds >= 0 and line.startswith(("gradsync:", "step ")):  # no tracebacks
        print(f"{seconds:8.2f} s  {line}", file=sys.stderr, flush=True)


# -- one run --------------------------------------------------------------------------------------


def _watched(out: Path, start: Callable[[], int]) -> Ended:
    """Result of a run in the run directory `out`; `start` starts and awaits it."""
    summary, mark, lines = out / "summary.json", secrets.token_hex(8), []
    before = _shared_memory()
    summary.unlink(missing_ok=True)
    with environ.exported({_MARK: mark}), _captured(lines):
        code = start()
    at = time.monotonic()
    left = [*_processes(mark), *sorted(_shared_memory() - before)]
    weights = read_object(summary)["weights_sha256"] if summary.exists() else ""
    return Ended(code=code, lines=lines, at=at, weights=weights, left=left)


@contextmanager
def _captured(lines: list[Line]) -> Generator[None]:
    """Add to `lines` what this process and its children print."""
    reader, writer = os.pipe()
    before = {number: os.dup(number) for number in (1, 2)}

    def read() -> None:
        with open(reader, encoding="utf-8", errors="replace") as file:
            for line in file:
                lines.append((time.monotonic(), printable(line.rstrip("\n"))))

    thread = threading.Thread(target=read, name="gradsync-drill", daemon=True)
    thread.start()
    for number in before:
        os.dup2(writer, number)
    os.close(writer)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, was in before.items():
            os.dup2(was, number)
            os.close(was)
        thread.join(_SETTLE_S)  # a remaining process may hold the other end


def _weights(ended: Ended) -> str:
    """Hash of the weights of an undisturbed run."""
    if ended.code or not ended.weights:
        raise RunError(f"without the fault: exit code {ended.code}\n{_last_words(ended)}")
    return ended.weights


def _last_words(ended: Ended) -> str:
    return "\n".join(line for _, line in ended.lines[-8:])


def _saved(out: Path) -> int:
    """Step of the last good checkpoint."""
    from gradsync.checkpoint.store import CheckpointStore

    info, _ = CheckpointStore(out / "checkpoints").latest()
    return 0 if info is None else info.manifest.step


# -- what is left ---------------------------------------------------------------------------------


def _processes(mark: str) -> list[str]:
    """Processes with the mark, after a short wait; they are killed."""
    entry, until, found = f"{_MARK}={mark}".encode(), time.monotonic() + _SETTLE_S, [""]
    while found and time.monotonic() < until:
        paths = Path("/proc").glob("[0-9]*/environ")
        found = [path.parent.name for path in paths if entry in _read(path)]
        time.sleep(0.02)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(int(pid), SIGKILL)
    return [f"process {pid}" for pid in found]


def _shared_memory() -> set[str]:
    """This user's files in /dev/shm that no process has mapped."""
    paths = [path for path in Path("/dev/shm").glob("*") if path.stat().st_uid == os.getuid()]
    maps = b"".join(map(_read, Path("/proc").glob("[0-9]*/maps"))) if paths else b""
    return {str(path) for path in paths if str(path).encode() not in maps}


def _read(path: Path) -> bytes:
    with suppress(OSError):  # the process ended, or belongs to another user
        return path.read_bytes()
    return b""
