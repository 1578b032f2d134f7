"""`gradsync bench collectives`: the cost of collectives, compared with memory bandwidth.

Sizes, `algbw` and `busbw` are those of nccl-tests. For ranks that share a host's memory there is a
reference: the fewest bytes that an operation must move, at the rate of a plain copy that all ranks
run at the same time. docs/guide/verifying.md explains both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from statistics import median
from typing import IO, TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from gradsync.commands.arguments import check_least, names_in
from gradsync.commands.bench.experiment import (
    Experiment,
    Findings,
    print_table,
    ratios,
    spread,
    where,
)
from gradsync.commands.bench.sync_plan import DeviceName, uses_cuda
from gradsync.commands.plan.measured import Fit, fit_conditions, fit_line, save_fits
from gradsync.commands.plan.report import duration
from gradsync.core.files import check_name, counted
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from gradsync.world import World

OPERATIONS = {
    "all_reduce": ("backend", "ring", "hierarchical", "tree", "shared", "shared_copies"),
    "reduce_scatter": ("backend", "ring", "shared", "shared_copies"),
    "all_gather": ("backend", "ring", "shared", "shared_copies"),
    "broadcast": ("backend", "tree", "shared", "shared_copies"),
}
"""`backend` is the process group's collective, `shared` works in place on buffers in shared memory,
`shared_copies` copies ordinary buffers through shared memory."""
ALGORITHMS = tuple(dict.fromkeys(name for names in OPERATIONS.values() for name in names))
COPY = "copy"  # the reference: each rank copies its own buffer
DTYPES = {
    **{"fp64": ("float64", 8), "fp32": ("float32", 4), "bf16": ("bfloat16", 2)},
    **{"fp16": ("float16", 2), "int64": ("int64", 8), "int32": ("int32", 4), "int8": ("int8", 1)},
}
"""By the name that users type: torch's dtype, and bytes."""
GB = 1e9
_BUFFERS = 8  # per rank: two ordinary, two shared, one to receive in, two in a backend, a check's
_SPARE = 0.9  # fraction of the free memory to use at most
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesOptions:
    """Time all_reduce, reduce_scatter, all_gather and broadcast by every algorithm, from 4 B to
    1 GiB: p50, p95, algbw and busbw as nccl-tests define them.

    A plain copy runs as a reference, on all ranks at once. For ranks of one host, "of limit" is an
    operation's rate relative to that copy. In place it can exceed 100 %, because a copy reads the
    destination's cache lines before it writes them. Each algorithm's result is checked at each
    size. Under torchrun, mpirun or srun, it measures the launched ranks.
    """

    operations: str = "all"
    """all_reduce, reduce_scatter, all_gather, broadcast, separated by commas; or all."""
    algorithms: str = "all"
    """backend (gloo or nccl), ring, hierarchical, tree, shared (in place, over shared memory),
    shared_copies; or all."""
    sizes: str = ""
    """Sizes of the tensor, separated by commas: 4K,25M (K, M, G are powers of 1024). Default: 4 B,
    16 B, 64 B, ... up to 1 GiB or what fits in memory."""
    world_size: int = 2  # Ranks to start on this host.
    dtype: str = "fp32"  # fp64, fp32, bf16, fp16, int64, int32 or int8.
    device: DeviceName = "auto"  # auto: GPUs if each rank of a host has one.
    rounds: int = 7  # Turns of each algorithm at each size.
    save: bool = False  # Keep the fitted costs in the user's cache, for planning.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the record on standard output; the tables go to standard error."""


def plan_of(options: CollectivesOptions, world: World) -> CollectivesOptions:
    """Check the request, which every rank receives as it is."""
    check_least(options, world_size=2, rounds=1)
    check_name("dtype", options.dtype, DTYPES)
    uses_cuda(options.device)  # raises if there is no GPU
    list(map(parse_size, names_in(options.sizes)))
    work_of(options)
    return options


def work_of(options: CollectivesOptions) -> dict[str, list[str]]:
    """The requested operations, each with the requested algorithms that implement it."""
    asked = []
    for what, known in (("operation", tuple(OPERATIONS)), ("algorithm", ALGORITHMS)):
        names = names_in(getattr(options, f"{what}s"))
        for name in names:
            check_name(what, name, ("all", *known))
        asked.append(known if "all" in names else names)
    operations, algorithms = asked
    work = {
        operation: [name for name in known if name in algorithms]
        for operation, known in OPERATIONS.items()
        if operation in operations and set(known) & set(algorithms)
    }
    if not work:
        raise ConfigError(
            f"nothing to measure: {options.operations} by {options.algorithms} does not exist"
        )
    return work


def parse_size(text: str) -> int:
    """Bytes from `4`, `64K`, `25M` or `25MiB`: powers of 1024."""
    found = re.fullmatch(r"([1-9][0-9]{0,14})(?:B|([KMG])(?:iB)?)?", text)
    if found is None:
        raise ConfigError(
            f"--sizes: {text[:80]!r} is no size; write bytes, or a number with K, M or G: 64K"
        )
    return int(found[1]) * _UNITS.get(found[2], 1)


def size_text(size_bytes: int) -> str:
    """Short and exact: `4 B`, `64 KiB`, `25 MiB`; plain bytes if no unit divides the size."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def choose_sizes(asked: str, *, available_bytes: int, ranks: int) -> list[int]:
    """Sizes in bytes, ascending: those in `asked`, or 4 B, 16 B, 64 B, ... up to what fits in the
    `available_bytes` that `ranks` ranks share."""
    most = int(_SPARE * available_bytes) // (_BUFFERS * ranks)
    sizes = sorted(set(map(parse_size, names_in(asked))))
    return sizes or [4**k for k in range(1, 16) if 4**k <= most]


def counts_of(operation: str, sizes: Sequence[int], dtype: str, world_size: int) -> list[int]:
    """Whole elements of the tensor for each size; equal parts if each rank owns one."""
    counts = [max(size // DTYPES[dtype][1], 1) for size in sizes]
    if operation in ("reduce_scatter", "all_gather"):
        counts = [-(-count // world_size) * world_size for count in counts]
    return list(dict.fromkeys(counts))


def bus_factor(operation: str, world_size: int) -> float:
    """busbw / algbw."""
    others = (world_size - 1) / world_size
    return {"all_reduce": 2 * others, "broadcast": 1.0}.get(operation, others)


def rows_of(
    found: Sequence[Mapping[str, Any]], world_size: int, *, one_memory: bool
) -> list[dict[str, Any]]:
    """The figures of each sample in `found`. The copy among them is the reference if ranks share
    `one_memory`."""
    medians = [[median(times) for times in entry["rounds_s"]] for entry in found]
    copies = {
        (entry["operation"], entry["count"]): seconds
        for entry, seconds in zip(found, medians, strict=True)
        if entry["algorithm"] == COPY
    }
    rows = []
    for entry, seconds in zip(found, medians, strict=True):
        operation, size = entry["operation"], entry["size_bytes"]
        times = list(chain.from_iterable(entry["rounds_s"]))
        p50_s, is_copy = median(times), entry["algorithm"] == COPY
        # A copy reads and writes each byte once; an algorithm's size counts once.
        algbw = (2 * size if is_copy else size) / p50_s / GB
        # The fewest bytes that the operation moves, over the 2 S that a copy moves.
        part = (1 + 1 / world_size) / 2 if operation == "reduce_scatter" else 1
        limits = [part * copy_s for copy_s in copies[operation, entry["count"]]]
        limited = one_memory and not is_copy
        row = {
            "operation": operation,
            "algorithm": entry["algorithm"],
            "size_bytes": size,
            "count": entry["count"],
            "repetitions": len(times),  # over all rounds
            "p50_s": p50_s,
            "p95_s": float(np.percentile(times, 95)),
            "algbw_gbs": algbw,  # 1e9 bytes per second
            "busbw_gbs": None if is_copy else algbw * bus_factor(operation, world_size),
            "of_limit": asdict(spread(ratios(limits, seconds))) if limited else None,
        }
        rows.append(row)
    return rows


def fits_of(rows: Sequence[Mapping[str, Any]]) -> list[Fit]:
    """The line through the points of each operation and algorithm, at two sizes or more."""
    by_name: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["algorithm"] != COPY:
            points = by_name.setdefault((row["operation"], row["algorithm"]), {})
            points[row["size_bytes"]] = row["p50_s"]
    return [fit_line(*name, points) for name, points in by_name.items() if len(points) > 1]


def findings_of(options: CollectivesOptions, result: Mapping[str, Any]) -> Findings:
    """The tables, the lines to keep, and what goes into the record."""
    found, num_nodes = result["environment"], result["num_nodes"]
    rows = rows_of(result["samples"], found["world_size"], one_memory=result["one_memory"])
    fits = fits_of(rows)

    def keep() -> str:
        device = "cpu" if found["backend"] == "gloo" else "cuda"
        ranks = (found["world_size"], found["threads_per_rank"])
        here = fit_conditions(device, *ranks, num_nodes=num_nodes, dtype=options.dtype)
        return f"kept alpha and beta in {save_fits(here, fits)}"

    return Findings(
        environment=found,
        data={
            "passed": not result["wrong"],
            "num_nodes": num_nodes,
            "settings": asdict(options),
            "rows": rows,
            "fits": [asdict(fit) for fit in fits],
            "skipped": result["skipped"],
            "wrong": result["wrong"],
            "samples": result["samples"],
        },
        show=partial(print_report, rows, result, options.dtype),
        keep=keep if fits else None,
        code=1 if result["wrong"] else 0,
    )


_OF_LIMIT = (
    "of limit: the least bytes of the operation, moved at the rate of the plain copy beside it. A "
    "copy reads the lines of its destination before it writes them: an operation in place "
    "(all_reduce) does not, and may pass 100%."
)


def print_report(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], dtype: str, stream: IO[str]
) -> None:
    """A table per operation, what was skipped and what failed."""
    found = result["environment"]
    hosts = counted(result["num_nodes"], "host")
    print(f"{found['world_size']} ranks on {hosts}, {dtype}; {where(found)}", file=stream)
    for operation, group in groupby(rows, key=lambda row: row["operation"]):
        cells = []
        for row in group:
            busbw, part = row["busbw_gbs"], row["of_limit"]
            line = {
                "size": size_text(row["size_bytes"]),
                "algorithm": row["algorithm"],
                "p50": duration(row["p50_s"]),
                "p95": duration(row["p95_s"]),
                "algbw GB/s": f"{row['algbw_gbs']:.3g}",
                "busbw GB/s": f"{busbw:.3g}" if busbw else "",
                "of limit": f"{part['median']:.0%}" if part else "",
            }
            cells.append(line)
        print_table(stream, operation, cells, words=("algorithm",))
    for line in (_OF_LIMIT, *result["skipped"], *(f"WRONG {each}" for each in result["wrong"])):
        print(line, file=stream)


EXPERIMENT = Experiment(
    command=("bench", "collectives"),
    options=CollectivesOptions,
    plan=plan_of,
    ranks=lambda options: options.world_size,
    measure="gradsync.commands.bench.collectives_run:measure",
    findings=findings_of,
)
