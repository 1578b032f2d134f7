"""A launch as data: how many ranks where, started by what, meeting where, running what."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import Literal

from gradsync.errors import ConfigError
from gradsync.launch.program import Program

Launcher = Literal["srun", "mpirun", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = ("srun", "mpirun", "torchrun")
"""Launchers of a Slurm job's ranks."""

DEFAULT_PORT = 29_500
"""Port of the first node where ranks of several nodes meet; torch's own default."""

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Ranks started by hand: on this node, or one line for each of several."""

    program: Program
    """Command of each rank."""
    ranks_per_node: int
    """Ranks on each node."""
    nodes: int = 1
    """Number of nodes."""
    node_rank: int | None = None
    """This node's number; None on one node, or to say what to start on each."""
    coordinator: str = ""
    """Name or address of node 0, as the others reach it; "" on one node."""
    port: int = DEFAULT_PORT
    """Port on node 0."""
    max_restarts: int = 0
    """How often all ranks of a node are started again after a failure; on one node only."""
    wait_s: float = 300.0
    """How long nodes wait for each other at the start, seconds."""

    def __post_init__(self) -> None:
        _at_least("--nproc-per-node", self.ranks_per_node, 1)
        _at_least("--nnodes", self.nodes, 1)
        _at_least("--max-restarts", self.max_restarts, 0)
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise ConfigError(
                f"--node-rank must be in 0..{self.nodes - 1} with --nnodes {self.nodes}; "
                f"got {self.node_rank}"
            )
        if not 1 <= self.port <= 65_535:
            raise ConfigError(f"--master-port must be in 1..65535; got {self.port}")
        if self.coordinator and _HOST.fullmatch(self.coordinator) is None:
            raise ConfigError(
                f"--master-addr must be a host name or address; got {self.coordinator[:80]!r}"
            )
        if self.nodes > 1 and not self.coordinator:
            raise ConfigError("--nnodes above 1 needs --master-addr: how others reach node 0")
        if self.nodes > 1 and self.max_restarts:
            raise ConfigError("--max-restarts works on one node; start again by hand on several")
        if not self.wait_s > 0:
            raise ConfigError(f"--wait-s must be positive; got {self.wait_s}")

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nodes * self.ranks_per_node

    def line(self, node_rank: int) -> str:
        """Command for node `node_rank`, ready for a shell."""
        plan = replace(self, node_rank=node_rank)
        words = ["gradsync", "launch", "--nproc-per-node", str(plan.ranks_per_node)]
        if plan.nodes > 1:
            words += ["--nnodes", str(plan.nodes), "--node-rank", str(node_rank)]
            words += ["--master-addr", plan.coordinator, "--master-port", str(plan.port)]
        command = plan.program.words[2:] if plan.program.command else None
        given = ("python", *plan.program.words) if plan.program.by_python else plan.program.words
        return shlex.join([*words, "--", *(command or given)])


def _at_least(flag: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ConfigError(f"{flag} must be at least {smallest}; got {value}")
