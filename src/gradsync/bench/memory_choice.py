"""Which model fits into memory, for measurements that may choose one. No torch here.

A rank is counted as one of `ddp`, by the formulas of `hardware/memory/model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.errors import ConfigError
from gradsync.hardware.description import Kind
from gradsync.hardware.memory.model import memory_need
from gradsync.hardware.memory.need import MemoryNeed
from gradsync.hardware.workload import Split, Workload
from gradsync.models.config import GPTConfig
from gradsync.models.presets import PRESETS
from gradsync.parallel.layout import Layout

_SHARE = 0.9
"""Of what is available: the rest is for everybody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is to be held at once."""

    leaf_tokens: int
    """Of one micro-batch."""
    ranks: int
    """Processes in all, idle ones included."""
    busy_ranks: int
    """Processes that train at the same time."""
    contestants: int = 1
    """Models that a rank holds side by side."""
    kind: Kind = "cpu"
    """What a rank trains on."""


def needed_bytes(config: GPTConfig, load: Load) -> int:
    """Of all ranks of the host together."""
    need = _rank(config, load)
    models = load.busy_ranks if load.contestants == 1 else load.ranks * load.contestants
    held = need.weights + need.gradients + need.optimizer + need.buckets
    leaf = need.total - need.process - held
    return load.ranks * need.process + models * held + load.busy_ranks * leaf


def _rank(config: GPTConfig, load: Load) -> MemoryNeed:
    ranks = max(load.busy_ranks, 2)  # one rank alone needs no buckets: that others do, counts
    work = Workload(
        model=config,
        micro_batch_size=1,
        seq_len=load.leaf_tokens,
        num_leaves=ranks,
        kind=load.kind,
    )
    return memory_need(work, Split(strategy="ddp", layout=Layout(dp=ranks)))


def fits(config: GPTConfig, load: Load, available: int) -> bool:
    """Whether `available` bytes are enough."""
    return needed_bytes(config, load) <= _SHARE * available


def largest_that_fits(load: Load, available: int) -> str:
    """The largest preset for which `available` bytes are enough, "" when none is."""
    names = [name for name, config in PRESETS.items() if fits(config, load, available)]
    return max(names, key=lambda name: PRESETS[name].num_params(), default="")


def check_fits(name: str, load: Load, available: int) -> None:
    """Refuse a size before anything is started.

    Raises:
        ConfigError: by how much it does not fit, and what does.
    """
    config = PRESETS[name]
    if fits(config, load, available):
        return
    needed = needed_bytes(config, load)
    usable = _SHARE * available
    other = largest_that_fits(load, available)
    cure = f"{other!r} fits" if other else "no size fits: take fewer ranks"
    raise ConfigError(
        f"model {name}: {load.busy_ranks} rank(s) need about {needed / 1e9:.1f} GB, "
        f"{usable / 1e9:.1f} GB can be used here ({(needed - usable) / 1e9:.1f} GB short); {cure}"
    )
