"""`gradsync launch`: start ranks on this host, or print the line for each of several."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from gradsync.commands.launch.request import (
    LaunchPlan,
    LaunchRequest,
    Program,
    parse_program,
    unknown_program,
)
from gradsync.core.files import counted
from gradsync.errors import ConfigError, LaunchError
from gradsync.runtime import environ
from gradsync.runtime.arguments import parse
from gradsync.runtime.resolve import resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions(LaunchRequest):
    """Start ranks by hand: gradsync launch --nproc-per-node N [options] -- PROGRAM ARGS.

    PROGRAM is train (or verify, bench, tune), a script that ends in .py, -m MODULE, or any program.
    On several nodes, --nnodes M prints the line for each node; typed there, it starts that node's
    ranks. The exit code is the ranks': 75 means stopped with a checkpoint.
    """

    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the plan as one JSON document; nothing is started."""
    dry_run: bool = False
    """Print the line for each node; nothing is started."""


def run(argv: list[str]) -> int:
    """Run `gradsync launch ARGV`; returns the ranks' exit code.

    Raises:
        ConfigError: invalid numbers, nothing to run, no such script.
        LaunchError: already started by a launcher.
        RendezvousError: another node is missing.
    """
    own, words = split(argv)
    options = parse(LaunchOptions, own, "launch")
    plan = plan_of(options, parse_program(words))
    if options.as_json or options.dry_run or (plan.nnodes > 1 and plan.node_rank is None):
        print(_as_json(plan) if options.as_json else _as_text(plan))
        return 0
    _refuse_nesting(plan)
    check_program(plan.program)
    _warn_of_lonely_ranks(plan)
    from gradsync.commands.launch.local import launch_ranks
    from gradsync.commands.launch.worker import PROGRAM

    own_command = bool(plan.program.command)
    if not (own_command or plan.log_dir) and plan.nproc_per_node * plan.nnodes > 1:
        print(
            "gradsync: standard output is rank 0's; --log-dir DIR keeps the others'",
            file=sys.stderr,
        )
    command = list(plan.program.words[2:] if own_command else plan.program.argv(sys.executable))
    return launch_ranks(
        command,
        plan.nproc_per_node,
        log_dir=Path(plan.log_dir) if plan.log_dir else None,
        max_restarts=plan.max_restarts,
        module="gradsync" if own_command else PROGRAM,
        nodes=plan if plan.nnodes > 1 else None,
    ).code


_JOINS = re.compile(
    "gradsync|distributed|DataParallel|accelerat|lightning|deepspeed|horovod|fsdp|mpi4py|RANK|"
    r"Trainer|jax|\bray\b"
)
"""Words in scripts whose ranks probably meet."""


def _warn_of_lonely_ranks(plan: LaunchPlan) -> None:
    """Warn if each rank of a plain torch script would train the whole model alone."""
    script = next((Path(word) for word in plan.program.words if word.endswith(".py")), None)
    if plan.nproc_per_node * plan.nnodes < 2 or script is None or not script.is_file():
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


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and the program's: after the first `--`, or from a script on."""
    arguments = list(argv)
    if "--" not in arguments:  # like torchrun
        script = next((i for i, word in enumerate(arguments) if word.endswith(".py")), None)
        return arguments[:script], [] if script is None else arguments[script:]
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def plan_of(options: LaunchOptions, program: Program) -> LaunchPlan:
    """The request as a plan."""
    coordinator = options.master_addr
    if options.nnodes > 1 and not coordinator and options.node_rank is None:
        from gradsync.runtime.network import own_address

        coordinator = own_address()
    request = {field.name: getattr(options, field.name) for field in fields(LaunchRequest)}
    request["master_addr"] = coordinator if options.nnodes > 1 else ""
    return LaunchPlan(program=program, **request)


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
        raise unknown_program(first)


def _refuse_nesting(plan: LaunchPlan) -> None:
    world = resolve(environ.snapshot()).world
    if world.launcher == "env":
        raise LaunchError(
            f"RANK and WORLD_SIZE are those of a run of {counted(world.world_size, 'rank')}; unset "
            "them (env -u RANK -u WORLD_SIZE gradsync launch …), or run the program itself"
        )
    if world.is_distributed:  # a step of one task is a shell, as of `srun --pty bash`
        raise LaunchError(
            f"{world.launcher} has started {counted(world.world_size, 'rank')} already, and "
            f"gradsync launch would start {plan.nproc_per_node} more under each: give "
            f"{world.launcher} the program itself, or call gradsync launch without it"
        )


def _numbers(plan: LaunchPlan) -> range:
    return (
        range(plan.nnodes) if plan.node_rank is None else range(plan.node_rank, plan.node_rank + 1)
    )


def _as_text(plan: LaunchPlan) -> str:
    each = plan.nproc_per_node
    lines = []
    for node in _numbers(plan):
        ranks = f"ranks {node * each} to {node * each + each - 1} of {plan.world_size}"
        here = (
            f", which the others reach at {plan.master_addr}:{plan.master_port}"
            if node == 0
            else ""
        )
        where = f"node {node}{here}" if plan.nnodes > 1 else "this host"
        lines += [f"# {where}: {ranks}", plan.line(node)]
    return "\n".join(lines)


def _as_json(plan: LaunchPlan) -> str:
    document = {
        "nodes": plan.nnodes,
        "ranks_per_node": plan.nproc_per_node,
        "world_size": plan.world_size,
        "node_rank": plan.node_rank,
        "coordinator": plan.master_addr,
        "port": plan.master_port if plan.nnodes > 1 else None,
        "program": list(plan.program.argv("python")),
        "lines": {str(node): plan.line(node) for node in _numbers(plan)},
    }
    return json.dumps(document, indent=1)
