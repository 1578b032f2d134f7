"""How a strategy collects and sums gradients, by the phases of a step (step.py).

    collect    `Reducer.micro_batch`, `collect`    hooks put each ready gradient into its place
    reduce     `Reducer.launch`, `reduce`          the slices that a rank owns become global means

A `Reducer` collects and sums; its `shards` (replicas.py) are what a rank owns of the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.sync.replicas import Replicas
from gradsync.sync.watch import SMALL, NonFinite, Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn


class Reducer(ABC):
    """One way of summing gradients over ranks, bound to one model whose replicas are equal.

    Args:
        model: on its device.
        comm: all ranks.
        shards: what this rank owns; None means everything.
        strategy: name that users pass as `gs.replicate(strategy=...)`.
    """

    own_gradients = False
    """True if `named_gradients` are this rank's alone, whatever was sent."""
    user_loop = False
    """True if it supports the user's training loop (`loss.backward()`, `optimizer.step()`)."""
    waits_in_backward = False
    """True if exposed communication happens in backward instead of at the end of the step."""
    needs_micro_step = False
    """True if it must know before a forward what its backward will do."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        shards: Replicas | None = None,
        *,
        strategy: str = "",
    ) -> None:
        self.model = model
        self.comm = comm
        self.parameters: list[nn.Parameter] = [p for _, p in trainable(model)]
        """Trainable parameters, tied ones once, in `named_parameters` order."""
        self.shards = Replicas(model, self.parameters) if shards is None else shards
        self.strategy = self.shards.strategy = strategy
        self.non_finite = NonFinite()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward that the training step calls (for most strategies: the model's)."""
        return self.model(*inputs, **named)

    def prime(self, forward_backward: Callable[[], None]) -> None:  # noqa: B027  optional
        """Fix the layout now, if the strategy learns it from its first backward.

        Otherwise a resumed run would begin with another grouping of sums than the run it continues,
        and bits would change. `forward_backward` is one throwaway micro-step through `forward`.
        """

    def watch(self, on_gradient: Callable[[nn.Parameter], bool]) -> list[Any]:
        """Call `on_gradient(parameter)` for each gradient that arrives outside of `micro_batch`; it
        returns whether the current backward is the last one before gradients are used. Returns
        handles of the hooks."""

        def gradient_is_ready(parameter: Any) -> None:
            on_gradient(parameter)

        hooked = self.parameters
        return [p.register_post_accumulate_grad_hook(gradient_is_ready) for p in hooked]

    @contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        """Enclose one forward and backward; `last` if it completes this rank's gradients.

        `last` must be True on all ranks of a step or on none.
        """
        yield

    @contextmanager
    def micro_batch(self, *, last: bool, index: int | None = None) -> Generator[None]:
        """Enclose one backward of this rank.

        Args:
            last: no other micro-batch of this rank follows in this step.
            index: the micro-batch's place in the global batch; None when it is unknown.
        """
        yield

    def collect(self, *, discard: bool, user_loop: bool) -> None:  # noqa: B027  optional
        """End this rank's micro-batches, before `launch` in every step.

        Args:
            discard: no rank will use the sums, so drop this rank's part of them.
            user_loop: gradients in `.grad` count, regardless of their origin.
        """

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's contribution to the sums, except what has been sent."""
        return ((name, p.grad) for name, p in trainable(self.model) if p.grad is not None)

    def gradient_memory(self, *, large: bool) -> list[Tensor]:
        """Memory of `named_gradients`; unless `large`, only with up to `SMALL` elements each."""
        own = (gradient.detach() for _, gradient in self.named_gradients())
        return [gradient for gradient in own if large or gradient.numel() <= SMALL]

    def launch(self) -> list[bool]:
        """Start the remaining communication; returns which parameters have gradients here."""
        return [parameter.grad is not None for parameter in self.parameters]

    @abstractmethod
    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """Finish: the slices that this rank owns (`shards.owned()`) become the sum over all ranks,
        divided by `divisor`.

        Args:
            used: for each trainable parameter, whether any rank has a gradient for it.
            divisor: the weight of the sum; None in a step in which no rank updates.

        Returns:
            Duration of communication that nothing overlapped.
        """

    def close(self) -> None:  # noqa: B027  optional
        """Release threads and hooks; the model stays usable."""


class NaiveReducer(Reducer):
    """`naive`: one blocking all-reduce for each parameter, after backward.

    The shortest correct code; all other strategies are checked against it. Bytes per rank and
    step: 2(W-1)/W x the gradients (a ring, Patarasuk & Yuan 2009); nothing overlaps.

    Args:
        model, comm, strategy: see `Reducer`.
        needs_micro_step: for a strategy that needs it on several ranks.
    """

    own_gradients = user_loop = True

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        strategy: str = "naive",
        needs_micro_step: bool = False,
    ) -> None:
        super().__init__(model, comm, strategy=strategy)
        self.needs_micro_step = needs_micro_step

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        watch = sum_gradients(self.parameters, used, self.comm)
        self.shards.scale(divisor and 1 / divisor)
        return watch


def sum_gradients(
    parameters: Sequence[nn.Parameter], used: Sequence[bool], comm: Communicator
) -> Stopwatch:
    """All-reduce every used parameter's gradient over the whole group, one after the other.

    A rank without a gradient for a used parameter (or without data) contributes zeros, because all
    ranks must issue the same operations. The gradient of a parameter that no rank used stays None.

    Args:
        parameters: trainable parameters, in one order on all ranks.
        used: for each of them, whether any rank has a gradient for it.
        comm: the ranks.
    """
    watch = Stopwatch(on_cuda=any(parameter.is_cuda for parameter in parameters))
    watch.start()
    for parameter, any_rank in zip(parameters, used, strict=True):
        if any_rank:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.resolve_conj().resolve_neg()  # bytes are sent
            # Whole group, the parameter's shape and dtype; intentionally overlaps nothing.
            comm.all_reduce(parameter.grad).wait()
    watch.stop()
    return watch


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters with their names, tied ones once, in `named_parameters` order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def outside_of_micro_step(strategy: str) -> str:
    """The message about a forward that a strategy was not told of."""
    return (
        f"strategy={strategy!r}: enclose forward and backward of each micro-batch in "
        "`with sync.micro_step(last=micro_batch.is_last, index=micro_batch.index):`"
    )
