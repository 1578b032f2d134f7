"""`gradsync train`: runs as one rank of a launcher, as N ranks that it starts, or alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gradsync.commands.train.check import check_request, check_size
from gradsync.commands.train.config import AUTO, TrainConfig
from gradsync.commands.train.config_io import config_text, given_fields, parse_config, to_flags
from gradsync.commands.train.elastic import Decision, decide, hardware_of, take_flag
from gradsync.commands.train.faults import FaultPlan
from gradsync.commands.train.output import default_out
from gradsync.commands.train.trackers import require_packages
from gradsync.commands.train.tuned import apply_choice, dtype_alone, resolve_auto, resolve_dtype
from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import busy, host_cores
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import find_strategy
from gradsync.world import World


def run(argv: list[str], fault: FaultPlan | None = None) -> int:
    """See `gradsync train --help`. `--json` prints the summary, `--dry-run` only the plan.

    `fault` is injected into this rank of a drill.
    """
    world = resolve(environ.snapshot()).world
    argv = complete_flags(argv)
    as_json, dry_run = "--json" in argv, "--dry-run" in argv
    flags = [flag for flag in argv if flag not in ("--json", "--dry-run")]
    elastic, flags = take_flag(flags)
    with contextlib.redirect_stdout(sys.stdout if world.is_main else io.StringIO()):
        config = parse_config(flags)  # its help only on the main rank
    if ".." in (out := Path(config.out)).parts:
        config = replace(config, out=str(out.resolve()))
    if elastic and (dry_run or not world.is_distributed):
        config, flags = _for_this_machine(config, flags, world)
        elastic = False
    if world.is_distributed and config.nproc_per_node not in (None, world.world_size):
        raise ConfigError(
            f"--nproc-per-node {config.nproc_per_node}, but {world.launcher} has started "
            f"{counted(world.world_size, 'rank')} already; drop the flag, or start with python"
        )
    world_size = world.world_size if world.is_distributed else config.nproc_per_node or 1
    if not elastic:  # else rank 0 has yet to choose
        check_request(config, world_size)
    if not world.is_distributed:  # otherwise only rank 0 checks, and tells the others
        require_packages(config.track)
    if dry_run:
        return _show_plan(config, world_size, as_json=as_json)
    # The run checks again, with the data's vocabulary; this check comes before torch is imported.
    check_size(config.model, device=config.device, num_nodes=world.num_nodes)
    if world_size > world.world_size:
        return _start_ranks(config, flags, as_json)
    # Torch's warnings about its sockets repeat our one-line errors, with stacks.
    quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with environ.exported(quiet):
        return _join_run(config, as_json, given_fields(flags) if elastic else None, fault)


def complete_flags(argv: list[str]) -> list[str]:
    """The arguments, with defaults for missing values: `--resume auto` and `--compile model`."""
    alone = {"--resume": "--resume=auto", "--compile": "--compile=model"}
    following = [*argv, "--"][1:]
    return [
        alone.get(word, word) if after.startswith("-") else word
        for word, after in zip(argv, following, strict=True)
    ]


def _for_this_machine(
    config: TrainConfig, flags: list[str], world: World
) -> tuple[TrainConfig, list[str]]:
    """The configuration that `--elastic` chooses, and the flags that say it to the ranks."""
    fixed = world.world_size if world.is_distributed else config.nproc_per_node
    hardware = hardware_of(config, environ.snapshot(), world)
    found = decide(dtype_alone(config), given_fields(flags), hardware, world_size=fixed)
    changes, notes = dict(found.changes), [*found.notes]
    config = found.applied_to(config)
    if fixed is None and found.ranks > 1:
        changes["nproc_per_node"] = found.ranks
        config = replace(config, nproc_per_node=found.ranks)
        notes.append(f"{found.ranks} ranks, one per device")
    for note in notes if world.is_main else ():
        print(f"elastic: {note}", file=sys.stderr, flush=True)
    return config, [*flags, *to_flags(changes)]


def _start_ranks(config: TrainConfig, flags: list[str], as_json: bool) -> int:
    """Start the ranks on this host with the same arguments."""
    from gradsync.commands.launch.local import launch_ranks

    assert config.nproc_per_node is not None
    if not config.out:
        flags = [*flags, "--out", default_out(config)]
    argv = ["train", *flags, *(["--json"] if as_json else [])]
    more = {"on_loss": config.on_loss, "rejoin": config.rejoin}
    return launch_ranks(argv, config.nproc_per_node, log_dir=None, **more).code


def _join_run(
    config: TrainConfig, as_json: bool, given: frozenset[str] | None, fault: FaultPlan | None
) -> int:
    """Be one rank of the run; `given`: the fields that the user set, if rank 0 chooses others."""
    from gradsync.comm.groups import communicator
    from gradsync.comm.values import broadcast_json
    from gradsync.commands.train.run import note_end, note_failure, train
    from gradsync.runtime.session import Session
    from gradsync.runtime.session_options import SessionOptions

    session = Session(
        SessionOptions(
            device=config.device,
            backend=config.backend,
            timeout_s=config.timeout_s,
            rendezvous_timeout_s=config.rendezvous_timeout_s,
            silence_s=config.silence_s,
            threads=_threads(config),
            keep_memory=config.keep_memory and _on_cpu(config),
            on_loss=config.on_loss,
        )
    )
    try:
        with session as world:
            comm = communicator(world)
            if not config.out:
                config = replace(config, out=broadcast_json(comm, default_out(config)))
            session.stacks.folder = f"{config.out}/stacks"
            config, notes = _with_all_ranks(config, given, world, threads=session.threads)
            if said := busy(os.getloadavg()[0], host_cores()):
                notes = [*notes, f"{said}; the eta and all times change with that"]
            outcome = train(
                config,
                world,
                threads=session.threads,
                stream=sys.stderr if as_json else sys.stdout,
                notes=notes,
                fault=fault,
                watch=lambda: session.watch,
            )
            if world.is_main:
                note_end(config, outcome)
            # Launchers end all ranks when the first one exits with a code (75), so the note is
            # written before any rank exits. Whole group, one small message. A loss must not end a
            # run that can go on without a rank: our launcher waits for all.
            if world.recovery is None:
                broadcast_json(communicator(world), None)
    except Exception as error:
        # The session has asked the others, so it is known whose failure it was.
        if session.world.is_main:
            note_failure(config, error)
        elif config.on_loss == "end" and session.presences:
            note_failure(config, error, session.presences[0])
        raise
    if world.is_main and as_json:
        print(json.dumps(outcome.summary, indent=2))
    return outcome.exit_code


def _with_all_ranks(
    config: TrainConfig, given: frozenset[str] | None, world: World, *, threads: int
) -> tuple[TrainConfig, Sequence[str]]:
    """The configuration with every `auto` and, if `given` is not None, every elastic choice
    resolved, the same on all ranks, and lines about them."""
    from gradsync.comm.groups import communicator
    from gradsync.comm.values import from_rank_0
    from gradsync.commands.train.tuned import TunedStrategy

    comm = communicator(world)
    config, line = resolve_dtype(config, world, comm)
    lines = [line] if line else []
    on_cpu = _on_cpu(config)
    if given is not None:

        def chosen() -> list[object]:
            hardware = hardware_of(config, environ.snapshot(), world)
            found = decide(config, given, hardware, world_size=world.world_size)
            return [dict(found.changes), found.notes]

        changes, notes = from_rank_0(comm, chosen)
        config = Decision(changes=changes).applied_to(config)
        if "sync" in changes and config.threads is None and on_cpu:
            config = replace(config, threads=threads)  # the session has its threads already
        lines += [f"elastic: {note}" for note in notes]
    if config.sync == AUTO:

        def tuned() -> list[object]:
            choice, note = resolve_auto(config, world, threads=threads)
            return [asdict(choice), note]

        named, note = from_rank_0(comm, tuned)
        choice = TunedStrategy(**named)
        config = apply_choice(config, choice, threads=threads if on_cpu else None)
        lines.append(note)
    check_request(config, world.world_size)
    return config, lines


def _threads(config: TrainConfig) -> int | None:
    """Bits depend on the number of intra-op threads, and the number of ranks on a host varies. If
    bits are promised on a CPU it is therefore 1, unless the user sets it."""
    promised = config.sync == AUTO or find_strategy(config.sync).same_on_any_ranks
    return 1 if config.threads is None and promised and _on_cpu(config) else config.threads


def _on_cpu(config: TrainConfig) -> bool:
    import torch

    return config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())


def _show_plan(config: TrainConfig, world_size: int, *, as_json: bool) -> int:
    """The resolved configuration and batch arithmetic; nothing is started or written."""
    config = dtype_alone(config)
    plan = config.batch_plan(world_size)
    if as_json:
        print(json.dumps({"config": asdict(config), "plan": asdict(plan)}, indent=2))
        return 0
    print(config_text(config), end="")
    print(plan.describe("replica" if config.parallel else "rank"))
    return 0
