"""`DDPManager`: start, wrap, load, reduce and stop, in one object; batches under other projects'
names: its `get_dataloader`, and `DatasetLoader`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.reductions import all_reduce
from gradsync.compat.course import SynchronisedModule
from gradsync.compat.functions import backend_here
from gradsync.data.batch_plan import SampleOrder, require_at_least, share
from gradsync.data.loader import Loader
from gradsync.data.micro_batch import move_to
from gradsync.data.tokens import open_dataset
from gradsync.errors import ConfigError
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from gradsync.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from gradsync.comm.reductions import Op


class DDPManager:
    """Everything that a plain DDP script needs.

    Join the run with `initialize`, or use it as a context manager:

        with DDPManager() as manager:
            model = manager.wrap_model(build_model())
            for batch in manager.get_dataloader(dataset, batch_size=8):
                ...
    """

    def __init__(self) -> None:
        self.world = World()
        self._session: Session | None = None
        self._comm: Communicator = SingleCommunicator()
        self._handles: list[GradientSync] = []

    def initialize(self, backend: str | None = None, timeout_mins: float = 30) -> World:
        """Join the run in which this process was started.

        `backend` None or "nccl" means gloo on CPU and gloo + nccl on CUDA; a collective may take at
        most `timeout_mins` minutes.
        """
        options = SessionOptions(backend=backend_here(backend), timeout_s=timeout_mins * 60)
        self._session = Session(options)
        self.world = self._session.open()
        self._comm = communicator(self.world)
        return self.world

    def __getattr__(self, name: str) -> Any:
        """`rank`, `world_size`, `local_rank`, `device` and `is_main_process` are the world's."""
        if name not in ("rank", "world_size", "local_rank", "device", "is_main_process"):
            raise AttributeError(f"DDPManager has no attribute {name!r}")
        return getattr(self.world, name.removesuffix("_process"))

    def wrap_model(self, *models: nn.Module, strategy: str = "invariant", **options: Any) -> Any:
        """Move models to the device and synchronise what trains in them; returns the one, or all.

        Nothing is wrapped: use `model` for a script's `model.module`, and `manager.no_sync()` for
        its `model.no_sync()`. Under `strategy="ddp"` one model is wrapped in torch's
        DistributedDataParallel (on one rank, in a stand-in with these two). After that
        `loss.backward()` averages gradients over ranks, as DDP does. Frozen parts are not changed;
        a model without trainable parameters only moves. Several models (an encoder, adapters,
        heads) share one engine, so their gradients travel in the same order on all ranks.

        Args:
            models: one or more modules.
            strategy: `invariant`, `bucketed` … or `ddp`.
            options: of `gs.replicate`, including DistributedDataParallel's; under `ddp`, torch's.

        Raises:
            ConfigError: several models under `ddp`; unknown strategy or option.
        """
        for model in models:
            model.to(self.device)
        trains = any(p.requires_grad for model in models for p in model.parameters())
        if strategy == "ddp":
            return self._wrap_in_ddp(models, options) if trains else models[0]
        if trains:
            whole = models[0] if len(models) == 1 else nn.ModuleList(models)
            self._handles.append(replicate(whole, self.world, strategy=strategy, **options))
        return models[0] if len(models) == 1 else models

    def _wrap_in_ddp(self, models: tuple[nn.Module, ...], options: dict[str, Any]) -> nn.Module:
        if len(models) > 1:
            raise ConfigError(
                f"strategy='ddp' wraps one model, got {len(models)}: several torch DDP wrappers "
                "would reduce in an order that may differ between ranks; use strategy='invariant'"
            )
        group = getattr(self._comm, "group", None)
        if group is None:
            return SynchronisedModule(models[0], strategy="naive")
        if self.device.type == "cpu":  # DDP takes no device_ids there
            options |= {"device_ids": None, "output_device": None}
        options = {"gradient_as_bucket_view": True, **options}
        return nn.parallel.DistributedDataParallel(models[0], process_group=group, **options)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate only; enclose forward and backward of all micro-batches but the last."""
        with ExitStack() as stack:
            for handle in self._handles:
                stack.enter_context(handle.no_sync())
            yield

    def get_dataloader(
        self, dataset: Any, batch_size: int, shuffle: bool = True, **options: Any
    ) -> BatchLoader:
        """Batches of `batch_size` samples for this rank; each sample comes once per pass.

        Args:
            dataset: map-style.
            batch_size: samples per rank and step (the global batch is `batch_size * world_size`).
            shuffle: a new order each epoch, automatically.
            options: of torch's `DataLoader`, such as `num_workers`, `collate_fn` or `drop_last`;
                and `seed`, of the order.

        Raises:
            ConfigError: fewer samples than ranks.
            TypeError, ValueError: an option that torch refuses; samplers are ours.
        """
        return BatchLoader(dataset, self.world, batch_size, shuffle=shuffle, **options)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op | dist.ReduceOp | dist.ReduceOp.RedOpType = "sum",
        *,
        name: str | None = None,
    ) -> Tensor:
        """Combine `tensor` over all ranks, in place; see `gs.all_reduce`."""
        return all_reduce(tensor, op, comm=self._comm, name=name)

    def barrier(self) -> None:
        """Return after every rank has called it."""
        self._comm.barrier()

    def cleanup(self, error: BaseException | None = None) -> None:
        """Leave the run; safe to call twice."""
        for handle in self._handles:
            handle.close()
        self._handles.clear()
        session, self._session = self._session, None
        self._comm = SingleCommunicator()
        if session is not None:
            session.close(error)

    def __enter__(self) -> DDPManager:
        if self._session is None:
            self.initialize()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.cleanup(error)


# -- batches ---------------------------------------------------------------------------------------


class BatchLoader:
    """torch's `DataLoader` for this rank: one pass gives `len(self)` batches on the device, the
    same number on every rank, so that DDP cannot hang. `options` are torch's.

    Each sample comes once per pass, on one rank. The last batches are shorter: ranks' shares differ
    by at most one sample, and none is empty. `sampler.set_epoch(n)` names the order of the next
    pass; without it the order changes from pass to pass all the same.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self.dataset, self.batch_size, self.device = dataset, batch_size, world.device
        order = SampleOrder(len(dataset), world.seed if seed is None else seed, shuffle)
        self.sampler = SharesOfBatches(order, world, batch_size, drop_last=drop_last)
        options["pin_memory"] = world.device.type == "cuda"
        self._batches = DataLoader(dataset, batch_sampler=self.sampler, **options)

    def __len__(self) -> int:
        return len(self.sampler.shares)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield move_to(batch, self.device)


class SharesOfBatches(Sampler[list[int]]):
    """Yields a rank's part of each batch of a pass, as indices into the data set. Its length is the
    number of this rank's samples in a pass, as that of torch's `DistributedSampler`."""

    def __init__(
        self, order: SampleOrder, world: World, batch_size: int, *, drop_last: bool
    ) -> None:
        require_at_least(1, batch_size=batch_size)
        count, ranks, whole = order.num_samples, world.world_size, batch_size * world.world_size
        sizes = [whole] * (count // whole)
        if rest := 0 if drop_last else count % whole:
            few = sizes and rest < ranks  # then the batch before leaves one for each rank
            sizes[-1:] = [whole + rest - ranks, ranks] if few else [*sizes[-1:], rest]
        if min(sizes, default=0) < ranks:
            raise ConfigError(
                f"{count} samples do not give each of {ranks} ranks as many batches of {batch_size}"
                ": take fewer ranks, a larger batch_size, or drop_last=True"
            )
        self._order, self._epoch = order, 0
        self.shares: list[range] = []
        """Places of this rank's samples within a pass, by batch."""
        start = 0
        for size in sizes:
            part = share(size, world.rank, ranks)
            self.shares.append(range(start + part.start, start + part.stop))
            start += size

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` in the next pass."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self.shares))

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * self._order.num_samples
        self._epoch += 1
        for part in self.shares:
            yield self._order.indices(first + part.start, len(part)).tolist()


class DatasetLoader:
    """Endless (x, y) batches of tokens, for loops with their own arithmetic. Each `next_batch`
    takes the next `batch` samples of this process; the processes' batches of one call are disjoint.

    Args:
        batch: B, samples per process and call.
        seq_len: T, tokens in a sample.
        process_rank: this process, 0 .. num_processes-1.
        num_processes: processes that share the data.
        dataset_dir: a data directory from `gradsync prepare`.
        device: where batches go.
        split: "train" or "val".
        seed: of the order, and of random draws at each batch.
    """

    def __init__(  # noqa: PLR0917  the call that readers of other guides know
        self,
        batch: int,
        seq_len: int,
        process_rank: int,
        num_processes: int,
        dataset_dir: Path | str,
        device: torch.device | str = "cpu",
        *,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        self._loader = Loader(
            open_dataset(dataset_dir, split, seq_len),
            World(rank=process_rank, world_size=num_processes),
            global_batch_size=batch * num_processes,
            micro_batch_size=batch,
            seed=seed,
            device=device,
        )
        self._steps = iter(self._loader)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, shape [B, T] each; endless, epochs advance by themselves."""
        (micro_batch,) = next(self._steps)
        return micro_batch.inputs, micro_batch.targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Position in the data; equal on all processes."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, saved with any number of processes."""
        self._loader.load_state_dict(state)
        self._steps = iter(self._loader)
