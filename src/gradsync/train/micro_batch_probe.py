"""The largest micro-batch that this run's model really runs with, the same on all ranks.

The global batch stays what it is; only the way it is cut into leaves is looked for. The micro-batch
is the shape of a leaf and with it part of what an `invariant` run is, so it is looked for once, and
a run that goes on keeps its own (see `elastic.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers, broadcast_json
from gradsync.errors import ConfigError, GradsyncError
from gradsync.models.config import GPTConfig
from gradsync.plan.micro_batch import Trial, chosen_size, legal_sizes, try_sizes
from gradsync.plan.probe import Cost, MemoryProbe
from gradsync.sync.registry import STRATEGIES
from gradsync.train.config import AUTO, TrainConfig
from gradsync.train.elastic import sequences_of
from gradsync.train.micro_batch_cache import (
    ProbeConditions,
    Probed,
    read_probed,
    save_probed,
)
from gradsync.train.rehearsal import Rehearsal
from gradsync.train.tuned import run_conditions
from gradsync.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Result of a probe."""

    size: int
    """Sequences of a leaf."""
    note: str
    """How, in one line for the user."""


def sizes_of(config: TrainConfig, world_size: int) -> tuple[int, ...]:
    """Micro-batches that keep the global batch on `world_size` ranks, ascending.

    Raises:
        ConfigError: there is none.
    """
    sequences = sequences_of(config)
    equal = config.sync != AUTO and STRATEGIES[config.sync].equal_leaves
    sizes = legal_sizes(sequences, world_size, equal_leaves=equal)
    if not sizes:
        evenly = ", evenly" if equal and sequences >= world_size else ""
        raise ConfigError(
            f"{world_size} ranks cannot share {sequences} sequences of {config.sequence_length} "
            f"tokens{evenly} (sync={config.sync}): change --tokens-per-update or the number of "
            "ranks"
        )
    return sizes


def find_micro_batch(
    config: TrainConfig,
    shape: GPTConfig,
    world: World,
    comm: Communicator,
    *,
    threads: int,
    keep: bool = True,
    begins: Callable[[], None] = lambda: None,
) -> MicroBatch:
    """Look it up, or try; all ranks call it, and get the same answer.

    Collectives over all ranks: one all-gather of numbers, one broadcast of JSON, then one small
    all-reduce for each size that is tried.

    Args:
        config: with the strategy's name and dtype as they will be.
        shape: of the model, with the data's vocabulary.
        world: with the device.
        comm: over all ranks.
        threads: intra-op threads of a rank.
        keep: write a new answer into the cache.
        begins: called before the first size is tried.

    Raises:
        ConfigError: on all ranks: not even the smallest legal micro-batch runs.
    """
    sizes = sizes_of(config, world.world_size)
    rehearsal = Rehearsal(config, shape, world)
    probe = MemoryProbe(world.device, ranks_here=world.local_world_size)
    limit = max(probe.limit_bytes - rehearsal.communication_bytes, 1)
    # All ranks have looked at the free memory before any of them takes some.
    least = min(all_gather_numbers(comm, limit if probe.works else 0))
    if not least:
        note = f"micro-batch {config.micro_batch_size}: this system does not tell memory in use"
        return MicroBatch(size=config.micro_batch_size, note=note)
    conditions = _conditions(config, shape, world, sizes=sizes, threads=threads)
    known = _known(conditions, least) if world.is_main else None
    told = broadcast_json(comm, None if known is None else asdict(known))
    if told is not None:
        found = Probed(**told)
        return MicroBatch(size=found.size, note=f"{_found(found)}, probed {found.date}")

    def attempt(size: int) -> Cost | None:
        if rehearsal.least_bytes(size) > limit:
            return None
        return probe.run(rehearsal.of(size))

    begins()
    careful = torch.device(world.device).type == "cpu"
    trials = try_sizes(comm, attempt, sizes, limit_bytes=limit, careful=careful)
    rehearsal.close()
    probe.clear()
    size = chosen_size(trials, careful=careful)
    if size is None:
        raise ConfigError(_nothing_fits(config, rehearsal, sizes[0], limit))
    found = _answer(trials, size, least)
    word = _keep(conditions, found) if world.is_main and keep else ""
    return MicroBatch(size=size, note=f"{_found(found)}, {_why(trials, sizes, size)}{word}")


def _known(conditions: ProbeConditions, limit_bytes: int) -> Probed | None:
    kept = read_probed(conditions)
    return kept if kept is not None and kept.holds(limit_bytes) else None


def _answer(trials: Sequence[Trial], size: int, limit_bytes: int) -> Probed:
    took = next(trial for trial in trials if trial.size == size)
    return Probed(
        size=size,
        peak_bytes=max(int(took.peak * limit_bytes), 1),
        limit_bytes=limit_bytes,
        date=time.strftime("%Y-%m-%d"),
    )


def _keep(conditions: ProbeConditions, found: Probed) -> str:
    """Into the cache; a word about it where that cannot be: the run can do without."""
    try:
        save_probed(conditions, found)
    except GradsyncError as error:
        return f" (not kept: {error})"
    return ""


def _conditions(
    config: TrainConfig, shape: GPTConfig, world: World, *, sizes: tuple[int, ...], threads: int
) -> ProbeConditions:
    shared = run_conditions(config, shape, world, threads)
    shared["model"] |= {"dropout": shape.dropout > 0}
    return ProbeConditions(
        **shared,
        activation_checkpointing=config.activation_checkpointing,
        loss_rows=config.loss_rows,
        sizes=list(sizes),
        ranks_here=world.local_world_size,
        sharded=Rehearsal.shards(config),
    )


def _found(found: Probed) -> str:
    took, limit = found.peak_bytes / 1e9, found.limit_bytes / 1e9
    return f"micro-batch {found.size}: takes {took:.2f} of the {limit:.2f} GB that a rank may take"


def _why(trials: Sequence[Trial], sizes: Sequence[int], size: int) -> str:
    """Why it is this one and no larger one."""
    tried = f"tried {', '.join(str(trial.size) for trial in trials)}"
    if size == sizes[-1]:
        return f"{tried}; more would leave ranks without a leaf, or shares uneven"
    failed = [trial.size for trial in trials if not trial.fits]
    if failed:
        return f"{tried}; {min(failed)} does not fit"
    return f"{tried}; larger ones bring no speed, or would not fit"


def _nothing_fits(config: TrainConfig, rehearsal: Rehearsal, size: int, limit_bytes: int) -> str:
    short = rehearsal.least_bytes(size) - limit_bytes
    by = f", at least {short / 1e9:.1f} GB short" if short > 0 else ""
    recompute = "" if config.activation_checkpointing else "--activation-checkpointing, "
    rows = "" if config.loss_rows else "--loss-rows 256, "
    return (
        f"model {config.preset} does not fit: a leaf of {size} x {config.sequence_length} tokens "
        f"takes more than the {limit_bytes / 1e9:.1f} GB that a rank may take here{by}; try "
        f"{recompute}{rows}a smaller model or fewer ranks on this host"
    )
