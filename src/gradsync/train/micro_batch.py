"""The largest micro-batch that this run's model really runs with, the same on all ranks.

The global batch stays what it is; only the way it is cut into leaves is looked for. The micro-batch
is the shape of a leaf and with it part of what an `invariant` run is, so it is looked for once, and
a run that goes on keeps its own (see `elastic.py`). Answers are kept in the user's cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers, broadcast_json
from gradsync.errors import ConfigError, GradsyncError
from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT
from gradsync.parallel.layout import ParallelLayout
from gradsync.plan.memory import memory_need
from gradsync.plan.micro_batch import Trial, chosen_size, legal_sizes, try_sizes
from gradsync.plan.probe import Attempt, Cost, MemoryProbe
from gradsync.plan.workload import Split, Workload
from gradsync.sync.registry import find_strategy
from gradsync.train.config import AUTO, TrainConfig
from gradsync.train.learner import autocast, build_optimizer, summed_loss
from gradsync.train.tuned import Cache, check_line, run_conditions
from gradsync.world import World

_SAME_ROOM = (0.8, 1.25)
"""Times the memory there was when it was measured: with less it may not fit, with more it may be
too small."""
_FP32 = 4
_STATES = 2
_LOGIT_BYTES = 8
"""Bytes of a logit at the very least: its fp32 value and its gradient; see [Note: Loss in rows]."""
_REPEATS, _REPEAT_S = 5, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """A micro-batch that ran."""

    size: int  # Sequences of a leaf
    peak_bytes: int  # Memory taken, on the rank with the least room
    limit_bytes: int  # Memory that rank might have taken
    date: str  # Date of the measurement

    def holds(self, limit_bytes: int) -> bool:
        """Whether it is still the answer where a rank may take `limit_bytes`."""
        least, most = (int(share * self.limit_bytes) for share in _SAME_ROOM)
        return self.peak_bytes <= limit_bytes and least <= limit_bytes <= most

    def __str__(self) -> str:
        took, limit = self.peak_bytes / 1e9, self.limit_bytes / 1e9
        return (
            f"micro-batch {self.size}: takes {took:.2f} of the {limit:.2f} GB that a rank may take"
        )


def _probed(document: Any) -> Probed:
    numbers = {name: document[name] for name in ("size", "peak_bytes", "limit_bytes")}
    if any(type(number) is not int or number < 1 for number in numbers.values()):
        raise ValueError(f"sizes that cannot be: {numbers}")
    if numbers["size"] not in document["conditions"]["sizes"]:
        raise ValueError(f"size {numbers['size']} is not legal")
    return Probed(**numbers, date=check_line(document["date"]))


PROBED = Cache("micro-batch", _probed)  # The micro-batches that were found by probing


def sizes_of(config: TrainConfig, world_size: int) -> tuple[int, ...]:
    """Micro-batches that keep the global batch on `world_size` ranks, ascending."""
    sequences = config.sequences_per_update
    equal = config.sync != AUTO and find_strategy(config.sync).equal_leaves
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
) -> tuple[int, str]:
    """Sequences of a leaf, looked up or tried, and how, in one line; all ranks get the same answer.

    Collectives over all ranks: one all-gather of numbers, one broadcast of JSON, then one small
    all-reduce for each size that is tried. ConfigError on all: not even the smallest one runs.

    Args:
        config: with the strategy's name and dtype as they will be.
        shape: of the model, with the data's vocabulary.
        threads: intra-op threads of a rank.
        keep: write a new answer into the cache.
        begins: called before the first size is tried.
    """
    sizes = sizes_of(config, world.world_size)
    rehearsal = Rehearsal(config, shape, world)
    probe = MemoryProbe(world.device, ranks_here=world.local_world_size)
    limit = max(probe.limit_bytes - rehearsal.communication_bytes, 1)
    # All ranks have looked at the free memory before any of them takes some.
    least = min(all_gather_numbers(comm, limit if probe.works else 0))
    if not least:
        note = f"micro-batch {config.micro_batch_size}: this system does not tell memory in use"
        return config.micro_batch_size, note
    conditions = run_conditions(config, shape, world, threads) | {
        "activation_checkpointing": config.activation_checkpointing,
        "loss_rows": config.loss_rows,
        "sizes": list(sizes),
        "ranks_here": world.local_world_size,
        "sharded": Rehearsal.shards(config),
    }
    conditions["model"] |= {"dropout": shape.dropout > 0}
    known = PROBED.read(conditions) if world.is_main else None
    told = broadcast_json(comm, asdict(known) if known and known.holds(least) else None)
    if told is not None:
        found = Probed(**told)
        return found.size, f"{found}, probed {found.date}"

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
    took = next(trial for trial in trials if trial.size == size)
    found = Probed(
        size=size,
        peak_bytes=max(int(took.peak * least), 1),
        limit_bytes=least,
        date=time.strftime("%Y-%m-%d"),
    )
    word = ""
    if world.is_main and keep:
        try:
            PROBED.save(conditions, found)
        except GradsyncError as error:  # the run can do without
            word = f" (not kept: {error})"
    return size, f"{found}, {_why(trials, sizes, size)}{word}"


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


class Rehearsal:
    """Leaf and update of a run, by one rank alone and without data: what a probe runs.

    The optimizer's state is there from the start, and gradients from an earlier leaf, so that the
    peak is that of a step in the middle of a run. Under strategies that share out the state each
    rank keeps and updates its share. Strategies' own copies of gradients are not made here, but
    counted. The model and its optimizer are made when first needed.
    """

    def __init__(self, config: TrainConfig, shape: GPTConfig, world: World) -> None:
        self._config, self._shape, self._world = config, shape, world
        self._model: GPT | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._owners = world.world_size if self.shards(config) else 1

    @staticmethod
    def shards(config: TrainConfig) -> bool:
        """Whether ranks share out the optimizer's state."""
        if config.sync == AUTO:
            return False
        strategy = find_strategy(config.sync)
        if strategy.recipe is None:
            return config.sync == "fsdp"
        return (config.sync_options.shard or strategy.recipe.shard) != "none"

    @property
    def communication_bytes(self) -> int:
        """Bytes that the strategy takes for messages beside gradients, by `plan/memory`."""
        if not self._world.is_distributed:
            return 0
        work = Workload(
            model=self._shape,
            micro_batch_size=1,
            seq_len=self._config.sequence_length,
            num_leaves=self._config.sequences_per_update,
            dtype=self._config.dtype,
            kind="cuda" if self._world.device.startswith("cuda") else "cpu",
        )
        name = "invariant" if self._config.sync == AUTO else self._config.sync
        split = Split(strategy=name, layout=ParallelLayout(dp=self._world.world_size))
        return memory_need(work, split).buckets

    def least_bytes(self, size: int) -> int:
        """Bytes that a leaf of `size` takes in any case: weights, gradients, states, and logits."""
        rows = self._config.loss_rows or size * self._config.sequence_length
        held = 2 + _STATES / self._owners
        logits = _LOGIT_BYTES * rows * self._shape.vocab_size
        return int(_FP32 * held * self._shape.num_params()) + logits

    def of(self, size: int) -> Attempt:
        """Leaves of `size` and an update; gives the seconds of a leaf that is not the first."""

        def attempt(mark: Callable[[], None]) -> float:
            model, optimizer = self._parts()
            try:
                self._leaf(model, size)
                seconds = self._best_time(lambda: self._leaf(model, size))
                optimizer.step()
                mark()
            finally:
                model.zero_grad(set_to_none=True)
            return seconds

        return attempt

    def close(self) -> None:
        self._model = self._optimizer = None

    def _leaf(self, model: GPT, size: int) -> None:
        shape = (size, self._config.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self._world.device)
        with autocast(self._config, self._world):
            loss = summed_loss(model, model, tokens, tokens)
        loss.backward()

    def _parts(self) -> tuple[GPT, torch.optim.Optimizer]:
        if self._model is None or self._optimizer is None:
            self.close()  # memory may have run out half-way
            with torch.device("meta"):
                model = GPT(
                    self._shape,
                    activation_checkpointing=self._config.activation_checkpointing,
                    loss_rows=self._config.loss_rows,
                )
            model.to_empty(device=self._world.device)
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(0.01)  # nothing random: no generator may move
            self._optimizer = self._own_optimizer(model)
            self._model = model
        return self._model, self._optimizer

    def _own_optimizer(self, model: GPT) -> torch.optim.Optimizer:
        """Over this rank's share of the elements, with its state."""
        total, seen = sum(p.numel() for p in model.parameters()), 0
        mine = []
        for parameter in model.parameters():
            middle = seen + parameter.numel() / 2
            if int(middle * self._owners / total) == self._world.rank % self._owners:
                mine.append(parameter)
            seen += parameter.numel()
        mine = mine or list(model.parameters())[-1:]
        optimizer = build_optimizer(nn.ParameterList(mine), self._config.optim)
        for parameter in mine:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return optimizer

    def _best_time(self, work: Callable[[], None]) -> float:
        """Seconds of `work`, the shortest of a few where it is short: others may disturb it."""
        taken: list[float] = []
        while len(taken) < _REPEATS and sum(taken) < _REPEAT_S:
            begin = self._now()
            work()
            taken.append(self._now() - begin)
        return min(taken)

    def _now(self) -> float:
        if self._world.device.startswith("cuda"):
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()
