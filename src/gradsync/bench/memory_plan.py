"""The request to `bench memory`: shapes, strategies, ways to save memory. Pure; no torch.

Two shapes, in which different parts are large: in `wide` weights, gradients and optimizer state, in
`long` what a leaf keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Literal

from gradsync.bench.report import print_table, where
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.presets import PRESETS
from gradsync.parallel.layout import Layout
from gradsync.plan.description import Kind
from gradsync.plan.memory import MemoryNeed, memory_need
from gradsync.plan.workload import Split, Workload
from gradsync.sync.registry import find_strategy

SHAPES = {
    "long": GPTConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=8192, block_size=512),
    "wide": GPTConfig(n_layer=8, n_head=10, n_embd=640, vocab_size=8192, block_size=128),
    "mini": PRESETS["mini"],
    "small": PRESETS["small"],
    "nothing": GPTConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=64, block_size=64),
}
"""A leaf is one sequence of `block_size` tokens, at most 512. What training `nothing` takes is the
process."""
_ON_HOST = ("bucketed", "invariant")
"""On CPUs the trainer keeps one copy of weights and state for all ranks of a host under these."""
LONGEST = 512
_VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("naive", {"checkpointing": True}),
    ("invariant", {"checkpointing": True}),
    ("fsdp", {"checkpointing": True}),
    ("naive", {"loss_rows": 128}),
    ("naive", {"dtype": "fp32"}),
    *((name, {"leaves": 3}) for name in ("naive", "invariant", "ddp", "zero1", "zero2", "fsdp")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCase:
    """One training run to measure."""

    shape: str
    """A name in `SHAPES`."""
    strategy: str
    checkpointing: bool = False
    """Activation checkpointing."""
    loss_rows: int | None = None
    """As `Workload` has it."""
    leaves: int = 1
    """Micro-batches of a rank."""
    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    tokens: int | None = None
    """Tokens of a leaf; None: as many as the shape takes, at most 512."""

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
        layout = Layout(dp=world_size)
        return Split(strategy=self.strategy, layout=layout, shared_weights=shared)

    def need(self, world_size: int, kind: Kind) -> MemoryNeed:
        """The formulas' answer."""
        return memory_need(self.workload(world_size, kind), self.split(world_size, kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRun:
    """One case, on ranks that were started for it: what another case has left in the heap would
    count."""

    case: MemoryCase
    device: str = "auto"
    """auto, cpu or cuda."""
    threads: int = 1
    """Intra-op threads of a rank."""
    steps: int = 4
    """Optimizer steps. The first makes the optimizer's state, `powersgd` compresses from the third
    on."""


def memory_cases(shapes: Sequence[str], strategies: Sequence[str]) -> Iterator[MemoryCase]:
    """Every strategy as it is, then the ways to take less, or more.

    Raises:
        ConfigError: an unknown shape or strategy.
    """
    for name in strategies:
        find_strategy(name)
    for shape in shapes:
        if shape not in SHAPES:
            raise ConfigError(f"unknown shape {shape!r} (there are: {', '.join(SHAPES)})")
        yield from (MemoryCase(shape=shape, strategy=name) for name in strategies)
        for name, options in _VARIANTS:
            if name in strategies:
                yield MemoryCase(shape=shape, strategy=name, **options)


_MIB = 2**20
_LEGEND = (
    "the largest size of a process (of the rank that took most): Python and torch are part of it, "
    "memory that ranks share counts in parts."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One case."""

    shape: str
    case: str
    """Strategy and what is special."""
    predicted_bytes: int
    measured_bytes: int
    """The size of the rank that took most."""
    parts: dict[str, int]
    """Parts of the prediction."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes


def row_of(case: MemoryCase, result: Mapping[str, Any]) -> MemoryRow:
    """From what `memory_run.measure` returned; without slack where an allocator gives everything
    back."""
    need = case.need(len(result["peak_bytes"]), result["kind"])
    if result["kind"] == "cpu" and not result["keeps_memory"]:
        need = replace(need, slack=0)
    return MemoryRow(
        shape=case.shape,
        case=str(case),
        predicted_bytes=need.total,
        measured_bytes=max(result["peak_bytes"]),
        parts=asdict(need),
    )


def print_report(
    rows: Sequence[MemoryRow], environment: Mapping[str, Any], stream: IO[str]
) -> None:
    """Table, what the columns mean, where it was measured."""
    cells = [
        (
            row.shape,
            row.case,
            f"{row.predicted_bytes / _MIB:,.0f}",
            f"{row.measured_bytes / _MIB:,.0f}",
            f"{row.ratio:.2f}",
        )
        for row in rows
    ]
    columns = ("model", "case", "predicted, MiB", "measured, MiB", "predicted / measured")
    shapes = [shape_text(name) for name in dict.fromkeys(row.shape for row in rows)]
    print_table(
        stream,
        "Memory of a rank, by formula and measured",
        columns,
        cells,
        (_LEGEND, *shapes, where(environment)),
        words=("case",),
    )


def shape_text(name: str) -> str:
    """A shape in one line."""
    model = SHAPES[name]
    return (
        f"{name}: {model.num_params() / 1e6:.1f} M parameters, {model.n_layer} blocks of width "
        f"{model.n_embd}, vocabulary {model.vocab_size:,}, leaves of "
        f"{min(model.block_size, LONGEST)} tokens"
    )
