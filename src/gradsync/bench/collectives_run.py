"""The measurement of `bench collectives`, on every rank: sizes upward, algorithms in turns.

At each size every algorithm's result is checked once; then come rounds in which each algorithm,
and the copy, has a turn of several repetitions. The next round begins with the next algorithm.

[Note: A common begin] A rank that leaves a barrier early measures waiting. Ranks of one host have
one clock: they agree on a moment a little ahead, and wait for it in a loop. A repetition for which
a rank came late is dropped, unless there are more ranks than cores, which cannot be in time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.bench.collectives import (
    COPY,
    DTYPES,
    CollectivesSettings,
    Samples,
    choose_sizes,
    counts_of,
    repetitions_of,
    rounds_of,
    size_text,
)
from gradsync.bench.experiment import environment, from_json
from gradsync.bench.report import Tell, percentile, progress_bar, silent
from gradsync.comm import p2p_collectives as p2p
from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator, groups
from gradsync.comm.reductions import check_supported
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.comm.values import all_gather_numbers
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import available_bytes, usable_cores
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session, SessionOptions
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.groups import Groups
    from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator

_WARM_UP = 2
_SHARED = ("shared", "shared_copies")
_LENGTH = 65_521  # numbers of a rank before they repeat: the largest prime below 2**16
_MOST = 127  # no sum of them may exceed it: int8 ends there, and bfloat16 is exact up to 256
_TRIALS = 30
_SHORTEST_NS, _LONGEST_NS = 50_000, 2_000_000
_LATE_S, _LATE_PART = 5e-6, 0.02
"""A rank may be as late as the longer of these: seconds, part of the operation's time."""


class Patterns:
    """The numbers that ranks bring, and the results that they should get.

    Each rank has its own sequence of small integers, of prime length, repeated over the tensor: a
    part in a wrong place, a rank that is missing or counted twice shows. Sums are exact up to 127
    ranks.
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
        """This rank's numbers into `source`, [n], and before that nonsense into `result`, [n], so
        that an operation that does nothing is found out."""
        result.fill_(-1)
        for piece in source.split(_LENGTH):
            piece.copy_(self._tiles[self._rank][: len(piece)])

    def first_wrong(self, operation: str, result: Tensor) -> int:
        """Index of the first wrong element of this rank's `result`, or -1."""
        if operation == "all_gather":
            parts = result.view(self._world_size, -1)
            for rank, part in enumerate(parts):
                found = _first_difference(self._tiles[rank], part, 0)
                if found >= 0:
                    return rank * parts.shape[1] + found
            return -1
        if operation == "broadcast":
            return _first_difference(self._tiles[0], result, 0)
        start = self._rank * len(result) if operation == "reduce_scatter" else 0
        return _first_difference(self._sum, result, start)


def _first_difference(tile: Tensor, found: Tensor, start: int) -> int:
    """First index where [n] differs from the repeated tile from `start` on; -1 for none."""
    turned = tile.roll(-(start % len(tile)))
    for number, piece in enumerate(found.split(len(tile))):
        expected = turned[: len(piece)]
        if not torch.equal(piece, expected):
            return number * len(tile) + int((piece != expected).nonzero()[0])
    return -1


@dataclass(frozen=True, slots=True)
class Lap:
    """One repetition."""

    seconds: float  # from the common begin to the end
    late_s: float = 0.0  # from the common begin to the real one


def slowest(comm: Communicator, laps: list[Lap]) -> list[Lap]:
    """The longest time of each repetition and its latest begin, over all ranks."""
    found = torch.tensor([[lap.seconds, lap.late_s] for lap in laps], dtype=torch.float64)
    # All ranks, float64 [n, 2], on the CPU.
    comm.all_reduce(found, "max").wait()
    return [Lap(*pair) for pair in found.tolist()]


def in_time(laps: list[Lap]) -> list[float]:
    """Seconds of the repetitions that began together; of the least late one when none did."""
    kept = [lap.seconds for lap in laps if lap.late_s <= max(_LATE_S, _LATE_PART * lap.seconds)]
    return kept or [min(laps, key=lambda lap: lap.late_s).seconds]


class Clock:
    """Times an operation on all ranks at once, from the end of a barrier: for CPU ranks of several
    hosts. `overhead_s` is about what a repetition costs besides, alike on all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        begin = time.perf_counter()
        for _ in range(_TRIALS):
            self.lap(lambda: None)
        [lap] = slowest(comm, [Lap((time.perf_counter() - begin) / _TRIALS)])
        self.overhead_s = lap.seconds

    def lap(self, run: Callable[[], None]) -> Lap:
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

    def lap(self, run: Callable[[], None]) -> Lap:
        begin = self._agree() + self._ahead_ns
        while time.perf_counter_ns() < begin:
            if self._crowded:
                os.sched_yield()
        late = 0 if self._crowded else time.perf_counter_ns() - begin
        run()
        return Lap((time.perf_counter_ns() - begin) * 1e-9, late * 1e-9)

    def _agree(self) -> int:
        """When the last rank came, nanoseconds: one all-reduce, int64 [1], on the CPU."""
        now = torch.tensor([time.perf_counter_ns()])
        self._comm.all_reduce(now, "max").wait()
        return int(now)


class EventClock(Clock):
    """For ranks with a CUDA device each."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._small = torch.zeros(1, device=device)
        super().__init__(comm)

    def lap(self, run: Callable[[], None]) -> Lap:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # All ranks, float32 [1]: behind it on the stream, all begin together.
        self._comm.all_reduce(self._small).wait()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return Lap(begin.elapsed_time(end) * 1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedOperation:
    """One operation by one algorithm over its buffers, which are zeros while it is timed: a sum in
    place would grow with each repetition."""

    algorithm: str
    source: Tensor  # the numbers that this rank brings; overwritten by what works in place
    result: Tensor  # may share memory with `source`
    run: Callable[[], object]  # once, blocking (on CUDA: until the stream may use the result)


class Buffers:
    """Ordinary tensors like `like`, and shared ones where there is `shared`, of [count] and of
    [count / ranks]; `SharedMemoryError` on all ranks where that does not suffice."""

    def __init__(
        self, count: int, ranks: int, like: Tensor, shared: SharedMemoryCommunicator | None
    ) -> None:
        part = max(count // ranks, 1)
        # Filled, so that the system gives the memory now.
        self.whole, self.other, self.part = (
            like.new_empty(size).zero_() for size in (count, count, part)
        )
        self._shared = shared
        self.shared_whole, self.shared_part = self.whole, self.part
        if shared is not None:
            self.shared_whole = shared.allocate(count, like.dtype)
            self.shared_part = shared.allocate(part, like.dtype)

    def clear(self) -> None:
        """Zeros everywhere."""
        for tensor in (self.whole, self.other, self.part, self.shared_whole, self.shared_part):
            tensor.zero_()

    def release(self) -> None:
        """Give the shared memory back."""
        if self._shared is not None:
            self._shared.release(self.shared_whole)
            self._shared.release(self.shared_part)


def build(
    operation: str, algorithm: str, comm: Communicator, levels: Groups, buffers: Buffers
) -> TimedOperation:
    """`operation` by `algorithm` over `buffers`; `comm` is all ranks."""
    in_place = algorithm == "shared"
    whole = buffers.shared_whole if in_place else buffers.whole
    part = buffers.shared_part if in_place else buffers.part
    source = part if operation == "all_gather" else whole
    result = part if operation == "reduce_scatter" else whole
    if algorithm == "ring" and operation != "all_reduce":
        # It works in the whole tensor; this rank's part of that is what it brings or gets.
        own = whole.view(comm.world_size, -1)[comm.rank]
        source, result = (whole, own) if operation == "reduce_scatter" else (own, whole)

    def tree() -> None:
        p2p.tree_reduce(comm, whole)
        p2p.tree_broadcast(comm, whole)

    # All over all ranks, whole [n], part [n / ranks]; none overlaps anything. First a
    # communicator's own, then those made of messages.
    by_backend = {
        "all_reduce": lambda: comm.all_reduce(whole).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: comm.all_gather(whole, part).wait(),
        "broadcast": lambda: comm.broadcast(whole).wait(),
    }
    by_messages = {
        ("all_reduce", "ring"): lambda: p2p.ring_all_reduce(comm, whole),
        ("all_reduce", "hierarchical"): lambda: p2p.hierarchical_all_reduce(
            levels.intra, levels.inter, whole, equal_nodes=levels.equal_nodes
        ),
        ("all_reduce", "tree"): tree,
        ("reduce_scatter", "ring"): lambda: p2p.ring_reduce_scatter(comm, whole),
        ("all_gather", "ring"): lambda: p2p.ring_all_gather(comm, whole),
        ("broadcast", "tree"): lambda: p2p.tree_broadcast(comm, whole),
    }
    run: Callable[[], object] = by_messages.get((operation, algorithm), by_backend[operation])
    return TimedOperation(algorithm=algorithm, source=source, result=result, run=run)


def measure(settings_json: dict[str, Any]) -> dict[str, Any]:
    """Open a session, measure everything; returns what `--json` and the record are made of, with
    samples as `Samples` has them."""
    settings = from_json(CollectivesSettings, settings_json)
    session = Session(SessionOptions(device=_device(settings.device), threads=settings.threads))
    with session as world:
        if world.world_size < 2:
            raise ConfigError("collectives need at least 2 ranks: one rank has nothing to move")
        before = environment(world_size=world.world_size, threads=session.threads)
        bench = Bench(settings, world, progress_bar())
        samples = bench.run()
        return {
            "environment": before,
            "num_nodes": world.num_nodes,
            "one_memory": world.one_host and world.device_name == "cpu",
            "samples": [asdict(entry) for entry in samples],
            "skipped": bench.skipped,
            "wrong": bench.wrong,
        }


class Bench:
    """One rank's part; `tell` is called on rank 0 before each size."""

    def __init__(self, settings: CollectivesSettings, world: World, tell: Tell) -> None:
        self._settings, self._world = settings, world
        self._tell = tell if world.is_main else silent
        self._comm, self._groups = communicator(world), groups(world)
        self._shared: SharedMemoryCommunicator | None = None
        self._device = world.device
        dtype: torch.dtype = getattr(torch, DTYPES[settings.dtype][0])
        self._like = torch.zeros(1, dtype=dtype, device=self._device)
        self._patterns = Patterns(world.rank, world.world_size, dtype, self._device)
        clock = MomentClock if world.one_host else Clock
        on_cuda = self._device.type == "cuda"
        self._clock = EventClock(self._comm, self._device) if on_cuda else clock(self._comm)
        self.skipped: list[str] = []  # what could not be measured, and why: a line each
        self.wrong: list[str] = []  # results that were not right; these are not timed

    def run(self) -> list[Samples]:
        """By operation, size and algorithm, the copy one of these; the same on all ranks."""
        settings, samples = self._settings, list[Samples]()
        if set(settings.operations) & {"all_reduce", "reduce_scatter"}:
            check_supported(self._comm, self._like, "sum", "backend")
        on_cpu = self._device.type == "cpu"
        free = available_bytes() if on_cpu else torch.cuda.mem_get_info(self._device)[0]
        sizes = choose_sizes(
            settings,
            available_bytes=min(all_gather_numbers(self._comm, free)),  # so that all choose alike
            ranks=self._world.local_world_size if on_cpu else 1,
        )
        self._share_memory()
        was_on = gc.isenabled()
        gc.disable()  # Python collects garbage now and then, for milliseconds: not meanwhile
        try:
            work = [
                (operation, count)
                for operation in settings.operations
                if self._algorithms(operation)
                for count in counts_of(operation, sizes, settings.dtype, self._comm.world_size)
            ]
            for done, (operation, count) in enumerate(work):
                self._tell(done, len(work), f"{operation} {self._size(count)}")
                samples += self._measure_size(operation, count)
            self._tell(len(work), len(work), "done")
        finally:
            if was_on:
                gc.enable()
            if self._shared is not None:
                self._shared.close()
        return samples

    def _share_memory(self) -> None:
        if not set(_SHARED) & set(self._settings.algorithms):
            return
        if self._device.type != "cpu":
            self.skipped.append("shared, shared_copies: for tensors on the CPU only")
            return
        try:
            self._shared = share_memory(self._comm)
        except SharedMemoryError as error:
            self.skipped.append(f"shared, shared_copies: {error}")

    def _size(self, count: int) -> str:
        return size_text(count * self._like.itemsize)

    def _algorithms(self, operation: str) -> list[str]:
        names = self._settings.algorithms_of(operation)
        return [name for name in names if self._shared is not None or name not in _SHARED]

    def _measure_size(self, operation: str, count: int) -> list[Samples]:
        names, ranks = self._algorithms(operation), self._comm.world_size
        try:
            in_memory = self._shared if "shared" in names else None
            buffers = Buffers(count, ranks, self._like, in_memory)
        except SharedMemoryError as error:
            self.skipped.append(f"{operation} by shared at {self._size(count)}: {error}")
            names.remove("shared")
            buffers = Buffers(count, ranks, self._like, None)
        whole, other = buffers.whole, buffers.other
        copy = TimedOperation(
            algorithm=COPY, source=whole, result=other, run=lambda: other.copy_(whole)
        )
        try:
            built = [self._build(operation, name, buffers) for name in names]
            right = [each for each in built if self._is_right(operation, each)]
            buffers.clear()
            return self._rounds(operation, count, [*right, copy])
        finally:
            buffers.release()

    def _build(self, operation: str, algorithm: str, buffers: Buffers) -> TimedOperation:
        comm = self._shared if algorithm in _SHARED else self._comm
        assert comm is not None, "no shared memory here"
        return build(operation, algorithm, comm, self._groups, buffers)

    def _is_right(self, operation: str, contestant: TimedOperation) -> bool:
        """Run it once on numbers with a known result. All ranks get the same answer."""
        self._patterns.fill(contestant.source, contestant.result)
        self._comm.barrier()  # shared buffers are written by peers, too
        contestant.run()
        wrong = self._patterns.first_wrong(operation, contestant.result)
        for rank, index in enumerate(all_gather_numbers(self._comm, wrong)):
            if index >= 0:
                self.wrong.append(
                    f"{operation} by {contestant.algorithm}, {len(contestant.result)} elements of "
                    f"{self._settings.dtype}: element {index} is wrong on rank {rank}"
                )
                return False
        return True

    def _rounds(
        self, operation: str, count: int, contestants: list[TimedOperation]
    ) -> list[Samples]:
        settings, overhead_s = self._settings, self._clock.overhead_s
        estimates = [settings.burst * min(self._turn(c, _WARM_UP)) for c in contestants]
        repetitions = [repetitions_of(s, settings, overhead_s) for s in estimates]
        rounds = rounds_of([s + overhead_s for s in estimates], settings)
        times: list[list[list[float]]] = [[] for _ in contestants]
        for first in range(rounds):
            for step in range(len(contestants)):
                place = (first + step) % len(contestants)
                times[place].append(self._turn(contestants[place], repetitions[place]))
        return [
            Samples(
                operation=operation,
                algorithm=contestant.algorithm,
                size_bytes=count * self._like.itemsize,
                count=count,
                rounds_s=rounds_s,
            )
            for contestant, rounds_s in zip(contestants, times, strict=True)
        ]

    def _turn(self, contestant: TimedOperation, repetitions: int) -> list[float]:
        """Seconds of an operation in each repetition, to the nanosecond; alike on all ranks."""
        burst = self._settings.burst

        def run() -> None:
            for _ in range(burst):
                contestant.run()

        laps = slowest(self._comm, [self._clock.lap(run) for _ in range(repetitions)])
        return [round(seconds / burst, 9) for seconds in in_time(laps)]


def _device(asked: str) -> str:
    """`auto` takes GPUs where there is one for each rank of this host."""
    if asked != "auto":
        return asked
    ranks = resolve(environ.snapshot()).world.local_world_size
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"
