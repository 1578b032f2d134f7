"""`gradsync train`: runs as one rank of a launcher, as N ranks that it starts, or alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gradsync.commands.cli.elastic import before_ranks, take_flag, with_ranks
from gradsync.commands.cli.train_places import settle, take_places
from gradsync.commands.plan.machine import fast_dtype
from gradsync.commands.train.check import check_request, check_size
from gradsync.commands.train.config import AUTO, TrainConfig
from gradsync.commands.train.config_io import parse_config
from gradsync.commands.train.faults import FaultPlan
from gradsync.commands.train.trackers import require_packages
from gradsync.commands.train.tuned import apply_choice, begun_dtype, resolve_auto, resolve_dtype
from gradsync.core.files import counted
from gradsync.data.batch_plan import BatchPlan
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import busy, choose_threads, host_cores
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import find_strategy
from gradsync.world import World

_KEEPS_MEMORY = "memory freed by a step is kept for the next one, which is faster; "
_KEEPS_MEMORY += "--no-keep-memory gives it back"
_EMULATED = "this device has no bf16 and emulates it, many times slower than --dtype fp32"


def run(argv: list[str], fault: FaultPlan | None = None) -> int:
    """See `gradsync train --help`. `--json` prints the summary, `--dry-run` only the plan.

    `fault` is injected into this rank of a drill.
    """
    world = resolve(environ.snapshot()).world
    places, argv = take_places(complete_flags(argv))
    if places is not None:
        argv = settle(places, argv, world, environ.snapshot())
    as_json, dry_run = "--json" in argv, "--dry-run" in argv
    flags = [flag for flag in argv if flag not in ("--json", "--dry-run")]
    elastic, flags = take_flag(flags)
    config = _parse_once(flags, world)
    if elastic:
        config, flags = before_ranks(config, elastic, flags, world, dry_run=dry_run)
    if world.is_distributed and config.nproc_per_node not in (None, world.world_size):
        raise ConfigError(
            f"--nproc-per-node {config.nproc_per_node}, but {world.launcher} has started "
            f"{counted(world.world_size, 'rank')} already; drop the flag, or start with python"
        )
    world_size = world.world_size if world.is_distributed else config.nproc_per_node or 1
    plan = check_request(config, world_size)
    if not world.is_distributed:  # otherwise only rank 0 checks, and tells the others
        require_packages(config.track)
    if dry_run:
        if config.dtype == AUTO:
            named: Any = begun_dtype(config)[0] or fast_dtype(config.device)
            config = replace(config, dtype=named)
        if config.sync == AUTO:
            config = _would_be(config, world, world_size)
        return _show_plan(config, plan, as_json=as_json)
    # The run checks again, with the data's vocabulary; this check comes before torch is imported.
    check_size(config.model, device=config.device, num_nodes=world.num_nodes)
    if world_size > world.world_size:
        return _start_ranks(config, flags, as_json)
    # Torch's warnings about its sockets repeat our one-line errors, with stacks.
    quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with environ.exported(quiet):
        return _join_run(config, as_json, flags if elastic else None, fault)


def complete_flags(argv: list[str]) -> list[str]:
    """The arguments, with defaults for missing values: `--resume auto` and `--compile model`."""
    alone = {"--resume": "--resume=auto", "--compile": "--compile=model"}
    following = [*argv, "--"][1:]
    return [
        alone.get(word, word) if after.startswith("-") else word
        for word, after in zip(argv, following, strict=True)
    ]


def _parse_once(flags: list[str], world: World) -> TrainConfig:
    """Parse, with the same help only on the main rank; a `..` in `out` is resolved."""
    with contextlib.redirect_stdout(sys.stdout if world.is_main else io.StringIO()):
        config = parse_config(flags)
    out = Path(config.out)
    return replace(config, out=str(out.resolve())) if ".." in out.parts else config


def _start_ranks(config: TrainConfig, flags: list[str], as_json: bool) -> int:
    """Start the ranks on this host with the same arguments."""
    from gradsync.commands.launch.local import launch_ranks
    from gradsync.commands.train.output import default_out

    assert config.nproc_per_node is not None
    if not config.out:
        flags = [*flags, "--out", default_out(config)]
    argv = ["train", *flags, *(["--json"] if as_json else [])]
    ended = launch_ranks(argv, config.nproc_per_node, log_dir=None)
    # Ranks past their start exit with 75, and print it; the signal ends earlier ones.
    if ended.received is not None and ended.code == 128 + ended.received:
        said = f"gradsync: error: {ended.received.name} ended the ranks before they could save"
        print(said, file=sys.stderr, flush=True)
    return ended.code


def _join_run(
    config: TrainConfig, as_json: bool, elastic: list[str] | None, fault: FaultPlan | None
) -> int:
    """Be one rank of the run; `elastic`: the arguments that request it."""
    from gradsync.comm.groups import communicator
    from gradsync.comm.values import broadcast_json
    from gradsync.commands.train.output import default_out
    from gradsync.commands.train.run import note_end, note_failure, train
    from gradsync.runtime.session import Session, SessionOptions

    session = Session(
        SessionOptions(
            device=config.device,
            backend=config.backend,
            timeout_s=config.timeout_s,
            rendezvous_timeout_s=config.rendezvous_timeout_s,
            silence_s=config.silence_s,
            threads=_threads(config),
            keep_memory=config.keep_memory and _on_cpu(config),
        )
    )
    try:
        with session as world:
            if not config.out:
                out = broadcast_json(communicator(world), default_out(config))
                config = replace(config, out=out)
            session.stacks.folder = f"{config.out}/stacks"
            stream = sys.stderr if as_json else sys.stdout
            cores, ranks = host_cores(), world.local_world_size
            notes = [_KEEPS_MEMORY] if session.keeps_memory else []
            if ranks > cores and world.device_name == "cpu":
                few = counted(cores, "rank")
                notes.append(f"{ranks} ranks share {counted(cores, 'core')}: no faster than {few}")
            if said := busy(os.getloadavg()[0], cores):
                notes.append(f"{said}; the eta and all times change with theirs")
            given = config.dtype == "bf16" and elastic is None
            if given and fast_dtype(world.device_name) != "bf16":
                notes.append(_EMULATED)
            if elastic is not None:
                config, lines = with_ranks(
                    config, elastic, world, communicator(world), threads=session.threads
                )
                check_request(config, world.world_size)
                notes += lines
            config, note = resolve_dtype(config, world, communicator(world))
            notes += [note] if note else []
            if config.sync == AUTO:
                config, note = _named_sync(config, world, threads=session.threads)
                notes.append(note)
            outcome = train(
                config,
                world,
                threads=session.threads,
                stream=stream,
                notes=notes,
                fault=fault,
                watch=session.watch,
            )
            if world.is_main:
                note_end(config, outcome)
            # Launchers end all ranks when the first one exits with a code (75), so the note is
            # written before any rank exits. Whole group, one small message.
            broadcast_json(communicator(world), None)
    except Exception as error:
        # The session has asked the others, so it is known whose failure it was.
        if session.world.is_main:
            note_failure(config, error)
        raise
    if world.is_main and as_json:
        print(json.dumps(outcome.summary, indent=2))
    return outcome.exit_code


def _would_be(config: TrainConfig, world: World, world_size: int) -> TrainConfig:
    """The same as `_named_sync`, without ranks; the line goes to standard error."""
    if not world.is_distributed:
        world = replace(world, world_size=world_size, local_world_size=world_size)
    on_cpu = _on_cpu(config)
    threads = choose_threads(world.local_world_size, requested=_threads(config))
    device = "cpu" if on_cpu else "cuda"
    choice, note = resolve_auto(config, replace(world, device_name=device), threads=threads)
    print(note, file=sys.stderr)
    return apply_choice(config, choice, threads=threads if on_cpu else None)


def _named_sync(config: TrainConfig, world: World, *, threads: int) -> tuple[TrainConfig, str]:
    """The strategy that `auto` stands for, as rank 0 knows it, and a line about it.

    Raises:
        ConfigError: it conflicts with the rest of the configuration.
    """
    from gradsync.comm.groups import communicator
    from gradsync.comm.values import broadcast_json
    from gradsync.commands.train.tuned import TunedStrategy

    mine = None
    if world.is_main:
        choice, note = resolve_auto(config, world, threads=threads)
        mine = [asdict(choice), note]
    # Whole group, two small messages, before other communication starts.
    named, note = broadcast_json(communicator(world), mine)
    config = apply_choice(
        config, TunedStrategy(**named), threads=threads if _on_cpu(config) else None
    )
    check_request(config, world.world_size)
    return config, note


def _threads(config: TrainConfig) -> int | None:
    """Bits depend on the number of intra-op threads, and the number of ranks on a host varies. If
    bits are promised on a CPU it is therefore 1, unless the user sets it."""
    promised = config.sync == AUTO or find_strategy(config.sync).same_on_any_ranks
    return 1 if config.threads is None and promised and _on_cpu(config) else config.threads


def _on_cpu(config: TrainConfig) -> bool:
    import torch

    return config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())


def _show_plan(config: TrainConfig, plan: BatchPlan, *, as_json: bool) -> int:
    """The resolved configuration and batch arithmetic; nothing is started or written."""
    if as_json:
        document = {"config": asdict(config), "plan": asdict(plan)}
        print(json.dumps(document, indent=2))
        return 0
    import yaml

    print(yaml.safe_dump(asdict(config), sort_keys=False), end="")
    print(plan.describe("replica" if config.parallel else "rank"))
    if scaling := config.optim.describe_scaling(config.tokens_per_update):
        print(scaling)
    return 0
