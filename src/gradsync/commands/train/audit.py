"""Audit: another rank recomputes one micro-batch of a step, and the gradients' bits are compared.

A rank with faulty arithmetic (a defective core, memory, an unstable clock) spoils the mean on all
ranks alike. Replicas stay equal, and `check_replicas` sees nothing. But a micro-batch's gradient is
a function of weights, micro-batch and seed: any rank can recompute it before it enters the mean.

Auditing one micro-batch of L every K steps costs 1 / (L K) of the run's time, on one rank. With W
ranks, a rank that spoils a share p of its micro-batches is named after about K W / (2 p) steps: an
audit meets it as owner or as auditor, each with probability 1 / W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.commands.train.learner import Learner, summed_loss
from gradsync.data.batch_plan import share
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import ConfigError, RunError
from gradsync.runtime.seeds import seed_micro_batch, stream_seed
from gradsync.sync.check_model import group_ranks, name_ranks
from gradsync.sync.check_replicas import hash_bits


class Chosen(NamedTuple):
    """A micro-batch, the rank that trains on it, and another rank, if there is one."""

    index: int
    owner: int
    auditor: int


def choose_micro_batch(seed: int, step: int, num_micro_batches: int, world_size: int) -> Chosen:
    """Draw a micro-batch of a step and its auditor, the same on all ranks and in a repeated run."""
    draw = stream_seed(seed, "audit", step)
    index, rest = draw % num_micro_batches, draw // num_micro_batches
    shares = (share(num_micro_batches, rank, world_size) for rank in range(world_size))
    owner = next(rank for rank, mine in enumerate(shares) if index in mine)
    others = world_size - 1
    return Chosen(index, owner, (owner + 1 + rest % others) % world_size if others else owner)


def require_equal_models(learner: Learner) -> None:
    """Raise ConfigError if ranks hold shares of the weights, or different weights on purpose."""
    sync = learner.sync
    if not (sync.replica.whole_parameters and sync.replica.equal_replicas):
        raise ConfigError(
            "audit_every: ranks do not hold the same whole model (a split model, fsdp, local_sgd, "
            "diloco), so they cannot recompute each other's micro-batches; leave it out"
        )


class Audit:
    """The audit of one step.

    Args:
        learner: has a whole replica on each rank; all replicas are equal.
        seed: of the run.
        step, num_micro_batches: the step's number, and its micro-batches over all ranks.
    """

    def __init__(self, learner: Learner, seed: int, step: int, num_micro_batches: int) -> None:
        self._learner, self._seed, self._step = learner, seed, step
        self.chosen = choose_micro_batch(seed, step, num_micro_batches, learner.comm.world_size)
        self._named = [(n, p) for n, p in learner.model.named_parameters() if p.requires_grad]
        self._mine: MicroBatch | None = None
        self._told = self._no_hashes()

    def overheard(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Pass on this rank's micro-batches, and hash the gradients of the chosen one."""

        def note(row: Tensor, gradient: Tensor) -> None:
            row.copy_(hash_bits(gradient))

        for micro_batch in micro_batches:
            if micro_batch.index != self.chosen.index:
                yield micro_batch
                continue
            self._mine = micro_batch
            handles = [
                parameter.register_hook(partial(note, row))
                for (_, parameter), row in zip(self._named, self._told, strict=True)
            ]
            try:
                yield micro_batch
            finally:
                for handle in handles:
                    handle.remove()

    def compare(self) -> None:
        """Recompute the micro-batch and compare. RunError, the same on all ranks, says what differs
        and who computed it. All call it between the last micro-batch and the step.

        Three broadcasts (int64: the micro-batch's shape, inputs and targets) and an all-gather
        (int64 [2, parameters, 2]) over the whole group; they overlap buckets in flight. If bits
        differ, each rank recomputes the micro-batch and votes with one more all-gather, int64
        [parameters, 2].
        """
        comm, (_, owner, auditor) = self._learner.comm, self.chosen
        inputs, targets = self._batch()
        found = self._no_hashes()
        if comm.rank == auditor:
            found = self._recompute(inputs, targets)
        rows = self._gather(torch.stack([self._told, found]))
        told, found = rows[owner][0], rows[auditor][1]
        if torch.equal(told, found):
            return
        all_found = self._gather(self._recompute(inputs, targets))
        votes = [(owner, told), (auditor, found), *enumerate(all_found)]
        raise RunError(self._verdict(votes, told != found))

    def _verdict(self, votes: list[tuple[int, Tensor]], differ: Tensor) -> str:
        index = int(differ.any(1).nonzero()[0])
        sides = group_ranks([tuple(table.flatten().tolist()) for _, table in votes])
        largest = max(sides.values(), key=len)
        wrong = {votes[vote][0] for side in sides.values() if side is not largest for vote in side}
        what = (
            f"micro-batch {self.chosen.index} of step {self._step + 1} has two gradients, first in "
            f"{self._named[index][0]!r} ({int(differ.any(1).sum())} of {len(self._named)} tensors)"
        )
        if 2 * len(largest) > len(votes):
            return (
                f"{what}: {name_ranks(sorted(wrong))} computed wrong bits ({len(largest)} of "
                f"{len(votes)} computations agree); look at that machine's memory and processor"
            )
        who = name_ranks(sorted({rank for rank, _ in votes}))
        return f"{what}, and {who} have no majority that says which is right"

    def _recompute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Hashes of the gradients, [parameters, 2]; the step's gradients do not change."""
        learner = self._learner
        seed_micro_batch(self._seed, self._step, self.chosen.index)
        with learner.autocast:
            loss = summed_loss(learner.model, learner.model, inputs, targets)
        root = loss if learner.scaler is None else learner.scaler.scale(loss)
        parameters = [parameter for _, parameter in self._named]
        gradients = torch.autograd.grad(root, parameters, allow_unused=True)
        hashes = self._no_hashes()
        for row, gradient in zip(hashes, gradients, strict=True):
            if gradient is not None:
                row.copy_(hash_bits(gradient))
        return hashes

    def _batch(self) -> tuple[Tensor, Tensor]:
        """The micro-batch's inputs and targets on each rank, from its owner."""
        comm, mine = self._learner.comm, self._mine
        shape = torch.tensor(mine.inputs.shape) if mine else torch.zeros(2, dtype=torch.int64)
        comm.broadcast(shape, self.chosen.owner).wait()
        device = self._named[0][1].device
        blank = torch.zeros(*shape.tolist(), dtype=torch.int64, device=device)
        inputs, targets = (mine.inputs, mine.targets) if mine else (blank, blank.clone())
        for tokens in (inputs, targets):
            comm.broadcast(tokens, self.chosen.owner).wait()
        return inputs, targets

    def _gather(self, mine: Tensor) -> Tensor:
        """Each rank's `mine`, in rank order."""
        comm = self._learner.comm
        gathered = torch.zeros(comm.world_size * mine.numel(), dtype=torch.int64)
        comm.all_gather(gathered, mine.flatten()).wait()
        return gathered.view(comm.world_size, *mine.shape)

    def _no_hashes(self) -> Tensor:
        return torch.zeros(len(self._named), 2, dtype=torch.int64)
