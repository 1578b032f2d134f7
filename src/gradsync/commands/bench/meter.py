"""When a step begins and ends, what a rank sends in it, and what it costs the host.

On a CPU the clock is read, on an accelerator events in the stream. Torch's own contestants are
measured from outside: process groups count operations, the kernel counts bytes. For our strategies
the communicator's methods are watched: shared memory bypasses the process group, and a batch of
messages is one operation."""

from __future__ import annotations

import cProfile
import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.commands.plan.profile import moment, seconds_between
from gradsync.core.torch_private import num_issued, process_groups

_BYTES_SENT = 200
"""Offset in `struct tcp_info` of `tcpi_bytes_sent`, then `tcpi_bytes_retrans` (Linux 4.19), without
headers. A late packet is sent twice, on a busy host even to itself."""
_SHOWN = 10  # functions of a step's profile
_IN_MEMORY = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "run")


class StepClock:
    """Called by a turn in this order: `begin`, then `backward_done` and `step_done` for each step.

    Torch's DDP waits for its messages at the end of backward. A rank's own computation ends
    earlier, with the gradient of `last`, the parameter that is first in forward. A hook reads the
    clock there.
    """

    def __init__(self, last: Tensor) -> None:
        self._device = last.device.type
        self._moments: list[Any] = []
        self._last_gradient: Any = None
        last.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, _: Tensor) -> None:
        self._last_gradient = moment(self._device)

    def begin(self) -> None:
        """The first step of a turn begins."""
        self._last_gradient = None
        self._moments = [moment(self._device)]

    def backward_done(self) -> None:
        """The last backward of a step has returned."""
        ready, self._last_gradient = self._last_gradient, None
        # The hook does not see sharded parameters; this time replaces it.
        self._moments.append(moment(self._device) if ready is None else ready)

    def step_done(self) -> None:
        """The step has ended, and the next one begins."""
        self._moments.append(moment(self._device))

    def read(self) -> tuple[list[float], list[float]]:
        """Seconds of all steps since `begin`, and of their forward and backward up to the rank's
        last gradient; waits for the device."""
        return seconds_between(self._moments[::2]), seconds_between(self._moments)[::2]


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
    """Counts from its creation on, by shadowing methods of `comm`, that of a strategy of ours."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self._begin = operations_issued(), bytes_sent()
        self._beyond = 0  # operations that the group does not count, less messages of a batch
        self._lock = threading.Lock()
        in_memory = _IN_MEMORY if hasattr(comm, "parts_of") else ()
        self._names = [name for name in ("exchange", *in_memory) if hasattr(comm, name)]
        for name in self._names:
            setattr(comm, name, partial(self._call, name, getattr(comm, name)))

    def read(self) -> tuple[int, int]:
        """(operations, bytes sent) of this rank; a batch of messages is one operation. Shared
        memory sends no bytes."""
        operations = operations_issued() - self._begin[0] + self._beyond
        sent = bytes_sent() - self._begin[1]
        for name in self._names:
            delattr(self._comm, name)
        return operations, sent

    def _call(self, name: str, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            if name == "exchange":
                messages = sum(t.numel() > 0 for t, _ in (*arguments[0], *arguments[1]))
                self._beyond -= max(messages - 1, 0)  # an empty batch does not count
            else:
                self._beyond += 1
        return method(*arguments, **named)


def host_cost(step: Callable[[], object]) -> dict[str, Any]:
    """What two steps do on this thread: operations that torch dispatches, Python's function calls,
    and the slowest functions, as (name, calls, milliseconds excluding callees)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operations:
        step()
    recorded: Any = operations.profiler
    # Freeing these events crashes one run in five (torch 2.13, ~ProfilerResult): never free them.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(recorded.kineto_results))
    profile = cProfile.Profile()
    profile.runcall(step)
    stats: list[Any] = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)
    slowest = stats[:_SHOWN]
    return {
        "dispatched": sum(e.name.startswith("aten::") for e in recorded.function_events),
        "calls": sum(entry.callcount for entry in stats if not isinstance(entry.code, str)),
        "slowest": [(_name(e.code), e.callcount, 1000 * e.inlinetime) for e in slowest],
    }


def _name(code: Any) -> str:
    if isinstance(code, str):  # a function in C
        return code.strip("<>").removeprefix("built-in method ").removeprefix("method ")
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}"
