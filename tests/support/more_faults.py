"""More faults than `gradsync drill` has, and its rank with all of them: `python -m
support.more_faults drill --worker FILE`. Importing this adds them to `FAULTS`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.process_group import Done
from gradsync.comm.reductions import all_reduce
from gradsync.commands.cli import drill
from gradsync.commands.cli.main import main
from gradsync.commands.train.faults import FAULTS, FIRST, PHASES, SILENT, Fault, FaultPlan, Planted
from gradsync.commands.train.loop import Trainer

_SLOW_S = 12.0
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which Python does not name
_KEEP = 0x06  # BPF_RET | BPF_K: bytes of a packet to keep


def _spin(_: Planted, passing: Any) -> Any:
    while True:
        pass


def _dawdle(_: Planted, passing: Any) -> Any:
    time.sleep(_SLOW_S)
    return passing


def _take_memory(_: Planted, passing: Any) -> Any:
    torch.empty(2**60, dtype=torch.uint8)


def _send_nothing(_: Planted, send: Any) -> Any:
    return lambda *_: Done()


def _send_another_first(_: Planted, send: Any) -> Any:
    def twice(tensor: Tensor, op: str) -> Any:
        send(tensor.new_zeros(1)).wait()
        return send(tensor, op)

    return twice


class _Without:
    """A batch of which one micro-batch is read, and dropped."""

    def __init__(self, batch: Any) -> None:
        self._batch, self._dropped = batch, batch.number % len(batch)

    def __iter__(self) -> Any:
        return (each for place, each in enumerate(self._batch) if place != self._dropped)

    def __len__(self) -> int:
        return len(self._batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def _drop_leaf(_: Planted, step: Any) -> Any:
    return _Without(step)


def _flip_bit(planted: Planted, passing: Any) -> Any:
    """Like a hardware error: no operation on the tensor, which would count as another version."""
    weights = [*planted.trainer.learner.model.parameters()]
    octets = weights[len(weights) // 2].data.view(torch.uint8).view(-1)
    octets[len(octets) // 2] ^= 1
    return passing


def _fill_disk(_: Planted, passing: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _hear_nothing(_: Planted, passing: Any) -> Any:
    """The kernel drops what arrives at this process's connections: the filter keeps nothing."""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", _KEEP, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
    return passing


def _sum_tensors(planted: Planted, passing: Any) -> Any:
    """Two all-reduces by all ranks, as a program makes between its steps; one rank's differ."""
    plan, trainer = planted.plan, planted.trainer
    named = {"loss": torch.zeros(4), "accuracy": torch.zeros(4)}
    if trainer.world.rank == plan.rank:
        named = _UNLIKE[plan.kind](named)
    for name, tensor in named.items():
        all_reduce(tensor, name=name, comm=trainer.comm)
    return passing


_UNLIKE: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "shape": lambda named: {**named, "loss": named["loss"].new_zeros(5)},
    "dtype": lambda named: {**named, "loss": named["loss"].int()},
    "swap": lambda named: dict(reversed(named.items())),
}


class AnyFault(FaultPlan):
    """A plan that every rank carries out where its calls are to differ."""

    def plant(self, trainer: Trainer) -> None:
        """Install the fault in `trainer`."""
        if self.kind in _UNLIKE:
            Planted(self, trainer)
        else:
            FaultPlan.plant(self, trainer)


_BUSY = r"rank (?P<ranks>\d+) \(process \d+\) is in \S*faults\.py:\d+ "
_OTHER = (
    r"rank(?:\(s\))? (?P<ranks>[\d, ]+)"
    r"(?:something else|was ended by SIGABRT \(Gloo does it where ranks called different)"
)
_CALLS = r"(?:: |; )rank (?P<ranks>[\d, ]+): all_reduce "
_LEAVES = r".*(?:micro-batch \d+ came where|of its \d+ micro-batches)"
_REPLICAS = (
    r"replicas differ.*?: ranks? (?P<ranks>\d[^a-z]*(?:(?:and|rank|ranks) \d[^a-z]*)*)holds? "
)
_FULL = r"(?:rank (?P<ranks>\d+) on \S+ failed first: )?cannot write .*No space left"
_EARLY = PHASES[:2]
FAULTS.update(
    {
        "busy": Fault(_EARLY, _spin, 124, _BUSY, 12.0),
        "slow": Fault(_EARLY, _dawdle, 0, _BUSY, 12.0),
        "oom": Fault(_EARLY, _take_memory, 1, FIRST + ".*can't allocate memory"),
        "skip-collective": Fault(("reduce",), _send_nothing, 1, _OTHER),
        "extra-collective": Fault(("reduce",), _send_another_first, 1, _OTHER),
        "shape": Fault(("data",), _sum_tensors, 1, _CALLS),
        "dtype": Fault(("data",), _sum_tensors, 1, _CALLS),
        "swap": Fault(("data",), _sum_tensors, 1, _CALLS),
        "drop-leaf": Fault(("data",), _drop_leaf, 2, FIRST + _LEAVES),
        "flip-bit": Fault(("data",), _flip_bit, 1, _REPLICAS),
        "disk-full": Fault(("save",), _fill_disk, 1, _FULL),
        "partition": Fault(("data",), _hear_nothing, 124, SILENT, 5.0),
    }
)
FLAGS = {"flip-bit": ("--check-replicas-every=1", "--sync-options", "weights=replicas")}
"""Flags that a kind needs: replicas are compared, and the ranks of a host do not share one copy."""

if __name__ == "__main__":
    drill.FaultPlan = AnyFault  # type: ignore[misc]
    raise SystemExit(main())
