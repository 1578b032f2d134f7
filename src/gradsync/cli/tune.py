"""`gradsync tune`: measure which way to synchronise is fastest here, and remember it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gradsync.bench.memory_choice import fits
from gradsync.bench.record import check_folder, write_record
from gradsync.bench.sync_plan import SyncSettings
from gradsync.bench.tune_plan import STAGES, TuneRequest
from gradsync.cli.arguments import parse
from gradsync.cli.bench_sync import command_of, memory_for, size_of, uses_cuda
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.errors import ConfigError, RunError
from gradsync.models.presets import preset
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.runtime.text_file import json_text, write_text
from gradsync.runtime.threads import choose_threads
from gradsync.train.auto_sync import conditions_of, vocabulary
from gradsync.train.config import TrainConfig
from gradsync.train.recipes import recipe
from gradsync.train.tuned import (
    Choice,
    Conditions,
    Tuned,
    tuned_document,
    tuned_folder,
    tuned_path,
)
from gradsync.world import World

_COMMAND = ("tune",)
_SIDE_BY_SIDE = 10
"""Models that the largest stage holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """Measure strategies, collectives, sizes of buckets and, on request, compilation for one model
    on this machine; `gradsync train --sync auto` takes what was found.

    Candidates take turns, and only what is faster beyond the noise takes the default's place. Sizes
    that are not given are those of `gradsync train MODEL`. Started by torchrun, mpirun or srun, it
    measures these ranks.
    """

    model: Annotated[str, tyro.conf.Positional] = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b."""
    world_size: int = 2
    """Ranks to start on this host."""
    promise: str = "bitwise"
    """What a strategy must promise at least: bitwise (one rank's bits on any number of ranks), or
    rounding (one rank's numbers but for the order of sums)."""
    dtype: Literal["fp32", "bf16"] | None = None
    """fp32, or bf16 (autocast over fp32 weights)."""
    batch_size: int | None = None
    """Sequences per rank and step."""
    leaves_per_rank: int | None = None
    """Micro-batches into which these are divided."""
    context_length: int | None = None
    """Tokens of a sequence."""
    data: str = ""
    """Directory with train.bin, for the vocabulary; default: the built-in text's."""
    num_steps: int = 5
    """Optimizer steps of a turn that count."""
    num_warmup: int = 1
    """Optimizer steps of a turn before those."""
    rounds: int = 12
    """Turns of each candidate."""
    threads: int | None = None
    """Intra-op threads of a rank; default: as `gradsync train` has it, 1 on a CPU."""
    device: str = "auto"
    """auto, cpu or cuda."""
    keep_memory: bool = True
    """CPU: what a step frees stays in the process, as in `gradsync train`."""
    compile: bool = False
    """Try torch.compile too (changes bits; `--sync auto` then compiles)."""
    seed: int = 0
    """Names tokens and weights."""
    out: str = ""
    """Write record.json, with every sample, into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; tables go to standard error."""
    dry_run: bool = False
    """Only say what would be measured."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync tune ARGV`.

    Returns:
        0 when all was measured, whatever the verdict; 128 + signal after one.

    Raises:
        ConfigError: an unknown model, numbers that cannot be, one that does not fit into memory, a
            cache or a folder that may not be written.
        DataError: the data's description cannot be read.
        RunError: ranks could not begin, a candidate does not train, the cache cannot be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), _measure)
    options = parse(TuneOptions, argv, "tune")
    world = resolve(environ.snapshot()).world
    request = request_of(options, world)
    if options.out and world.is_main:
        check_folder("--out", Path(options.out))
    if options.dry_run:
        if world.is_main:
            print(json.dumps({"request": request.to_json(), "stages": STAGES}, indent=1))
        return 0
    if world.is_main:
        check_folder("GRADSYNC_CACHE", tuned_folder())
    return until_stopped(world, lambda: _work(options, request, world))


def request_of(options: TuneOptions, world: World) -> TuneRequest:
    """What was asked for; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
        DataError: see `run`.
    """
    preset(options.model)
    start = recipe(options.model)
    for name in ("world_size", "batch_size", "leaves_per_rank", "context_length", "threads"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    if options.data and not Path(options.data).is_dir():
        raise ConfigError(f"--data {options.data} is no directory")
    world_size = world.world_size if world.is_distributed else options.world_size
    local = world.local_world_size if world.is_distributed else world_size
    batch, leaves = batch_of(options, start, world_size)
    on_cuda = uses_cuda(options.device)
    settings = SyncSettings(
        model_size=options.model,
        vocab_size=vocabulary(options.data) or preset(options.model).vocab_size,
        context_length=options.context_length or start.sequence_length,
        num_steps=options.num_steps,
        num_warmup=options.num_warmup,
        rounds=options.rounds,
        leaves_per_rank=leaves,
        dtype=options.dtype or start.dtype,
        threads=choose_threads(local, requested=options.threads or (None if on_cuda else 1)),
        device=options.device,
        seed=options.seed,
    )
    load, room = memory_for(
        options.device,
        leaf_tokens=batch // leaves * settings.tokens,
        ranks=local,
        busy_ranks=local,
    )
    size_of(options.model, load, room)
    together = replace(load, contestants=_SIDE_BY_SIDE)
    return TuneRequest(
        settings=replace(settings, side_by_side=fits(settings.config, together, room)),
        batch_size=batch,
        world_size=world_size,
        promise=options.promise,
        keep_memory=options.keep_memory,
        compile=options.compile,
    )


def batch_of(options: TuneOptions, start: TrainConfig, world_size: int) -> tuple[int, int]:
    """Sequences and leaves of a rank and step: given, or those of `gradsync train MODEL`.

    Raises:
        ConfigError: a batch that does not divide into leaves; more ranks than the model's recipe
            has leaves.
    """
    micro = start.micro_batch_size
    batch, leaves = options.batch_size, options.leaves_per_rank
    if batch is None and leaves is None:
        try:
            num_leaves = start.batch_plan(world_size).num_leaves
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


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    """One rank's part; see `ranks.Measure`."""
    from gradsync.bench.tune_worker import measure

    return measure(request)


def _work(options: TuneOptions, request: TuneRequest, world: World) -> int:
    outcome = measure_on_ranks(
        _COMMAND, request.to_json(), _measure, world=world, world_size=request.world_size
    )
    if outcome.result is None:
        return outcome.code
    if "failed" in outcome.result:
        kind = ConfigError if outcome.result["exit_code"] == ConfigError.exit_code else RunError
        raise kind(outcome.result["failed"])
    _tell(options, request, outcome.result)
    return 0


def _tell(options: TuneOptions, request: TuneRequest, result: Mapping[str, Any]) -> None:
    from gradsync.bench.tune_report import print_report

    human = sys.stderr if options.as_json else sys.stdout
    print_report(request, result["stages"], result["environment"], human)
    choice = Choice(**result["choice"])
    conditions = measured_conditions(options, request, result)
    tuned = Tuned(choice=choice, verdict=verdict_of(result), date=result["environment"]["date"])
    command = command_text(replace(options, world_size=request.world_size))
    data = {
        "request": request.to_json(),
        "choice": result["choice"],
        "stages": result["stages"],
        "cache": str(tuned_path(conditions)),
    }
    if options.as_json:
        document = {"environment": result["environment"], "command": command, **data}
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    if options.out:
        record = write_record(
            Path(options.out),
            name="tune",
            command=command,
            environment=result["environment"],
            data={**data, "samples": result["samples"]},
        )
        print(f"wrote {record}", file=human)
    path = save(conditions, tuned)  # last: where it fails, everything else is there
    print(f"best here: {choice.text}; kept in {path} for gradsync train --sync auto", file=human)


def command_text(options: TuneOptions) -> str:
    """What to type for the same measurement; without the places for its results."""
    flags = replace(options, model=TuneOptions().model, keep_memory=True)
    text = command_of(flags, (*_COMMAND, options.model))
    return text if options.keep_memory else f"{text} --no-keep-memory"


def verdict_of(result: Mapping[str, Any]) -> str:
    """What the stages that were measured came to, in one line."""
    return "; ".join(s["decision"]["words"] for s in result["stages"] if "decision" in s)


def measured_conditions(
    options: TuneOptions, request: TuneRequest, result: Mapping[str, Any]
) -> Conditions:
    """Those of a training run whose steps are like the measured ones."""
    settings = request.settings
    leaves = settings.leaves_per_rank
    micro = request.batch_size // leaves
    start = recipe(options.model)
    run = replace(
        start,
        seq_len=settings.tokens,
        micro_batch_size=micro,
        tokens_per_update=micro * settings.tokens * leaves * request.world_size,
        dtype=options.dtype or start.dtype,
        data=options.data,
        keep_memory=options.keep_memory,
    )
    nodes = result["num_nodes"]
    world = World(
        world_size=request.world_size,
        local_world_size=request.world_size if nodes == 1 else 1,
        num_nodes=nodes,
        device=result["device"],
    )
    return conditions_of(run, world, threads=settings.threads)


def save(conditions: Conditions, tuned: Tuned) -> Path:
    """Keep it in the place of what was there; returns where.

    Raises:
        RunError: the cache cannot be written.
    """
    path = tuned_path(conditions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(tuned_document(conditions, tuned)))
    except OSError as error:
        raise RunError(
            f"could not write {path}: {error.strerror}; GRADSYNC_CACHE can name another cache"
        ) from error
    return path
