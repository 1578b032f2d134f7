"""One bucket of the sharded optimizer: update this rank's shard, then gather all shards.

rank 0   p[0:a] <- optimizer ─┐ all_gather ─► flat ─► copied into the parameters
rank 1   p[a:b] <- optimizer ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.core.torch_private import foreach_copy_
from gradsync.sync.engine.plan import BucketPlan
from gradsync.sync.sharded.pieces import Piece, empty_pieces_of, pieces_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Entries of a parameter group that are not hyper-parameters."""

MakeOptimizer = Callable[[list[dict[str, Any]]], "Optimizer"]


class ShardedBucket:
    """Pieces of parameters as views, and an optimizer over them that never sees the rest.

    Args:
        plan: the bucket.
        parameters: all parameters, by the indices of the bucket's slots.
        groups: the user's parameter groups; parameters in none of them are not updated.
        comm: the ranks that share the state.
        make_optimizer: makes an optimizer from parameter groups of pieces.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        comm: Communicator,
        make_optimizer: MakeOptimizer,
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self._comm = comm
        self.pieces = (
            *pieces_of(plan, comm.rank, comm.world_size),
            *empty_pieces_of(plan, comm.rank),
        )
        self.tensors = [_view(parameters[p.index], p) for p in self.pieces]
        self._addresses = [parameters[p.index].data_ptr() for p in self.pieces]
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        own: dict[int, list[Tensor]] = {}
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            number = group_of.get(id(parameters[piece.index]))
            if number is not None:
                own.setdefault(number, []).append(tensor)
        self._group_numbers = sorted(own)
        self.inner: Optimizer | None = None
        """None where this rank owns nothing of the bucket."""
        if own:
            self.inner = make_optimizer(
                [{**options(groups[n]), "params": own[n]} for n in self._group_numbers]
            )

    @property
    def shard_numel(self) -> int:
        """Elements of a shard, with padding."""
        return self.plan.numel // self._comm.world_size

    def empty(self, *, shard: bool, dtype: torch.dtype | None = None) -> Tensor:
        """A flat tensor of the shard's or the bucket's length, not initialised."""
        like = self.parameters[self.plan.slots[0].index]
        numel = self.shard_numel if shard else self.plan.numel
        return torch.empty(numel, dtype=dtype or like.dtype, device=like.device)

    def update(
        self, groups: Sequence[dict[str, Any]], gradient_of: Callable[[Piece], Tensor | None]
    ) -> None:
        """Run the optimizer over this rank's pieces; those without a gradient stay as they are.

        Args:
            groups: the user's groups, for the hyper-parameters as they are now.
            gradient_of: returns the flat gradient of a piece, [piece.numel], or None.
        """
        for number, piece in enumerate(self.pieces):
            parameter = self.parameters[piece.index]
            if parameter.data_ptr() != self._addresses[number]:  # the user has set `.data`
                self.tensors[number].data = _view(parameter, piece)
                self._addresses[number] = parameter.data_ptr()
        if self.inner is None:
            return
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            tensor.grad = gradient_of(piece)
        own_groups = [groups[number] for number in self._group_numbers]
        for inner_group, group in zip(self.inner.param_groups, own_groups, strict=True):
            inner_group.update(options(group))
        self.inner.step()
        for tensor in self.tensors:
            tensor.grad = None

    def launch_gather(self) -> Callable[[], None]:
        """Start sending this rank's shard of the parameters; the result copies in the others'."""
        shard = self.empty(shard=True)
        if self.pieces:
            places = [shard[p.offset : p.offset + p.numel] for p in self.pieces]
            foreach_copy_(places, [tensor.detach() for tensor in self.tensors])
        flat, work = self.gather(shard)

        def finish() -> None:
            work.wait()
            homes = [_flat(self.parameters[slot.index]) for slot in self.plan.slots]
            found = [flat[slot.offset : slot.offset + slot.numel] for slot in self.plan.slots]
            foreach_copy_(homes, found)

        return finish

    def gather(self, shard: Tensor) -> tuple[Tensor, Work]:
        """Gather all shards in rank order, [plan.numel], available once the work is done."""
        flat = self.empty(shard=False, dtype=shard.dtype)
        # Whole group; the bucket (parameters or state) of any dtype, as bytes. Overlaps the update
        # of the next bucket.
        work = self._comm.all_gather(flat.view(torch.uint8), shard.view(torch.uint8))
        return flat, work


def options(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter group."""
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


def members_of(optimizer: Optimizer) -> list[list[int]]:
    """The ids of each group's parameters."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _flat(parameter: Tensor) -> Tensor:
    return parameter.detach().view(-1)


def _view(parameter: Tensor, piece: Piece) -> Tensor:
    return _flat(parameter)[piece.start : piece.stop]
