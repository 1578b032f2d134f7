"""Groups of backend `shm` beside gloo's, on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from gradsync.backends.group import SharedMemoryGroup
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.choose import share_memory
from support.thread_ranks import run_thread_ranks


class Ranks(NamedTuple):
    """One rank's groups."""

    rank: int
    world_size: int
    gloo: Any
    shm: Any
    shared: Any
    """A spy on the communicator behind `shm`."""


def on_ranks(world_size: int, fn: Callable[[Ranks], Any]) -> list[Any]:
    """`fn` on every rank, with a group of each kind over the same ranks."""

    def work(rank: int, gloo: dist.ProcessGroup) -> Any:
        shared = share_memory(ProcessGroupCommunicator(gloo))
        spy = mock.Mock(wraps=shared)
        spy.close = shared.close
        type(spy).timeout_s = property(
            lambda _: shared.timeout_s, lambda _, s: setattr(shared, "timeout_s", s)
        )
        shm = SharedMemoryGroup(gloo, spy)
        try:
            return fn(Ranks(rank, world_size, gloo, shm, spy))
        finally:
            shm._lane.close()  # not `shutdown`, which is gloo's end too

    return run_thread_ranks(work, world_size)


def given(kind: Any, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options
