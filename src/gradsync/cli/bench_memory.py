"""`gradsync bench memory`: what a rank's training takes, beside what the formulas say."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.memory_plan import MemoryCase, MemoryRun, memory_cases
from gradsync.bench.record import check_folder, write_record
from gradsync.cli.arguments import parse
from gradsync.cli.bench_sync import uses_cuda
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import STRATEGIES

if TYPE_CHECKING:
    from gradsync.world import World

_COMMAND = ("bench", "memory")
_EVERY_BLOCK_MAPPED = {
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_MMAP_MAX_": str(10**7),
    "MALLOC_TRIM_THRESHOLD_": str(2**16),
}
"""glibc then keeps nothing that is not used (mallopt(3))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """Train models with every strategy for a few steps, each case on new ranks of this host, and
    print the largest size of a rank beside what the formulas of `gradsync plan` say.
    """

    shapes: str = "long,wide"
    """long, wide, mini, small, with commas between them: models, of which one leaf is a sequence of
    512 tokens (wide: 128)."""
    strategies: str = "all"
    """Names with commas between them, or all."""
    world_size: int = 2
    """Ranks to start on this host."""
    steps: int = 4
    """Optimizer steps of a case, at least 2."""
    device: str = "auto"
    """auto, cpu or cuda."""
    exact: bool = False
    """CPU: map every block by itself, so that nothing is counted that is not used. Slow; the
    difference is the allocator's slack."""
    out: str = ""
    """Write record.json into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync bench memory ARGV`.

    Returns:
        0 when all was measured; 128 + signal after one.

    Raises:
        ConfigError: an unknown shape or strategy, numbers that cannot be, one rank of a launcher.
        RunError: ranks could not begin, results could not be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), _measure)
    options = parse(MemoryOptions, argv, "bench memory")
    cases = cases_of(options)
    world = resolve(environ.snapshot()).world
    if world.is_distributed:
        raise ConfigError(
            "bench memory starts new ranks for each case: run it as one process, without a launcher"
        )
    if options.out:
        check_folder("--out", Path(options.out))
    return until_stopped(world, lambda: _work(options, cases, world))


def cases_of(options: MemoryOptions) -> tuple[MemoryCase, ...]:
    """What was asked for.

    Raises:
        ConfigError: see `run`.
    """
    for name, least in (("world_size", 1), ("steps", 2)):
        if getattr(options, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least {least}; got {getattr(options, name)}")
    uses_cuda(options.device)  # refuses what is not there
    names = tuple(STRATEGIES) if options.strategies == "all" else _words(options.strategies)
    cases = tuple(memory_cases(_words(options.shapes), names))
    if not cases:
        raise ConfigError("--shapes and --strategies: name at least one of each")
    return cases


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _measure(run: dict[str, Any]) -> dict[str, Any]:
    """One rank's part; see `ranks.Measure`."""
    from gradsync.bench.memory_run import measure

    return measure(run)


def _work(options: MemoryOptions, cases: Sequence[MemoryCase], world: World) -> int:
    from gradsync.bench.memory_report import print_report, row_of
    from gradsync.bench.sync_worker import progress_bar

    rows, raw, environment = [], [], {}
    tell = progress_bar()
    with environ.exported(_EVERY_BLOCK_MAPPED if options.exact else {}):
        for number, case in enumerate(cases):
            tell(number, len(cases), f"{case.shape}: {case}")
            run = MemoryRun(case=case, device=options.device, steps=options.steps)
            outcome = measure_on_ranks(
                _COMMAND, run.to_json(), _measure, world=world, world_size=options.world_size
            )
            if outcome.result is None:
                return outcome.code
            environment = environment or outcome.result["environment"]
            rows.append(row_of(case, outcome.result))
            raw.append(
                {name: outcome.result[name] for name in ("kind", "keeps_memory", "peak_bytes")}
            )
    tell(len(cases), len(cases), "")
    human = sys.stderr if options.as_json else sys.stdout
    print_report(rows, environment=environment, stream=human)
    data = {"rows": [asdict(row) for row in rows], "cases": [asdict(c) for c in cases], "raw": raw}
    if options.as_json:
        print(json.dumps({"environment": environment, **data}, indent=1), flush=True)
    if options.out:
        path = write_record(
            Path(options.out),
            name="memory",
            command=command_of(options),
            environment=environment,
            data=data,
        )
        print(f"wrote {path}", file=human)
    return 0


def command_of(options: MemoryOptions) -> str:
    """What to type for the same measurement; without the places for its results."""
    words = ["gradsync", *_COMMAND]
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name in ("out", "as_json") or value == entry.default:
            continue
        flag = "--" + entry.name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
