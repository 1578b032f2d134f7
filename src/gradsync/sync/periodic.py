"""Periodic strategies: ranks step alone for some steps, then meet.

    rank 0   step ─ step ─ … ─ step ─┐             ┌─ step ─ step ─ …
    rank 1   step ─ step ─ … ─ step ─┴─ one mean ──┴─ step ─ step ─ …
             └───── inner_steps ─────┘

Between two meetings each rank has different weights, and no gradients are sent. A step sends only
its small message (loss, weight, stop flag). A rank's gradient is the mean over its own
micro-batches. A rank without one in a step does not update, but counts the step, so all ranks meet
after the same number of steps. All ranks have the same weight in the mean, whatever their targets.

Bytes per rank: 2(W-1)/W S every `inner_steps` steps, S = size of the weights and floating buffers.
One operation per dtype. One copy of the weights while ranks meet (`diloco`: always 2 S for the
round's start and the outer momentum, and 2 S more while ranks meet).

[Note: A checkpoint ends the round] In the middle of a round there are W models. A caller that needs
one model (a checkpoint, an evaluation, the end of a run) calls `synchronize_replicas`, which ends
the round after the inner steps taken so far. A checkpoint also keeps one inner optimizer's state,
rank 0's; `gather` copies it to all ranks. So a run that continues after a checkpoint equals a run
that resumes from it. The cost: the interval between checkpoints is part of the run's definition,
unless checkpoints fall on multiples of `inner_steps`, where rounds end anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import Done
from gradsync.comm.values import broadcast_json, broadcast_tensors
from gradsync.core.files import counted
from gradsync.core.torch_private import foreach_copy_, foreach_sub
from gradsync.sync.options import DilocoOptions, LocalSgdOptions
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.replicas import Replicas
from gradsync.sync.watch import ModuleHook, Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")

_PREFIX = "outer_momentum/"


class PeriodicReducer(Reducer):
    """Sums nothing; a rank's gradient is the mean over its own micro-batches."""

    def __init__(
        self, model: nn.Module, comm: Communicator, options: LocalSgdOptions | DilocoOptions
    ) -> None:
        self._periodic = PeriodicReplicas(model, comm, options)
        name = "diloco" if isinstance(options, DilocoOptions) else "local_sgd"
        super().__init__(model, comm, self._periodic, strategy=name)

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """Leave `.grad` to this rank; the step's cost is known only after `publish`."""
        self.shards.scale(divisor and 1 / divisor)
        return self._periodic.begin_step()


class PeriodicReplicas(Replicas):
    """Replicas that drift, and meet every `inner_steps` steps.

    `local_sgd` averages weights and floating buffers; each rank keeps its optimizer's momenta:
    Stich 2018 (arXiv 1805.09767); Lin et al. 2018 (arXiv 1808.07217). With `inner_steps=1`, plain
    SGD and equal shares this is synchronous SGD up to rounding.

    `diloco` has an inner optimizer on each rank, an outer one with momentum when ranks meet:
    Douillard et al. 2023 (arXiv 2311.08105), algorithm 1, with t a round and i a rank:

        theta_i   <- inner optimizer from theta, `inner_steps` steps on rank i's own data
        delta     =  1/W sum_i (theta - theta_i)             the outer gradient
        theta     <- SGD(lr=outer_lr, momentum=outer_momentum, nesterov=True) with delta

    The inner optimizer is the user's (AdamW in the paper). Its state is private to each rank and
    kept between rounds. On one rank it is not the identity, because the outer optimizer runs too.
    """

    equal_replicas = False

    def __init__(
        self, model: nn.Module, comm: Communicator, options: LocalSgdOptions | DilocoOptions
    ) -> None:
        super().__init__(model, comm)
        self.inner_steps = options.inner_steps
        self.steps_in_round = 0
        """Number of steps since the ranks last met."""
        self._outer: torch.optim.SGD | None = None
        self._start: list[Tensor] = []
        """Weights at the round's start, which the outer optimizer steps."""
        if isinstance(options, DilocoOptions):
            self._start = [p.detach().to(_wide_dtype(p), copy=True) for p in self.parameters]
            momentum = options.outer_momentum
            how = {"lr": options.outer_lr, "momentum": momentum, "nesterov": momentum > 0}
            self._outer = torch.optim.SGD(self._start, **how)
        self._on_cuda = any(parameter.is_cuda for parameter in self.parameters)
        self._hook = model.register_state_dict_pre_hook(ModuleHook(self, _warn_of_drift))
        self._warned = comm.world_size == 1
        self._note_buffers()

    def begin_step(self) -> Stopwatch:
        """Begin a step, before the update; returns the stopwatch that `publish` uses.

        The first step of a round stores its initial weights. They are not kept from the last
        meeting, since the user may have loaded others.
        """
        if not self.steps_in_round and self._outer is not None:
            foreach_copy_(self._start, [p.detach() for p in self.parameters])
        self.exposed = Stopwatch(on_cuda=self._on_cuda)
        return self.exposed

    def publish(self) -> Work:
        """Count the step, even without data on this rank; meet when the round is full."""
        self.steps_in_round += 1
        if self.steps_in_round >= self.inner_steps:
            self.synchronize_replicas()
        return Done()

    def synchronize_replicas(self) -> None:
        """End the round now, unless it has no step yet ([Note: A checkpoint ends the round]); all
        ranks call it."""
        if not self.steps_in_round:
            return
        self.exposed.start()
        if self._outer is None:
            average(self.parameters, self.comm)
        else:
            self._outer_step(self._outer)
        average_buffers(list(self.model.buffers()), self._buffer_starts, self.comm)
        self._note_buffers()
        self.exposed.stop()
        self.steps_in_round = 0

    @torch.no_grad()
    def _outer_step(self, outer: torch.optim.SGD) -> None:
        """Take one outer step from the round's start, equal on all ranks."""
        deltas = foreach_sub(self._start, [p.detach() for p in self.parameters])
        average(deltas, self.comm)
        for start, delta in zip(self._start, deltas, strict=True):
            start.grad = delta
        outer.step()
        outer.zero_grad(set_to_none=True)
        for parameter, start in zip(self.parameters, self._start, strict=True):
            parameter.copy_(start)

    def close(self) -> None:
        self._hook.remove()

    def gather(self, optimizer: Optimizer) -> None:
        """End the round; every rank continues with rank 0's inner state, as in the checkpoint. It
        goes through the CPU."""
        self.synchronize_replicas()
        named = list(self.model.named_parameters())
        tensors, described = pack_optimizer(optimizer, named)
        described = broadcast_json(self.comm, described)
        tensors = broadcast_tensors(self.comm, {n: t.detach().cpu() for n, t in tensors.items()})
        if self.comm.rank:
            unpack_optimizer(optimizer, named, tensors, described)

    def full_weights(self) -> dict[str, Tensor]:
        """Return the weights that all ranks share; this ends the round."""
        self.synchronize_replicas()
        return super().full_weights()

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the model on all ranks, and begin a round."""
        super().load_full_weights(weights)
        self.steps_in_round = 0
        self._note_buffers()

    def _note_buffers(self) -> None:
        """Store the buffers' values, which are now equal on all ranks; see `average_buffers`."""
        self._buffer_starts = [buffer.detach().clone() for buffer in self.model.buffers()]

    def state_tensors(self) -> dict[str, Tensor]:
        """The outer momentum by parameter, equal on all ranks; empty before the first meeting."""
        if self._outer is None:
            return {}
        return {
            _PREFIX + name: self._outer.state[start]["momentum_buffer"]
            for (name, _), start in zip(trainable(self.model), self._start, strict=True)
            if self._outer.state[start].get("momentum_buffer") is not None
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved outer momentum; an empty mapping resets it."""
        if self._outer is None:
            super().load_state_tensors(tensors)
            return
        self._outer.state.clear()
        self.steps_in_round = 0
        if not tensors:
            return
        for (name, _), start in zip(trainable(self.model), self._start, strict=True):
            momentum = tensors[_PREFIX + name].to(start, copy=True)
            self._outer.state[start]["momentum_buffer"] = momentum


def _warn_of_drift(replicas: PeriodicReplicas, *_: Any) -> None:
    """Hook before `model.state_dict()`: in the middle of a round it holds one rank's weights."""
    if replicas._warned or not replicas.steps_in_round:
        return
    replicas._warned = True
    log.warning(
        "model.state_dict() holds rank %d's own weights here, %s after ranks last met (they meet "
        "every %d): call sync.synchronize_replicas() on all ranks before it, or save "
        "sync.state_dict() (said once)",
        replicas.comm.rank,
        counted(replicas.steps_in_round, "step"),
        replicas.inner_steps,
    )


@torch.no_grad()
def average(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Set each tensor to its mean over all ranks of `comm`, with the same bits on each rank.

    One flat all-reduce per (floating) dtype, one division. Half precision is summed in fp32
    and rounded once, at the end. Memory: one copy of `tensors`.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((_wide_dtype(tensor), tensor.device), []).append(tensor)
    under_way = []
    for (wire, _), members in kinds.items():
        flat = torch.cat([tensor.reshape(-1).to(wire) for tensor in members])
        # Whole group, [all elements of one dtype], fp32 or fp64; overlaps only the other dtypes'.
        under_way.append((comm.all_reduce(flat), flat, members))
    for work, flat, members in under_way:
        work.wait()
        flat.div_(comm.world_size)
        parts = flat.split([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def average_buffers(
    buffers: Sequence[Tensor], starts: Sequence[Tensor], comm: Communicator
) -> None:
    """Make buffers equal on all ranks: floating buffers become their mean, others rank 0's values.

    The mean is taken of the changes since `starts`, earlier values that were equal on all ranks.
    The mean of three equal numbers may differ from that number, and a table that no rank changes
    must keep its bits.
    """
    floating = [(b, s) for b, s in zip(buffers, starts, strict=True) if b.is_floating_point()]
    changes = [b.to(_wide_dtype(b)) - s.to(_wide_dtype(s)) for b, s in floating]
    average(changes, comm)
    for (buffer, start), change in zip(floating, changes, strict=True):
        buffer.copy_(start.to(change.dtype) + change)
    for buffer in buffers:
        if not buffer.is_floating_point():
            comm.broadcast(buffer).wait()  # whole group, the buffer's shape and dtype


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    """Its dtype, or fp32 for half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)
