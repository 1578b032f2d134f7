"""`gradsync bench collectives`: what collectives cost here, beside the memory's own bandwidth."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.collectives_plan import (
    ALGORITHMS,
    OPERATIONS,
    Settings,
    check_settings,
    parse_size,
    settings_from_json,
)
from gradsync.bench.record import check_folder, write_record
from gradsync.cli.arguments import parse
from gradsync.cli.bench_sync import uses_cuda
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

if TYPE_CHECKING:
    from gradsync.bench.collectives_report import Report
    from gradsync.world import World

_COMMAND = ("bench", "collectives")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesOptions:
    """Time all_reduce, reduce_scatter, all_gather and broadcast by every algorithm, from 4 B to
    1 GiB: p50, p95, algbw and busbw as nccl-tests define them.

    Beside them runs a plain copy, all ranks at once. For ranks of one host, "of limit" is an
    operation's rate relative to that copy's; in place it can exceed 100 %, because a copy reads its
    destination's lines before it writes them. Each algorithm's result is checked at each size.
    Started by torchrun, mpirun or srun, it measures these ranks.
    """

    operations: str = "all"
    """all_reduce, reduce_scatter, all_gather, broadcast, with commas between them; or all."""
    algorithms: str = "all"
    """backend (gloo or nccl), ring, recursive_doubling, hierarchical, tree, shared (in place, over
    shared memory), shared_copies; or all."""
    sizes: str = ""
    """Of the whole tensor, with commas: 4K,25M (K, M, G are powers of 1024; KB, MB, GB of 1000).
    Default: 4 B, 16 B, 64 B, ... as far as memory goes."""
    max_bytes: str = "1G"
    """Largest of the default sizes."""
    world_size: int = 2
    """Ranks to start on this host."""
    dtype: str = "fp32"
    """fp64, fp32, bf16, fp16, int64, int32 or int8."""
    device: str = "auto"
    """cpu, cuda, or auto: GPUs where there is one for each rank of a host."""
    threads: int | None = None
    """Intra-op threads of a rank; default: cores / ranks."""
    rounds: int = 7
    """Turns of each algorithm at each size; slow ones get fewer, at least 3."""
    burst: int = 1
    """Operations that follow each other in one repetition, which counts as their mean. With 1 each
    one comes after a pause, as in training; nccl-tests have 20."""
    seconds_per_point: float = 0.3
    """Time for one algorithm at one size, about, seconds."""
    save: bool = False
    """Keep the fitted costs in the user's cache, for planning."""
    csv: str = ""
    """Write one row per operation, size and algorithm to this file."""
    out: str = ""
    """Write record.json, with every sample, into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the tables go to standard error."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync bench collectives ARGV`.

    Returns:
        0 when every result was right, else 1; 128 + signal after one.

    Raises:
        ConfigError: an unknown operation, algorithm, dtype or size, or one beyond memory.
        RunError: ranks could not begin, or results could not be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), _measure)
    options = parse(CollectivesOptions, argv, "bench collectives")
    world = resolve(environ.snapshot()).world
    settings = settings_of(options)
    if world.is_main:
        _check_places(options)
    return until_stopped(world, lambda: _work(options, settings, world))


def settings_of(options: CollectivesOptions) -> Settings:
    """What was asked for.

    Raises:
        ConfigError: see `run`.
    """
    if options.world_size < 2:
        raise ConfigError(
            f"--world-size {options.world_size}: collectives need at least 2 ranks; one has "
            "nothing to move"
        )
    settings = check_settings(
        Settings(
            operations=_names(options.operations, OPERATIONS),
            algorithms=_names(options.algorithms, ALGORITHMS),
            sizes=tuple(parse_size("--sizes", word) for word in _words(options.sizes)),
            max_bytes=parse_size("--max-bytes", options.max_bytes),
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            rounds=options.rounds,
            burst=options.burst,
            seconds_per_point=options.seconds_per_point,
        )
    )
    if options.device == "cuda":
        uses_cuda(options.device)  # refuses it where there is none
    return settings


def _names(text: str, known: Any) -> tuple[str, ...]:
    return tuple(known) if text == "all" else tuple(dict.fromkeys(_words(text)))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check_places(options: CollectivesOptions) -> None:
    """Long before there is something to write."""
    if options.out:
        check_folder("--out", Path(options.out))
    if options.csv:
        path = Path(options.csv)
        if path.is_dir():
            raise ConfigError(f"--csv {path}: is a folder; name a file")
        if not path.parent.is_dir():
            raise ConfigError(f"--csv {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--csv {path}: may not be written")


def _work(options: CollectivesOptions, settings: Settings, world: World) -> int:
    outcome = measure_on_ranks(
        _COMMAND, asdict(settings), _measure, world=world, world_size=options.world_size
    )
    if outcome.result is None:
        return outcome.code
    from gradsync.bench.collectives_measure import samples_of
    from gradsync.bench.collectives_report import Report

    report = Report.of(settings, outcome.result, samples_of(outcome.result))
    _tell(options, report)
    return 1 if report.wrong else 0


def _measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's part; see `ranks.Measure`."""
    from gradsync.bench.collectives_measure import measure_collectives

    with _progress() as tell:
        return measure_collectives(settings_from_json(settings), tell)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell


def _tell(options: CollectivesOptions, report: Report) -> None:
    from gradsync.bench.collectives_report import print_report, write_csv
    from gradsync.hardware.timing.alpha_beta_cache import save_fits

    human = sys.stderr if options.as_json else sys.stdout
    print_report(report, human)
    if options.as_json:
        document = {"environment": report.environment, **report.data()}
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    if options.csv:
        try:
            write_csv(Path(options.csv), report)
        except OSError as error:
            raise RunError(f"--csv {options.csv}: {error.strerror}") from error
    if options.out:
        path = write_record(
            Path(options.out),
            name="collectives",
            command=command_of(options, report.environment["world_size"]),
            environment=report.environment,
            data={**report.data(), "samples": report.samples_json()},
        )
        print(f"wrote {path}", file=human)
    if options.save and report.fits:
        kept = {
            **report.environment,
            "num_nodes": report.num_nodes,
            "dtype": report.settings.dtype,
        }
        print(f"kept alpha and beta in {save_fits(kept, report.fits)}", file=human)


def command_of(options: CollectivesOptions, world_size: int) -> str:
    """What to type for the same measurement; without the places for its results."""
    words = ["gradsync", *_COMMAND, "--world-size", str(world_size)]
    left_out = ("world_size", "save", "csv", "out", "as_json")
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name not in left_out and value != entry.default:
            words += ["--" + entry.name.replace("_", "-"), str(value)]
    return shlex.join(words)
