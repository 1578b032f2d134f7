"""Decide whether ranks share memory."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterable

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.comm.values import same_number
from gradsync.core.torch_private import timeout_of

log = logging.getLogger("gradsync")

_TIMEOUT_S = 1800.0


def share_memory(base: Communicator) -> SharedMemoryCommunicator:
    """Make a communicator over the ranks of `base` through shared memory; all ranks call it.

    Raises:
        SharedMemoryError: on all ranks, if they are not on one host or shared memory is not
            available; the message says why and what to do.
    """
    # The same on all ranks of a host; ranks of different hosts differ in what `base` tells them.
    if sys.platform != "linux":
        raise SharedMemoryError("no shared memory: it needs Linux")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise SharedMemoryError(
            f"no shared memory on {platform.machine()}: only x86-64 processors keep the order of "
            "writes that it relies on"
        )
    group = getattr(base, "group", None)
    timeout_s = _TIMEOUT_S if group is None else timeout_of(group).total_seconds()
    return SharedMemoryCommunicator(base, timeout_s)


def fastest(
    base: Communicator,
    device: torch.device,
    present: Iterable[SharedMemoryCommunicator] = (),
) -> Communicator:
    """Return shared memory instead of `base` if possible: CPU ranks of one host, over gloo.

    All ranks call it. If there was a choice, rank 0 logs one line about it.

    Args:
        base: communicator over the ranks.
        device: device of the tensors.
        present: communicators made earlier, in order; the last one over the same group is reused if
            all ranks still have it. This detects models that ranks use in different orders: on
            separate communicators they would wait for each other.
    """
    if not isinstance(base, ProcessGroupCommunicator) or device.type != "cpu":
        return base
    if base.world_size == 1:
        return base
    # Ranks drop communicators, and notice a broken one, at different times.
    over = [c for c in present if getattr(c.base, "group", None) is base.group and c.is_open]
    number = over[-1].number if over else 0  # numbers are random, without order
    if same_number(base, number) and number:
        return over[-1]
    try:
        shared = share_memory(base)
    except SharedMemoryError as error:
        if base.rank == 0:
            log.info("collectives by %s: %s", base.backend_for(device), str(error))
        return base
    if base.rank == 0:
        log.info("collectives through shared memory: all %d ranks are on one host", base.world_size)
    return shared
