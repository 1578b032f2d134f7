"""`gradsync bench collectives`: what collectives cost here, beside the memory's own bandwidth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.collectives_plan import (
    ALGORITHMS,
    OPERATIONS,
    Settings,
    check_settings,
    parse_size,
)
from gradsync.bench.memory_choice import uses_cuda
from gradsync.cli.experiment import Experiment, Findings, command_of
from gradsync.errors import ConfigError

if TYPE_CHECKING:
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


def plan_of(options: CollectivesOptions, world: World) -> Settings:
    """Check the request.

    Raises:
        ConfigError: an unknown operation, algorithm, dtype or size, one rank.
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


def _findings(
    options: CollectivesOptions, settings: Settings, result: dict[str, Any], world: World
) -> Findings:
    from gradsync.bench.collectives_report import Report, print_report, report_csv
    from gradsync.plan.collectives import save_fits

    report = Report.of(settings, result)

    def keep() -> str:
        about = {"num_nodes": report.num_nodes, "dtype": settings.dtype}
        kept = save_fits({**report.environment, **about}, report.fits)
        return f"kept alpha and beta in {kept}"

    return Findings(
        environment=report.environment,
        command=command_text(options, report.environment["world_size"]),
        data=report.data(),
        samples=result["samples"],
        show=partial(print_report, report),
        csv=partial(report_csv, report),
        keep=keep if options.save and report.fits else None,
        code=1 if report.wrong else 0,
    )


def command_text(options: CollectivesOptions, world_size: int) -> str:
    """The command line for the same measurement, at the number of ranks that there were."""
    flags = replace(options, world_size=CollectivesOptions().world_size)
    return command_of(flags, (*_COMMAND, "--world-size", str(world_size)))


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=CollectivesOptions,
    measure="gradsync.bench.collectives_measure:measure",
    variants=plan_of,
    collect=lambda options, settings, world, ask: ask(settings, options.world_size),
    metrics=_findings,
)
run = EXPERIMENT.run
