"""What a strategy has to provide: the gradient sums over all ranks, and little else.

Everything that strategies share (the loss, the one division, the order of things) lives once in
`GradientSync`; a `Reducer` turns each rank's local gradient sums into global ones. The methods
below stand in the order in which a step calls them. Those that have a body here are what a
strategy with whole replicas wants; sharded ones override the second half.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.errors import RunError
from gradsync.sync.nonfinite import NonFinite
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gradsync.sync.sharded.shares import HeldState, Share


@dataclass(frozen=True, slots=True)
class Reduction:
    """What `Reducer.reduce` left in `.grad`, and what it cost."""

    divided_by: int
    """1 for the plain sum over ranks; W when the mechanism has divided it by W already."""
    exposed: Stopwatch
    """Time in which communication went on and nothing else did."""
    local: bool = False
    """True when `.grad` is this rank's own sum still (strategies that average weights instead):
    then it is divided by this rank's own weight."""


class Reducer(ABC):
    """One way of summing gradients over ranks, bound to one model whose replicas are equal."""

    takes_scale = True
    """False when a step with inf or nan gradients, which a GradScaler skips, would do damage."""
    equal_replicas = True
    """False when replicas drift between rounds (and look after their buffers themselves)."""
    whole_parameters = True
    """False when a rank holds a share of each parameter, so that a forward is everybody's: all
    ranks then make equally many."""
    strategy = ""
    """What users call it: the name in `gs.replicate(sync=...)`."""
    own_loop = False
    """True when a loop of the user's own (`loss.backward()`, `optimizer.step()`) works with it."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model = model
        self.comm = comm
        self.parameters: list[nn.Parameter] = [p for _, p in trainable(model)]
        """Trainable ones, tied ones once, in `named_parameters` order."""
        self.non_finite = NonFinite()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the training step calls in place of the model (most strategies: the model)."""
        return self.model(*inputs, **named)

    def prime(self, forward_backward: Callable[[], None]) -> None:  # noqa: B027  optional
        """Settle the layout now, if the strategy learns it from its first backward.

        A resumed run would otherwise begin with another grouping of sums than the run it continues,
        and bits would change. `forward_backward` is one throwaway micro-step through `forward`.
        """

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Enclose one forward and backward; `last` says that this rank's gradients are then full.

        `last` must be True on all ranks of a step or on none.
        """
        yield

    @contextmanager
    def leaf(self, *, last: bool, index: int | None = None) -> Iterator[None]:
        """Enclose one backward.

        Args:
            last: no other leaf of this rank follows in this step.
            index: the leaf's place in the global batch; None when nobody said it.
        """
        yield

    def forget(self) -> None:  # noqa: B027  optional
        """Before `launch`: this rank's leaves do not count, and no rank will use the sums."""

    def expect(  # noqa: B027  optional
        self, optimizers: Sequence[torch.optim.Optimizer], *, scaled: bool
    ) -> None:
        """Before `launch`: who will use the gradients (`scaled`: a GradScaler reads them too)."""

    def look(self, *, wanted: bool) -> None:
        """Before `launch`, in every step; if `wanted`, say which gradients are nan or inf."""
        if wanted:
            self.non_finite.look(self.named_gradients(), on_cuda=self.parameters[0].is_cuda)
        self.non_finite.step_ends(self.comm.rank)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank will bring to the sums, as far as it has not been sent."""
        return ((name, p.grad) for name, p in trainable(self.model) if p.grad is not None)

    def launch(self) -> list[bool]:
        """Start what has not been started; tells which parameters have gradients on this rank."""
        return [parameter.grad is not None for parameter in self.parameters]

    @abstractmethod
    def reduce(self, used: list[bool]) -> Reduction:
        """Finish: afterwards `.grad` of every used parameter is its sum over all ranks.

        Args:
            used: for each trainable parameter, whether any rank has a gradient for it.
        """

    def gradients(self) -> list[Tensor]:
        """What is divided, once."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def divide(self, factor: float) -> None:
        """Multiply `gradients()` by `factor`, once: from sums to the mean."""
        import torch

        if gradients := self.gradients():
            torch._foreach_mul_(gradients, factor)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to an L2 norm of at most `max_norm`; its norm before, []."""
        from gradsync.sync.clip import clip_gradients

        return clip_gradients([p.grad for p in self.parameters if p.grad is not None], max_norm)

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """One step of each optimizer with the mean gradient; they hold different parameters."""
        for optimizer in optimizers:
            optimizer.step()

    def clear_gradients(self) -> None:
        """Let go of every `.grad`."""
        for parameter in self.parameters:
            parameter.grad = None

    def after_step(self) -> None:  # noqa: B027  optional
        """Called at the end of every step, gradients cleared (strategies that average weights)."""

    def settle(self) -> None:  # noqa: B027  optional
        """Make replicas equal that a strategy lets drift on purpose; all ranks call it."""

    def gather(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  optional
        """Make `optimizer.state` whole on every rank, keyed by the model's parameters; all ranks
        call it. For checkpoints; `scatter` undoes it."""

    def scatter(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  optional
        """Take this rank's part of a whole `optimizer.state`, after `gather` or loading."""

    def held_state(self, optimizer: torch.optim.Optimizer) -> HeldState | None:
        """This rank's part of `optimizer`'s state, sharing its memory; None where every rank has
        it whole. All ranks call it."""
        return None

    def keep_state(
        self, optimizer: torch.optim.Optimizer, states: Mapping[Any, dict[str, Any]]
    ) -> None:
        """Take a part as `held_state` gives it, on the parameters' device."""
        raise RunError(f"sync={self.strategy!r} has whole state on every rank")

    def held_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers by the names of `model.state_dict()`, flat,
        sharing their memory; None where every rank has them whole."""
        return None

    def keep_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part with one as `held_weights` gives it."""
        raise RunError(f"sync={self.strategy!r} has whole weights on every rank")

    def state_tensors(self) -> dict[str, Tensor]:
        """What a strategy itself remembers from step to step, equal on all ranks after `gather`."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave.

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
        """Give back threads and hooks; the model stays usable."""


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
