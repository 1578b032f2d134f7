"""`gradsync launch`: start ranks on this host, or print the line for each of several."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gradsync.commands.arguments import parse
from gradsync.core.files import counted, perhaps
from gradsync.errors import ConfigError, LaunchError
from gradsync.runtime import environ
from gradsync.runtime.bounds import MOST_NODES, whole_number
from gradsync.runtime.resolve import resolve
from gradsync.runtime.store import TOKEN

RANK_COMMANDS = ("train", "verify", "bench", "tune", "doctor")
"""Commands of gradsync that can run as one rank of many."""

_JOINS = re.compile(
    "gradsync|distributed|DataParallel|accelerat|lightning|deepspeed|horovod|fsdp|mpi4py|RANK|"
    r"Trainer|jax|\bray\b"
)
"""Words in scripts whose ranks probably meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Start ranks by hand: gradsync launch --nproc-per-node N [options] -- PROGRAM ARGS.

    PROGRAM is train (or verify, bench, tune), a script that ends in .py, -m MODULE, or any program.
    On several nodes, --nnodes M prints the line for each node; typed there, it starts that node's
    ranks. The exit code is the ranks': 75 means stopped with a checkpoint.
    """

    nproc_per_node: int
    """Ranks on each node."""
    nnodes: str = "1"
    """Nodes; MIN:MAX with --on-loss shrink: MIN begin, the others may join at a checkpoint."""
    node_rank: int | None = None
    """This node's number, from 0; without it, several nodes only print their lines."""
    master_addr: str = ""
    """Name or address by which the other nodes reach node 0; default in the lines: this host's."""
    master_port: int = 29_500
    """Port on node 0."""
    max_restarts: int = 0
    """Start all ranks again after a failure, at most this often; on one node."""
    on_loss: Literal["end", "shrink"] = "end"
    """shrink: when a signal ends a rank, leave the others to gs.init(on_loss="shrink")."""
    rejoin: int = 0
    """With shrink: start a lost rank again, at most this often; it joins at the next checkpoint."""
    log_dir: str = ""
    """Keep the standard output of ranks above 0 in this folder; otherwise it is dropped."""

    def check(self) -> None:
        """Raise ConfigError for values that contradict each other."""
        least, most = self.num_nodes()
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise ConfigError(
                f"--node-rank must be in 0..{most - 1} with --nnodes {self.nnodes}; "
                f"got {self.node_rank}"
            )
        if most > 1 and not self.master_addr:
            raise ConfigError("--nnodes above 1 needs --master-addr: how others reach node 0")
        if least < most and (self.on_loss != "shrink" or not environ.get(TOKEN)):
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --on-loss shrink, and one {TOKEN} on all"
            )
        if most > 1 and self.max_restarts:
            raise ConfigError("--max-restarts works on one node; start again by hand on several")
        if self.rejoin < 0 or (self.rejoin and self.on_loss != "shrink"):
            raise ConfigError(f"--rejoin {self.rejoin}: at least 0, and with --on-loss shrink")

    def num_nodes(self) -> tuple[int, int]:
        """How many begin, and how many there may be."""
        least, colon, most = self.nnodes.partition(":")
        numbers = whole_number(least) or 0, whole_number(most if colon else least) or 0
        if not 1 <= numbers[0] <= numbers[1] <= MOST_NODES:
            raise ConfigError(f"--nnodes {self.nnodes}: a number of nodes, or MIN:MAX")
        return numbers


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
    if first in ("python", "python3"):
        return Program(words=rest[1:])
    return Program(words=rest, by_python=first == "-m" or first.endswith(".py"))


def run(argv: list[str]) -> int:
    """Run `gradsync launch ARGV`; returns the ranks' exit code.

    Raises:
        ConfigError: invalid numbers, nothing to run, no such script.
        LaunchError: already started by a launcher.
        RendezvousError: another node is missing.
    """
    own, words = split(argv)
    options, program = parse(LaunchOptions, own, "launch"), parse_program(words)
    least, most = options.num_nodes()
    several = most > 1
    if several and options.node_rank is None and not options.master_addr:
        from gradsync.runtime.network import own_address

        options = replace(options, master_addr=own_address())
    options.check()
    if several and options.node_rank is None:
        print("\n".join(node_lines(options, program)))
        return 0
    _refuse_nesting(options.nproc_per_node)
    check_program(program)
    from gradsync.commands.launch.agent_rendezvous import Nodes
    from gradsync.commands.launch.local import launch_ranks
    from gradsync.commands.launch.worker import PROGRAM

    if several or options.nproc_per_node > 1:
        _warn_of_lonely_ranks(program)
        if not (program.command or options.log_dir):
            print(
                "gradsync: standard output is rank 0's; --log-dir DIR keeps the others'",
                file=sys.stderr,
            )
    here = Nodes(
        count=least,
        most=most,
        rank=options.node_rank or 0,
        address=options.master_addr,
        port=options.master_port,
    )
    return launch_ranks(
        list(program.words[2:] if program.command else program.argv(sys.executable)),
        options.nproc_per_node,
        log_dir=Path(options.log_dir) if options.log_dir else None,
        max_restarts=options.max_restarts,
        on_loss=options.on_loss,
        rejoin=options.rejoin,
        module="gradsync" if program.command else PROGRAM,
        nodes=here if several else None,
    ).code


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and the program's: after the first `--`, or from a script on."""
    arguments = list(argv)
    if "--" not in arguments:  # like torchrun
        script = next((i for i, word in enumerate(arguments) if word.endswith(".py")), None)
        return arguments[:script], [] if script is None else arguments[script:]
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def check_program(program: Program, *, on_this_host: bool = True) -> None:
    """Raise ConfigError if a script or a program is missing.

    Args:
        on_this_host: a program must be on the PATH; elsewhere, modules may provide it.
    """
    first = program.words[0]
    if program.by_python:
        if first[:1] != "-" and not Path(first).is_file():
            raise ConfigError(f"there is no script {first} (looked in {Path.cwd()})")
    elif on_this_host and shutil.which(first) is None:
        raise ConfigError(
            f"{first!r} is neither a command of gradsync for ranks ({', '.join(RANK_COMMANDS)}), "
            "nor a script that ends in .py, nor a program on the PATH"
            f"{perhaps(first, RANK_COMMANDS)}"
        )


def node_lines(options: LaunchOptions, program: Program) -> list[str]:
    """For each node its ranks, as a comment, and the command to type there, quoted for a shell."""
    each, lines = options.nproc_per_node, []
    words = program.words[2:] if program.command else program.argv("python")
    least, most = options.num_nodes()
    address, port = options.master_addr, str(options.master_port)
    for node in range(most):
        reached = f", which the others reach at {address}:{port}" if node == 0 else ""
        command = ["gradsync", "launch", "--nproc-per-node", str(each)]
        command += ["--nnodes", options.nnodes, "--node-rank", str(node)]
        command += ["--master-addr", address, "--master-port", port]
        if options.on_loss != "end":
            command += ["--on-loss", options.on_loss, "--rejoin", str(options.rejoin)]
        if options.log_dir:
            command += ["--log-dir", str(options.log_dir)]
        ranks = f"ranks {node * each} to {node * each + each - 1} of {least * each}"
        if node >= least:
            ranks = f"{counted(each, 'rank')} that may join at a checkpoint"
        lines += [f"# node {node}{reached}: {ranks}", shlex.join([*command, "--", *words])]
    return lines


def _refuse_nesting(nproc_per_node: int) -> None:
    world = resolve(environ.snapshot()).world
    if not world.is_distributed:  # a step of one task is a shell, as of `srun --pty bash`
        return
    started = f"{world.launcher} has started {counted(world.world_size, 'rank')}"
    if world.launcher == "env":
        started = f"RANK and WORLD_SIZE say that {counted(world.world_size, 'rank')} are started"
    raise LaunchError(
        f"{started} already, and gradsync launch would start {nproc_per_node} more under each: "
        "start the program itself, or call gradsync launch outside"
    )


def _warn_of_lonely_ranks(program: Program) -> None:
    """Warn if each rank of a plain torch script would train the whole model alone."""
    script = next((Path(word) for word in program.words if word.endswith(".py")), None)
    if script is None or not script.is_file():
        return
    text = script.read_text(errors="replace")
    imported = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.MULTILINE)
    roots = {name.partition(".")[0] for name in imported}  # "" for its own package
    own = any(any(script.parent.glob(f"{root}*")) for root in roots - {"torch"})
    if "torch" in roots and ".backward(" in text and not (own or _JOINS.search(text)):
        print(
            f"gradsync: warning: {script} trains with torch, but nothing in it joins ranks: each "
            "would train the same model alone; see gs.init and gs.replicate (docs/guide/moving.md)",
            file=sys.stderr,
        )
