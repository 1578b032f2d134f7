"""`gradsync bench sync`: a training step of every strategy, compared with other libraries and with
the ideal; docs/guide/verifying.md explains the figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import IO, TYPE_CHECKING, Annotated

import tyro

from gradsync.commands.bench import host
from gradsync.commands.bench.contestants import left_out, parse_contestants, with_ideals
from gradsync.commands.bench.experiment import (
    Ask,
    Experiment,
    Findings,
    check_least,
    command_of,
    taken,
)
from gradsync.commands.bench.report import Spread, csv_text, print_table, ratios, spread, where
from gradsync.commands.bench.sync_plan import (
    BUDGET_S,
    USUAL_TOKENS,
    BenchPlan,
    Entry,
    Results,
    SyncSettings,
    bench_plan,
    duration,
    in_time,
    room_for,
    step_seconds,
    trial_step,
    uses_cuda,
)
from gradsync.commands.models.config import PRESETS
from gradsync.commands.plan.machine import fast_dtype
from gradsync.runtime.machine import choose_threads

if TYPE_CHECKING:
    from gradsync.world import World

_COMMAND = ("bench", "sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """Time training steps of a GPT on random tokens: strategies of gradsync, torch DDP, Accelerate
    and Fabric as their users run them, and `none`, which does not communicate.

    All ranks hold all contestants, which take turns. Each step is compared with `none` of the same
    round, and torch_ddp, accelerate and fabric with a `none` that, as they do, gives freed memory
    back. A check comes first: each contestant must train and give the expected losses. Under
    torchrun, mpirun or srun, it measures the launched ranks.
    """

    model_size: str = "auto"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b. auto takes the largest that fits into
    memory and takes less than three minutes here, estimated from a few timed steps (under a
    launcher, only memory counts). If even the smallest takes longer, it takes fewer turns."""
    world_size: int = 2  # Ranks to start on this host.
    strategies: str = "default"
    """Names separated by commas, each optionally with options: naive,bucketed:bucket_mb=1. Besides
    the strategies: torch_ddp, accelerate and fabric; `default` and `all` stand for several. none is
    always included."""
    num_steps: int = 10  # Measured optimizer steps per turn.
    num_warmup: int = 2  # Optimizer steps before those, not measured.
    rounds: int = 5  # Turns of each contestant.
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    batch_size: int = 1  # Sequences per rank and step.
    leaves_per_rank: int = 1  # Micro-batches into which these are divided.
    dtype: str = "auto"
    """fp32, bf16 (autocast over fp32 weights), or auto: bf16, except where a CPU emulates it."""
    threads: int | None = None  # Intra-op threads of a rank; default: cores / ranks.
    device: str = "auto"  # auto, cpu or cuda.
    host: bool = False
    """Measure what a step costs the host: the model's tensors and buckets, 8 wide, so that
    computing costs nothing. Counts operations and calls, and lists the slowest functions. `default`
    stands for torch_ddp, bucketed and invariant, in both loops, and auto for small."""
    csv: str = ""  # Write one row per contestant to this file.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False  # Only say what would be measured.


def plan_of(options: SyncOptions, world: World) -> BenchPlan:
    """Check the request; under a launcher, at its number of ranks."""
    if options.host:
        options = _for_host(options)
    chosen = parse_contestants(options.strategies)
    world_size = world.world_size if world.is_distributed else options.world_size
    check_least(options, world_size=1, batch_size=1, leaves_per_rank=1, context_length=1)
    # Only ranks that we start can run twice, once for each allocator setting.
    one_set = options.host or world.is_distributed or uses_cuda(options.device)
    contestants = with_ideals(chosen, same_allocator=one_set)
    local = world.local_world_size if world.is_distributed else world_size
    sets, tokens = (
        {each.keep_memory for each in contestants},
        options.context_length or USUAL_TOKENS,
    )
    tokens *= options.batch_size // options.leaves_per_rank
    room = room_for(options.device, tokens, ranks=local * len(sets), busy=local)
    settings = taken(
        SyncSettings,
        options,
        dtype=_dtype_of(options),
        model_size=options.model_size if options.host else room.choose(options.model_size),
        threads=choose_threads(local, requested=options.threads),
    )
    plan = bench_plan(settings, [(each, world_size, options.batch_size) for each in contestants])
    if options.model_size == "auto" and not world.is_distributed:
        plan = in_time(plan, room.kind, partial(trial_step, ranks_per_host=local))
    most = max(sum(e.worker_set == n for e in plan.entries) for n in range(len(plan.sets)))
    # The contestant that runs exists twice.
    return plan.fitting(room, contestants=most + 1)


def _for_host(options: SyncOptions) -> SyncOptions:
    """The request as `--host` measures it."""
    size = "small" if options.model_size == "auto" else options.model_size
    mine = options.strategies == "default"
    return replace(
        options,
        model_size=size,
        strategies=host.CONTESTANTS if mine else options.strategies,
        context_length=options.context_length or host.TOKENS,
        dtype="fp32" if options.dtype == "auto" else options.dtype,
    )


def _dtype_of(options: SyncOptions) -> str:
    if options.dtype != "auto":
        return options.dtype
    return fast_dtype("cuda" if uses_cuda(options.device) else "cpu")


def as_measured(options: SyncOptions, world: World) -> SyncOptions:
    """The options that repeat the measurement without a launcher."""
    if not world.is_distributed:
        return options
    return replace(options, world_size=world.world_size)


def _collect(options: SyncOptions, plan: BenchPlan, world: World, ask: Ask) -> Results:
    if world.is_main:
        for line in _decided(options, plan, world):
            print(f"gradsync: {line}", file=sys.stderr)
    return plan.measured(ask)


def _decided(options: SyncOptions, plan: BenchPlan, world: World) -> list[str]:
    """Decisions made for the user, one line each."""
    lines = [
        f"{name} is left out: its package is not installed (pip install 'gradsync[bench]')"
        for name in left_out(options.strategies)
    ]
    if options.host:
        return []
    if options.dtype == "auto" and plan.settings.dtype == "fp32":
        lines.append(
            "dtype fp32: this processor emulates bf16; --dtype bf16 measures it all the same"
        )
    others = any(not entry.contestant.is_ours for entry in plan.entries[1:])
    if world.is_distributed and others:
        lines.append(
            f"under {world.launcher} there is one set of ranks: all contestants keep freed memory"
        )
    if options.model_size == "auto":
        name, done = plan.settings.model_size, plan.takes_s <= BUDGET_S
        millions = PRESETS[name].num_params() / 1e6
        why = "the largest that fits" + (" and is done in three minutes" if plan.takes_s else "")
        lines.append(
            f"model size {name} ({millions:.0f} M parameters), {why if done else 'the smallest'}; "
            "--model-size takes another"
        )
        if plan.settings.rounds < options.rounds or plan.settings.num_steps < options.num_steps:
            lines.append(
                f"{plan.settings.turns_text}, since steps are slow here; --rounds and --num-steps "
                "take others"
            )
        if not done:
            lines.append(
                f"its steps take about {duration(plan.takes_s)}, with the ranks' start more than "
                "three minutes"
            )
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestantRow:
    """One contestant."""

    contestant: str
    keep_memory: bool  # whether its processes did keep freed memory; not every system allows it
    total_ms: Spread  # a step, on the slowest rank (see `turns`); over rounds
    compute_ms: float  # forward and backward of it, up to the last gradient
    comm_ms: float | None  # in collectives, without overlap; None: not visible
    exposed_ms: float  # what the step takes beyond `none`'s of the same round
    ratio: Spread  # the step over `none`'s, over rounds
    num_comm_ops: float  # operations of a rank in a step; a batch of messages is one
    comm_bytes: float  # sent on sockets by a rank in a step; shared memory does not count
    tokens_per_s: float  # tokens of all ranks
    memory_bytes: int | None  # peak above the process's start, of the rank with the most
    final_loss: float  # after the check's steps
    comm_fraction: float | None  # communication in units of the step
    exposed_fraction: float  # the part of the step that is exposed communication


def rows_of(plan: BenchPlan, results: Results) -> list[ContestantRow]:
    """One row per entry of the plan."""
    return [_row(plan, entry, results) for entry in plan.entries]


def _row(plan: BenchPlan, entry: Entry, results: Results) -> ContestantRow:
    ranks = plan.ranks(results, entry)
    own, ideal = step_seconds(ranks), step_seconds(plan.ranks(results, plan.ideal_of(entry)))
    beyond = median(mine - best for mine, best in zip(own, ideal, strict=True))
    total = spread([1000 * seconds for seconds in own])
    tokens = len(ranks) * entry.batch_size * plan.settings.tokens
    times = [rank["comm_s"] for rank in ranks]
    comm_ms = None if None in times else 1000 * max(times)
    exposed_ms = max(1000 * beyond, 0.0)
    memory = [rank["memory_bytes"] for rank in ranks]
    return ContestantRow(
        contestant=entry.label,
        keep_memory=results[entry.worker_set]["keeps_memory"],
        total_ms=total,
        compute_ms=1000 * median(step_seconds(ranks, "compute_s")),
        comm_ms=comm_ms,
        comm_fraction=None if comm_ms is None else comm_ms / total.median,
        exposed_ms=exposed_ms,
        exposed_fraction=exposed_ms / total.median,
        ratio=spread(ratios(own, ideal)),
        num_comm_ops=fmean(rank["operations"] for rank in ranks),
        comm_bytes=fmean(rank["sent_bytes"] for rank in ranks),
        tokens_per_s=tokens / total.median * 1000,
        memory_bytes=None if None in memory else max(memory),
        final_loss=ranks[0]["losses"][-1],
    )


_COLUMNS = (
    *("contestant", "keeps memory", "step, ms", "to none", "forward + backward, ms"),
    *("communication, ms", "exposed, ms", "operations", "sent, MB", "tokens/s", "memory, MB"),
)
STEP_LEGEND = (
    "step: each rank's mean over a turn, of these the slowest rank's; median (quartiles) over "
    "rounds. to none: the same over "
)
_LEGEND = (
    f"{STEP_LEGEND}`none` of the same round and allocator setting. forward + backward: until the "
    "last gradient. communication: in collectives, if nothing hides them (- : cannot be seen from "
    "outside). exposed: what the step takes beyond `none`'s. sent: by a rank, through sockets. "
    "memory: peak of a rank above its start, pages shared by ranks counted in each."
)


def _cells(row: ContestantRow) -> tuple[str, ...]:
    return (
        row.contestant,
        "yes" if row.keep_memory else "no",
        row.total_ms.text(1),
        row.ratio.text(3),
        f"{row.compute_ms:.1f}",
        "-" if row.comm_ms is None else f"{row.comm_ms:.1f}",
        f"{row.exposed_ms:.1f} ({row.exposed_fraction:.0%})",
        f"{row.num_comm_ops:.3g}",
        f"{row.comm_bytes / 1e6:.2f}",
        f"{row.tokens_per_s:,.0f}",
        "-" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}",
    )


def title(plan: BenchPlan) -> str:
    """The measurement, in one line."""
    settings, first = plan.settings, plan.entries[0]
    leaves = f", {settings.leaves_per_rank} leaves" if settings.leaves_per_rank > 1 else ""
    return (
        f"{settings.model_text}, {plan.sets[first.worker_set].world_size} ranks x "
        f"{first.batch_size} x {settings.tokens} tokens a step{leaves}; {settings.turns_text}"
    )


def rows_csv(plan: BenchPlan, rows: Sequence[ContestantRow]) -> str:
    """A header and a line for each row; unmeasured values are empty. The first eight columns are
    the same as in other benchmarks."""
    settings = plan.settings
    return csv_text(
        [
            {
                "model_size": settings.model_size,
                "d_model": settings.config.n_embd,
                "num_layers": settings.config.n_layer,
                "total_time_ms": _digits(row.total_ms.median),
                "compute_time_ms": _digits(row.compute_ms),
                "comm_time_ms": _digits(row.comm_ms),
                "comm_fraction": _digits(row.comm_fraction),
                "num_comm_ops": _digits(row.num_comm_ops),
                "contestant": row.contestant,
                "keep_memory": "true" if row.keep_memory else "false",
                "world_size": plan.sets[entry.worker_set].world_size,
                "batch_size": entry.batch_size,
                "context_length": settings.tokens,
                "leaves_per_rank": settings.leaves_per_rank,
                "dtype": settings.dtype,
                "total_low_ms": _digits(row.total_ms.low),
                "total_high_ms": _digits(row.total_ms.high),
                "exposed_time_ms": _digits(row.exposed_ms),
                "exposed_fraction": _digits(row.exposed_fraction),
                "ratio_to_none": _digits(row.ratio.median),
                "ratio_low": _digits(row.ratio.low),
                "ratio_high": _digits(row.ratio.high),
                "comm_bytes": round(row.comm_bytes),
                "tokens_per_s": _digits(row.tokens_per_s),
                "memory_mb": None if row.memory_bytes is None else round(row.memory_bytes / 2**20),
            }
            for entry, row in zip(plan.entries, rows, strict=True)
        ]
    )


def _digits(value: float | None) -> str:
    """Five significant digits, without an exponent if possible."""
    return "" if value is None else f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def _findings(options: SyncOptions, plan: BenchPlan, results: Results, world: World) -> Findings:

    environment, rows = results[0]["environment"], rows_of(plan, results)
    words, notes = ("keeps memory",), (_LEGEND, where(environment))
    cells = [_cells(row) for row in rows]
    if options.host:
        return _host_findings(options, plan, results, world)
    return Findings(
        environment=environment,
        command=command_of(as_measured(options, world), _COMMAND),
        data={"plan": asdict(plan), "rows": [asdict(row) for row in rows]},
        samples=[result["contestants"] for result in results],
        show=lambda file: print_table(file, title(plan), _COLUMNS, cells, notes, words=words),
        csv=partial(rows_csv, plan, rows),
    )


def _host_findings(
    options: SyncOptions, plan: BenchPlan, results: Results, world: World
) -> Findings:
    environment = results[0]["environment"]
    ranks = {entry.label: plan.ranks(results, entry) for entry in plan.entries}
    seconds = {label: step_seconds(found) for label, found in ranks.items()}
    first = {label: found[0] for label, found in ranks.items()}
    cells = host.cells(list(ranks), seconds, first)
    rows = [dict(zip(host.COLUMNS, row, strict=True)) for row in cells]

    def show(file: IO[str]) -> None:
        notes = (host.LEGEND, where(environment))
        print_table(file, title(plan), host.COLUMNS, cells, notes)
        host.show_profiles(file, first)

    return Findings(
        environment=environment,
        command=command_of(as_measured(options, world), _COMMAND),
        data={"plan": asdict(plan), "rows": rows},
        samples=[result["contestants"] for result in results],
        show=show,
        csv=partial(csv_text, rows),
    )


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=SyncOptions,
    measure="gradsync.commands.bench.steps:measure",
    variants=plan_of,
    collect=_collect,
    metrics=_findings,
)
