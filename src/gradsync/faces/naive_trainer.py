"""`NaiveDDPTrainer` and `shard_batch`: data parallelism in its shortest form, with a clock.

    setup_distributed(rank, world_size)
    trainer = NaiveDDPTrainer(model, optimizer, rank, world_size, device)
    for inputs, targets in batches:                            # global batches, alike on all ranks
        inputs, targets = shard_batch((inputs, targets), rank, world_size)
        print(trainer.train_step(inputs, targets))

After backward each gradient is all-reduced by itself, one after the other: `replicate(sync="naive")`
and its step, nothing else. It is what the cleverer strategies are measured against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from gradsync.comm.choose import communicator
from gradsync.data.plan import share
from gradsync.errors import ConfigError, DataError
from gradsync.sync.naive import NaiveReducer
from gradsync.sync.reducer import Reduction
from gradsync.sync.replicate import replicate
from gradsync.world import World

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    LossFn = Callable[[Any, Any], Tensor]


class StepInfo(TypedDict):
    """What `NaiveDDPTrainer.train_step` returns; times are this rank's own."""

    loss: float
    """Mean over the samples of all ranks, equal on all of them."""
    total_time: float
    """The whole step, seconds."""
    compute_time: float
    """Forward and backward, seconds."""
    comm_time: float
    """All-reducing gradients, seconds; waiting for slower ranks is part of it."""
    comm_fraction: float
    """comm_time / total_time."""
    num_comm_ops: int
    """All-reduces of gradients: parameters with a gradient on some rank, tied ones once."""


class NaiveDDPTrainer:
    """Trains a replica: backward, one all-reduce per gradient, optimizer.

    Args:
        model: moved to `device`; takes rank 0's weights and buffers.
        optimizer: over the model's parameters.
        rank: of this process, as given to `setup_distributed`.
        world_size: number of processes.
        device: such as "cpu" or "cuda:0".

    Raises:
        ConfigError: the process group says another rank or world size.
        RunError: several ranks but no process group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        import torch

        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        world = World(rank=rank, world_size=world_size, device=str(device))
        comm = communicator(world)
        if (comm.rank, comm.world_size) != (rank, world_size):
            raise ConfigError(
                f"NaiveDDPTrainer was told rank {rank} of {world_size}, but the process group says "
                f"rank {comm.rank} of {comm.world_size}"
            )
        self._sync = replicate(self.model, sync="naive", comm=comm)

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn | None = None) -> StepInfo:
        """One optimizer step on this rank's shard of the global batch; all ranks call it.

        Shards may differ in size, and a rank without samples takes part: losses are summed over
        samples and divided once by the number of samples of all ranks.

        Args:
            inputs: tensor [B, …] (moved to the device), or a tuple or dict of tensors for the model.
            targets: tensor [B, …], class indices or values, or anything `loss_fn` takes.
            loss_fn: `loss_fn(model(inputs), targets)`, the mean over the shard ([], as torch's
                losses give it) or the losses themselves ([B, …]). None: cross-entropy over the last
                dimension where targets are integers (-100 is left out), else squared error.
        """
        import torch

        on_device = (_move(inputs, self.device), _move(targets, self.device))
        begin = self._now()
        if num_samples := _num_samples(on_device):
            outputs = _call(self.model, on_device[0])
            losses = (_default_loss if loss_fn is None else loss_fn)(outputs, on_device[1])
            # A mean over the shard becomes the shard's sum again: shards have different sizes.
            if losses.dim() == 0:
                self._sync.backward(losses * num_samples, weight=num_samples)
            else:
                kept = losses[~torch.isnan(losses)]
                self._sync.backward(kept.sum(), weight=kept.numel())
        computed = self._now()
        used = _Counting(self._sync.reducer)
        result = self._sync.step(self.optimizer)
        end = self._now()
        comm_time = result.exposed.seconds()
        return StepInfo(
            loss=float(result.mean_loss),
            total_time=end - begin,
            compute_time=computed - begin,
            comm_time=comm_time,
            comm_fraction=comm_time / (end - begin),
            num_comm_ops=used,
        )
