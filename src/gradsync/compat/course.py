"""Names that courses on distributed training use, implemented with `gs.replicate`.

    from gradsync.compat.course import NaiveDDPTrainer, setup_distributed, shard_batch

    setup_distributed(rank, world_size)
    trainer = NaiveDDPTrainer(model, optimizer, rank, world_size, device)
    for global_batch in loader:                                # the same batch on all ranks
        inputs, targets = shard_batch(global_batch, rank, world_size)
        print(trainer.train_step(inputs, targets))

    ddp_model = get_ddp_bucketed(module, bucket_size_mb=25)
    loss_fn(ddp_model(inputs), targets).backward()
    ddp_model.finish_gradient_synchronization()                # gradients are means over ranks now
    optimizer.step()

A new training script is shorter with `gs.replicate(model)`, which wraps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync.comm.groups import communicator
from gradsync.compat.functions import setup_distributed as setup_distributed  # noqa: PLC0414  a re-export
from gradsync.data.batch_plan import share
from gradsync.data.micro_batch import count_targets, map_tensors
from gradsync.errors import ConfigError, DataError
from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer
from gradsync.sync.replicate import replicate
from gradsync.world import World

LossFn = Callable[[Any, Any], Tensor]


class StepInfo(TypedDict):
    """Result of `NaiveDDPTrainer.train_step`; times are this rank's, in seconds.

    `loss` is the mean over the global batch, equal on all ranks (nan if the batch is empty).
    `compute_time` is forward and backward; `comm_time` is all-reducing, including the wait for
    slower ranks; `comm_fraction` is its share of `total_time`. `num_comm_ops` counts parameters
    with a gradient on some rank, tied ones once.
    """

    loss: float
    total_time: float
    compute_time: float
    comm_time: float
    comm_fraction: float
    num_comm_ops: int


class NaiveDDPTrainer:
    """Trains a replica: backward, one all-reduce per gradient, one after the other, then the
    optimizer. It is the baseline for the faster strategies:
    `gs.replicate(model, strategy="naive")`.

    Args:
        model: moves to `device`; takes rank 0's weights and buffers.
        optimizer: over the model's parameters.
        rank: of this process, as given to `setup_distributed`.
        world_size: number of processes.
        device: such as "cpu" or "cuda:0".

    Raises:
        ConfigError: the process group has another rank or world size.
        RunError: several ranks, but no process group.
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
        comm = communicator(World(rank=rank, world_size=world_size, device_name=str(device)))
        if (comm.rank, comm.world_size) != (rank, world_size):
            raise ConfigError(
                f"NaiveDDPTrainer was told rank {rank} of {world_size}, but the process group says "
                f"rank {comm.rank} of {comm.world_size}"
            )
        self._sync = replicate(self.model, strategy="naive", comm=comm)
        self._num_reduced = 0
        optimizer.register_step_pre_hook(self._count_reduced)

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn | None = None) -> StepInfo:
        """One optimizer step on this rank's shard of the global batch; all ranks call it.

        Shards may differ in size, and a rank without samples takes part. Losses are summed, and the
        sum over all ranks is divided once, so the mean is that of the global batch.

        Args:
            inputs: tensor [B, …], or a tuple or dict of them as the model's arguments.
            targets: the loss's second argument; class indices or values, [B, …].
            loss_fn: `loss_fn(model(inputs), targets)` gives the losses, [B, …], or their mean over
                the shard, []. The mean counts once for each integer target that is not -100 (for
                other targets: for each sample). None: cross-entropy over the last dimension for
                integer targets, without -100, and squared error for others.

        Raises:
            DataError: tensors have different lengths; values and outputs have different shapes.
        """
        inputs, targets = map_tensors((inputs, targets), lambda tensor: tensor.to(self.device))
        begin = self._now()
        if num_samples := _num_samples((inputs, targets)):
            if isinstance(inputs, Mapping):
                outputs = self.model(**inputs)
            else:
                several = isinstance(inputs, tuple | list)
                outputs = self.model(*inputs) if several else self.model(inputs)
            loss, weight, reduction = _loss(outputs, targets, loss_fn, num_samples)
            self._sync.backward(loss, weight=weight, reduction=reduction)
        computed = self._now()
        self._num_reduced = 0
        result = self._sync.step(self.optimizer)
        total_time = self._now() - begin
        comm_time = result.exposed.seconds()
        return StepInfo(
            loss=float(result.mean_loss),
            total_time=total_time,
            compute_time=computed - begin,
            comm_time=comm_time,
            comm_fraction=comm_time / total_time,
            num_comm_ops=self._num_reduced,
        )

    def _count_reduced(self, *_: Any) -> None:
        """What has a gradient when the optimizer steps has been reduced."""
        self._num_reduced = sum(p.grad is not None for p in self.model.parameters())

    def _now(self) -> float:
        """The time after the device has finished all work; otherwise it would time the launch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def shard_batch(global_batch: Any, rank: int, world_size: int) -> Any:
    """This rank's contiguous part of a batch, cut along the first dimension.

    The batch need not be divisible: parts differ by at most one sample, and may be empty.
    `train_step` weights them correctly.

    Args:
        global_batch: a tensor [B, …], or nested tuples, lists and dicts of tensors; numbers,
            strings and tensors without dimension pass through unchanged.
        rank: 0 .. world_size-1.
        world_size: number of parts.

    Returns:
        The same structure with views of the tensors.

    Raises:
        ConfigError: `rank` is out of range.
        DataError: tensors of different lengths, or no tensors.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in 0..{world_size - 1}, got {rank}")
    num_samples = _num_samples(global_batch)
    if num_samples is None:
        raise DataError(f"a batch to shard needs a tensor; got {type(global_batch).__name__}")
    part = share(num_samples, rank, world_size)
    mine = slice(part.start, part.stop)
    return map_tensors(global_batch, lambda tensor: tensor[mine] if tensor.dim() else tensor)


def _loss(
    outputs: Any, targets: Any, loss_fn: LossFn | None, num_samples: int
) -> tuple[Tensor, int, Literal["mean", "sum"]]:
    """This shard's loss, [], the count that it is the sum or mean of, and which of the two."""
    if loss_fn is not None:
        losses = loss_fn(outputs, targets)
        if losses.dim() == 0:
            return losses, count_targets((outputs, targets), num_samples), "mean"
        return losses.sum(), losses.numel(), "sum"
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


def _num_samples(batch: Any) -> int | None:
    """The common length of all tensors in a batch; None without tensors."""
    lengths: dict[int, None] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim():
            lengths[len(tensor)] = None
        return tensor

    map_tensors(batch, note)
    if len(lengths) > 1:
        raise DataError(f"tensors of one batch have different lengths: {[*lengths]}")
    return next(iter(lengths), None)


class SynchronisedModule(nn.Module):
    """A module whose gradients become means over ranks; takes rank 0's weights and buffers."""

    def __init__(self, module: nn.Module, *, strategy: str, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._sync = replicate(self, strategy=strategy, **options)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's forward."""
        return self.module(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only; enclose forward and backward of all micro-batches but the last."""
        return self._sync.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over ranks; call it before the optimizer's step."""
        self._sync.finish()


def get_ddp_individual_parameters(module: nn.Module) -> SynchronisedModule:
    """All-reduce each gradient separately while backward runs."""
    return SynchronisedModule(module, strategy="overlap")


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> SynchronisedModule:
    """All-reduce gradients in buckets of `bucket_size_mb` (MiB) while backward runs."""
    return SynchronisedModule(module, strategy="bucketed", bucket_mb=bucket_size_mb)


def get_sharded_optimizer(
    params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """`optimizer_cls(params, **kwargs)`, with its state divided over the ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
