"""`gradsync train --ddp --gpus-per-node G --nodes N`: nodes and ranks in familiar words.

started by a launcher       the numbers must match the launcher's; join it
one node                    start the ranks here, as --nproc-per-node does
in a Slurm allocation       become srun, with one task per rank
several nodes, no Slurm     an error that names the line to submit, and the one to run by hand
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.bounds import MOST_NODES, whole_number
from gradsync.runtime.store import TOKEN
from gradsync.world import World


class Places(NamedTuple):
    """Numbers of nodes, and of ranks on each: one per GPU; on a machine without GPUs, on its
    cores."""

    nodes: int
    gpus_per_node: int


def take_places(argv: Sequence[str]) -> tuple[Places | None, list[str]]:
    """The arguments about places, None if absent, and all other arguments."""
    numbers: dict[str, int] = {}
    others: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.replace("_", "-").partition("=")
        if name in ("--gpus-per-node", "--nodes"):
            text = value if equals else next(rest, "")
            number = whole_number(text, MOST_NODES)
            if not number:
                raise ConfigError(f"{name} must be a number, 1 to {MOST_NODES}; got {text[:80]!r}")
            numbers[name] = number
        elif word != "--ddp":
            others.append(word)
    if "--gpus-per-node" in numbers:
        return Places(numbers.get("--nodes", 1), numbers["--gpus-per-node"]), others
    if numbers or "--ddp" in argv:
        raise ConfigError(
            "how many ranks? --ddp and --nodes need --gpus-per-node N (ranks of each node)"
        )
    return None, others


def settle(places: Places, flags: Sequence[str], world: World, env: Mapping[str, str]) -> list[str]:
    """Flags with which this process continues. In a Slurm allocation with several nodes it does not
    return: this process becomes srun."""
    nodes, gpus = places
    if world.is_distributed or (nodes > 1 and world.launcher != "python"):
        if (world.num_nodes, world.world_size) != (nodes, nodes * gpus):
            raise ConfigError(
                f"--nodes {nodes} --gpus-per-node {gpus} is {counted(nodes * gpus, 'rank')}, but "
                f"{world.launcher} has started {world.world_size} on "
                f"{counted(world.num_nodes, 'host')}; drop these flags, or correct "
                f"{world.launcher}'s"
            )
        return list(flags)
    if nodes == 1 or "--dry-run" in flags:
        return [*flags, "--nproc-per-node", str(nodes * gpus)]
    if not env.get("SLURM_JOB_ID"):
        command = shlex.join(["train", *flags])
        raise ConfigError(
            f"{nodes} nodes need a scheduler, or a hand on each of them:\n"
            f"  gradsync submit --nodes {nodes} --gpus-per-node {gpus} --time 24:00:00 -- "
            f"{command}\n"
            f"  gradsync launch --nnodes {nodes} --nproc-per-node {gpus} -- {command}"
        )
    srun = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--ntasks={nodes * gpus}"]
    sys.stdout.flush()
    with environ.exported({TOKEN: secrets.token_hex(32)}):
        os.execvp("srun", [*srun, sys.executable, "-m", "gradsync", "train", *flags])
    raise AssertionError("execvp does not return")
