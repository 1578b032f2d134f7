"""The measurement of `bench collectives`, on every rank: sizes in ascending order.

At each size every algorithm's result is checked once. Then come rounds, in which each algorithm and
the copy have a turn: after a barrier several repetitions follow each other, as in nccl-tests. A
repetition takes as long as on its slowest rank. Each round starts with the next algorithm."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
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
    size_text,
    work_of,
)
from gradsync.commands.bench.experiment import environment, show_progress
from gradsync.commands.plan.profile import moment, seconds_between
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import available_bytes
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.world import World

_WARM_UP = 2
_TURN_S, _MOST_REPETITIONS = 0.04, 50  # of a turn: approximate time, repetitions at most
_SHARED = ("shared", "shared_copies")


class TimedOperation(NamedTuple):
    """One operation by one algorithm over its buffers. They hold zeros during timing, since a sum
    in place would grow with each repetition."""

    algorithm: str
    source: Tensor  # the values that this rank contributes; overwritten by in-place algorithms
    result: Tensor  # may share memory with `source`
    run: Callable[[], object]  # once, blocking (on CUDA: until the stream may use the result)


def build(
    name: tuple[str, str], comm: Communicator, hosts: RankPlacement, whole: Tensor, part: Tensor
) -> TimedOperation:
    """The operation and algorithm `name` over `whole`, [n], and `part`, [n / ranks]."""
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
    return TimedOperation(algorithm, source, result, run)


def measure(options_json: dict[str, Any]) -> dict[str, Any]:
    """Open a session, measure everything; returns the data for the record."""
    options = msgspec.convert(options_json, CollectivesOptions)
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
        bench = Bench(options, world)
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
    """One rank's part."""

    def __init__(self, options: CollectivesOptions, world: World) -> None:
        self._options, self._world = options, world
        self._comm = communicator(world)
        self._hosts = share_placement(self._comm, world)
        self._shared: SharedMemoryCommunicator | None = None
        self._on_cpu = world.device.type == "cpu"
        dtype: torch.dtype = getattr(torch, DTYPES[options.dtype][0])
        self._like = torch.zeros(1, dtype=dtype, device=world.device)
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
                self.skipped.append(f"skipped: shared, shared_copies: {error}")
                asked = {o: [n for n in names if n not in _SHARED] for o, names in asked.items()}
        work = [
            (operation, count, names)
            for operation, names in asked.items()
            for count in counts_of(operation, sizes, options.dtype, self._comm.world_size)
            if names
        ]
        gc.disable()  # a garbage collection takes milliseconds
        try:
            for done, (operation, count, names) in enumerate(work):
                if self._world.is_main:
                    show_progress(done, len(work), f"{operation} {self._size(count)}")
                samples += self._measure_size(operation, count, names)
        finally:
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
                where = f"{operation} by shared at {self._size(count)}"
                self.skipped.append(f"skipped: {where}: {error}")
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
            contestants.append(TimedOperation(COPY, whole, other, lambda: other.copy_(whole)))
            return self._rounds(operation, count, contestants)
        finally:
            for tensor in in_place:
                assert self._shared is not None, "it made them"
                self._shared.release(tensor)

    def _is_right(self, operation: str, contestant: TimedOperation) -> bool:
        """Run it once on values with a known result. All ranks get the same answer."""
        # Whole numbers whose sum is exact in each dtype, up to 63 ranks.
        values = torch.tensor([1 + rank % 3 for rank in range(self._comm.world_size)])
        result = contestant.result.fill_(-1)  # detects an operation that does nothing
        contestant.source.fill_(int(values[self._comm.rank]))
        self._comm.barrier()  # peers also write shared buffers
        contestant.run()
        right = {"broadcast": values[:1], "all_gather": values}.get(operation, values.sum(0, True))
        is_wrong = result.view(len(right), -1) != right.to(result)[:, None]
        flags = all_gather_numbers(self._comm, int(is_wrong.any()))
        if any(flags):
            self.wrong.append(
                f"{operation} by {contestant.algorithm}, {len(result)} elements of "
                f"{self._options.dtype}: wrong on rank {flags.index(1)}"
            )
        return not any(flags)

    def _rounds(
        self, operation: str, count: int, contestants: list[TimedOperation]
    ) -> list[dict[str, Any]]:
        repetitions = []
        for contestant in contestants:
            affordable = int(_TURN_S / min(self._turn(contestant, _WARM_UP)))
            repetitions.append(max(1, min(affordable, _MOST_REPETITIONS)))
        times: list[list[list[float]]] = [[] for _ in contestants]
        for first in range(self._options.rounds):
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
        """Seconds of each repetition, to the nanosecond; the same on all ranks."""
        device = self._like.device.type
        self._comm.barrier()
        moments = [moment(device)]
        for _ in range(repetitions):
            contestant.run()
            moments.append(moment(device))
        seconds = torch.tensor(seconds_between(moments), dtype=torch.float64)
        # All ranks, float64 [repetitions], on the CPU.
        self._comm.all_reduce(seconds, "max").wait()
        return [max(round(each, 9), 1e-9) for each in seconds.tolist()]
