"""The measurement of `bench collectives`, on every rank: sizes in ascending order.

At each size every algorithm's result is checked once. Then come rounds, in which each algorithm and
the copy have a turn of several repetitions. Each round starts with the next algorithm.

[Note: A common begin] A rank that leaves a barrier early measures its waiting. Ranks of one host
share a clock: they agree on a start time slightly ahead and spin until then. A repetition in which
a rank arrives late is dropped, unless there are more ranks than cores."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync.comm import p2p_collectives as p2p
from gradsync.comm.base import Communicator
from gradsync.comm.groups import RankPlacement, communicator, levels_of, share_placement
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator, share_memory
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.comm.values import all_gather_numbers
from gradsync.commands.bench.collectives import (
    COPY,
    DTYPES,
    CollectivesOptions,
    choose_sizes,
    counts_of,
    repetitions_of,
    rounds_of,
    size_text,
    work_of,
)
from gradsync.commands.bench.experiment import environment, from_json
from gradsync.commands.bench.report import Tell, percentile, show_progress, silent
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import available_bytes, usable_cores
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session, SessionOptions
from gradsync.world import World

_WARM_UP = 2
_SHARED = ("shared", "shared_copies")
_LENGTH = 65_521  # values per rank before they repeat: the largest prime below 2**16
_MOST = 127  # limit for their sums: int8's maximum; bfloat16 is exact up to 256
_TRIALS = 30
_SHORTEST_NS, _LONGEST_NS = 50_000, 2_000_000
_LATE_S, _LATE_PART = 5e-6, 0.02
"""A rank may be late by at most the larger of these: seconds, fraction of the operation's time."""


class Patterns:
    """The values that ranks contribute, and the expected results.

    Each rank repeats its sequence of small integers, of prime length, over the tensor. This detects
    a misplaced part and a rank that is missing or counted twice. Sums are exact up to 127 ranks.
    """

    def __init__(
        self, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rank, self._world_size = rank, world_size
        highest = max(min(_MOST // world_size, 4), 1)
        tiles = [
            torch.randint(highest + 1, (_LENGTH,), generator=torch.Generator().manual_seed(seed))
            for seed in range(world_size)
        ]
        self._tiles = [tile.to(device, dtype) for tile in tiles]
        self._sum = torch.stack(tiles).sum(0).to(device, dtype)

    def fill(self, source: Tensor, result: Tensor) -> None:
        """Write this rank's values into `source`, [n]. First fill `result`, [n], with wrong values
        to detect an operation that does nothing."""
        result.fill_(-1)
        for piece in source.split(_LENGTH):
            piece.copy_(self._tiles[self._rank][: len(piece)])

    def first_wrong(self, operation: str, result: Tensor) -> int:
        """Index of the first wrong element of this rank's `result`, or -1."""
        start = self._rank * len(result) if operation == "reduce_scatter" else 0
        parts = [(self._sum, result, start)]
        if operation == "broadcast":
            parts = [(self._tiles[0], result, 0)]
        if operation == "all_gather":
            every = result.view(self._world_size, -1)
            parts = [(tile, part, 0) for tile, part in zip(self._tiles, every, strict=True)]
        place = 0
        for tile, part, start in parts:
            turned = tile.roll(-(start % _LENGTH))
            for piece in part.split(_LENGTH):
                differs = piece != turned[: len(piece)]
                if bool(differs.any()):
                    return place + int(differs.nonzero()[0])
                place += len(piece)
        return -1


@dataclass(frozen=True, slots=True)
class Lap:
    """One repetition."""

    seconds: float  # from the common start to the end
    late_s: float = 0.0  # from the common start to the actual one


def slowest(comm: Communicator, laps: list[Lap]) -> list[Lap]:
    """The longest time and the latest start of each repetition, over all ranks."""
    found = torch.tensor([[lap.seconds, lap.late_s] for lap in laps], dtype=torch.float64)
    # All ranks, float64 [n, 2], on the CPU.
    comm.all_reduce(found, "max").wait()
    return [Lap(*pair) for pair in found.tolist()]


def in_time(laps: list[Lap]) -> list[float]:
    """Seconds of the repetitions that started on time; if there are none, of the least late one."""
    kept = [lap.seconds for lap in laps if lap.late_s <= max(_LATE_S, _LATE_PART * lap.seconds)]
    return kept or [min(laps, key=lambda lap: lap.late_s).seconds]


class Clock:
    """Times an operation on all ranks at once, from the end of a barrier: for CPU ranks of several
    hosts. `overhead_s` is about the cost of an empty repetition, equal on all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        begin = time.perf_counter()
        for _ in range(_TRIALS):
            self.lap(lambda: None)
        [lap] = slowest(comm, [Lap((time.perf_counter() - begin) / _TRIALS)])
        self.overhead_s = lap.seconds

    def lap(self, run: Callable[[], object]) -> Lap:
        """One repetition on this rank; all ranks call it."""
        self._comm.barrier()
        begin = time.perf_counter()
        run()
        return Lap(time.perf_counter() - begin)


class MomentClock(Clock):
    """See [Note: A common begin]; for CPU ranks of one host."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._crowded = comm.world_size > usable_cores()
        late = []
        for _ in range(_TRIALS):
            agreed_ns = self._agree()
            late.append(time.perf_counter_ns() - agreed_ns)
        [longest] = slowest(comm, [Lap(2e-9 * percentile(late, 90))])
        self._ahead_ns = int(min(max(longest.seconds * 1e9, _SHORTEST_NS), _LONGEST_NS))
        self.overhead_s = 2e-9 * self._ahead_ns

    def lap(self, run: Callable[[], object]) -> Lap:
        begin = self._agree() + self._ahead_ns
        while time.perf_counter_ns() < begin:
            if self._crowded:
                os.sched_yield()
        late = 0 if self._crowded else time.perf_counter_ns() - begin
        run()
        return Lap((time.perf_counter_ns() - begin) * 1e-9, late * 1e-9)

    def _agree(self) -> int:
        """When the last rank arrived, nanoseconds: one all-reduce, int64 [1], on the CPU."""
        now = torch.tensor([time.perf_counter_ns()])
        self._comm.all_reduce(now, "max").wait()
        return int(now)


class EventClock(Clock):
    """For ranks with a CUDA device each."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._small = torch.zeros(1, device=device)
        super().__init__(comm)

    def lap(self, run: Callable[[], object]) -> Lap:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # All ranks, float32 [1]: later work on the stream starts together on all ranks.
        self._comm.all_reduce(self._small).wait()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return Lap(begin.elapsed_time(end) * 1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedOperation:
    """One operation by one algorithm over its buffers. They hold zeros during timing, since a sum
    in place would grow with each repetition."""

    algorithm: str
    source: Tensor  # the values that this rank contributes; overwritten by in-place algorithms
    result: Tensor  # may share memory with `source`
    run: Callable[[], object]  # once, blocking (on CUDA: until the stream may use the result)


def build(
    name: tuple[str, str], comm: Communicator, hosts: RankPlacement, whole: Tensor, part: Tensor
) -> TimedOperation:
    """The operation and algorithm `name` over `whole`, [n], and `part`, [n / ranks]; `comm` is all
    ranks."""
    operation, algorithm = name
    source = part if operation == "all_gather" else whole
    result = part if operation == "reduce_scatter" else whole
    if algorithm == "ring" and operation != "all_reduce":
        # It works on the whole tensor; this rank's part of it is its input or result.
        own = whole.view(comm.world_size, -1)[comm.rank]
        source, result = (whole, own) if operation == "reduce_scatter" else (own, whole)

    intra, inter, equal_nodes = levels_of(comm, hosts)

    def tree() -> None:
        p2p.tree_reduce(comm, whole)
        p2p.tree_broadcast(comm, whole)

    # All over all ranks; none overlaps anything. First the communicator's collectives, then those
    # composed of messages.
    by_backend = {
        "all_reduce": lambda: comm.all_reduce(whole).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: comm.all_gather(whole, part).wait(),
        "broadcast": lambda: comm.broadcast(whole).wait(),
    }
    by_messages = {
        ("all_reduce", "ring"): lambda: p2p.ring_all_reduce(comm, whole),
        ("all_reduce", "hierarchical"): lambda: p2p.hierarchical_all_reduce(
            intra, inter, whole, equal_nodes=equal_nodes
        ),
        ("all_reduce", "tree"): tree,
        ("reduce_scatter", "ring"): lambda: p2p.ring_reduce_scatter(comm, whole),
        ("all_gather", "ring"): lambda: p2p.ring_all_gather(comm, whole),
        ("broadcast", "tree"): lambda: p2p.tree_broadcast(comm, whole),
    }
    run: Callable[[], object] = by_messages.get(name, by_backend[operation])
    return TimedOperation(algorithm=algorithm, source=source, result=result, run=run)


def measure(options_json: dict[str, Any]) -> dict[str, Any]:
    """Open a session, measure everything; returns the data for `--json` and the record."""
    options = from_json(CollectivesOptions, options_json)
    device = options.device
    if device == "auto":  # GPUs, if each rank of this host has one
        ranks = resolve(environ.snapshot()).world.local_world_size
        on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
        device = "cuda" if on_cuda else "cpu"
    session = Session(SessionOptions(device=device))
    with session as world:
        if world.world_size < 2:
            raise ConfigError("collectives need at least 2 ranks: one rank has nothing to move")
        before = environment(world_size=world.world_size, threads=session.threads)
        bench = Bench(options, world, show_progress)
        samples = bench.run()
        return {
            "environment": before,
            "num_nodes": world.num_nodes,
            "one_memory": world.one_host and world.device_name == "cpu",
            "samples": samples,
            "skipped": bench.skipped,
            "wrong": bench.wrong,
        }


class Bench:
    """One rank's part; `tell` is called on rank 0 before each size."""

    def __init__(self, options: CollectivesOptions, world: World, tell: Tell) -> None:
        self._options, self._world = options, world
        self._tell = tell if world.is_main else silent
        self._comm = communicator(world)
        self._hosts = share_placement(self._comm, world)
        self._shared: SharedMemoryCommunicator | None = None
        self._on_cpu = world.device.type == "cpu"
        dtype: torch.dtype = getattr(torch, DTYPES[options.dtype][0])
        self._like = torch.zeros(1, dtype=dtype, device=world.device)
        self._patterns = Patterns(world.rank, world.world_size, dtype, world.device)
        clock = MomentClock if world.one_host else Clock
        self._clock = clock(self._comm) if self._on_cpu else EventClock(self._comm, world.device)
        self.skipped: list[str] = []  # one line for each skipped measurement: what, and why
        self.wrong: list[str] = []  # incorrect results; these are not timed

    def run(self) -> list[dict[str, Any]]:
        """Samples by operation, size and algorithm, including the copy; the same on all ranks."""
        options, samples, asked = self._options, [], work_of(self._options)
        free = available_bytes() if self._on_cpu else torch.cuda.mem_get_info(self._like.device)[0]
        sizes = choose_sizes(
            options.sizes,
            available_bytes=min(all_gather_numbers(self._comm, free)),  # so that all choose alike
            ranks=self._world.local_world_size if self._on_cpu else 1,
        )
        if any(name in _SHARED for names in asked.values() for name in names):
            try:
                if not self._on_cpu:
                    raise SharedMemoryError("for tensors on the CPU only")
                self._shared = share_memory(self._comm)
            except SharedMemoryError as error:
                self.skipped.append(f"shared, shared_copies: {error}")
        if self._shared is None:
            asked = {o: [n for n in names if n not in _SHARED] for o, names in asked.items()}
        work = [
            (operation, count, names)
            for operation, names in asked.items()
            for count in counts_of(operation, sizes, options.dtype, self._comm.world_size)
            if names
        ]
        was_on = gc.isenabled()
        gc.disable()  # a garbage collection takes milliseconds
        try:
            for done, (operation, count, names) in enumerate(work):
                self._tell(done, len(work), f"{operation} {self._size(count)}")
                samples += self._measure_size(operation, count, names)
            self._tell(len(work), len(work), "done")
        finally:
            if was_on:
                gc.enable()
            if self._shared is not None:
                self._shared.close()
        return samples

    def _size(self, count: int) -> str:
        return size_text(count * self._like.itemsize)

    def _measure_size(self, operation: str, count: int, names: list[str]) -> list[dict[str, Any]]:
        names, comm = list(names), self._comm
        part_count = max(count // comm.world_size, 1)
        # Filled, so that the system allocates the pages now.
        whole, other = (self._like.new_empty(count).zero_() for _ in range(2))
        part = self._like.new_empty(part_count).zero_()
        in_place: list[Tensor] = []
        if self._shared is not None and "shared" in names:
            try:  # raises on all ranks if shared memory is too small
                for length in (count, part_count):
                    in_place.append(self._shared.allocate(length, self._like.dtype))
            except SharedMemoryError as error:
                self.skipped.append(f"{operation} by shared at {self._size(count)}: {error}")
                names.remove("shared")
        contestants = []
        try:
            for name in names:
                tensors = in_place if name == "shared" else (whole, part)
                carrier = self._shared if name in _SHARED else comm
                assert carrier is not None, "no shared memory here"
                built = build((operation, name), carrier, self._hosts, *tensors)
                if self._is_right(operation, built):
                    contestants.append(built)
            for tensor in (whole, other, part, *in_place):
                tensor.zero_()
            contestants.append(
                TimedOperation(
                    algorithm=COPY, source=whole, result=other, run=lambda: other.copy_(whole)
                )
            )
            return self._rounds(operation, count, contestants)
        finally:
            for tensor in in_place:
                assert self._shared is not None, "it made them"
                self._shared.release(tensor)

    def _is_right(self, operation: str, contestant: TimedOperation) -> bool:
        """Run it once on values with a known result. All ranks get the same answer."""
        self._patterns.fill(contestant.source, contestant.result)
        self._comm.barrier()  # peers also write shared buffers
        contestant.run()
        wrong = self._patterns.first_wrong(operation, contestant.result)
        for rank, index in enumerate(all_gather_numbers(self._comm, wrong)):
            if index >= 0:
                self.wrong.append(
                    f"{operation} by {contestant.algorithm}, {len(contestant.result)} elements of "
                    f"{self._options.dtype}: element {index} is wrong on rank {rank}"
                )
                return False
        return True

    def _rounds(
        self, operation: str, count: int, contestants: list[TimedOperation]
    ) -> list[dict[str, Any]]:
        overhead_s = self._clock.overhead_s
        estimates = [min(self._turn(c, _WARM_UP)) for c in contestants]
        repetitions = [repetitions_of(s, overhead_s) for s in estimates]
        rounds = rounds_of([s + overhead_s for s in estimates], self._options.rounds)
        times: list[list[list[float]]] = [[] for _ in contestants]
        for first in range(rounds):
            for step in range(len(contestants)):
                place = (first + step) % len(contestants)
                times[place].append(self._turn(contestants[place], repetitions[place]))
        return [
            {
                "operation": operation,
                "algorithm": contestant.algorithm,
                "size_bytes": count * self._like.itemsize,
                "count": count,  # elements
                "rounds_s": rounds_s,  # per round and repetition: seconds on the slowest rank
            }
            for contestant, rounds_s in zip(contestants, times, strict=True)
        ]

    def _turn(self, contestant: TimedOperation, repetitions: int) -> list[float]:
        """Seconds per operation in each repetition, to the nanosecond; the same on all ranks."""
        laps = slowest(self._comm, [self._clock.lap(contestant.run) for _ in range(repetitions)])
        return [round(seconds, 9) for seconds in in_time(laps)]
