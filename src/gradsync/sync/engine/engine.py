"""The engine: hooks on parameters, flat buckets, and communication while backward still runs.

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    transport         ──[bucket 0]──[bucket 1]── … ──[last]── division, clipping, optimizer

Each trainable parameter has one hook, called when its gradient is ready. The gradient goes into a
flat bucket (`Sums` decides how leaves are added there); when the last leaf has filled a bucket, its
`Transport` starts. Buckets are launched in one order on all ranks, whatever order gradients come
in: a parameter that a rank does not use delays its bucket there until the step's end, and then
contributes zeros. So nothing ever hangs, and nothing stays unsynchronised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.errors import ConfigError
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.engine.plan import BucketPlan, Item, plan_buckets
from gradsync.sync.engine.recipe import Recipe
from gradsync.sync.engine.sums import Sums
from gradsync.sync.engine.transport import Transport
from gradsync.sync.engine.unused import UnusedWarning
from gradsync.sync.reducer import Reducer, Reduction, trainable
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn

MIB = 2**20
_FOLD_ELEMENTS = 65_536
"""Elements at which a bucket's waiting gradients are folded, while they are still in the cache."""


class Engine(Reducer):
    """Reducer for any recipe; made by `gradsync.sync.engine.build`."""

    own_loop = True

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        recipe: Recipe,
        sums: Sums,
        transport: Transport,
    ) -> None:
        super().__init__(model, comm)
        self.recipe = recipe
        self.own_backward: Callable[[nn.Parameter], bool] | None = None
        """Called with a parameter that got a gradient in a backward that `leaf` does not enclose;
        returns whether it is the last backward before the gradients are used."""
        self._names = [name for name, _ in trainable(model)]
        self._sums, self._transport = sums, transport
        # Shards of optimizer state belong to places in buckets: then places must not change.
        self._learning = recipe.grouping == "buckets" and recipe.shard == "none"
        self._ready_order: list[int] = []
        self._watch = Stopwatch(on_cuda=any(p.is_cuda for p in self.parameters))
        self._in_leaf = self._last = self._complete = self._begun = self._priming = False
        self._own_leaf = False
        self._works: list[Work] = []
        # Backward finishes the last layers first.
        self._lay_out(list(reversed(range(len(self.parameters)))))
        # The hooks must not hold `self`, which holds the parameters.
        engine: weakref.ref[Engine] = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook(engine, index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._unused = UnusedWarning(self._names)

    def _lay_out(self, order: list[int]) -> None:
        plans = _plans(self.parameters, order, self.recipe, self.comm.world_size)
        self._order = order
        self.buckets = [Bucket(plan, self.parameters) for plan in plans]
        self._places = [(self.buckets[0], 0)] * len(self.parameters)
        for bucket in self.buckets:
            for place, slot in enumerate(bucket.plan.slots):
                self._places[slot.index] = (bucket, place)

    # -- a leaf -----------------------------------------------------------------------------------

    @contextmanager
    def leaf(self, *, last: bool, index: int | None = None) -> Iterator[None]:
        """See `Reducer.leaf`."""
        self.begin_leaf(last=last, index=index)
        try:
            yield
        finally:
            self._in_leaf = False
        self.end_leaf()

    def begin_leaf(self, *, last: bool, index: int | None = None) -> None:
        """Begin a leaf: gradients that come now belong to it.

        Raises:
            ConfigError: the last leaf of this step is over already.
        """
        if self._complete or self._begun:
            raise ConfigError(
                "a leaf came after the last one of its step: sync.step() was not called in between "
                "(or a leaf before was said to be the last, by leaf= or micro_step, and was not)"
            )
        self._in_leaf, self._last, self._complete = True, last and self.recipe.overlap, last
        for bucket in self.buckets:
            bucket.begin_leaf()
        self._sums.begin_leaf(index)
        if self._last:
            self._begin_transport()

    def end_leaf(self) -> None:
        """End a leaf: all its gradients have come."""
        self._in_leaf = False
        for bucket in self.buckets[len(self._works) :]:
            self._fold(bucket)
            self._sums.end_leaf(bucket)

    def gradient_ready(self, index: int) -> None:
        """Process a gradient; called by the hook of parameter `index`.

        Raises:
            ConfigError: see `_check_gradient`.
        """
        parameter = self.parameters[index]
        if self._priming:
            self._ready_order.append(index)
            parameter.grad = None
            return
        if not self._in_leaf and not self._own_leaf_begins(parameter):
            return
        bucket, slot = self._places[index]
        _check_gradient(self._names[index], parameter, bucket, slot)
        bucket.mark(slot)
        bucket.waiting.append(slot)
        bucket.waiting_elements += bucket.plan.slots[slot].numel
        if bucket.waiting_elements >= _FOLD_ELEMENTS or not bucket.missing:
            self._fold(bucket)
        if self._learning and self._sums.num_leaves == 1:
            self._ready_order.append(index)
        if self._last and bucket.missing == 0:
            self._launch_full()

    def _fold(self, bucket: Bucket) -> None:
        """Accumulate the waiting gradients: small ones together, since calls would cost more than
        the additions."""
        if bucket.waiting:
            self._sums.fold(bucket, bucket.waiting)
            bucket.waiting, bucket.waiting_elements = [], 0

    def _own_leaf_begins(self, parameter: nn.Parameter) -> bool:
        """Begin a leaf in the user's training loop; False under no_sync, where autograd adds up in
        `.grad` and all of it becomes one leaf in the backward that synchronises."""
        if self.own_backward is None or not self.own_backward(parameter):
            return False
        self._own_leaf = True
        self.begin_leaf(last=True)
        return True

    def end_own_leaf(self, *, new: bool) -> None:
        """Accumulate gradients that were in `.grad` before, then end the leaf, if this rank has
        one: a `new` backward, or gradients that the user put there. See `OwnLoop`."""
        waiting = [
            (bucket, slot)
            for parameter, (bucket, slot) in zip(self.parameters, self._places, strict=True)
            if parameter.grad is not None and not bucket.touched[slot]
        ]
        if not new and not waiting:
            return
        if not self._in_leaf and not self._begun:
            self.begin_leaf(last=False)
        for bucket, slot in waiting:
            bucket.mark(slot)
            bucket.waiting.append(slot)
        self.end_leaf()

    def forget(self) -> None:
        """See `Reducer.forget`; a backward that raised may have left a leaf open."""
        self._in_leaf = False
        if not self._begun:
            self._sums.forget()

    # -- communication ----------------------------------------------------------------------------

    def _begin_transport(self) -> None:
        if not self._begun:
            self._begun = True
            self._transport.begin(self._sums)

    def _launch_full(self) -> None:
        """Launch in bucket order, up to the first one that is not full."""
        while len(self._works) < len(self.buckets) and not self.buckets[len(self._works)].missing:
            bucket = self.buckets[len(self._works)]
            if self._own_leaf:
                self.non_finite.look(self._own_sums(bucket), on_cuda=bucket.flat(0).is_cuda)
            self._works.append(self._transport.launch(bucket))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Reducer.named_gradients`."""
        return chain.from_iterable(map(self._own_sums, self.buckets[len(self._works) :]))

    def _own_sums(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        return bucket.named_sums(self._names, self._sums.num_buffers)

    def launch(self) -> list[bool]:
        """See `Reducer.launch`."""
        self._watch.start()
        self._begin_transport()
        for bucket in self.buckets[len(self._works) :]:
            self._clear_untouched(bucket)
            self._works.append(self._transport.launch(bucket))
        return [bucket.touched[slot] for bucket, slot in self._places]

    def _clear_untouched(self, bucket: Bucket) -> None:
        """Zero the slots without a gradient, which still hold the last step's sum."""
        if self._sums.num_buffers == 1:
            for slot, touched in enumerate(bucket.touched):
                if not touched:
                    bucket.view(0, slot).zero_()

    def reduce(self, used: list[bool]) -> Reduction:
        """See `Reducer.reduce`."""
        for work in self._works:
            work.wait()
        self._watch.stop()
        self.publish(used)
        self._begin_step(used)
        return Reduction(divided_by=1, exposed=self._watch.copy())

    def _begin_step(self, used: list[bool]) -> None:
        """Prepare for the next step's gradients, once this step's are summed."""
        if self._sums.num_leaves:
            touched = [bucket.touched[slot] for bucket, slot in self._places]
            self._unused.say(used, touched, self.comm.rank)
        self._works.clear()
        self._begun = self._complete = self._own_leaf = False
        for bucket in self.buckets:
            bucket.begin_step()
        self._sums.begin_step()
        if self._learning:
            self._learn()

    def publish(self, used: list[bool]) -> None:
        """Point `.grad` at the sums; `None` where no rank has a gradient."""
        for parameter, (bucket, slot), any_rank in zip(
            self.parameters, self._places, used, strict=True
        ):
            parameter.grad = bucket.view(0, slot) if any_rank else None

    # -- the order of buckets ---------------------------------------------------------------------

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Learn the order in which gradients become ready; see `Reducer.prime`."""
        if not self._learning:
            return
        self._priming = True
        try:
            forward_backward()
        finally:
            self._priming = False
        self._learn()

    def _learn(self) -> None:
        """Rebuild the buckets in rank 0's order of readiness, once.

        Whole group, int64 [parameters], on the CPU; overlaps nothing. A rank 0 without a leaf has
        no order: then all ranks keep the one they have, and learn from the next step.
        """
        seen = set(self._ready_order)
        rest = [index for index in self._order if index not in seen]
        order = torch.tensor([len(seen), *dict.fromkeys(self._ready_order), *rest])
        self.comm.broadcast(order).wait()
        known, *agreed = order.tolist()
        self._ready_order = []
        if known:
            self._learning = False
            if agreed != self._order:
                self._lay_out(agreed)

    def close(self) -> None:
        """Remove the hooks and end the transport's thread."""
        for handle in self._handles:
            handle.remove()
        self._transport.close()


def _plans(
    parameters: list[nn.Parameter], order: list[int], recipe: Recipe, world_size: int
) -> tuple[BucketPlan, ...]:
    """Group `parameters`, taken in `order`, by the recipe."""
    in_buckets = recipe.grouping == "buckets"
    whole = 0.0 if recipe.grouping == "parameter" else float("inf")
    limit = recipe.bucket_mb * MIB if in_buckets else whole
    items = [
        Item(numel=p.numel(), itemsize=p.element_size(), kind=(p.dtype, p.device))
        for p in parameters
    ]
    return plan_buckets(
        items,
        order,
        bucket_bytes=limit,
        first_bucket_bytes=min(limit, recipe.first_bucket_mb * MIB) if in_buckets else None,
        world_size=world_size,
    )


def _check_gradient(name: str, parameter: nn.Parameter, bucket: Bucket, slot: int) -> None:
    """Raise ConfigError for a gradient that does not fit its slot in the bucket."""
    gradient = parameter.grad
    if bucket.fired[slot]:
        raise ConfigError(
            f"parameter {name!r} got a gradient twice in one backward (activation checkpointing "
            "with use_reentrant=True does that: use use_reentrant=False; so does a second backward "
            "after one that raised: call sync.discard() in between)"
        )
    if gradient is not None and gradient.layout != torch.strided:
        raise ConfigError(
            f"parameter {name!r} has a sparse gradient; build its layer with sparse=False"
        )
    if gradient is not None and gradient.dtype != bucket.dtype:
        raise ConfigError(
            f"parameter {name!r} was {bucket.dtype} when the model was replicated and is "
            f"{gradient.dtype} now: convert the model first, then call gs.replicate"
        )


def gone() -> ConfigError:
    """The error for a gradient of a parameter that outlived its handle."""
    return ConfigError(
        "a parameter got a gradient, but the model that gs.replicate synchronised, and its handle, "
        "are gone: keep the model, or call close() on the handle before letting it go"
    )


def _hook(engine: weakref.ref[Engine], index: int) -> Callable[[torch.Tensor], None]:
    def gradient_is_ready(_: torch.Tensor) -> None:
        alive = engine()
        if alive is None:
            raise gone()
        alive.gradient_ready(index)

    return gradient_is_ready
