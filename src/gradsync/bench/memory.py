"""`gradsync bench memory`: what a rank's training takes, beside what the formulas say.

Two usual shapes, in which different parts are large: in `wide` weights, gradients and optimizer
state, in `long` what a leaf keeps. Each case has ranks of its own: what another one has left in the
heap would count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gradsync.bench.contestants import few_steps
from gradsync.bench.experiment import (
    Ask,
    Experiment,
    Findings,
    check_alone,
    check_least,
    environment,
    from_json,
    names_in,
)
from gradsync.bench.report import print_table, progress_bar, where
from gradsync.bench.sync_plan import uses_cuda
from gradsync.errors import ConfigError
from gradsync.models.config import PRESETS, GPTConfig
from gradsync.parallel.layout import ParallelLayout
from gradsync.plan.description import Kind
from gradsync.plan.memory import MemoryNeed, memory_need
from gradsync.plan.workload import Split, Workload
from gradsync.runtime import environ
from gradsync.sync.registry import STRATEGIES, find_strategy

if TYPE_CHECKING:
    from gradsync.train.learner import Learner
    from gradsync.world import World

SHAPES = {
    "long": GPTConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=8192, block_size=512),
    "wide": GPTConfig(n_layer=8, n_head=10, n_embd=640, vocab_size=8192, block_size=128),
    "mini": PRESETS["mini"],
    "small": PRESETS["small"],
    "nothing": GPTConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=64, block_size=64),
}
"""A leaf is one sequence of `block_size` tokens, at most 512. What training `nothing` takes is the
process."""
LONGEST = 512
_ON_HOST = ("bucketed", "invariant")
"""On CPUs the trainer keeps one copy of weights and state for all ranks of a host under these."""
_VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("naive", {"checkpointing": True}),
    ("invariant", {"checkpointing": True}),
    ("fsdp", {"checkpointing": True}),
    ("naive", {"loss_rows": 128}),
    ("naive", {"dtype": "fp32"}),
    *((name, {"leaves": 3}) for name in ("naive", "invariant", "ddp", "zero1", "zero2", "fsdp")),
)
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
    strategies: str = "all"  # Names with commas between them, or all.
    world_size: int = 2  # Ranks to start on this host.
    steps: int = 4  # Optimizer steps of a case, at least 2.
    device: str = "auto"  # auto, cpu or cuda.
    exact: bool = False
    """CPU: map every block by itself, so that nothing is counted that is not used. Slow; the
    difference is the allocator's slack."""
    out: str = ""  # Write record.json into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCase:
    """One training run to measure."""

    shape: str  # a name in `SHAPES`
    strategy: str
    checkpointing: bool = False  # of activations
    loss_rows: int | None = None  # as `Workload` has it
    leaves: int = 1  # micro-batches of a rank
    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    tokens: int | None = None  # of a leaf; None: as many as the shape takes, at most 512

    def __str__(self) -> str:
        named = {
            "checkpointing": self.checkpointing,
            f"{self.loss_rows} loss rows": self.loss_rows is not None,
            f"{self.leaves} leaves": self.leaves > 1,
            self.dtype: self.dtype != "bf16",
        }
        return ", ".join([self.strategy, *(word for word, holds in named.items() if holds)])

    @property
    def model(self) -> GPTConfig:
        """Its shape."""
        return SHAPES[self.shape]

    @property
    def seq_len(self) -> int:
        """Tokens of a leaf."""
        return self.tokens or min(self.model.block_size, LONGEST)

    def workload(self, world_size: int, kind: Kind) -> Workload:
        """The case, as the formulas take it."""
        return Workload(
            model=self.model,
            micro_batch_size=1,
            seq_len=self.seq_len,
            num_leaves=world_size * self.leaves,
            dtype=self.dtype,
            activation_checkpointing=self.checkpointing,
            loss_rows=self.loss_rows,
            kind=kind,
        )

    def split(self, world_size: int, kind: Kind) -> Split:
        """As the trainer divides it on one host."""
        shared = kind == "cpu" and world_size > 1 and self.strategy in _ON_HOST
        layout = ParallelLayout(dp=world_size)
        return Split(strategy=self.strategy, layout=layout, shared_weights=shared)

    def need(self, world_size: int, kind: Kind) -> MemoryNeed:
        """The formulas' answer."""
        return memory_need(self.workload(world_size, kind), self.split(world_size, kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRun:
    """One case, on the ranks that were started for it."""

    case: MemoryCase
    device: str = "auto"  # auto, cpu or cuda
    threads: int = 1  # intra-op threads of a rank
    steps: int = 4  # the first makes the optimizer's state, `powersgd` compresses from the third on


def memory_cases(shapes: Sequence[str], strategies: Sequence[str]) -> Iterator[MemoryCase]:
    """Every strategy as it is, then the ways to take less, or more."""
    for name in strategies:
        find_strategy(name)
    for shape in shapes:
        if shape not in SHAPES:
            raise ConfigError(f"unknown shape {shape!r} (there are: {', '.join(SHAPES)})")
        yield from (MemoryCase(shape=shape, strategy=name) for name in strategies)
        for name, options in _VARIANTS:
            if name in strategies:
                yield MemoryCase(shape=shape, strategy=name, **options)


def cases_of(options: MemoryOptions, world: World) -> tuple[MemoryCase, ...]:
    """Check the request."""
    check_least(options, world_size=1, steps=2)
    uses_cuda(options.device)  # refuses what is not there
    names = tuple(STRATEGIES) if options.strategies == "all" else names_in(options.strategies)
    cases = tuple(memory_cases(names_in(options.shapes), names))
    if not cases:
        raise ConfigError("--shapes and --strategies: name at least one of each")
    check_alone(world, "bench memory")
    return cases


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


def measure(run_json: dict[str, Any]) -> dict[str, Any]:
    """A rank's part: train one case for a few steps, and look at its largest size. All ranks return
    the same; `peak_bytes` has one for each rank."""
    from gradsync.bench.steps import quiet_session
    from gradsync.comm.groups import communicator
    from gradsync.comm.values import all_gather_json

    run = from_json(MemoryRun, run_json)
    with quiet_session(run.device, run.threads, keep_memory=True) as (world, keeps):
        on_cuda = world.device.type == "cuda"
        found = {
            "environment": environment(world_size=world.world_size, threads=run.threads),
            "kind": "cuda" if on_cuda else "cpu",
            "keeps_memory": keeps,
        }
        learner = _trained(run, world)
        peak = _peak_of_device() if on_cuda else _peak_of_process()
        learner.sync.close()
        by_rank = all_gather_json(communicator(world), {"peak": peak})
    return found | {"peak_bytes": [rank["peak"] for rank in by_rank]}


def _trained(run: MemoryRun, world: World) -> Learner:
    """Steps as the trainer makes them, on random tokens."""
    import torch

    from gradsync.bench.entrants import leaves_of
    from gradsync.comm.groups import communicator
    from gradsync.train.config import SyncConfig, TrainConfig
    from gradsync.train.learner import build_learner

    case = run.case
    config = TrainConfig(
        sync=case.strategy,
        dtype=case.dtype,
        activation_checkpointing=case.checkpointing,
        loss_rows=case.loss_rows,
        model=case.model,
        sync_options=SyncConfig(**few_steps(case.strategy, 1)),
    )
    learner = build_learner(config, world, case.model, communicator(world))
    learner.prime((1, case.seq_len))
    shape = (2, 1, case.seq_len)
    batch = torch.randint(case.model.vocab_size, shape, device=world.device).unbind()
    leaves = leaves_of([batch] * case.leaves, world)
    for _ in range(run.steps):
        learner.run_leaves(leaves)
        learner.sync.step(learner.optimizer, clip_norm=config.optim.clip_norm)
    return learner


def _peak_of_process() -> int:
    """The largest resident size, of what is shared a proportion (it does not shrink while a run
    lasts); what /proc does not tell counts as 0."""
    sizes: dict[str, int] = {}
    for path in (Path("/proc/self/status"), Path("/proc/self/smaps_rollup")):
        for line in path.read_text().splitlines() if path.exists() else ():
            name, _, value = line.partition(":")
            if value.endswith("kB"):
                sizes[name] = int(value.split()[0]) * 1024
    return sizes.get("VmHWM", 0) - sizes.get("RssShmem", 0) + sizes.get("Pss_Shmem", 0)


def _peak_of_device() -> int:
    """Bytes of the allocator, and of what the process holds beside it (the context, NCCL)."""
    import torch

    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return torch.cuda.max_memory_reserved() + beside


def row_of(case: MemoryCase, result: Mapping[str, Any]) -> dict[str, Any]:
    """A case's line: bytes predicted, with their parts, and measured on the rank that took most;
    without slack where an allocator gives everything back."""
    need = case.need(len(result["peak_bytes"]), result["kind"])
    if result["kind"] == "cpu" and not result["keeps_memory"]:
        need = replace(need, slack=0)
    return {
        "shape": case.shape,
        "case": str(case),
        "predicted_bytes": need.total,
        "measured_bytes": max(result["peak_bytes"]),
        "parts": asdict(need),
    }


_COLUMNS = ("model", "case", "predicted, MiB", "measured, MiB", "predicted / measured")
_LEGEND = (
    "the largest size of a process (of the rank that took most): Python and torch are part of it, "
    "memory that ranks share counts in parts."
)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = row["predicted_bytes"], row["measured_bytes"]
    numbers = [f"{size / 2**20:,.0f}" for size in sizes]
    return (row["shape"], row["case"], *numbers, f"{sizes[0] / sizes[1]:.2f}")


def shape_text(name: str) -> str:
    """A shape in one line."""
    model = SHAPES[name]
    return (
        f"{name}: {model.num_params() / 1e6:.1f} M parameters, {model.n_layer} blocks of width "
        f"{model.n_embd}, vocabulary {model.vocab_size:,}, leaves of "
        f"{min(model.block_size, LONGEST)} tokens"
    )


def _findings(
    options: MemoryOptions, cases: Sequence[MemoryCase], results: list[dict[str, Any]], world: World
) -> Findings:
    rows = [row_of(case, result) for case, result in zip(cases, results, strict=True)]
    kept, environment = ("kind", "keeps_memory", "peak_bytes"), results[0]["environment"]
    shapes = [shape_text(name) for name in dict.fromkeys(row["shape"] for row in rows)]
    notes, title = (
        (_LEGEND, *shapes, where(environment)),
        "Memory of a rank, by formula and measured",
    )
    cells = [_cells(row) for row in rows]
    return Findings(
        environment=environment,
        data={
            "rows": rows,
            "cases": [asdict(case) for case in cases],
            "raw": [{name: result[name] for name in kept} for result in results],
        },
        show=lambda file: print_table(file, title, _COLUMNS, cells, notes, words=("case",)),
    )


EXPERIMENT = Experiment(
    command=("bench", "memory"),
    options=MemoryOptions,
    measure="gradsync.bench.memory:measure",
    variants=cases_of,
    collect=_collect,
    metrics=_findings,
)
