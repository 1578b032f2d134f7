"""Leaf audit: another rank recomputes one leaf of a step, and the gradients' bits are compared.

A rank with faulty arithmetic (a defective core, memory, an unstable clock) spoils the mean on all
ranks alike. Replicas stay equal, and `check_replicas` sees nothing. But a leaf's gradient is a
function of weights, leaf and seed: any rank can recompute it before it enters the mean.

Auditing one leaf of L every K steps costs 1 / (L K) of the run's time, on one rank. With W ranks, a
rank that spoils a share p of its leaves is named after about K W / (2 p) steps: an audit meets it
as the leaf's owner or as its auditor, each with probability 1 / W.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.commands.train.learner import Learner, summed_loss
from gradsync.data.batch_plan import share
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_micro_batch, stream_seed
from gradsync.sync.check_model import group_ranks, name_ranks
from gradsync.sync.check_replicas import hash_bits


class Chosen(NamedTuple):
    """A leaf and the ranks that compute it."""

    leaf: int
    owner: int
    """Rank that trains on the leaf."""
    auditor: int
    """Another rank, if there is one."""


def choose_leaf(seed: int, step: int, num_leaves: int, world_size: int) -> Chosen:
    """Draw a leaf of a step and its auditor, the same on all ranks and in a repeated run."""
    draw = stream_seed(seed, "audit", step)
    leaf, rest = draw % num_leaves, draw // num_leaves
    owner = next(r for r in range(world_size) if leaf in share(num_leaves, r, world_size))
    others = world_size - 1
    return Chosen(leaf, owner, (owner + 1 + rest % others) % world_size if others else owner)


def require_equal_models(learner: Learner) -> None:
    """Raise ConfigError if ranks hold shares of the weights, or different weights on purpose."""
    sync = learner.sync
    if not (sync.replica.whole_parameters and sync.replica.equal_replicas):
        raise ConfigError(
            "audit_every: ranks do not hold the same whole model (a split model, fsdp, local_sgd, "
            "diloco), so they cannot recompute each other's micro-batches; leave it out"
        )


class LeafAudit:
    """The audit of one step.

    Args:
        learner: has a whole replica on each rank; all replicas are equal.
        seed: of the run.
        step, num_leaves: the step's number, and its leaves over all ranks.
    """

    def __init__(self, learner: Learner, seed: int, step: int, num_leaves: int) -> None:
        self._learner, self._seed, self._step = learner, seed, step
        self.chosen = choose_leaf(seed, step, num_leaves, learner.comm.world_size)
        self._named = [(n, p) for n, p in learner.model.named_parameters() if p.requires_grad]
        self.kept: list[MicroBatch] = []
        """This rank's leaves, kept to repeat the step."""
        self._told = self._no_hashes()

    def overheard(self, leaves: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Pass on this rank's leaves (from the loader, or `kept` with the same random numbers), and
        hash the gradients of the chosen leaf."""
        again, self.kept, self._told = leaves is self.kept, [], self._no_hashes()
        for leaf in leaves:
            self.kept.append(leaf)
            if again:
                seed_micro_batch(self._seed, self._step, leaf.index)
            if leaf.index != self.chosen.leaf:
                yield leaf
                continue
            with self._noting():
                yield leaf

    def compare(self) -> str:
        """Recompute the leaf and compare; "" if the bits are equal, else what differs and which
        rank computed it. The same on all ranks; all call it between the last leaf and the step.

        Three broadcasts (int64: the leaf's shape, inputs and targets) and an all-gather (int64
        [2, parameters, 2]) over the whole group; they overlap buckets in flight. If bits differ,
        each rank recomputes the leaf and votes with one more all-gather, int64 [parameters, 2].
        """
        comm, (_, owner, auditor) = self._learner.comm, self.chosen
        batch = self._batch()
        found = self._recompute(batch) if comm.rank == auditor else self._no_hashes()
        rows = self._gather(torch.stack([self._told, found]))
        told, found = rows[owner][0], rows[auditor][1]
        if torch.equal(told, found):
            return ""
        votes = [(owner, told), (auditor, found), *enumerate(self._gather(self._recompute(batch)))]
        return self._verdict(votes, told != found)

    def _verdict(self, votes: list[tuple[int, Tensor]], differ: Tensor) -> str:
        index = int(differ.any(1).nonzero()[0])
        sides = group_ranks([tuple(table.flatten().tolist()) for _, table in votes])
        largest = max(sides.values(), key=len)
        wrong = {votes[vote][0] for side in sides.values() if side is not largest for vote in side}
        what = (
            f"micro-batch {self.chosen.leaf} of step {self._step + 1} has two gradients, first in "
            f"{self._named[index][0]!r} ({int(differ.any(1).sum())} of {len(self._named)} tensors)"
        )
        if 2 * len(largest) > len(votes):
            return (
                f"{what}: {name_ranks(sorted(wrong))} computed wrong bits ({len(largest)} of "
                f"{len(votes)} computations agree); look at that machine's memory and processor"
            )
        who = name_ranks(sorted({rank for rank, _ in votes}))
        return f"{what}, and {who} have no majority that says which is right"

    def _recompute(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Hashes of the leaf's gradients, [parameters, 2]; the step's gradients do not change."""
        learner = self._learner
        seed_micro_batch(self._seed, self._step, self.chosen.leaf)
        with learner.autocast:
            loss = summed_loss(learner.model, learner.model, *batch)
        root = loss if learner.scaler is None else learner.scaler.scale(loss)
        parameters = [parameter for _, parameter in self._named]
        hashes = self._no_hashes()
        for row, gradient in zip(
            hashes, torch.autograd.grad(root, parameters, allow_unused=True), strict=True
        ):
            if gradient is not None:
                row.copy_(hash_bits(gradient))
        return hashes

    @contextmanager
    def _noting(self) -> Generator[None]:
        def note(row: Tensor, gradient: Tensor) -> None:
            row.copy_(hash_bits(gradient))

        handles = [
            parameter.register_hook(partial(note, row))
            for (_, parameter), row in zip(self._named, self._told, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _batch(self) -> tuple[Tensor, Tensor]:
        """The chosen leaf's inputs and targets on each rank, from its owner."""
        comm, shape = self._learner.comm, torch.zeros(2, dtype=torch.int64)
        mine = [leaf for leaf in self.kept if leaf.index == self.chosen.leaf]
        if mine:
            shape = torch.tensor(mine[0].inputs.shape)
        comm.broadcast(shape, self.chosen.owner).wait()
        device = self._named[0][1].device
        blank = torch.zeros(*shape.tolist(), dtype=torch.int64, device=device)
        inputs, targets = (mine[0].inputs, mine[0].targets) if mine else (blank, blank.clone())
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
