"""`gradsync train --elastic`: ranks, strategy and micro-batch chosen for the machine, by formula.

    started by us       the choice is made in this process; the ranks get it as flags
    by a launcher       rank 0 chooses, and tells the others

[Note: Resolved once] Strategy, dtype and micro-batch determine bits. They are chosen when a run
begins and written to its config.yaml by name; a resumed run keeps them, see `begun_config`.
Settings that the user gave, by flag or file, never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gradsync.commands.plan.choice import USUAL, Candidate, Costs, Search, choose, preferred, remedy
from gradsync.commands.plan.description import Hardware
from gradsync.commands.plan.machine import detect_hardware
from gradsync.commands.plan.workload import Workload, sizes_text
from gradsync.commands.train.check import check_request
from gradsync.commands.train.config import AUTO, SyncConfig, TrainConfig
from gradsync.commands.train.config_io import begun_config
from gradsync.commands.train.data import shape_before
from gradsync.errors import ConfigError, RunError
from gradsync.world import World

_SPELLINGS = ("--elastic", "--elastic-gpu", "--elastic_gpu")
_KEPT = ("sync", "sync_options", "parallel", "activation_checkpointing", "micro_batch_size")
"""Fields that a resumed run keeps."""


def take_flag(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the arguments request it, and all other arguments."""
    others = [word for word in argv if word not in _SPELLINGS]
    return len(others) < len(argv), others


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Changes to the configuration, and why."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainConfig`; plain values that JSON can write."""
    ranks: int = 1  # Number of ranks worth starting
    notes: tuple[str, ...] = ()  # One line each

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """`config` with the changes."""
        changes = dict(self.changes)
        if "sync_options" in changes:
            changes["sync_options"] = SyncConfig(**changes["sync_options"])
        return replace(config, **changes)


def decide(
    config: TrainConfig, given: frozenset[str], hardware: Hardware, *, world_size: int | None = None
) -> Decision:
    """What a run on `hardware` (a device for each possible rank) should be; RunError if the model
    fits nowhere. `config` has its dtype named; what is `given` stays; `world_size` if it is fixed.
    """
    if "sync" in given:
        given |= {"sync_options"}  # a run's or a choice's would be another strategy's
    begun = begun_config(config)
    if begun is not None:
        place, before = begun
        changes = {name: getattr(before, name) for name in _KEPT if name not in given}
        if "sync_options" in changes:
            changes["sync_options"] = before.sync_options.given()
        named = ", ".join(f"{name} {value}" for name, value in changes.items() if value)
        ranks = world_size or _most_ranks(Decision(changes=changes).applied_to(config), hardware)
        notes = (f"goes on as it began in {place}: {named}",)
        return Decision(changes=changes, ranks=ranks, notes=notes)
    if "parallel" in given or config.sync == AUTO:
        ranks = world_size or _most_ranks(config, hardware)
        return Decision(ranks=ranks, notes=("the strategy, the split and the batch are as given",))
    taken = _choose(config, given, hardware, world_size)
    changes: dict[str, Any] = {}
    if not given & {"sync", "sync_options"}:
        changes["sync"] = taken.split.strategy
    layout = taken.split.layout
    if layout.model_ranks > 1:
        changes["parallel"] = sizes_text(layout)
    if "micro_batch_size" not in given:
        changes["micro_batch_size"] = taken.work.micro_batch_size
    if taken.work.activation_checkpointing and not config.activation_checkpointing:
        changes["activation_checkpointing"] = True
    why = taken.remark or "the fastest that fits"
    notes = (
        f"{taken.split}, micro-batch {taken.work.micro_batch_size}: {why} "
        "(gradsync plan shows all)",
    )
    return Decision(changes=changes, ranks=layout.world_size, notes=notes)


def _most_ranks(config: TrainConfig, hardware: Hardware) -> int:
    """The largest number of ranks that have a device each and can share the batch."""
    for ranks in range(len(hardware.devices), 1, -1):
        with suppress(ConfigError):
            check_request(config, ranks)
            return ranks
    return 1


def _choose(
    config: TrainConfig, given: frozenset[str], hardware: Hardware, world_size: int | None
) -> Candidate:
    """The candidate to take, on `world_size` ranks if given. Whole replicas come first: they give
    the same bits on any number of ranks."""
    sizes = [config.micro_batch_size]
    sequences = replace(config, micro_batch_size=1).batch_plan(1).num_micro_batches
    if "micro_batch_size" not in given:
        sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
        if hardware.devices[0].kind == "cuda":  # the larger, the fewer launches
            sizes.reverse()
        else:  # one sequence keeps a core busy: the usual size first
            sizes.sort(key=lambda size: abs(size - config.micro_batch_size))
    named = config.sync if given & {"sync", "sync_options"} else ""
    recompute = "activation_checkpointing" in given or config.activation_checkpointing
    search = Search(
        strategies=tuple(dict.fromkeys((*filter(None, [named]), *USUAL))),
        micro_batch_sizes=tuple(sizes),
        checkpointing=(config.activation_checkpointing,) if recompute else (False, True),
    )
    work = Workload(
        model=shape_before(config),
        micro_batch_size=sizes[0],
        seq_len=config.sequence_length,
        num_leaves=sequences // sizes[0],
        dtype=config.named_dtype,
        activation_checkpointing=config.activation_checkpointing,
        kind=hardware.devices[0].kind,
    )
    choice = choose(work, hardware, Costs(), search)
    fitting = [
        each
        for each in choice.candidates
        if each.runs
        and world_size in (None, each.split.world_size)
        and named in ("", each.split.strategy)
    ]
    if not fitting:
        raise RunError(remedy(config.preset, choice, hardware))
    fitting = [c for c in fitting if c.split.layout.model_ranks == 1] or fitting
    if choice.pick is not None and choice.pick in fitting:
        return choice.pick
    return replace(preferred(fitting, search), remark="the best of those asked for")


def hardware_of(config: TrainConfig, env: Mapping[str, str], world: World) -> Hardware:
    """Hardware of the ranks: this host's devices, on each of the launcher's hosts."""
    import torch

    env = dict(env)
    if config.device == "cpu" or not torch.cuda.is_available():
        env["CUDA_VISIBLE_DEVICES"] = ""
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
