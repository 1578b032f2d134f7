"""The largest micro-batch that this run's model runs with, the same on all ranks.

The search changes how the global batch is cut into leaves, never the batch. The micro-batch is the
shape of a leaf and thus part of what defines an `invariant` run: it is searched for once, and a
resumed run keeps it (see `elastic.py`). Answers are kept in the user's cache. Ranks call
`next_size` with the same trials, so they try the same sizes in the same order, and the rank with
the smallest result decides.

[Note: A rank without memory] One rank may run out of memory when others do not. So an attempt does
not communicate: each rank runs alone, and its outcome, success or failure, is a value. Every rank
then takes part in the round's one small all-reduce. The result is the same on all ranks, and the
next size depends on nothing else.

On CUDA torch raises `OutOfMemoryError`; it is caught here, the attempt's memory is freed, and the
device is as before. On a CPU there is nothing to catch, because the kernel ends a process that
takes too much: attempts stay below `limit_bytes`, and the peak is that of the resident memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any

import torch
from torch import nn

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers, broadcast_json
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.measured import Cache
from gradsync.commands.plan.memory import memory_need
from gradsync.commands.plan.workload import Split, Workload
from gradsync.commands.train.config import AUTO, TrainConfig
from gradsync.commands.train.learner import autocast, build_optimizer, summed_loss
from gradsync.commands.train.tuned import check_line, run_conditions
from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime.machine import available_bytes
from gradsync.runtime.memory import PeakMemory, give_back, resident_bytes
from gradsync.sync.registry import find_strategy
from gradsync.world import World

_SAME_ROOM = (0.8, 1.25)
"""Range around the probe's limit: below it the size may not fit, above it may be too small."""
_FP32 = 4
_STATES = 2
_LOGIT_BYTES = 8
"""Bytes of a logit, at least: its fp32 value and its gradient; see [Note: Loss in rows]."""
_REPEATS, _REPEAT_S = 5, 0.5
_IMBALANCE = 1.125
"""Largest load of the busiest rank, relative to the least possible: shares differ by a leaf."""
_GAIN = 0.97
"""A larger micro-batch pays if a sequence takes less than this share of its previous time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The outcome of one size; equal on all ranks."""

    size: int  # Sequences of a leaf
    fits: bool  # On every rank, within its limit
    peak: float = 0.0  # Share of the limit used on the fullest rank
    slope: float = 0.0  # Share that one more sequence adds, on the rank with the largest
    seconds: float = 0.0  # Forward and backward of the leaf, on the slowest rank

    @property
    def seconds_per_sequence(self) -> float:
        """Seconds that a sequence takes in leaves of this size."""
        return self.seconds / self.size


def legal_sizes(sequences: int, world_size: int, *, equal_leaves: bool = False) -> tuple[int, ...]:
    """Micro-batches, ascending, that cut a step's `sequences` into leaves for `world_size` ranks.

    Each size divides `sequences`, gives every rank a leaf (with `equal_leaves`: equally many), and
    divides leaves so evenly that the busiest rank has at most an eighth more sequences than under
    the smallest size.
    """
    below_root = [size for size in range(1, isqrt(sequences) + 1) if sequences % size == 0]
    loads = {}
    for size in sorted({*below_root, *(sequences // size for size in below_root)}):
        leaves = sequences // size
        if leaves >= world_size and not (equal_leaves and leaves % world_size):
            loads[size] = -(-leaves // world_size) * size
    least = min(loads.values(), default=0)
    return tuple(size for size, load in loads.items() if load <= _IMBALANCE * least)


def next_size(sizes: Sequence[int], trials: Sequence[Trial], *, careful: bool) -> int | None:
    """The size to try next; None if there is nothing more to learn.

    The size at most doubles while sizes fit; then the search halves the gap between the largest
    that did and the smallest that did not. `careful` (on a CPU nothing stops a process that takes
    too much): try no size predicted beyond the limit, and grow only while growing pays.
    """
    if not trials:
        return min(sizes, default=None)
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        return None  # even the smallest does not run
    good = max(fitting, key=lambda trial: trial.size)
    bad = min((trial.size for trial in trials if not trial.fits), default=None)
    if careful and bad is None and len(trials) > 1:
        before, now = (trial.seconds_per_sequence for trial in trials[-2:])
        if now > _GAIN * before:  # the last growth did not make a sequence cheaper
            return None
    open_sizes = [size for size in sizes if good.size < size and (bad is None or size < bad)]
    if careful:
        open_sizes = [size for size in open_sizes if predicted(good, size) <= 1]
    if not open_sizes:
        return None
    if bad is not None:
        return open_sizes[len(open_sizes) // 2]
    return max((size for size in open_sizes if size <= 2 * good.size), default=open_sizes[0])


def predicted(trial: Trial, size: int) -> float:
    """Share of the limit that `size` will take, on the line through `trial`."""
    return trial.peak + trial.slope * (size - trial.size)


def chosen_size(trials: Sequence[Trial], *, careful: bool) -> int | None:
    """The largest size that fits; None if none does. `careful`: only sizes about as fast as any:
    one sequence keeps a core busy, so larger sizes may only take more memory."""
    fitting = [trial for trial in trials if trial.fits]
    if careful:
        best = min((trial.seconds_per_sequence for trial in fitting), default=0.0)
        fitting = [trial for trial in fitting if _GAIN * trial.seconds_per_sequence <= best]
    return max((trial.size for trial in fitting), default=None)


def try_sizes(
    comm: Communicator,
    attempt: Callable[[int], Cost | None],
    sizes: Sequence[int],
    *,
    limit_bytes: int,
    careful: bool,
) -> tuple[Trial, ...]:
    """The outcomes of the `legal_sizes` worth trying, the same on all ranks.

    `attempt` runs one size on this rank, without communication (None: out of memory), within
    `limit_bytes`. One all-reduce (maximum, float64 [4] on the CPU) after each size.
    """
    trials: list[Trial] = []
    ran: dict[int, int] = {}  # Peak by size
    while (size := next_size(sizes, trials, careful=careful)) is not None:
        cost = attempt(size)
        message = (1.0, 0.0, 0.0, 0.0)  # failed; peak, slope as shares of the limit; seconds
        if cost is not None:
            below = max((each for each in ran if each < size), default=0)
            more = cost.peak_bytes - ran.get(below, cost.held_bytes)
            slope = max(more / (size - below), 0.0) / limit_bytes
            peak = cost.peak_bytes / limit_bytes
            message = (float(peak > 1), peak, slope, cost.seconds)
            ran[size] = cost.peak_bytes
        told = torch.tensor(message, dtype=torch.float64)
        comm.all_reduce(told, "max").wait()
        failed, peak, slope, seconds = told.tolist()
        trials.append(Trial(size=size, fits=not failed, peak=peak, slope=slope, seconds=seconds))
    return tuple(trials)


CUDA_SHARE = 0.9
"""Share of a GPU's free memory; the rest is for fragments and NCCL's buffers."""
CPU_SHARE = 0.8
"""Share of a host's free memory; a process that takes too much is killed, or others are."""
_OTHER_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Memory and time of one attempt on this rank, above the level before the first."""

    peak_bytes: int  # At its fullest moment
    held_bytes: int  # Independent of the size: weights, gradients, the optimizer's state
    seconds: float  # As the attempt measured it


Attempt = Callable[[Callable[[], None]], float]
"""Runs; calls its argument to mark the held memory when only that is held; returns seconds."""


class MemoryProbe:
    """The memory of one rank's device; on a CPU, `ranks_here` ranks share the host's."""

    def __init__(self, device: torch.device | str, *, ranks_here: int = 1) -> None:
        self.device = torch.device(device)
        self._on_cuda = self.device.type == "cuda"
        self._before = self._held()
        if self._on_cuda:
            free = torch.cuda.mem_get_info(self.device)[0] + self._before
            self.limit_bytes = int(CUDA_SHARE * free)
            """Bytes that an attempt may use."""
        else:
            self.limit_bytes = max(int(CPU_SHARE * available_bytes()) // ranks_here, 1)

    @property
    def works(self) -> bool:
        """Whether the system reports how much memory a process has (Linux does)."""
        return self._on_cuda or self._before > 0

    def run(self, attempt: Attempt) -> Cost | None:
        """The cost of `attempt`; None if memory ran out, and then nothing of it is left."""
        peak = None
        if self._on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak = PeakMemory(on_cuda=False)
        held = [start := self._held()]
        try:
            seconds = attempt(lambda: held.append(self._held()))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            seconds = None
        # Only here is the error gone, and with it the frames that held the attempt's tensors.
        if seconds is None:
            self.clear()
            return None
        top = start + (peak.read() or 0) if peak else torch.cuda.max_memory_reserved(self.device)
        before = self._before
        return Cost(peak_bytes=top - before, held_bytes=held[-1] - before, seconds=seconds)

    def clear(self) -> None:
        """Give back unused memory."""
        if self._on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)  # the next attempt has a new peak
        else:
            give_back()

    def _held(self) -> int:
        if self._on_cuda:
            return torch.cuda.memory_reserved(self.device)
        give_back()
        return resident_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, from torch, Python or an allocator below them, means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """A micro-batch that ran."""

    size: int  # Sequences of a leaf
    peak_bytes: int  # Memory taken, on the rank with the least room
    limit_bytes: int  # Memory that this rank was allowed
    date: str  # Date of the measurement

    def holds(self, limit_bytes: int) -> bool:
        """Whether it is still the answer for a rank that may use `limit_bytes`."""
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


PROBED = Cache("micro-batch", _probed)  # Micro-batches found by probing


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
    """Sequences of a leaf, looked up or tried, and how, in one line; the same on all ranks.

    Collectives over all ranks: an all-gather of numbers, a broadcast of JSON, then a small
    all-reduce for each size tried. ConfigError on all ranks: even the smallest size does not run.

    Args:
        config: with the final strategy and dtype.
        shape: of the model, with the data's vocabulary.
        threads: intra-op threads of a rank.
        keep: write a new answer into the cache.
        begins: called before the first size is tried.
    """
    sizes = sizes_of(config, world.world_size)
    rehearsal = Rehearsal(config, shape, world)
    probe = MemoryProbe(world.device, ranks_here=world.local_world_size)
    limit = max(probe.limit_bytes - rehearsal.communication_bytes, 1)
    # All ranks read their free memory before any of them allocates.
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
    careful = world.device.type == "cpu"
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
        except GradsyncError as error:  # the run does not need the cache
            word = f" (not kept: {error})"
    return size, f"{found}, {_why(trials, sizes, size)}{word}"


def _why(trials: Sequence[Trial], sizes: Sequence[int], size: int) -> str:
    """Why this size and no larger one."""
    tried = f"tried {', '.join(str(trial.size) for trial in trials)}"
    if size == sizes[-1]:
        return f"{tried}; more would leave ranks without a micro-batch, or shares uneven"
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
        f"model {config.preset} does not fit: a micro-batch of {size} x {config.sequence_length} "
        f"tokens takes more than the {limit_bytes / 1e9:.1f} GB that a rank may take here{by}; try "
        f"{recompute}{rows}a smaller model or fewer ranks on this host"
    )


class Rehearsal:
    """A run's leaf and update on one rank alone, without data: what a probe runs.

    The optimizer's state exists from the start, and gradients from an earlier leaf, so the peak is
    that of a step in the middle of a run. If the strategy divides the state, each rank keeps and
    updates its share. Strategies' copies of gradients are not allocated here, only counted. The
    model and its optimizer are built on first use.
    """

    def __init__(self, config: TrainConfig, shape: GPTConfig, world: World) -> None:
        self._config, self._shape, self._world = config, shape, world
        self._parts: tuple[GPT, torch.optim.Optimizer] | None = None
        self._owners = world.world_size if self.shards(config) else 1

    @staticmethod
    def shards(config: TrainConfig) -> bool:
        """Whether ranks divide the optimizer's state."""
        if config.sync == AUTO:
            return False
        strategy = find_strategy(config.sync)
        if strategy.recipe is None:
            return config.sync == "fsdp"
        return (config.sync_options.shard or strategy.recipe.shard) != "none"

    @property
    def communication_bytes(self) -> int:
        """Bytes of the strategy's messages, apart from the gradients, by `plan/memory`."""
        if not self._world.is_distributed:
            return 0
        work = Workload(
            model=self._shape,
            micro_batch_size=1,
            seq_len=self._config.sequence_length,
            num_leaves=self._config.sequences_per_update,
            dtype=self._config.named_dtype,
            kind="cuda" if self._world.device.type == "cuda" else "cpu",
        )
        name = "invariant" if self._config.sync == AUTO else self._config.sync
        split = Split(strategy=name, layout=ParallelLayout(dp=self._world.world_size))
        return memory_need(work, split).buckets

    def least_bytes(self, size: int) -> int:
        """Bytes that a leaf of `size` takes at least: weights, gradients, states, and logits."""
        rows = self._config.loss_rows or size * self._config.sequence_length
        held = 2 + _STATES / self._owners
        logits = _LOGIT_BYTES * rows * self._shape.vocab_size
        return int(_FP32 * held * self._shape.num_params()) + logits

    def of(self, size: int) -> Attempt:
        """Leaves of `size` and an update; returns the seconds of a leaf after the first."""

        def attempt(mark: Callable[[], None]) -> float:
            model, optimizer = self._parts = self._parts or self._build()
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
        """Release the model and the optimizer."""
        self._parts = None

    def _leaf(self, model: GPT, size: int) -> None:
        shape = (size, self._config.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self._world.device)
        with autocast(self._config, self._world):
            loss = summed_loss(model, model, tokens, tokens)
        loss.backward()

    def _build(self) -> tuple[GPT, torch.optim.Optimizer]:
        """The model, and an optimizer with its state over this rank's share of the elements."""
        with torch.device("meta"):
            model = GPT(
                self._shape,
                activation_checkpointing=self._config.activation_checkpointing,
                loss_rows=self._config.loss_rows,
            )
        model.to_empty(device=self._world.device)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(0.01)  # nothing random: no generator may advance
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
        return model, optimizer

    def _best_time(self, work: Callable[[], None]) -> float:
        """Seconds of `work`; if it is short, the shortest of a few runs: others may disturb it."""
        taken: list[float] = []
        while len(taken) < _REPEATS and sum(taken) < _REPEAT_S:
            begin = self._now()
            work()
            taken.append(self._now() - begin)
        return min(taken)

    def _now(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()
