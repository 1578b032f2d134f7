"""The numeric fingerprint: everything that decides bits, apart from the data and the weights.

Measured: 16 of 56 fp32 operations change bits with the thread count, ten settings of the CPU's
instruction set gave eight different weight hashes. So a run writes down what it computed with, and
a resume that differs is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradsync.core.files import one_line
from gradsync.data.plan import BatchPlan
from gradsync.errors import CheckpointError
from gradsync.runtime import environ
from gradsync.sync.leaf_tree import TREE_VERSION
from gradsync.sync.registry import find_strategy
from gradsync.train.config import TrainConfig
from gradsync.world import World

Fingerprint = dict[str, str | int | float | bool | None]

# What the machine decides. Between different world sizes most strategies promise the same samples,
# not the same bits, so there these only warn. Under the invariant order the world size does not
# appear, and everything counts.
_MACHINE = ("torch", "device", "cpu_capability", "math_env", "threads", "tf32")
_SPLIT = "parallel"
"""The layout of a split model; whole ones do not have it. Another one gives the same losses to
rounding, as another world size does."""
_MATH_VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def numeric_fingerprint(
    config: TrainConfig, world: World, plan: BatchPlan, *, threads: int
) -> Fingerprint:
    """Everything that decides this run's numbers, equal on all ranks of a homogeneous run."""
    invariant = find_strategy(config.sync).promise == "bitwise"
    on_cuda = world.device.startswith("cuda")
    settings = [f"{name}={value}" for name in _MATH_VARIABLES if (value := environ.get(name))]
    layout = config.layout(world.world_size)
    split = {} if layout.model_ranks == 1 else {_SPLIT: str(layout)}
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(world.device) if on_cuda else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "math_env": " ".join(settings),
        "threads": threads,
        "tf32": config.tf32 if on_cuda else False,
        "dtype": config.dtype,
        "sync": f"invariant tree {TREE_VERSION}" if invariant else config.sync,
        "compile": config.compile,
        "loss_rows": config.loss_rows,
        "leaf_shape": f"{plan.micro_batch_size}x{plan.seq_len}",
        "num_leaves": plan.num_leaves,
        "world_size": None if invariant else world.world_size,
        **split,
    }


def compare(saved: Mapping[str, Any], now: Fingerprint, *, allow_change: bool) -> list[str]:
    """Differences that only deserve a warning.

    Raises:
        CheckpointError: a difference changes the bits, naming each field.
    """
    differs = {
        name: f"{name}: {saved.get(name)!r} then, {now.get(name)!r} now"
        for name in {**now, _SPLIT: None}
        if saved.get(name) != now.get(name)
    }
    if not differs:
        return []
    tolerated = {"world_size", _SPLIT}
    if tolerated & set(differs):
        tolerated |= set(_MACHINE)
    refused = [text for name, text in differs.items() if name not in tolerated]
    if refused and not allow_change:
        raise CheckpointError(
            "the checkpoint was computed with other numerics, bits would change: "
            + one_line("; ".join(refused))
            + " (restore the setting, or go on with --allow-numeric-change)"
        )
    return list(differs.values())
