"""The step of ranks that share memory: each rank adds gradients and updates weights in its share.

    backward    every rank fills its own buffers, nothing is sent
    agree       the step's small message; now all buffers are full
    divide      each rank: add up its share over all ranks' buffers, divide, take its blocks' norms
    clip        the norms of all ranks' blocks, added in parameter order; scale own share
    update      each rank: the optimizer on its share of the weights; meet

Work per rank shrinks with their number: additions, division, norm and optimizer are done once per
host, not once per rank. Each rank writes the values that it would have written anyway, in the
memory of all. With a core for each rank nothing could be gained by communicating beside backward:
there is no message to wait for, only additions, and the core that would do them is computing.

In the user's training loop, and where the optimizer is not elementwise, every rank needs the whole
gradient in its `.grad`: then `reduce` makes the same additions and writes into all ranks' buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from gradsync.comm.kernels import reduce_in_place
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import foreach_mul_
from gradsync.errors import ConfigError, GradsyncError
from gradsync.sync.clip import clip_factor
from gradsync.sync.engine.engine import Engine
from gradsync.sync.engine.leaf_tree import UNKNOWN
from gradsync.sync.engine.recipe import Recipe
from gradsync.sync.engine.sums import FORGOTTEN, Sums
from gradsync.sync.engine.transport import AllReduce
from gradsync.sync.host.block_norms import BlockNorms
from gradsync.sync.host.eligible import why_not_now, why_whole
from gradsync.sync.host.flat import Flat, flats_of
from gradsync.sync.host.operands import Sum, sum_of_leaves, sum_of_ranks
from gradsync.sync.host.update import HostUpdate, step_together
from gradsync.sync.host.weights import SharedWeights, can_move
from gradsync.sync.reducer import Reduction
from gradsync.sync.sharded.bucket import members_of
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")


class HostEngine(Engine):
    """The engine of ranks on one host, see the module's picture; made by `engine.build`.

    Raises:
        SharedMemoryError: on all ranks, when there is too little memory.
    """

    def __init__(
        self, model: nn.Module, comm: SharedMemoryCommunicator, *, recipe: Recipe, sums: Sums
    ) -> None:
        # Nothing is sent in backward.
        recipe = replace(recipe, overlap=False)
        super().__init__(model, comm, recipe=recipe, sums=sums, transport=AllReduce(comm))
        self._host = comm
        self._learning = False  # nothing is sent beside backward: any order is as good
        self.own_loop = self.recipe.weights != "shared"
        self._flats = flats_of(self._host, self.buckets)
        try:
            for flat in self._flats:
                flat.ensure(1)
            self._norms = BlockNorms(self._host, self._flats, self.parameters)
            self._weights = self._move_weights()
        except GradsyncError:
            super().close()  # its hooks are on the parameters already
            raise
        self._updates: WeakKeyDictionary[Optimizer, HostUpdate] = WeakKeyDictionary()
        self._in_shares = self._said = self._clips = False
        self._sum: Sum | None = None
        self._used: list[bool] = []

    def _move_weights(self) -> list[SharedWeights]:
        """Move weights into shared memory; [] when they cannot move (then updates are whole)."""
        one_copy = self.recipe.weights == "shared"
        ours = {id(parameter) for parameter in self.parameters}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if can_move(self.parameters, [t for t in tensors if id(t) not in ours]):
            return [SharedWeights(f, self.parameters, one_copy=one_copy) for f in self._flats]
        if one_copy:
            raise ConfigError(
                "weights='shared' needs parameters that are dense, contiguous and share their "
                "memory with no other tensor; use weights='replicas'"
            )
        return []

    # -- a step -----------------------------------------------------------------------------------

    def expect(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """See `Reducer.expect`; one optimizer that needs whole gradients makes the step whole."""
        why = "a GradScaler looks at the whole gradient" if scaled else self._why_whole(optimizers)
        self._in_shares = not why
        if not why:
            self._prepare_updates(optimizers)
        elif self.recipe.weights == "shared":
            raise ConfigError(f"weights='shared': {why}; use 'replicas'")

    def launch(self) -> list[bool]:
        """See `Reducer.launch`. Also publishes the facts about this rank's leaves that the others
        need when the step's small message arrives."""
        self._watch = Stopwatch(on_cuda=False)
        self._watch.start()
        if not self._in_shares and self._sums.first_leaf != FORGOTTEN:
            self._release()  # the user's training loop may be about to run whole optimizers
        self._begun = True
        for bucket in self.buckets:
            self._clear_untouched(bucket)
        first = self._sums.first_leaf
        first = UNKNOWN if first is None else first
        self._host.note([self._sums.num_leaves, first, self._in_shares])
        return [bucket.touched[slot] for bucket, slot in self._places]

    def forget(self) -> None:
        """See `Reducer.forget`."""
        super().forget()
        self._sums.first_leaf = FORGOTTEN

    def reduce(self, used: list[bool]) -> Reduction:
        """See `Reducer.reduce`; a divided step has nothing to do before the weight is known."""
        notes = self._host.notes(3)
        told = [(leaves, first) for leaves, first, _ in notes]
        forgotten = any(first == FORGOTTEN for _, first in told)
        self._sum, self._used = None, used
        if not forgotten:
            self._agree(all(in_shares for _, _, in_shares in notes))
            along_tree = self.recipe.order == "invariant"
            self._sum = sum_of_leaves(told) if along_tree else sum_of_ranks(len(told))
            for flat in self._flats:
                flat.ensure(self._sum.num_buffers)
            if not self._in_shares:
                # All ranks of the host, every bucket, each [numel] of its dtype; overlaps nothing.
                self._host.run(self._add_whole, _WHOLE).wait()
                self._watch.stop()
        self.publish([False] * len(used) if self._in_shares else used)
        self._begin_step(used)
        return Reduction(divided_by=1, exposed=self._watch)

    def _agree(self, in_shares: bool) -> None:
        """Make the step whole on all ranks if it is on one, whose hooks may look at gradients."""
        if self._in_shares and not in_shares:
            self._in_shares = False
            self._release()

    def _add_whole(self) -> None:
        """Add up this rank's share, and write the sum into all ranks' buffers."""
        assert self._sum is not None, "not forgotten"
        for flat in self._flats:
            operands = [part[flat.mine] for part in self._operands(flat)]
            copies = [part[flat.mine] for part in flat.gradients[0]]
            reduce_in_place(operands, self._sum.pairs, self._sum.end, copies)

    def _operands(self, flat: Flat) -> list[Tensor]:
        assert self._sum is not None, "not forgotten"
        return [flat.gradients[number][rank] for rank, number in self._sum.operands]

    def divide(self, factor: float) -> None:
        """See `Reducer.divide`; a divided step adds up the gradients here."""
        if not self._in_shares:
            super().divide(factor)
            return
        # All ranks of the host, every bucket, each [numel] of its dtype; overlaps nothing.
        self._host.run(lambda: self._mean(factor), _SHARES).wait()
        self._watch.stop()

    def _mean(self, factor: float) -> None:
        """Add, divide and take norms, run by run, while a run is in the cache."""
        assert self._sum is not None, "not forgotten"
        for number, flat in enumerate(self._flats):
            operands = self._operands(flat)
            for run in flat.runs:
                parts = [operand[run.start : run.stop] for operand in operands]
                for left, right in self._sum.pairs:
                    parts[left].add_(parts[right])
                # As `Reducer.divide` does: that rounds the factor to 16 bits, where mul_ does not.
                foreach_mul_([parts[self._sum.end]], factor)
                if self._clips:
                    self._norms.take(number, run, operands[self._sum.end])

    def _means(self) -> list[Tensor]:
        """The mean gradient of each flat, [flat.numel], the same memory on all ranks."""
        assert self._sum is not None, "not forgotten"
        return [self._operands(flat)[self._sum.end] for flat in self._flats]

    def clip(self, max_norm: float) -> Tensor:
        """See `Reducer.clip`."""
        if not self._in_shares:
            return super().clip(max_norm)
        if not self._clips:  # the first step that clips
            self._clips = True
            self._host.run(self._take_norms, _NORMS).wait()
        pairs = zip(self.parameters, self._used, strict=True)
        double = any(p.dtype == torch.float64 for p, used in pairs if used)
        norm = self._norms.total(self._used, double=double)
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
        """See `Reducer.update`."""
        if not self._in_shares:
            super().update(optimizers)
            return
        updates = [self._updates[optimizer] for optimizer in optimizers]  # see expect
        step_together(updates, self._weights, self._means(), self._used)

    def clear_gradients(self) -> None:
        """See `Reducer.clear_gradients`."""
        super().clear_gradients()
        self._in_shares = False

    def gradients(self) -> list[Tensor]:
        """See `Reducer.gradients`; in a divided step, this rank's share."""
        if not self._in_shares:
            return super().gradients()
        return [mean[flat.mine] for flat, mean in zip(self._flats, self._means(), strict=True)]

    def whole_gradients(self) -> list[Tensor | None]:
        """Mean gradients of the parameters in their order, whole, None where no rank had one.

        All ranks call it, between the synchronisation and the update.
        """
        found: list[Tensor | None] = [parameter.grad for parameter in self.parameters]
        if self._in_shares:
            self._host.barrier()  # all have scaled their share
            for flat, mean in zip(self._flats, self._means(), strict=True):
                for slot in flat.slots:
                    if self._used[slot.index]:
                        part = mean[slot.offset : slot.offset + slot.numel]
                        found[slot.index] = part.view(self.parameters[slot.index].shape)
        return found

    # -- optimizers -------------------------------------------------------------------------------

    def _prepare_updates(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the divided counterparts of the user's optimizers."""
        for optimizer in optimizers:
            known = self._updates.get(optimizer)
            if known is None or known.members != members_of(optimizer):
                self._updates[optimizer] = HostUpdate(optimizer, self._flats, self._weights)

    def _why_whole(self, optimizers: Sequence[Optimizer]) -> str:
        """Reason why this step has to be whole, "" if it may be divided."""
        dtypes = {flat.dtype for flat in self._flats}
        if self.recipe.update == "whole":
            why = "update='whole'"
        elif not self._weights:
            why = "parameters share their memory with other tensors, or are not contiguous"
        else:
            now = [*map(why_not_now, optimizers), *(home.why_not_now() for home in self._weights)]
            new = [optimizer for optimizer in optimizers if optimizer not in self._updates]
            why = next(filter(None, now), "") or why_whole(new, self.parameters, dtypes)
        if why:
            self._release()
            if not self._said and self._host.rank == 0:
                log.info("every rank updates all weights: %s", why)
            self._said = True
        return why

    def _release(self) -> None:
        while self._updates:
            self._updates.popitem()[1].release()

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Reducer.load_full_weights`; ranks may overwrite a shared copy of the weights with
        equal values."""
        super().load_full_weights(weights)
        for home in self._weights:
            home.remember()

    def close(self) -> None:
        """See `Reducer.close`; weights and optimizer state move to this rank's private memory."""
        super().close()
        self._release()
        if self.recipe.weights == "shared":
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()


# Operations of all ranks together; all must be doing the same one.
_WHOLE = "the sum of gradients that every rank sees whole"
_SHARES = "the mean of gradients, a share per rank"
_NORMS = "the norm of a mean, a share per rank"
