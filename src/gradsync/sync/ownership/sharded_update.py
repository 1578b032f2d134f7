"""One optimizer's update of this rank's shard of every bucket, and the state of its elements.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054. Each of W ranks keeps 1/W of the state, updates 1/W of every bucket and gathers
the rest:

    update shard of bucket 0 ──► update shard of bucket 1 ──► …
                    └─ all_gather bucket 0 ──┘  └─ all_gather bucket 1 ──┘

Pieces are cut at multiples of 64 elements within their parameter, where no vector loop ends. For an
exception with 16-bit parameters on a CPU with several threads see elementwise.py.
Bytes received per rank and step: (W-1)/W x the parameters; one operation per bucket.

Whole state is gathered by one all-gather per bucket and name. Single numbers (`step`) are equal in
all pieces of a parameter, and are sent beforehand in a short text. It also lists the state of each
rank: a parameter that has never had a gradient has no state on any rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.comm.values import all_gather_json
from gradsync.core.torch_private import foreach_copy_
from gradsync.sync.exchange import Then
from gradsync.sync.layout import BucketPlan, Piece, pieces_of_shard
from gradsync.sync.ownership.elementwise import PieceOptimizer, group_numbers, warn_of_threads
from gradsync.sync.ownership.owner import OwnedUpdate
from gradsync.sync.shares import HeldState, Owners, Share, State, flat_state, is_elementwise

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_IN_FLIGHT = 2
"""Buckets gathered at the same time: enough to keep the network busy during the next update."""


class ShardedBucket(PieceOptimizer):
    """One bucket: updates this rank's shard, then gathers all shards.

        rank 0   p[0:a] <- optimizer ─┐ all_gather ─► flat ─► copied into the parameters
        rank 1   p[a:b] <- optimizer ─┘

    Args:
        plan: the bucket.
        parameters: all parameters, by the indices of the bucket's slots.
        optimizer: has groups and defaults; parameters in none of its groups are not updated.
        optimizer_class: what runs on the pieces.
        owners: the ranks that share the state, in the order of their shards.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        optimizer_class: type[Optimizer],
        owners: Communicator | Owners,
    ) -> None:
        self.plan, self._owners = plan, owners
        self.pieces = pieces_of_shard(plan, owners.rank, owners.world_size)
        self.parameters = [parameters[piece.index] for piece in self.pieces]
        self.tensors = list(map(_view, self.parameters, self.pieces))
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.homes = [parameters[slot.index] for slot in plan.slots]
        """The bucket's parameters, in the order of its slots."""
        self.device = self.homes[0].device
        numbers = group_numbers(optimizer.param_groups)
        pairs = zip(self.parameters, self.tensors, strict=True)
        own = [(numbers[id(p)], tensor) for p, tensor in pairs if id(p) in numbers]
        super().__init__(optimizer_class, optimizer.defaults, optimizer.param_groups, own)

    def update(
        self,
        groups: Sequence[dict[str, Any]],
        gradient_of: Callable[[Tensor, Piece], Tensor | None],
    ) -> None:
        """Run the optimizer over this rank's pieces; pieces without a gradient do not change.

        Args:
            groups: the user's groups, read for the current hyper-parameters.
            gradient_of: returns the flat gradient of a parameter's piece, [piece.numel], or None.
        """
        for number, parameter in enumerate(self.parameters):
            if parameter.data_ptr() != self._addresses[number]:  # the user has set `.data`
                self.tensors[number].data = _view(parameter, self.pieces[number])
                self._addresses[number] = parameter.data_ptr()
        gradients = map(gradient_of, self.parameters, self.pieces)
        self.step(groups, zip(self.tensors, gradients, strict=True))

    def launch_gather(self) -> Then:
        """Start sending this rank's shard of the parameters; `wait` copies in the other shards."""
        flat, work = self.gather([tensor.detach() for tensor in self.tensors], self.homes[0].dtype)
        return Then(work, partial(self._take_over, flat))

    @torch.no_grad()
    def _take_over(self, flat: Tensor) -> None:
        parts = [flat[slot.offset : slot.offset + slot.numel] for slot in self.plan.slots]
        foreach_copy_([home.detach().view(-1) for home in self.homes], parts)

    def gather(self, values: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Tensor, Work]:
        """Gather the values of all ranks' pieces, each [piece.numel], into the whole bucket,
        [plan.numel], which is available when the work is done."""
        numel, how = self.plan.numel, {"dtype": dtype, "device": self.device}
        shard = torch.empty(numel // self._owners.world_size, **how)
        held = [(p, v) for p, v in zip(self.pieces, values, strict=True) if v is not None]
        if held:
            places = [shard[piece.offset : piece.offset + piece.numel] for piece, _ in held]
            foreach_copy_(places, [value for _, value in held])
        flat = torch.empty(numel, **how)
        # Whole group; the bucket (parameters or state) of any dtype, as bytes. Overlaps the update
        # of the next bucket.
        work = self._owners.all_gather(flat.view(torch.uint8), shard.view(torch.uint8))
        return flat, work


def _view(parameter: Tensor, piece: Piece) -> Tensor:
    return parameter.detach().view(-1)[piece.start : piece.stop]


class ShardedUpdate(OwnedUpdate):
    """The steps of one optimizer on this rank's shards.

    Args:
        optimizer: provides parameter groups and defaults, and the state that exists already.
        optimizer_class: what runs on the pieces.
        parameters: by the indices of the buckets' slots.
        plans: the buckets, for the number of ranks in `comm`.
        comm: the ranks that share the state.
        owners: the same ranks, in the order of their shards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_class: type[Optimizer],
        parameters: Sequence[Tensor],
        plans: Sequence[BucketPlan],
        *,
        comm: Communicator,
        owners: Communicator | Owners,
    ) -> None:
        self._comm = comm
        self.buckets = [
            ShardedBucket(plan, parameters, optimizer, optimizer_class, owners) for plan in plans
        ]
        self._seen = optimizer.state
        self.take_in(optimizer)
        if comm.rank == 0 and comm.world_size > 1:
            warn_of_threads(parameters)

    def _pieces(self) -> Iterator[tuple[Tensor, Piece, Tensor, Any]]:
        """Parameter, piece, its elements [piece.numel], and the state that contains theirs."""
        for bucket in self.buckets:
            state = bucket.state
            for parameter, piece, tensor in zip(
                bucket.parameters, bucket.pieces, bucket.tensors, strict=True
            ):
                yield parameter, piece, tensor, state

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank (tensors with elements, without single numbers)."""
        return sum(
            value.numel() * value.element_size()
            for bucket in self.buckets
            for state in bucket.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        )

    def held(self) -> HeldState:
        """This rank's part of the state, sharing its memory; nothing is sent.

        Raises:
            ConfigError: names state that is neither elementwise nor a single number.
        """
        return {
            parameter: (
                Share(shape=tuple(parameter.shape), start=piece.start, stop=piece.stop),
                flat_state(state.get(tensor, {}), tensor),
            )
            for parameter, piece, tensor, state in self._pieces()
        }

    def keep(self, states: Mapping[Any, State]) -> None:
        """Restore a part from `held`, replacing the current state; nothing is sent."""
        for bucket in self.buckets:
            bucket.state.clear()
        for parameter, _, tensor, state in self._pieces():
            if states.get(parameter):
                state[tensor] = dict(states[parameter])

    def take_in(self, optimizer: Optimizer) -> None:
        """Take this rank's part of a whole `optimizer.state` that is new, and clear the whole.

        Raises:
            ConfigError: names state that is neither elementwise nor a single number.
        """
        whole = optimizer.state
        if whole is self._seen and not any(whole.values()):
            return
        self.keep(
            {
                parameter: {
                    name: _part(name, value, parameter, piece)
                    for name, value in whole.get(parameter, {}).items()
                }
                for parameter, piece, _, _ in self._pieces()
            }
        )
        whole.clear()
        self._seen = whole

    def give_back(self, optimizer: Optimizer) -> None:
        """Make `optimizer.state` whole on every rank; all ranks call it. Needs memory for all.

        Raises:
            ConfigError: names state that is neither elementwise nor a single number.
        """
        told = all_gather_json(self._comm, [_describe(bucket) for bucket in self.buckets])
        found: dict[Any, State] = {}
        for number, bucket in enumerate(self.buckets):
            described: dict[str, Any] = {}
            for buckets_of_rank in told:
                described |= buckets_of_rank[number]
            found |= _gather_state(bucket, described)
        optimizer.state.clear()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in found:
                optimizer.state[parameter] = found[parameter]


def _part(name: str, value: Any, parameter: Tensor, piece: Piece) -> Any:
    if is_elementwise(name, value, parameter):
        flat = value.detach().reshape(-1)
        return flat[piece.start : piece.stop].to(parameter.device, copy=True)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _describe(bucket: ShardedBucket) -> dict[str, dict[str, Any]]:
    """Description for JSON: parameter index -> name -> kind of state, numbers included."""
    described: dict[str, dict[str, Any]] = {}
    for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
        for name, value in bucket.state.get(tensor, {}).items():
            if not isinstance(value, torch.Tensor):
                kind = {"value": value}
            elif is_elementwise(name, value, tensor):
                kind = {"elements": _name(value.dtype)}
            else:
                kind = {"number": value.item(), "dtype": _name(value.dtype), "cpu": value.is_cpu}
            described.setdefault(str(piece.index), {})[name] = kind
    return described


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gather_state(bucket: ShardedBucket, described: Mapping[str, Any]) -> dict[Any, State]:
    """The whole state of the parameters that any rank has `described`, on every rank."""
    found: dict[Any, State] = {}
    flats: dict[str, Tensor] = {}
    kinds = [pair for entry in described.values() for pair in entry.items()]
    for name, dtype in sorted({(n, kind["elements"]) for n, kind in kinds if "elements" in kind}):
        values = [bucket.state.get(tensor, {}).get(name) for tensor in bucket.tensors]
        flats[name], work = bucket.gather(values, getattr(torch, dtype))
        work.wait()
    for slot, home in zip(bucket.plan.slots, bucket.homes, strict=True):
        for name, kind in described.get(str(slot.index), {}).items():
            if "elements" in kind:
                part = flats[name][slot.offset : slot.offset + slot.numel]
                value = part.clone().view(home.shape)
            elif "number" in kind:
                device = "cpu" if kind["cpu"] else bucket.device
                dtype = getattr(torch, kind["dtype"])
                value = torch.tensor(kind["number"], dtype=dtype, device=device)
            else:
                value = kind["value"]
            found.setdefault(home, {})[name] = value
    return found


@torch.no_grad()
def update_and_gather(
    pairs: Sequence[tuple[Optimizer, ShardedUpdate]],
    gradient_of: Callable[[int, Tensor, Piece], Tensor | None],
    *,
    last_first: bool = False,
) -> Iterator[Then]:
    """Update bucket after bucket; yields each bucket's gather in progress.

    Args:
        pairs: users' optimizers, of different parameters, and the updates that do their steps, with
            equal buckets. A bucket is gathered once, after all of them have updated their part.
        gradient_of: returns the gradient of a bucket's (by its number) parameter's piece, flat,
            [piece.numel], or None.
        last_first: begin with the last bucket, which the forward needs first; the same on all
            ranks.
    """
    numbers = range(len(pairs[0][1].buckets))
    for number in reversed(numbers) if last_first else numbers:
        for optimizer, update in pairs:
            update.buckets[number].update(optimizer.param_groups, partial(gradient_of, number))
        yield pairs[0][1].buckets[number].launch_gather()


def wait_for_most(gathers: Iterable[Then]) -> list[Then]:
    """Start all `gathers`, waiting for all but the last ones; returns these."""
    under_way: deque[Then] = deque()
    for gather in gathers:
        under_way.append(gather)
        if len(under_way) > _IN_FLIGHT:
            under_way.popleft().wait()
    return list(under_way)
