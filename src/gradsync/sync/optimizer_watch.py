"""Notification of listeners before and after an optimizer's step.

Torch offers hooks on all optimizers of the process, in one table. That table must not change while
another thread steps, so one watch enters it once and stays; listeners come and go here.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync.comm.base import Communicator
from gradsync.core.torch_private import optimizer_pre_hooks


class Listener(Protocol):
    """An object notified of optimizer steps."""

    parameter_ids: set[int]
    """Ids of the parameters that it synchronises."""
    comm: Communicator
    """The ranks that it communicates with."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer uses gradients."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer has used gradients."""
        ...


class OptimizerWatch:
    """The hooks; refers to its listeners weakly, in the order in which they were added: on all
    ranks they must take part in a step in one order."""

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self.added = 0
        """Number of listeners ever added."""
        self.backwards: set[int] = set()
        """Graph tasks of each `GradientSync.backward` that runs now."""

    def add(self, listener: Listener) -> None:
        """Notify `listener` as long as it lives."""
        with self._lock:
            self._listeners.append(weakref.ref(listener))
            self.added += 1

    def discard(self, listener: Listener) -> None:
        """Stop notifying `listener`."""
        with self._lock:
            self._listeners = [ref for ref in self._listeners if ref() not in (None, listener)]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether a listener synchronises this parameter."""
        return any(id(parameter) in listener.parameter_ids for listener in self.present())

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Notify listeners before a step."""
        for listener in self.present():
            listener.before_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Notify listeners after a step."""
        for listener in self.present():
            listener.after_step(optimizer)

    def present(self) -> list[Listener]:
        """Listeners that are alive, in order."""
        with self._lock:
            found = [(ref, ref()) for ref in self._listeners]
            self._listeners = [ref for ref, listener in found if listener is not None]
        return [listener for _, listener in found if listener is not None]


def optimizer_watch() -> OptimizerWatch:
    """The process's watch; the first call enters it into torch's table, where it stays."""
    for hook in optimizer_pre_hooks():
        if isinstance(hook, OptimizerWatch):
            return hook
    watch = OptimizerWatch()
    register_optimizer_step_pre_hook(watch)
    register_optimizer_step_post_hook(watch.after_step)
    return watch
