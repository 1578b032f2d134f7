"""A strategy for one part of a split model: the replicas of the part sum, then the parts agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Work
from gradsync.core.torch_private import foreach_mul_
from gradsync.parallel.groups import SplitGroups
from gradsync.parallel.norm_places import norm_places
from gradsync.parallel.partition import EMBEDDING, Part
from gradsync.parallel.transfer import join_weights
from gradsync.sync.clip import BLOCK, clip_factor, norm_from_blocks, norms_of_blocks
from gradsync.sync.reducer import Reducer, Replicas, Stopwatch, trainable

if TYPE_CHECKING:
    from torch import Tensor, nn


class SplitReducer(Reducer):
    """`inner` over the replicas of this rank's part, and what the whole model needs besides.

    [Note: Tied ends] A tied head is the embedding's weight, which lies on both ends of a pipeline.
    Each end sums its own gradient over leaves and replicas; then they exchange the sums, and both
    add them. The same two numbers, so the same bits on both, and AdamW keeps the weights equal. One
    rank adds the two gradients leaf by leaf instead: another order, so a tied model's losses equal
    one rank's to rounding; one with a head of its own gives the same bits.

    Args:
        model: this rank's part.
        part, groups: which part, and who has the others.
        inner: sums over `groups.data`.
    """

    def __init__(self, model: nn.Module, part: Part, groups: SplitGroups, inner: Reducer) -> None:
        names = [name for name, _ in trainable(model)]
        super().__init__(model, groups.everyone, SplitShards(model, part, groups, inner.shards))
        self.inner, self.part = inner, part
        self._names = names
        self._order = {weight.name: place for place, weight in enumerate(part.weights)}

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """See `Reducer.prime`."""
        self.inner.prime(forward_backward)

    @contextmanager
    def leaf(self, *, last: bool, index: int | None = None) -> Iterator[None]:
        """See `Reducer.leaf`."""
        with self.inner.leaf(last=last, index=index):
            yield

    def collect(self, *, discard: bool, user_loop: bool) -> None:
        """See `Reducer.collect`."""
        self.inner.collect(discard=discard, user_loop=user_loop)

    def launch(self) -> list[bool]:
        """Which of the *whole model's* parameters have gradients here: all ranks' lists are equally
        long, so that one message serves all parts."""
        whole = [False] * len(self._order)
        for name, here in zip(self._names, self.inner.launch(), strict=True):
            whole[self._order[name]] = here
        return whole

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """See `Reducer.reduce`, and [Note: Tied ends]: the ends' sums are added before they are
        divided, as on one rank."""
        watch = self.inner.reduce([used[self._order[name]] for name in self._names], 1.0)
        if used[self._order[EMBEDDING]]:
            self._sum_tied_ends()
        self.shards.scale(divisor and 1 / divisor)
        return watch

    def _sum_tied_ends(self) -> None:
        """One exchange between the two ends, shape and dtype of the embedding."""
        ends = self.part.tied_ends
        if not ends:
            return
        gradient = self.parameters[self._names.index(EMBEDDING)].grad
        assert gradient is not None, "the head used it"
        theirs = torch.empty_like(gradient)
        peer = ends[0] if self.part.is_last else ends[1]
        self.comm.exchange([(gradient.contiguous(), peer)], [(theirs, peer)]).wait()
        gradient.add_(theirs)

    def close(self) -> None:
        """See `Reducer.close`."""
        self.inner.close()


class SplitShards(Replicas):
    """One part of the model, whole on each of its replicas.

    Args:
        model: this rank's part.
        part, groups: which part, and who has the others.
        inner: of the strategy over the part's replicas.
    """

    whole_parameters = False

    def __init__(self, model: nn.Module, part: Part, groups: SplitGroups, inner: Replicas) -> None:
        super().__init__(model, inner.parameters)
        self._inner, self._part, self._groups = inner, part, groups
        self._places, self._num_blocks = norm_places(part, BLOCK)

    def clip(self, max_norm: float) -> Tensor:
        """See `Replicas.clip`; the norm is that of the whole model's gradient.

        One all-reduce over the ranks of a replica, float64 [blocks of 65,536 elements in the whole
        model]; nothing to overlap with: the factor depends on it.
        """
        found = dict(trainable(self.model))
        norms = torch.zeros(self._num_blocks, dtype=torch.float64, device=self.parameters[0].device)
        for name, begin in self._places.items():
            gradient = found[name].grad
            if gradient is not None:
                blocks = norms_of_blocks(gradient.contiguous().view(-1).split(BLOCK))
                norms[begin : begin + len(blocks)] = blocks
        self._groups.model.all_reduce(norms).wait()
        norm = norm_from_blocks(norms, double=False)
        if gradients := self.owned():
            foreach_mul_(gradients, clip_factor(norm, max_norm))
        return norm

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See `Replicas.update`."""
        self._inner.update(optimizers)

    def publish(self) -> Work:
        """See `Replicas.publish`."""
        return self._inner.publish()

    def full_weights(self) -> dict[str, Tensor]:
        """Whole weights by name in the whole model's order, on the CPU of rank 0; the other ranks
        get {}. All ranks call it: the others send what they own."""
        return join_weights(self._part, self._groups, dict(self.model.named_parameters()))

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this part's parameters with whole ones."""
        own, pieces = dict(self.model.named_parameters()), self._part.pieces()
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name][pieces[name].slices])
