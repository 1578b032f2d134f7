"""Synchronisation in a loop that is not ours: `loss.backward()`, then `optimizer.step()`.

As with torch's DDP the gradients are averaged over ranks when backward returns, so clipping and
anything else between backward and the optimizer sees the mean. [Note: Who synchronises when]

    backward on this rank       its end launches what is left and waits
    no backward on this rank    the optimizer's step (a hook on it) or `finish()` takes part,
                                with zeros; otherwise the other ranks would wait for ever
    backward under no_sync()    adds up; the next backward outside of it synchronises all of it,
                                and so does an optimizer step that comes first

`no_sync` must be entered before the forward: torch's DDP and FSDP decide there, and a program that
gets it wrong drifts silently. It is checked here too, so that a loop works under every strategy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.agreement import agree
from gradsync.sync.engine.engine import Engine
from gradsync.sync.module_hook import ModuleHook
from gradsync.sync.optimizer_watch import optimizer_watch
from gradsync.sync.reducer import Reducer
from gradsync.sync.statistics import Statistics
from gradsync.sync.torch_names import at_the_end_of_backward, current_graph_task

if TYPE_CHECKING:
    from torch import nn


class OwnLoop:
    """Watches backward, the forward of the root module, and optimizers over its parameters."""

    def __init__(
        self, model: nn.Module, comm: Communicator, reducer: Reducer, statistics: Statistics
    ) -> None:
        self._statistics = statistics
        self._comm = comm
        self._reducer = reducer
        self._no_sync = False
        self._no_sync_in_forward: bool | None = None
        self._enclosed = False  # in `GradientSync.backward`, which is not a loop of one's own
        self._in_backward = False
        self._task = -1  # the backward seen last; later ones have higher numbers
        self._dirty = False  # there are gradients that have not been synchronised
        self._finished = False  # there are gradients that have
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that used those
        self._parameter_ids = {id(parameter) for parameter in reducer.parameters}
        optimizer_watch().add(self)
        self._handles: list[Any] = self._watch(model) if reducer.own_loop else []
        self._remove = weakref.finalize(self, _remove, self._handles)

    def _watch(self, model: nn.Module) -> list[Any]:
        """Hooks that do not hold this object, which holds the model's parameters."""
        loop: weakref.ref[OwnLoop] = weakref.ref(self)

        def before_forward(*_: Any) -> None:
            alive = loop()
            if alive is not None and torch.is_grad_enabled():
                alive._no_sync_in_forward = alive._no_sync

        def gradient_is_ready(_: torch.Tensor) -> None:
            alive = loop()
            if alive is not None and not alive._enclosed and not alive._in_backward:
                alive.backward_begins()

        handles: list[Any] = [
            model.register_forward_pre_hook(ModuleHook(before_forward)),
        ]
        if isinstance(self._reducer, Engine):
            self._reducer.own_backward = lambda: _alive(loop).backward_begins()
            return handles
        return handles + [
            p.register_post_accumulate_grad_hook(gradient_is_ready)
            for p in self._reducer.parameters
        ]

    @contextmanager
    def enclosed(self) -> Iterator[None]:
        """A backward of `GradientSync`'s own: nothing to do here."""
        self._enclosed = True
        try:
            yield
        finally:
            self._enclosed = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `GradientSync.no_sync`."""
        self._refuse_if_foreign()
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def backward_begins(self) -> bool:
        """The first gradient of a backward has come; tells whether this backward synchronises.

        Raises:
            ConfigError: `no_sync` was entered or left between forward and backward.
        """
        before, self._no_sync_in_forward = self._no_sync_in_forward, None
        if before not in (None, self._no_sync):
            where = "after the forward" if self._no_sync else "around the forward only"
            raise ConfigError(
                f"no_sync() was entered {where}: enclose forward and backward of a micro-batch "
                "together, as torch's DDP needs it (there, replicas would drift apart silently)"
            )
        task = current_graph_task()
        if task < self._task:
            raise ConfigError(
                "activation checkpointing with use_reentrant=True runs a backward inside of the "
                "backward, and its end cannot be told from the whole one's; use use_reentrant=False"
            )
        self._task = task
        self._statistics.leaf_begins(last=not self._no_sync)
        self._dirty = self._in_backward = True
        at_the_end_of_backward(self._backward_ended)
        return not self._no_sync

    def _backward_ended(self) -> None:
        self._in_backward = False
        if not self._no_sync:
            self.finish()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to use the gradients: this rank may have had no backward."""
        if self._enclosed or not self._is_ours(optimizer):
            return
        self._refuse_if_foreign()
        if self._dirty or not self._finished or optimizer in self._stepped:
            self.finish()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has used the gradients."""
        if not self._enclosed and self._is_ours(optimizer):
            self._stepped.add(optimizer)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        ids = self._parameter_ids
        return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])

    def finish(self) -> None:
        """See `GradientSync.finish` and [Note: Who synchronises when]."""
        self._refuse_if_foreign()
        if self._finished and not self._dirty and not self._stepped:
            return
        # All forwards of this rank's step are one leaf here: nobody says where one ends.
        self._statistics.leaf_ends(counts=self._dirty)
        counts = self._statistics.step_begins()
        if isinstance(self._reducer, Engine):
            self._reducer.end_own_leaf()
        used = self._reducer.launch()
        agreed = agree(self._comm, used, counts)
        reduction = self._reducer.reduce(agreed.used)
        # The one place that divides: by the number of ranks, since nobody told a weight.
        if gradients := self._reducer.gradients():
            torch._foreach_mul_(gradients, reduction.divided_by / self._comm.world_size)
        self._statistics.step_ends(agreed.counts)
        self._dirty, self._finished = False, True
        self._stepped.clear()

    def _refuse_if_foreign(self) -> None:
        if not self._reducer.own_loop:
            raise ConfigError(
                f"{type(self._reducer).__name__} works through sync.backward and sync.step only "
                "(an optimizer's own step would let ranks drift apart); in a loop of your own use "
                "sync='invariant', 'bucketed', 'naive' or 'fsdp'"
            )

    def close(self) -> None:
        """Remove the hooks."""
        optimizer_watch().discard(self)
        self._remove()


def _alive(loop: weakref.ref[OwnLoop]) -> OwnLoop:
    found = loop()
    if found is None:
        raise ConfigError(
            "the handle that gs.replicate returned is gone: keep it as long as the model trains"
        )
    return found


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
