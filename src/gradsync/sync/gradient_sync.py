"""The handle of a replicated model: leaf after leaf, then the step (see `step.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.runtime.gloo_group import wait_until_workers_sleep
from gradsync.sync.batch_norm import BatchNormHandling, choose_batch_norm
from gradsync.sync.buffers import BufferSync
from gradsync.sync.check_replicas import ReplicaWatch
from gradsync.sync.loss import LossSum, MeanCheck, counts_for_nothing, leaf_weight, to_sum
from gradsync.sync.optimizers import optimizer_watch, refuse_closure
from gradsync.sync.reducer import Reducer
from gradsync.sync.state_methods import StateMethods
from gradsync.sync.step import (
    Optimizers,
    StepCall,
    StepParts,
    StepResult,
    Update,
    each_optimizer,
    settings_of_step,
    take_step,
)
from gradsync.sync.user_loop import UserLoop, UserLoopMethods, refuse_ddp_around

if TYPE_CHECKING:
    from torch import Tensor, nn

HANDLE = "_gradsync"
"""Attribute by which a model refers to its handle; hooks do not keep it alive."""


class GradientSync(UserLoopMethods, StateMethods):
    """Handle of a replicated model, made by `gs.replicate`.

    Per step: `backward` for each leaf, then `step` once. Or, in the user's training loop:
    `loss.backward()`, `finish()`, `optimizer.step()`.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
        reducer: the strategy.
        batch_norm: from `choose_batch_norm`; None for models without BatchNorm.
        number: number of the model in this process, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        reducer: Reducer,
        batch_norm: BatchNormHandling | None = None,
        *,
        number: int = 0,
    ) -> None:
        self.model = model
        self.comm = comm
        self.reducer = reducer
        if not reducer.parameters:
            raise RunError("the model has no trainable parameter: nothing to synchronise")
        self._loss = LossSum(reducer.parameters[0].device)
        self._check_mean = MeanCheck(said=comm.rank == 0)
        self._last = False
        self._index: int | None = None
        self._result: StepResult | None = None
        shards = reducer.shards
        handling = batch_norm or choose_batch_norm(model, comm, None)
        self._buffers = BufferSync(model, comm, handling, equal_replicas=shards.equal_replicas)
        watch = ReplicaWatch(model, comm, equal=shards.whole_parameters and shards.equal_replicas)
        self._parts = StepParts(reducer, comm, self._buffers, number, watch)
        self._user_loop = UserLoop(model, self._parts, watch)
        self._ddp_watch = refuse_ddp_around(model, reducer)
        self._failed = False

    @property
    def mean_loss(self) -> float:
        """Global mean loss of the last step, nan before the first; waits for the device."""
        return float("nan") if self._result is None else float(self._result.mean_loss)

    @property
    def forward(self) -> Any:
        """Call this in place of the model: `logits = sync.forward(inputs)`.

        Strategies that work by hooks do not need it: for them it just calls the model.
        """
        return self.reducer.forward

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """See `Reducer.prime`; call it before the first step when a resume must keep its bits."""
        with self._buffers.untouched():
            self.reducer.prime(forward_backward)

    @contextmanager
    def micro_step(self, *, last: bool, index: int | None = None) -> Iterator[None]:
        """Enclose forward and `backward` of one leaf.

        Needed by strategies that must know before the forward (`ddp`, `powersgd`, `fsdp`); harmless
        for the others, which learn here what `backward`'s `leaf` would tell them.

        Args:
            last: `leaf.is_last` of the loader: no leaf follows, so communication may begin.
            index: `leaf.index` of the loader, see `backward`.
        """
        self._last, self._index = last, index
        self._user_loop.in_micro_step = True
        try:
            with self.reducer.micro_step(last=last):
                yield
        finally:
            self._last, self._index = False, None
            self._user_loop.in_micro_step = False

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        leaf: Any = None,
        reduction: str | None = None,
        scale: Any = None,
    ) -> None:
        """Run the backward of one leaf. Gradients for models of other handles are discarded.

        Args:
            loss: *summed* over the leaf's targets, []; or their mean, see `reduction`.
            weight: number of these targets (0 for a leaf that is all padding); None is
                `leaf.num_targets`.
            leaf: from `gs.loader`. Its `is_last` lets communication begin in this backward, its
                `index` lets `invariant` add up leaves at once instead of keeping each.
            reduction: "sum", or "mean" when `loss` is the mean over the `weight` targets (over no
                targets it counts for nothing). None is "sum", and warns once if the loss looks like
                a mean. See [Note: Mean or sum].
            scale: a `torch.amp.GradScaler`, for fp16.

        Raises:
            TypeError: neither weight nor leaf.
            ConfigError: a weight that is not a finite number >= 0; an unknown reduction; the last
                backward raised, and `discard` was not called; the handle is closed.
        """
        last, index = self._last, self._index
        if leaf is not None:
            last, index = leaf.is_last, leaf.index
        weight = leaf_weight(weight, leaf)
        self._refuse_if_failed()
        loss_sum = to_sum(loss, weight, reduction)
        self._check_mean(loss, weight, leaf, reduction=reduction)
        nothing = reduction == "mean" and not weight
        self._buffers.leaf_begins(last=last)
        root = loss_sum if scale is None else scale.scale(loss_sum)
        with (
            self._user_loop.enclosed(root),
            self.reducer.leaf(last=last, index=index),
            counts_for_nothing(loss) if nothing else nullcontext(),
        ):
            self._user_loop.leaves += 1
            self._failed = True  # until the backward has succeeded
            root.backward()
        self._failed = False
        self._buffers.leaf_ends(counts=weight > 0)
        self._loss.add(loss_sum, weight)

    def step(
        self,
        optimizer: Optimizers,
        *,
        clip_norm: float | None = None,
        stop: bool = False,
        scale: Any = None,
    ) -> StepResult:
        """Synchronise, divide once, clip, update, and clear the gradients.

        Args:
            optimizer: over the model's parameters, or a list of several, each over its own:
                `[muon, adamw]`. Parameters in none of them stay as they are; their gradients are
                dropped.
            clip_norm: largest L2 norm of the mean gradient of all updated parameters together; None
                does not clip.
            stop: whether this rank wants to stop; the result's `stop` is the same on all ranks.
            scale: the `torch.amp.GradScaler` given to `backward`.

        Raises:
            ConfigError: on all ranks, before any update: their optimizers or hyper-parameters
                differ. A parameter in two optimizers, or outside of this model; an optimizer that
                the strategy cannot shard; `scale` under a strategy that cannot skip a step; no rank
                had a backward since the last step; `loss.backward()` instead of `sync.backward`; a
                parameter that was added or became trainable after `gs.replicate`; and see
                `backward`.
            RunError: on all ranks, before any update: weights were changed since the last step on
                some of them, and differ.
        """
        reducer, optimizers = self.reducer, each_optimizer(optimizer)
        self._refuse_if_failed()
        for each in optimizers:
            refuse_closure(each)
            self._user_loop.untracked.check(each, own_step=False)
        if not self._user_loop.leaves and self._user_loop.pending:
            raise ConfigError(
                "loss.backward() is followed by optimizer.step(), and sync.step(optimizer) follows "
                "sync.backward(loss_sum, weight=...): nobody told the weight of this loss"
            )
        if scale is not None and not reducer.shards.takes_scaler:
            raise ConfigError(
                f"sync={reducer.strategy!r} cannot work with a GradScaler: a gradient that is not "
                "finite would stay in what it remembers; use bf16, or another strategy"
            )
        call = StepCall(
            loss=self._loss,
            update=Update(reducer, optimizers),
            settings=settings_of_step(self._parts, optimizers),
            enclosed=self._user_loop.enclosed,
            clip_norm=clip_norm,
            stop=stop,
            scale=scale,
        )
        result = self._end_step(call)
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        return result

    def discard(self) -> None:
        """Discard this step's gradients; called in place of `step` (or `finish`).

        For a rank whose forward or backward raised, or that wants none of it. All ranks must reach
        the end of the step, by this call or by the usual one; none of them updates anything then.
        Torch's own DDP (`ddp`, `powersgd`) cannot continue after a backward that raised.
        """
        self._refuse_if_closed()
        if self._user_loop.pending and not self._user_loop.leaves:
            self._user_loop.discard()
            return
        if self._failed:
            self._buffers.leaf_ends(counts=False)
        self._failed = False
        settings = settings_of_step(self._parts, ())
        self._end_step(StepCall(loss=self._loss, discard=True, settings=settings))
        self._user_loop.step_ends(discarded=True)

    def _end_step(self, call: StepCall) -> StepResult:
        """Take the step, then reset."""
        try:
            self._result = take_step(self._parts, call)
        finally:
            if not self._loss.num_leaves:
                self._user_loop.leaves = 0
        return self._result

    def _refuse_if_failed(self) -> None:
        self._refuse_if_closed()
        if self._failed:
            raise ConfigError(
                "the last sync.backward() raised, so this step's gradients are not whole: call "
                "sync.discard() in place of step() (then no rank updates anything)"
            )

    def close(self) -> None:
        """Remove the hooks from the model; it stays usable as it is.

        Before `destroy_process_group` it also lets gloo's workers finish: one that still needs
        Python's lock when the interpreter ends would abort the process.
        """
        self._user_loop.close()
        self._ddp_watch.remove()
        self.reducer.close()
        self._buffers.close()
        for part in self.model.modules():
            if part.__dict__.get(HANDLE) is self:
                del part.__dict__[HANDLE]
        others = [listener.comm for listener in optimizer_watch().present()]
        if isinstance(self.comm, SharedMemoryCommunicator) and self.comm not in others:
            self.comm.close()
        if self.comm.world_size > 1:
            wait_until_workers_sleep()

    def __deepcopy__(self, memo: object) -> None:
        """Give a copy of the model no handle: it is not synchronised."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Give a saved model no handle, as for copies."""
        return (type(None), ())
