"""Injected faults: what `gradsync drill` and the tests do to one rank of a run, and what follows.

A plan names the rank, the step and the moment in it, so the fault is repeatable. It acts through
the interfaces of production code: around the loader, on an activation's gradient, around the
communicator's small message, in a checkpoint's files. A run without a plan contains none of it.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.core.files import Filesystem
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.comm.base import ReduceOp, Work
    from gradsync.data.micro_batch import Batch
    from gradsync.train.loop import Trainer

PHASES = ("data", "backward", "reduce", "save")
"""Moments of a step: its data are due; half of its first backward is done; its small message is due
(sync/step_metadata.py); rank 0 writes the checkpoint after it."""
_SLOW_S = 12.0
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which Python does not name
_KEEP = 0x06  # BPF_RET | BPF_K: bytes of a packet to keep


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """One fault of one rank.

    Raises:
        ConfigError: an unknown kind, or a moment at which it cannot happen.
    """

    kind: str
    """One of `FAULTS`."""
    rank: int
    """The rank."""
    step: int
    """The optimizer step, from 1, as a run prints it; in `save`, it or the next one saved."""
    phase: str = ""
    """The moment in it, one of `PHASES`; "" is the kind's default."""
    note: str = ""
    """File to write when it happens: time, step, duration of the previous step; "" for none."""

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ConfigError(f"there is no fault {self.kind!r} (there are: {', '.join(FAULTS)})")
        phases = FAULTS[self.kind].phases
        if self.phase not in ("", *phases):
            raise ConfigError(f"{self.kind} can come in {', '.join(phases)}; got {self.phase!r}")
        if self.step < 1 or self.rank < 0:
            raise ConfigError("a fault's step counts from 1 on, its rank from 0")
        if self.moment == "save" and self.rank:
            raise ConfigError("rank 0 writes the checkpoints: a fault in save is for --rank 0")

    @property
    def moment(self) -> str:
        """The phase, with the default resolved."""
        return self.phase or FAULTS[self.kind].phases[0]

    def plant(self, trainer: Trainer) -> None:
        """Install the fault in `trainer`; every rank calls it once, before the first step."""
        if self.kind in _UNLIKE or trainer.world.rank == self.rank:
            _Planted(self, trainer)


class _Planted:
    """A plan in its trainer, and whether it has happened."""

    def __init__(self, plan: FaultPlan, trainer: Trainer) -> None:
        self.plan, self.trainer = plan, trainer
        self._step, self._came = 0, False
        self._dealt, self._step_s = time.monotonic(), 0.0
        data: Any = trainer.data
        trainer.data = replace(data, train=_Loader(data.train, self))
        if plan.moment == "backward":
            parts: Any = trainer.learner.model.modules()
            own = (each for each in parts if [*each.parameters(recurse=False)])
            _middle(own).register_forward_hook(lambda _, inputs, out: self._watch(out))
        elif plan.moment == "reduce":
            from gradsync.sync.replica import replica_of

            comm: Any = replica_of(trainer.learner.sync).comm
            self._all_reduce, comm.all_reduce = comm.all_reduce, self._around_all_reduce
        elif plan.moment == "save":
            store = trainer.store
            trainer.store = type(store)(store.directory, store.keep_last, fs=_Files(self))

    def happen(self) -> None:
        """Carry out the fault."""
        FAULTS[self.plan.kind].act(self)

    def comes(self, moment: str) -> bool:
        """Whether the fault happens now, once; writes the note."""
        plan, now = self.plan, self._step
        if self._came or plan.moment != moment or now < plan.step:
            return False
        if now > plan.step and moment != "save":
            return False
        self._came = True
        if plan.note and self.trainer.world.rank == plan.rank:
            came = {"at": time.monotonic(), "step": now, "step_s": self._step_s}
            Path(plan.note).write_text(json.dumps(came))
        return True

    def disturbed(self, step: Batch) -> Batch:
        """The next step, after the fault or changed by it."""
        before, self._dealt = self._dealt, time.monotonic()
        self._step, self._step_s = step.number + 1, self._dealt - before
        if not self.comes("data"):
            return step
        if self.plan.kind != "drop-leaf":
            self.happen()
            return step
        size, number = len(step), step.number
        kept = (place != number % size for place in range(size))
        return type(step)(
            compress(step, kept),
            number=number,
            num_micro_batches=step.num_micro_batches,
            num_local_micro_batches=size,
        )

    def _watch(self, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        if self.comes("backward"):
            if self.plan.kind == "nan":
                return gradient * float("nan")
            self.happen()
        return gradient

    def _around_all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if self.comes("reduce"):
            if self.plan.kind == "skip-collective":
                from gradsync.comm.process_group import Done

                return Done()
            if self.plan.kind == "extra-collective":
                self._all_reduce(tensor.new_zeros(1)).wait()
            else:
                self.happen()
        return self._all_reduce(tensor, op)


class _Loader:
    """A loader that disturbs one of its steps."""

    def __init__(self, loader: Any, planted: _Planted) -> None:
        self._loader, self._planted = loader, planted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._planted.disturbed, self._loader)


class _Files(Filesystem):
    """Files of checkpoints; one write is disturbed, or all writes fail from then on."""

    def __init__(self, planted: _Planted) -> None:
        self._planted, self._full = planted, False

    def write(self, file: io.FileIO, data: memoryview) -> int:
        if self._planted.comes("save"):
            self._full = self._planted.plan.kind == "disk-full"
            self._planted.happen()
        if self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, data)


def _middle(found: Iterable[Any]) -> Any:
    several = list(found)
    return several[len(several) // 2]


# -- what happens ---------------------------------------------------------------------------------


def _signal(number: signal.Signals) -> Callable[[_Planted], None]:
    return lambda _: os.kill(os.getpid(), number)


def _spin(_: _Planted) -> None:
    while True:
        pass


def _dawdle(_: _Planted) -> None:
    time.sleep(_SLOW_S)


def _fail(_: _Planted) -> None:
    raise ValueError("a fault of gradsync drill")


def _take_memory(_: _Planted) -> None:
    import torch

    torch.empty(2**60, dtype=torch.uint8)


def _flip_bit(planted: _Planted) -> None:
    """Like a hardware error: no operation on the tensor, which would count as another version."""
    import torch

    weight = _middle(planted.trainer.learner.model.parameters())
    octets = weight.data.view(torch.uint8).view(-1)
    octets[len(octets) // 2] ^= 1


def _hear_nothing(_: _Planted) -> None:
    """The kernel drops what arrives at this process's connections: the filter keeps nothing."""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", _KEEP, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _sum_tensors(planted: _Planted) -> None:
    """Two all-reduces by all ranks, as a program makes between its steps; one rank's differ."""
    import torch

    from gradsync.comm.reductions import all_reduce

    plan, trainer = planted.plan, planted.trainer
    named = {"loss": torch.zeros(4), "accuracy": torch.zeros(4)}
    if trainer.world.rank == plan.rank:
        named = _UNLIKE[plan.kind](named)
    for name, tensor in named.items():
        all_reduce(tensor, name=name, comm=trainer.comm)


def _at_its_moment(_: _Planted) -> None:
    """The code at the fault's moment carries it out."""


_UNLIKE: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "shape": lambda named: {**named, "loss": named["loss"].new_zeros(5)},
    "dtype": lambda named: {**named, "loss": named["loss"].int()},
    "swap": lambda named: dict(reversed(named.items())),
}

# -- what is promised -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault: how it happens, and what must follow."""

    phases: tuple[str, ...]
    """Moments at which it can happen, the default first."""
    act: Callable[[_Planted], None]
    code: int
    """Exit code of the run."""
    says: str
    """Pattern of the line that reports it; its group `ranks` holds the ranks at fault."""
    within_s: float = 3.0
    """Longest time from the fault to that line, seconds, plus a step: only waiting ranks report."""


_RANK = r"rank (?P<ranks>\d+) "
_FIRST = _RANK + r"on \S+ failed first: "
_BUSY = _RANK + r"\(process \d+\) is in \S*faults\.py:\d+ "
_SILENT = _RANK + r"\(process \d+\) gives no sign of life"
_GONE = (
    r"rank(?:\(s\))? (?P<ranks>\d[\d, ]*)(?:on \S+ |which serves the rendezvous store, )*"
    r"(?:vanished without|was ended by SIGKILL)"
)
_OTHER = (
    r"rank(?:\(s\))? (?P<ranks>[\d, ]+)"
    r"(?:something else|was ended by SIGABRT \(Gloo does it where ranks called different)"
)
_CALLS = r"(?:: |; )rank (?P<ranks>[\d, ]+): all_reduce "
_LEAVES = r".*(?:micro-batch \d+ came where|of its \d+ micro-batches)"
_REPLICAS = (
    r"replicas differ.*?: ranks? (?P<ranks>\d[^a-z]*(?:(?:and|rank|ranks) \d[^a-z]*)*)holds? "
)
_STOPPED = r"stopped by (?:SIGTERM|a signal to another rank) after step"
_FULL = r"(?:rank (?P<ranks>\d+) on \S+ failed first: )?cannot write .*No space left"
_NAN = r"rank (?P<ranks>\d+), step \d+: nan or inf in this rank's gradient of"
_EARLY = PHASES[:2]
FAULTS = {
    "kill": Fault(PHASES, _signal(signal.SIGKILL), 1, _GONE),
    "stop": Fault(PHASES, _signal(signal.SIGSTOP), 124, _SILENT + r" \(it is stopped", 3.5),
    "busy": Fault(_EARLY, _spin, 124, _BUSY, 12.0),
    "slow": Fault(_EARLY, _dawdle, 0, _BUSY, 12.0),
    "raise": Fault(("data", "backward", "save"), _fail, 1, _FIRST + "ValueError: a fault"),
    "oom": Fault(_EARLY, _take_memory, 1, _FIRST + ".*can't allocate memory"),
    "nan": Fault(("backward",), _at_its_moment, 1, _NAN),
    "skip-collective": Fault(("reduce",), _at_its_moment, 1, _OTHER),
    "extra-collective": Fault(("reduce",), _at_its_moment, 1, _OTHER),
    "shape": Fault(("data",), _sum_tensors, 1, _CALLS),
    "dtype": Fault(("data",), _sum_tensors, 1, _CALLS),
    "swap": Fault(("data",), _sum_tensors, 1, _CALLS),
    "drop-leaf": Fault(("data",), _at_its_moment, 2, _FIRST + _LEAVES),
    "flip-bit": Fault(("data",), _flip_bit, 1, _REPLICAS),
    "disk-full": Fault(("save",), _at_its_moment, 1, _FULL),
    "sigterm": Fault(PHASES, _signal(signal.SIGTERM), 75, _STOPPED),
    "partition": Fault(("data",), _hear_nothing, 124, _SILENT, 5.0),
}
"""By the name that users type."""


def named(fault: Fault, line: str) -> set[int] | None:
    """The ranks that `line` names for `fault`; none if it means the whole run, None if the line is
    not about it. Of several sides the smallest counts, or all of the smallest."""
    found = [each.groupdict().get("ranks") or "" for each in re.finditer(fault.says, line)]
    sides = [set(map(int, re.findall(r"\d+", ranks))) for ranks in found]
    least = min(map(len, sides), default=0)
    return set().union(*(side for side in sides if len(side) == least)) if sides else None
