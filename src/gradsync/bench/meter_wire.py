"""What a rank sends in a step, and how long that takes when nothing hides it.

Contestants of torch's own are seen from outside: the process groups count operations, the kernel
counts bytes. Of ours there is more to know: what goes through shared memory passes no group, and a
batch of messages is one operation. So the methods of a communicator are watched, on that object.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator, Done

_BYTES_SENT = 200
"""Where `struct tcp_info` has `tcpi_bytes_sent` (linux/tcp.h, since Linux 4.19): data, headers of
TCP and IP not counted."""
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")


def bytes_sent() -> int:
    """Bytes that this process has given to all its open TCP sockets so far; 0 where the system
    does not count."""
    total = 0
    if not os.path.isdir("/proc/self/fd"):
        return total
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile: listing the folder opens one itself
            continue
        with handle:
            is_tcp = handle.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and handle.type == socket.SOCK_STREAM:
                info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _BYTES_SENT + 8:
                    total += struct.unpack_from("=Q", info, _BYTES_SENT)[0]
    return total


def operations_issued() -> int:
    """Collectives, sends and receives that this process has given to all its process groups."""
    if not dist.is_initialized():
        return 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def device_done() -> None:
    """Wait until the accelerator, if there is one, has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Wire:
    """Counts from its making on; `read` tells what has come since.

    Args:
        comms: those of a strategy of ours; none for contestants of others.
    """

    def __init__(self, comms: Sequence[Communicator] = ()) -> None:
        self._watched = [Watched(comm) for comm in comms]
        self._begin = operations_issued(), bytes_sent()

    def read(self) -> tuple[int, int]:
        """(operations, bytes sent) of this rank; a batch of messages is one operation.

        Through shared memory nothing is sent.
        """
        operations = operations_issued() - self._begin[0]
        sent = bytes_sent() - self._begin[1]
        for watched in self._watched:
            watched.stop()
            # Sends and receives of a batch were counted one by one.
            operations -= watched.messages - watched.calls["exchange"]
            if watched.in_memory:
                operations += sum(watched.calls[name] for name in (*_COLLECTIVES, "run"))
        return operations, sent


class Watched:
    """Shadows the methods of one communicator object: each call is counted and passed on.

    Args:
        comm: whose calls are counted.
        before: called before each collective in `timed`, so that ranks begin it together.
        timed: methods that are waited for at once, and how long that takes is added up.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        timed: tuple[str, ...] = (),
        before: Callable[[], None] | None = None,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.messages = 0
        """Sends and receives of all batches."""
        self.seconds = 0.0
        """In the collectives that are `timed`."""
        self.in_memory = hasattr(comm, "parts_of")
        self._comm: Any = comm
        self._timed, self._before = timed, before
        self._lock = threading.Lock()
        self._shadows = [name for name in (*_COLLECTIVES, "exchange", "run") if hasattr(comm, name)]
        for name in self._shadows:
            setattr(comm, name, partial(self._call, name, getattr(comm, name)))

    def stop(self) -> None:
        """The communicator's own methods again."""
        for name in self._shadows:
            delattr(self._comm, name)
        self._shadows = []

    def _call(self, name: str, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        self._count(name, arguments)
        if name not in self._timed:
            return method(*arguments, **named)
        if self._before is not None:
            self._before()
        with self._taken():
            method(*arguments, **named).wait()
        return Done()

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Add up how long the block takes; an accelerator is done before the clock is read."""
        device_done()
        begin = time.perf_counter()
        yield
        device_done()
        self.seconds += time.perf_counter() - begin

    def _count(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if name == "exchange":
                messages = sum(t.numel() > 0 for t, _ in (*arguments[0], *arguments[1]))
                self.messages += messages
                self.calls[name] += messages > 0  # an empty batch is nothing
            else:
                self.calls[name] += 1
