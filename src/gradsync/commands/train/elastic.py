"""Decisions of `gradsync train --elastic` from the hardware, as values for the configuration.

[Note: Resolved once] Strategy, dtype and micro-batch determine bits: the micro-batch is the shape
of a leaf. So they are chosen when a run begins and written to its config.yaml by name. A resumed
run keeps them, whatever is measured or found later, as under `--sync auto`.

Settings that the user gave, by flag or file, never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.plan.choice import (
    USUAL,
    Candidate,
    Costs,
    Recommendation,
    Search,
    choose,
    preferred,
    remedy,
)
from gradsync.commands.plan.description import Hardware, speed_switches
from gradsync.commands.plan.workload import Workload, sizes_text
from gradsync.commands.train.config import AUTO, SyncConfig, TrainConfig
from gradsync.commands.train.config_io import HINTS, typed
from gradsync.commands.train.micro_batch import legal_sizes
from gradsync.commands.train.tuned import begun_options, begun_with
from gradsync.errors import ConfigError, RunError
from gradsync.sync.registry import find_strategy

_KEPT = ("dtype", "tf32", "sync", "sync_options", "parallel", "activation_checkpointing")
_KEPT += ("micro_batch_size",)
"""Fields that a resumed run keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChanges:
    """Changes to the configuration, and why."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainConfig`; plain values that JSON can write."""
    ranks: int | None = None
    """Number of ranks worth starting on this host; None if it is decided elsewhere."""
    notes: tuple[str, ...] = ()  # One line each

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """`config` with the changes."""
        changes = dict(self.changes)
        if "sync_options" in changes:
            changes["sync_options"] = SyncConfig(**changes["sync_options"])
        return replace(config, **changes)


def decide(
    config: TrainConfig,
    given: frozenset[str],
    shape: GPTConfig,
    hardware: Hardware,
    env: Mapping[str, str],
    *,
    world_size: int | None = None,
) -> ConfigChanges:
    """All settings but the micro-batch, which is probed; RunError if the model fits nowhere.

    Args:
        config: as parsed.
        given: fields that the user set.
        shape: of the model, with the data's vocabulary.
        hardware: of the hosts that take part; one device per possible rank.
        env: the environment, for suggestions.
        world_size: number of ranks, if fixed; None: to be chosen.
    """
    given -= {"dtype"} if config.dtype == AUTO else set()
    begun = begun_with(config)
    if begun is not None:
        given |= {"sync_options"} if "sync" in given else set()  # they belonged to another strategy
        place, values = begun
        changes = {name: values[name] for name in _KEPT if name in values and name not in given}
        for name in changes.keys() & HINTS.keys():
            changes[name] = typed(changes[name], HINTS[name], f"{place}: {name}")
        if "sync_options" in changes:
            changes["sync_options"] = begun_options(place, values)
        goes_on = ConfigChanges(changes=changes).applied_to(config)
        named = ", ".join(f"{name} {value}" for name, value in changes.items() if value)
        return ConfigChanges(
            changes=changes,
            ranks=None if world_size else _most_ranks(goes_on, hardware),
            notes=(f"goes on as it began: {named}",),
        )
    switches = speed_switches(hardware, env)
    changes: dict[str, Any] = {}
    if "dtype" not in given:
        changes["dtype"] = switches.dtype
    if "tf32" not in given and hardware.devices[0].kind == "cuda":
        changes["tf32"] = switches.tf32
    notes = [switches.reason]
    if "dtype" in given and config.dtype != switches.dtype:
        notes = [f"dtype {config.dtype} as given; fastest here is {switches.dtype}"]
    notes += [f"may help, not set: {line}" for line in switches.suggestions]
    config = replace(config, **changes)
    if "parallel" in given or config.sync == AUTO:
        smallest = config if "micro_batch_size" in given else replace(config, micro_batch_size=1)
        ranks = None if world_size else _most_ranks(smallest, hardware)
        return ConfigChanges(changes=changes, ranks=ranks, notes=tuple(notes))
    taken = _choose(config, given, shape, hardware, world_size)
    if not given & {"sync", "sync_options"}:
        changes["sync"] = taken.split.strategy
    layout = taken.split.layout
    if layout.model_ranks > 1:
        changes["parallel"] = sizes_text(layout)
        if "micro_batch_size" not in given:  # a split model is not probed
            changes["micro_batch_size"] = taken.work.micro_batch_size
    if taken.work.activation_checkpointing and not config.activation_checkpointing:
        changes["activation_checkpointing"] = True
    notes.append(
        f"{taken.split}: {taken.remark or 'the fastest that fits'} (gradsync plan shows all)"
    )
    return ConfigChanges(changes=changes, ranks=layout.world_size, notes=tuple(notes))


def _most_ranks(config: TrainConfig, hardware: Hardware) -> int:
    """The largest number of ranks that have a device each and that the batch can be cut for."""
    equal = config.sync != AUTO and find_strategy(config.sync).equal_leaves
    for ranks in range(len(hardware.devices), 1, -1):
        try:
            plan = config.batch_plan(ranks)
        except ConfigError:
            continue
        if not (equal and plan.num_micro_batches % ranks):
            return ranks
    return 1


def _choose(
    config: TrainConfig,
    given: frozenset[str],
    shape: GPTConfig,
    hardware: Hardware,
    world_size: int | None,
) -> Candidate:
    """The split to use, by closed formulas; on `world_size` ranks if given."""
    sequences = config.sequences_per_update
    size = config.micro_batch_size
    sizes: tuple[int, ...] = (size,)
    if "micro_batch_size" not in given:
        sizes = legal_sizes(sequences, 1)
        size = size if size in sizes else sizes[0]
    named = given & {"sync", "sync_options"}
    recompute = "activation_checkpointing" in given or config.activation_checkpointing
    search = Search(
        strategies=tuple(dict.fromkeys(((config.sync,) if named else ()) + USUAL)),
        micro_batch_sizes=tuple(dict.fromkeys((size, *sizes))),
        checkpointing=(config.activation_checkpointing,) if recompute else (False, True),
    )
    work = Workload(
        model=shape,
        micro_batch_size=size,
        seq_len=config.sequence_length,
        num_leaves=sequences // size,
        dtype=config.named_dtype,
        activation_checkpointing=config.activation_checkpointing,
        loss_rows=config.loss_rows,
        kind=hardware.devices[0].kind,
    )
    costs = Costs()
    choice = choose(work, hardware, costs, search)
    taken = _best(choice, world_size, config.sync if named else "")
    if taken is None:
        raise RunError(remedy(config.preset, choice, work, hardware, costs))
    return taken


def _best(choice: Recommendation, world_size: int | None, strategy: str) -> Candidate | None:
    """The pick, unless its strategy or number of ranks is not the requested one, or it splits a
    model that fits whole: whole replicas can be probed, and give the same bits on any number."""
    fitting = [
        each
        for each in choice.candidates
        if each.runs
        and world_size in (None, each.split.world_size)
        and strategy in ("", each.split.strategy)
    ]
    fitting = [c for c in fitting if c.split.layout.model_ranks == 1] or fitting
    if not fitting or choice.pick in fitting:
        return choice.pick if fitting else None
    taken = preferred(fitting, choice.search)
    return replace(taken, remark="as fast as any of those that were asked for")
