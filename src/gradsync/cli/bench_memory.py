"""`gradsync bench memory`: what a rank's training takes, beside what the formulas say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.memory_choice import uses_cuda
from gradsync.bench.memory_plan import MemoryCase, MemoryRun, memory_cases, print_report, row_of
from gradsync.bench.report import progress_bar
from gradsync.cli.experiment import Ask, Experiment, Findings, command_of, flag_of
from gradsync.errors import ConfigError
from gradsync.runtime import environ
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


def cases_of(options: MemoryOptions, world: World) -> tuple[MemoryCase, ...]:
    """Check the request.

    Raises:
        ConfigError: an unknown shape or strategy, numbers that cannot be, one rank of a launcher.
    """
    for name, least in (("world_size", 1), ("steps", 2)):
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"{flag_of(name)} must be at least {least}; got {value}")
    uses_cuda(options.device)  # refuses what is not there
    names = tuple(STRATEGIES) if options.strategies == "all" else _words(options.strategies)
    cases = tuple(memory_cases(_words(options.shapes), names))
    if not cases:
        raise ConfigError("--shapes and --strategies: name at least one of each")
    if world.is_distributed:
        raise ConfigError(
            "bench memory starts new ranks for each case: run it as one process, without a launcher"
        )
    return cases


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _collect(
    options: MemoryOptions, cases: Sequence[MemoryCase], world: World, ask: Ask
) -> list[dict[str, Any]]:
    tell, found = progress_bar(), []
    with environ.exported(_EVERY_BLOCK_MAPPED if options.exact else {}):
        for number, case in enumerate(cases):
            tell(number, len(cases), f"{case.shape}: {case}")
            run = MemoryRun(case=case, device=options.device, steps=options.steps)
            found.append(ask(run, options.world_size))
    tell(len(cases), len(cases), "")
    return found


def _findings(
    options: MemoryOptions,
    cases: Sequence[MemoryCase],
    results: Sequence[Mapping[str, Any]],
    world: World,
) -> Findings:
    rows = [row_of(case, result) for case, result in zip(cases, results, strict=True)]
    environment = results[0]["environment"]
    kept = ("kind", "keeps_memory", "peak_bytes")
    return Findings(
        environment=environment,
        command=command_of(options, _COMMAND),
        data={
            "rows": [asdict(row) for row in rows],
            "cases": [asdict(case) for case in cases],
            "raw": [{name: result[name] for name in kept} for result in results],
        },
        show=partial(print_report, rows, environment),
    )


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=MemoryOptions,
    measure="gradsync.bench.memory_run:measure",
    variants=cases_of,
    collect=_collect,
    metrics=_findings,
)
run = EXPERIMENT.run
