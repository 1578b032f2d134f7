"""`NaiveDDPTrainer` and `shard_batch`: data parallelism in its shortest form, with a clock.

    setup_distributed(rank, world_size)
    trainer = NaiveDDPTrainer(model, optimizer, rank, world_size, device)
    for global_batch in loader:                                # the same batch on all ranks
        inputs, targets = shard_batch(global_batch, rank, world_size)
        print(trainer.train_step(inputs, targets))

After backward each gradient is all-reduced by itself, one after the other:
`gs.replicate(model, sync="naive")` and its step, nothing else. It is what the cleverer strategies
are measured against.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync.comm.groups import communicator
from gradsync.data.leaf import count_targets
from gradsync.data.plan import share
from gradsync.errors import ConfigError, DataError
from gradsync.sync.replicate import replicate
from gradsync.world import World

LossFn = Callable[[Any, Any], Tensor]


class StepInfo(TypedDict):
    """Result of `NaiveDDPTrainer.train_step`."""

    loss: float
    """Mean over the global batch, equal on all ranks; nan when it is empty."""
    total_time: float
    """The whole step on this rank, seconds."""
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
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        comm = communicator(World(rank=rank, world_size=world_size, device=str(device)))
        if (comm.rank, comm.world_size) != (rank, world_size):
            raise ConfigError(
                f"NaiveDDPTrainer was told rank {rank} of {world_size}, but the process group says "
                f"rank {comm.rank} of {comm.world_size}"
            )
        self._sync = replicate(self.model, sync="naive", comm=comm)
        self._num_gradients = 0
        trainer = weakref.proxy(self)
        optimizer.register_step_pre_hook(lambda *_: trainer._count_gradients())

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn | None = None) -> StepInfo:
        """One optimizer step on this rank's shard of the global batch; all ranks call it.

        Shards may differ in size, and a rank without samples takes part: losses are summed, and
        the sum over all ranks is divided once, so the mean is that of the global batch.

        Args:
            inputs: tensor [B, …], or a tuple or dict of them as the model's arguments.
            targets: what the loss compares with; class indices or values, [B, …].
            loss_fn: `loss_fn(model(inputs), targets)`: the losses, [B, …], or their mean over the
                shard, [], which counts once for each integer target that is not -100 (others: for
                each sample). None: cross-entropy over the last dimension for integer targets (-100
                is left out), squared error for others.

        Raises:
            DataError: tensors of different lengths; values and outputs of different shapes; without
                a loss_fn, targets that are no tensor.
        """
        inputs, targets = _move((inputs, targets), self.device)
        begin = self._now()
        if num_samples := _num_samples((inputs, targets)):
            loss, weight, reduction = _loss(
                _call(self.model, inputs), targets, loss_fn, num_samples
            )
            self._sync.backward(loss, weight=weight, reduction=reduction)
        computed = self._now()
        self._num_gradients = 0
        result = self._sync.step(self.optimizer)
        total_time = self._now() - begin
        comm_time = result.exposed.seconds()
        return StepInfo(
            loss=float(result.mean_loss),
            total_time=total_time,
            compute_time=computed - begin,
            comm_time=comm_time,
            comm_fraction=comm_time / total_time,
            num_comm_ops=self._num_gradients,
        )

    def _count_gradients(self) -> None:
        """When the optimizer steps, the gradients that are there are those that were reduced."""
        self._num_gradients = sum(p.grad is not None for p in self.model.parameters())

    def _now(self) -> float:
        """The clock once the device has done all it was given; else we would time the launch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def shard_batch(global_batch: Any, rank: int, world_size: int) -> Any:
    """This rank's contiguous part of a batch, cut along the first dimension.

    The batch need not be divisible: parts differ by at most one sample, and may be empty.
    `train_step` weighs them right.

    Args:
        global_batch: a tensor [B, …], or tuples, lists and dicts of them, nested; numbers, strings
            and tensors without dimension are handed on as they are.
        rank: 0 .. world_size-1.
        world_size: number of parts.

    Returns:
        The same structure with views of the tensors.

    Raises:
        ConfigError: `rank` is no rank.
        DataError: tensors of different lengths, or none at all.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in 0..{world_size - 1}, got {rank}")
    num_samples = _num_samples(global_batch)
    if num_samples is None:
        raise DataError(f"a batch to shard needs a tensor; got {type(global_batch).__name__}")
    mine = share(num_samples, rank, world_size)
    return _map(global_batch, lambda tensor: tensor[mine.start : mine.stop])


def _loss(
    outputs: Any, targets: Any, loss_fn: LossFn | None, num_samples: int
) -> tuple[Tensor, int, str]:
    """This shard's loss, [], how many it is the sum or mean of, and which of the two."""
    if loss_fn is not None:
        losses = loss_fn(outputs, targets)
        if losses.dim() == 0:
            return losses, count_targets((outputs, targets), num_samples), "mean"
        return losses.sum(), losses.numel(), "sum"
    if not isinstance(targets, Tensor):
        raise DataError(f"targets are a {type(targets).__name__}: give train_step a loss_fn")
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            raise DataError(
                f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}; give "
                "train_step a loss_fn for them"
            )
        return F.mse_loss(outputs, targets, reduction="sum"), targets.numel(), "sum"
    if outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(outputs, targets, reduction="sum")
    return loss, count_targets((outputs, targets), num_samples), "sum"


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _num_samples(batch: Any) -> int | None:
    """The length that all tensors of a batch share; None without tensors."""
    lengths = dict.fromkeys(len(tensor) for tensor in _tensors(batch))
    if len(lengths) > 1:
        raise DataError(f"tensors of one batch have different lengths: {[*lengths]}")
    return next(iter(lengths), None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _tensors(part)


def _map(batch: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`fn` of every tensor with dimensions, in the structure they came in."""
    if isinstance(batch, Tensor):
        return fn(batch) if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _map(part, fn) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_map(part, fn) for part in batch]
        # A named tuple takes its fields one by one.
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _move(batch: Any, device: torch.device) -> Any:
    return _map(batch, lambda tensor: tensor.to(device))
