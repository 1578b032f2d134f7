"""The measurement of `bench collectives`, on every rank: sizes upward, algorithms in turns.

At each size every algorithm's result is checked once; then come rounds in which each algorithm,
and the copy, has a turn of several repetitions. The next round begins with the next algorithm.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gradsync.bench.collectives_check import Patterns
from gradsync.bench.collectives_clock import Clock, clock_for, in_time, slowest
from gradsync.bench.collectives_contestants import (
    Buffers,
    Contestant,
    Site,
    build,
    copy_contestant,
    torch_dtype,
)
from gradsync.bench.collectives_figures import Samples
from gradsync.bench.collectives_plan import (
    Settings,
    choose_sizes,
    counts_of,
    repetitions_of,
    rounds_of,
    size_text,
)
from gradsync.bench.environment import environment
from gradsync.comm.choose import communicator
from gradsync.comm.groups import groups
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.unavailable import SharedMemoryError
from gradsync.comm.supported import check_supported
from gradsync.comm.values import all_gather_numbers
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.memory_limit import available_bytes
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session, SessionOptions
from gradsync.world import World

_WARM_UP = 2
_SHARED = ("shared", "shared_copies")

Tell = Callable[[int, int, str], None]
"""`tell(points done, points in all, what comes now)`."""


@dataclass(slots=True)
class Measured:
    """What came out."""

    samples: list[Samples] = field(default_factory=list)
    """By operation, size and algorithm; the copy is one of these."""
    skipped: list[str] = field(default_factory=list)
    """What could not be measured, and why: a line each."""
    wrong: list[str] = field(default_factory=list)
    """Results that were not right: a line each. These algorithms were not timed."""


def measure_collectives(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Open a session, measure everything; returns what `--json` and the record are made of, with
    samples as `Samples` has them.

    Raises:
        ConfigError: fewer than two ranks, a size beyond memory, a dtype that a backend cannot add.
        GradsyncError: the ranks did not meet, or one of them failed.
    """
    session = Session(SessionOptions(device=_device(settings.device), threads=settings.threads))
    with session as world:
        if world.world_size < 2:
            raise ConfigError("collectives need at least 2 ranks: one rank has nothing to move")
        before = environment(world_size=world.world_size, threads=session.threads)
        with _no_collector():
            measured = Bench(settings, world, tell).run()
        return {
            "environment": before,
            "num_nodes": world.num_nodes,
            "one_memory": world.one_host and world.device == "cpu",
            **asdict(measured),
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
        self._tell = tell if world.is_main else _say_nothing
        self._device = torch.device(world.device)
        self._comm = communicator(world)
        self._dtype = torch_dtype(settings.dtype)
        self._patterns = Patterns(world.rank, world.world_size, self._dtype, self._device)
        self._clock: Clock = clock_for(world, self._comm, self._device)
        self._found = Measured()

    def run(self) -> Measured:
        """Measure; samples are the same on all ranks."""
        self._check_dtype()
        sizes = choose_sizes(
            self._settings, available_bytes=self._free_bytes(), ranks=self._sharers()
        )
        with ExitStack() as stack:
            site = self._site(stack)
            work = [
                (operation, count)
                for operation in self._settings.operations
                if self._algorithms(operation, site)
                for count in counts_of(
                    operation, sizes, self._settings.dtype, self._comm.world_size
                )
            ]
            for done, (operation, count) in enumerate(work):
                size_bytes = count * self._dtype.itemsize
                self._tell(done, len(work), f"{operation} {size_text(size_bytes)}")
                self._found.samples += self._measure_size(operation, count, site)
            self._tell(len(work), len(work), "done")
        return self._found

    def _site(self, stack: ExitStack) -> Site:
        shared = None
        if set(_SHARED) & set(self._settings.algorithms):
            if self._device.type != "cpu":
                self._skip("shared, shared_copies: for tensors on the CPU only")
            else:
                try:
                    shared = share_memory(self._comm)
                    stack.callback(shared.close)
                except SharedMemoryError as error:
                    self._skip(f"shared, shared_copies: {error}")
        return Site(
            comm=self._comm,
            groups=groups(self._world),
            shared=shared,
            device=self._device,
            dtype=self._dtype,
        )

    def _algorithms(self, operation: str, site: Site) -> list[str]:
        names = self._settings.algorithms_of(operation)
        return [name for name in names if site.shared is not None or name not in _SHARED]

    def _measure_size(self, operation: str, count: int, site: Site) -> list[Samples]:
        names = self._algorithms(operation, site)
        try:
            buffers = Buffers(site, count, in_shared_memory="shared" in names)
        except SharedMemoryError as error:
            size = size_text(count * self._dtype.itemsize)
            self._skip(f"{operation} by shared at {size}: {error}")
            names.remove("shared")
            buffers = Buffers(site, count, in_shared_memory=False)
        try:
            contestants = [build(operation, name, site, buffers) for name in names]
            right = [c for c in contestants if self._is_right(operation, c)]
            buffers.clear()
            return self._rounds(operation, count, [*right, copy_contestant(buffers)])
        finally:
            buffers.release()

    def _is_right(self, operation: str, contestant: Contestant) -> bool:
        """Run it once on numbers with a known result. All ranks get the same answer."""
        self._patterns.fill(contestant.source, contestant.result)
        self._comm.barrier()  # shared buffers are written by peers, too
        contestant.run()
        wrong = self._patterns.first_wrong(operation, contestant.result)
        for rank, index in enumerate(all_gather_numbers(self._comm, wrong)):
            if index >= 0:
                self._found.wrong.append(
                    f"{operation} by {contestant.algorithm}, {len(contestant.result)} elements of "
                    f"{self._settings.dtype}: element {index} is wrong on rank {rank}"
                )
                return False
        return True

    def _rounds(self, operation: str, count: int, contestants: list[Contestant]) -> list[Samples]:
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
                size_bytes=count * self._dtype.itemsize,
                count=count,
                rounds_s=rounds_s,
            )
            for contestant, rounds_s in zip(contestants, times, strict=True)
        ]

    def _turn(self, contestant: Contestant, repetitions: int) -> list[float]:
        """Seconds of an operation in each repetition, to the nanosecond; alike on all ranks."""
        burst = self._settings.burst

        def run() -> None:
            for _ in range(burst):
                contestant.run()

        laps = slowest(self._comm, self._clock.time(run, repetitions))
        return [round(seconds / burst, 9) for seconds in in_time(laps)]

    def _check_dtype(self) -> None:
        tensor = torch.zeros(1, dtype=self._dtype, device=self._device)
        if set(self._settings.operations) & {"all_reduce", "reduce_scatter"}:
            check_supported(self._comm, tensor, "sum", "backend")

    def _sharers(self) -> int:
        """Ranks that share one memory with this one."""
        return self._world.local_world_size if self._device.type == "cpu" else 1

    def _free_bytes(self) -> int:
        """The least on any rank, so that all choose alike; see `Communicator.all_gather`."""
        on_cpu = self._device.type == "cpu"
        free = available_bytes() if on_cpu else torch.cuda.mem_get_info(self._device)[0]
        return min(all_gather_numbers(self._comm, free))

    def _skip(self, line: str) -> None:
        if line not in self._found.skipped:
            self._found.skipped.append(line)


def samples_of(result: dict[str, Any]) -> list[Samples]:
    """The samples in what `measure_collectives` returned, which may have been JSON in between."""
    return [Samples(**entry) for entry in result["samples"]]


def _device(asked: str) -> str:
    """`auto` takes GPUs where there is one for each rank of this host."""
    if asked != "auto":
        return asked
    ranks = resolve(environ.snapshot()).world.local_world_size
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python collects garbage now and then, for milliseconds: not meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _say_nothing(done: int, total: int, what: str) -> None:
    """On ranks above 0."""
