"""What a strategy has to provide: the gradient sums over all ranks, nothing else.

Everything that strategies share (the loss, the one division, clipping, the optimizer) lives once
in `GradientSync`; a `Reducer` only turns each rank's local gradient sums into global ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gradsync.comm.base import Communicator
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Reduction:
    """What `Reducer.reduce` left in `.grad`, and what it cost."""

    divided_by: int
    """1 for the plain sum over ranks; W when the mechanism has divided it by W already."""
    exposed: Stopwatch
    """Time in which communication went on and nothing else did."""


class Reducer(Protocol):
    """One way of summing gradients over ranks, bound to one model."""

    @property
    def forward(self) -> Callable[..., Any]:
        """What the training step calls in place of the model (the model itself where possible)."""
        ...

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Settle the layout now, if the strategy learns it from its first backward.

        A resumed run would otherwise begin with another grouping of sums than the run it continues,
        and bits would change. `forward_backward` is one throwaway micro-step through `forward`.
        """
        ...

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Enclose one forward and backward; `last` says that this rank's gradients are then full.

        `last` must be True on all ranks of a step or on none.
        """
        ...

    def reduce(self, used: list[bool]) -> Reduction:
        """Finish: afterwards `.grad` of every used parameter is its sum over all ranks.

        Args:
            used: for each trainable parameter, whether any rank has a gradient for it.
        """
        ...


def sum_gradients(
    parameters: list[nn.Parameter], used: list[bool], comm: Communicator
) -> Reduction:
    """All-reduce every used parameter's gradient over the whole group, one after the other.

    A rank that has no gradient for a used parameter (or no data at all) contributes zeros: all
    ranks must issue the same operations. A parameter that no rank used stays `None`.
    """
    import torch

    watch = Stopwatch(on_cuda=any(parameter.is_cuda for parameter in parameters))
    watch.start()
    for parameter, any_rank in zip(parameters, used, strict=True):
        if any_rank:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # The parameter's shape and dtype; overlaps nothing, on purpose.
            comm.all_reduce(parameter.grad).wait()
    watch.stop()
    return Reduction(divided_by=1, exposed=watch)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters with their names, tied ones once, in `named_parameters` order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
