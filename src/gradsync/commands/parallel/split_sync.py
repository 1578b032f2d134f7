"""Synchronise one part of a split model: the groups of a layout, a strategy over the replicas of
the part, and the handle, the counterpart of `GradientSync` for a whole model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gradsync.checkpoint.pieces import join_files, places_of
from gradsync.comm.base import Communicator, Work
from gradsync.comm.groups import new_group
from gradsync.commands.parallel.layout import (
    EMBEDDING,
    Coordinates,
    ModelPart,
    ParallelLayout,
    norm_places,
)
from gradsync.commands.parallel.transfer import collect
from gradsync.sync.buffers import BufferSync
from gradsync.sync.build import build_reducer
from gradsync.sync.check_replicas import check_replicas
from gradsync.sync.layout import BLOCK
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.registry import check_options, find_strategy
from gradsync.sync.replicas import (
    Replicas,
    clip_factor,
    norm_from_blocks,
    norms_of_blocks,
    scale_all,
)
from gradsync.sync.step import Optimizers, StepCall, StepParts, StepResult, Update, take_step
from gradsync.sync.step_metadata import LossSum
from gradsync.sync.watch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitGroups:
    """This rank's groups; members are in the order of their index."""

    everyone: Communicator
    data: Communicator  # Ranks that hold the same part of the model, one of each replica
    model: Communicator  # Ranks of one replica: ordered by stage, then by shard
    stages: Communicator  # Ranks of one replica with the same shard index, ordered by stage
    shards: Communicator  # Ranks of one stage of one replica


def split_groups(layout: ParallelLayout, place: Coordinates, everyone: Communicator) -> SplitGroups:
    """Create this rank's groups; every rank calls it at the same point, with its own `place`.

    Groups with equal members are one group; a group of one needs no process group.
    """
    known: dict[tuple[int, ...], Communicator | None] = {}

    def mine(key: Callable[[Coordinates], Any], *, for_handle: bool = False) -> Communicator:
        """The group of the ranks with the same `key` as this one; all ranks make all groups."""
        members: dict[Any, list[int]] = {}
        for rank in range(layout.world_size):
            members.setdefault(key(layout.coordinates(rank)), []).append(rank)
        for ranks in members.values():
            if tuple(ranks) not in known:
                known[tuple(ranks)] = new_group(ranks, for_handle=for_handle)
        found = known[tuple(members[key(place)])]
        assert found is not None, "this rank is a member"
        return found

    return SplitGroups(
        everyone=everyone,
        data=mine(lambda at: (at.stage, at.shard), for_handle=True),
        model=mine(lambda at: at.data),
        stages=mine(lambda at: (at.data, at.shard)),
        shards=mine(lambda at: (at.data, at.stage)),
    )


class SplitReducer(Reducer):
    """`inner` over the replicas of this rank's part, plus what the whole model needs.

    [Note: Tied ends] A tied head is the embedding's weight, which is at both ends of a pipeline.
    Each end sums its gradient over micro-batches and replicas; then both exchange and add.
    Both add the same two numbers and get the same bits, so AdamW keeps the weights equal. One rank
    adds the two gradients within each micro-batch, in another order, so a tied model's losses equal
    one rank's to rounding; a model with a separate head gives the same bits.

    `inner` sums over `groups.data`.
    """

    def __init__(
        self, model: nn.Module, part: ModelPart, groups: SplitGroups, inner: Reducer
    ) -> None:
        super().__init__(model, groups.everyone, SplitShards(model, part, groups, inner.shards))
        self.inner, self.part = inner, part
        self._names = [name for name, _ in trainable(model)]
        self._order = {weight.name: place for place, weight in enumerate(part.weights)}

    def prime(self, forward_backward: Callable[[], None]) -> None:
        self.inner.prime(forward_backward)

    @contextmanager
    def micro_batch(self, *, last: bool, index: int | None = None) -> Generator[None]:
        with self.inner.micro_batch(last=last, index=index):
            yield

    def collect(self, *, discard: bool, user_loop: bool) -> None:
        self.inner.collect(discard=discard, user_loop=user_loop)

    def launch(self) -> list[bool]:
        """Which of the *whole model's* parameters have gradients here: lists are equally long on
        all ranks, so one message serves all parts."""
        whole = [False] * len(self._order)
        for name, here in zip(self._names, self.inner.launch(), strict=True):
            whole[self._order[name]] = here
        return whole

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """See `Reducer.reduce`, and [Note: Tied ends]: the ends' sums are added before the
        division, as on one rank."""
        watch = self.inner.reduce([used[self._order[name]] for name in self._names], 1.0)
        if used[self._order[EMBEDDING]]:
            self._sum_tied_ends()
        self.shards.scale(divisor and 1 / divisor)
        return watch

    def _sum_tied_ends(self) -> None:
        """One exchange between the two ends, shape and dtype of the embedding."""
        peer = self.part.other_end
        if peer is None:
            return
        gradient = self.parameters[self._names.index(EMBEDDING)].grad
        assert gradient is not None, "the head used it"
        theirs = torch.empty_like(gradient)
        self.comm.exchange([(gradient.contiguous(), peer)], [(theirs, peer)]).wait()
        gradient.add_(theirs)

    def close(self) -> None:
        self.inner.close()


class SplitShards(Replicas):
    """One part of the model, whole on each of its replicas; `inner` is the strategy's."""

    whole_parameters = False

    def __init__(
        self, model: nn.Module, part: ModelPart, groups: SplitGroups, inner: Replicas
    ) -> None:
        super().__init__(model, groups.everyone)
        self._inner, self._part, self._groups = inner, part, groups
        self._places, self._num_blocks = norm_places(part, BLOCK)

    def clip(self, max_norm: float) -> Tensor:
        """See `Replicas.clip`; the norm is that of the whole model's gradient.

        One all-reduce over the ranks of a replica, float64 [blocks of 65,536 elements in the whole
        model]; it overlaps nothing, because the factor depends on it.
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
        scale_all(self.owned(), clip_factor(norm, max_norm))
        return norm

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._inner.update(optimizers)

    def publish(self) -> Work:
        return self._inner.publish()

    def full_weights(self) -> dict[str, Tensor]:
        """Whole weights by name in the whole model's order, on the CPU of rank 0; {} on the other
        ranks. All ranks call it, and send what they own."""
        part, replica = self._part, self._groups.model
        if part.place.data:
            return {}
        owned = {f"model/{name}": piece for name, piece in part.owned().items()}
        parameters = dict(self.model.named_parameters())
        mine = {name: parameters[name.removeprefix("model/")].detach() for name in owned}
        notes, contents = collect(replica, mine, places_of(owned))
        if replica.rank:
            return {}
        places = {str(rank): note for rank, note in enumerate(notes)}
        whole = join_files(dict(zip(places, contents, strict=True)), places)["model"]
        return {weight.name: whole[weight.name] for weight in part.weights}


class SplitSync:
    """Per step: `reducer.micro_batch` around each backward, then `step` once, on all ranks.

    The step's small message covers all ranks of the run, so the loss, the weight and a request to
    stop are the same everywhere; gradients are summed over the replicas of a part.

    `sync` is a strategy of `STRATEGIES` that keeps whole replicas, with its options.
    """

    def __init__(
        self,
        model: nn.Module,
        part: ModelPart,
        groups: SplitGroups,
        *,
        sync: str,
        options: Mapping[str, Any],
    ) -> None:
        strategy = find_strategy(sync)
        if "overlap_publish" in strategy.options:  # norms cover all parts' gradients, whole
            options = {**options, "overlap_publish": False}
        inner = build_reducer(strategy, model, groups.data, None, check_options(strategy, options))
        self.model, self.comm = model, groups.everyone
        self.reducer = SplitReducer(model, part, groups, inner)
        self._part, self.groups = part, groups
        self._loss = LossSum(self.reducer.parameters[0].device)
        # Rotary tables are constants: there is nothing to keep equal.
        self._buffers = BufferSync(model, groups.data, equal_replicas=False)
        self.replica = self.reducer.shards
        self._parts = StepParts(self.reducer, groups.everyone, self._buffers, 0)

    def add_loss(self, loss_sum: Tensor, weight: float) -> None:
        """A micro-batch's summed loss, [], and its targets; one rank of a replica reports it."""
        if self._part.counts_loss:
            self._loss.add(loss_sum, weight)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        stop: bool = False,
        scale: Any = None,
    ) -> StepResult:
        """See `GradientSync.step`; `scale` must be None."""
        assert scale is None, "fp16 is refused: parts would have to agree on the scale"
        call = StepCall(
            loss=self._loss,
            update=Update(self.reducer, [optimizer]),
            settings={},
            clip_norm=clip_norm,
            stop=stop,
        )
        result = take_step(self._parts, call)
        optimizer.zero_grad(set_to_none=True)
        return result

    def check_replicas(
        self, optimizer: Optimizers | None = None, *, step: int | None = None
    ) -> None:
        """Check that the replicas of each part have the same bits; see
        `GradientSync.check_replicas`."""
        layout, place = self._part.layout, self._part.place
        ranks = [layout.rank(replace(place, data=index)) for index in range(layout.dp)]
        check_replicas(self.model.named_parameters(), self.groups.data, step=step, ranks=ranks)
