"""Process groups made by gradsync: inside each node, between nodes, or over any ranks.

The session destroys them with its own group at its end. Each costs connections and a listening
socket per rank: make them once, not in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.choose import communicator
from gradsync.comm.placement import Placement, share_placement
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.single import SingleCommunicator
from gradsync.core.torch_private import device_types, timeout_of
from gradsync.errors import ConfigError
from gradsync.world import World


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's communicators for two-level collectives."""

    intra: Communicator
    """The ranks of this node, ascending."""
    inter: Communicator
    """One rank of each node: those at this rank's position in `intra`."""
    placement: Placement
    """The node and local rank of every rank."""

    @property
    def equal_nodes(self) -> bool:
        """True when all nodes have the same number of ranks."""
        return self.placement.equal_nodes


def groups(world: World) -> Groups:
    """Build the groups inside and between nodes; every rank calls it at the same point.

    Args:
        world: this rank's; ranks exchange their node and local rank.

    Raises:
        ConfigError: two ranks report the same local rank on the same node.
        RunError: several ranks, but no process group (outside of `with gs.init()`).
    """
    comm = communicator(world)
    placement = share_placement(comm, world, _small_tensor_device(world))
    parts = {"intra": placement.nodes, "inter": placement.columns}
    made: dict[str, Communicator] = {}
    for name, lists in parts.items():
        for ranks in lists:  # every rank takes part in making each of them
            found = new_group(ranks) if world.is_distributed else SingleCommunicator()
            if found is not None:
                made[name] = found
    return Groups(made["intra"], made["inter"], placement)


def group(ranks: Sequence[int]) -> Communicator | None:
    """A communicator over some ranks of the default process group, as `dist.new_group` makes it.

    Every rank of the run calls it, members or not, with the same ranks, at the same point. Before
    each collective the members compare what they call (one all-reduce of 16 bytes), and all of them
    refuse if operation, op, `src`, shape or dtype differ.

    Args:
        ranks: members, in any order; the communicator numbers them in ascending order.

    Returns:
        The communicator on members, None on other ranks.

    Raises:
        ConfigError: no ranks, a rank listed twice, or one that does not exist.
    """
    made = new_group(ranks)
    if isinstance(made, ProcessGroupCommunicator):
        made.checked = True
    return made


def new_group(ranks: Sequence[int]) -> Communicator | None:
    """Make a `group` for gradient synchronisation, which does not compare calls."""
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
    made = dist.new_group(list(ranks), timeout=_timeout())
    return ProcessGroupCommunicator(made) if rank in ranks else None


def for_background(comm: Communicator, device: torch.device) -> Communicator:
    """The communicator that a second thread may use beside `comm`'s collectives; all ranks call it.

    On a CPU that is `comm` itself: messages never match collectives there. NCCL runs everything of
    a group in the order in which a rank issues it, so there the thread gets a separate group.
    """
    group = getattr(comm, "group", None)
    if device.type != "cuda" or group is None:
        return comm
    ranks = dist.get_process_group_ranks(group)
    return ProcessGroupCommunicator(dist.new_group(ranks, timeout=_timeout()))


def _small_tensor_device(world: World) -> torch.device:
    """Device on which the default group takes small tensors: the CPU, or the GPU if NCCL only."""
    if not world.is_distributed:
        return torch.device("cpu")
    return torch.device("cpu" if "cpu" in device_types(_default_group()) else world.device)


def _timeout() -> timedelta:
    """Timeout of the default group: torch would give a new group its built-in default."""
    main = _default_group()
    return timeout_of(main, device_types(main)[0])


def _default_group() -> dist.ProcessGroup:
    main = dist.group.WORLD
    assert main is not None, "no process group"
    return main
