"""`gradsync bench sync`: a training step of every strategy, compared with other libraries and with
the ideal; docs/guide/verifying.md explains the figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gradsync.commands.arguments import check_least
from gradsync.commands.bench.experiment import (
    Experiment,
    Findings,
    Spread,
    print_table,
    ratios,
    say,
    spread,
    taken,
    where,
)
from gradsync.commands.bench.sync_plan import (
    OTHERS,
    BenchPlan,
    Contestant,
    DeviceName,
    Results,
    SyncSettings,
    bench_plan,
    parse_contestants,
    side_by_side,
    step_seconds,
    uses_cuda,
)
from gradsync.commands.plan.machine import fast_dtype
from gradsync.core.files import counted
from gradsync.runtime.machine import choose_threads

if TYPE_CHECKING:
    from gradsync.world import World

_ON_HOST = "torch_ddp,bucketed,bucketed:loop=user,invariant,invariant:loop=user"
"""What `--strategies default` stands for with `--host`."""
_HOST_TOKENS = 4  # of a sequence, with `--host`


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """Time training steps of a GPT on random tokens: strategies of gradsync, torch DDP, Accelerate
    and Fabric as their users run them, and `none`, which does not communicate.

    All ranks hold all contestants, which take turns. Each step is compared with `none` of the same
    round. A check comes first: each contestant must train and give the expected losses. Under
    torchrun, mpirun or srun, it measures the launched ranks.
    """

    model_size: str = "tiny"  # tiny, mini, small, medium, large, xl, 1.3b, 2.7b.
    world_size: int = 2  # Ranks to start on this host; 1 leaves out torch_ddp and libraries.
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
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 is autocast over fp32 weights; auto is bf16, except where a CPU emulates it."""
    threads: int | None = None  # Intra-op threads of a rank; default: cores / ranks.
    device: DeviceName = "auto"  # auto: GPUs, if there are any.
    host: bool = False
    """Measure what a step costs the host: the model's tensors and buckets, 8 wide, so that
    computing costs nothing. Counts operations and calls, and names the slowest functions. `default`
    stands for torch_ddp, bucketed and invariant, in both loops."""
    csv: str = ""  # Write one row per contestant to this file.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the record on standard output; the table goes to standard error."""


def plan_of(options: SyncOptions, world: World) -> BenchPlan:
    """Check the request; under a launcher, at its number of ranks."""
    if options.host:
        options = replace(
            options,
            strategies=_ON_HOST if options.strategies == "default" else options.strategies,
            context_length=options.context_length or _HOST_TOKENS,
            dtype="fp32" if options.dtype == "auto" else options.dtype,
        )
    world_size = world.world_size if world.is_distributed else options.world_size
    check_least(options, world_size=1)
    local = world.local_world_size if world.is_distributed else world_size
    device = "cuda" if uses_cuda(options.device) else "cpu"
    chosen = parse_contestants(options.strategies)
    if world_size == 1 and (out := [each.label for each in chosen if each.name in OTHERS]):
        chosen = [each for each in chosen if each.name not in OTHERS]
        say(f"one rank, beside `none`, plain torch; left out: {', '.join(out)}")
    settings = taken(
        SyncSettings,
        options,
        dtype=fast_dtype(device) if options.dtype == "auto" else options.dtype,
        threads=choose_threads(local, requested=options.threads),
    )
    # `none` is one more, and a contestant that is checked exists beside them.
    settings = side_by_side(settings, ranks=local, models=len(chosen) + 2)
    return bench_plan(settings, chosen, world_size, options.batch_size)


def row_of(plan: BenchPlan, contestant: Contestant, results: Results) -> dict[str, Any]:
    """The figures of one contestant, as the record has them."""
    ranks = plan.ranks(results, contestant)
    own, ideal = step_seconds(ranks), step_seconds(plan.ranks(results, plan.contestants[0]))
    total = spread([1000 * seconds for seconds in own])
    beyond = median(mine - best for mine, best in zip(own, ideal, strict=True))
    exposed_ms = max(1000 * beyond, 0.0)
    memory = [rank["memory_bytes"] for rank in ranks]
    tokens = len(ranks) * contestant.batch_size * plan.settings.tokens
    row = {
        "contestant": contestant.label,
        "total_ms": asdict(total),  # a step, on the slowest rank (see `turns`); over rounds
        # Forward and backward of it, up to the last gradient.
        "compute_ms": 1000 * median(step_seconds(ranks, "compute_s")),
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
    if plan.settings.host:  # of rank 0's thread, in one step
        row |= {name: ranks[0][name] for name in ("tensors", "dispatched", "calls", "slowest")}
    return row


LEGEND = (
    "step: each rank's mean over a turn, of these the slowest rank's; median (quartiles) over "
    "rounds. to none: the same over `none` of the same round. operations: collectives and batches "
    "of messages. forward + backward: until the last gradient. exposed: what the step takes beyond "
    "`none`'s. sent: by a rank, through sockets. memory: peak of a rank above its start, pages "
    "shared by ranks counted in each. With --host, of rank 0's thread, dispatched: operations of "
    "torch, those inside of others too; milliseconds of a function exclude its callees'."
)


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table, by column."""
    memory = row["memory_bytes"]
    cells = {
        "contestant": row["contestant"],
        "step, ms": Spread(**row["total_ms"]).text(1),
        "to none": Spread(**row["ratio"]).text(3),
        "operations": f"{row['num_comm_ops']:.3g}",
    }
    if "calls" in row:
        return cells | {"dispatched": f"{row['dispatched']:,}", "Python calls": f"{row['calls']:,}"}
    return cells | {
        "forward + backward, ms": f"{row['compute_ms']:.1f}",
        "exposed, ms": f"{row['exposed_ms']:.1f} ({row['exposed_fraction']:.0%})",
        "sent, MB": f"{row['comm_bytes'] / 1e6:.2f}",
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "memory, MB": "-" if memory is None else f"{memory / 2**20:.0f}",
    }


def title(settings: SyncSettings, world_size: int, batch_size: int) -> str:
    """The measurement, in one line."""
    count = settings.micro_batches_per_rank
    divided = f" in {count} micro-batches" if count > 1 else ""
    return (
        f"{settings.model_text}, {counted(world_size, 'rank')} x {batch_size} x {settings.tokens} "
        f"tokens a step{divided}; {settings.turns_text}"
    )


def rows_csv(plan: BenchPlan, rows: Sequence[Mapping[str, Any]]) -> str:
    """A header and a line for each row. Other benchmarks have the same first eight columns."""
    settings, text = plan.settings, io.StringIO()
    lines = [
        {
            "model_size": settings.model_size,
            "d_model": settings.config.n_embd,
            "num_layers": settings.config.n_layer,
            "total_time_ms": row["total_ms"]["median"],
            "compute_time_ms": row["compute_ms"],
            "comm_time_ms": row["exposed_ms"],
            "comm_fraction": row["exposed_fraction"],
            "num_comm_ops": row["num_comm_ops"],
            "world_size": contestant.world_size,
            "batch_size": contestant.batch_size,
            "context_length": settings.tokens,
            "dtype": settings.dtype,
            "ratio_to_none": row["ratio"]["median"],
            **{name: value for name, value in row.items() if not isinstance(value, dict | list)},
        }
        for contestant, row in zip(plan.contestants, rows, strict=True)
    ]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def show_slowest(file: IO[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """The functions in which rank 0 spends a step, under the profiler."""
    for row in rows:
        print(f"\n{row['contestant']}: the slowest functions of a step of rank 0", file=file)
        for name, calls, milliseconds in row["slowest"]:
            print(f"{milliseconds:9.2f} ms {calls:7,} x  {name}", file=file)


def findings_of(plan: BenchPlan, result: Mapping[str, Any]) -> Findings:
    """The table, and what goes into the record."""
    results, first = result["results"], plan.contestants[0]
    environment = results[0]["environment"]
    rows = [row_of(plan, each, results) for each in plan.contestants]

    def show(file: IO[str]) -> None:
        heading = title(plan.settings, first.world_size, first.batch_size)
        notes = (LEGEND, where(environment))
        print_table(file, heading, [cells_of(row) for row in rows], notes)
        if plan.settings.host:
            show_slowest(file, rows)

    return Findings(
        environment=environment,
        data={
            "plan": asdict(plan),
            "rows": rows,
            "samples": [result["contestants"] for result in results],
        },
        show=show,
        csv=partial(rows_csv, plan, rows),
    )


EXPERIMENT = Experiment(
    command=("bench", "sync"), options=SyncOptions, plan=plan_of, findings=findings_of
)
