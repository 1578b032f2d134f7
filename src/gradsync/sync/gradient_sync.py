"""The handle that owns the step: backward, the one division, clipping, the optimizer.

[Note: Exact global mean] A rank's micro-steps add up gradients of *summed* losses. At the step's
end one small all-reduce makes (loss sum, weight) global, the strategy makes the gradients global
sums, and both are divided once by the global weight. So the mean is exact for unequal token
counts, padding (weight 0), unequal shares and ranks without data: no mean of means anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError, RunError
from gradsync.runtime.gloo_group import wait_until_workers_sleep
from gradsync.sync.agreement import agree
from gradsync.sync.batch_norm import BatchNormHandling, choose_batch_norm
from gradsync.sync.loss_sum import LossSum
from gradsync.sync.own_loop import OwnLoop
from gradsync.sync.reducer import Reducer
from gradsync.sync.replicas import check_replicas, replica_tensors
from gradsync.sync.statistics import Statistics
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn

HANDLE = "_gradsync"
"""Attribute by which a model holds on to its handle; hooks do not keep it alive."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step saw, equal on all ranks."""

    mean_loss: Tensor
    """Loss per target over the global batch, float64 [] on the model's device."""
    weight: float
    """Number of targets (or samples) in the global batch."""
    grad_norm: Tensor | None
    """L2 norm of the mean gradient before clipping, [] ; None without clipping. Under strategies
    that step alone (`local_sgd`, `diloco`) it is this rank's own."""
    stop: bool
    """True when any rank asked to stop."""
    exposed: Stopwatch
    """Communication that nothing hid, on this rank."""


class Update:
    """What a GradScaler takes for an optimizer: the strategy's own way of stepping."""

    def __init__(self, reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self._reducer, self._optimizer = reducer, optimizer

    def step(self) -> None:
        """One step with the mean gradient."""
        self._reducer.update(self._optimizer)


class GradientSync:
    """Made by `gs.replicate`. Per step: `backward` for each leaf, then `step` once.

    Or, in a loop of one's own: `loss.backward()`, `finish()`, `optimizer.step()`.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        reducer: Reducer,
        batch_norm: BatchNormHandling | None = None,
    ) -> None:
        self.model = model
        self.comm = comm
        self.reducer = reducer
        if not reducer.parameters:
            raise RunError("the model has no trainable parameter: nothing to synchronise")
        self._loss = LossSum(reducer.parameters[0].device)
        self._last = False
        self._index: int | None = None
        self._result: StepResult | None = None
        self._statistics = Statistics(
            model,
            comm,
            batch_norm or choose_batch_norm(model, comm, None),
            equal_replicas=reducer.equal_replicas,
        )
        self._own_loop = OwnLoop(model, comm, reducer, self._statistics)

    @property
    def mean_loss(self) -> float:
        """Global mean loss of the last step, nan before the first; waits for the device."""
        return float("nan") if self._result is None else float(self._result.mean_loss)

    @property
    def forward(self) -> Any:
        """Call this in place of the model: `logits = sync.forward(inputs)`.

        Strategies that work by hooks do not need it: there it just calls the model.
        """
        return self.reducer.forward

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """See `Reducer.prime`; call it before the first step when a resume must keep its bits."""
        with self._statistics.untouched():
            self.reducer.prime(forward_backward)

    @contextmanager
    def micro_step(self, *, last: bool, index: int | None = None) -> Iterator[None]:
        """Enclose forward and `backward` of one leaf.

        Needed by strategies that must know before the forward (`ddp`, `powersgd`, `fsdp`);
        harmless for the others, which learn here what `backward`'s `leaf` would tell them.

        Args:
            last: `leaf.is_last` of the loader: no leaf follows, so communication may begin.
            index: `leaf.index` of the loader, see `backward`.
        """
        self._last, self._index = last, index
        try:
            with self.reducer.micro_step(last=last):
                yield
        finally:
            self._last, self._index = False, None

    def backward(
        self, loss_sum: Tensor, *, weight: float | None = None, leaf: Any = None, scale: Any = None
    ) -> None:
        """Backward of one leaf.

        Args:
            loss_sum: loss *summed* over the leaf's targets, [].
            weight: how many targets that are (0 for a leaf that is all padding); None takes
                `leaf.num_targets`.
            leaf: what `gs.loader` gave. Its `is_last` lets communication begin in this backward,
                its `index` lets `invariant` add up leaves at once instead of keeping each.
            scale: a `torch.amp.GradScaler`, for fp16.

        Raises:
            TypeError: neither weight nor leaf.
        """
        last, index = self._last, self._index
        if leaf is not None:
            last, index = leaf.is_last, leaf.index
            weight = leaf.num_targets if weight is None else weight
        if weight is None:
            raise TypeError("backward() needs weight= (the number of targets) or leaf=")
        self._statistics.leaf_begins(last=last)
        with self._own_loop.enclosed(), self.reducer.leaf(last=last, index=index):
            (loss_sum if scale is None else scale.scale(loss_sum)).backward()
        self._statistics.leaf_ends(counts=weight > 0)
        self._loss.add(loss_sum, weight)

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

        Raises:
            ConfigError: `scale` under a strategy that cannot skip a step.
        """
        reducer, loss = self.reducer, self._loss
        update = Update(reducer, optimizer)
        if scale is not None and not reducer.takes_scale:
            raise ConfigError(
                f"{type(reducer).__name__} cannot work with a GradScaler: a gradient that is not "
                "finite would stay in what it remembers; use bf16, or another strategy"
            )
        counts = self._statistics.step_begins()
        used = reducer.launch()
        agreed = agree(self.comm, used, counts, loss=loss.message(), stop=stop)
        reduction = reducer.reduce(agreed.used)
        total_loss, total_weight = loss.over_ranks(self.comm, agreed.loss)
        # What `.grad` holds the sum over: the global batch, or only this rank's part of it.
        weight = loss.weight if reduction.local else total_weight
        norm = None
        if weight:
            if scale is not None:
                scale.unscale_(update)
            # The one place that divides, whatever the strategy.
            if gradients := reducer.gradients():
                torch._foreach_mul_(gradients, reduction.divided_by / weight)
            if clip_norm is not None:
                norm = reducer.clip(clip_norm)
            with self._own_loop.enclosed():
                if scale is None:
                    update.step()
                else:
                    scale.step(update)
                    scale.update()
        optimizer.zero_grad(set_to_none=True)
        self._loss = LossSum(reducer.parameters[0].device)
        mean_loss = total_loss / total_weight
        self._result = StepResult(mean_loss, total_weight, norm, agreed.stop, reduction.exposed)
        self._statistics.step_ends(agreed.counts)
        reducer.after_step()
        return self._result

    def settle(self) -> None:
        """At the end of a run, on all ranks: strategies that let replicas drift (`local_sgd`,
        `diloco`) bring them together. Nothing to do under the others."""
        self.reducer.settle()

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a checkpoint, on all ranks: `optimizer.state` is whole until `scatter`."""
        self.reducer.gather(optimizer)

    def scatter(self, optimizer: torch.optim.Optimizer) -> None:
        """After a checkpoint, or after loading a whole `optimizer.state`, on all ranks."""
        self.reducer.scatter(optimizer)

    def full_weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`; all ranks call it."""
        return self.reducer.full_weights()

    def state_tensors(self) -> dict[str, Tensor]:
        """What the strategy remembers from step to step, for a checkpoint; after `gather`."""
        return self.reducer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave, after weights and optimizer."""
        self.reducer.load_state_tensors(tensors)

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones, by the names of `full_weights`."""
        self.reducer.load_full_weights(weights)
        self._statistics.refresh()

    def check_replicas(
        self, optimizer: torch.optim.Optimizer | None = None, *, step: int | None = None
    ) -> None:
        """All ranks must hold the same bits: compares a hash per parameter and buffer.

        Args:
            optimizer: compare its state too; not under strategies that share it out.
            step: for the message.

        Raises:
            RunError: on every rank: names the first tensor that differs, the step and the ranks.
            ConfigError: under a strategy whose ranks differ on purpose.
        """
        if not (self.reducer.whole_parameters and self.reducer.equal_replicas):
            raise ConfigError(
                f"{type(self.reducer).__name__} lets ranks hold different values on purpose: there "
                "is nothing to check"
            )
        check_replicas(replica_tensors(self.model, optimizer), self.comm, step=step)

    def finish(self) -> None:
        """In a loop of one's own: make every `.grad` the mean over ranks, as torch's DDP does.

        Backward does it by itself at its end; this call is for a rank that had no backward in this
        step, and for strategies without hooks. Calling it twice does nothing more.
        """
        self._own_loop.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """In a loop of one's own: only add up; enclose forward and backward of all micro-batches
        but the last."""
        return self._own_loop.no_sync()

    def close(self) -> None:
        """Take the hooks out of the model; it stays usable as it is.

        Before `destroy_process_group` it also lets gloo's workers come to rest: one that still
        needs Python's lock when the interpreter ends would abort the process.
        """
        self._own_loop.close()
        self.reducer.close()
        self._statistics.close()
        if self.model.__dict__.get(HANDLE) is self:
            del self.model.__dict__[HANDLE]
        if self.comm.world_size > 1:
            wait_until_workers_sleep()

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model is not synchronised: it gets no handle."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """As for copies: a saved model comes back without."""
        return (type(None), ())
