"""The communicator of a world, the nodes of its ranks, and process groups over any ranks.

The session destroys these groups when it ends. Each group costs connections and a listening socket
per rank: create it once, not in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator, Messages, Messenger, ReduceOp, Work
from gradsync.comm.process_group import Done, ProcessGroupCommunicator, Subset
from gradsync.comm.values import all_gather_numbers
from gradsync.core.torch_private import (
    backend_of,
    device_types,
    high_priority,
    set_timeout,
    timeout_of,
)
from gradsync.errors import ConfigError, RunError
from gradsync.world import World

_FOR_THREAD = "cpu:gloo,cuda:nccl"
"""Backends of a group for a second thread, whose kernels have a high priority."""


class SingleCommunicator:
    """One rank, no process group, no bytes moved: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Leave `tensor` as it is."""
        return Done()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Leave `tensor` as it is."""
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Copy `tensor`, shape [n], into `output`, shape [n]."""
        output.copy_(tensor)
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Copy `tensor`, shape [n], into `output`, shape [n]."""
        return self.all_gather(output, tensor)

    def barrier(self) -> None:
        """Return at once."""

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """Check that both lists are empty."""
        assert len(sends) + len(receives) == 0, "a message to oneself"
        return Done()


def communicator(world: World | None = None) -> Communicator:
    """The communicator over all ranks of `world`: the default process group, or one rank. Without a
    world: the default process group, if there is one, else this rank.

    Raises:
        RunError: several ranks, but no process group (no open `with gs.init()`).
    """
    alone = not dist.is_initialized() if world is None else world.world_size == 1
    if alone:
        return SingleCommunicator()
    if not dist.is_initialized():
        raise RunError("several ranks but no process group: use it inside `with gs.init()`")
    recovery = None if world is None else world.recovery
    lost = None if recovery is None else partial(recovery.is_lost, recovery.generation)
    return ProcessGroupCommunicator(dist.group.WORLD, lost=lost)


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The node of every rank. Frozen, equal on all ranks."""

    node_ranks: tuple[int, ...]

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks of each node, ascending; nodes in order."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_ranks):
            found.setdefault(node, []).append(rank)
        return [found[node] for node in sorted(found)]


def share_placement(comm: Communicator, world: World) -> RankPlacement:
    """Exchange the nodes of all ranks of `comm` (the ranks of `world`): one all-gather, int64 [1]
    from each rank."""
    return RankPlacement(tuple(all_gather_numbers(comm, world.node_rank)))


def levels_of(comm: Messenger, hosts: RankPlacement) -> tuple[Messenger, Messenger, bool]:
    """The ranks of this node, one rank of each node (those at this rank's position in it), by
    messages over `comm`; and whether all nodes have the same number of ranks."""
    nodes = hosts.nodes
    mine = next(ranks for ranks in nodes if comm.rank in ranks)
    place = mine.index(comm.rank)
    # Ascending: the order in which torch numbers the ranks of a new group.
    column = sorted(ranks[place] for ranks in nodes if place < len(ranks))
    return Subset(comm, mine), Subset(comm, column), len(set(map(len, nodes))) == 1


def group(ranks: Sequence[int]) -> Communicator | None:
    """A communicator over some ranks of the default process group, like `dist.new_group`.

    Every rank of the run calls it at the same point, members or not, with the same ranks in any
    order. The communicator numbers its members in ascending order; other ranks get None. Before
    each collective the members compare their calls (one all-reduce of 16 bytes), and all of them
    refuse if operation, op, `src`, shape or dtype differ.

    Raises:
        ConfigError: no ranks, a rank listed twice, or one that does not exist.
    """
    made = new_group(ranks, for_handle=True)
    if isinstance(made, ProcessGroupCommunicator):
        made.checked = True
    return made


def new_group(ranks: Sequence[int], *, for_handle: bool = False) -> Communicator | None:
    """Make a `group` for gradient synchronisation, which does not compare calls. `for_handle` adds
    what `for_background` needs, which all ranks of the run must make together."""
    on = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if on else (0, 1)
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        hint = "" if on else " (there is no process group: use it inside `with gs.init()`)"
        raise ConfigError(
            f"a group needs ranks of 0..{world_size - 1}, each once; got {list(ranks)}{hint}"
        )
    if len(ranks) == 1:
        return SingleCommunicator() if rank in ranks else None
    if len(ranks) == world_size:
        return ProcessGroupCommunicator(dist.group.WORLD)
    made = _torch_group(ranks)
    spare = [_torch_group(ranks, _FOR_THREAD)] if for_handle and _has_nccl(dist.group.WORLD) else []
    return ProcessGroupCommunicator(made, spare=spare) if rank in ranks else None


def for_background(comm: Communicator, device: torch.device) -> Communicator:
    """A communicator for a second thread, while `comm` runs collectives; all ranks call it.

    On CPU this is `comm` itself: messages never match collectives there. NCCL runs everything in a
    group in the order in which a rank issues it, so on CUDA the thread gets a separate group, which
    also takes CPU tensors. Its owner closes it.

    Raises:
        ConfigError: GPUs without NCCL, or a second thread over some ranks of the run only: torch
            makes groups collectively over all ranks.
    """
    if device.type != "cuda" or not isinstance(comm, ProcessGroupCommunicator):
        return comm
    if (backend := backend_of(comm.group, device).name()) != "nccl":
        raise ConfigError(
            f"sums beside backward need NCCL on GPUs, got {backend}; strategy='bucketed'"
        )
    torch.cuda.synchronize(device)  # the new group is split from one that may be busy
    ranks = dist.get_process_group_ranks(comm.group)
    if len(ranks) < dist.get_world_size() and not comm.spare:
        raise ConfigError(
            f"on GPUs the group of ranks {ranks} serves one handle that sends beside backward, if "
            "gs.group made it; make another group by gs.group, or take strategy='bucketed'"
        )
    whole = len(ranks) == dist.get_world_size()
    made = _torch_group(ranks, _FOR_THREAD) if whole else comm.spare.pop()
    return ProcessGroupCommunicator(made, made=[made])


def with_cpu_group(comm: Communicator) -> Communicator:
    """`comm`; if it takes GPU tensors only (a script's own NCCL group), a communicator that adds a
    Gloo group, so that small messages need not wait for the device. All ranks call it, and close
    it."""
    group = getattr(comm, "group", None)
    if group is None or "cpu" in device_types(group):
        return comm
    made = _torch_group(dist.get_process_group_ranks(group), "gloo")
    return ProcessGroupCommunicator(group, on_cpu=made, made=[made])


def group_of_pair(comm: Communicator) -> ProcessGroupCommunicator | None:
    """If `comm` is the default group of two ranks, make a group for a thread; both ranks call it,
    and close it."""
    if comm.world_size != 2 or getattr(comm, "group", dist) is not dist.group.WORLD:
        return None
    made = _torch_group([0, 1])
    return ProcessGroupCommunicator(made, made=[made])


def _has_nccl(group: object) -> bool:
    return "cuda" in device_types(group) and backend_of(group, "cuda").name() == "nccl"


def _torch_group(ranks: Sequence[int], backend: str | None = None) -> object:
    """A new group with the default group's timeouts instead of torch's built-in one."""
    main = dist.group.WORLD
    kinds = device_types(main)
    timeout = timeout_of(main, "cpu" if "cpu" in kinds else kinds[0])
    options = high_priority(timeout) if backend == _FOR_THREAD else None
    made = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
    if dist.get_rank() in ranks and _has_nccl(main) and _has_nccl(made):
        set_timeout(made, "cuda", timeout_of(main, "cuda"))  # NCCL's is later than Gloo's
    return made
