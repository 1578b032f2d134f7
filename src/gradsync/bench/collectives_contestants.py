"""Operations by every algorithm, ready to run again and again over buffers of their own.

Values of buffers are zeros while they are timed: a sum in place would otherwise grow with each
repetition, until it is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsync.bench.collectives_plan import COPY, DTYPES
from gradsync.comm.base import Communicator
from gradsync.comm.doubling import doubling_all_reduce
from gradsync.comm.hierarchical import hierarchical_all_reduce, tree_broadcast, tree_reduce
from gradsync.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter

if TYPE_CHECKING:
    from gradsync.comm.groups import Groups
    from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Who takes part, and by which ways."""

    comm: Communicator
    """All ranks, by the process group's own algorithms."""
    groups: Groups
    """Inside and between nodes."""
    shared: SharedMemoryCommunicator | None
    """All ranks, through shared memory, where that is possible."""
    device: torch.device
    """Where tensors are."""
    dtype: torch.dtype
    """Their type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One operation by one algorithm over its buffers."""

    algorithm: str
    """Its name."""
    source: Tensor
    """What this rank brings; overwritten where the operation works in place."""
    result: Tensor
    """Where the result will be; may share memory with `source`."""
    run: Callable[[], None]
    """Carry it out once, blocking (on CUDA: until the current stream may use the result)."""


class Buffers:
    """Ordinary and shared tensors of one size: [count] and [count / ranks] of each kind.

    Args:
        site: who shares.
        count: elements of the whole tensor.
        in_shared_memory: whether some algorithm wants its buffers there.

    Raises:
        SharedMemoryError: on all ranks, when there is not enough of it.
    """

    def __init__(self, site: Site, count: int, *, in_shared_memory: bool) -> None:
        part = max(count // site.comm.world_size, 1)
        # Filled, so that the system really gives the memory now.
        self.whole, self.other, self.part = (
            torch.empty(size, dtype=site.dtype, device=site.device).zero_()
            for size in (count, count, part)
        )
        self._shared = site.shared if in_shared_memory else None
        self.shared_whole, self.shared_part = self.whole, self.part
        if self._shared is not None:
            self.shared_whole = self._shared.allocate(count, site.dtype)
            self.shared_part = self._shared.allocate(part, site.dtype)

    def clear(self) -> None:
        """Zeros everywhere."""
        for tensor in (self.whole, self.other, self.part, self.shared_whole, self.shared_part):
            tensor.zero_()

    def release(self) -> None:
        """Give the shared memory back."""
        if self._shared is not None:
            self._shared.release(self.shared_whole)
            self._shared.release(self.shared_part)


def copy_contestant(buffers: Buffers) -> Contestant:
    """Every rank copies `whole` into another tensor of its own."""
    return Contestant(
        algorithm=COPY,
        source=buffers.whole,
        result=buffers.other,
        run=lambda: _ignore(buffers.other.copy_(buffers.whole)),
    )


def build(operation: str, algorithm: str, site: Site, buffers: Buffers) -> Contestant:
    """`operation` by `algorithm` over `buffers`; see `collectives_plan.OPERATIONS`."""
    comm, whole, part = site.comm, buffers.whole, buffers.part
    if algorithm in ("shared", "shared_copies"):
        assert site.shared is not None, "no shared memory here"
        comm = site.shared
    if algorithm == "shared":
        whole, part = buffers.shared_whole, buffers.shared_part
    source, result = whole, whole
    if operation == "reduce_scatter":
        result = part
    elif operation == "all_gather":
        source = part
    if algorithm == "ring" and operation != "all_reduce":
        # It works in the whole tensor; this rank's part of that is what it brings or gets.
        own = whole.view(comm.world_size, -1)[comm.rank]
        source, result = (whole, own) if operation == "reduce_scatter" else (own, whole)
    run = _backend(operation, comm, whole, part)
    if algorithm in ("ring", "recursive_doubling", "hierarchical", "tree"):
        run = _of_messages(operation, algorithm, site, whole)
    return Contestant(algorithm=algorithm, source=source, result=result, run=run)


def _backend(operation: str, comm: Communicator, whole: Tensor, part: Tensor) -> Callable[[], None]:
    """A communicator's own: over all its ranks, whole [n], part [n / ranks]; overlaps nothing."""
    return {
        "all_reduce": lambda: comm.all_reduce(whole).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: comm.all_gather(whole, part).wait(),
        "broadcast": lambda: comm.broadcast(whole).wait(),
    }[operation]


def _of_messages(operation: str, algorithm: str, site: Site, whole: Tensor) -> Callable[[], None]:
    """One of our own, made of messages: over all ranks, whole is [n]; overlaps nothing."""
    comm, levels = site.comm, site.groups

    def tree() -> None:
        tree_reduce(comm, whole)
        tree_broadcast(comm, whole)

    return {
        ("all_reduce", "ring"): lambda: ring_all_reduce(comm, whole),
        ("all_reduce", "recursive_doubling"): lambda: doubling_all_reduce(comm, whole),
        ("all_reduce", "hierarchical"): lambda: hierarchical_all_reduce(
            levels.intra, levels.inter, whole, equal_nodes=levels.equal_nodes
        ),
        ("all_reduce", "tree"): tree,
        ("reduce_scatter", "ring"): lambda: _ignore(ring_reduce_scatter(comm, whole)),
        ("all_gather", "ring"): lambda: ring_all_gather(comm, whole),
        ("broadcast", "tree"): lambda: tree_broadcast(comm, whole),
    }[operation, algorithm]


def torch_dtype(name: str) -> torch.dtype:
    """Torch's own for a name of `collectives_plan.DTYPES`."""
    return getattr(torch, DTYPES[name])


def _ignore(tensor: Tensor) -> None:
    """A run returns nothing."""
