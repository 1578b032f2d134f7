"""Any elementwise optimizer, with its state divided among the ranks.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054. Each of W ranks keeps 1/W of the state, updates 1/W of every bucket and gathers
the rest:

    update shard of bucket 0 ──► update shard of bucket 1 ──► …
                    └─ all_gather bucket 0 ──┘  └─ all_gather bucket 1 ──┘

Bytes received per rank and step: (W-1)/W x the parameters; one operation per bucket.

Whole state is gathered by one all-gather per bucket and name. Single numbers (`step`) are equal in
all pieces of a parameter, and are sent beforehand in a short text, which also tells which
parameters have state: one that has never had a gradient has none on any rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from gradsync.comm.base import Communicator, Work
from gradsync.comm.groups import communicator
from gradsync.comm.process_group import AllOf, Then
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.core.torch_private import foreach_copy_
from gradsync.errors import ConfigError
from gradsync.sync.layout import BucketPlan, Item, Piece, pieces_of_shard, plan_buckets
from gradsync.sync.ownership.elementwise import PieceOptimizer, warn_of_threads, why_not_elementwise
from gradsync.sync.shares import HeldState, Owners, Share, State, flat_state, is_elementwise
from gradsync.world import World

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters that are gathered together."""
_IN_FLIGHT = 2
"""Buckets gathered at the same time: enough to keep the network busy during the next update."""


class ShardedBucket(PieceOptimizer):
    """One bucket: updates this rank's shard, then gathers all shards.

        rank 0   p[0:a] <- optimizer ─┐ all_gather ─► flat ─► copied into the parameters
        rank 1   p[a:b] <- optimizer ─┘

    Args: see `ShardedUpdate`.
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
        self.homes = [parameters[slot.index] for slot in plan.slots]
        """The bucket's parameters, in the order of its slots."""
        self.device = self.homes[0].device
        self.pieces = pieces_of_shard(plan, owners.rank, owners.world_size)
        self.parameters = [parameters[piece.index] for piece in self.pieces]
        self.tensors = [
            parameter.detach().view(-1)[piece.start : piece.stop]
            for parameter, piece in zip(self.parameters, self.pieces, strict=True)
        ]
        """The elements of each of `pieces`, flat, in the memory of its parameter."""
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        numbers = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
        pairs = zip(self.parameters, self.tensors, strict=True)
        own = [(numbers[id(p)], tensor) for p, tensor in pairs if id(p) in numbers]
        super().__init__(optimizer_class, optimizer.defaults, optimizer.param_groups, own)

    def update(
        self,
        groups: Sequence[dict[str, Any]],
        gradient_of: Callable[[Tensor, Piece], Tensor | None],
    ) -> None:
        """See `PieceOptimizer.step`; `gradient_of` a parameter's piece is flat, [piece.numel]."""
        for number, parameter in enumerate(self.parameters):
            if parameter.data_ptr() != self._addresses[number]:  # the user has set `.data`
                piece = self.pieces[number]
                self.tensors[number].data = parameter.detach().view(-1)[piece.start : piece.stop]
                self._addresses[number] = parameter.data_ptr()
        gradients = map(gradient_of, self.parameters, self.pieces)
        self.step(groups, zip(self.tensors, gradients, strict=True))

    def launch_gather(self) -> Then:
        """Start sending this rank's shard of the parameters; `wait` copies in the other shards."""
        flat, work = self.gather([tensor.detach() for tensor in self.tensors], self.homes[0].dtype)
        parts = [flat[slot.offset : slot.offset + slot.numel] for slot in self.plan.slots]
        homes = [home.detach().view(-1) for home in self.homes]
        return Then(work, partial(foreach_copy_, homes, parts))

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


class ShardedUpdate:
    """The steps of one optimizer on this rank's shards, and the state of their elements.

    Args:
        optimizer: has groups and defaults; parameters in none of its groups are not updated. State
            that it has already is taken in.
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
        """Parameter, piece, its elements, and the optimizer state of the bucket."""
        for bucket in self.buckets:
            pieces = zip(bucket.parameters, bucket.pieces, bucket.tensors, strict=True)
            for parameter, piece, tensor in pieces:
                yield parameter, piece, tensor, bucket.state

    @property
    def state_bytes(self) -> int:
        """See `ShardedOptimizer.state_bytes`."""
        states = [state for bucket in self.buckets for state in bucket.state.values()]
        values = [value for state in states for value in state.values()]
        return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.dim() > 0)

    def held(self) -> HeldState:
        """This rank's part of the state, sharing its memory; nothing is sent."""
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
        """Before a step: take over state that was loaded since the last one; nothing is sent.
        `optimizer.state` is empty afterwards.

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
        """Leave whole state in `optimizer.state`; all ranks call it, and need memory for all.

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
            kind: dict[str, Any] = {"value": value}
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                kind = {"elements": dtype}
                if not is_elementwise(name, value, tensor):
                    kind = {"number": value.item(), "dtype": dtype, "cpu": value.is_cpu}
            described.setdefault(str(piece.index), {})[name] = kind
    return described


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
            value = kind.get("value")
            if "elements" in kind:
                part = flats[name][slot.offset : slot.offset + slot.numel]
                value = part.clone().view(home.shape)
            elif "number" in kind:
                device = "cpu" if kind["cpu"] else bucket.device
                dtype = getattr(torch, kind["dtype"])
                value = torch.tensor(kind["number"], dtype=dtype, device=device)
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
        pairs: optimizers of different parameters, and the updates that do their steps, with equal
            buckets. A bucket is gathered once, after all of them have updated their part.
        gradient_of: returns the gradient of a piece, flat, [piece.numel], or None; from the number
            of its bucket, its parameter and the piece.
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


class ShardedOptimizer(Optimizer):
    """Replaces `optimizer_class(params, **defaults)` in any loop.

    Gradients must be equal on all ranks when `step` is called (after `sync.finish()`, or torch's
    DDP), at least in this rank's shard. Every rank makes the same calls. Schedulers and
    `zero_grad` work as usual; `state` is empty, and `state_dict` gathers it.

    On a CPU with two or more intra-op threads, bf16 and fp16 parameters of more than 32,768
    elements can differ from the whole optimizer's in their last bits. A warning reports this;
    `gs.init(threads=1)` makes them equal.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs or groups with their own
            options. Frozen parameters are left out.
        optimizer_class: an elementwise class, such as `torch.optim.AdamW`.
        comm: the ranks that share the state; None is the default process group.
        world: from `gs.init()`, instead of `comm`.
        elementwise: a promise about an `optimizer_class` that is not from torch.optim: its result
            for a piece of a parameter is that piece of its result for the whole.
        defaults: options of `optimizer_class`, such as `lr=3e-4`.

    Raises:
        ConfigError: an optimizer that is not elementwise, a parameter that cannot be sharded, or
            ranks with different parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        comm: Communicator | None = None,
        world: World | None = None,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        if not elementwise and (why := why_not_elementwise(optimizer_class)):
            raise ConfigError(why)
        if world is not None and world.recovery is not None:
            raise ConfigError("on_loss='shrink': a lost rank's part of the state would be missing")
        self._class = optimizer_class
        self._comm = comm or communicator(world)
        self._update: Any = None
        # A temporary instance checks the options and adds the defaults.
        super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        self._divide()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one optimizer step; a parameter whose `grad` is None does not change.

        Raises:
            ConfigError: a gradient of a parameter that was frozen when this optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, parameter in self._named():
            if parameter.grad is not None and id(parameter) not in self._covered:
                raise ConfigError(
                    f"parameter {name} has a gradient, but was frozen when the optimizer's state "
                    "was sharded; make the optimizer after unfreezing"
                )
        AllOf(wait_for_most(update_and_gather([(self, self._update)], gradient_of_piece))).wait()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the state is divided anew, so all ranks call it."""
        super().add_param_group(param_group)
        if self._update is not None:
            self._update.give_back(self)
            self._divide()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the unsharded optimizer would return it; all ranks call it."""
        self._update.give_back(self)
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part of a whole state, saved by any number of ranks."""
        super().load_state_dict(state_dict)
        self._update.take_in(self)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank (tensors with elements, without single numbers)."""
        return self._update.state_bytes

    def _divide(self) -> None:
        """Cut all trainable parameters into buckets, in their own order, and these into shards."""
        own = dict.fromkeys(parameter for _, parameter in self._named() if parameter.requires_grad)
        for name, parameter in self._named():
            if hasattr(parameter, "placements") or not parameter.is_contiguous():
                raise ConfigError(
                    f"parameter {name}, shape {tuple(parameter.shape)}, is a DTensor or not "
                    "contiguous, and cannot be sharded flat"
                )
        described = repr([(tuple(p.shape), str(p.dtype)) for p in own])
        if not same_on_all_ranks(self._comm, described.encode()):
            raise ConfigError(
                f"rank {self._comm.rank}: the ranks shard different parameters (number, order, "
                f"shapes or dtypes differ); this rank has {len(own)}"
            )
        items = [
            Item(numel=p.numel(), itemsize=p.element_size(), kind=(p.dtype, p.device)) for p in own
        ]
        plans = plan_buckets(
            *(items, range(len(items))), bucket_bytes=BUCKET_BYTES, world_size=self._comm.world_size
        )
        self._covered = set(map(id, own))
        self._update = ShardedUpdate(
            *(self, self._class, list(own), plans), comm=self._comm, owners=self._comm
        )

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with the names given with them, or their places, for messages."""
        for number, group in enumerate(self.param_groups):
            places = [f"{place} of group {number}" for place in range(len(group["params"]))]
            names = [repr(name) for name in group.get("param_names", ())]
            yield from zip(names or places, group["params"], strict=True)


def gradient_of_piece(_: int, parameter: Tensor, piece: Piece) -> Tensor | None:
    """The part of a whole `.grad`, flat; see `update_and_gather`."""
    gradient = parameter.grad
    return None if gradient is None else gradient.reshape(-1)[piece.start : piece.stop]
