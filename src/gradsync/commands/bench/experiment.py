"""`gradsync bench NAME`: a measurement from the command line to its record. `run_experiment` runs
an `Experiment`, that of `gradsync.commands.bench.NAME`.

plan       from the command's options: what to measure, or an error
measure    a rank's part, from JSON to JSON, on a launcher's ranks or on new ones
findings   the results as a table, a record (JSON) and CSV

Figures of repeated measurements are medians, quartiles and ratios. No torch before ranks measure.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from rich.table import Table

from gradsync.commands.arguments import flag_of, parse
from gradsync.commands.launch.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.commands.plan.measured import cpu_model
from gradsync.commands.plan.report import console_of
from gradsync.core.files import check_name, check_place, counted, json_text, write_result
from gradsync.runtime import environ
from gradsync.runtime.machine import total_bytes, usable_cores
from gradsync.runtime.resolve import resolve

if TYPE_CHECKING:
    from gradsync.world import World

BENCHMARKS = {
    "sync": "training steps of every strategy, beside DDP, Accelerate, Fabric and no communication",
    "collectives": "all-reduce and its kin by every algorithm, beside the memory's own bandwidth",
    "scaling": "strong and weak scaling from one rank on, with a verdict",
}
_HELP = """\
usage: gradsync bench NAME [options]

Measure what synchronisation costs on this machine.

benchmarks:
{benchmarks}

`gradsync bench NAME --help` says more.
"""
_PLACES = ("csv", "out", "save", "as_json")  # they do not change what is measured
_RESAMPLES = 4000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Results, in the form that each output needs."""

    environment: Mapping[str, Any]  # see `environment`
    data: Mapping[str, Any]  # for the record
    show: Callable[[IO[str]], None]  # prints it for people
    csv: Callable[[], str] | None = None
    keep: Callable[[], str] | None = None  # saves what other commands use, last; returns where
    code: int = 0  # exit code


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A command that measures."""

    command: tuple[str, ...]  # as typed
    options: type  # its flags: a dataclass
    plan: Callable[[Any, World], Any]  # from options and world; raises `ConfigError`
    findings: Callable[[Any, Any], Findings]  # from the plan and what `measure` returned on rank 0
    ranks: Callable[[Any], int] = lambda plan: sum(plan.world_sizes)  # how many to start
    measure: str = "gradsync.commands.bench.steps:measure"  # imported by ranks only


def run(argv: list[str]) -> int:
    """Run `gradsync bench ARGV`; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, BENCHMARKS))
        lines = [f"  {name:<{width}}  {summary}" for name, summary in BENCHMARKS.items()]
        print(_HELP.format(benchmarks="\n".join(lines)), end="")
        return 0 if argv else 2
    name, *rest = argv
    check_name("benchmark", name, BENCHMARKS)
    return run_experiment(import_module(f"gradsync.commands.bench.{name}").EXPERIMENT, rest)


def run_experiment(experiment: Experiment, argv: list[str]) -> int:
    """Run the command.

    Returns:
        0 if all was measured (or `Findings.code`), the ranks' code if they failed; 128 + signal
            after one.

    Raises:
        ConfigError: a measurement that is not possible, an output that cannot be written.
        RunError: ranks could not start, results could not be written.
    """
    module, _, function = experiment.measure.partition(":")

    def measure(plan: dict[str, Any]) -> dict[str, Any]:
        return getattr(import_module(module), function)(plan)

    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), measure)
    options = parse(experiment.options, argv, " ".join(experiment.command))
    world = resolve(environ.snapshot()).world
    plan = experiment.plan(options, world)
    if world.is_main:
        for name in ("csv", "out"):
            if place := getattr(options, name, ""):
                check_place(flag_of(name), Path(place), folder=name == "out")
    if world.is_distributed:
        options = replace(options, world_size=world.world_size)
    ask = partial(measure_on_ranks, experiment.command, asdict(plan), measure, world=world)

    def work() -> int:
        outcome = ask(world_size=experiment.ranks(plan))
        if outcome.result is None:  # nothing to print here, or the ranks have printed the error
            return outcome.code
        found = experiment.findings(plan, outcome.result)
        _deliver(options, experiment.command, found)
        return found.code

    return until_stopped(world, work)


def _deliver(options: Any, command: Sequence[str], found: Findings) -> None:
    human = sys.stderr if options.as_json else sys.stdout
    found.show(human)
    about: dict[str, Any] = {"name": command[-1], "command": command_of(options, command)}
    about |= {"environment": found.environment, "data": found.data}
    if options.as_json:
        print(json_text(record_of(**about)), end="", flush=True)
    if found.csv and options.csv:
        write_result(Path(options.csv), found.csv())
    if options.out:
        print(f"wrote {write_record(Path(options.out), **about)}", file=human)
    if found.keep and getattr(options, "save", True):
        print(found.keep(), file=human)


def command_of(options: Any, command: Sequence[str]) -> str:
    """The command line for the same measurement, without its output flags."""
    words = ["gradsync", *command]
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name in _PLACES or value == entry.default:
            continue
        if entry.name != "model":  # the positional one
            words.append(flag_of(entry.name))
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def taken(kind: type[T], options: Any, **others: Any) -> T:
    """A `kind` built from the options that match its fields, overridden by `others`."""
    names = [entry.name for entry in fields(kind) if hasattr(options, entry.name)]  # type: ignore[arg-type]
    return kind(**{name: getattr(options, name) for name in names} | others)


def environment(*, world_size: int, threads: int) -> dict[str, Any]:
    """Facts that a reader needs to judge the figures; read before anything is measured."""
    import torch
    import torch.distributed as dist

    has_group = dist.is_available() and dist.is_initialized()
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load_at_start": round(os.getloadavg()[0], 2),  # of the last minute
        "memory_gib": round(total_bytes() / 2**30, 1),
        "world_size": world_size,
        "threads_per_rank": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": str(dist.get_backend()) if has_group else "none",
        "accelerator": torch.cuda.get_device_name() if has_cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def record_of(
    *, name: str, command: str, environment: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of a measurement."""
    return {"environment": environment, "command": command, "benchmark": name, **data}


def write_record(folder: Path, **parts: Any) -> Path:
    """Write `folder/record.json` atomically, with `parts` of `record_of`; returns its path."""
    path = folder / "record.json"
    write_result(path, json_text(record_of(**parts)))
    return path


@dataclass(frozen=True, slots=True)
class Spread:
    """Range of the middle half of `count` measurements: median, first and third quartile."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int) -> str:
        """`median (first quartile-third quartile)`; for a single value, the value."""
        middle = f"{self.median:.{digits}f}"
        if self.count == 1:
            return middle
        return f"{middle} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return Spread(median=median, low=low, high=high, count=len(values))


def ratios(values: Sequence[float], ideal: Sequence[float]) -> list[float]:
    """`values` over `ideal`, each round by the same round: disturbances affect both."""
    return [value / best for value, best in zip(values, ideal, strict=True)]


def interval(values: Sequence[float], *, doubt: float = 0.05) -> tuple[float, float]:
    """Confidence interval of the median, by the bootstrap over rounds (Efron 1979), reproducibly;
    `doubt` is 0.05 for 95 %."""
    places = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[places], axis=1)
    low, high = np.quantile(medians, [doubt / 2, 1 - doubt / 2])
    return float(low), float(high)


def print_table(
    stream: IO[str],
    title: str,
    rows: Sequence[Mapping[str, str]],
    notes: Iterable[str] = (),
    *,
    words: Collection[str] = (),
) -> None:
    """A table of at least one row, each by column, then notes, one paragraph each; lines in a file
    are not cut. `words` are the columns without numbers, as the first one."""
    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if place and heading not in words else "left")
    for row in rows:
        table.add_row(*row.values())
    console = console_of(stream)
    console.print(table)
    for line in notes:
        console.print(line, style="dim", soft_wrap=not stream.isatty())


def where(environment: Mapping[str, Any]) -> str:
    """The machine, in one line."""
    device = environment["accelerator"] or environment["cpu"]
    return (
        f"{environment['date']}, {device}, {environment['cores']} cores (load "
        f"{environment['load_at_start']} at the start), torch {environment['torch']}, "
        f"{counted(environment['threads_per_rank'], 'thread')} a rank, {environment['backend']}"
    )


def show_progress(place: int, count: int, what: str) -> None:
    """A line for each tenth of the work: items done, items in all, what comes now."""
    if 10 * place % count < 10:
        say(f"{place} of {count} done, next: {what}")


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"gradsync: {text}", file=sys.stderr, flush=True)
