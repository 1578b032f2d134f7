"""The measurement of `bench collectives`, on every rank: sizes upward, algorithms in turns.

At each size every algorithm's result is checked once; then come rounds in which each algorithm,
and the copy, has a turn of several repetitions. The next round begins with the next algorithm.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.bench.collectives_check import Patterns
from gradsync.bench.collectives_clock import Clock, clock_for, in_time, slowest
from gradsync.bench.collectives_plan import (
    COPY,
    DTYPES,
    Settings,
    choose_sizes,
    counts_of,
    repetitions_of,
    rounds_of,
    size_text,
)
from gradsync.bench.collectives_report import Samples
from gradsync.bench.record import environment, from_json
from gradsync.bench.report import Tell, progress_bar, silent
from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator, groups
from gradsync.comm.p2p_collectives import (
    doubling_all_reduce,
    hierarchical_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from gradsync.comm.reductions import check_supported
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.comm.values import all_gather_numbers
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import available_bytes
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session, SessionOptions
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.groups import Groups
    from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator


_WARM_UP = 2
_SHARED = ("shared", "shared_copies")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation by one algorithm over its buffers.

    Values of buffers are zeros while it is timed: a sum in place would otherwise grow with each
    repetition, until it is infinite.
    """

    algorithm: str
    """Its name."""
    source: Tensor
    """The numbers that this rank brings; overwritten where the operation works in place."""
    result: Tensor
    """Where the result will be; may share memory with `source`."""
    run: Callable[[], object]
    """Carry it out once, blocking (on CUDA: until the current stream may use the result)."""


class Buffers:
    """Ordinary and shared tensors of one size: [count] and [count / ranks] of each kind.

    Args:
        count: elements of the whole tensor.
        ranks: how many divide it.
        like: of its dtype, and on its device.
        shared: all ranks by shared memory, if some algorithm wants its buffers there.

    Raises:
        SharedMemoryError: on all ranks, when there is not enough of it.
    """

    def __init__(
        self, count: int, ranks: int, like: Tensor, shared: SharedMemoryCommunicator | None
    ) -> None:
        part = max(count // ranks, 1)
        # Filled, so that the system really gives the memory now.
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
) -> Operation:
    """`operation` by `algorithm` over `buffers`; see `collectives_plan.OPERATIONS`.

    Args:
        operation: name.
        algorithm: name.
        comm: all ranks, for `shared` and `shared_copies` through shared memory.
        levels: inside and between hosts.
        buffers: of the size.
    """
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
        tree_reduce(comm, whole)
        tree_broadcast(comm, whole)

    # All over all ranks, whole [n], part [n / ranks]; none overlaps anything. First a
    # communicator's own, then those made of messages.
    by_backend = {
        "all_reduce": lambda: comm.all_reduce(whole).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: comm.all_gather(whole, part).wait(),
        "broadcast": lambda: comm.broadcast(whole).wait(),
    }
    by_messages = {
        ("all_reduce", "ring"): lambda: ring_all_reduce(comm, whole),
        ("all_reduce", "recursive_doubling"): lambda: doubling_all_reduce(comm, whole),
        ("all_reduce", "hierarchical"): lambda: hierarchical_all_reduce(
            levels.intra, levels.inter, whole, equal_nodes=levels.equal_nodes
        ),
        ("all_reduce", "tree"): tree,
        ("reduce_scatter", "ring"): lambda: ring_reduce_scatter(comm, whole),
        ("all_gather", "ring"): lambda: ring_all_gather(comm, whole),
        ("broadcast", "tree"): lambda: tree_broadcast(comm, whole),
    }
    run: Callable[[], object] = by_messages.get((operation, algorithm), by_backend[operation])
    return Operation(algorithm=algorithm, source=source, result=result, run=run)


def measure(settings_json: dict[str, Any]) -> dict[str, Any]:
    """Open a session, measure everything; returns what `--json` and the record are made of, with
    samples as `Samples` has them.

    Raises:
        ConfigError: fewer than two ranks, a size beyond memory, a dtype that a backend cannot add.
        GradsyncError: the ranks did not meet, or one of them failed.
    """
    settings = from_json(Settings, settings_json)
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
            "one_memory": world.one_host and world.device == "cpu",
            "samples": [asdict(entry) for entry in samples],
            "skipped": bench.skipped,
            "wrong": bench.wrong,
        }


class Bench:
    """One rank's part.

    Args:
        settings: the same on all ranks.
        world: with at least two of them.
        tell: called on rank 0 before each size.
    """

    def __init__(self, settings: Settings, world: World, tell: Tell) -> None:
        self._settings = settings
        self._world = world
        self._tell = tell if world.is_main else silent
        self._comm = communicator(world)
        self._groups = groups(world)
        self._shared: SharedMemoryCommunicator | None = None
        self._device = torch.device(world.device)
        dtype: torch.dtype = getattr(torch, DTYPES[settings.dtype])
        self._like = torch.zeros(1, dtype=dtype, device=self._device)
        self._patterns = Patterns(world.rank, world.world_size, dtype, self._device)
        self._clock: Clock = clock_for(world, self._comm, self._device)
        self.skipped: list[str] = []
        """Operations that could not be measured, and why: a line each."""
        self.wrong: list[str] = []
        """Results that were not right: a line each. These algorithms were not timed."""

    def run(self) -> list[Samples]:
        """By operation, size and algorithm, the copy one of these; the same on all ranks."""
        settings, samples = self._settings, list[Samples]()
        if set(settings.operations) & {"all_reduce", "reduce_scatter"}:
            check_supported(self._comm, self._like, "sum", "backend")
        sizes = choose_sizes(settings, available_bytes=self._free_bytes(), ranks=self._sharers())
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
                self._tell(done, len(work), f"{operation} {size_text(self._bytes(count))}")
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
            self._skip("shared, shared_copies: for tensors on the CPU only")
            return
        try:
            self._shared = share_memory(self._comm)
        except SharedMemoryError as error:
            self._skip(f"shared, shared_copies: {error}")

    def _algorithms(self, operation: str) -> list[str]:
        names = self._settings.algorithms_of(operation)
        return [name for name in names if self._shared is not None or name not in _SHARED]

    def _bytes(self, count: int) -> int:
        return count * self._like.itemsize

    def _measure_size(self, operation: str, count: int) -> list[Samples]:
        names, ranks = self._algorithms(operation), self._comm.world_size
        try:
            in_memory = self._shared if "shared" in names else None
            buffers = Buffers(count, ranks, self._like, in_memory)
        except SharedMemoryError as error:
            self._skip(f"{operation} by shared at {size_text(self._bytes(count))}: {error}")
            names.remove("shared")
            buffers = Buffers(count, ranks, self._like, None)
        copy = Operation(
            algorithm=COPY,
            source=buffers.whole,
            result=buffers.other,
            run=lambda: buffers.other.copy_(buffers.whole),
        )
        try:
            built = [self._build(operation, name, buffers) for name in names]
            right = [each for each in built if self._is_right(operation, each)]
            buffers.clear()
            return self._rounds(operation, count, [*right, copy])
        finally:
            buffers.release()

    def _build(self, operation: str, algorithm: str, buffers: Buffers) -> Operation:
        comm = self._shared if algorithm in _SHARED else self._comm
        assert comm is not None, "no shared memory here"
        return build(operation, algorithm, comm, self._groups, buffers)

    def _is_right(self, operation: str, contestant: Operation) -> bool:
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

    def _rounds(self, operation: str, count: int, contestants: list[Operation]) -> list[Samples]:
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
                size_bytes=self._bytes(count),
                count=count,
                rounds_s=rounds_s,
            )
            for contestant, rounds_s in zip(contestants, times, strict=True)
        ]

    def _turn(self, contestant: Operation, repetitions: int) -> list[float]:
        """Seconds of an operation in each repetition, to the nanosecond; alike on all ranks."""
        burst = self._settings.burst

        def run() -> None:
            for _ in range(burst):
                contestant.run()

        laps = slowest(self._comm, self._clock.time(run, repetitions))
        return [round(seconds / burst, 9) for seconds in in_time(laps)]

    def _sharers(self) -> int:
        """Ranks that share one memory with this one."""
        return self._world.local_world_size if self._device.type == "cpu" else 1

    def _free_bytes(self) -> int:
        """The least on any rank, so that all choose alike; see `Communicator.all_gather`."""
        on_cpu = self._device.type == "cpu"
        free = available_bytes() if on_cpu else torch.cuda.mem_get_info(self._device)[0]
        return min(all_gather_numbers(self._comm, free))

    def _skip(self, line: str) -> None:
        if line not in self.skipped:
            self.skipped.append(line)


def _device(asked: str) -> str:
    """`auto` takes GPUs where there is one for each rank of this host."""
    if asked != "auto":
        return asked
    ranks = resolve(environ.snapshot()).world.local_world_size
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"
