"""Which model fits into memory, for measurements that may choose one. No torch here.

A rank is counted as one of `ddp`, by the formulas of `plan/memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.presets import PRESETS, preset
from gradsync.parallel.layout import Layout
from gradsync.plan.description import Kind
from gradsync.plan.memory import MemoryNeed, memory_need
from gradsync.plan.workload import Split, Workload
from gradsync.runtime.memory_limit import available_bytes

DEVICES = ("auto", "cpu", "cuda")
_SHARE = 0.9
"""The part of the free memory that may be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The models and leaves to be held at once."""

    leaf_tokens: int
    """Tokens of one micro-batch."""
    ranks: int
    """Processes in all, idle ones included."""
    busy_ranks: int
    """Processes that train at the same time."""
    contestants: int = 1
    """Models that a rank holds side by side."""
    kind: Kind = "cpu"
    """The kind of device of a rank."""


def needed_bytes(config: GPTConfig, load: Load) -> int:
    """Memory of all ranks of the host together."""
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


def uses_cuda(device: str) -> bool:
    """Whether accelerators will compute; asks torch only when it must.

    Raises:
        ConfigError: no such device, or none here.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}; got {device!r}")
    if device == "cpu":
        return False
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device here; take cpu or auto")
        return True
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/kfd").exists():
        return False
    import torch

    return torch.cuda.is_available()


def memory_for(device: str, *, leaf_tokens: int, ranks: int, busy_ranks: int) -> tuple[Load, int]:
    """The load, and the bytes it has to fit into: all ranks into the host, or one into its device.

    Raises:
        ConfigError: see `uses_cuda`.
    """
    if not uses_cuda(device):
        return Load(leaf_tokens=leaf_tokens, ranks=ranks, busy_ranks=busy_ranks), available_bytes()
    import torch

    room = torch.cuda.get_device_properties(0).total_memory
    return Load(leaf_tokens=leaf_tokens, ranks=1, busy_ranks=1, kind="cuda"), room


def size_of(name: str, load: Load, room: int) -> str:
    """The preset to take: the one that was named, or the largest that fits into `room` bytes.

    Raises:
        ConfigError: unknown, or it does not fit.
    """
    if name == "auto":
        name = largest_that_fits(load, room) or "tiny"
    preset(name)
    check_fits(name, load, room)
    return name
