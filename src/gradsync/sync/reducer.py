"""The interface of a strategy: the gradient sums over all ranks, and little else.

Everything that strategies share (the loss, the one division, the order of calls) lives once in
`GradientSync`; a `Reducer` turns each rank's local gradient sums into global ones. The methods
below are in the order in which a step calls them. Those with a body here suit a strategy with whole
replicas; sharded ones override the second half.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.errors import RunError
from gradsync.sync.clip import NonFinite
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gradsync.sync.sharded.shares import HeldState, Share


@dataclass(frozen=True, slots=True)
class Reduction:
    """Gradient sums left in `.grad` by `Reducer.reduce`, and the cost."""

    divided_by: int
    """1 for the plain sum over ranks; W when the mechanism has divided it by W already."""
    exposed: Stopwatch
    """Time of communication that nothing else overlapped."""
    local: bool = False
    """True when `.grad` is still this rank's own sum (strategies that average weights instead):
    then it is divided by this rank's own weight."""


class Reducer(ABC):
    """One way of summing gradients over ranks, bound to one model whose replicas are equal."""

    takes_scale = True
    """False when a step with inf or nan gradients, which a GradScaler skips, would do damage."""
    equal_replicas = True
    """False when replicas drift between rounds (then the strategy averages buffers)."""
    whole_parameters = True
    """False when a rank holds a share of each parameter, so that all ranks take part in every
    forward, and make equally many."""
    strategy = ""
    """Name that users pass as `gs.replicate(sync=...)`."""
    own_loop = False
    """True when it supports the user's training loop (`loss.backward()`, `optimizer.step()`)."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model = model
        self.comm = comm
        self.parameters: list[nn.Parameter] = [p for _, p in trainable(model)]
        """Trainable parameters, tied ones once, in `named_parameters` order."""
        self.non_finite = NonFinite()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward that the training step calls (most strategies: the model's)."""
        return self.model(*inputs, **named)

    def prime(self, forward_backward: Callable[[], None]) -> None:  # noqa: B027  optional
        """Fix the layout now, if the strategy learns it from its first backward.

        A resumed run would otherwise begin with another grouping of sums than the run it continues,
        and bits would change. `forward_backward` is one throwaway micro-step through `forward`.
        """

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Enclose one forward and backward; `last` if it completes this rank's gradients.

        `last` must be True on all ranks of a step or on none.
        """
        yield

    @contextmanager
    def leaf(self, *, last: bool, index: int | None = None) -> Iterator[None]:
        """Enclose one backward of this rank.

        Args:
            last: no other leaf of this rank follows in this step.
            index: the leaf's place in the global batch; None when it is unknown.
        """
        yield

    def forget(self) -> None:  # noqa: B027  optional
        """Drop this rank's leaves, before `launch`; no rank will use the sums."""

    def expect(  # noqa: B027  optional
        self, optimizers: Sequence[torch.optim.Optimizer], *, scaled: bool
    ) -> None:
        """Announce the optimizers, before `launch` (`scaled`: a GradScaler reads gradients too)."""

    def look(self, *, wanted: bool) -> None:
        """Warn, before `launch` in every step, about nan or inf in gradients if `wanted`."""
        if wanted:
            self.non_finite.look(self.named_gradients(), on_cuda=self.parameters[0].is_cuda)
        self.non_finite.step_ends(self.comm.rank)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's contribution to the sums, as far as it has not been sent."""
        return ((name, p.grad) for name, p in trainable(self.model) if p.grad is not None)

    def launch(self) -> list[bool]:
        """Start the remaining communication; returns which parameters have gradients here."""
        return [parameter.grad is not None for parameter in self.parameters]

    @abstractmethod
    def reduce(self, used: list[bool]) -> Reduction:
        """Finish: afterwards `.grad` of every used parameter is its sum over all ranks.

        Args:
            used: for each trainable parameter, whether any rank has a gradient for it.
        """

    def gradients(self) -> list[Tensor]:
        """Tensors that `divide` divides, once."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def divide(self, factor: float) -> None:
        """Multiply `gradients()` by `factor`, once: from sums to the mean."""
        from gradsync.core.torch_private import foreach_mul_

        if gradients := self.gradients():
            foreach_mul_(gradients, factor)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to an L2 norm of at most `max_norm`; returns the old norm, []."""
        from gradsync.sync.clip import clip_gradients

        return clip_gradients([p.grad for p in self.parameters if p.grad is not None], max_norm)

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Do one step of each optimizer with the mean gradient; they hold different parameters."""
        for optimizer in optimizers:
            optimizer.step()

    def clear_gradients(self) -> None:
        """Set every `.grad` to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def after_step(self) -> None:  # noqa: B027  optional
        """Called at the end of every step, gradients cleared (strategies that average weights)."""

    def synchronize_replicas(self) -> None:  # noqa: B027  optional
        """Make replicas equal that a strategy lets drift on purpose; all ranks call it."""

    def gather(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  optional
        """Make `optimizer.state` whole on every rank, keyed by the model's parameters; all ranks
        call it. For checkpoints; `scatter` undoes it."""

    def scatter(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  optional
        """Take this rank's part of a whole `optimizer.state`, after `gather` or loading."""

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> HeldState | None:
        """This rank's part of `optimizer`'s state, sharing its memory; None where every rank has
        it whole. All ranks call it."""
        return None

    def load_sharded_state_dict(
        self, optimizer: torch.optim.Optimizer, states: Mapping[Any, dict[str, Any]]
    ) -> None:
        """Restore a part from `sharded_state_dict`, on the parameters' device."""
        raise RunError(f"sync={self.strategy!r} has whole state on every rank")

    def sharded_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers by the names of `model.state_dict()`, flat,
        sharing their memory; None where every rank has them whole."""
        return None

    def load_sharded_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part with one from `sharded_weights`."""
        raise RunError(f"sync={self.strategy!r} has whole weights on every rank")

    def state_tensors(self) -> dict[str, Tensor]:
        """The strategy's own state from step to step, equal on all ranks after `gather`."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore tensors from `state_tensors`.

        Raises:
            RunError: tensors of another strategy.
        """
        if tensors:
            raise RunError(f"this strategy remembers nothing, got {', '.join(tensors)}")

    def full_weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`; all ranks call it."""
        return dict(self.model.state_dict())

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones; all ranks call it, with equal ones."""
        import torch

        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def close(self) -> None:  # noqa: B027  optional
        """Release threads and hooks; the model stays usable."""


def sum_gradients(
    parameters: list[nn.Parameter], used: list[bool], comm: Communicator
) -> Reduction:
    """All-reduce every used parameter's gradient over the whole group, one after the other.

    A rank without a gradient for a used parameter (or without data) contributes zeros: all ranks
    must issue the same operations. The gradient of a parameter that no rank used stays None.

    Args:
        parameters: trainable parameters, in one order on all ranks.
        used: for each of them, whether any rank has a gradient for it.
        comm: the ranks.
    """
    import torch

    watch = Stopwatch(on_cuda=any(parameter.is_cuda for parameter in parameters))
    watch.start()
    for parameter, any_rank in zip(parameters, used, strict=True):
        if any_rank:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Whole group, the parameter's shape and dtype; overlaps nothing, on purpose.
            comm.all_reduce(parameter.grad).wait()
    watch.stop()
    return Reduction(divided_by=1, exposed=watch)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters with their names, tied ones once, in `named_parameters` order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
