"""The step of ranks that share memory. Each rank adds gradients and updates weights in its share.

    backward    every rank fills its own buffers, nothing is sent
    agree       the step's small message; after it all buffers are full
    reduce      each rank: add up its share over all ranks' buffers, divide, take its blocks' norms
    clip        the norms of all ranks' blocks, added in parameter order; scale own share
    update      each rank: the optimizer on its share of the weights
    publish     write own share into the other ranks' replicas; meet

Additions, division, norm and optimizer run once per host instead of once per rank. With one core
per rank, communication during backward would gain nothing: there is no message to wait for, only
additions, and the core that would do them is busy.

In the user's training loop, and if the optimizer is not elementwise, every rank needs the whole
gradient in its `.grad`. Then the same additions are written into all ranks' buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.profiler import record_function

from gradsync.comm.base import Work
from gradsync.comm.process_group import Done, Then
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator, reduce_in_place
from gradsync.core.torch_private import foreach_mul_
from gradsync.errors import ConfigError
from gradsync.runtime.gloo_group import wait_until_workers_sleep
from gradsync.sync.buckets import FORGOTTEN, UNKNOWN, Bucket, SumPlan, Sums, plan_sum
from gradsync.sync.layout import BLOCK, Run
from gradsync.sync.options import Recipe
from gradsync.sync.ownership.elementwise import why_whole
from gradsync.sync.ownership.host_memory import Flat, HostUpdate, SharedWeights, can_move, num_uses
from gradsync.sync.reducer import Exchange
from gradsync.sync.replicas import (
    Replicas,
    clip_factor,
    norms_of_blocks,
    owned_update,
    tell,
    total_norm,
)
from gradsync.sync.step_metadata import options
from gradsync.sync.watch import why_not_now

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")


class BlockNorms:
    """Norms of the blocks of `parameters`, in this order, in memory that a host's ranks share; see
    [Note: Fixed blocks] in replicas.py."""

    def __init__(
        self, comm: SharedMemoryCommunicator, flats: Sequence[Flat], parameters: Sequence[Tensor]
    ) -> None:
        *firsts, count = accumulate((-(-p.numel() // BLOCK) for p in parameters), initial=0)
        self.norms = comm.allocate_once(max(count, 1), torch.float64)
        """Of all blocks in order, as soon as all ranks have stored theirs."""
        self._places = {
            (number, run.start): torch.tensor([firsts[b.index] + b.number for b in run.blocks])
            for number, flat in enumerate(flats)
            for run in flat.runs
        }
        self._blocks: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}

    def take(self, flat: int, run: Run, gradient: Tensor) -> None:
        """Store the norms of a run's blocks; `gradient` is the whole flat buffer number `flat`."""
        key, place = (flat, run.start), gradient.data_ptr()
        if key not in self._blocks or self._blocks[key][0] != place:
            blocks = [gradient[block.start : block.stop] for block in run.blocks]
            self._blocks[key] = place, blocks  # usually the same memory in every step
        self.norms.index_copy_(0, self._places[key], norms_of_blocks(self._blocks[key][1]))


class SharedMemoryExchange(Exchange):
    """Sums in memory that all ranks see.

    Nothing happens during backward, so the recipe must not request overlap. The additions, and so
    the bits, are those of `TreeExchange`, which uses messages.

    Args:
        comm: the ranks of the host.
        buckets: their buffers move into shared memory.
        along_tree: sum along the tree over leaves; False adds one buffer per rank.

    Raises:
        SharedMemoryError: on all ranks, if there is too little memory.
    """

    def __init__(
        self, comm: SharedMemoryCommunicator, buckets: Sequence[Bucket], *, along_tree: bool
    ) -> None:
        self.comm, self._along_tree = comm, along_tree
        by_dtype: dict[torch.dtype, list[Bucket]] = {}
        for bucket in buckets:
            by_dtype.setdefault(bucket.dtype, []).append(bucket)
        self.flats = [Flat(comm, group) for group in by_dtype.values()]
        for flat in self.flats:
            flat.ensure(1)
        self.divided = False
        """Whether every rank needs the sum of its share only; set before the first launch."""
        self.plan: SumPlan | None = None
        """The additions of this step; None if it is discarded."""
        self.operands: list[list[Tensor]] = []
        """The buffers of each flat that the step adds up, each [flat.numel], in the same memory on
        all ranks."""
        self._told: list[tuple[int, int]] = []
        self._known: SumPlan | None = None
        self._begun = False

    def begin(self, sums: Sums) -> None:
        """See `Exchange.begin`; other ranks read this after the step's message."""
        first = UNKNOWN if sums.first_index is None else sums.first_index
        self.comm.flags.note([sums.num_micro_batches, first, self.divided])
        self._begun = True

    def launch(self, bucket: Bucket, *, half: bool = False) -> Work:
        """See `Exchange.launch`; the first `wait` sums all buckets."""
        return Then(Done(), self._sum)

    def _sum(self) -> None:
        """Plan this step's additions. Execute them unless the step is divided: see `operands`."""
        if not self._begun:
            return
        self._begun, self.plan, self.operands = False, None, []
        notes = self.comm.flags.notes(3)
        told = [(leaves, first) for leaves, first, _ in notes]
        if any(first == FORGOTTEN for _, first in told):
            return
        # Whole on all ranks if it is whole on one, whose hooks may look at gradients.
        self.divided = all(divided for _, _, divided in notes)
        if self._known is None or told != self._told:
            one_each = [(1, UNKNOWN)] * len(told)
            self._known, self._told = plan_sum(told if self._along_tree else one_each), told
        self.plan = self._known
        for flat in self.flats:
            flat.ensure(self.plan.num_buffers)
            self.operands.append([flat.gradients[n][rank] for rank, n in self.plan.operands])
        if not self.divided:
            # All ranks of the host, every bucket, each [numel] of its dtype; overlaps nothing.
            with record_function("sum"):
                what = "the sum of gradients that every rank sees whole"
                self.comm.run(partial(self._add_whole, self.plan), what).wait()

    def _add_whole(self, plan: SumPlan) -> None:
        """Add up this rank's share, and write the sum into all ranks' buffers."""
        for flat, operands in zip(self.flats, self.operands, strict=True):
            copies = [part[flat.mine] for part in flat.gradients[0]]
            own = [part[flat.mine] for part in operands]
            reduce_in_place(own, plan.pairs, plan.end, copies)


class SharedMemoryShards(Replicas):
    """A share of the gradients, weights and optimizer state that a host's ranks hold once.

    Args:
        model: see `Replicas`.
        exchange: holds the memory of the gradients.
        recipe: whether updates are divided, and whether weights are held once or as replicas.

    Raises:
        ConfigError: weights='shared' for parameters that cannot move.
    """

    def __init__(self, model: nn.Module, exchange: SharedMemoryExchange, recipe: Recipe) -> None:
        super().__init__(model, exchange.comm)
        self._exchange, self._comm, self._flats = exchange, exchange.comm, exchange.flats
        self._one_copy, self._update_whole = recipe.weights == "shared", recipe.update == "whole"
        self._norms = BlockNorms(self._comm, self._flats, self.parameters)
        self._weights: list[SharedWeights] = []
        """Empty if weights cannot move; then updates are whole."""
        if self._all_can_move():
            self._weights = [
                SharedWeights(flat, self.parameters, one_copy=self._one_copy)
                for flat in self._flats
            ]
        elif self._one_copy:
            raise ConfigError(
                "weights='shared' needs parameters that are dense, contiguous and share their "
                "memory with no other tensor or array; use weights='replicas'"
            )
        self._updates: WeakKeyDictionary[Optimizer, tuple[Any, HostUpdate]] = WeakKeyDictionary()
        self._stepped: Sequence[Optimizer] = ()
        """Optimizers whose update is not published yet."""
        self._said = self._clips = False
        self._used: Sequence[bool] = ()

    def _all_can_move(self, *, again: bool = True) -> bool:
        """Whether parameters can move on every rank: on one, a script may hold an array of them."""
        found = torch.tensor([all(map(can_move, self.parameters))], dtype=torch.int64)
        self._comm.all_reduce(found, "min").wait()  # the host's ranks, int64 [1], blocking
        if found or not again:
            return bool(found)
        wait_until_workers_sleep()  # one of Gloo's may still hold a weight after its broadcast
        return self._all_can_move(again=False)

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """See `Replicas.prepare`; one optimizer that needs whole gradients makes the step whole."""
        why = "a GradScaler looks at the whole gradient" if scaled else self._why_whole(optimizers)
        self._exchange.divided = not why
        if why:
            self._release()  # the user's training loop may run whole optimizers next
            if self._one_copy:
                raise ConfigError(f"weights='shared': {why}; use 'replicas'")

    def _why_whole(self, optimizers: Sequence[Optimizer]) -> str:
        """Reason why this step must be whole, "" if it may be divided."""
        if not optimizers:
            return "the user's training loop reads .grad"
        if self._update_whole:
            why = "update='whole'"
        elif not self._weights:
            why = "something else refers to parameters' memory, or they are not contiguous"
        else:
            new = [optimizer for optimizer in optimizers if optimizer not in self._updates]
            now = [*map(why_not_now, optimizers), *(home.why_not_now() for home in self._weights)]
            why = next(filter(None, now), "") or why_whole(new, self.parameters)
        if why and not self._said and self._comm.rank == 0:
            log.info("every rank updates all weights: %s", why)
        self._said = self._said or bool(why)
        return why

    def take(self, buckets: Sequence[Bucket], used: Sequence[bool], factor: float | None) -> None:
        """See `Replicas.take`. A divided step does the additions here, run by run, together with
        the division and the norms, while a run is in the cache."""
        if self._exchange.plan is not None and not self._exchange.divided:
            self._release()
            super().take(buckets, used, factor)
            return
        self._used = used
        for parameter in self.parameters:
            parameter.grad = None
        if factor is not None and self._exchange.plan is not None:
            # All ranks of the host, every bucket, each [numel] of its dtype; overlaps nothing.
            share = partial(self._mean, self._exchange.plan, factor)
            with record_function("sum"):
                self._comm.run(share, "the mean of gradients, a share per rank").wait()
        self.exposed.stop()

    def _mean(self, plan: SumPlan, factor: float) -> None:
        flats = zip(self._flats, self._exchange.operands, strict=True)
        for number, (flat, operands) in enumerate(flats):
            for run in flat.runs:
                parts = [operand[run.start : run.stop] for operand in operands]
                for left, right in plan.pairs:
                    parts[left].add_(parts[right])
                # As in `Replicas.scale`, which rounds the factor to 16 bits; mul_ does not.
                foreach_mul_([parts[plan.end]], factor)
                if self._clips:
                    self._norms.take(number, run, operands[plan.end])

    def _means(self) -> list[Tensor]:
        """The mean gradient of each flat, [flat.numel], in the same memory on all ranks."""
        assert self._exchange.plan is not None, "not discarded"
        return [operands[self._exchange.plan.end] for operands in self._exchange.operands]

    def owned(self) -> list[Tensor]:
        """See `Replicas.owned`; in a divided step, this rank's share of each flat."""
        if not self._exchange.divided:
            return super().owned()
        return [mean[flat.mine] for flat, mean in zip(self._flats, self._means(), strict=True)]

    def whole_gradients(self) -> list[Tensor | None]:
        found = super().whole_gradients()
        if self._exchange.divided:
            self._comm.barrier()  # all ranks have scaled their share
            for flat, mean in zip(self._flats, self._means(), strict=True):
                for slot in flat.slots:
                    if self._used[slot.index]:
                        part = mean[slot.offset : slot.offset + slot.numel]
                        found[slot.index] = part.view(self.parameters[slot.index].shape)
        return found

    def clip(self, max_norm: float) -> Tensor:
        if not self._exchange.divided:
            return super().clip(max_norm)
        if not self._clips:  # the first step that clips
            self._clips = True
            self._comm.run(self._take_norms, "the norm of a mean, a share per rank").wait()
        norm = total_norm(self._norms.norms, self.parameters, self._used)
        factor = clip_factor(norm, max_norm)
        if float(factor) != 1.0:
            for flat, mean in zip(self._flats, self._means(), strict=True):
                for run in flat.runs:
                    mean[run.start : run.stop].mul_(factor)
        return norm

    def _take_norms(self) -> None:
        for number, (flat, mean) in enumerate(zip(self._flats, self._means(), strict=True)):
            for run in flat.runs:
                self._norms.take(number, run, mean)

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        if not self._exchange.divided:
            super().update(optimizers)
            return
        pairs = [(optimizer, self._update_of(optimizer)) for optimizer in optimizers]
        for optimizer, update in pairs:
            update.take_in(optimizer)
        for home in self._weights:
            home.check()
        self._comm.barrier()  # until then, ranks that read weights or state find the old ones
        means = self._means()
        with record_function("update"):
            for optimizer, update in pairs:
                update.step_pieces(optimizer, means, self._used)
        self._stepped = optimizers

    def _update_of(self, optimizer: Optimizer) -> HostUpdate:
        """This rank's part of the steps. What an optimizer keeps also depends on which options are
        zero (momentum) or false (amsgrad)."""
        settings = [
            {n: bool(v) for n, v in options(group).items() if isinstance(v, int | float)}
            for group in optimizer.param_groups
        ]
        for group in settings:
            group.pop("lr", None)  # 0 in many a warm-up
        make = partial(HostUpdate, flats=self._flats, weights=self._weights)
        return owned_update(self._updates, optimizer, make, settings)

    def publish(self) -> Work:
        """See `Replicas.publish`: write this rank's share into the other ranks' replicas."""
        if self._stepped:
            with record_function("out"):
                for home in self._weights:
                    home.hand_out()
                self._comm.barrier()  # no rank reads weights before all have written theirs
            for home in self._weights:
                # Autograd must detect that an older graph is stale.
                torch.autograd.graph.increment_version(home.parameters)
                home.remember()
            stepped, self._stepped = self._stepped, ()
            for optimizer in stepped:
                if "step" in optimizer.__dict__:  # a scheduler wraps it, to count steps
                    tell(optimizer)
        return Done()

    def _release(self) -> None:
        while self._updates:
            optimizer, (_, update) = self._updates.popitem()
            update.give_back(optimizer)

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Replicas.load_full_weights`; ranks may overwrite a shared copy of the weights with
        equal values."""
        super().load_full_weights(weights)
        for home in self._weights:
            home.remember()

    def close(self) -> None:
        """Move weights and optimizer state to this rank's private memory. A replica does not move
        if something else refers to its memory, too."""
        self._release()
        for parameter in self.parameters if self._weights else ():
            if self._one_copy or num_uses(parameter) == 1:
                parameter.data = parameter.data.clone()
