"""Registration of the backend `shm` with torch, and the function that makes its groups."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from gradsync.backends.group import SharedMemoryGroup
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.core.torch_private import count_operations, set_backends, set_timeout

log = logging.getLogger("gradsync")

NAME = "shm"


def register() -> None:
    """Make `shm` a backend of torch.distributed; harmless when called again."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def create(asked: Any, _options: object = None) -> Any:
    """Make a group for this rank; all its ranks call it at the same point.

    Args:
        asked: torch's `_DistributedBackendOptions`: store, place in the group, timeout.

    Returns:
        A `SharedMemoryGroup`; or torch's own group with the same backends (gloo, and NCCL for
            CUDA) for one rank, and where ranks cannot share memory.
    """
    plain = _plain_group(asked, _gloo(asked))
    if asked.group_size == 1:
        return plain
    try:
        # Two small all-gathers over the group's ranks, through gloo.
        shared = share_memory(ProcessGroupCommunicator(plain))
    except SharedMemoryError as error:
        is_default = not asked.global_ranks_in_group
        if is_default and asked.group_rank == 0:
            # As text: stored log records must not keep this error's frames, and so gloo, alive.
            log.warning("backend shm: collectives by gloo: %s", str(error))
        return plain
    return SharedMemoryGroup(plain, shared)


def _gloo(asked: Any) -> Any:
    """A gloo backend, made as torch makes it."""
    store = dist.PrefixStore("gloo", asked.store)
    gloo = dist.ProcessGroupGloo(store, asked.group_rank, asked.group_size, asked.timeout)
    gloo.options.global_ranks_in_group = asked.global_ranks_in_group
    gloo.options.group_name = asked.group_id
    count_operations(gloo)
    return gloo


def _plain_group(asked: Any, gloo: Any) -> dist.ProcessGroup:
    """A torch group with gloo for the CPU, and NCCL where there are GPUs.

    Torch takes a group written in Python as it is, without the backends that "cpu:shm,cuda:nccl"
    names for other devices; so NCCL is added here.
    """
    group = dist.ProcessGroup(asked.store, asked.group_rank, asked.group_size)
    backends = {"cpu": gloo}
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        set_timeout(options, asked.timeout)
        options.global_ranks_in_group = asked.global_ranks_in_group
        options.group_name = asked.group_id
        store = dist.PrefixStore("nccl", asked.store)
        backends["cuda"] = dist.ProcessGroupNCCL(store, asked.group_rank, asked.group_size, options)
        count_operations(backends["cuda"])
    set_backends(group, backends)
    return group
