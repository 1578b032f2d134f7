"""The collector of gradsync's own strategies: hooks, flat buckets, and sums while backward runs.

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    exchange          ──[bucket 0]──[bucket 1]── … ──[last]── mean, clipping, optimizer

Each trainable parameter has one hook, called when its gradient is ready. The gradient goes into a
flat bucket (`Sums` decides how to add micro-batches). When the last one has filled a bucket, its
`Exchange` starts. All ranks launch buckets in one order, regardless of the order in which gradients
become ready. A parameter that a rank does not use delays its bucket there until the end of the
step, and then contributes zeros. So nothing hangs, and every gradient is synchronised.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.core.torch_private import foreach_zero_
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket, Sums
from gradsync.sync.exchange import Exchange
from gradsync.sync.layout import Item, plan_buckets
from gradsync.sync.monitors import SMALL, Stopwatch
from gradsync.sync.options import Recipe
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.replicas import Replicas

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("gradsync")

MIB = 2**20
_FOLD_ELEMENTS = 65_536
"""Fold a bucket's waiting gradients at this many elements, while they are still in the cache."""


class Engine(Reducer):
    """Sums buckets for any recipe; made by build.py.

    Args:
        model, comm, shards: see `Reducer`.
        buckets: from `lay_out_buckets`.
        recipe: whether communication overlaps backward, and how buckets are grouped.
        sums: adds up this rank's micro-batches.
        exchange: sums buckets over ranks.
        learns: lay out buckets again once the order in which gradients become ready is known.
        user_loop: whether it supports the user's training loop.
        strategy: see `Reducer`.
    """

    own_gradients = True

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        buckets: list[Bucket],
        *,
        recipe: Recipe,
        sums: Sums,
        exchange: Exchange,
        shards: Replicas | None = None,
        learns: bool = False,
        user_loop: bool = True,
        strategy: str = "",
    ) -> None:
        super().__init__(model, comm, shards, strategy=strategy)
        self.recipe, self.exchange, self.user_loop = recipe, exchange, user_loop
        self._on_gradient: Callable[[nn.Parameter], bool] | None = None
        self._names = [name for name, _ in trainable(model)]
        self._sums, self._learning = sums, learns
        self._ready_order: list[int] = []
        self._in_micro_batch = self._last = self._complete = self._begun = self._priming = False
        self._in_user_loop = False
        self._works: list[Work] = []
        self._use(buckets)
        # The hooks must not hold `self`, because it holds the parameters.
        engine: weakref.ref[Engine] = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook(engine, index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._said_unused: set[str] = set()

    def _use(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._places = [(buckets[0], 0)] * len(self.parameters)
        for bucket in buckets:
            for place, slot in enumerate(bucket.plan.slots):
                self._places[slot.index] = (bucket, place)

    def watch(self, on_gradient: Callable[[nn.Parameter], bool]) -> list[Any]:
        self._on_gradient = on_gradient
        return []

    # -- a micro-batch

    @contextmanager
    def micro_batch(self, *, last: bool, index: int | None = None) -> Generator[None]:
        self._begin_micro_batch(last=last, index=index)
        try:
            yield
        finally:
            self._in_micro_batch = False
        self._end_micro_batch()

    def _begin_micro_batch(self, *, last: bool, index: int | None = None) -> None:
        """Begin a micro-batch; gradients that arrive from now on belong to it."""
        self.shards.wait()  # until then buckets hold what weights are updated with
        if self._complete or self._begun:
            raise ConfigError(
                "a micro-batch came after the last one of its step: sync.step() was not called in "
                "between (or a micro-batch before was said to be the last, by micro_batch= or "
                "micro_step, and was not)"
            )
        self._sums.begin_micro_batch(index)
        self._in_micro_batch, self._complete = True, last
        self._last = last and self.recipe.overlap
        for bucket in self.buckets:
            bucket.begin_micro_batch()
        if self._last:
            self._begin_exchange()

    def _end_micro_batch(self) -> None:
        """End a micro-batch; all its gradients have arrived."""
        self._in_micro_batch = False
        for bucket in self.buckets[len(self._works) :]:
            self._fold(bucket)
            self._sums.end_micro_batch(bucket)

    def gradient_ready(self, index: int) -> None:
        """Process a gradient; called by the hook of parameter `index`."""
        parameter = self.parameters[index]
        if self._priming:
            self._ready_order.append(index)
            parameter.grad = None
            return
        if not self._in_micro_batch:
            # In the user's loop a synchronising backward begins a micro-batch. Under no_sync
            # autograd adds up in `.grad`, and the next such backward takes all of it.
            if self._on_gradient is None or not self._on_gradient(parameter):
                return
            self._in_user_loop = True
            self._begin_micro_batch(last=True)
        bucket, slot = self._places[index]
        gradient = parameter.grad
        if bucket.fired[slot] or (gradient is not None and not bucket.fits(gradient)):
            raise _unfit(self._names[index], gradient, bucket, slot)
        if self._in_user_loop:
            bucket.keep(slot)
        bucket.mark(slot)
        if bucket.waiting_elements >= _FOLD_ELEMENTS or not bucket.missing:
            self._fold(bucket)
        if self._learning and self._sums.num_micro_batches == 1:
            self._ready_order.append(index)
        if self._last and bucket.missing == 0:
            self._launch_full()

    def _fold(self, bucket: Bucket) -> None:
        """Accumulate the waiting gradients, small ones in one call."""
        if bucket.waiting:
            self._sums.fold(bucket, bucket.waiting)
            bucket.waiting, bucket.waiting_elements = [], 0

    def collect(self, *, discard: bool, user_loop: bool) -> None:
        self.shards.wait()  # for a step without a micro-batch
        self._in_user_loop = user_loop
        if discard:
            self._in_micro_batch = False
            if not self._begun:
                self._sums.forget()
        elif user_loop:
            self._collect_what_is_left()

    def _collect_what_is_left(self) -> None:
        """End the micro-batch of the user's loop, with gradients that were in `.grad` before
        backward, or that the user put there without one."""
        left = [
            (bucket, slot)
            for parameter, (bucket, slot) in zip(self.parameters, self._places, strict=True)
            if parameter.grad is not None and not bucket.touched[slot]
        ]
        if left and not self._in_micro_batch and not self._begun:
            self._begin_micro_batch(last=False)
        for bucket, slot in left:
            bucket.keep(slot)
            bucket.mark(slot)
        if left or self._in_micro_batch or self._begun:
            self._end_micro_batch()

    # -- communication

    def _begin_exchange(self) -> None:
        if not self._begun:
            self._begun = True
            self.exchange.begin(self._sums)

    def _launch_full(self) -> None:
        """Launch buckets in order, up to the first one that is not full."""
        while len(self._works) < len(self.buckets) and not self.buckets[len(self._works)].missing:
            bucket = self.buckets[len(self._works)]
            on_cuda = bucket.flat(0).is_cuda
            if self.non_finite.is_due(on_cuda=on_cuda):
                large = self._in_user_loop or on_cuda  # no loss shows whether it is finite
                parts = self._memory_of(bucket, large=large)
                self.non_finite.look(parts, partial(self._own_sums, bucket))
            self._works.append(self._launched(bucket))

    def _launched(self, bucket: Bucket) -> Work:
        """Launch a bucket; in the user's training loop the whole sum is needed immediately."""
        by_halves = self.shards.by_halves and not self._in_user_loop
        return (self.exchange.launch_half if by_halves else self.exchange.launch)(bucket)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return chain.from_iterable(map(self._own_sums, self.buckets[len(self._works) :]))

    def gradient_memory(self, *, large: bool) -> list[Tensor]:
        left = self.buckets[len(self._works) :]
        return [part for bucket in left for part in self._memory_of(bucket, large=large)]

    def _own_sums(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        for place, slot in enumerate(bucket.plan.slots):
            for number in range(self._sums.num_buffers if bucket.touched[place] else 0):
                yield self._names[slot.index], bucket.view(number, place)

    def _memory_of(self, bucket: Bucket, *, large: bool) -> list[Tensor]:
        numbers = range(self._sums.num_buffers)
        return [part for n in numbers for part in bucket.parts(n, None if large else SMALL)]

    def launch(self) -> list[bool]:
        self.shards.exposed.start()
        self._begin_exchange()
        for bucket in self.buckets[len(self._works) :]:
            untouched = [place for place, touched in enumerate(bucket.touched) if not touched]
            if untouched and self._sums.num_buffers == 1:  # they hold the last step's sums
                foreach_zero_(bucket.views(0, untouched))
            self._works.append(self._launched(bucket))
        return [bucket.touched[slot] for bucket, slot in self._places]

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        for work in self._works:
            work.wait()
        # The only place that divides gradients, by the weight of the sum.
        self.shards.take(self.buckets, used, divisor and 1 / divisor)
        self._begin_step(used)
        return self.shards.exposed.copy()

    def _begin_step(self, used: list[bool]) -> None:
        """Prepare for the next step's gradients, after this step's are summed."""
        if self._sums.num_micro_batches:
            self._warn_of_unused(used)
        self._works.clear()
        self._begun = self._complete = self._in_user_loop = False
        for bucket in self.buckets:
            bucket.begin_step()
        self._sums.begin_step()
        if self._learning:
            self._learn()

    def _warn_of_unused(self, used: list[bool]) -> None:
        """Warn once of each parameter with a gradient on some rank, but not on this one."""
        places = zip(self._names, used, self._places, strict=True)
        unused = [name for name, any_rank, (b, slot) in places if any_rank and not b.touched[slot]]
        if found := [name for name in unused if name not in self._said_unused]:
            self._said_unused.update(found)
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            log.warning(
                "parameter %r%s got no gradient on rank %d in this step, but did on another one; "
                "here that counts as zeros (said once)",
                *(found[0], more, self.comm.rank),
            )

    # -- the order of buckets

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

        Whole group, int64 [parameters], on the CPU; overlaps nothing. If rank 0 has no micro-batch,
        it has no order: then all ranks keep their current order, and learn from the next step.
        """
        seen = set(self._ready_order)
        present = [slot.index for bucket in self.buckets for slot in bucket.plan.slots]
        rest = [index for index in present if index not in seen]
        order = torch.tensor([len(seen), *dict.fromkeys(self._ready_order), *rest])
        self.comm.broadcast(order).wait()
        known, *agreed = order.tolist()
        self._ready_order, self._learning = [], not known
        if known and agreed != present:
            how = self.parameters, self.recipe, self.comm.world_size, agreed
            self._use(lay_out_buckets(*how))

    def close(self) -> None:
        """Remove the hooks and end the transport's thread."""
        for handle in self._handles:
            handle.remove()
        self.exchange.close()
        self.shards.close()


def lay_out_buckets(
    parameters: list[nn.Parameter],
    recipe: Recipe,
    world_size: int,
    order: Sequence[int] | None = None,
) -> list[Bucket]:
    """Group `parameters` as the recipe says, in an `order` of their indices; None begins with the
    last, as backward finishes them."""
    in_buckets = recipe.grouping == "buckets"
    limit = 0.0 if recipe.grouping == "parameter" else float("inf")
    if in_buckets:
        limit = recipe.bucket_size_mb(parameters[0].device.type) * MIB
    items = [
        Item(numel=p.numel(), itemsize=p.element_size(), kind=(p.dtype, p.device))
        for p in parameters
    ]
    plans = plan_buckets(
        items,
        list(reversed(range(len(items)))) if order is None else order,
        bucket_bytes=limit,
        first_bucket_bytes=min(limit, recipe.first_bucket_mb * MIB) if in_buckets else None,
        world_size=world_size,
    )
    node_dtype = None if recipe.node_dtype is None else torch.bfloat16
    return [Bucket(plan, parameters, node_dtype, number=n) for n, plan in enumerate(plans)]


def _unfit(name: str, gradient: Tensor | None, bucket: Bucket, slot: int) -> ConfigError:
    if bucket.fired[slot] or gradient is None:
        return ConfigError(
            f"parameter {name!r} got a gradient twice in one backward (activation checkpointing "
            "with use_reentrant=True does that: use use_reentrant=False; so does a second backward "
            "after one that raised: call sync.discard() in between)"
        )
    if gradient.layout != torch.strided:
        return ConfigError(
            f"parameter {name!r} has a sparse gradient; build its layer with sparse=False"
        )
    return ConfigError(
        f"parameter {name!r} was {bucket.dtype} when the model was replicated and is "
        f"{gradient.dtype} now: convert the model first, then call gs.replicate"
    )


def gone() -> ConfigError:
    """The error for a gradient of a parameter that outlives its handle."""
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
