"""Ranks as threads: each with its own Gloo group over one in-memory store, on loopback.

Nothing here touches the module-level state of torch.distributed, so N ranks fit into one process.
The groups are real `ProcessGroup` objects: call their methods, or hand them to collectives as
`group=` (`dist.get_rank(group)` and DDP need a default group: use the process pool for those).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from support import sockets
from support.stacks import all_stacks

T = TypeVar("T")


def run_thread_ranks(
    fn: Callable[[int, dist.ProcessGroup], T], world_size: int, timeout_s: float = 60.0
) -> list[T]:
    """Run `fn(rank, group)` in `world_size` threads; returns the results in rank order.

    The exception of the rank that failed first is raised again, with its traceback; all
    connections are cut then, so that no other rank waits for it. After `timeout_s` the test fails
    with the stacks of all threads.
    """
    run = _Run(fn, world_size, timeout_s)
    threads = [
        threading.Thread(target=run.one_rank, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        stacks = all_stacks()
        run.cut()
        first = f"\nfirst failure: {run.failures[0]!r}" if run.failures else ""
        pytest.fail(f"{stuck} not done after {timeout_s} s{first}\n{stacks}", pytrace=False)
    if run.failures:
        raise run.failures[0]
    return [run.results[rank] for rank in range(world_size)]


class _Run(Generic[T]):
    """One call's state. Groups live until all ranks are done: closing one ends its peers."""

    def __init__(
        self, fn: Callable[[int, dist.ProcessGroup], T], world_size: int, timeout_s: float
    ) -> None:
        self.fn = fn
        self.world_size = world_size
        self.timeout = timedelta(seconds=timeout_s * 2 / 3)  # an error that gloo lost, not a hang
        self.store = dist.HashStore()
        # One for all: each has a thread that waits for messages, and these would wake one another.
        self.device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        self.lock = threading.Lock()
        self.sockets_before = sockets.connections()
        self.sockets: set[int] = set()
        self.connected = threading.Barrier(world_size, action=self.note_sockets)
        self.groups: list[dist.ProcessGroup] = []
        self.results: dict[int, T] = {}
        self.failures: list[BaseException] = []

    def one_rank(self, rank: int) -> None:
        try:
            group = self._group(rank)
            self.connected.wait()  # from here on `cut` reaches every rank
            self.results[rank] = self.fn(rank, group)
        except BaseException as failure:
            with self.lock:
                self.failures.append(failure)
            self.cut()

    def note_sockets(self) -> None:
        self.sockets = sockets.connections() - self.sockets_before

    def cut(self) -> None:
        """Make every collective fail, now and later. (Gloo's own `abort` leaves peers waiting.)"""
        self.connected.abort()
        for number in self.sockets:
            sockets.cut(number)
        for found in gc.get_objects():
            if type(found) is SharedMemoryCommunicator:
                found.close()

    def _group(self, rank: int) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self.device]
        options._timeout = self.timeout
        backend = dist.ProcessGroupGloo(self.store, rank, self.world_size, options)
        group = dist.ProcessGroup(self.store, rank, self.world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        with self.lock:
            self.groups.append(group)
        return group
