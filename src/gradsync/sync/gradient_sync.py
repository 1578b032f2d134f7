"""The handle that owns the step: backward, the one division, clipping, the optimizer.

[Note: Exact global mean] A rank's micro-steps add up gradients of *summed* losses. At the step's
end one small all-reduce makes (loss sum, weight) global, the strategy makes the gradients global
sums, and both are divided once by the global weight. So the mean is exact for unequal token
counts, padding (weight 0), unequal shares and ranks without data: no mean of means anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.choose import communicator
from gradsync.errors import RunError
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.registry import build_reducer, find_strategy
from gradsync.sync.stopwatch import Stopwatch
from gradsync.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step saw, equal on all ranks."""

    mean_loss: Tensor
    """Loss per target over the global batch, float64 [] on the model's device."""
    weight: float
    """Number of targets (or samples) in the global batch."""
    grad_norm: Tensor | None
    """L2 norm of the mean gradient before clipping, [] ; None without clipping."""
    stop: bool
    """True when any rank asked to stop."""
    exposed: Stopwatch
    """Communication that nothing hid, on this rank."""


class GradientSync:
    """Made by `gs.replicate`. Per step: `backward` for each leaf, then `step` once.

    `forward` is what to call in place of the model (under most strategies it *is* the model).
    """

    def __init__(self, model: nn.Module, comm: Communicator, reducer: Reducer) -> None:
        self.model = model
        self.comm = comm
        self._reducer = reducer
        self._parameters = [parameter for _, parameter in trainable(model)]
        if not self._parameters:
            raise RunError("the model has no trainable parameter: nothing to synchronise")
        self._loss_sum: Tensor | None = None
        self._weight = 0.0
        self._last: StepResult | None = None

    @property
    def mean_loss(self) -> float:
        """Global mean loss of the last step, nan before the first; waits for the device."""
        return float("nan") if self._last is None else float(self._last.mean_loss)

    @property
    def forward(self) -> Any:
        """Call this in place of the model: `logits = sync.forward(inputs)`."""
        return self._reducer.forward

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """See `Reducer.prime`; call it before the first step when a resume must keep its bits."""
        self._reducer.prime(forward_backward)

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and `backward` of one leaf; `last=leaf.is_last` from the loader.

        Needed by strategies that communicate during backward, harmless for the others.
        """
        return self._reducer.micro_step(last=last)

    def backward(self, loss_sum: Tensor, *, weight: float, scale: Any = None) -> None:
        """Backward of one leaf.

        Args:
            loss_sum: loss *summed* over the leaf's targets, [].
            weight: how many targets that are (0 for a leaf that is all padding).
            scale: a `torch.amp.GradScaler`, for fp16.
        """
        (loss_sum if scale is None else scale.scale(loss_sum)).backward()
        detached = loss_sum.detach().double()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._weight += weight

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        stop: bool = False,
        scale: Any = None,
    ) -> StepResult:
        """Synchronise, divide once, clip, update, and clear the gradients.

        Args:
            optimizer: over the model's parameters.
            clip_norm: largest L2 norm of the mean gradient; None does not clip.
            stop: this rank wants to stop; the answer in the result is the same on all ranks.
            scale: the `torch.amp.GradScaler` given to `backward`.
        """
        used, weight, any_stop = self._agree(stop)
        reduction = self._reducer.reduce(used)
        mean_loss = self._global_loss() / weight
        norm = None
        if weight:
            if scale is not None:
                scale.unscale_(optimizer)
            # The one place that divides, whatever the strategy.
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(gradients, reduction.divided_by / weight)
            if clip_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip_norm)
            if scale is None:
                optimizer.step()
            else:
                scale.step(optimizer)
                scale.update()
        optimizer.zero_grad(set_to_none=True)
        self._loss_sum, self._weight = None, 0.0
        self._last = StepResult(mean_loss, weight, norm, any_stop, reduction.exposed)
        return self._last

    def _agree(self, stop: bool) -> tuple[list[bool], float, bool]:
        """One all-reduce of what the host knows: weight, stop flag, which parameters got gradients.

        Whole group, float64 [3 + number of parameters], always on the CPU: it never waits for the
        device. On a CPU the loss travels along.
        """
        flags = [float(p.grad is not None) for p in self._parameters]
        on_host = self._loss_sum is not None and not self._loss_sum.is_cuda
        loss = float(self._loss_sum) if on_host and self._loss_sum is not None else 0.0
        message = torch.tensor([loss, self._weight, float(stop), *flags], dtype=torch.float64)
        self.comm.all_reduce(message).wait()
        loss, weight, stops, *counts = message.tolist()
        if not self._parameters[0].is_cuda:
            self._loss_sum = torch.tensor(loss, dtype=torch.float64)
        return [count > 0 for count in counts], weight, stops > 0

    def _global_loss(self) -> Tensor:
        """The loss over all ranks; on CUDA one more all-reduce, float64 [], on the device."""
        if not self._parameters[0].is_cuda and self._loss_sum is not None:
            return self._loss_sum
        loss_sum = self._loss_sum
        if loss_sum is None:
            loss_sum = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        self.comm.all_reduce(loss_sum).wait()
        return loss_sum


def replicate(
    model: nn.Module,
    world: World | None = None,
    *,
    sync: str = "ddp",
    comm: Communicator | None = None,
    **options: Any,
) -> GradientSync:
    """Replicate `model` over the ranks of `world`: all start from rank 0's weights, and stay equal.

    The model is not wrapped: names, checkpoints and frozen parts stay as they are.

    Args:
        model: on its device already.
        world: from `gs.init()`; None with `comm`.
        sync: a strategy of `gradsync.sync.registry.STRATEGIES`.
        comm: a communicator to use instead of the world's own.
        options: of the strategy, such as `bucket_mb=25.0`.

    Raises:
        ConfigError: unknown strategy or option.
        RunError: several ranks but no process group; no trainable parameter.
    """
    comm = comm or communicator(world or World())
    return GradientSync(model, comm, build_reducer(find_strategy(sync), model, comm, options))
