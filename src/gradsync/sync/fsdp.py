"""`fsdp`: torch's FSDP2. Parameters, gradients and optimizer state are sharded (ZeRO stage 3).

Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277. Parameters are whole only while their block
computes:

    forward    gather(1) ► block 1 ► free(1), gather(2) ► block 2 ► …
    backward   … gather(2) ► block 2' ► free(2), reduce_scatter(2), gather(1) ► block 1' ► …

[Note: A forward is a collective] Every forward gathers parameters, so ranks must make the same
number of forwards. The last backward is a collective too. A rank with fewer micro-batches would
leave the others waiting indefinitely. So each micro-step begins with a roll call: every rank
reports whether this is its last one, and a rank without any reports that from `launch`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers
from gradsync.core.torch_private import mesh_of, reduce_unused_params
from gradsync.errors import ConfigError
from gradsync.sync.options import FsdpOptions
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.replicas import Replicas, clip_shards
from gradsync.sync.shares import HeldState, Share, flat_state, local, sharded_as, whole
from gradsync.sync.watch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that define no forward, so nothing can be gathered before it."""


class FsdpReducer(Reducer):
    """Shards `model` in place with FSDP2, which turns its parameters into `DTensor`s.

    So the optimizer must be made afterwards. In `micro_step` gradients are sums over ranks. In the
    user's training loop (`loss.backward()`, `optimizer.step()`) they are means, as with FSDP2
    itself. All ranks must use the same blocks in a forward.

    Args:
        model: whole, with rank 0's weights on every rank, on its device.
        comm: must be a process-group communicator.
        options: `compute_dtype` is that of parameters during computation, and of the gathers;
            inputs are cast to it and outputs back. The stored parameters keep their dtype.
    """

    user_loop = waits_in_backward = needs_micro_step = True

    def __init__(self, model: nn.Module, comm: Communicator, options: FsdpOptions) -> None:
        compute, reduce = _DTYPES[options.compute_dtype], _DTYPES[options.reduce_dtype]
        first = trainable(model)[0][1]
        group = getattr(comm, "group")  # noqa: B009  no part of `Communicator`
        mesh = mesh_of(group, first.device, self)
        self._seen = Seen(model)
        self._units: list[Any] = []  # modules whose class is `FSDPModule` now
        for unit in [*(blocks_of(model) if options.blocks else []), model]:
            policy = MixedPrecisionPolicy(
                param_dtype=compute,
                reduce_dtype=reduce or (compute and torch.float32),
                output_dtype=first.dtype if compute and unit is model else None,
            )
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
            # Sums, with gradsync's division: gloo has no mean, and PREMUL_SUM is NCCL's alone.
            sharded.set_force_sum_reduction_for_comms(True)
            # A rank that did not use a parameter sends zeros, since all must reduce the same ones.
            reduce_unused_params(sharded)
            self._units.append(sharded)
        self._root = self._units[-1]
        self._seen.watch(self._units)
        super().__init__(model, comm, FsdpShards(model, comm), strategy="fsdp")
        self._complete = self._averaged = False
        self._divide_by(comm.world_size)

    @contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        """Add up gradients locally, and reduce them in the last backward. Raises on every rank if
        some ranks have no micro-batch left."""
        self._roll_call(1 if last else 2)
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._divide_by(1)
        self._seen.enclosed = True
        try:
            yield
            self._complete = last
        finally:
            self._seen.enclosed = False
            self._root.set_requires_gradient_sync(True)
            self._root.set_is_last_backward(True)
            self._divide_by(self.comm.world_size)
        self._seen.stopwatch.stop()

    def launch(self) -> list[bool]:
        """Start nothing; answer the other ranks' roll call.

        Raises on every rank if another one has a micro-batch more, or if none was the last.
        """
        complete, self._complete = self._complete, False
        if not self._seen.outside:
            self._roll_call(0)
            if not complete and self._seen.indices:
                raise ConfigError(
                    "strategy='fsdp': no micro-step of this step was `last=True`, so no gradient "
                    "was reduced; pass it for the last one, on all ranks"
                )
        self._averaged = not complete
        if complete or self._seen.indices:
            return self._seen.take()
        return super().launch()  # no backward since the last call, so no more gradients arrive

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """See `Reducer.reduce`. Sets unused zeros to None again. Backward has summed the other
        gradients, and outside `micro_step` has also divided them by the number of ranks."""
        for parameter, any_rank in zip(self.parameters, used, strict=True):
            if not any_rank:
                parameter.grad = None
        self.shards.scale(divisor and (self.comm.world_size if self._averaged else 1) / divisor)
        return copy.copy(self._seen.stopwatch)

    def close(self) -> None:
        """Leave the model sharded, because FSDP2 cannot undo it."""
        for handle in self._seen.handles:
            handle.remove()

    def _divide_by(self, factor: int) -> None:
        for unit in self._units:
            unit.set_gradient_divide_factor(float(factor))

    def _roll_call(self, left: int) -> None:
        """Compare how many micro-batches each rank has left: 0, 1, or 2 for more than one; see
        [Note: A forward is a collective]. Whole group, int64 [1], on the CPU."""
        lefts = all_gather_numbers(self.comm, left)
        if fewer := [str(rank) for rank, its in enumerate(lefts) if its < max(lefts)]:
            raise ConfigError(
                "strategy='fsdp': every rank needs the same number of micro-batches in a step, "
                f"since each forward gathers parameters from all; rank(s) {', '.join(fewer)} had "
                "fewer than the others. Choose a number of micro-batches that the world size "
                "divides, or another strategy"
            )


class FsdpShards(Replicas):
    """Rows of every parameter, gradient and state of a sharded model, as FSDP2 cuts them."""

    whole_parameters = False

    def owned(self) -> list[Tensor]:
        """This rank's shards of the gradients."""
        return [local(p.grad) for p in self.parameters if p.grad is not None]

    def whole_gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else whole(p.grad) for p in self.parameters]

    def clip(self, max_norm: float) -> Tensor:
        return clip_shards(self.owned(), max_norm, self.comm, self.parameters[0].device)

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """Update this rank's shards; raise ConfigError for an optimizer that cannot do this."""
        if any(isinstance(optimizer, torch.optim.Muon) for optimizer in optimizers):
            raise ConfigError(
                "strategy='fsdp': torch.optim.Muon orthogonalises whole matrices, of which each "
                "rank holds some rows; use strategy='invariant', or AdamW for them"
            )
        super().update(optimizers)

    def gather(self, optimizer: Optimizer) -> None:
        for state in _states(optimizer).values():
            for name, value in state.items():
                if isinstance(value, DTensor):
                    state[name] = whole(value)

    def scatter(
        self, optimizer: Optimizer, states: Mapping[Any, dict[str, Any]] | None = None
    ) -> None:
        if states is not None:
            optimizer.state.clear()
            for parameter, state in states.items():
                for name, value in state.items():
                    held = value
                    if isinstance(value, torch.Tensor) and value.dim():
                        held = torch.zeros_like(parameter, dtype=value.dtype)
                        local(held).view(-1).copy_(value)
                    optimizer.state[parameter][name] = held
            return
        for parameter, state in _states(optimizer).items():
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and isinstance(parameter, DTensor)
                    and not isinstance(value, DTensor)
                    and value.shape == parameter.shape
                ):
                    state[name] = sharded_as(value, parameter).clone()

    def sharded_state_dict(self, optimizer: Optimizer) -> HeldState:
        states = _states(optimizer)
        return {
            p: (self._share(p), flat_state(states[p], p) if p in states else {})
            for group in optimizer.param_groups
            for p in group["params"]
        }

    def sharded_weights(self) -> dict[str, tuple[Share, Tensor]]:
        return {
            name: (self._share(tensor), local(tensor).reshape(-1))
            for name, tensor in self.model.state_dict().items()
        }

    def full_weights(self) -> dict[str, Tensor]:
        """See `Replicas.full_weights`: one all-gather per parameter, its shape and dtype."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                local(own[name]).copy_(local(sharded_as(tensor, own[name])))

    def _share(self, tensor: Tensor) -> Share:
        """FSDP2 cuts along the first dimension as `torch.chunk` does: the first ranks have
        ceil(rows / ranks) rows, the last ones fewer or none. Rank 0 saves plain tensors."""
        shape, rank = tuple(tensor.shape), self.comm.rank
        if not isinstance(tensor, DTensor):
            return Share(shape=shape, start=0, stop=tensor.numel(), saves=rank == 0)
        assert tuple(tensor.placements) == (Shard(0),), "rows alone are contiguous"
        rows, row, held = shape[0], prod(shape[1:]), local(tensor).numel()
        start = min(rank * -(-rows // self.comm.world_size), rows) * row
        return Share(shape=shape, start=start, stop=start + held, saves=held > 0 or rank == 0)


class Seen:
    """Records which parameters got a gradient on this rank, using FSDP2's public hooks only.

    Made before `model` is sharded. While a block computes, FSDP2 replaces the sharded parameters by
    whole ones. Their gradients are ready first; the sharded `.grad` shows only the sum over all
    ranks, including zeros. Hooks on parameters refer to this object, so it must not keep modules.
    """

    def __init__(self, model: nn.Module) -> None:
        named = trainable(model)
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._homes = [
            (module, attribute, index_of[id(parameter)])
            for module in model.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            if id(parameter) in index_of
        ]
        self._count = len(named)
        self.indices: set[int] = set()
        """Parameters that got a gradient since the last `take`."""
        self.handles: list[Any] = []
        self.enclosed = False
        """Whether a micro-step is in progress."""
        self.outside = False
        """Whether a gradient arrived while no micro-step was in progress."""
        self.stopwatch = Stopwatch(on_cuda=any(p.is_cuda for _, p in named))
        """Started by each gradient, so it marks the end of this rank's work."""

    def watch(self, units: Iterable[nn.Module]) -> None:
        """Watch the gradients of each unit; call it once, after sharding, with the root last."""
        homes, self._homes = self._homes, []
        for unit in units:
            inside = set(unit.modules())
            pending = [home for home in homes if home[0] in inside]
            homes = [home for home in homes if home[0] not in inside]
            self.handles.append(unit.register_forward_pre_hook(partial(self._attach, pending)))

    def take(self) -> list[bool]:
        """For each trainable parameter, whether it got a gradient since the last call."""
        flags = [index in self.indices for index in range(self._count)]
        self.indices.clear()
        self.outside = False
        return flags

    def _attach(self, pending: list[tuple[nn.Module, str, int]], *_: Any) -> None:
        """Attach hooks after FSDP2's own hook, when the unit's parameters are whole. They are the
        same objects from then on."""
        while pending:
            module, attribute, index = pending.pop()
            parameter = getattr(module, attribute)
            assert not isinstance(parameter, DTensor), "FSDP2 gathers before this hook"
            mark = partial(self._mark, index)
            self.handles.append(parameter.register_post_accumulate_grad_hook(mark))

    def _mark(self, index: int, _: Tensor) -> None:
        self.indices.add(index)
        self.outside |= not self.enclosed
        self.stopwatch.start()


def _states(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    """State of the parameters, in the order of the groups, because gathering is a collective."""
    return {
        parameter: optimizer.state[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost children of `nn.ModuleList`s, which FSDP2 gathers and frees as a unit.

    A block that shares a parameter or a module with the rest of the model stays with the root,
    because in FSDP2 a parameter belongs to one unit only.
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        for child in module:
            own = Counter(id(p) for _, p in child.named_parameters(remove_duplicate=False))
            times = places[id(child)]
            closed = all(everywhere[key] == count * times for key, count in own.items())
            if own and closed and id(child) not in inside and not isinstance(child, _CONTAINERS):
                blocks.append(child)
                inside |= {id(part) for part in child.modules()}
    return blocks
