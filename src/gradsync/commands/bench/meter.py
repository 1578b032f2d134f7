"""When a step begins and ends, and what a rank sends in it.

On a CPU the clock is read, on an accelerator events in the stream. Torch's own contestants are
measured from outside: process groups count operations, the kernel counts bytes. For our strategies
the communicator's methods are watched: shared memory bypasses the process group, and a batch of
messages is one operation."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.core.torch_private import num_issued, process_groups

_BYTES_SENT = 200
"""Offset in `struct tcp_info` of `tcpi_bytes_sent`, then `tcpi_bytes_retrans` (Linux 4.19), without
headers. A late packet is sent twice, on a busy host even to itself."""
_IN_MEMORY = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "run")


class StepClock:
    """Called by a turn in this order: `begin`, then `backward_done` and `step_done` for each step.

    Torch's DDP waits for its messages at the end of backward. A rank's own computation ends
    earlier, with the gradient of the embedding, which is first in forward. A hook reads the clock
    there.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._marks: list[Any] = []
        self._last_gradient: Any = None

    def watch(self, parameter: Tensor) -> None:
        """`parameter` is the one whose gradient comes last."""

        def ready(_: Tensor) -> None:
            self._last_gradient = self._now()

        parameter.register_post_accumulate_grad_hook(ready)

    def begin(self) -> None:
        """The first step of a turn begins."""
        self._last_gradient = None
        self._marks = [self._now()]

    def backward_done(self) -> None:
        """The last backward of a step has returned."""
        ready, self._last_gradient = self._last_gradient, None
        # The hook does not see sharded parameters; this time replaces it.
        self._marks.append(self._now() if ready is None else ready)

    def step_done(self) -> None:
        """The step has ended, and the next one begins."""
        self._marks.append(self._now())

    def read(self) -> tuple[list[float], list[float]]:
        """Seconds of all steps since `begin`, and of their forward and backward up to the rank's
        last gradient; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        begins, readies, ends = self._marks[:-1:2], self._marks[1::2], self._marks[2::2]
        return (
            [self._between(*pair) for pair in zip(begins, ends, strict=True)],
            [self._between(*pair) for pair in zip(begins, readies, strict=True)],
        )

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1000 if self._on_cuda else last - first


def bytes_sent() -> int:
    """Bytes that this process has sent on all its open TCP sockets so far; 0 if the system does not
    count them."""
    total, folder = 0, "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since: listing the folder opens one itself
            continue
        with handle:
            is_tcp = handle.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and handle.type == socket.SOCK_STREAM:
                info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _BYTES_SENT + 16:
                    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
                    total += sent - again
    return total


def operations_issued() -> int:
    """Collectives, sends and receives issued by this process on all its process groups."""
    return sum(map(num_issued, process_groups())) if dist.is_initialized() else 0


class Wire:
    """Counts from its creation on; `comms` are those of a strategy of ours. It shadows their
    methods: each call is counted and forwarded."""

    def __init__(self, comms: Sequence[Communicator] = ()) -> None:
        self._begin = operations_issued(), bytes_sent()
        self._surplus = 0  # sends and receives of a batch, which the group counts one by one
        self._in_memory = 0
        self._lock = threading.Lock()
        self._shadows: list[tuple[Any, str]] = []
        for comm in comms:
            in_memory = hasattr(comm, "parts_of")
            for name in ("exchange", *(_IN_MEMORY if in_memory else ())):
                if hasattr(comm, name):
                    setattr(comm, name, partial(self._call, name, getattr(comm, name)))
                    self._shadows.append((comm, name))

    def read(self) -> tuple[int, int]:
        """(operations, bytes sent) of this rank; a batch of messages is one operation. Shared
        memory sends no bytes."""
        operations = operations_issued() - self._begin[0]
        sent = bytes_sent() - self._begin[1]
        for comm, name in self._shadows:
            delattr(comm, name)
        return operations - self._surplus + self._in_memory, sent

    def _call(self, name: str, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            if name == "exchange":
                messages = sum(t.numel() > 0 for t, _ in (*arguments[0], *arguments[1]))
                self._surplus += max(messages - 1, 0)  # an empty batch does not count
            else:
                self._in_memory += 1
        return method(*arguments, **named)
