"""`DDPManager`: start, wrap, load, reduce and stop, in one object."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.reductions import all_reduce
from gradsync.compat.course import SynchronisedModule
from gradsync.compat.functions import backend_here
from gradsync.compat.loaders import BatchLoader
from gradsync.errors import ConfigError
from gradsync.runtime.session import Session, SessionOptions
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cleanup(error)
