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
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.bounds import MOST_NODES, whole_number
from gradsync.runtime.store import TOKEN
from gradsync.world import World

_WORDS = ("--gpus-per-node", "--nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Numbers of nodes, and of ranks on each."""

    nodes: int
    """Nodes."""
    gpus_per_node: int
    """Ranks of each node, one per GPU; on a machine without GPUs, on its cores."""

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nodes * self.gpus_per_node


def take_places(argv: Sequence[str]) -> tuple[Places | None, list[str]]:
    """The arguments about places, None if absent, and all other arguments.

    Raises:
        ConfigError: an invalid number, or `--ddp` without numbers.
    """
    numbers: dict[str, int] = {}
    others: list[str] = []
    asked = False
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.replace("_", "-").partition("=")
        if word == "--ddp":
            asked = True
        elif name in _WORDS:
            numbers[name] = _number(name, value if equals else next(rest, ""))
        else:
            others.append(word)
    if numbers.get("--gpus-per-node") is None and (asked or numbers):
        raise ConfigError(
            "how many ranks? --ddp and --nodes need --gpus-per-node N (ranks of each node)"
        )
    if not numbers:
        return None, others
    return Places(nodes=numbers.get("--nodes", 1), gpus_per_node=numbers["--gpus-per-node"]), others


def settle(places: Places, flags: Sequence[str], world: World, env: Mapping[str, str]) -> list[str]:
    """Flags with which this process continues.

    In a Slurm allocation with several nodes it does not return: this process becomes srun.

    Raises:
        ConfigError: the launcher started another number of ranks, or none can be started.
    """
    if world.is_distributed or (places.nodes > 1 and world.launcher != "python"):
        if (world.num_nodes, world.world_size) != (places.nodes, places.world_size):
            raise ConfigError(
                f"--nodes {places.nodes} --gpus-per-node {places.gpus_per_node} is "
                f"{counted(places.world_size, 'rank')}, but {world.launcher} has started "
                f"{world.world_size} on {counted(world.num_nodes, 'host')}; drop these flags, or "
                f"correct {world.launcher}'s"
            )
        return list(flags)
    if places.nodes == 1 or "--dry-run" in flags:
        return [*flags, "--nproc-per-node", str(places.world_size)]
    allocated = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES")
    if env.get("SLURM_JOB_ID") and allocated:
        _become_srun(places, flags, allocated)
    raise ConfigError(elsewhere(places, flags))


def elsewhere(places: Places, flags: Sequence[str]) -> str:
    """Command to type instead, if several nodes are requested on a machine that has one."""
    command = shlex.join(["train", *flags])
    size = f"--nodes {places.nodes} --gpus-per-node {places.gpus_per_node}"
    return (
        f"{places.nodes} nodes need a scheduler, or a hand on each of them:\n"
        f"  gradsync submit {size} --time 24:00:00 -- {command}\n"
        f"  gradsync launch --nnodes {places.nodes} --nproc-per-node {places.gpus_per_node} -- "
        f"{command}"
    )


def _become_srun(places: Places, flags: Sequence[str], allocated: str) -> None:
    if allocated != str(places.nodes):
        raise ConfigError(
            f"--nodes {places.nodes}, but this Slurm allocation has {allocated}; make them equal"
        )
    if shutil.which("srun") is None:
        raise ConfigError("this is a Slurm allocation, but there is no srun on the PATH")
    srun = ["srun", f"--nodes={places.nodes}", f"--ntasks-per-node={places.gpus_per_node}"]
    srun.append(f"--ntasks={places.world_size}")
    sys.stdout.flush()
    with environ.exported({TOKEN: secrets.token_hex(32)}):
        os.execvp("srun", [*srun, sys.executable, "-m", "gradsync", "train", *flags])


def _number(name: str, text: str) -> int:
    number = whole_number(text, MOST_NODES)
    if not number:
        raise ConfigError(f"{name} must be a number, 1 to {MOST_NODES}; got {text[:80]!r}")
    return number
