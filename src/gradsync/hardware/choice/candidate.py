"""One way to run a workload on some hardware, and what became of it; pure, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.hardware.description import Device, Hardware
from gradsync.hardware.memory.need import MemoryNeed
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.timing.step_time import StepTime
from gradsync.hardware.workload import Split, Workload
from gradsync.sync.registry import STRATEGIES, Promise

PROMISES: tuple[Promise, ...] = ("bitwise", "rounding", "lossy")
"""The strongest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What a choice asks; given to it, so that measured and estimated costs are used alike."""

    memory: Callable[[Workload, Split], MemoryNeed]
    """Bytes of the rank that needs most."""
    profile: Callable[[Workload, Device], StepProfile]
    """What a leaf and an update cost on a device."""
    step: Callable[[Workload, Split, Hardware, StepProfile], StepTime]
    """An optimizer step on exactly the devices that are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What may be tried."""

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
    """What a rank may take on the device that has least."""
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
        """Of a step, where it can run."""
        assert self.time is not None
        return self.time.total_s

    @property
    def promise(self) -> Promise:
        """Of the strategy; where the model itself is divided, sums have another order."""
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
