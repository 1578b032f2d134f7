"""Whether ranks share memory."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterable
from typing import Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.unavailable import MESSAGES, Reason, SharedMemoryError

log = logging.getLogger("gradsync")

_TIMEOUT_S = 1800.0


def share_memory(base: Communicator) -> SharedMemoryCommunicator:
    """A communicator over the ranks of `base` that goes through shared memory; all ranks call it.

    Raises:
        SharedMemoryError: on all ranks: they are not on one host, or it is not possible
            there; the message says why and what to do.
    """
    # The same on all ranks of a host; ranks of different hosts differ in what `base` tells them.
    if sys.platform != "linux":
        raise SharedMemoryError(f"no shared memory: {MESSAGES[Reason.NOT_LINUX]}")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise SharedMemoryError(
            f"no shared memory on {platform.machine()}: {MESSAGES[Reason.MEMORY_ORDER]}"
        )
    return SharedMemoryCommunicator(base, _timeout_s(getattr(base, "group", None)))


def fastest(
    base: Communicator,
    device: torch.device,
    present: Iterable[SharedMemoryCommunicator] = (),
) -> Communicator:
    """`base`, or shared memory in its place where that works: CPU ranks of one host, over gloo.

    All ranks call it. Rank 0 says in one line what was taken, if there was a choice.

    Args:
        base: the ranks.
        device: of the tensors.
        present: made earlier, in order; the last one over the same group is taken again, if all
            ranks still have it.
            Models that take turns in different orders on different ranks are found out then: on
            communicators of their own they would wait for each other.
    """
    if not isinstance(base, ProcessGroupCommunicator) or device.type != "cpu":
        return base
    if base.world_size == 1:
        return base
    if (known := _still_there(base, present)) is not None:
        return known
    try:
        shared = share_memory(base)
    except SharedMemoryError as error:
        if base.rank == 0:
            log.info("collectives by %s: %s", base.backend_for(device), str(error))
        return base
    if base.rank == 0:
        log.info("collectives through shared memory: all %d ranks are on one host", base.world_size)
    return shared


def _still_there(
    base: ProcessGroupCommunicator, present: Iterable[SharedMemoryCommunicator]
) -> SharedMemoryCommunicator | None:
    """One of `present` over `base`'s group that works on every rank; they forget, and learn that it
    broke, at different times."""
    over = [c for c in present if getattr(c.base, "group", None) is base.group and c.is_open]
    newest = over[-1].number if over else 0  # numbers are drawn, and have no order
    # Whole group, int64 [2], on the CPU: equal numbers have equal smallest and greatest ones.
    both = torch.tensor([newest, -newest])
    base.all_reduce(both, "max").wait()
    return over[-1] if newest and both.tolist() == [newest, -newest] else None


def _timeout_s(group: Any) -> float:
    """The group's own."""
    if group is None:
        return _TIMEOUT_S
    if not hasattr(group, "options"):  # a ProcessGroup, not a backend
        group = group._get_backend(torch.device("cpu"))
    return group.options._timeout.total_seconds()
