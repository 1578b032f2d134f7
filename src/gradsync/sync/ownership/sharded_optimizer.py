"""Any elementwise optimizer, with its state divided among the ranks (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.process_group import AllOf
from gradsync.comm.values import same_on_all_ranks
from gradsync.errors import ConfigError
from gradsync.sync.layout import Item, Piece, plan_buckets
from gradsync.sync.ownership.elementwise import check_elementwise
from gradsync.sync.ownership.sharded_update import (
    ShardedUpdate,
    update_and_gather,
    wait_for_most,
)
from gradsync.world import World

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters that are gathered together."""


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
        check_elementwise(optimizer_class, elementwise)
        self._class = optimizer_class
        self._comm = comm or _default_communicator(world)
        self._update: ShardedUpdate | None = None
        # A temporary instance checks the options and adds the defaults.
        complete = optimizer_class([torch.zeros(1)], **defaults).defaults
        super().__init__(params, complete)
        self._divide()

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
        for name, parameter in self._named():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigError(f"{name} has a sparse gradient, which cannot be sharded flat")
            if parameter.grad is not None and id(parameter) not in self._covered:
                raise ConfigError(
                    f"{name} has a gradient, but was frozen when the optimizer's state was "
                    "sharded; make the optimizer after unfreezing"
                )
        AllOf(wait_for_most(update_and_gather([(self, self._sharded)], _gradient_of))).wait()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the state is divided anew, so all ranks call it."""
        super().add_param_group(param_group)
        if self._update is not None:
            self._update.give_back(self)
            self._divide()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the unsharded optimizer would return it; all ranks call it."""
        self._sharded.give_back(self)
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part of a whole state, saved by any number of ranks."""
        super().load_state_dict(state_dict)
        self._sharded.take_in(self)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank (tensors with elements, without single numbers)."""
        return self._sharded.state_bytes

    @property
    def _sharded(self) -> ShardedUpdate:
        assert self._update is not None, "made by the constructor"
        return self._update

    def _divide(self) -> None:
        """Cut all trainable parameters into buckets, in their own order, and these into shards."""
        own: dict[Tensor, str] = {}
        for name, parameter in self._named():
            if parameter.requires_grad:
                own.setdefault(parameter, name)
        for parameter, name in own.items():
            if hasattr(parameter, "placements") or not parameter.is_contiguous():
                raise ConfigError(
                    f"{name}, shape {tuple(parameter.shape)}, is a DTensor or not contiguous, and "
                    "cannot be sharded flat; use the plain optimizer, or make it contiguous "
                    "first: parameter.data = parameter.data.contiguous()"
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
            *(items, range(len(items))),
            bucket_bytes=BUCKET_BYTES,
            world_size=self._comm.world_size,
        )
        self._covered = {id(parameter) for parameter in own}
        self._update = ShardedUpdate(
            *(self, self._class, list(own), plans), comm=self._comm, owners=self._comm
        )

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with names for messages: those given with them, or their places."""
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if "param_names" in group:
                    yield f"parameter {group['param_names'][place]!r}", parameter
                else:
                    yield f"parameter {place} of group {number}", parameter


def _gradient_of(_: int, parameter: Tensor, piece: Piece) -> Tensor | None:
    gradient = parameter.grad
    return None if gradient is None else gradient.reshape(-1)[piece.start : piece.stop]


def _default_communicator(world: World | None) -> Communicator:
    if world is not None:
        return communicator(world)
    import torch.distributed as dist

    if not dist.is_initialized():
        return SingleCommunicator()
    from gradsync.comm.process_group import ProcessGroupCommunicator

    return ProcessGroupCommunicator(dist.group.WORLD)
