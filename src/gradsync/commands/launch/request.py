"""A launch as data: the program, the ranks on each node, their launcher and meeting point."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.core.files import perhaps
from gradsync.errors import ConfigError

STOPPED = 75
"""Stopped after a signal with the checkpoint written; start the command again."""

RANK_COMMANDS = ("train", "verify", "bench", "tune", "doctor")
"""Commands of gradsync that can run as one rank of many."""
_PYTHONS = ("python", "python3")

DEFAULT_PORT = 29_500
"""Port on the first node at which ranks of several nodes meet; torch's default."""

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command line, as words that no shell has parsed."""

    words: tuple[str, ...]  # after the interpreter when `by_python`, else the whole command line
    by_python: bool = True
    """Run by the same Python as gradsync; otherwise `words[0]` is a program."""

    @property
    def command(self) -> str:
        """`train` for `gradsync train …`, "" for other programs."""
        own = self.by_python and self.words[:2] == ("-m", "gradsync") and len(self.words) > 2
        return self.words[2] if own else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of gradsync's own command."""
        return self.words[3:] if self.command else ()

    @property
    def name(self) -> str:
        """A short name: the command, module or script, without folders and suffixes."""
        if self.command:
            return self.command
        if not self.by_python:
            return self.words[0].rpartition("/")[2]
        if self.words[0] == "-m":
            return self.words[1]
        script = next((word for word in self.words if word.endswith(".py")), "python")
        return script.rpartition("/")[2].removesuffix(".py")

    def argv(self, python: str) -> tuple[str, ...]:
        """The whole command line, with `python` as the interpreter."""
        return (python, *self.words) if self.by_python else self.words


def parse_program(words: Sequence[str]) -> Program:
    """A program from the words after `--`.

    Forms: `train ARGS` (any command of `RANK_COMMANDS`, optionally preceded by `gradsync`),
    `SCRIPT.py ARGS`, `-m MODULE ARGS`, `python …` (the same Python as gradsync), or any other
    program, unchanged.
    """
    rest = tuple(words[1:] if words[:1] == ["gradsync"] else words)
    if not rest:
        raise ConfigError(
            "what is to run? Write it after --, for example: -- train mini, or -- my_script.py"
        )
    first = rest[0]
    if first in RANK_COMMANDS:
        return Program(words=("-m", "gradsync", *rest))
    if len(rest) < len(words):
        raise ConfigError(
            f"gradsync {first} is no command for ranks{perhaps(first, RANK_COMMANDS)} (there are: "
            f"{', '.join(RANK_COMMANDS)})"
        )
    if rest == ("-m",):
        raise ConfigError("-m needs the name of a module after it")
    if first in _PYTHONS:
        if len(rest) == 1:
            raise ConfigError(f"{first} alone runs nothing; name a script or -m MODULE after it")
        return Program(words=rest[1:])
    return Program(words=rest, by_python=first == "-m" or first.endswith(".py"))


def unknown_program(first: str) -> ConfigError:
    """The error for a program that is not found."""
    return ConfigError(
        f"{first!r} is neither a command of gradsync for ranks ({', '.join(RANK_COMMANDS)}), nor a "
        f"script that ends in .py, nor a program on the PATH{perhaps(first, RANK_COMMANDS)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """Ranks by hand, under the names of the flags."""

    nproc_per_node: int
    """Ranks on each node."""
    nnodes: int = 1
    """Nodes."""
    node_rank: int | None = None
    """This node's number, from 0; without it, several nodes only print their lines."""
    master_addr: str = ""
    """Name or address by which the other nodes reach node 0; default in the lines: this host's."""
    master_port: int = DEFAULT_PORT
    """Port on node 0."""
    max_restarts: int = 0
    """Start all ranks again after a failure, at most this often; on one node."""
    log_dir: str = ""
    """Keep the standard output of ranks above 0 in this folder; otherwise it is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan(LaunchRequest):
    """Ranks started by hand: on this node, or one line for each of several. Checked on creation."""

    program: Program  # command of each rank

    def __post_init__(self) -> None:
        for flag, value, smallest in (
            ("--nproc-per-node", self.nproc_per_node, 1),
            ("--nnodes", self.nnodes, 1),
            ("--max-restarts", self.max_restarts, 0),
        ):
            if value < smallest:
                raise ConfigError(f"{flag} must be at least {smallest}; got {value}")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank must be in 0..{self.nnodes - 1} with --nnodes {self.nnodes}; "
                f"got {self.node_rank}"
            )
        if not 1 <= self.master_port <= 65_535:
            raise ConfigError(f"--master-port must be in 1..65535; got {self.master_port}")
        if self.master_addr and _HOST.fullmatch(self.master_addr) is None:
            raise ConfigError(
                f"--master-addr must be a host name or address; got {self.master_addr[:80]!r}"
            )
        if self.nnodes > 1 and not self.master_addr:
            raise ConfigError("--nnodes above 1 needs --master-addr: how others reach node 0")
        if self.nnodes > 1 and self.max_restarts:
            raise ConfigError("--max-restarts works on one node; start again by hand on several")

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nnodes * self.nproc_per_node

    def line(self, node_rank: int) -> str:
        """Command for node `node_rank`, quoted for a shell."""
        return shlex.join(["gradsync", *self.words(str(node_rank))])

    def words(self, node_rank: str) -> list[str]:
        """Arguments of `gradsync` for node `node_rank`."""
        words = ["launch", "--nproc-per-node", str(self.nproc_per_node)]
        if self.nnodes > 1:
            words += ["--nnodes", str(self.nnodes), "--node-rank", node_rank]
            words += ["--master-addr", self.master_addr, "--master-port", str(self.master_port)]
        command = self.program.words[2:] if self.program.command else None
        given = ("python", *self.program.words) if self.program.by_python else self.program.words
        return [*words, "--", *(command or given)]


def may_restart(failures: Sequence[int]) -> bool:
    """True if a restart can help: not after a usage error or a requested stop."""
    return not any(code in (2, STOPPED, 130) for code in failures)
