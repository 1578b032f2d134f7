"""`gradsync tune`: measure which way to synchronise is fastest here, and save the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro

from gradsync.commands.bench.experiment import (
    Ask,
    Experiment,
    Findings,
    check_least,
    command_of,
    raise_failed,
    taken,
)
from gradsync.commands.bench.sync_plan import SyncSettings, room_for, uses_cuda
from gradsync.commands.bench.tune import STAGES, TuneRequest, print_report
from gradsync.commands.cli.experiment import run_experiment
from gradsync.commands.models.config import preset
from gradsync.commands.plan.machine import fast_dtype
from gradsync.commands.plan.measured import Conditions
from gradsync.commands.train.config import TrainConfig, recipe
from gradsync.commands.train.data import vocabulary
from gradsync.commands.train.tuned import TUNED, Tuned, TunedStrategy, conditions_of
from gradsync.core.files import check_place
from gradsync.errors import ConfigError
from gradsync.runtime.machine import choose_threads
from gradsync.world import World

_COMMAND = ("tune",)
_SIDE_BY_SIDE = 10  # models that the largest stage holds


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """Measure strategies, collectives, bucket sizes and, on request, compilation for one model on
    this machine; `gradsync train` with `sync: auto` uses the result.

    Candidates take turns; one replaces the default only if it is faster beyond the noise. Sizes
    default to those of `gradsync train MODEL`. Under torchrun, mpirun or srun, it measures the
    launched ranks.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b."""
    world_size: int = 2  # Ranks to start on this host.
    promise: str = "bitwise"
    """The weakest promise to accept: bitwise (one rank's bits on any number of ranks), or rounding
    (one rank's numbers except for the order of sums)."""
    dtype: Literal["fp32", "bf16"] | None = None
    """fp32, or bf16 (autocast over fp32 weights); default: that of `gradsync train`."""
    batch_size: int | None = None  # Sequences per rank and step; default: as in `gradsync train`.
    leaves_per_rank: int | None = None
    """Micro-batches into which these are divided; default: as in `gradsync train`."""
    context_length: int | None = None  # Tokens of a sequence; default: the model's.
    data: str = ""  # Directory with train.bin, for the vocabulary; default: the built-in text's.
    num_steps: int = 5  # Measured optimizer steps per turn.
    rounds: int = 12  # Turns of each candidate.
    threads: int | None = None
    """Intra-op threads of a rank; default: that of `gradsync train`, 1 on a CPU."""
    device: str = "auto"  # auto, cpu or cuda.
    compile: bool = False  # Try torch.compile too (changes bits; `sync: auto` then compiles).
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; tables go to standard error."""
    dry_run: bool = False  # Only say what would be measured.


def request_of(options: TuneOptions, world: World) -> TuneRequest:
    """Check the request; under a launcher, at its number of ranks."""
    preset(options.model)
    start = recipe(options.model)
    check_least(options, world_size=1, batch_size=1, leaves_per_rank=1, context_length=1, threads=1)
    if options.data and not Path(options.data).is_dir():
        raise ConfigError(f"--data {options.data} is no directory")
    world_size = world.world_size if world.is_distributed else options.world_size
    local = world.local_world_size if world.is_distributed else world_size
    batch, leaves = batch_of(options, start, world_size)
    on_cuda = uses_cuda(options.device)
    settings = taken(
        SyncSettings,
        options,
        model_size=options.model,
        vocab_size=vocabulary(options.data) or preset(options.model).vocab_size,
        context_length=options.context_length or start.sequence_length,
        leaves_per_rank=leaves,
        dtype=options.dtype or fast_dtype(options.device),
        num_warmup=1,
        threads=choose_threads(local, requested=options.threads or (None if on_cuda else 1)),
    )
    tokens = batch // leaves * settings.tokens
    room = room_for(options.device, tokens, ranks=local, busy=local)
    room.choose(options.model)
    stays = room.fits(settings.config, contestants=_SIDE_BY_SIDE)
    return TuneRequest(
        settings=replace(settings, side_by_side=stays),
        batch_size=batch,
        world_size=world_size,
        promise=options.promise,
        compile=options.compile,
    )


def batch_of(options: TuneOptions, start: TrainConfig, world_size: int) -> tuple[int, int]:
    """Sequences and leaves of a rank and step: given, or those of `gradsync train MODEL`."""
    micro = start.micro_batch_size
    batch, leaves = options.batch_size, options.leaves_per_rank
    if batch is None and leaves is None:
        try:
            num_leaves = start.batch_plan(world_size).num_micro_batches
        except ConfigError as error:
            raise ConfigError(
                f"gradsync train {options.model} divides its batch among fewer ranks than "
                f"{world_size}; give --batch-size or --leaves-per-rank"
            ) from error
        leaves = -(-num_leaves // world_size)
    if leaves is None:
        assert batch is not None
        leaves = batch // micro if batch % micro == 0 else 1
    batch = leaves * micro if batch is None else batch
    if batch % leaves:
        raise ConfigError(f"--batch-size {batch} does not divide into {leaves} leaves")
    return batch, leaves


def _collect(options: TuneOptions, request: TuneRequest, world: World, ask: Ask) -> dict[str, Any]:
    if world.is_main:
        check_place("GRADSYNC_CACHE", TUNED.folder(), folder=True)
    result = ask(request, request.world_size)
    raise_failed(result)
    return result


def _findings(
    options: TuneOptions, request: TuneRequest, result: dict[str, Any], world: World
) -> Findings:
    choice = TunedStrategy(**result["choice"])
    conditions = measured_conditions(options, request, result)
    tuned = Tuned(choice=choice, verdict=verdict_of(result), date=result["environment"]["date"])

    def keep() -> str:
        path = TUNED.save(conditions, tuned)
        return f"best here: {choice.text}; kept in {path} for gradsync train --sync auto"

    return Findings(
        environment=result["environment"],
        command=command_text(replace(options, world_size=request.world_size)),
        data={
            "request": asdict(request),
            "choice": result["choice"],
            "stages": result["stages"],
            "cache": str(TUNED.path(conditions)),
        },
        samples=result["samples"],
        show=partial(print_report, request, result["stages"], result["environment"]),
        keep=keep,
    )


def command_text(options: TuneOptions) -> str:
    """The command line for the same measurement, without its output flags."""
    flags = replace(options, model=TuneOptions().model)
    return command_of(flags, (*_COMMAND, options.model))


def verdict_of(result: Mapping[str, Any]) -> str:
    """Result of the measured stages, in one line."""
    return "; ".join(s["decision"]["words"] for s in result["stages"] if "decision" in s)


def measured_conditions(
    options: TuneOptions, request: TuneRequest, result: Mapping[str, Any]
) -> Conditions:
    """Conditions of a training run whose steps are like the measured ones."""
    settings = request.settings
    leaves, dtype = settings.leaves_per_rank, cast(Any, settings.dtype)
    micro = request.batch_size // leaves
    start = recipe(options.model)
    run = replace(
        start,
        seq_len=settings.tokens,
        micro_batch_size=micro,
        tokens_per_update=micro * settings.tokens * leaves * request.world_size,
        dtype=dtype,
        data=options.data,
        keep_memory=True,
    )
    nodes = result["num_nodes"]
    world = World(
        world_size=request.world_size,
        local_world_size=request.world_size if nodes == 1 else 1,
        num_nodes=nodes,
        device_name=result["device"],
    )
    return conditions_of(run, world, threads=settings.threads)


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=TuneOptions,
    measure="gradsync.commands.bench.tune:measure",
    variants=request_of,
    collect=_collect,
    metrics=_findings,
    dry=lambda request: {"request": asdict(request), "stages": STAGES},
)
run = partial(run_experiment, EXPERIMENT)
