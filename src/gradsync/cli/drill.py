"""`gradsync drill`: break one rank of a run on purpose, and say whether what is promised came true.

undisturbed run      hash of its weights
disturbed run        who is named, in which line, after how many seconds; exit code; what is left
the same once more   goes on from the last checkpoint, if the disturbed run ended early: one hash?
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Annotated, Any

import tyro

from gradsync.cli.arguments import parse
from gradsync.cli.launch import split
from gradsync.cli.ranks import WORKER, Signals, start_ranks, until_stopped, work_folder
from gradsync.cli.train import run as train
from gradsync.core.files import printable, read_object
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import find_strategy
from gradsync.train.config import TrainConfig
from gradsync.train.config_io import parse_config
from gradsync.train.faults import FAULTS, FaultPlan, named

_MARK = "GRADSYNC_DRILL"
"""Variable by which whatever a run has started is found, wherever it has gone."""
_NOTE, _WORK = "fault.json", "work.json"
_SETTLE_S = 1.0
_KINDS = ", ".join(FAULTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillOptions:
    """Break one rank of a run on purpose: gradsync drill --fault KIND [options] -- TRAIN ARGUMENTS.

    The run is `gradsync train` with these arguments, on ranks of this host: once undisturbed, once
    disturbed, and once more where that one ended early, from its last checkpoint. Unless the
    arguments say otherwise: 2 ranks, 4 steps more than --step, a checkpoint every other step, a
    collective may take 15 s. Exit code 0 when all came as promised, else 1.
    """

    fault: Annotated[str, tyro.conf.arg(help=f"What happens: {_KINDS}.")]
    rank: int = 1
    """The rank that it happens to."""
    step: int = 3
    """The optimizer step, from 1 on."""
    phase: str = ""
    """The moment in it: data, backward, reduce or save; empty takes the fault's usual one."""
    expect: str = ""
    """weights_sha256 of the undisturbed run, which is left out then."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the verdict as one JSON document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run of the drill ended."""

    code: int
    lines: list[tuple[float, str]]
    """Everything that launcher and ranks printed, and when (monotonic clock)."""
    at: float
    """When all ranks had ended."""
    weights: str
    """weights_sha256, "" when it has not come to its last step."""
    left: list[str]
    """Processes, ports, shared memory and files that outlived it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A drill's result."""

    fault: dict[str, Any]
    world_size: int
    sync: str
    line: str = ""
    """The first line that names the fault."""
    named_right: bool = False
    """Whether it names the rank; of two ranks of which one is wrong, both may be named."""
    named_s: float | None = None
    """From the fault to that line, seconds."""
    ended_s: float | None = None
    """From the fault to the end of all ranks."""
    exit_code: int = 0
    left: list[str] = field(default_factory=list)
    same_weights: bool = False
    """At the last step, whether undisturbed, disturbed or gone on."""
    went_on_from: int | None = None
    """Step of the checkpoint from which the run was started again; None where it went on itself."""
    steps_lost: int = 0
    """Finished steps that had to be done again."""
    broken: list[str] = field(default_factory=list)
    """Promises that did not come true."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync drill ARGV`: 0 when all came as promised, else 1.

    Raises:
        ConfigError: no such fault, rank or moment; started by a launcher.
        RunError: the undisturbed run failed, or the fault never came.
    """
    if argv[:1] == [WORKER]:
        work = read_object(Path(argv[1]))
        return train(work["flags"], FaultPlan(**work["fault"]) if work["fault"] else None)
    own, flags = split(argv)
    options = parse(DrillOptions, own, "drill", pairs=False)
    world = resolve(environ.snapshot()).world
    if world.launcher != "python":
        raise ConfigError(f"{world.launcher} has started ranks: gradsync drill starts its own")
    plan = FaultPlan(kind=options.fault, rank=options.rank, step=options.step, phase=options.phase)

    def carry_out() -> int:
        verdict = drill(plan, flags, expect=options.expect, show=_show_on_stderr)
        print(json.dumps(asdict(verdict), indent=1) if options.as_json else describe(verdict))
        return 1 if verdict.broken else 0

    return until_stopped(world, carry_out)


def drill(
    plan: FaultPlan,
    flags: Sequence[str],
    *,
    expect: str = "",
    show: Callable[[float, str], None] = lambda seconds, line: None,
) -> Verdict:
    """Carry out one drill; `show` gets the disturbed run's lines, and the seconds from the fault."""
    flags, config = _complete(plan, list(flags))
    world_size = config.nproc_per_node or 1
    if plan.rank >= world_size:
        raise ConfigError(f"--rank {plan.rank}, but there are ranks 0 to {world_size - 1} only")
    with Signals() as signals, work_folder("gradsync-drill-") as folder:
        try:
            if not expect:
                expect = _finished(_run(folder, "undisturbed", flags, fault=None, world_size=world_size, signals=signals))
            noted = FaultPlan(**{**asdict(plan), "note": str(folder / _NOTE)})
            ended = _run(folder, "disturbed", flags, fault=noted, world_size=world_size, signals=signals)
            if not (folder / _NOTE).exists():
                said = "\n".join(line for _, line in ended.lines[-8:])
                raise RunError(f"the fault never came: has the run such a step?\n{said}")
            came = read_object(folder / _NOTE)
            for at, line in ended.lines:
                show(at - came["at"], line)
            again, started = ended, None
            if not ended.weights or ended.code:
                started = _last_step(folder / "disturbed")
                again = _run(folder, "disturbed", flags, fault=None, world_size=world_size, signals=signals)
        finally:
            signals.hold()
    finished = came["step"] - (plan.moment != "save" and plan.kind != "sigterm")
    return _judge(
        Verdict(
            fault={k: v for k, v in asdict(plan).items() if k != "note"} | {"phase": plan.moment},
            world_size=world_size,
            sync=config.sync,
            ended_s=round(ended.at - came["at"], 2),
            exit_code=ended.code,
            left=ended.left + (again.left if again is not ended else []),
            same_weights=_finished(again) == expect,
            went_on_from=started,
            steps_lost=0 if started is None else finished - started,
        ),
        [(at - came["at"], line) for at, line in ended.lines],
    )


def _complete(plan: FaultPlan, flags: list[str]) -> tuple[list[str], TrainConfig]:
    """The arguments with the drill's own before the user's, and what they mean."""
    first = [flags.pop(0)] if flags and not flags[0].startswith("-") else []
    own = ["--nproc-per-node=2", f"--steps={plan.step + 4}", "--checkpoint.every=2"]
    own += ["--timeout-s=15", "--sample-tokens=0", "--log-every=1"]
    config = parse_config([*first, *own, *flags])
    if plan.kind == "flip-bit":
        own.append("--check-replicas-every=1")
        if config.sync != "auto" and find_strategy(config.sync).recipe is not None:
            own.append("--sync-options.weights=replicas")  # else there is one copy for all ranks
    return [*first, *own, *flags], config


def _judge(verdict: Verdict, lines: Sequence[tuple[float, str]]) -> Verdict:
    """Compare what happened with what the kind of fault promises."""
    promise, rank = FAULTS[verdict.fault["kind"]], verdict.fault["rank"]
    said = [(s, text, who) for s, text in lines if (who := named(promise, text)) is not None]
    # Of two ranks that differ either may be wrong, and each names the other.
    fits = [each for each in said if not each[2] or each[2] == {rank}]
    if verdict.world_size == 2:
        fits = fits or [each for each in said if rank in each[2]]
    seconds, line, _ = next(iter(fits or said), (None, "", set()))
    late = seconds is not None and seconds > promise.within_s
    broken = {
        "nothing said what is wrong": not said,
        "another rank was named": bool(said) and not fits,
        f"it was named after {seconds} s, {promise.within_s:g} s are promised": late,
        f"exit code {verdict.exit_code}, {promise.code} is promised": (
            verdict.exit_code != promise.code
        ),
        f"left behind: {', '.join(verdict.left)}": bool(verdict.left),
        "the weights differ from the undisturbed run's": not verdict.same_weights,
    }
    return replace(
        verdict,
        line=line,
        named_right=bool(fits),
        named_s=None if seconds is None else round(seconds, 2),
        broken=[problem for problem, holds in broken.items() if holds],
    )


def describe(verdict: Verdict) -> str:
    """The verdict for people."""
    fault = verdict.fault
    named_s = "never" if verdict.named_s is None else f"after {verdict.named_s} s: {verdict.line}"
    weights = (
        "the undisturbed run's" if verdict.same_weights else "OTHERS than the undisturbed run's"
    )
    if verdict.went_on_from is not None:
        weights += f", after it went on from step {verdict.went_on_from}"
        weights += f" ({verdict.steps_lost} finished step(s) done again)"
    rows = {
        "fault": f"{fault['kind']} of rank {fault['rank']} of {verdict.world_size} at step "
        f"{fault['step']} ({fault['phase']}), sync {verdict.sync}",
        "named": named_s,
        "ended": f"all ranks after {verdict.ended_s} s, exit code {verdict.exit_code}",
        "left": ", ".join(verdict.left) or "nothing",
        "weights": weights,
        "verdict": "NOT as promised: " + "; ".join(verdict.broken)
        if verdict.broken
        else "as promised",
    }
    return "\n".join(f"{name:<9}{text}" for name, text in rows.items())


def _show_on_stderr(seconds: float, line: str) -> None:
    if line and not line.startswith((" ", "---", "[rank")):  # no tracebacks
        print(f"{seconds:8.2f} s  {line}", file=sys.stderr)


# -- one run --------------------------------------------------------------------------------------


def _run(
    folder: Path,
    name: str,
    flags: Sequence[str],
    *,
    fault: FaultPlan | None,
    world_size: int,
    signals: Signals,
) -> Ended:
    """`gradsync train FLAGS` on ranks of this host, in the run directory `folder`/`name`."""
    out, temporary, work = folder / name, folder / "tmp", folder / _WORK
    temporary.mkdir(exist_ok=True)
    summary = out / "summary.json"
    summary.unlink(missing_ok=True)
    words = [*flags, "--out", str(out)]
    work.write_text(json.dumps({"flags": words, "fault": fault and asdict(fault)}))
    mark = secrets.token_hex(8)
    before, lines = _ports() | _shared_memory(), []
    with environ.exported({_MARK: mark, "TMPDIR": str(temporary)}), _captured(lines):
        code = start_ranks(["drill", WORKER, str(work)], world_size, signals).code
    at = time.monotonic()
    left = _processes(mark)
    left += sorted((_ports() | _shared_memory()) - before)
    left += sorted(path.name for path in temporary.iterdir())
    if not code:  # a save that a rank's death cut off is removed by the next one
        left += sorted(path.name for path in out.glob("checkpoints/.tmp-*"))
    weights = read_object(summary)["weights_sha256"] if summary.exists() else ""
    return Ended(code=code, lines=lines, at=at, weights=weights, left=left)


def _finished(ended: Ended) -> str:
    """Hash of the weights of a run that nothing should have disturbed."""
    if ended.code or not ended.weights:
        said = "\n".join(line for _, line in ended.lines[-8:])
        raise RunError(f"an undisturbed run ended with exit code {ended.code}:\n{said}")
    return ended.weights


def _last_step(out: Path) -> int:
    from gradsync.checkpoint.store import CheckpointStore

    info, _ = CheckpointStore(out / "checkpoints").latest()
    return 0 if info is None else info.step


@contextmanager
def _captured(lines: list[tuple[float, str]]) -> Iterator[None]:
    """Add to `lines` what this process and its children print, with the time."""
    reader, writer = os.pipe()
    streams = [
        (stream, stream.fileno(), os.dup(stream.fileno())) for stream in (sys.stdout, sys.stderr)
    ]

    def read() -> None:
        with open(reader, encoding="utf-8", errors="replace") as file:
            for line in file:
                lines.append((time.monotonic(), printable(line.rstrip("\n"))))

    thread = threading.Thread(target=read, name="gradsync-drill", daemon=True)
    thread.start()
    for stream, number, _ in streams:
        stream.flush()
        os.dup2(writer, number)
    os.close(writer)
    try:
        yield
    finally:
        for stream, number, before in streams:
            stream.flush()
            os.dup2(before, number)
            os.close(before)
        thread.join(_SETTLE_S)  # a process that was left may hold the other end


# -- what is left ---------------------------------------------------------------------------------


def _processes(mark: str) -> list[str]:
    """Processes that still have the mark after a moment; they are killed."""
    entry, until = f"{_MARK}={mark}".encode(), time.monotonic() + _SETTLE_S
    while True:
        found = [
            path.parent for path in Path("/proc").glob("[0-9]*/environ") if entry in _read(path)
        ]
        if not found or time.monotonic() > until:
            break
        time.sleep(0.02)
    for folder in found:
        with suppress(ProcessLookupError):
            os.kill(int(folder.name), SIGKILL)
    return [f"process {folder.name}" for folder in found]


def _ports() -> set[str]:
    """Ports at which this process, which was the launcher, listens."""
    import psutil

    found = psutil.Process().net_connections("tcp")
    return {f"port {each.laddr.port}" for each in found if each.status == psutil.CONN_LISTEN}


def _shared_memory() -> set[str]:
    """This user's files in /dev/shm that no process has mapped."""
    paths = [path for path in Path("/dev/shm").glob("*") if path.stat().st_uid == os.getuid()]
    maps = b"".join(map(_read, Path("/proc").glob("[0-9]*/maps"))) if paths else b""
    return {str(path) for path in paths if str(path).encode() not in maps}


def _read(path: Path) -> bytes:
    with suppress(OSError):  # it ended meanwhile, or belongs to someone else
        return path.read_bytes()
    return b""
