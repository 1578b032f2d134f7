"""What to type for a choice; pure, no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gradsync.hardware.choice.candidate import Candidate
from gradsync.hardware.description import Hardware

_TIME = "24:00:00"
"""Of a turn; a job is requeued until it is done."""


def commands(
    pick: Candidate, hardware: Hardware, model: str, extra: Sequence[str]
) -> list[tuple[str, str]]:
    """Lines to type, each with a word about where: one host needs one, several a launcher.

    Args:
        pick: what to run.
        hardware: what it was chosen for.
        model: its preset.
        extra: further flags of `gradsync train`.
    """
    used = hardware.with_devices(pick.split.world_size)
    ranks = len(used.hosts[0].devices)
    train = shlex.join(["train", model, *train_flags(pick), *extra])
    if len(used.hosts) == 1:
        nproc = f" --nproc-per-node {ranks}" if ranks > 1 else ""
        return [("", f"gradsync {train}{nproc}")]
    nodes = len(used.hosts)
    per_node = "--gpus-per-node" if used.devices[0].kind == "cuda" else "--ntasks-per-node"
    by_hand = f"gradsync launch --nnodes {nodes} --nproc-per-node {ranks} -- {train}"
    slurm = f"gradsync submit --nodes {nodes} {per_node} {ranks} --time {_TIME} -- {train}"
    return [("by hand", by_hand), ("under Slurm", slurm)]


def train_flags(pick: Candidate) -> list[str]:
    """Of `gradsync train`, those that the choice is about."""
    split, work = pick.split, pick.work
    flags = ["--sync", split.strategy]
    layout = split.layout
    if layout.model_ranks > 1:
        sizes = (("pp", layout.pp), ("tp", layout.tp), ("dp", layout.dp))
        flags += ["--parallel", ",".join(f"{name}={size}" for name, size in sizes if size > 1)]
    flags += ["--micro-batch-size", str(work.micro_batch_size)]
    if work.activation_checkpointing:
        flags.append("--activation-checkpointing")
    return flags
