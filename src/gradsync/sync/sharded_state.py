"""This rank's part of weights and optimizer state, whole tensors, and conversions between them.

A `Share` is a run of elements of a whole tensor, row after row. Pieces of flat buckets and a
DTensor's rows are shares; checkpoints store shares separately.

Whole optimizer state is gathered from flat shards, by one all-gather per bucket and name. Single
numbers (`step`) are equal in all pieces of a parameter, and are sent beforehand in a short text. It
also lists the state of each rank: a parameter that has never had a gradient has no state on any
rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.comm.base import Communicator, Work
from gradsync.comm.values import all_gather_json
from gradsync.core.torch_private import foreach_copy_
from gradsync.errors import ConfigError
from gradsync.sync.elementwise import PieceOptimizer, State, group_numbers
from gradsync.sync.exchange import Then
from gradsync.sync.layout import BucketPlan, Piece, Slot, pieces_of_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Owners:
    """Ranks in the order of the shards that they own in each bucket."""

    rank: int
    world_size: int
    all_gather: Callable[[Tensor, Tensor], Work]
    """See `Communicator`."""


class ShardedBucket(PieceOptimizer):
    """One bucket: updates this rank's shard, then gathers all shards.

        rank 0   p[0:a] <- optimizer ─┐ all_gather ─► flat ─► copied into the parameters
        rank 1   p[a:b] <- optimizer ─┘

    Args:
        plan: the bucket.
        parameters: all parameters, by the indices of the bucket's slots.
        groups: the user's parameter groups; parameters in none of them are not updated.
        comm: the ranks that share the state, in the order of their shards.
        optimizer_class, defaults: see `PieceOptimizer`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        comm: Communicator | Owners,
        *,
        optimizer_class: type[Optimizer],
        defaults: dict[str, Any],
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self._comm = comm
        self.pieces = pieces_of_shard(plan, comm.rank, comm.world_size)
        self.tensors = [_view(parameters[p.index], p) for p in self.pieces]
        self._addresses = [parameters[p.index].data_ptr() for p in self.pieces]
        numbers, pairs = group_numbers(groups), zip(self.pieces, self.tensors, strict=True)
        own = [
            (number, tensor)
            for piece, tensor in pairs
            if (number := numbers.get(id(parameters[piece.index]))) is not None
        ]
        super().__init__(optimizer_class, defaults, groups, own)

    @property
    def shard_numel(self) -> int:
        """Elements of a shard, with padding."""
        return self.plan.numel // self._comm.world_size

    def is_cut(self, slot: Slot) -> bool:
        """Whether several ranks' shards contain parts of the parameter."""
        return slot.offset // self.shard_numel != (slot.offset + slot.numel - 1) // self.shard_numel

    def empty(self, *, shard: bool, dtype: torch.dtype | None = None) -> Tensor:
        """A flat, uninitialised tensor of the shard's or the bucket's length."""
        like = self.parameters[self.plan.slots[0].index]
        numel = self.shard_numel if shard else self.plan.numel
        return torch.empty(numel, dtype=dtype or like.dtype, device=like.device)

    def update(
        self, groups: Sequence[dict[str, Any]], gradient_of: Callable[[Piece], Tensor | None]
    ) -> None:
        """Run the optimizer over this rank's pieces; pieces without a gradient do not change.

        Args:
            groups: the user's groups, read for the current hyper-parameters.
            gradient_of: returns the flat gradient of a piece, [piece.numel], or None.
        """
        for number, piece in enumerate(self.pieces):
            parameter = self.parameters[piece.index]
            if parameter.data_ptr() != self._addresses[number]:  # the user has set `.data`
                self.tensors[number].data = _view(parameter, piece)
                self._addresses[number] = parameter.data_ptr()
        self.step(groups, zip(self.tensors, map(gradient_of, self.pieces), strict=True))

    def launch_gather(self) -> Then:
        """Start sending this rank's shard of the parameters; `wait` copies in the other shards."""
        shard = self.empty(shard=True)
        if self.pieces:
            places = [shard[p.offset : p.offset + p.numel] for p in self.pieces]
            foreach_copy_(places, [tensor.detach() for tensor in self.tensors])
        flat, work = self.gather(shard)
        return Then(work, partial(self._take_over, flat))

    @torch.no_grad()
    def _take_over(self, flat: Tensor) -> None:
        homes = [_flattened(self.parameters[slot.index]) for slot in self.plan.slots]
        found = [flat[slot.offset : slot.offset + slot.numel] for slot in self.plan.slots]
        foreach_copy_(homes, found)

    def gather(self, shard: Tensor) -> tuple[Tensor, Work]:
        """Gather all shards in order, [plan.numel], available when the work is done."""
        flat = self.empty(shard=False, dtype=shard.dtype)
        # Whole group; the bucket (parameters or state) of any dtype, as bytes. Overlaps the update
        # of the next bucket.
        work = self._comm.all_gather(flat.view(torch.uint8), shard.view(torch.uint8))
        return flat, work


def _flattened(parameter: Tensor) -> Tensor:
    return parameter.detach().view(-1)


def _view(parameter: Tensor, piece: Piece) -> Tensor:
    return _flattened(parameter)[piece.start : piece.stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The elements of one whole tensor that this rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """First element of the flattened tensor."""
    stop: int
    """Element after the last one."""
    saves: bool = True
    """False if another rank holds the same elements and saves them."""

    @property
    def saves_numbers(self) -> bool:
        """Whether this share saves the numbers that are equal in all shares of the tensor."""
        return self.saves and self.start == 0


HeldState = dict[Any, tuple[Share, State]]
"""Parameter -> this rank's share of it, and the optimizer state there. Tensors with one value per
element are flat. A parameter without state has {}."""


def whole_share(tensor: Tensor, rank: int) -> Share:
    """The share of a tensor that every rank holds whole: rank 0 saves it."""
    return Share(shape=tuple(tensor.shape), start=0, stop=tensor.numel(), saves=rank == 0)


def share_of_rows(tensor: Tensor, rank: int, world_size: int) -> Share:
    """The share of a tensor that FSDP2 cut along its first dimension, as `torch.chunk` does: the
    first ranks have ceil(rows / ranks) rows, the last ones fewer or none.

    Args:
        tensor: a parameter or its state; a plain tensor is a whole share.
        rank: this rank.
        world_size: number of ranks.
    """
    if not _is_sharded(tensor):
        return whole_share(tensor, rank)
    from torch.distributed.tensor import Shard

    assert tuple(tensor.placements) == (Shard(0),), "rows alone are contiguous"
    rows, row, held = tensor.shape[0], prod(tensor.shape[1:]), tensor.to_local().numel()
    start = min(rank * -(-rows // world_size), rows) * row
    return Share(
        shape=tuple(tensor.shape), start=start, stop=start + held, saves=held > 0 or rank == 0
    )


def sharded_state_dict(
    buckets: Iterable[ShardedBucket], others: Mapping[Tensor, State], rank: int
) -> HeldState:
    """This rank's pieces of the state; they share the optimizer's tensors.

    Args:
        buckets: of the sharded optimizer.
        others: whole state of its parameters in no bucket.
        rank: this rank.

    Raises:
        ConfigError: names state that is neither elementwise nor a single number.
    """
    found: HeldState = {
        parameter: (whole_share(parameter, rank), flat_state(state, parameter))
        for parameter, state in others.items()
    }
    for bucket in buckets:
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            parameter = bucket.parameters[piece.index]
            share = Share(shape=tuple(parameter.shape), start=piece.start, stop=piece.stop)
            found[parameter] = share, flat_state(bucket.state.get(tensor, {}), tensor)
    return found


def load_sharded_state_dict(
    buckets: Sequence[ShardedBucket], states: Mapping[Any, State]
) -> dict[Any, State]:
    """Restore pieces from `sharded_state_dict`; drops the buckets' previous state.

    Returns:
        The state of parameters in no bucket, in their shapes.
    """
    covered: set[int] = set()
    for bucket in buckets:
        covered |= {id(bucket.parameters[slot.index]) for slot in bucket.plan.slots}
        bucket.state.clear()
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            if state := states.get(bucket.parameters[piece.index]):
                bucket.state[tensor] = dict(state)
    return {
        parameter: {name: shaped_as(value, parameter) for name, value in state.items()}
        for parameter, state in states.items()
        if state and id(parameter) not in covered
    }


def flat_state(state: Mapping[str, Any], like: Tensor) -> State:
    """Flatten tensors with one value per element, sharing memory; keep other values.

    Raises:
        ConfigError: see `sharded_state_dict`.
    """
    return {name: _flat(name, value, like) for name, value in state.items()}


def _flat(name: str, value: Any, like: Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == like.shape:
        return local(value).reshape(-1)
    if value.dim() == 0:
        return value
    raise not_elementwise(name, value.shape, like.shape)


# -- whole state from pieces, and back ------------------------------------------------------------


def gather_state(
    buckets: Sequence[ShardedBucket], comm: Communicator
) -> list[tuple[Tensor, State]]:
    """Gather the whole state of every parameter that has state, on every rank; all ranks call it.

    Raises:
        ConfigError: names state that is neither elementwise nor a single number.
    """
    found: list[tuple[Tensor, State]] = []
    parts = all_gather_json(comm, [_describe(bucket) for bucket in buckets])
    for number, bucket in enumerate(buckets):
        described: dict[str, State] = {}
        for part in parts:
            described |= part[number]
        whole = {int(index): _small(bucket, entry) for index, entry in described.items()}
        slots: dict[str, str] = {}
        for entry in described.values():
            slots |= {name: kind["elements"] for name, kind in entry.items() if "elements" in kind}
        for name, dtype in sorted(slots.items()):
            flat = _gather_slot(bucket, name, getattr(torch, dtype))
            for slot in bucket.plan.slots:
                if "elements" in described.get(str(slot.index), {}).get(name, ()):
                    values = flat[slot.offset : slot.offset + slot.numel].clone()
                    shape = bucket.parameters[slot.index].shape
                    whole[slot.index][name] = values.view(shape)
        found += [(bucket.parameters[index], state) for index, state in sorted(whole.items())]
    return found


def take_state(buckets: Sequence[ShardedBucket], whole: Mapping[Tensor, State]) -> None:
    """Keep this rank's pieces of whole state; drops the buckets' previous state.

    Raises:
        ConfigError: a tensor that has neither its parameter's shape nor one element.
    """
    for bucket in buckets:
        bucket.state.clear()
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            parameter = bucket.parameters[piece.index]
            if state := whole.get(parameter):
                bucket.state[tensor] = {
                    name: _part(name, value, parameter, piece.start, piece.stop)
                    for name, value in state.items()
                }


def _part(name: str, value: Any, parameter: Tensor, start: int, stop: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape:
        return value.detach().reshape(-1)[start:stop].to(parameter.device, copy=True)
    if value.dim() == 0:
        return value.detach().clone()
    raise not_elementwise(name, value.shape, parameter.shape)


def _describe(bucket: ShardedBucket) -> dict[str, State]:
    """Description for JSON: parameter index -> name -> kind of state, numbers included."""
    described: dict[str, State] = {}
    for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
        entry: State = {}
        for name, value in bucket.state.get(tensor, {}).items():
            if not isinstance(value, torch.Tensor):
                entry[name] = {"value": value}
            elif value.shape == tensor.shape:
                entry[name] = {"elements": _name(value.dtype)}
            elif value.dim() == 0:
                on_cpu = value.device.type == "cpu"
                entry[name] = {"number": value.item(), "dtype": _name(value.dtype), "cpu": on_cpu}
            else:
                raise not_elementwise(name, value.shape, tensor.shape)
        if entry:
            described[str(piece.index)] = entry
    return described


def _small(bucket: ShardedBucket, entry: State) -> State:
    """The state of one parameter; tensors with elements are filled in later."""
    state: State = {}
    device = bucket.parameters[0].device
    for name, kind in entry.items():
        if "number" in kind:
            state[name] = torch.tensor(
                kind["number"],
                dtype=getattr(torch, kind["dtype"]),
                device="cpu" if kind["cpu"] else device,
            )
        else:
            state[name] = kind.get("value")
    return state


def _gather_slot(bucket: ShardedBucket, name: str, dtype: torch.dtype) -> Tensor:
    shard = bucket.empty(shard=True, dtype=dtype)
    for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
        value = bucket.state.get(tensor, {}).get(name)
        if isinstance(value, torch.Tensor):
            shard[piece.offset : piece.offset + piece.numel] = value
    flat, work = bucket.gather(shard)
    work.wait()
    return flat


def not_elementwise(name: str, got: torch.Size, shape: torch.Size) -> ConfigError:
    """Make the error for state of shape `got`, which ranks cannot divide like its parameter."""
    return ConfigError(
        f"optimizer state {name!r} has shape {tuple(got)} for a parameter of shape {tuple(shape)}: "
        "neither elementwise nor a single number; this optimizer cannot be sharded"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- sharded tensors (DTensor) and whole ones -----------------------------------------------------


def _is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Importing their module takes half a second, so without it: False."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather whole parameters and buffers by name, as `state_dict()` of the unsharded model.

    Works on any model. Under FSDP2 all ranks must call it, and each gets everything: one
    all-gather per sharded parameter over its own group, shape and dtype of the masters.
    """
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def load_whole_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers with whole ones, equal on all ranks; nothing is sent."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            local(own[name]).copy_(part_of(tensor, own[name]))


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; returns a plain tensor unchanged."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor.detach()


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return tensor.to_local() if _is_sharded(tensor) else tensor.detach()


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor if it were sharded like `like`; nothing is sent."""
    if not _is_sharded(like) or _is_sharded(tensor):
        return local(tensor)
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.detach().to(like.device)
    sharded = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return local(sharded)


def shaped_as(value: Any, like: Tensor) -> Any:
    """Place and shape this rank's flat elements like `like`; a number does not change."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if not _is_sharded(like):
        return value.view(like.shape)
    copy = torch.zeros_like(like, dtype=value.dtype)
    local(copy).view(-1).copy_(value)
    return copy


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a copy of a whole tensor, placed like `like`; keeps its dtype."""
    copy = torch.zeros_like(like, dtype=tensor.dtype)
    local(copy).copy_(part_of(tensor, like))
    return copy
