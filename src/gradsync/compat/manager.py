"""`DDPManager`: start, wrap, load, reduce and stop, in one object."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.reductions import all_reduce
from gradsync.compat.functions import backend_here
from gradsync.data.loader import WORKER_OPTIONS, Loader, loader
from gradsync.errors import ConfigError
from gradsync.runtime.session import Session, SessionOptions
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import check_value
from gradsync.sync.registry import find_strategy
from gradsync.sync.replicate import replicate
from gradsync.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from gradsync.comm.reductions import Op

log = logging.getLogger("gradsync")

_BUFFERS = "buffers are averaged over the step, BatchNorm's as batch_norm= says"
_HAS_NO_MEANING = {
    "find_unused_parameters": "parameters without a gradient are found in every step",
    "gradient_as_bucket_view": "gradients lie in their buckets already",
    "static_graph": "no step is planned from the first one",
    "bucket_cap_mb": "this strategy has no buckets",
    **dict.fromkeys(("device_ids", "output_device", "dim"), "all is on this rank's device"),
    **dict.fromkeys(("broadcast_buffers", "forward_sync_buffers"), _BUFFERS),
    **dict.fromkeys(("pin_memory", "pin_memory_device"), "batches come on this rank's device"),
    "drop_last": "a pass has whole batches only, and the next one begins with the rest",
    "in_order": "batches always come in order",
}
_IS_CALLED = {
    **dict.fromkeys(("process_group", "device_mesh"), "gs.replicate(model, comm=gs.group(ranks))"),
    "init_sync": "True always: ranks start with rank 0's weights",
    "mixed_precision": "torch.autocast around the forward",
    "bucket_cap_mb_list": "bucket_mb=, one size for all",
    **dict.fromkeys(("sampler", "batch_sampler"), "shuffle= and seed=: samples are dealt to ranks"),
    "generator": "seed=",
}
_SET_BY_US = {"module", "process_group", "device_mesh", "worker_options", "world"}
_SET_BY_US |= {"dataset", "global_batch_size", "micro_batch_size"}


class DDPManager:
    """Everything a plain DDP script needs.

    It joins the run by `initialize`, or as a context manager:

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

        `backend` None or "nccl" is gloo on CPU and gloo + nccl on CUDA; no collective may take
        longer than `timeout_mins` minutes.
        """
        options = SessionOptions(backend=backend_here(backend), timeout_s=timeout_mins * 60)
        self._session = Session(options)
        self.world = self._session.open()
        self._comm = communicator(self.world)
        return self.world

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    @property
    def rank(self) -> int:
        """Index of this process among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, the one that logs and saves."""
        return self.world.is_main

    def wrap_model(self, *models: nn.Module, sync: str = "invariant", **options: Any) -> Any:
        """Move models to the device and synchronise what trains in them; returns the one, or all.

        Nothing is wrapped (no `.module`), except under `sync="ddp"`, which returns torch's
        DistributedDataParallel around one model. After that `loss.backward()` averages gradients
        over ranks, as DDP does. Frozen parts are left alone; a model without trainable parameters
        is only moved. Several models (an encoder, adapters, heads) share one engine, so that their
        gradients travel in the same order on all ranks.

        Args:
            models: one or more modules.
            sync: a strategy; `invariant`, `bucketed` … or `ddp`.
            options: of `gs.replicate`, or of DistributedDataParallel. The latter's are taken under
                `ddp`; elsewhere `bucket_cap_mb` is `bucket_mb`, and what is DDP's default or has no
                effect on results is ignored.

        Raises:
            ConfigError: no model; several under `ddp`; unknown strategy or option, with what to use
                in its place.
        """
        wrong = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
        if wrong or not models:
            raise ConfigError(f"wrap_model takes modules, one by one; got {wrong or 'none'}")
        for model in models:
            model.to(self.device)
        trains = any(p.requires_grad for model in models for p in model.parameters())
        ddp = nn.parallel.DistributedDataParallel
        if (size := options.get("bucket_cap_mb")) is not None:
            check_value("bucket_cap_mb", size, "size")
            if "bucket_mb" in options:
                raise ConfigError("bucket_cap_mb and bucket_mb are one option: give one of them")
        if sync == "ddp":
            known = signature(ddp).parameters.keys() - _SET_BY_US
            _drop_torchs("sync='ddp'", options, known, ddp)
            if len(models) > 1:
                raise ConfigError(
                    f"sync='ddp' wraps one model, got {len(models)}: several torch DDP wrappers "
                    "would reduce in an order that may differ between ranks; use sync='invariant'"
                )
            group = getattr(self._comm, "group", None)
            if group is None or not trains:
                return models[0]
            options.setdefault("gradient_as_bucket_view", True)
            if self.device.type == "cpu":  # where DDP refuses any
                options |= {"device_ids": None, "output_device": None}
            return ddp(models[0], process_group=group, **options)
        if trains:
            known = {*find_strategy(sync).options, "batch_norm", "comm", "groups"}
            if size is not None and "bucket_mb" in known:
                options["bucket_mb"] = options.pop("bucket_cap_mb")
            _drop_torchs(f"sync={sync!r}", options, known, ddp)
            whole = models[0] if len(models) == 1 else nn.ModuleList(models)
            self._handles.append(replicate(whole, self.world, sync=sync, **options))
        return models[0] if len(models) == 1 else models

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only add up; enclose forward and backward of all micro-batches but the last."""
        with ExitStack() as stack:
            for handle in self._handles:
                stack.enter_context(handle.no_sync())
            yield

    def get_dataloader(
        self, dataset: Any, batch_size: int, *more: Any, **options: Any
    ) -> BatchLoader:
        """Batches of `batch_size` samples for this rank; in an epoch each sample comes once.

        Args:
            dataset: map-style.
            batch_size: samples per rank and step (the global batch is `batch_size * world_size`).
            more: options without their names (`shuffle`, …), in the order of torch's `DataLoader`.
            options: of `gs.loader`, such as `seed`, `shuffle` (True: a new order each epoch, by
                itself), `num_workers` or `collate_fn`; of torch's `DataLoader` those for workers,
                as `timeout`. What has no meaning here (`pin_memory`, `drop_last`) is ignored.

        Raises:
            ConfigError: an option that is unknown, given twice, or has another name here.
        """
        check_value("batch_size", batch_size, "count")
        theirs = signature(DataLoader)
        ours = {name: options.pop(name) for name in [*options] if name not in theirs.parameters}
        try:
            options = ours | theirs.bind(None, None, *more, **options).arguments
        except TypeError as error:
            raise ConfigError(f"get_dataloader: {error}") from error
        del options["dataset"], options["batch_size"]
        known = {*WORKER_OPTIONS, *signature(loader).parameters} - _SET_BY_US
        _drop_torchs("get_dataloader", options, known, DataLoader)
        for_workers = {name: options.pop(name) for name in WORKER_OPTIONS if name in options}
        steps = loader(
            dataset,
            self.world,
            global_batch_size=batch_size * self.world.world_size,
            micro_batch_size=batch_size,
            worker_options=for_workers,
            **options,
        )
        passes = max(len(dataset) // steps.plan.global_batch_size, 1)
        return BatchLoader(steps, passes)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op | dist.ReduceOp | dist.ReduceOp.RedOpType = "mean",
        *,
        name: str | None = None,
    ) -> Tensor:
        """`tensor` combined over all ranks, in place; see `gs.all_reduce`."""
        return all_reduce(tensor, op, comm=self._comm, name=name)

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


def _drop_torchs(who: str, options: dict[str, Any], known: Collection[str], torchs: type) -> None:
    """Drop those `options` of torch's class that are its defaults or change nothing here.

    Raises:
        ConfigError: one that is neither `known` nor such, with its name here if it has one.
    """
    theirs = signature(torchs).parameters
    for name in [name for name in options if name not in known]:
        value = options.pop(name)
        if name in theirs and (value is theirs[name].default or name in _HAS_NO_MEANING):
            why = _HAS_NO_MEANING.get(name, f"it is {torchs.__name__}'s default")
            log.debug("%s=%r is ignored: %s", name, value, why)
        elif name in _IS_CALLED:
            raise ConfigError(f"{name}= of torch is {_IS_CALLED[name]} here; got {value!r}")
        else:
            raise ConfigError(f"{who} has no option {name!r} (it has: {', '.join(sorted(known))})")


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
        """Position in the data: integers that are the same on all ranks."""
        return dict(self._steps.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, also on another number of ranks."""
        self._steps.load_state_dict(state)
