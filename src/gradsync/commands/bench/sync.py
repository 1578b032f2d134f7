"""`gradsync bench sync`: a training step of every strategy, compared with other libraries and with
the ideal; docs/guide/verifying.md explains the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import IO, TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.commands.bench import host
from gradsync.commands.bench.contestants import left_out, parse_contestants, with_ideals
from gradsync.commands.bench.experiment import Experiment, Findings, check_least, taken
from gradsync.commands.bench.report import (
    Spread,
    csv_text,
    print_table,
    ratios,
    say,
    spread,
    where,
)
from gradsync.commands.bench.sync_plan import (
    BenchPlan,
    Entry,
    Results,
    SyncSettings,
    bench_plan,
    side_by_side,
    step_seconds,
    uses_cuda,
)
from gradsync.commands.plan.machine import fast_dtype
from gradsync.runtime.machine import choose_threads

if TYPE_CHECKING:
    from gradsync.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """Time training steps of a GPT on random tokens: strategies of gradsync, torch DDP, Accelerate
    and Fabric as their users run them, and `none`, which does not communicate.

    All ranks hold all contestants, which take turns. Each step is compared with `none` of the same
    round, and torch_ddp, accelerate and fabric with a `none` that, as they do, gives freed memory
    back. A check comes first: each contestant must train and give the expected losses. Under
    torchrun, mpirun or srun, it measures the launched ranks.
    """

    model_size: str = "tiny"  # tiny, mini, small, medium, large, xl, 1.3b, 2.7b.
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
    micro_batches_per_rank: int = 1  # Micro-batches into which these are divided.
    dtype: str = "auto"
    """fp32, bf16 (autocast over fp32 weights), or auto: bf16, except where a CPU emulates it."""
    threads: int | None = None  # Intra-op threads of a rank; default: cores / ranks.
    device: str = "auto"  # auto, cpu or cuda.
    host: bool = False
    """Measure what a step costs the host: the model's tensors and buckets, 8 wide, so that
    computing costs nothing. Counts operations and calls, and lists the slowest functions. `default`
    stands for torch_ddp, bucketed and invariant, in both loops."""
    csv: str = ""  # Write one row per contestant to this file.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False  # Only say what would be measured.


def plan_of(options: SyncOptions, world: World) -> BenchPlan:
    """Check the request; under a launcher, at its number of ranks."""
    if options.host:
        mine = options.strategies == "default"
        options = replace(
            options,
            strategies=host.CONTESTANTS if mine else options.strategies,
            context_length=options.context_length or host.TOKENS,
            dtype="fp32" if options.dtype == "auto" else options.dtype,
        )
    world_size = world.world_size if world.is_distributed else options.world_size
    check_least(options, world_size=1)
    local = world.local_world_size if world.is_distributed else world_size
    on_cuda = uses_cuda(options.device)
    # Only ranks that we start can run twice, once for each allocator setting.
    one_set = options.host or world.is_distributed or on_cuda
    chosen = parse_contestants(options.strategies)
    contestants = with_ideals(chosen, same_allocator=one_set)
    auto = options.dtype == "auto"
    settings = taken(
        SyncSettings,
        options,
        dtype=fast_dtype("cuda" if on_cuda else "cpu") if auto else options.dtype,
        threads=choose_threads(local, requested=options.threads),
    )
    plan = bench_plan(settings, [(each, world_size, options.batch_size) for each in contestants])
    most = max(sum(e.worker_set == n for e in plan.entries) for n in range(len(plan.sets)))
    # The contestant that runs exists twice.
    settings = side_by_side(settings, ranks=local * len(plan.sets), models=most + 1)
    if world.is_main:
        for name in left_out(options.strategies):
            say(f"{name} is left out: its package is missing (pip install 'gradsync[bench]')")
        if auto and settings.dtype == "fp32":
            say("dtype fp32: this processor emulates bf16; --dtype bf16 measures it all the same")
        if world.is_distributed and not all(each.is_ours for each in chosen):
            say(f"under {world.launcher} there is one set of ranks: all keep freed memory")
    return replace(plan, settings=settings)


def row_of(plan: BenchPlan, entry: Entry, results: Results) -> dict[str, Any]:
    """The figures of one contestant, as the record has them."""
    ranks = plan.ranks(results, entry)
    own, ideal = step_seconds(ranks), step_seconds(plan.ranks(results, plan.ideal_of(entry)))
    total = spread([1000 * seconds for seconds in own])
    beyond = median(mine - best for mine, best in zip(own, ideal, strict=True))
    exposed_ms = max(1000 * beyond, 0.0)
    times = [rank["comm_s"] for rank in ranks]
    comm_ms = None if None in times else 1000 * max(times)
    memory = [rank["memory_bytes"] for rank in ranks]
    tokens = len(ranks) * entry.batch_size * plan.settings.tokens
    return {
        "contestant": entry.label,
        "keep_memory": results[entry.worker_set]["keeps_memory"],  # not every system allows it
        "total_ms": asdict(total),  # a step, on the slowest rank (see `turns`); over rounds
        # Forward and backward of it, up to the last gradient.
        "compute_ms": 1000 * median(step_seconds(ranks, "compute_s")),
        "comm_ms": comm_ms,  # in collectives, without overlap; None: not timed
        "comm_fraction": None if comm_ms is None else comm_ms / total.median,  # of the step
        "exposed_ms": exposed_ms,  # what the step takes beyond `none`'s of the same round
        "exposed_fraction": exposed_ms / total.median,  # of the step
        "ratio": asdict(spread(ratios(own, ideal))),  # the step over `none`'s, over rounds
        # Of a rank in a step; a batch of messages is one operation, shared memory sends nothing.
        "num_comm_ops": fmean(rank["operations"] for rank in ranks),
        "comm_bytes": fmean(rank["sent_bytes"] for rank in ranks),
        "tokens_per_s": tokens / total.median * 1000,  # of all ranks
        # Peak above the process's start, of the rank with the most.
        "memory_bytes": None if None in memory else max(memory),
        "final_loss": ranks[0]["losses"][-1],  # after the check's steps
    }


STEP_LEGEND = (
    "step: each rank's mean over a turn, of these the slowest rank's; median (quartiles) over "
    "rounds. to none: the same over "
)
_LEGEND = (
    f"{STEP_LEGEND}`none` of the same round and allocator setting. forward + backward: until the "
    "last gradient. communication: in collectives, if nothing hides them (- : torch's own, other "
    "libraries, shards). exposed: what the step takes beyond `none`'s. sent: by a rank, through "
    "sockets. memory: peak of a rank above its start, pages shared by ranks counted in each."
)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table, by column."""
    comm_ms, memory = row["comm_ms"], row["memory_bytes"]
    return {
        "contestant": row["contestant"],
        "keeps memory": "yes" if row["keep_memory"] else "no",
        "step, ms": Spread(**row["total_ms"]).text(1),
        "to none": Spread(**row["ratio"]).text(3),
        "forward + backward, ms": f"{row['compute_ms']:.1f}",
        "communication, ms": "-" if comm_ms is None else f"{comm_ms:.1f}",
        "exposed, ms": f"{row['exposed_ms']:.1f} ({row['exposed_fraction']:.0%})",
        "operations": f"{row['num_comm_ops']:.3g}",
        "sent, MB": f"{row['comm_bytes'] / 1e6:.2f}",
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "memory, MB": "-" if memory is None else f"{memory / 2**20:.0f}",
    }


def title(plan: BenchPlan) -> str:
    """The measurement, in one line."""
    settings, first = plan.settings, plan.entries[0]
    count = settings.micro_batches_per_rank
    divided = f" in {count} micro-batches" if count > 1 else ""
    return (
        f"{settings.model_text}, {plan.sets[first.worker_set].world_size} ranks x "
        f"{first.batch_size} x {settings.tokens} tokens a step{divided}; {settings.turns_text}"
    )


def rows_csv(plan: BenchPlan, rows: Sequence[Mapping[str, Any]]) -> str:
    """A header and a line for each row; unmeasured values are empty. The first eight columns are
    the same as in other benchmarks."""
    settings = plan.settings
    return csv_text(
        [
            {
                "model_size": settings.model_size,
                "d_model": settings.config.n_embd,
                "num_layers": settings.config.n_layer,
                "total_time_ms": row["total_ms"]["median"],
                "compute_time_ms": row["compute_ms"],
                "comm_time_ms": row["comm_ms"],
                "comm_fraction": row["comm_fraction"],
                "num_comm_ops": row["num_comm_ops"],
                "world_size": plan.sets[entry.worker_set].world_size,
                "batch_size": entry.batch_size,
                "context_length": settings.tokens,
                "dtype": settings.dtype,
                "ratio_to_none": row["ratio"]["median"],
                **{name: value for name, value in row.items() if not isinstance(value, dict)},
            }
            for entry, row in zip(plan.entries, rows, strict=True)
        ]
    )


def findings_of(plan: BenchPlan, result: Mapping[str, Any]) -> Findings:
    """The table, and what goes into the record; with `--host` another table, and profiles."""
    results = result["results"]
    environment = results[0]["environment"]
    if plan.settings.host:
        ranks = {entry.label: plan.ranks(results, entry) for entry in plan.entries}
        first = {label: found[0] for label, found in ranks.items()}
        seconds = {label: step_seconds(found) for label, found in ranks.items()}
        rows = cells = host.rows_of(seconds, first)
        legend, as_csv = host.LEGEND, partial(csv_text, rows)
    else:
        first, legend = {}, _LEGEND
        rows = [row_of(plan, entry, results) for entry in plan.entries]
        cells, as_csv = [_cells(row) for row in rows], partial(rows_csv, plan, rows)

    def show(file: IO[str]) -> None:
        notes = (legend, where(environment))
        print_table(file, title(plan), cells, notes, words=("keeps memory",))
        host.show_profiles(file, first)

    return Findings(
        environment=environment,
        data={"plan": asdict(plan), "rows": rows},
        samples=[result["contestants"] for result in results],
        show=show,
        csv=as_csv,
    )


EXPERIMENT = Experiment(
    command=("bench", "sync"),
    options=SyncOptions,
    plan=plan_of,
    ranks=lambda plan: sum(plan.world_sizes),
    measure="gradsync.commands.bench.steps:measure",
    findings=findings_of,
)
