"""`gradsync bench sync`: a training step of every strategy, beside its peers and the ideal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.contestant import left_out, parse_contestants, with_ideals
from gradsync.bench.memory_choice import memory_for, size_of, uses_cuda
from gradsync.bench.sync_plan import Plan, fitting, in_time, settings_of, sync_plan, trial_step
from gradsync.cli.experiment import Ask, Experiment, Findings, command_of, flag_of
from gradsync.errors import ConfigError
from gradsync.models.presets import PRESETS
from gradsync.plan.description import multiplies_bf16
from gradsync.plan.machine import read_processor
from gradsync.runtime.threads import choose_threads

if TYPE_CHECKING:
    from gradsync.world import World

_COMMAND = ("bench", "sync")
_USUAL_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """Time training steps of a GPT on random tokens: strategies of gradsync, torch DDP, Accelerate
    and Fabric as their users run them, and `none`, which talks to nobody.

    All ranks hold all contestants, which take turns; each one's step is compared with `none` of the
    same round. Before that, each is checked: it must train, and give the losses that it should.
    Started by torchrun, mpirun or srun, it measures these ranks.
    """

    model_size: str = "auto"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b; auto takes the largest that fits into
    memory and takes less than three minutes here, as a few timed steps say (under a launcher, into
    memory)."""
    world_size: int = 2
    """Ranks to start on this host."""
    strategies: str = "default"
    """Names with commas between them, each with options if need be: naive,bucketed:bucket_mb=1.
    Beside the strategies there are torch_ddp, accelerate and fabric; `default` and `all` stand for
    several. none is always there."""
    num_steps: int = 10
    """Optimizer steps of a turn that count."""
    num_warmup: int = 2
    """Optimizer steps of a turn before those."""
    rounds: int = 5
    """Turns of each contestant."""
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    batch_size: int = 1
    """Sequences per rank and step."""
    leaves_per_rank: int = 1
    """Micro-batches into which these are divided."""
    dtype: str = "auto"
    """fp32, bf16 (autocast over fp32 weights), or auto: bf16, except where a CPU emulates it."""
    bucket_mb: float | None = None
    """Size of buckets, of whoever has some; default: each contestant's own. MiB."""
    threads: int | None = None
    """Intra-op threads of a rank; default: cores / ranks."""
    device: str = "auto"
    """auto, cpu or cuda."""
    same_allocator: bool = False
    """All keep freed memory in the process, as gradsync does; default: torch_ddp, accelerate and
    fabric run with the system's own setting, beside a `none` that does so too."""
    seed: int = 0
    """Names tokens and weights."""
    csv: str = ""
    """Write one row per contestant to this file."""
    plot: str = ""
    """Draw a picture: FILE.png, FILE.svg or FILE.pdf."""
    out: str = ""
    """Write record.json, with every sample, into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False
    """Only say what would be measured."""


def plan_of(options: SyncOptions, world: World) -> Plan:
    """Check the request; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
    """
    chosen = parse_contestants(options.strategies)
    world_size = world.world_size if world.is_distributed else options.world_size
    for name in ("world_size", "batch_size", "leaves_per_rank"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{flag_of(name)} must be at least 1; got {getattr(options, name)}")
    for each in chosen:
        if options.same_allocator and each.chose_memory and not each.keep_memory:
            raise ConfigError(f"--same-allocator: all keep freed memory, and {each.label} does not")
    # Only ranks of our own can be started twice, once for each setting of the allocator.
    one_set = options.same_allocator or world.is_distributed or uses_cuda(options.device)
    contestants = with_ideals(chosen, same_allocator=one_set)
    local = world.local_world_size if world.is_distributed else world_size
    sets = len({each.keep_memory for each in contestants})
    tokens = options.context_length or _USUAL_TOKENS
    load, room = memory_for(
        options.device,
        leaf_tokens=options.batch_size // options.leaves_per_rank * tokens,
        ranks=local * sets,
        busy_ranks=local,
    )
    settings = settings_of(
        options,
        dtype=_dtype_of(options),
        model_size=size_of(options.model_size, load, room),
        threads=choose_threads(local, requested=options.threads),
    )
    plan = sync_plan(settings, contestants, world_size=world_size, batch_size=options.batch_size)
    if options.model_size == "auto" and not world.is_distributed:
        plan = in_time(plan, load.kind, partial(trial_step, ranks_per_host=local))
    most = max(sum(e.worker_set == n for e in plan.entries) for n in range(len(plan.sets)))
    # The one under way is there twice.
    return fitting(plan, load, room, contestants=most + 1)


def _dtype_of(options: SyncOptions) -> str:
    if options.dtype != "auto":
        return options.dtype
    fast = uses_cuda(options.device) or multiplies_bf16(read_processor().instructions)
    return "bf16" if fast else "fp32"


def as_measured(options: SyncOptions, world: World) -> SyncOptions:
    """The options that measure the same again, without a launcher."""
    if not world.is_distributed:
        return options
    return replace(options, world_size=world.world_size, same_allocator=True)


def _collect(
    options: SyncOptions, plan: Plan, world: World, ask: Ask
) -> Sequence[Mapping[str, Any]]:
    if world.is_main:
        for line in _decided(options, plan, world):
            print(f"gradsync: {line}", file=sys.stderr)
    return ask(plan, plan.num_ranks)["results"]


def _decided(options: SyncOptions, plan: Plan, world: World) -> list[str]:
    """Decisions made for the user, one line each."""
    lines = [
        f"{name} is left out: its package is not installed (pip install 'gradsync[bench]')"
        for name in left_out(options.strategies)
    ]
    if options.dtype == "auto" and plan.settings.dtype == "fp32":
        lines.append(
            "dtype fp32: this processor emulates bf16; --dtype bf16 measures it all the same"
        )
    others = any(not entry.contestant.is_ours for entry in plan.entries[1:])
    if world.is_distributed and others and not options.same_allocator:
        lines.append(
            f"under {world.launcher} there is one set of ranks: all contestants keep freed memory "
            "(as with --same-allocator)"
        )
    if options.model_size == "auto":
        name = plan.settings.model_size
        millions = PRESETS[name].num_params() / 1e6
        done = "" if world.is_distributed else " and is done in three minutes"
        lines.append(
            f"model size {name} ({millions:.0f} M parameters), the largest that fits{done}; "
            "--model-size takes another"
        )
    return lines


def _findings(
    options: SyncOptions, plan: Plan, results: Sequence[Mapping[str, Any]], world: World
) -> Findings:
    from gradsync.bench.plot import plot_sync
    from gradsync.bench.sync_result import print_report, rows_csv, rows_of

    environment, rows = results[0]["environment"], rows_of(plan, results)
    return Findings(
        environment=environment,
        command=command_of(as_measured(options, world), _COMMAND),
        data={"plan": asdict(plan), "rows": [row.as_json() for row in rows]},
        samples=[result["contestants"] for result in results],
        show=partial(print_report, plan, rows, environment),
        csv=partial(rows_csv, plan, rows),
        draw=lambda path: plot_sync(path, plan, rows, environment),
    )


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=SyncOptions,
    measure="gradsync.bench.sync_run:measure",
    variants=plan_of,
    collect=_collect,
    metrics=_findings,
)
run = EXPERIMENT.run
