"""The communicator that belongs to a world."""

from __future__ import annotations

from gradsync.comm.base import Communicator
from gradsync.comm.single import SingleCommunicator
from gradsync.errors import RunError
from gradsync.world import World


def communicator(world: World) -> Communicator:
    """The communicator over all ranks of `world`: the default process group, or one rank.

    Raises:
        RunError: several ranks, but no process group (outside of `with gs.init()`).
    """
    if world.world_size == 1:
        return SingleCommunicator()
    import torch.distributed as dist

    from gradsync.comm.process_group import ProcessGroupCommunicator

    if not dist.is_initialized():
        raise RunError(
            f"world size {world.world_size} but no process group: use it inside `with gs.init()`"
        )
    return ProcessGroupCommunicator(dist.group.WORLD)
