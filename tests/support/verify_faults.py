"""Planted mistakes: each takes the parts of a right training loop and returns those of a wrong one.

They act where real programs go wrong: on gradients after they were reduced, on the loader, on
random seeds, on weights, and on torch DDP's synchronisation flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.commands.verify.run import Parts
from gradsync.data.micro_batch import MicroBatch
from gradsync.sync.reducer import sum_gradients, trainable
from gradsync.sync.watch import Stopwatch

Fault = Callable[[Parts], Parts]
NAME = "head.weight"


def parameter_of(parts: Parts, name: str = NAME) -> nn.Parameter:
    return dict(parts.model.named_parameters())[name]


def gradients_of(parts: Parts) -> list[Tensor]:
    return [p.grad for p in parts.model.parameters() if p.grad is not None]


def is_last(parts: Parts) -> bool:
    return parts.comm.rank == parts.comm.world_size - 1


# -- gradients ------------------------------------------------------------------------------------


def after_reduce(change: Callable[[Parts, dict[str, Tensor]], None]) -> Fault:
    """`change(parts, gradients before the reduction)` acts when gradients are global."""

    @wraps(change)
    def fault(parts: Parts) -> Parts:
        reducer: Any = parts.sync.reducer
        original = reducer.reduce
        prepare = reducer.shards.prepare
        reducer.shards.prepare = lambda *_, **__: prepare([], scaled=False)  # gradients stay whole

        def reduce(used: list[bool], divisor: float | None) -> Stopwatch:
            named = trainable(parts.model)
            before = {name: p.grad.clone() for name, p in named if p.grad is not None}
            watch = original(used, 1.0)
            change(parts, before)
            reducer.shards.scale(divisor and 1 / divisor)
            return watch

        reducer.reduce = reduce
        return parts

    return fault


@after_reduce
def one_parameter_not_reduced(parts: Parts, before: dict[str, Tensor]) -> None:
    """Each rank keeps its own gradient of one weight, times W as if it had been summed."""
    parameter = parameter_of(parts)
    parameter.grad = before.get(NAME, torch.zeros_like(parameter)).mul_(parts.comm.world_size)


@after_reduce
def divided_twice(parts: Parts, _: dict[str, Tensor]) -> None:
    """By the number of ranks, although the sum is divided by the number of targets later."""
    for gradient in gradients_of(parts):
        gradient.div_(parts.comm.world_size)


@after_reduce
def gradients_negated(parts: Parts, _: dict[str, Tensor]) -> None:
    """Every gradient has the wrong sign on all ranks."""
    for gradient in gradients_of(parts):
        gradient.neg_()


def stale_bucket(parts: Parts) -> Parts:
    """One parameter gets the reduced gradient of the step before, as a bucket that was read too
    early."""
    kept: list[Tensor] = []

    def change(parts: Parts, _: dict[str, Tensor]) -> None:
        gradient = parameter_of(parts).grad
        assert gradient is not None
        kept.append(gradient.clone())
        gradient.copy_(kept[-2:][0])

    return after_reduce(change)(parts)


class _Own:
    """This rank's own loss and targets in the step under way."""

    def __init__(self, parts: Parts) -> None:
        self.loss = self.weight = 0.0
        sync: Any = parts.sync
        backward, step = sync.backward, sync.step

        def counted(loss: Tensor, micro_batch: MicroBatch, **named: Any) -> None:
            self.loss += float(loss.detach())
            self.weight += micro_batch.num_targets
            backward(loss, micro_batch, **named)

        def cleared(*arguments: Any, **named: Any) -> Any:
            result = step(*arguments, **named)
            self.loss = self.weight = 0.0
            return result

        sync.backward, sync.step = counted, cleared

    def total_and_busy(self, parts: Parts) -> tuple[float, float]:
        """Targets of all ranks, and how many ranks have any."""
        both = torch.tensor([self.weight, float(self.weight > 0)], dtype=torch.float64)
        parts.comm.all_reduce(both).wait()
        return float(both[0]), float(both[1])


def divided_by_the_local_count(parts: Parts) -> Parts:
    """Each rank divides the global sum by its own targets."""
    own = _Own(parts)

    def change(parts: Parts, _: dict[str, Tensor]) -> None:
        total, _busy = own.total_and_busy(parts)
        for gradient in gradients_of(parts) if own.weight else ():
            gradient.mul_(total / own.weight)

    return after_reduce(change)(parts)


def mean_of_means(parts: Parts) -> Parts:
    """Each rank divides its own sum by its own targets, and the means are averaged: as DDP does
    with `loss.mean()` on micro-batches of unequal weight."""
    own = _Own(parts)
    reducer: Any = parts.sync.reducer
    original = reducer.reduce

    def reduce(used: list[bool], divisor: float | None) -> Stopwatch:
        total, busy = own.total_and_busy(parts)
        for gradient in gradients_of(parts):
            gradient.mul_(total / max(own.weight, 1.0) / busy)
        return original(used, divisor)

    reducer.reduce = reduce
    return parts


def lost_in_backward(parts: Parts) -> Parts:
    """Gradients of rank 0's first micro-batch are cleared, past the counter that refuses it."""
    sync: Any = parts.sync
    original, seen = sync.backward, []

    def backward(loss: Tensor, micro_batch: MicroBatch, **named: Any) -> None:
        original(loss, micro_batch, **named)
        if parts.comm.rank == 0 and micro_batch.index == 0 and micro_batch.step not in seen:
            seen.append(micro_batch.step)
            for parameter in parts.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.zero_()

    sync.backward = backward
    return parts


# -- data and random numbers ----------------------------------------------------------------------


def _with_micro_batches(
    parts: Parts, change: Callable[[list[MicroBatch]], list[MicroBatch]]
) -> Parts:
    """The last rank's steps have other micro-batches."""

    class Step(list[MicroBatch]):
        number = 0

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for step in parts_loader:
                batch = Step(change(list(step)) if is_last(parts) else step)
                batch.number = step.number
                yield batch

        def state_dict(self) -> Any:
            return parts_loader.state_dict()

    parts_loader = parts.loader
    return replace(parts, loader=Loader())


def micro_batch_dropped(parts: Parts) -> Parts:
    """The first of its micro-batches is left out, as `drop_last` may."""
    return _with_micro_batches(parts, lambda batch: batch[1:])


def sample_duplicated(parts: Parts) -> Parts:
    """The first sample of each micro-batch is seen twice, as from a padding sampler."""

    def twice(micro_batch: MicroBatch) -> MicroBatch:
        inputs, targets = (tensor.clone() for tensor in micro_batch.batch)
        inputs[-1], targets[-1] = inputs[0], targets[0]
        return replace(micro_batch, batch=[inputs, targets])

    return _with_micro_batches(parts, lambda batch: [*map(twice, batch)])


def rank_seeded_dropout(parts: Parts) -> Parts:
    """Every rank draws its dropout from a stream of its own."""

    def seed(base: int, step: int, micro_batch: int) -> None:
        torch.manual_seed(1000 * parts.comm.rank + step)

    return replace(parts, seed_micro_batch=seed)


def hidden_dropout(parts: Parts) -> Parts:
    """The model seeds by rank inside of its forward, where no loop can see it."""

    def seed(*_: Any) -> None:
        torch.manual_seed(1000 * parts.comm.rank)

    parts.model.register_forward_pre_hook(seed)
    return parts


# -- weights, buffers, optimizer, what is reported ------------------------------------------------


@torch.no_grad()
def start_not_shared(parts: Parts) -> Parts:
    """Rank 1 begins with other weights."""
    if parts.comm.rank == 1:
        parameter_of(parts, "head.bias").add_(0.5)
    return parts


def learning_rate(parts: Parts, factor: float, everywhere: bool) -> Parts:
    """The optimizer has other settings than it should: on rank 0, or on all."""
    if everywhere or parts.comm.rank == 0:
        parts.optimizer.param_groups[0]["lr"] *= factor
    return parts


learning_rate_of_all = partial(learning_rate, factor=1.001, everywhere=True)
other_learning_rate = partial(learning_rate, factor=2, everywhere=False)


def momentum_lost(parts: Parts) -> Parts:
    """After loading a checkpoint, the optimizer begins anew."""
    parts.optimizer.state.clear()
    return parts


def _around_step(parts: Parts, change: Callable[[Callable[[], Any], int], Any]) -> Parts:
    """Let `change(step, number from 1)` return the step's result; it calls `step()`."""
    sync: Any = parts.sync
    original, steps = sync.step, []

    def step(*arguments: Any, **named: Any) -> Any:
        steps.append(1)
        return change(lambda: original(*arguments, **named), len(steps))

    sync.step = step
    return parts


def weight_flipped(parts: Parts) -> Parts:
    """One element of one weight changes its sign on the last rank after the second step."""

    def change(step: Callable[[], Any], number: int) -> Any:
        result = step()
        if is_last(parts) and number == 2:
            with torch.no_grad():
                parameter_of(parts)[0, 0].neg_()
        return result

    return _around_step(parts, change)


def loss_of_one_rank(parts: Parts) -> Parts:
    """Gradients are right; what is reported is this rank's own loss."""
    own = _Own(parts)

    def change(step: Callable[[], Any], _: int) -> Any:
        mean_loss = torch.tensor(own.loss / max(own.weight, 1.0))
        return replace(step(), mean_loss=mean_loss)

    return _around_step(parts, change)


def statistics_drift(parts: Parts, everywhere: bool) -> Parts:
    """Running statistics drift: on the last rank, as BatchNorm's do unless ranks share them, or on
    all alike."""

    def change(step: Callable[[], Any], _: int) -> Any:
        result = step()
        for name, buffer in parts.model.named_buffers():
            if name.endswith("running_mean") and (everywhere or is_last(parts)):
                buffer.add_(0.1)
        return result

    return _around_step(parts, change)


statistics_of_all = partial(statistics_drift, everywhere=True)
statistics_of_one_rank = partial(statistics_drift, everywhere=False)


def no_meeting(parts: Parts) -> Parts:
    """Ranks that train alone never average their weights."""
    shards: Any = parts.sync.reducer.shards
    shards.synchronize_replicas = lambda: None
    return parts


def meeting_at_rank_0(parts: Parts) -> Parts:
    """Ranks meet, but take rank 0's weights instead of the mean."""
    shards: Any = parts.sync.reducer.shards

    @torch.no_grad()
    def meet() -> None:
        for parameter in shards.parameters:
            parts.comm.broadcast(parameter.data).wait()

    shards.synchronize_replicas = meet
    return parts


# -- hooks and flags ------------------------------------------------------------------------------


def _with_hooks(parts: Parts, act: Callable[[nn.Parameter], None]) -> Parts:
    """Call `act` with what a post-accumulate hook is handed, in a rank's last micro-batch of a
    step; the author trusts the hooks and leaves gradients where they are."""
    reducer: Any = parts.sync.reducer

    def reduce(used: list[bool], divisor: float | None) -> Stopwatch:
        watch = sum_gradients([], [], parts.comm)
        reducer.shards.scale(divisor and 1 / divisor)
        return watch

    reducer.reduce = reduce
    now = SimpleNamespace(last=False)

    @contextmanager
    def micro_step(*, last: bool) -> Iterator[None]:
        now.last = last
        yield

    def hook(handed: nn.Parameter) -> None:
        if now.last:  # ranks have unequal numbers of micro-batches: else they would hang
            with torch.no_grad():
                act(handed)

    # A parameter's hooks keep what they refer to alive for good: they have to be taken out.
    handles = [p.register_post_accumulate_grad_hook(hook) for p in reducer.parameters]
    reducer.close = lambda: [handle.remove() for handle in handles]
    reducer.micro_step = micro_step
    return parts


def hook_averages_the_parameter(parts: Parts) -> Parts:
    """The hook averages what it is handed, which is the parameter and not its gradient: equal
    replicas stay equal for a step, and no gradient is reduced. Known from tutorials."""

    def act(handed: nn.Parameter) -> None:
        parts.comm.all_reduce(handed.data).wait()
        handed.div_(parts.comm.world_size)

    return _with_hooks(parts, act)


def no_sync_after_forward(parts: Parts) -> Parts:
    """Torch DDP's flag set between forward and backward: it takes effect one forward late."""
    reducer: Any = parts.sync.reducer
    sync: Any = parts.sync
    original = sync.backward

    @contextmanager
    def micro_step(*, last: bool) -> Iterator[None]:
        reducer._in_micro_step = True
        yield  # forward and backward; the flag below is set in between
        reducer._in_micro_step = False
        reducer._synchronised = True

    def backward(loss: Tensor, micro_batch: MicroBatch, **named: Any) -> None:
        reducer.ddp.require_backward_grad_sync = micro_batch.is_last
        original(loss, micro_batch, **named)

    reducer.micro_step, sync.backward = micro_step, backward
    sync._refuse_changed = lambda *_, **__: None  # else the sums that DDP replaces are refused
    return parts
