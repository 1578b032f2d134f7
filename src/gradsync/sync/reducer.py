"""How a strategy collects and sums gradients, by the phases of a step (step.py).

    collect    `Reducer.micro_batch`, `collect`    hooks put each ready gradient into its place
    reduce     `Reducer.launch`, `reduce`          the slices that a rank owns become global means

A `Reducer` collects and sums; its `shards` (replicas.py) are what a rank owns of the result.
`Engine` is that of gradsync's own strategies: hooks, flat buckets, and sums while backward runs.

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    exchange          ──[bucket 0]──[bucket 1]── … ──[last]── mean, clipping, optimizer

Each trainable parameter has one hook, called when its gradient is ready. The gradient goes into a
flat bucket (`Sums` decides how to add micro-batches). When the last one has filled a bucket, its
`Exchange` starts. All ranks launch buckets in one order, regardless of the order in which gradients
become ready. A parameter that a rank does not use delays its bucket there until the end of the
step, and then contributes zeros. So nothing hangs, and every gradient is synchronised.
"""

from __future__ import annotations

import copy
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import Background, ProcessGroupCommunicator
from gradsync.core.torch_private import foreach_zero_
from gradsync.errors import ConfigError
from gradsync.sync.buckets import FORGOTTEN, Bucket, Sums, TreeSums
from gradsync.sync.layout import Item, plan_buckets
from gradsync.sync.options import Recipe
from gradsync.sync.replicas import Replicas, trainable
from gradsync.sync.shares import local
from gradsync.sync.watch import SMALL, NonFinite, Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("gradsync")

MIB = 2**20
_FOLD_ELEMENTS = 65_536
"""Fold a bucket's waiting gradients at this many elements, while they are still in the cache."""


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
        self.shards = Replicas(model, comm) if shards is None else shards
        self.parameters = self.shards.parameters
        """Trainable parameters, tied ones once, in `named_parameters` order."""
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
        return ((name, local(p.grad)) for name, p in trainable(self.model) if p.grad is not None)

    def gradient_memory(self, *, large: bool) -> list[Tensor]:
        """Memory of `named_gradients`; unless `large`, only with up to `SMALL` elements each."""
        return [g for _, g in self.named_gradients() if large or g.numel() <= SMALL]

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
    """

    own_gradients = user_loop = True

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


class Exchange(ABC):
    """A way to sum full buckets over all ranks, while other buckets fill. All ranks launch the same
    buckets in the same order."""

    made: Sequence[Background | ProcessGroupCommunicator] = ()
    """Threads and groups that end with it, in this order."""

    def begin(self, sums: Sums) -> None:  # noqa: B027  optional
        """Called once per step, before the first launch, when this rank's part is counted."""

    @abstractmethod
    def launch(self, bucket: Bucket, *, half: bool = False) -> Work:
        """Start; after `wait`, `bucket.flat(0)` holds the sum (or this rank's shard of it). With
        `half`, start only the half that gives each rank its shard; for shards `by_halves`."""

    def close(self) -> None:
        """Release threads and memory."""
        for each in self.made:
            each.close()


class Engine(Reducer):
    """Sums buckets for any recipe; made by build.py.

    Args:
        model, comm, shards: see `Reducer`.
        buckets: from `lay_out_buckets`.
        recipe: whether communication overlaps backward, how buckets are grouped, and how this
            rank's micro-batches are added up.
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
        self._sums = TreeSums() if recipe.order == "invariant" else Sums()
        self._learning = learns
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
        for bucket in self.buckets[len(self._works) :]:
            self._sums.fold(bucket, ends=True)

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
            self._begun = True
            self.exchange.begin(self._sums)

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
        fits = gradient is None or (
            gradient.dtype is bucket.dtype and gradient.layout is torch.strided
        )
        if bucket.fired[slot] or not fits:
            raise _unfit(self._names[index], gradient, bucket, slot)
        if self._in_user_loop:
            bucket.keep(slot)
        bucket.mark(slot)
        if bucket.waiting_elements >= _FOLD_ELEMENTS or not bucket.missing:
            self._sums.fold(bucket)
        if self._learning and self._sums.num_micro_batches == 1:
            self._ready_order.append(index)
        if self._last and bucket.missing == 0:
            self._launch_full()

    def collect(self, *, discard: bool, user_loop: bool) -> None:
        self.shards.wait()  # for a step without a micro-batch
        self._in_user_loop = user_loop
        if discard:
            self._in_micro_batch = False
            if not self._begun:
                self._sums.begin_step(FORGOTTEN)  # other ranks see it, and discard theirs too
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
            self._in_micro_batch = False
            for bucket in self.buckets[len(self._works) :]:
                self._sums.fold(bucket, ends=True)

    # -- communication

    def _launch_full(self) -> None:
        """Launch buckets in order, up to the first one that is not full."""
        while len(self._works) < len(self.buckets) and not self.buckets[len(self._works)].missing:
            bucket = self.buckets[len(self._works)]
            on_cuda = bucket.flat(0).is_cuda
            if self.non_finite.is_due(on_cuda=on_cuda):
                large = self._in_user_loop or on_cuda  # no loss shows whether it is finite
                parts = self.gradient_memory([bucket], large=large)
                self.non_finite.look(parts, partial(self.named_gradients, [bucket]))
            # In the user's training loop the whole sum is needed immediately.
            half = self.shards.by_halves and not self._in_user_loop
            self._works.append(self.exchange.launch(bucket, half=half))

    def named_gradients(
        self, buckets: Sequence[Bucket] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's sums in `buckets`; by default in all buckets that are not sent yet."""
        for bucket in self.buckets[len(self._works) :] if buckets is None else buckets:
            for place, slot in enumerate(bucket.plan.slots):
                for number in range(self._sums.num_buffers if bucket.touched[place] else 0):
                    yield self._names[slot.index], bucket.view(number, place)

    def gradient_memory(
        self, buckets: Sequence[Bucket] | None = None, *, large: bool
    ) -> list[Tensor]:
        """Memory of `named_gradients`; see `Reducer.gradient_memory`."""
        left = self.buckets[len(self._works) :] if buckets is None else buckets
        numbers, most = range(self._sums.num_buffers), None if large else SMALL
        return [part for bucket in left for n in numbers for part in bucket.parts(n, most)]

    def launch(self) -> list[bool]:
        self.shards.exposed.start()
        if not self._begun:
            self._begun = True
            self.exchange.begin(self._sums)
        half = self.shards.by_halves and not self._in_user_loop
        for bucket in self.buckets[len(self._works) :]:
            untouched = [place for place, touched in enumerate(bucket.touched) if not touched]
            if untouched and self._sums.num_buffers == 1:  # they hold the last step's sums
                foreach_zero_(bucket.views(0, untouched))
            self._works.append(self.exchange.launch(bucket, half=half))
        return [bucket.touched[slot] for bucket, slot in self._places]

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        for work in self._works:
            work.wait()
        # The only place that divides gradients, by the weight of the sum.
        self.shards.take(self.buckets, used, divisor and 1 / divisor)
        self._begin_step(used)
        return copy.copy(self.shards.exposed)

    def _begin_step(self, used: list[bool]) -> None:
        """Prepare for the next step's gradients, after this step's are summed."""
        if self._sums.num_micro_batches:
            self._warn_of_unused(used)
        self._works.clear()
        self._begun = self._complete = self._in_user_loop = False
        for bucket in self.buckets:
            bucket.touched = [False] * len(bucket.plan.slots)
            bucket.kept.clear()
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


def outside_of_micro_step(strategy: str) -> str:
    """The message about a forward that a strategy was not told of."""
    return (
        f"strategy={strategy!r}: enclose forward and backward of each micro-batch in "
        "`with sync.micro_step(last=micro_batch.is_last, index=micro_batch.index):`"
    )
