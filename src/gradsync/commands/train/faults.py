"""Injected faults: what `gradsync drill` and the tests do to one rank of a run, and what follows.

A plan names the rank, the step and the moment in it, so the fault is repeatable. It acts through
the interfaces of production code: around the loader, on an activation's gradient, around the
communicator's small message, in a checkpoint's files. A run without a plan contains none of it.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.core.files import Filesystem, check_name
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.commands.train.loop import Trainer
    from gradsync.data.micro_batch import Batch

PHASES = ("data", "backward", "reduce", "save")
"""Moments of a step: its data are due; half of its first backward is done; its small message is due
(sync/step_metadata.py); rank 0 writes the checkpoint after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """One fault of one rank.

    Raises:
        ConfigError: an unknown kind, or a moment at which it cannot happen.
    """

    kind: str  # One of `FAULTS`
    rank: int  # The rank
    step: int  # The optimizer step, from 1, as a run prints it; in `save`, it or the next one saved
    phase: str = ""  # The moment in it, one of `PHASES`; "" is the kind's default
    note: str = ""
    """File to write when it happens: time, step, duration of the previous step; "" for none."""

    def __post_init__(self) -> None:
        check_name("fault", self.kind, FAULTS)
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
        if trainer.world.rank == self.rank:
            Planted(self, trainer)


class Planted:
    """A plan in its trainer, and whether it has happened."""

    def __init__(self, plan: FaultPlan, trainer: Trainer) -> None:
        self.plan, self.trainer = plan, trainer
        self._step, self._came = 0, False
        self._dealt, self._step_s = time.monotonic(), 0.0
        data: Any = trainer.data
        trainer.data = replace(data, train=_Loader(data.train, self))
        if plan.moment == "backward":
            parts: Any = trainer.learner.model.modules()
            own = [each for each in parts if [*each.parameters(recurse=False)]]
            own[len(own) // 2].register_forward_hook(lambda _, inputs, out: self._watch(out))
        elif plan.moment == "reduce":
            comm: Any = trainer.learner.sync.comm
            whole = comm.all_reduce  # `meet` acts at each call, not here
            comm.all_reduce = lambda *given: self.meet("reduce", whole)(*given)  # noqa: PLW0108
        elif plan.moment == "save":
            store = trainer.store
            trainer.store = type(store)(
                store.directory, store.keep_last, store.keep_best, fs=_Files(self)
            )
            trainer.writer = type(trainer.writer)(trainer.store)

    def meet(self, moment: str, passing: Any) -> Any:
        """What goes on in place of `passing`; writes the note if the fault happens now."""
        plan, now = self.plan, self._step
        late = now > plan.step and moment != "save"
        if self._came or plan.moment != moment or now < plan.step or late:
            return passing
        self._came = True
        if plan.note and self.trainer.world.rank == plan.rank:
            came = {"at": time.monotonic(), "step": now, "step_s": self._step_s}
            Path(plan.note).write_text(json.dumps(came))
        return FAULTS[plan.kind].act(self, passing)

    def deal(self, batch: Batch) -> Batch:
        """The next step, after the fault or changed by it."""
        before, self._dealt = self._dealt, time.monotonic()
        self._step, self._step_s = batch.number + 1, self._dealt - before
        return self.meet("data", batch)

    def _watch(self, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: self.meet("backward", gradient))


class _Loader:
    """A loader that disturbs one of its steps."""

    def __init__(self, loader: Any, planted: Planted) -> None:
        self._loader, self._planted = loader, planted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._planted.deal, self._loader)


class _Files(Filesystem):
    """Files of checkpoints, of which one write is disturbed."""

    def __init__(self, planted: Planted) -> None:
        self._planted = planted

    def write(self, file: io.FileIO, data: memoryview) -> int:
        return super().write(file, self._planted.meet("save", data))


def _signal(number: signal.Signals) -> Callable[[Planted, Any], Any]:
    def act(_: Planted, passing: Any) -> Any:
        os.kill(os.getpid(), number)
        return passing

    return act


def _fail(_: Planted, passing: Any) -> Any:
    raise ValueError("a fault of gradsync drill")


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault: how it happens, and what must follow."""

    phases: tuple[str, ...]  # Moments at which it can happen, the default first
    act: Callable[[Planted, Any], Any]
    """Carries it out; from what passes at its moment (the step, a gradient, the function that sends
    the small message, the bytes of a file) to what goes on."""
    code: int  # Exit code of the run
    says: str  # Pattern of the line that reports it; its group `ranks` holds the ranks at fault
    within_s: float = 3.0
    """Longest time from the fault to that line, seconds, plus a step: only waiting ranks report."""


FIRST = r"rank (?P<ranks>\d+) on \S+ failed first: "
SILENT = r"rank (?P<ranks>\d+) \(process \d+\) gives no sign of life"
_GONE = (
    r"rank(?:\(s\))? (?P<ranks>\d[\d, ]*)(?:on \S+ |which serves the rendezvous store, )*"
    r"(?:vanished without|was ended by SIGKILL)"
)
_NAN = r"rank (?P<ranks>\d+), step \d+: nan or inf in this rank's gradient of"
_STOPPED = r"stopped by (?:SIGTERM|a signal to another rank) after step"
FAULTS = {
    "kill": Fault(PHASES, _signal(signal.SIGKILL), 1, _GONE),
    "stop": Fault(PHASES, _signal(signal.SIGSTOP), 124, SILENT + r" \(it is stopped", 3.5),
    "raise": Fault(("data", "backward", "save"), _fail, 1, FIRST + "ValueError: a fault"),
    "nan": Fault(("backward",), lambda _, gradient: gradient * float("nan"), 1, _NAN),
    "sigterm": Fault(PHASES, _signal(signal.SIGTERM), 75, _STOPPED),
}
"""By the name that users type; tests/support/more_faults.py has others."""


def named(fault: Fault, line: str) -> set[int] | None:
    """The ranks that `line` names for `fault`; none if it means the whole run, None if the line is
    not about it. Of several sides the smallest counts, or all of the smallest."""
    found = [each.groupdict().get("ranks") or "" for each in re.finditer(fault.says, line)]
    sides = [set(map(int, re.findall(r"\d+", ranks))) for ranks in found]
    least = min(map(len, sides), default=0)
    return set().union(*(side for side in sides if len(side) == least)) if sides else None
