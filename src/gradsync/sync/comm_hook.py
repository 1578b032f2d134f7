"""`gs.comm_hook`: our reductions for plain `DistributedDataParallel`, Accelerate and Fabric.

    model = DistributedDataParallel(model)          # or accelerator.prepare, fabric.setup
    gs.comm_hook("ring").register(model)            # or model.register_comm_hook(*gs.comm_hook(…))

DDP hands the hook each bucket as backward fills it, and collects the results when backward ends:

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    worker            ──[bucket 0: ring, / W]──[bucket 1]┴── optimizer

A hook has to average: DDP does not divide for it. Ours sums first and divides once, by W. What
takes several messages runs on a worker thread; what fails there comes out of `backward()`.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects.

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsync.comm.background import Background
from gradsync.comm.base import Communicator
from gradsync.comm.groups import Groups
from gradsync.comm.hierarchical import hierarchical_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.reductions import ALGORITHMS, Site
from gradsync.errors import ConfigError
from gradsync.sync.power_sgd import check_power_sgd, power_sgd_state
from gradsync.world import World

Future = torch.futures.Future[Tensor]
Average = Callable[[Any, dist.GradBucket], Future]
"""`average(group, bucket)`: a future of the bucket's buffer, averaged over the group in place."""

STRATEGIES = ("ring", "recursive_doubling", "hierarchical", "bf16", "fp16", "powersgd")
"""What a DDP hook can do."""


class HookState:
    """What a hook keeps between buckets. One state belongs to one DDP model."""

    def __init__(self, group: Any, average: Average) -> None:
        self.group = group
        self.average = average


def average_bucket(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook itself."""
    return state.average(state.group or dist.group.WORLD, bucket)


class CommHook:
    """A hook and its state, as `DistributedDataParallel.register_comm_hook(*hook)` wants them."""

    def __init__(self, state: HookState) -> None:
        self.state = state
        self.hook = average_bucket

    def __iter__(self) -> Iterator[Any]:
        return iter((self.state, self.hook))

    def register(self, model: nn.Module) -> None:
        """Give the hook to the DDP that `model` is or contains; once, before the first forward.

        Without one (Accelerate and Fabric do not wrap on one rank) there is nothing to do.

        Raises:
            ConfigError: no DDP although there are several ranks, or more than one DDP.
        """
        found = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        if not found and not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        if len(found) != 1:
            raise ConfigError(
                f"a communication hook belongs to one DistributedDataParallel; {len(found)} in "
                f"{type(model).__name__} (register after DDP, accelerator.prepare or fabric.setup)"
            )
        if self.state.group is None:
            self.state.group = found[0].process_group
        found[0].register_comm_hook(self.state, self.hook)


def comm_hook(
    strategy: str = "ring",
    *,
    group: Any = None,
    groups: Groups | None = None,
    **options: Any,
) -> CommHook:
    """A communication hook for `DistributedDataParallel`; make one for each DDP model.

    Args:
        strategy: ring, recursive_doubling, hierarchical (see `gs.all_reduce`); bf16, fp16 (on the
            wire, torch's hooks); powersgd (torch's hook).
        group: process group to average over; None takes the model's own, or torch's default one.
        groups: from `gs.groups(world)`, for hierarchical; None asks the ranks where they sit, when
            the first bucket comes.
        options: of powersgd, as `PowerSgdReducer`'s, or others of torch's `PowerSGDState`.

    Raises:
        ConfigError: unknown strategy or option, or an option out of its range.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(_unknown(strategy))
    if strategy == "powersgd":
        check_power_sgd(**options)
        return CommHook(HookState(group, _PowerSgd(options)))
    if options:
        raise ConfigError(f"comm_hook({strategy!r}) has no option {next(iter(options))!r}")
    if strategy in ("bf16", "fp16"):
        # Called from a function of ours: DDP refuses torch's bf16 hook by its name without NCCL.
        half = default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook
        return CommHook(HookState(group, half[strategy == "fp16"]))
    return CommHook(HookState(group, _OnWorker(strategy, groups)))


class _PowerSgd:
    """Torch's hook; its state is made when the first bucket says where gradients are."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._state: PowerSGDState | None = None

    def __call__(self, group: Any, bucket: dist.GradBucket) -> Future:
        if self._state is None:
            self._state = power_sgd_state(group, bucket.buffer().device, **self._options)
        return powerSGD_hook(self._state, bucket)


class _OnWorker:
    """An algorithm made of messages, on a worker thread beside backward."""

    def __init__(self, algorithm: str, groups: Groups | None) -> None:
        self._algorithm = algorithm
        self._groups = groups
        self._worker: Background | None = None
        self._sum: Callable[[Tensor], None] = _nothing
        self._world_size = 1
        self._failure: BaseException | None = None

    def __call__(self, group: Any, bucket: dist.GradBucket) -> Future:
        tensor = bucket.buffer()
        if self._worker is None:
            self._begin(group, tensor.device)
        assert self._worker is not None
        devices: list[torch.device | int | str] = [tensor.device] if tensor.is_cuda else []
        finished = torch.futures.Future[Any](devices=devices or None)
        # DDP reads a future without Python's part of `set_exception`; what a callback raises it
        # does see.
        result = finished.then(_result)
        self._worker.submit(lambda: self._average(tensor, finished))
        return result

    def _begin(self, group: Any, device: torch.device) -> None:
        """On the first bucket, on the thread that all ranks have in step."""
        if device.type == "cuda" and dist.get_backend(group).endswith("nccl"):
            # NCCL runs what a group is given in one order; the worker's messages need their own.
            ranks = dist.get_process_group_ranks(group)
            group = dist.new_group(ranks, use_local_synchronization=True)
        comm = ProcessGroupCommunicator(group)
        self._sum = _summing(self._algorithm, comm, self._groups, device)
        self._world_size = comm.world_size
        self._worker = Background(device)

    def _average(self, tensor: Tensor, finished: torch.futures.Future[Any]) -> None:
        """On the worker. Its own failures too must reach every future, or backward would wait."""
        try:
            if self._failure is not None:
                raise self._failure
            self._sum(tensor)
            tensor.div_(self._world_size)  # the one division
        except BaseException as failure:
            self._failure = failure
            finished.set_result(failure)
        else:
            finished.set_result(tensor)


def _summing(
    algorithm: str, comm: Communicator, groups: Groups | None, device: torch.device
) -> Callable[[Tensor], None]:
    """`sum(tensor)` over the ranks of `comm`, in place, blocking, by messages alone."""
    if algorithm != "hierarchical":
        site = Site(comm=comm)
        return lambda tensor: ALGORITHMS[algorithm].run(site, tensor, "sum")
    world = None if groups is not None else World.from_process_group()
    if world is not None and world.world_size != comm.world_size:
        raise ConfigError(
            f"comm_hook('hierarchical'): the model's group has {comm.world_size} of "
            f"{world.world_size} ranks; give groups= that cover it"
        )
    intra, inter, equal_nodes = Site(comm=comm, world=world, groups=groups).levels(device)
    return lambda tensor: hierarchical_all_reduce(intra, inter, tensor, equal_nodes=equal_nodes)


def _nothing(tensor: Tensor) -> None:
    raise AssertionError("no bucket has come yet")


def _result(finished: torch.futures.Future[Any]) -> Tensor:
    """The averaged bucket, or the worker's failure."""
    value = finished.value()
    if isinstance(value, BaseException):
        raise value
    return value


def _unknown(strategy: str) -> str:
    near = get_close_matches(strategy, STRATEGIES, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    return (
        f"comm_hook has no strategy {strategy!r}{hint} (it has: {', '.join(STRATEGIES)}; others "
        "need more than DDP's buckets: use gs.replicate)"
    )
