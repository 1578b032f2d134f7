"""Any elementwise optimizer, with its state divided among the ranks (ZeRO stage 1).

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054. Each of W ranks keeps 1/W of the state, updates 1/W of every bucket and gathers
the rest:

    update shard of bucket 0 ──► update shard of bucket 1 ──► …
                    └─ all_gather bucket 0 ──┘  └─ all_gather bucket 1 ──┘

The bits are those of the whole optimizer: pieces are cut at multiples of 64 elements within their
parameter, where no vector loop ends, and every element goes through the same operations. For an
exception with 16-bit parameters on a CPU with several threads see elementwise.py.
Bytes received per rank and step: (W-1)/W x the parameters; one operation per bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from gradsync.comm.base import Communicator, Work
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.process_group import AllOf
from gradsync.comm.values import same_on_all_ranks
from gradsync.core.torch_private import viewed
from gradsync.errors import ConfigError
from gradsync.sync.elementwise import State, arguments_of, check_elementwise, warn_of_threads
from gradsync.sync.exchange import Then
from gradsync.sync.layout import BucketPlan, Item, Piece, plan_buckets
from gradsync.sync.sharded_state import (
    HeldState,
    Owners,
    ShardedBucket,
    gather_state,
    load_sharded_state_dict,
    sharded_state_dict,
    take_state,
)
from gradsync.sync.step_metadata import options
from gradsync.world import World

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters that are gathered together by default."""
_IN_FLIGHT = 2
"""Buckets gathered at the same time: enough to keep the network busy during the next update."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Buckets, and the parameters that their slots refer to by index."""

    parameters: Sequence[Tensor]
    """Trainable parameters, each once."""
    buckets: Sequence[BucketPlan]
    """Buckets for the number of ranks that share the state."""
    owners: Communicator | Owners | None = None
    """The ranks that share the state, in the order of their shards; None: the order of `comm`."""


def layout_of(
    parameters: Sequence[Tensor], world_size: int, *, bucket_bytes: float = BUCKET_BYTES
) -> ShardLayout:
    """Make buckets of about `bucket_bytes`, with parameters in their own order.

    Args:
        parameters: trainable parameters, each once, of any shape.
        world_size: number of ranks that share the state.
        bucket_bytes: size at which a bucket is closed, bytes.
    """
    items = [
        Item(numel=p.numel(), itemsize=p.element_size(), kind=(p.dtype, p.device))
        for p in parameters
    ]
    plans = plan_buckets(items, range(len(items)), bucket_bytes=bucket_bytes, world_size=world_size)
    return ShardLayout(parameters, plans)


def check_parameters(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse parameters that cannot be cut into flat pieces.

    Raises:
        ConfigError: names the parameter.
    """
    for parameter, name in zip(parameters, names, strict=True):
        if hasattr(parameter, "placements"):
            raise ConfigError(
                f"{name} is a DTensor, sharded already: its optimizer state is too; use the plain "
                "optimizer"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"{name}, shape {tuple(parameter.shape)}, strides {parameter.stride()}, is not "
                "contiguous and cannot be sharded flat; make it so first: "
                "parameter.data = parameter.data.contiguous()"
            )


def check_ranks_agree(layout: ShardLayout, comm: Communicator) -> None:
    """Check that all ranks shard the same parameters in the same order.

    One all-reduce over the whole group, int64 [2], on the CPU, blocking.

    Raises:
        ConfigError: on every rank, when any two differ.
    """
    text = repr([(tuple(p.shape), str(p.dtype)) for p in layout.parameters]) + repr(layout.buckets)
    if not same_on_all_ranks(comm, text.encode()):
        raise ConfigError(
            f"rank {comm.rank}: the ranks shard different parameters (number, order, shapes, "
            f"dtypes or buckets differ); this rank has {len(layout.parameters)}"
        )


class ShardedOptimizer(Optimizer):
    """Replaces `optimizer_class(params, **defaults)` in any loop.

    Gradients must be equal on all ranks when `step` is called (after `sync.finish()`, or torch's
    DDP), at least in this rank's shard. Every rank makes the same calls. Schedulers and
    `zero_grad` work as usual; `state` is empty, and `state_dict` gathers it.

    On a CPU with two or more intra-op threads, bf16 and fp16 parameters of more than 32,768
    elements can differ from the whole optimizer's in their last bits. A warning reports this once;
    `gs.init(threads=1)` makes them equal.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs or groups with their own
            options. Tied parameters count once, frozen parameters are left out.
        optimizer_class: an elementwise class, such as `torch.optim.AdamW`.
        comm: the ranks that share the state; None is the default process group.
        world: from `gs.init()`, instead of `comm`.
        plan: buckets and the parameters they hold; None makes buckets of 25 MiB.
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
        plan: ShardLayout | None = None,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        check_elementwise(optimizer_class, elementwise)
        self._class = optimizer_class
        self._comm = comm or _default_communicator(world)
        self._source: Optimizer | None = None
        self._buckets: list[ShardedBucket] = []
        self._covered: set[int] = set()
        self._elsewhere: dict[Any, State] = {}
        """State of parameters in no bucket (frozen parameters), whole and unchanged."""
        self._built = False
        self._warned = False
        # A temporary instance checks the options and adds the defaults.
        complete = optimizer_class([torch.zeros(1)], **defaults).defaults
        super().__init__(_each_once(params), complete)
        self._build(plan)

    @classmethod
    def like(
        cls,
        optimizer: Optimizer,
        *,
        comm: Communicator,
        plan: ShardLayout | None = None,
        elementwise: bool = False,
    ) -> ShardedOptimizer:
        """Do the steps of an optimizer that the user made and still holds.

        Its hyper-parameters are read at each step, so schedulers keep working on it. The new object
        takes over existing state; from then on the user's optimizer has empty `state`. After each
        update its `step` is called without gradients, which only notifies schedulers and hooks.

        Args:
            optimizer: the user's optimizer, elementwise.
            comm: the ranks that share the state.
            plan: see `ShardedOptimizer`.
            elementwise: see `ShardedOptimizer`.
        """
        check_elementwise(type(optimizer), elementwise)
        sharded = cls(
            optimizer.param_groups,
            type(optimizer),
            comm=comm,
            plan=plan,
            elementwise=elementwise,
            **arguments_of(type(optimizer), optimizer.defaults),
        )
        sharded._source = optimizer
        if optimizer.state:
            sharded.take_from(optimizer)
        return sharded

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one optimizer step; a parameter whose `grad` is None does not change.

        Raises:
            ConfigError: a sparse gradient, or a gradient of a parameter that was frozen when this
                optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check()
        step_together([self]).wait()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the new parameters get new buckets."""
        super().add_param_group(param_group)
        if self._built:
            self._build(None)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the unsharded optimizer would return it; all ranks call it."""
        self.gather_into(self)
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part of a whole state, saved by any number of ranks."""
        super().load_state_dict(state_dict)
        self.take_from(self)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies, which would have no ranks to share the state with.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a ShardedOptimizer cannot be copied or pickled, since each rank holds a part of it: "
            "take its state_dict() on all ranks, and load that into a new one"
        )

    def gather_into(self, optimizer: Optimizer) -> None:
        """Make `optimizer.state` whole on every rank; all ranks call it. Needs memory for all."""
        optimizer.state.clear()
        found: dict[Any, State] = dict(self._elsewhere)
        found |= gather_state(self._buckets, self._comm)
        order = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        for key in [*order, *(key for key in found if key not in order)]:
            if key in found:
                optimizer.state[key] = found[key]

    def take_from(self, optimizer: Optimizer) -> None:
        """Take this rank's part of a whole `optimizer.state`, and clear the whole state."""
        take_state(self._buckets, optimizer.state)
        self._elsewhere = {
            key: state for key, state in optimizer.state.items() if id(key) not in self._covered
        }
        optimizer.state.clear()

    def held(self) -> HeldState:
        """This rank's part of the state; nothing is sent."""
        everything = [p for group in self._groups() for p in group["params"]]
        rest = {p: self._elsewhere.get(p, {}) for p in everything if id(p) not in self._covered}
        return sharded_state_dict(self._buckets, rest, self._comm.rank)

    def keep(self, states: Mapping[Any, State]) -> None:
        """Restore a part from `held`, replacing the current state; nothing is sent."""
        self._elsewhere = load_sharded_state_dict(self._buckets, states)

    def views(self) -> Iterator[Tensor]:
        """Tensors in this object that share parameters' memory, or have shared it."""
        for tensor in (tensor for bucket in self._buckets for tensor in bucket.tensors):
            yield tensor
            if (whole := viewed(tensor)) is not None:
                yield whole

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank (tensors with elements, without single numbers)."""
        inner = [bucket.state for bucket in self._buckets]
        return sum(
            value.numel() * value.element_size()
            for states in [*inner, self._elsewhere]
            for state in states.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        )

    def _groups(self) -> list[dict[str, Any]]:
        return self.param_groups if self._source is None else self._source.param_groups

    def _build(self, plan: ShardLayout | None) -> None:
        """Make buckets for all parameters that are in no bucket yet."""
        named = [
            (parameter, name)
            for number, group in enumerate(self.param_groups)
            for parameter, name in zip(group["params"], _names(group, number), strict=True)
            if parameter.requires_grad and id(parameter) not in self._covered
        ]
        parameters = [parameter for parameter, _ in named]
        check_parameters(parameters, [name for _, name in named])
        layout = plan or layout_of(parameters, self._comm.world_size)
        check_ranks_agree(layout, self._comm)
        self._covered |= {id(parameter) for parameter in layout.parameters}
        for parameter, name in named:
            if id(parameter) not in self._covered:
                raise ConfigError(f"{name} is in the optimizer, but not in the plan it shards by")
        self._buckets += [
            ShardedBucket(
                *(bucket, layout.parameters, self.param_groups, layout.owners or self._comm),
                optimizer_class=self._class,
                defaults=self.defaults,
            )
            for bucket in layout.buckets
        ]
        if not self._built:
            self._elsewhere = self._state_of_the_rest()
        self._built = True

    def _state_of_the_rest(self) -> dict[Any, State]:
        """Initial state of the whole optimizer for frozen parameters (Adagrad creates one)."""
        rest = [
            {**options(group), "params": [p for p in group["params"] if id(p) not in self._covered]}
            for group in self.param_groups
        ]
        return dict(self._class(rest, **arguments_of(self._class, self.defaults)).state)

    def check(self) -> None:
        """Refuse gradients that belong to no bucket. Warn about cut 16-bit parameters, once and on
        rank 0, since all ranks have the same plan."""
        _check_gradients(self._groups(), self._covered)
        if not self._warned and self._comm.rank == 0:
            self._warned = warn_of_threads(
                (bucket.parameters[slot.index], bucket.is_cut(slot))
                for bucket in self._buckets
                for slot in bucket.plan.slots
            )


@torch.no_grad()
def step_together(
    optimizers: Sequence[ShardedOptimizer],
    shards: Sequence[Tensor] | None = None,
    used: Sequence[bool] = (),
) -> Work:
    """Do one step of optimizers with the same buckets and different parameters.

    Args:
        optimizers: a bucket is gathered once, after all of them have updated their part of it.
        shards: for each bucket, the gradient of this rank's shard, flat, [bucket.numel /
            world_size], if this rank has no other; None uses `grad`.
        used: with `shards`: for each parameter of the buckets, whether it has a gradient.

    Returns:
        The last gathers. When they are done, parameters are whole, and the step is reported to
        schedulers and hooks of the optimizers that the user made.
    """
    under_way: deque[Work] = deque()
    for gather in update_and_gather(optimizers, shards, used):
        under_way.append(gather)
        if len(under_way) > _IN_FLIGHT:
            under_way.popleft().wait()
    # A hook may read weights, or raise.
    return Then(AllOf(list(under_way)), partial(tell_sources, optimizers))


@torch.no_grad()
def update_and_gather(
    optimizers: Sequence[ShardedOptimizer],
    shards: Sequence[Tensor] | None = None,
    used: Sequence[bool] = (),
    *,
    last_first: bool = False,
) -> Iterator[Then]:
    """Update bucket after bucket, see `step_together`; yields each bucket's gather in progress.

    Args:
        optimizers, shards, used: see `step_together`.
        last_first: begin with the last bucket, which the forward needs first; the same on all
            ranks.
    """

    def gradient_of(bucket: ShardedBucket, number: int, piece: Piece) -> Tensor | None:
        if shards is None:
            return _piece_of(bucket, piece)
        mine = slice(piece.offset, piece.offset + piece.numel)
        return shards[number][mine] if used[piece.index] else None

    numbered = list(enumerate(zip(*(o._buckets for o in optimizers), strict=True)))
    for number, same in reversed(numbered) if last_first else numbered:
        for optimizer, bucket in zip(optimizers, same, strict=True):
            bucket.update(optimizer._groups(), partial(gradient_of, bucket, number))
        yield same[0].launch_gather()


def tell_sources(optimizers: Iterable[ShardedOptimizer]) -> None:
    """Call `step` of the users' optimizers without gradients, for their schedulers and hooks."""
    for optimizer in optimizers:
        if optimizer._source is not None:
            _step_without_gradients(optimizer._source)


def _check_gradients(groups: Sequence[dict[str, Any]], covered: Container[int]) -> None:
    for number, group in enumerate(groups):
        for parameter, name in zip(group["params"], _names(group, number), strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise ConfigError(f"{name} has a sparse gradient, which cannot be sharded flat")
            if id(parameter) not in covered:
                raise ConfigError(
                    f"{name} has a gradient, but was frozen or absent when the optimizer's state "
                    "was sharded; make the optimizer after unfreezing"
                )


def _piece_of(bucket: ShardedBucket, piece: Piece) -> Tensor | None:
    gradient = bucket.parameters[piece.index].grad
    return None if gradient is None else gradient.reshape(-1)[piece.start : piece.stop]


def _step_without_gradients(optimizer: Optimizer) -> None:
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    held = [(p, p.grad) for p in everything if p.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    optimizer.step()
    for parameter, gradient in held:
        parameter.grad = gradient


def _names(group: dict[str, Any], number: int) -> list[str]:
    """Names for messages: the names given with the parameters, or their indices."""
    if "param_names" in group:
        return [f"parameter {name!r}" for name in group["param_names"]]
    return [f"parameter {place} of group {number}" for place in range(len(group["params"]))]


def _each_once(params: Iterable[Any]) -> list[Any]:
    """The same parameters, groups and pairs; a tied one only once per group."""
    if isinstance(params, torch.Tensor):
        raise ConfigError("params must be an iterable of parameters, got one tensor")
    entries = list(params)
    if entries and isinstance(entries[0], dict):
        return [
            {
                **options(group),
                "params": _unique(
                    zip(group["param_names"], group["params"], strict=True)
                    if "param_names" in group
                    else group["params"]
                ),
            }
            for group in entries
        ]
    return _unique(entries)


def _unique(entries: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    for entry in [entries] if isinstance(entries, torch.Tensor) else entries:
        seen.setdefault(id(entry[1] if isinstance(entry, tuple) else entry), entry)
    return list(seen.values())


def _default_communicator(world: World | None) -> Communicator:
    if world is not None:
        return communicator(world)
    import torch.distributed as dist

    if not dist.is_initialized():
        return SingleCommunicator()
    from gradsync.comm.process_group import ProcessGroupCommunicator

    return ProcessGroupCommunicator(dist.group.WORLD)
