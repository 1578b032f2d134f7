"""What torch calls to make a `shm` group."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from gradsync.backends.group import SharedMemoryGroup
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.unavailable import SharedMemoryError

log = logging.getLogger("gradsync")

NAME = "shm"


def register() -> None:
    """Make `shm` a backend of torch.distributed; harmless when called again."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def create(asked: Any, _options: object = None) -> Any:
    """A group for this rank; all its ranks come here at the same point.

    Args:
        asked: torch's `_DistributedBackendOptions`: store, place in the group, timeout.

    Returns:
        A `SharedMemoryGroup`, or torch's own group with the same backends (gloo, and NCCL for
        CUDA): for one rank, and where ranks cannot share memory.
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
            # As text: whoever keeps log records must not keep the frames of this error, and gloo.
            log.warning("backend shm: collectives by gloo: %s", str(error))
        return plain
    return SharedMemoryGroup(plain, shared)


def _gloo(asked: Any) -> Any:
    """As torch makes it for the backend `gloo`."""
    store = dist.PrefixStore("gloo", asked.store)
    gloo = dist.ProcessGroupGloo(store, asked.group_rank, asked.group_size, asked.timeout)
    gloo.options.global_ranks_in_group = asked.global_ranks_in_group
    gloo.options.group_name = asked.group_id
    gloo._set_sequence_number_for_group()
    return gloo


def _plain_group(asked: Any, gloo: Any) -> dist.ProcessGroup:
    """Torch's own group: gloo for the CPU, and NCCL where there are GPUs.

    Torch takes a group written in Python as it is, without the backends that "cpu:shm,cuda:nccl"
    names for other devices; so NCCL is added here.
    """
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(asked.store, asked.group_rank, asked.group_size)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = asked.timeout
        options.global_ranks_in_group = asked.global_ranks_in_group
        options.group_name = asked.group_id
        store = dist.PrefixStore("nccl", asked.store)
        nccl = dist.ProcessGroupNCCL(store, asked.group_rank, asked.group_size, options)
        nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group
