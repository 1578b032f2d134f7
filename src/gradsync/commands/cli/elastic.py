"""`gradsync train --elastic`: choose ranks, strategy, dtype and micro-batch for the machine.

started by us        `before_ranks` decides in this process and gives the ranks explicit flags
by a launcher        rank 0 decides in `with_ranks`, and tells the others
both                 the micro-batch is probed by all ranks, in `with_ranks`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.commands.plan.description import Hardware
from gradsync.commands.plan.machine import detect_hardware
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import read_file, to_flags
from gradsync.commands.train.data import shape_before
from gradsync.runtime import environ
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.base import Communicator
    from gradsync.commands.train.elastic import ConfigChanges

_SPELLINGS = ("--elastic", "--elastic-gpu", "--elastic_gpu")
_DECIDED = "--elastic=decided"
"""Flag for ranks that gradsync starts: they decide only the micro-batch."""


def take_flag(argv: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """The arguments that request it, None if absent, and all other arguments."""
    words = [word for word in argv if word in (*_SPELLINGS, _DECIDED)]
    return words or None, [word for word in argv if word not in words]


def given_fields(flags: Sequence[str]) -> frozenset[str]:
    """Fields of `TrainConfig` that the user set, by flag or in the configuration file."""
    names = set()
    if flags and flags[0].endswith((".yaml", ".yml", ".toml")):
        keys = map(str, read_file(Path(flags[0])))
        names |= {key.replace("-", "_").partition(".")[0] for key in keys}
    for word in flags:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            names.add(name.removeprefix("no_").partition(".")[0])
    return frozenset(names)


def before_ranks(
    config: TrainConfig,
    words: Sequence[str],
    flags: Sequence[str],
    world: World,
    *,
    dry_run: bool = False,
) -> tuple[TrainConfig, list[str]]:
    """The configuration as far as it is known before ranks meet, and the matching arguments.

    Prints its decisions on standard error. With `dry_run` it also decides the micro-batch, in this
    process alone. Raises `RunError` for a model that fits nowhere.
    """
    from gradsync.commands.train.elastic import decide

    given = given_fields(flags)
    if world.is_distributed and not dry_run:
        return _legal(config, given, world.world_size), [*flags, *words]
    fixed = world.world_size if world.is_distributed else config.nproc_per_node
    env = environ.snapshot()
    hardware = _hardware(config, env, world)
    decision = decide(config, given, shape_before(config), hardware, env, world_size=fixed)
    _say(world, decision.notes)
    changes = dict(decision.changes)
    config = decision.applied_to(config)
    ranks = fixed or decision.ranks or 1
    if fixed is None and ranks > 1:
        changes["nproc_per_node"] = ranks
        config = replace(config, nproc_per_node=ranks)
        _say(world, [f"{ranks} ranks, one per {_unit(hardware)}"])
    settled = given | changes.keys()
    config = _legal(config, settled, ranks)
    if dry_run and _to_probe(config, settled, ranks):
        if not world.is_distributed:
            world = World(world_size=ranks, local_world_size=ranks)
        config = _probed_alone(config, hardware, world)
    return config, [*flags, *to_flags(changes), _DECIDED]


def with_ranks(
    config: TrainConfig, flags: Sequence[str], world: World, comm: Communicator, *, threads: int
) -> tuple[TrainConfig, list[str]]:
    """The configuration of the run, the same on all ranks, and lines about it; all ranks call it.

    `flags` come from `before_ranks`. Raises `ConfigError` if not even the smallest micro-batch
    runs.
    """
    from gradsync.commands.train.micro_batch import find_micro_batch

    notes: list[str] = []
    settled = given_fields(flags)
    if _DECIDED not in flags:
        decision = _decision_of_rank_0(config, settled, world, comm)
        config = decision.applied_to(config)
        notes += decision.notes
        settled |= decision.changes.keys()
        if "sync" in decision.changes and config.threads is None and world.device_name == "cpu":
            config = replace(config, threads=threads)  # as under --sync auto
        config = _legal(config, settled, world.world_size)
    if _to_probe(config, settled, world.world_size):
        size, note = find_micro_batch(
            config,
            shape_before(config),
            world,
            comm,
            threads=threads,
            begins=lambda: _say(world, ["trying micro-batches; the answer is kept"]),
        )
        config = replace(config, micro_batch_size=size)
        notes.append(f"{note}; --micro-batch-size {size} gives the same bits again")
    return config, [f"elastic: {note}" for note in notes]


def _decision_of_rank_0(
    config: TrainConfig, given: frozenset[str], world: World, comm: Communicator
) -> ConfigChanges:
    """The whole group calls it: two small messages."""
    from gradsync.comm.values import broadcast_json
    from gradsync.commands.train.elastic import ConfigChanges, decide

    told = None
    if world.is_main:
        env, size = environ.snapshot(), world.world_size
        hardware = _hardware(config, env, world)
        mine = decide(config, given, shape_before(config), hardware, env, world_size=size)
        told = [dict(mine.changes), mine.notes]
    changes, notes = broadcast_json(comm, told)
    return ConfigChanges(changes=changes, notes=tuple(notes))


def _to_probe(config: TrainConfig, settled: frozenset[str], ranks: int) -> bool:
    """Whether to probe the micro-batch here; that of a split model is chosen by formula."""
    return "micro_batch_size" not in settled and config.layout(ranks).model_ranks == 1


def _legal(config: TrainConfig, settled: frozenset[str], ranks: int) -> TrainConfig:
    """With a micro-batch that `ranks` ranks can share, if it is not chosen yet."""
    from gradsync.commands.train.micro_batch import sizes_of

    if "micro_batch_size" in settled:
        return config
    sizes = sizes_of(config, config.layout(ranks).dp)
    below = [size for size in sizes if size <= config.micro_batch_size]
    return replace(config, micro_batch_size=below[-1] if below else sizes[0])


def _probed_alone(config: TrainConfig, hardware: Hardware, world: World) -> TrainConfig:
    """The micro-batch that one rank of `world` finds without the others."""
    from gradsync.comm.groups import SingleCommunicator
    from gradsync.commands.train.micro_batch import find_micro_batch
    from gradsync.runtime.device import choose_device
    from gradsync.runtime.machine import choose_threads

    wanted = config.device if hardware.devices[0].kind == "cuda" else "cpu"
    world = replace(world, device_name=choose_device(wanted, world.local_rank))
    threads = choose_threads(world.local_world_size, requested=config.threads)
    comm = SingleCommunicator()
    shape = shape_before(config)
    size, note = find_micro_batch(config, shape, world, comm, threads=threads, keep=False)
    _say(world, [f"{note} (by one process; the ranks agree when they run)"])
    return replace(config, micro_batch_size=size)


def _hardware(config: TrainConfig, env: dict[str, str], world: World) -> Hardware:
    """Hardware of the ranks: this host's devices, on each of the launcher's hosts."""
    import torch

    if config.device == "cpu" or not torch.cuda.is_available():
        env = env | {"CUDA_VISIBLE_DEVICES": ""}
    local = world.local_world_size if world.is_distributed else config.nproc_per_node
    found = detect_hardware(env, num_hosts=world.num_nodes, ranks_per_host=local)
    host = found.hosts[0]
    if config.device.startswith("cuda:") and not world.is_distributed:
        local = 1
    if local is not None and host.devices[0].kind == "cuda":
        # A scheduler may show each rank only its GPU.
        devices = (host.devices * local)[:local]
        found = replace(found, hosts=(replace(host, devices=devices),) * world.num_nodes)
    return found


def _unit(hardware: Hardware) -> str:
    if hardware.devices[0].kind == "cuda":
        return "GPU"
    return "usable core" if len(hardware.devices) == hardware.hosts[0].cores else "share of the CPU"


def _say(world: World, notes: Sequence[str]) -> None:
    for note in notes if world.is_main else ():
        print(f"elastic: {note}", file=sys.stderr, flush=True)
