"""`DDPManager`: start, wrap, load, reduce and stop, in one object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from gradsync.comm.base import Communicator
from gradsync.comm.choose import communicator
from gradsync.comm.single import SingleCommunicator
from gradsync.data.loader import Loader, loader
from gradsync.errors import ConfigError
from gradsync.runtime.session import Session, SessionOptions
from gradsync.world import World

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gradsync.sync.gradient_sync import GradientSync


class DDPManager:
    """Everything a plain DDP script needs; also a context manager.

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
        """Join the run this process was started in.

        Args:
            backend: torch backend; None takes gloo on CPU and gloo + nccl on CUDA.
            timeout_mins: longest a collective may take, minutes.

        Raises:
            LaunchError, RendezvousError: as `gs.init`.
        """
        options = SessionOptions(backend=backend, timeout_s=timeout_mins * 60)
        self._session = Session(options)
        self.world = self._session.open()
        self._comm = communicator(self.world)
        return self.world

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        import torch

        return torch.device(self.world.device)

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, the one that logs and saves."""
        return self.world.is_main

    def wrap_model(self, *models: nn.Module, sync: str = "invariant", **options: Any) -> Any:
        """Move models to the device and synchronise what trains in them; returns them.

        Nothing is wrapped (no `.module`), except under `sync="ddp"`, which returns torch's
        DistributedDataParallel around one model. After that `loss.backward()` averages gradients
        over ranks, as DDP does. Frozen parts are left alone; a model without trainable parameters
        is only moved. Several models (an encoder, adapters, heads) share one engine, so that their
        gradients travel in the same order on all ranks.

        Args:
            models: one or more modules.
            sync: a strategy; `invariant`, `bucketed` … or `ddp`.
            options: of `gs.replicate`, or of DistributedDataParallel under `ddp`.

        Returns:
            The model, or a tuple when several were given.

        Raises:
            ConfigError: no model; several under `ddp`; unknown strategy or option.
        """
        from torch import nn

        from gradsync.sync.replicate import replicate

        if not models:
            raise ConfigError("wrap_model needs a model")
        for model in models:
            model.to(self.device)
        trains = any(p.requires_grad for model in models for p in model.parameters())
        if sync == "ddp":
            if len(models) > 1:
                raise ConfigError(
                    f"sync='ddp' wraps one model, got {len(models)}: several torch DDP wrappers "
                    "would reduce in an order that may differ between ranks; use sync='invariant'"
                )
            group = getattr(self._comm, "group", None)
            if group is None or not trains:
                return models[0]
            options.setdefault("gradient_as_bucket_view", True)
            return nn.parallel.DistributedDataParallel(models[0], process_group=group, **options)
        if trains:
            whole = models[0] if len(models) == 1 else nn.ModuleList(models)
            self._handles.append(replicate(whole, self.world, sync=sync, **options))
        return models[0] if len(models) == 1 else models

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up; enclose forward and backward of all micro-batches but the last."""
        with ExitStack() as stack:
            for handle in self._handles:
                stack.enter_context(handle.no_sync())
            yield

    def get_dataloader(
        self, dataset: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True, **options: Any
    ) -> BatchLoader:
        """Batches of `batch_size` samples for this rank; in an epoch each sample comes once.

        Args:
            dataset: map-style.
            batch_size: samples per rank and step (the global batch is `batch_size * world_size`).
            seed: names the order.
            shuffle: a new order each epoch, by itself.
            options: of `gs.loader`, such as `num_workers` or `collate_fn`.
        """
        steps = loader(
            dataset,
            self.world,
            global_batch_size=batch_size * self.world.world_size,
            micro_batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            **options,
        )
        passes = max(len(dataset) // steps.plan.global_batch_size, 1)
        return BatchLoader(steps, passes)

    def all_reduce(
        self, tensor: Tensor, op: Literal["sum", "mean", "min", "max"] = "mean"
    ) -> Tensor:
        """Combine `tensor` (any shape) over all ranks, in place; returns it.

        Raises:
            ConfigError: the mean of integers, which would not be one.
        """
        if op == "mean" and not tensor.is_floating_point():
            raise ConfigError(f"the mean of {tensor.dtype} is no {tensor.dtype}; use op='sum'")
        self._comm.all_reduce(tensor, "sum" if op == "mean" else op).wait()
        return tensor.div_(self._comm.world_size) if op == "mean" else tensor

    def barrier(self) -> None:
        """Return once every rank has called it."""
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


class BatchLoader:
    """One pass gives `len(self)` batches, the same number on every rank, so that DDP cannot hang.

    A pass is as many whole global batches as the data set holds. What is left over is not dropped:
    the next pass begins with it, and the order changes by itself from epoch to epoch.
    """

    def __init__(self, steps: Loader, batches_per_pass: int) -> None:
        self._steps = steps
        self._batches = batches_per_pass

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        for count, step in enumerate(self._steps, start=1):
            for leaf in step:
                yield leaf.batch
            if count == self._batches:
                break

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands: integers that are the same on all ranks."""
        return dict(self._steps.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, also on another number of ranks."""
        self._steps.load_state_dict(state)
