"""The handle of a replicated model: micro-batches, then the step (see `step.py`).

[Note: Mean or sum] A step divides once, by the targets of the whole global batch, so it needs each
micro-batch's *sum*. A mean, the default of torch's loss functions, is multiplied by the number of
targets that it was taken over: loss_sum = loss x weight. For cross-entropy and `.mean()` this gives
the sum's gradient bit for bit (weight / weight is 1). For `mse_loss` and similar losses it is equal
up to rounding, because they divide by the number of elements first. A penalty added to the mean
counts once per target, as it would in one big batch.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from gradsync.checkpoint.background import BackgroundWriter
from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import version
from gradsync.errors import ConfigError
from gradsync.runtime.gloo_group import wait_until_workers_sleep
from gradsync.sync.attempt import Attempt
from gradsync.sync.batch_norm import BatchNormHandling, choose_batch_norm
from gradsync.sync.buffers import BufferSync
from gradsync.sync.check_loss import check_loss, counts_for_nothing
from gradsync.sync.check_replicas import check_replicas, replica_tensors
from gradsync.sync.reducer import Reducer, outside_of_micro_step
from gradsync.sync.state_dict import load_whole_state, whole_state
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
from gradsync.sync.step_metadata import LossSum, settings_of, to_sum, weight_of
from gradsync.sync.user_loop import UserLoop
from gradsync.sync.watch import ReplicaWatch, StragglerWatch, optimizer_watch
from gradsync.world import World

if TYPE_CHECKING:
    from torch import nn

    from gradsync.data.micro_batch import Batch, MicroBatch

log = logging.getLogger("gradsync")

_CHANGED_SUMS = (
    "gradients were cleared or replaced between sync.backward() and sync.step(), which clears them "
    "itself: leave zero_grad() out, and clip by sync.step(optimizer, clip_norm=...)"
)
_OTHER_GRADIENTS = (
    "a parameter of shape {} has a gradient that sync.backward() did not make, and that would be "
    "added once on each rank. Add a penalty to the loss of each micro-batch (loss + penalty); "
    "clear what is left over by optimizer.zero_grad() before the step's first sync.backward()"
)
_SCALES = (
    "give one GradScaler as scale= to each sync.backward() of a step and to its sync.step(): it "
    "was given to only some of them, and gradients would be too large or too small"
)
Built = tuple[Communicator, Reducer, BatchNormHandling]
"""What synchronises a model over certain ranks."""
HANDLE = "_gradsync"
"""Attribute of a model that refers to its handle; hooks do not keep the handle alive."""


class GradientSync:
    """Handle of a replicated model, made by `gs.replicate`.

    In each step call `backward` for each micro-batch, then `step` once. In the user's training
    loop: `loss.backward()`, `finish()`, `optimizer.step()`.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
        reducer: the strategy.
        batch_norm: from `choose_batch_norm`; None for models without BatchNorm.
        number: number of the model in this process, the same on all ranks.
        world: says when to stop, and what to do after a loss; None never does.
        build: makes communicator, reducer and handling of BatchNorm for the ranks that are left.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        reducer: Reducer,
        batch_norm: BatchNormHandling | None = None,
        *,
        number: int = 0,
        world: World | None = None,
        build: Callable[[], Built] | None = None,
    ) -> None:
        self.model = model
        self.number, self.world, self._build = number, world or World(), build
        self._losses_to_check = 8  # the form of a program's loss does not change
        self._result: StepResult | None = None
        self._said_nan = False
        self.stopping = False  # Whether ranks agreed to stop in the last `step`
        self.writers: dict[Path, BackgroundWriter] = {}  # Of the folders that `gs.save` writes to
        self.saved_with: Optimizers | None = None  # In the last `gs.save` or `gs.load`
        self._bind(comm, reducer, batch_norm or choose_batch_norm(model, comm, None))
        if self.world.recovery is not None:
            self.world.recovery.handles.add(self)

    def _bind(self, comm: Communicator, reducer: Reducer, handling: BatchNormHandling) -> None:
        """Synchronise over `comm`; also after a loss."""
        model, shards = self.model, reducer.shards
        self._loss = LossSum(reducer.parameters[0].device)
        self._last = self._failed = self._in_micro_step = False
        self._index: int | None = None
        self._scale: Any = None
        self._buffers = BufferSync(model, comm, handling, equal_replicas=shards.equal_replicas)
        self.comm, self.reducer, self.replica = comm, reducer, shards
        self._equal = shards.whole_parameters and shards.equal_replicas
        watch = ReplicaWatch(model, comm, equal=self._equal)
        stragglers = StragglerWatch(comm)
        recovery = self.world.recovery
        parts = (reducer, comm, self._buffers, self.number, stragglers, watch, recovery)
        self._parts = StepParts(*parts)
        self._user_loop = UserLoop(model, self._parts, watch)
        self._sums: tuple[list[Any], list[int]] = [None] * len(reducer.parameters), []
        """Gradients and versions after the last micro-batch. Before the first there are none, and
        never any if they are summed elsewhere, as along the tree."""

    @property
    def mean_loss(self) -> float:
        """Global mean loss of the last `step`. It is nan before the first step and in the user's
        training loop, whose losses are not known. Waits for the device."""
        if self._result is None and not self._said_nan:
            self._said_nan = True
            log.warning("sync.mean_loss is nan before sync.step(), and after loss.backward()")
        return float("nan") if self._result is None else float(self._result.mean_loss)

    @property
    def forward(self) -> Any:
        """Call this in place of the model: `logits = sync.forward(inputs)`.

        Strategies that work by hooks do not need it; for them it only calls the model.
        """
        return self.reducer.forward

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Run a throwaway backward before the first step; for gradsync's own commands. Some
        strategies group sums by the first backward, and a resumed run would have other bits."""
        with self._buffers.untouched():
            self.reducer.prime(forward_backward)

    @contextmanager
    def micro_step(self, *, last: bool, index: int | None = None) -> Generator[None]:
        """Enclose forward and `backward` of one micro-batch.

        Needed by strategies that must know before the forward (`ddp`, `powersgd`, `fsdp`). It does
        no harm with others, which learn here what the `micro_batch` of `backward` tells them.

        Args:
            last: `micro_batch.is_last`: none follows, so communication may begin.
            index: `micro_batch.index`, see `backward`.
        """
        self._last, self._index = last, index
        if self.reducer.user_loop:
            self._user_loop.sums_begin()  # a loss.backward() in here would be a step of its own
        self._in_micro_step = True
        try:
            with self.reducer.micro_step(last=last):
                yield
        finally:
            self._last, self._index = False, None
            self._in_micro_step = False

    def backward(
        self,
        loss: Tensor,
        micro_batch: MicroBatch | None = None,
        *,
        weight: float | Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        scale: Any = None,
    ) -> None:
        """Run the backward of one micro-batch. Discards gradients for models of other handles.

        Args:
            loss: the mean over the micro-batch's targets, []; or their sum, see `reduction`.
            micro_batch: from `gs.loader`. Its `is_last` lets communication begin in this backward.
                Its `index` lets `invariant` add gradients immediately instead of keeping each.
            weight: number of targets that the loss counts (0 for padding alone); None is
                `micro_batch.num_targets`.
            reduction: "mean", or "sum" if `loss` is summed over the `weight` targets. A mean over
                no targets counts as nothing.
            scale: a `torch.amp.GradScaler`, for fp16.

        Raises:
            TypeError: neither a micro-batch nor a weight.
            ConfigError: a weight that is not a finite number >= 0; an unknown reduction; no
                enclosing `micro_step` although the strategy needs it; the last backward raised and
                `discard` was not called; the handle is closed.
        """
        last, index = self._last, self._index
        if micro_batch is not None:
            last, index = micro_batch.is_last, micro_batch.index
            among = getattr(micro_batch, "world_size", 0)
            if self.world.recovery is not None and among not in (0, self.world.world_size):
                raise ConfigError(
                    f"this micro-batch was dealt among {among} ranks, and {self.world.world_size} "
                    "are left: give its batch to sync.attempts, and iterate it in the attempt"
                )
        weight = weight_of(weight, micro_batch)
        self._refuse_if_failed()
        if self.reducer.needs_micro_step and not self._in_micro_step:
            raise ConfigError(outside_of_micro_step(self.reducer.strategy))
        loss_sum = to_sum(loss, weight, reduction)
        if self._losses_to_check:
            self._losses_to_check -= 1
            if wrong := check_loss(loss, weight, reduction):
                self._losses_to_check = 0
                log.warning("rank %d: %s (said once)", self.comm.rank, wrong)
        nothing = reduction == "mean" and not weight
        self._refuse_changed(scale)
        self._scale = scale
        self._buffers.leaf_begins(last=last)
        root = loss_sum if scale is None else scale.scale(loss_sum)
        with (
            self._user_loop.enclosed(root),
            self.reducer.micro_batch(last=last, index=index),
            counts_for_nothing(loss) if nothing else nullcontext(),
        ):
            self._failed = True  # until backward succeeds
            root.backward()
        self._failed = False
        self._buffers.leaf_ends(counts=weight > 0)
        self._loss.add(loss_sum, weight, micro_batch)
        self._sums = _gradients_of(self.reducer.parameters)
        if (ended := getattr(micro_batch, "backward_ended", None)) is not None:
            ended()

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
            optimizer: over the model's parameters, or a list of optimizers over different ones:
                `[muon, adamw]`. Parameters in none of them do not change; their gradients are
                dropped.
            clip_norm: largest L2 norm of the mean gradient of all updated parameters together; None
                does not clip.
            stop: whether this rank asks to stop, as a signal does under `gs.init(catch_stop=True)`;
                the result's `stop` is the same on all ranks.
            scale: the `torch.amp.GradScaler` given to `backward`.

        Raises:
            ConfigError: on all ranks, before any update: optimizers, hyper-parameters, `clip_norm`
                or orders of samples (`micro_batch`) differ between ranks; a parameter is in two
                optimizers or not in this model; the strategy cannot shard an optimizer; `scale`
                under a strategy that cannot skip a step; no rank had a backward since the last
                step; `loss.backward()` instead of `sync.backward`; a parameter was added or became
                trainable after `gs.replicate`; and see `backward`.
            RunError: on all ranks, before any update: weights changed since the last step on some
                ranks, and differ.
            CheckpointError: on rank 0: the last `gs.save` could not write its checkpoint.
        """
        reducer, optimizers = self.reducer, each_optimizer(optimizer)
        self._refuse_if_failed()
        for writer in self.writers.values():
            writer.check()
        for each in optimizers:
            self._user_loop.untracked.check(each, own_step=False)
        if self._user_loop.pending():
            raise ConfigError(
                "loss.backward() is followed by optimizer.step(); sync.step(optimizer) needs "
                "sync.backward(loss, micro_batch), which says how many targets the loss counts"
            )
        self._refuse_changed(scale, ends=True)
        if scale is not None and not reducer.shards.takes_scaler:
            raise ConfigError(
                f"strategy={reducer.strategy!r} cannot work with a GradScaler: a gradient that is "
                "not finite would stay in what it remembers; use bf16, or another strategy"
            )
        call = StepCall(
            loss=self._loss,
            update=Update(reducer, optimizers),
            settings=settings_of_step(self._parts, optimizers, clip_norm),
            enclosed=self._user_loop.enclosed,
            clip_norm=clip_norm,
            stop=stop or (self.world.asks_to_stop is not None and self.world.asks_to_stop()),
            scale=scale,
        )
        result = self._end_step(call)
        self.stopping = result.stop
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        return result

    def attempts(self, *batches: Batch) -> Iterator[Attempt]:
        """Take one step, again if a rank is lost in it: under `gs.init(on_loss="shrink")` the ranks
        that are left share its batches anew. Usually one pass:

            for batch in loader:
                for attempt in sync.attempts(batch):
                    with attempt:
                        for micro_batch in batch:
                            ...                        # forward, sync.backward
                        sync.step(optimizer)
                        scheduler.step()               # once for each step that is taken
                ...                                    # evaluation, gs.save

        Raises:
            ConfigError: under "shrink", a batch that `gs.loader` did not make.
        """
        recovery, failed = self.world.recovery, True
        if recovery is not None and not all(batch.can_be_dealt_again for batch in batches):
            raise ConfigError("on_loss='shrink' deals batches of gs.loader again, and no others")
        while failed:
            yield (attempt := Attempt(recovery, batches))
            failed = attempt.failed

    def settings(self) -> dict[str, str]:
        """Hyper-parameters of the optimizers that were saved with the model."""
        optimizers = [] if self.saved_with is None else each_optimizer(self.saved_with)
        found = {}
        for number, each in enumerate(optimizers):
            told = settings_of(each, self.reducer.parameters, number=number)
            found |= {f"model {self.number}: {name}": text for name, text in told.items()}
        return found

    def regroup(self) -> None:
        """Continue among the ranks that are left; gradients of an abandoned step are dropped."""
        assert self._build is not None, "given with a world that recovers"
        self._buffers.step_begins()  # undoes what forwards have changed, as a discarded step does
        self._buffers.step_ends((), ())
        self._user_loop.close()
        self.reducer.close()
        self._buffers.close()
        for parameter in self.reducer.parameters:
            parameter.grad = None
        self._bind(*self._build())

    def finish(self) -> None:
        """Set every `.grad` to the mean over ranks, as torch's DDP does; for user training loops.

        Backward does this itself when it ends. Call `finish` on a rank that had no backward in this
        step, and under strategies without hooks. A second call does nothing.
        """
        self._refuse_if_closed()
        self._user_loop.finish()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward averages over ranks, in the user's training loop, as in torch's DDP.

        False means `no_sync` without the `with`: set it before the forward, and set True before the
        forward of the last micro-batch. It can also be set on the model itself
        (`model.require_backward_grad_sync = False`). Regardless of it, `sync.backward` only adds
        up, and `sync.step` synchronises.

        Raises:
            ConfigError: on setting, if the strategy does not support the user's training loop.
        """
        return self._user_loop.synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        """Set it between two micro-batches."""
        self._refuse_if_closed()
        self._user_loop.refuse_if_foreign()
        self._user_loop.off = not wanted

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only accumulate, in the user's training loop. Enclose forward and backward of all
        micro-batches except the last."""
        before = self._user_loop.off
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self._user_loop.off = before

    def discard(self) -> None:
        """Discard this step's gradients; call it in place of `step` (or `finish`).

        For a rank whose forward or backward raised, or that must skip this step. All ranks must
        reach the end of the step, by this call or by the usual one; then none of them updates.
        Torch's own DDP (`ddp`, `powersgd`) cannot continue after a backward that raised.
        """
        self._refuse_if_closed()
        if self._user_loop.pending():
            self._user_loop.finish(discard=True)
            return
        if self._failed:
            self._buffers.leaf_ends(counts=False)
        self._failed = False
        self._end_step(StepCall(loss=self._loss, discard=True, settings={}))  # not compared

    def _end_step(self, call: StepCall) -> StepResult:
        """Take the step, then reset."""
        try:
            self._result = take_step(self._parts, call)
        finally:
            self._sums = [None] * len(self._sums[0]), []
            if not self._loss.num_micro_batches:
                self._user_loop.sums_end(discarded=call.discard)
        if (recovery := self.world.recovery) is not None:
            recovery.rebind()
        return self._result

    def _refuse_changed(self, scale: Any, *, ends: bool = False) -> None:
        """Raise ConfigError if there is a gradient that `backward` did not make, if sums were
        cleared or replaced, or if `scale` changed. When the step `ends`, communication may have
        changed the sums, so only replaced ones are noticed."""
        before, versions = self._sums
        now, versions_now = _gradients_of(self.reducer.parameters)
        if not all(map(operator.is_, before, now)) or not (ends or versions == versions_now):
            for known, grad in zip(before, now, strict=True):
                if known is None and grad is not None:
                    raise ConfigError(_OTHER_GRADIENTS.format([*grad.shape]))
            raise ConfigError(_CHANGED_SUMS)
        if self._loss.num_micro_batches and scale is not self._scale:
            raise ConfigError(_SCALES)

    def _refuse_if_closed(self) -> None:
        if not self._user_loop.handles:
            raise ConfigError("this handle is closed: call gs.replicate again")

    def _refuse_if_failed(self) -> None:
        self._refuse_if_closed()
        if self._failed:
            raise ConfigError(
                "the last sync.backward() raised, so this step's gradients are not whole: call "
                "sync.discard() in place of step() (then no rank updates anything)"
            )

    def state_dict(
        self, optimizer: Optimizers | None = None, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Whole state of the model, the optimizer and the strategy, for a checkpoint.

        All ranks call it, between two steps, and get the same: copies, which later steps do not
        change. `gs.save` writes it; data sets have a state of their own (`loader.state_dict()`).

        Args:
            optimizer: one, or the list passed to `step`; None leaves their states out.
            rank0_only: other ranks get {}, and keep no copy.

        Returns:
            "model": as `model.state_dict()` of the model without gradsync. "optimizer": of the one
            optimizer, or a list; None if there is none. "kinds", "names": classes of optimizers,
            names of the parameters in their groups. "strategy": its name, and what it keeps between
            steps.

        Raises:
            ConfigError: between `backward` and `step`.
        """
        self._refuse_in_step("state_dict")
        keep = self.comm.rank == 0 or not rank0_only
        # Under on_loss="shrink" each rank holds all, and a loss must not end the run here.
        comm = self.comm if self.world.recovery is None else SingleCommunicator()
        return whole_state(self.replica, comm, optimizer, keep=keep)

    def load_state_dict(
        self, state: Mapping[str, Any], optimizer: Optimizers | None = None
    ) -> None:
        """Restore what `state_dict` returned, on any number of ranks and under any strategy.

        All ranks call it after `gs.replicate`, each with the whole state.

        Args:
            state: from `state_dict`; its tensors may be on another device.
            optimizer: as for `state_dict`; None restores weights only.

        Raises:
            ConfigError: on all ranks, before anything is loaded: names, shapes, or number or
                classes of optimizers differ; between `backward` and `step`.
            RunError: on all ranks, if they were given different states.
        """
        self._refuse_in_step("load_state_dict")
        load_whole_state(self.replica, self.comm, state, optimizer)
        self._buffers.refresh()

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        begun = self._failed or bool(self._loss.num_micro_batches)
        return begun or self._user_loop.pending()

    def _refuse_in_step(self, what: str) -> None:
        self._refuse_if_closed()
        if self.in_step:
            raise ConfigError(
                f"sync.{what}() was called between backward and step, where gradients are "
                "unfinished sums: call it after sync.step(), or after sync.discard()"
            )

    def synchronize_replicas(self) -> None:
        """Make replicas equal at the end of a run, on all ranks, under strategies that let them
        drift (`local_sgd`, `diloco`); does nothing under others."""
        self.replica.synchronize_replicas()

    def check_replicas(
        self, optimizer: Optimizers | None = None, *, step: int | None = None
    ) -> None:
        """Check that all ranks hold the same bits: compares a hash per parameter and buffer.

        All ranks call it between two steps, after `step` and before the next step's first
        `backward`. When ranks divide an update (on one host, `zero1`, `zero2`), weights that
        differed before it become one mixture, equal on all ranks. It finds changes that a step does
        not notice by itself, such as `p.data[0] = 0`.

        Args:
            optimizer: compare its state too; not under strategies that shard it.
            step: number of the step, for the message.

        Raises:
            RunError: on every rank: names the first tensor that differs, the step and the ranks.
            ConfigError: under a strategy whose ranks differ on purpose.
        """
        if not self._equal:
            raise ConfigError(
                f"strategy={self.reducer.strategy!r} lets ranks hold different values "
                "on purpose: there is nothing to check"
            )
        self.replica.wait()
        optimizers = [] if optimizer is None else each_optimizer(optimizer)
        check_replicas(replica_tensors(self.model, optimizers), self.comm, step=step)

    def close(self) -> None:
        """Remove the hooks from the model, which stays usable.

        Called before `destroy_process_group`, it also lets gloo's workers finish. A worker that
        needs Python's lock when the interpreter ends would abort the process. Waits for the
        checkpoint that `gs.save` is writing.

        Raises:
            CheckpointError: on rank 0: it could not be written.
        """
        if self.world.recovery is not None:
            if sys.exc_info()[0] is None:  # else the others may not come
                self.world.recovery.make_sure()
            self.world.recovery.handles.discard(self)
        self._user_loop.close()
        self.reducer.close()
        self._buffers.close()
        for part in self.model.modules():
            if part.__dict__.get(HANDLE) is self:
                del part.__dict__[HANDLE]
        others = [listener.comm for listener in optimizer_watch().present()]
        own = (SharedMemoryCommunicator, ProcessGroupCommunicator)
        if isinstance(self.comm, own) and self.comm not in others:
            self.comm.close()
        if self.comm.world_size > 1:
            wait_until_workers_sleep()
        self.finish_writing()

    def finish_writing(self) -> None:
        """Wait until `gs.save` writes nothing any more; raises its error."""
        for writer in self.writers.values():
            writer.wait()

    def __repr__(self) -> str:
        return f"<GradientSync of {type(self.model).__name__}, strategy={self.reducer.strategy!r}>"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Give a copied or saved model no handle, because it is not synchronised."""
        return (type(None), ())


def _gradients_of(parameters: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Each parameter's gradient or None, and the version of each gradient."""
    grads = [p.grad for p in parameters]
    return grads, [version(grad) for grad in grads if grad is not None]
