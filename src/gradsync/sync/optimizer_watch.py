"""Tells whoever asks that an optimizer is about to step, or has stepped.

Torch offers hooks on all optimizers of the process, in one table. That table must not change while
another thread steps, so one watch enters it once and stays; who is to be told comes and goes here.
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
from gradsync.sync.torch_names import optimizer_pre_hooks


class Listener(Protocol):
    """Who wants to know."""

    parameter_ids: set[int]
    """Of the parameters that it looks after."""
    comm: Communicator
    """The ranks that it meets."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are about to be used."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """They have been."""
        ...


class OptimizerWatch:
    """The hooks; holds its listeners weakly, in the order in which they came: all ranks' ways of
    taking part in a step must follow each other alike."""

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self.added = 0
        """How many listeners there have been."""
        self.backwards: set[int] = set()
        """Graph tasks of each `GradientSync.backward` that runs now."""

    def add(self, listener: Listener) -> None:
        """Tell `listener` as long as it lives."""
        with self._lock:
            self._listeners.append(weakref.ref(listener))
            self.added += 1

    def discard(self, listener: Listener) -> None:
        """Tell it no more."""
        with self._lock:
            self._listeners = [ref for ref in self._listeners if ref() not in (None, listener)]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether a listener looks after it."""
        return any(id(parameter) in listener.parameter_ids for listener in self.present())

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step."""
        for listener in self.present():
            listener.before_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After it."""
        for listener in self.present():
            listener.after_step(optimizer)

    def present(self) -> list[Listener]:
        """Those that live."""
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
