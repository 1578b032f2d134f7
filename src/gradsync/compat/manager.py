"""`DDPManager`: start, wrap, load, reduce and stop, in one object."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.reductions import all_reduce
from gradsync.compat.functions import backend_here
from gradsync.core.files import counted
from gradsync.data.batch_plan import MicroBatchSpan, StepSpan, share
from gradsync.data.loader import WORKER_OPTIONS, Loader
from gradsync.errors import ConfigError
from gradsync.runtime.session import Session, SessionOptions
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import check_value, take_torchs
from gradsync.sync.replicate import replicate
from gradsync.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from gradsync.comm.reductions import Op

_SET_BY_US = {"module", "process_group", "device_mesh", "worker_options", "world"}
_SET_BY_US |= {"dataset", "global_batch_size", "micro_batch_size"}


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
        """`rank`, `world_size`, `local_rank`, `device`: attributes of `world`."""
        if name not in ("rank", "world_size", "local_rank", "device"):
            raise AttributeError(f"DDPManager has no attribute {name!r}")
        return getattr(self.world, name)

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, which logs and saves."""
        return self.world.is_main

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
            ConfigError: no model; several under `ddp`; unknown strategy or option, with its
                replacement.
        """
        wrong = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
        if wrong or not models:
            raise ConfigError(f"wrap_model takes modules, one by one; got {wrong or 'none'}")
        for model in models:
            model.to(self.device)
        if "world" in options:
            raise ConfigError(
                f"strategy={strategy!r} has no option 'world': it is the manager's own"
            )
        trains = any(p.requires_grad for model in models for p in model.parameters())
        if strategy == "ddp":
            ddp = nn.parallel.DistributedDataParallel
            known = sorted(signature(ddp).parameters.keys() - _SET_BY_US)
            take_torchs("strategy='ddp'", options, known, ddp)
            if len(models) > 1:
                raise ConfigError(
                    f"strategy='ddp' wraps one model, got {len(models)}: several torch DDP "
                    "wrappers would reduce in an order that may differ between ranks; use "
                    "strategy='invariant'"
                )
            group = getattr(self._comm, "group", None)
            if group is None or not trains:
                return _Alone(models[0]) if trains else models[0]
            options.setdefault("gradient_as_bucket_view", True)
            if self.device.type == "cpu":  # DDP takes no device_ids there
                options |= {"device_ids": None, "output_device": None}
            return ddp(models[0], process_group=group, **options)
        if trains:
            whole = models[0] if len(models) == 1 else nn.ModuleList(models)
            self._handles.append(replicate(whole, self.world, strategy=strategy, **options))
        return models[0] if len(models) == 1 else models

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate only; enclose forward and backward of all micro-batches but the last."""
        with ExitStack() as stack:
            for handle in self._handles:
                stack.enter_context(handle.no_sync())
            yield

    def get_dataloader(
        self, dataset: Any, batch_size: int, *more: Any, **options: Any
    ) -> BatchLoader:
        """Batches of `batch_size` samples for this rank; each sample comes once per pass.

        Args:
            dataset: map-style.
            batch_size: samples per rank and step (the global batch is `batch_size * world_size`).
            more: positional options (`shuffle`, …), in the order of torch's `DataLoader`.
            options: of `gs.loader`, such as `seed`, `shuffle` (True: a new order each epoch,
                automatically), `num_workers` or `collate_fn`; of torch's `DataLoader` `drop_last`
                and those for workers, as `timeout`. Meaningless ones (`pin_memory`) are ignored.

        Raises:
            ConfigError: an option that is unknown, given twice, or has another name here; fewer
                samples than ranks.
        """
        check_value("batch_size", batch_size, "count")
        theirs = signature(DataLoader)
        ours = {name: options.pop(name) for name in [*options] if name not in theirs.parameters}
        try:
            options = ours | theirs.bind(None, None, *more, **options).arguments
        except TypeError as error:
            raise ConfigError(f"get_dataloader: {error}") from error
        del options["dataset"], options["batch_size"]
        drop_last = bool(options.pop("drop_last", False))
        known = sorted({*WORKER_OPTIONS, *signature(Loader).parameters} - _SET_BY_US)
        take_torchs("get_dataloader", options, known, DataLoader)
        for_workers = {name: options.pop(name) for name in WORKER_OPTIONS if name in options}
        options |= {"drop_last": drop_last, "worker_options": for_workers}
        return BatchLoader(dataset, self.world, batch_size, **options)

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


class _Alone(nn.Module):
    """Replaces torch's DDP on one rank, so that a script is the same on several."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.require_backward_grad_sync = module, True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class BatchLoader(Loader):
    """One pass gives `len(self)` batches, the same number on every rank, so that DDP cannot hang.

    Each sample comes once per pass, on one rank. The last batches are shorter: ranks' shares differ
    by at most one sample, and none is empty. The order changes automatically from pass to pass.
    """

    def __init__(
        self, dataset: Any, world: World, batch_size: int, *, drop_last: bool, **options: Any
    ) -> None:
        sizes = {
            "global_batch_size": batch_size * world.world_size,
            "micro_batch_size": batch_size,
        }
        super().__init__(dataset, world, **sizes, **options)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._size = self._order.num_samples
        self._goes_on = False  # in the middle of a pass, after a state was loaded
        self.sampler = _Sampler(self.set_epoch, [self._share(n) for n in self._cut(self._size)])
        """Has `set_epoch`; its length is the number of this rank's samples in a pass."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` in the next pass; after loading a state, in the rest of it."""
        if not self._goes_on or epoch != self._samples // self._size:
            self.close()
            self._goes_on = False
            self._samples, self._steps = epoch * self._size, epoch * len(self)

    def __len__(self) -> int:
        return len(self._cut(self._size))

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on:  # a pass that was left early is over
            self.set_epoch(-(-self._samples // self._size))
        self._goes_on = False
        for _, step in zip(self._cut(self._left), super().__iter__(), strict=False):
            for leaf in step:
                yield leaf.batch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, also on another number of ranks."""
        super().load_state_dict(state)
        self._goes_on = not self.drop_last or self._left >= self.plan.global_batch_size

    @property
    def _left(self) -> int:
        return self._size - self._samples % self._size

    def _cut(self, left: int) -> list[int]:
        """Sizes of the batches, over all ranks, of the last `left` samples of a pass."""
        size, ranks = self.plan.global_batch_size, self.plan.world_size
        sizes = [size] * (left // size)
        if rest := 0 if self.drop_last else left % size:
            few = sizes and rest < ranks  # then the batch before leaves one for each rank
            sizes[-1:] = [size + rest - ranks, ranks] if few else [*sizes[-1:], rest]
        if min(sizes, default=0) < ranks:
            raise ConfigError(
                f"{counted(left, 'sample')} cannot be dealt to {counted(ranks, 'rank')} in batches "
                f"of {self.batch_size} so that each has as many and none is empty: take fewer ranks"
                ", a larger batch_size, or (for samples that are left over) drop_last=True"
            )
        return sizes

    def _share(self, count: int) -> range:
        return share(count, self._rank, self.plan.world_size)

    def _spans(self, start: int) -> Iterator[tuple[StepSpan, int]]:
        while start < self._stop:
            end = start + self._size - start % self._size
            for count in self._cut(end - start):
                part = self._share(count)
                leaf = MicroBatchSpan(self._rank, start + part.start, len(part))
                start += count
                yield StepSpan(self.plan.world_size, [leaf], everyone_has_some=True), start
            start = end


class _Sampler:
    """Serves scripts that expect a `DistributedSampler`."""

    def __init__(self, set_epoch: Callable[[int], None], shares: Sequence[range]) -> None:
        self.set_epoch, self._num_samples = set_epoch, sum(map(len, shares))

    def __len__(self) -> int:
        return self._num_samples
