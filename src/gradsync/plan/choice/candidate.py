"""One way to run a workload on some hardware, and what became of it; pure, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.parallel.layout import Layout
from gradsync.plan.description import Device, Hardware
from gradsync.plan.memory.model import MemoryNeed
from gradsync.plan.timing.profile import StepProfile
from gradsync.plan.timing.step import StepTime
from gradsync.plan.workload import Split, Workload
from gradsync.sync.registry import STRATEGIES, Promise

PROMISES: tuple[Promise, ...] = ("bitwise", "rounding", "lossy")
"""The strongest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Memory and time, given to a choice so that measured and estimated costs are used alike."""

    memory: Callable[[Workload, Split], MemoryNeed]
    """Bytes of the rank that needs most."""
    profile: Callable[[Workload, Device], StepProfile]
    """Costs of a leaf and an update on a device."""
    step: Callable[[Workload, Split, Hardware, StepProfile], StepTime]
    """An optimizer step on exactly the devices that are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The variants that may be tried."""

    strategies: tuple[str, ...]
    """The simplest first: it is taken where times are equal."""
    micro_batch_sizes: tuple[int, ...]
    """Sequences of a leaf; the usual one first. Each divides the global batch."""
    checkpointing: tuple[bool, ...] = (False, True)
    """Whether activations may be kept, recomputed, or either."""

    def works(self, work: Workload) -> Iterator[Workload]:
        """`work` with every micro-batch and way to keep activations; its global batch stays."""
        sequences = work.num_leaves * work.micro_batch_size
        for recompute in self.checkpointing:
            for size in self.micro_batch_sizes:
                yield replace(
                    work,
                    micro_batch_size=size,
                    num_leaves=sequences // size,
                    activation_checkpointing=recompute,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A workload with its micro-batch, and how it is divided."""

    work: Workload
    split: Split
    memory: MemoryNeed | None = None
    """None where arithmetic alone forbids it."""
    room_bytes: int = 0
    """Bytes that a rank may take on the device that has least."""
    time: StepTime | None = None
    """Predicted; None where it cannot run."""
    obstacle: str = ""
    """Why it cannot run; empty: it can."""
    remark: str = ""
    """Why it was taken, or was not."""

    @property
    def runs(self) -> bool:
        """Whether it can."""
        return self.time is not None

    @property
    def seconds(self) -> float:
        """Duration of a step, where it can run."""
        assert self.time is not None
        return self.time.total_s

    @property
    def promise(self) -> Promise:
        """The strategy's; where the model itself is divided, sums have another order."""
        promise = STRATEGIES[self.split.strategy].promise
        whole = self.split.layout.model_ranks == 1
        return promise if whole else max(promise, "rounding", key=PROMISES.index)

    @property
    def short_bytes(self) -> int:
        """By how much memory falls short; at most 0 where it does not."""
        return 0 if self.memory is None else self.memory.total - self.room_bytes

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        memory = self.memory
        return {
            "strategy": self.split.strategy,
            "ranks": self.split.world_size,
            "parallel": asdict(self.split.layout),
            "schedule": self.split.schedule if self.split.layout.pp > 1 else None,
            "shared_weights": self.split.shared_weights,
            "micro_batch_size": self.work.micro_batch_size,
            "num_leaves": self.work.num_leaves,
            "activation_checkpointing": self.work.activation_checkpointing,
            "memory_bytes": None if memory is None else asdict(memory) | {"total": memory.total},
            "room_bytes": self.room_bytes or None,
            "step": None if self.time is None else self.time.to_json(),
            "promise": self.promise,
            "obstacle": self.obstacle or None,
            "remark": self.remark or None,
        }


def counts(hardware: Hardware) -> list[int]:
    """How many devices to try: one, a host's, the largest power of two, and all."""
    total = len(hardware.devices)
    return sorted({1, len(hardware.hosts[0].devices), 1 << (total.bit_length() - 1), total})


def splits(count: int, hardware: Hardware, strategies: Sequence[str]) -> Iterator[Split]:
    """Every split of `count` devices: strategies x (replicas, stages, shards).

    One replica has nobody to synchronise with: it is listed once for each promise.
    """
    most_shards = max(len(host.devices) for host in hardware.hosts)
    for layout in _layouts(count, most_shards):
        for strategy in _usable(strategies, layout):
            shared = _shares_weights(strategy, layout, hardware)
            yield Split(strategy=strategy, layout=layout, shared_weights=shared)


def obstacle(work: Workload, split: Split) -> str:
    """Why arithmetic alone forbids it, in words; empty where nothing does."""
    layout, leaves = split.layout, work.num_leaves
    if layout.dp > leaves:
        return f"{layout.dp} replicas cannot share {leaves} leaves"
    equal = layout.model_ranks > 1 or STRATEGIES[split.strategy].equal_leaves
    if equal and leaves % layout.dp:
        return f"{leaves} leaves do not divide by {layout.dp}"
    return _indivisible(work, layout) if layout.model_ranks > 1 else ""


def _indivisible(work: Workload, layout: Layout) -> str:
    """Why the model cannot be divided so; what `train/check.py` refuses."""
    model, share = work.model, work.num_leaves // layout.dp
    if layout.pp > model.n_layer:
        return f"{model.n_layer} layers are fewer than {layout.pp} stages"
    if layout.pp > share:
        return f"{share} leaves of a replica are fewer than {layout.pp} stages"
    for name, size in (
        ("heads", model.n_head),
        ("key and value heads", model.num_kv_heads),
        ("channels of the SwiGLU", model.mlp_dim),
    ):
        if size % layout.tp:
            return f"{size:,} {name} do not divide by {layout.tp}"
    return "fp16's loss scale is not known to all parts" if work.dtype == "fp16" else ""


def _usable(strategies: Sequence[str], layout: Layout) -> Sequence[str]:
    """Strategies that can keep replicas of such a layout together."""
    if layout.model_ranks > 1:
        # Replicas of a part stay whole, and know of no hosts: see `parallel/split_sync.py`.
        strategies = [name for name in strategies if _keeps_whole(name)]
    if layout.dp > 1:
        return strategies
    # Alone, strategies differ in how they add up leaves, which is what they promise.
    promises = {STRATEGIES[name].promise: name for name in reversed(strategies)}
    return [name for name in strategies if name in promises.values()]


def _keeps_whole(strategy: str) -> bool:
    """As `train/check.py` has it."""
    recipe = STRATEGIES[strategy].recipe
    if recipe is None:
        return strategy == "naive"
    return recipe.shard == "none" and recipe.reduction != "hierarchical"


def _layouts(count: int, most_shards: int) -> Iterator[Layout]:
    """Sizes whose product is `count`, replicas first."""
    for model_ranks in _divisors(count):
        for tp in _divisors(model_ranks):
            # Shards talk in every layer: never between hosts.
            if tp <= most_shards:
                yield Layout(dp=count // model_ranks, pp=model_ranks // tp, tp=tp)


def _shares_weights(strategy: str, layout: Layout, hardware: Hardware) -> bool:
    """Whether `gradsync train` keeps one copy of the weights for all ranks."""
    recipe = STRATEGIES[strategy].recipe
    if recipe is None or layout.model_ranks > 1 or len(hardware.hosts) > 1 or layout.dp == 1:
        return False
    plain = (recipe.grouping, recipe.shard, recipe.reduction, recipe.wire)
    on_cpu = hardware.devices[0].kind == "cpu"
    return on_cpu and plain == ("buckets", "none", "backend", "same")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
