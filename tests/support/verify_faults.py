"""Planted mistakes: each takes the parts of a right training loop and returns those of a wrong one.

They act where real programs go wrong: on gradients after they were reduced, on the loader, on
random seeds, on weights, and on torch DDP's synchronisation flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.data.leaf import Leaf
from gradsync.sync.reducer import Stopwatch, sum_gradients, trainable
from gradsync.verify.run import Parts


def _gradients(parts: Parts) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in trainable(parts.model)
        if parameter.grad is not None
    }


def _after_reduce(parts: Parts, change: Callable[[dict[str, Tensor], int], None]) -> Parts:
    """Let `change(gradients before the reduction, calls so far)` act when gradients are global."""
    reducer: Any = parts.sync.reducer
    original, calls = reducer.reduce, []
    prepare = reducer.shards.prepare
    reducer.shards.prepare = lambda *_, **__: prepare([], scaled=False)  # gradients stay whole

    def reduce(used: list[bool], divisor: float | None) -> Stopwatch:
        before = _gradients(parts)
        watch = original(used, 1.0)
        change(before, len(calls))
        calls.append(1)
        reducer.shards.scale(divisor and 1 / divisor)
        return watch

    reducer.reduce = reduce
    return parts


class _Own:
    """This rank's own loss and targets in the step under way."""

    def __init__(self, parts: Parts) -> None:
        self.loss = self.weight = 0.0
        sync: Any = parts.sync
        backward, step = sync.backward, sync.step

        def counted(loss: Tensor, *, leaf: Leaf) -> None:
            self.loss += float(loss.detach())
            self.weight += leaf.num_targets
            backward(loss, leaf=leaf)

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


def one_parameter_not_reduced(parts: Parts) -> Parts:
    """Each rank keeps its own gradient of one weight, times W as if it had been summed."""
    parameter = dict(parts.model.named_parameters())["head.weight"]

    def change(before: dict[str, Tensor], _: int) -> None:
        parameter.grad = before.get("head.weight", torch.zeros_like(parameter))
        parameter.grad.mul_(parts.comm.world_size)

    return _after_reduce(parts, change)


def divided_twice(parts: Parts) -> Parts:
    """By the number of ranks, although the sum is divided by the number of targets later."""

    def change(_: dict[str, Tensor], __: int) -> None:
        for parameter in parts.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parts.comm.world_size)

    return _after_reduce(parts, change)


def divided_by_the_local_count(parts: Parts) -> Parts:
    """Each rank divides the global sum by its own targets."""
    own = _Own(parts)

    def change(_: dict[str, Tensor], __: int) -> None:
        total, _busy = own.total_and_busy(parts)
        for parameter in parts.model.parameters():
            if parameter.grad is not None and own.weight:
                parameter.grad.mul_(total / own.weight)

    return _after_reduce(parts, change)


def mean_of_means(parts: Parts) -> Parts:
    """Each rank divides its own sum by its own targets, and the means are averaged: as DDP does
    with `loss.mean()` on leaves of unequal weight."""
    own = _Own(parts)
    reducer: Any = parts.sync.reducer
    original = reducer.reduce

    def reduce(used: list[bool], divisor: float | None) -> Stopwatch:
        total, busy = own.total_and_busy(parts)
        for parameter in parts.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(total / max(own.weight, 1.0) / busy)
        return original(used, divisor)

    reducer.reduce = reduce
    return parts


class _Leaves:
    """A loader whose steps give other leaves."""

    def __init__(self, source: Any, change: Callable[[list[Leaf]], list[Leaf]]) -> None:
        self._source, self._change = source, change

    def __iter__(self) -> Iterator[Any]:
        for step in self._source:
            leaves = self._change(list(step))
            yield _Step(step.number, leaves)

    def state_dict(self) -> Any:
        return self._source.state_dict()


class _Step:
    def __init__(self, number: int, leaves: list[Leaf]) -> None:
        self.number, self._leaves = number, leaves

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._leaves)


def leaf_dropped(parts: Parts) -> Parts:
    """The last rank leaves out the first of its leaves, as `drop_last` may."""

    def change(leaves: list[Leaf]) -> list[Leaf]:
        return leaves[1:] if parts.comm.rank == parts.comm.world_size - 1 else leaves

    return replace(parts, loader=_Leaves(parts.loader, change))


def sample_duplicated(parts: Parts) -> Parts:
    """The last rank sees the first sample of each leaf twice, as a padding sampler does."""

    def twice(leaf: Leaf) -> Leaf:
        inputs, targets = (tensor.clone() for tensor in leaf.batch)
        inputs[-1], targets[-1] = inputs[0], targets[0]
        return replace(leaf, batch=[inputs, targets])

    def change(leaves: list[Leaf]) -> list[Leaf]:
        last = parts.comm.rank == parts.comm.world_size - 1
        return [twice(leaf) for leaf in leaves] if last else leaves

    return replace(parts, loader=_Leaves(parts.loader, change))


def leaf_lost_in_backward(parts: Parts) -> Parts:
    """Gradients of rank 0's first leaf are cleared: a `zero_grad` in the wrong place."""
    sync: Any = parts.sync
    original, seen = sync.backward, []

    def backward(loss: Tensor, *, leaf: Leaf) -> None:
        original(loss, leaf=leaf)
        if parts.comm.rank == 0 and leaf.index == 0 and leaf.step not in seen:
            seen.append(leaf.step)
            parts.model.zero_grad()

    sync.backward = backward
    return parts


def stale_bucket(parts: Parts) -> Parts:
    """One parameter gets the reduced gradient of the step before, as a bucket that was read too
    early."""
    parameter = dict(parts.model.named_parameters())["head.weight"]
    kept: list[Tensor] = []

    def change(_: dict[str, Tensor], call: int) -> None:
        assert parameter.grad is not None
        kept.append(parameter.grad.clone())
        if call:
            parameter.grad.copy_(kept[-2])

    return _after_reduce(parts, change)


def rank_seeded_dropout(parts: Parts) -> Parts:
    """Every rank draws its dropout from a stream of its own."""

    def seed(base: int, step: int, leaf: int) -> None:
        torch.manual_seed(1000 * parts.comm.rank + step)

    return replace(parts, seed_leaf=seed)


def hidden_dropout(parts: Parts) -> Parts:
    """The model seeds by rank inside of its forward, where no loop can see it."""

    def seed(*_: Any) -> None:
        torch.manual_seed(1000 * parts.comm.rank)

    parts.model.register_forward_pre_hook(seed)
    return parts


def weight_flipped(parts: Parts) -> Parts:
    """One element of one weight changes its sign on the last rank after the second step."""
    sync: Any = parts.sync
    original, steps = sync.step, []

    def step(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        steps.append(1)
        if parts.comm.rank == parts.comm.world_size - 1 and len(steps) == 2:
            with torch.no_grad():
                dict(parts.model.named_parameters())["head.weight"][0, 0].neg_()
        return result

    sync.step = step
    return parts


def start_not_shared(parts: Parts) -> Parts:
    """Rank 1 begins with other weights."""
    if parts.comm.rank == 1:
        with torch.no_grad():
            dict(parts.model.named_parameters())["head.bias"].add_(0.5)
    return parts


def _with_hooks(parts: Parts, act: Callable[[nn.Parameter], None]) -> Parts:
    """Call `act` with what a post-accumulate hook is handed, in a rank's last leaf of a step; the
    author trusts the hooks and leaves gradients where they are."""
    reducer: Any = parts.sync.reducer

    def reduce(used: list[bool], divisor: float | None) -> Stopwatch:
        watch = sum_gradients([], [], parts.comm)
        reducer.shards.scale(divisor and 1 / divisor)
        return watch

    reducer.reduce = reduce
    last_leaf: list[bool] = []

    @contextmanager
    def micro_step(*, last: bool) -> Iterator[None]:
        last_leaf[:] = [last]
        yield

    def hook(handed: nn.Parameter) -> None:
        if last_leaf == [True]:  # ranks have unequal numbers of leaves: else they would hang
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


def hook_adds_the_parameter(parts: Parts) -> Parts:
    """The same hook without the division: weights are multiplied by W in each step."""
    return _with_hooks(parts, lambda handed: parts.comm.all_reduce(handed.data).wait())


def no_sync_after_forward(parts: Parts) -> Parts:
    """Torch DDP's flag set between forward and backward: it takes effect one forward late."""
    reducer: Any = parts.sync.reducer
    ddp = reducer.ddp

    @contextmanager
    def micro_step(*, last: bool) -> Iterator[None]:
        reducer._in_micro_step = True
        yield  # forward and backward; the flag below is set in between
        reducer._in_micro_step = False
        reducer._synchronised = True

    reducer.micro_step = micro_step
    sync: Any = parts.sync
    original = sync.backward

    def backward(loss: Tensor, *, leaf: Leaf) -> None:
        ddp.require_backward_grad_sync = leaf.is_last
        original(loss, leaf=leaf)

    sync.backward = backward
    return parts


def rounded_to_bf16(parts: Parts) -> Parts:
    """Gradients pass through bf16 on their way, although nobody said so."""

    def change(_: dict[str, Tensor], __: int) -> None:
        for parameter in parts.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())

    return _after_reduce(parts, change)


def learning_rate_of_all(parts: Parts) -> Parts:
    """The optimizer of every rank has other settings than it should."""
    parts.optimizer.param_groups[0]["lr"] *= 1.001
    return parts


def sign_flipped(parts: Parts) -> Parts:
    """One gradient has the wrong sign on all ranks: its norm is right."""

    def change(_: dict[str, Tensor], __: int) -> None:
        gradient = dict(parts.model.named_parameters())["head.bias"].grad
        assert gradient is not None
        gradient.neg_()

    return _after_reduce(parts, change)


def gradients_negated(parts: Parts) -> Parts:
    """Every gradient has the wrong sign on all ranks."""

    def change(_: dict[str, Tensor], __: int) -> None:
        for parameter in parts.model.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()

    return _after_reduce(parts, change)


def synced_batch_norm(parts: Parts) -> Parts:
    """Nothing is planted: the test asks for BatchNorm over all ranks, which no one rank has."""
    return parts


def promised_bitwise(parts: Parts) -> Parts:
    """Nothing is wrong here but the promise, which the test changes."""
    return parts


def loss_of_one_rank(parts: Parts) -> Parts:
    """Gradients are right; what is reported is this rank's own loss."""
    own = _Own(parts)
    sync: Any = parts.sync
    original = sync.step

    def step(*arguments: Any, **named: Any) -> Any:
        mean_loss = torch.tensor(own.loss / max(own.weight, 1.0))
        return replace(original(*arguments, **named), mean_loss=mean_loss)

    sync.step = step
    return parts


def statistics_of_all(parts: Parts) -> Parts:
    """Running statistics drift on all ranks alike."""
    return _drifting(parts, range(parts.comm.world_size))


def other_learning_rate(parts: Parts) -> Parts:
    """The optimizer of one rank has other settings."""
    if parts.comm.rank == 0:
        parts.optimizer.param_groups[0]["lr"] *= 2
    return parts


def no_meeting(parts: Parts) -> Parts:
    """Ranks that train alone never average their weights."""
    shards: Any = parts.sync.reducer.shards
    shards.meet = lambda: None
    return parts


def meeting_at_rank_0(parts: Parts) -> Parts:
    """Ranks meet, but take rank 0's weights instead of the mean."""
    shards: Any = parts.sync.reducer.shards

    def meet() -> None:
        with torch.no_grad():
            for parameter in shards.parameters:
                parts.comm.broadcast(parameter.data).wait()

    shards.meet = meet
    return parts


def momentum_lost(parts: Parts) -> Parts:
    """After loading a checkpoint, the optimizer begins anew."""
    parts.optimizer.state.clear()
    return parts


def statistics_of_one_rank(parts: Parts) -> Parts:
    """The last rank's running statistics drift, as BatchNorm's do where nobody shares them."""
    return _drifting(parts, [parts.comm.world_size - 1])


def _drifting(parts: Parts, ranks: Sequence[int]) -> Parts:
    sync: Any = parts.sync
    original = sync.step

    def step(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if parts.comm.rank in ranks:
            for name, buffer in parts.model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.add_(0.1)
        return result

    sync.step = step
    return parts
