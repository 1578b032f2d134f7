"""`gs.comm_hook`: gradsync's reductions for `DistributedDataParallel`, Accelerate and Fabric.

    model = DistributedDataParallel(model)          # or accelerator.prepare, fabric.setup
    gs.comm_hook("ring").register(model)

DDP passes each bucket to the hook as backward fills it, and collects the results afterwards:

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    worker            ──[bucket 0: ring, / W]──[bucket 1]┴── optimizer

A hook has to average: DDP does not divide for it. This one sums first and divides once, by W.
Algorithms of several messages run on a worker thread; their errors are raised by `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradsync.comm.base import Communicator
from gradsync.comm.groups import Groups
from gradsync.comm.p2p_collectives import hierarchical_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.reductions import ALGORITHMS, Site
from gradsync.errors import ConfigError
from gradsync.sync.bucket_worker import BucketWorker, group_of_its_own
from gradsync.sync.hook_state import HookState, average_bucket
from gradsync.sync.power_sgd import PowerSgd
from gradsync.world import World

STRATEGIES = ("ring", "recursive_doubling", "hierarchical", "bf16", "fp16", "powersgd")
"""Strategies available as a DDP hook."""


class CommHook:
    """A hook and its state.

    Use it by `hook.register(model)`, which asks DDP for the ranks to average over. It also unpacks
    into the arguments of DDP's own method, `ddp.register_comm_hook(*hook)`; but DDP tells a hook
    nothing about its process group, so that way averages over torch's *default* group unless
    `comm_hook(group=)` was given. For a DDP over some of the ranks pass the same `group`.
    """

    def __init__(self, state: HookState) -> None:
        self.state = state
        self.hook = average_bucket

    def __iter__(self) -> Iterator[Any]:
        return iter((self.state, self.hook))

    def register(self, model: nn.Module) -> None:
        """Register with the DDP that `model` is or contains; once, before the first forward.

        Does nothing without one (Accelerate and Fabric do not wrap on one rank).

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
    """Make a communication hook for `DistributedDataParallel`; one for each DDP model.

    Args:
        strategy: ring, recursive_doubling, hierarchical (see `gs.all_reduce`); bf16, fp16 (torch's
            hooks); powersgd (torch's hook).
        group: process group to average over; None is the model's own when registered by `register`,
            but torch's default one when by DDP's `register_comm_hook(*hook)`.
        groups: from `gs.groups(world)`, for hierarchical; None exchanges the ranks' hosts when the
            first bucket comes.
        options: of powersgd, as `PowerSgdReducer`'s, or others of torch's `PowerSGDState`.

    Raises:
        ConfigError: unknown strategy or option, or an option out of its range.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(_unknown(strategy))
    if strategy == "powersgd":
        return CommHook(HookState(group, PowerSgd(**options)))
    if options:
        raise ConfigError(f"comm_hook({strategy!r}) has no option {next(iter(options))!r}")
    if strategy in ("bf16", "fp16"):
        # Called from this function: DDP refuses torch's bf16 hook by its name without NCCL.
        half = default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook
        return CommHook(HookState(group, half[strategy == "fp16"]))
    return CommHook(HookState(group, _OnWorker(strategy, groups)))


class _OnWorker:
    """An algorithm made of messages, on a worker thread beside backward."""

    def __init__(self, algorithm: str, groups: Groups | None) -> None:
        self._algorithm = algorithm
        self._groups = groups
        self._worker: BucketWorker | None = None
        self._average: Callable[[Tensor], None] | None = None

    def __call__(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        tensor = bucket.buffer()
        if self._worker is None:  # the first bucket, on the thread that all ranks have in step
            if tensor.is_cuda:  # NCCL runs a group's messages and collectives in one order
                group = group_of_its_own(group, tensor.device)
            comm = ProcessGroupCommunicator(group)
            self._average = _averaging(self._algorithm, comm, self._groups, tensor.device)
            self._worker = BucketWorker(tensor.device)
        average = self._average
        assert average is not None
        return self._worker.submit(tensor, lambda: average(tensor))


def _averaging(
    algorithm: str, comm: Communicator, groups: Groups | None, device: torch.device
) -> Callable[[Tensor], None]:
    """Make `average(tensor)` over the ranks of `comm`: in place, blocking, by messages alone."""
    if algorithm != "hierarchical":
        site = Site(comm=comm)

        def average(tensor: Tensor) -> None:
            ALGORITHMS[algorithm](site, tensor, "sum")
            tensor.div_(comm.world_size)  # the one division

        return average

    # Before `from_process_group`, which asks all ranks: those outside of the group do not answer.
    if groups is None and comm.world_size != dist.get_world_size():
        raise ConfigError(
            f"comm_hook('hierarchical'): the model's group has {comm.world_size} of "
            f"{dist.get_world_size()} ranks; give groups= that cover it"
        )
    world = None if groups is not None else World.from_process_group()
    intra, inter, equal_nodes = Site(comm=comm, world=world, groups=groups).levels(device)

    def average_in_levels(tensor: Tensor) -> None:
        hierarchical_all_reduce(intra, inter, tensor, equal_nodes=equal_nodes)
        tensor.div_(comm.world_size)  # the one division

    return average_in_levels


def _unknown(strategy: str) -> str:
    near = get_close_matches(strategy, STRATEGIES, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    return (
        f"comm_hook has no strategy {strategy!r}{hint} (it has: {', '.join(STRATEGIES)}; others "
        "need more than DDP's buckets: use gs.replicate)"
    )
