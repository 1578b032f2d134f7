"""A backward of one handle that runs through another's model, and must leave no trace there.

A generator's loss goes through the critic, whose parameters get gradients that nobody wants: they
are thrown away as they come, not sent to other ranks, nor added to the critic's next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gradsync.errors import ConfigError
from gradsync.sync.optimizer_watch import optimizer_watch
from gradsync.sync.statistics import Statistics
from gradsync.sync.torch_names import current_graph_task

_TOGETHER = (
    "step before it, or replicate models that one backward trains together: "
    "gs.replicate(torch.nn.ModuleList([a, b]))"
)


@contextmanager
def backward_from(root: torch.Tensor) -> Iterator[None]:
    """Enclose a handle's backward: other handles' hooks then know that it is not theirs."""
    tasks: list[int] = []
    known = optimizer_watch().backwards

    def begins(_: torch.Tensor) -> None:
        tasks.append(current_graph_task())
        known.add(tasks[-1])

    hook = root.register_hook(begins) if root.requires_grad else None  # else backward says so
    try:
        yield
    finally:
        known.difference_update(tasks)
        if hook is not None:
            hook.remove()


class ForeignBackward:
    """What one model has seen of other handles' backwards since the last one of its own."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._known = optimizer_watch().backwards
        self._task = -1

    def drop(self, parameter: torch.Tensor, has_gradients: Callable[[], bool]) -> bool:
        """Throw away the gradient that has just come, if another handle's backward brought it.

        Args:
            parameter: of this model.
            has_gradients: whether others are there, for a step of this model's own.

        Returns:
            whether it was thrown away.

        Raises:
            ConfigError: there are; they may hold a part of this backward's already.
        """
        task = current_graph_task()
        if task not in self._known:
            self._task = -1
            return False
        parameter.grad = None
        if has_gradients():
            raise ConfigError(
                "another handle's sync.backward() reached this model between its own backward and "
                f"its step: its gradients would be added to that step's; {_TOGETHER}"
            )
        if task != self._task:
            self._task = task
            self._statistics.leaf_ends(counts=False)
        return True

    def refuse_lost(self, *, cleared: bool) -> None:
        """Raise ConfigError when an optimizer has no gradients (`cleared`), and waits for those."""
        if cleared and self._task >= 0:
            raise ConfigError(
                "this optimizer's gradients came by another handle's sync.backward(), which keeps "
                f"only its own model's; {_TOGETHER}"
            )
