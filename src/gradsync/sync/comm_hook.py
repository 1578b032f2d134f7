"""`gs.comm_hook`: gradsync's reductions for `DistributedDataParallel`, Accelerate and Fabric.

    model = DistributedDataParallel(model)          # or accelerator.prepare, fabric.setup
    gs.comm_hook("ring").register(model)

DDP passes each bucket to the hook as backward fills it, and collects the results afterwards:

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    worker            ──[bucket 0: ring, / W]──[bucket 1]┴── optimizer

A hook must average, since DDP does not divide for it. This one sums first and divides once, by W.
Algorithms of several messages run on a worker thread; `backward()` raises their errors.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects.

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsync.comm.base import Communicator
from gradsync.comm.groups import levels_of, share_placement
from gradsync.comm.p2p_collectives import hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.process_group import Background, ProcessGroupCommunicator
from gradsync.core.files import check_name
from gradsync.core.torch_private import timeout_of
from gradsync.errors import ConfigError
from gradsync.world import World

STRATEGIES = ("ring", "hierarchical", "powersgd")
"""Strategies available as a DDP hook."""
Average = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
"""`average(group, bucket)`: a future of the bucket's buffer, averaged over the group in place."""


@dataclass(eq=False)
class CommHook:
    """A hook for one DDP model, with its state between buckets.

    Use `hook.register(model)`, which asks DDP for the ranks to average over. The hook also unpacks
    into the arguments of DDP's method, `ddp.register_comm_hook(*hook)`, which averages over torch's
    *default* group unless you pass `comm_hook(group=)`.
    """

    group: Any
    average: Average

    def __iter__(self) -> Iterator[Any]:
        return iter((self, average_bucket))

    def register(self, model: nn.Module) -> None:
        """Register with the one DDP that `model` is or contains, before the first forward. Does
        nothing on one rank without DDP (Accelerate and Fabric do not wrap the model there)."""
        found = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        if not found and not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        if len(found) != 1:
            raise ConfigError(
                f"a communication hook belongs to one DistributedDataParallel; {len(found)} in "
                f"{type(model).__name__} (register after DDP, accelerator.prepare or fabric.setup)"
            )
        if self.group is None:
            self.group = found[0].process_group
        found[0].register_comm_hook(*self)


def average_bucket(state: CommHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The function that DDP calls for each bucket."""
    return state.average(state.group or dist.group.WORLD, bucket)


def comm_hook(strategy: str = "ring", *, group: Any = None, **options: Any) -> CommHook:
    """Make a communication hook for `DistributedDataParallel`; make one per DDP model.

    Args:
        strategy: ring, hierarchical (see `gs.all_reduce`); powersgd (torch's hook).
        group: process group to average over; None is the model's group with `register`, but torch's
            default group with DDP's `register_comm_hook(*hook)`.
        options: of powersgd; the same as those of `PowerSgd`.

    Raises:
        ConfigError: unknown strategy, or options of a strategy that has none.
        TypeError, ValueError: an option that torch's PowerSGD does not take.
    """
    check_name("strategy of comm_hook", strategy, STRATEGIES)
    if strategy == "powersgd":
        return CommHook(group, PowerSgd(**options))
    if options:
        raise ConfigError(f"comm_hook({strategy!r}) has no option {next(iter(options))!r}")
    return CommHook(group, _OnWorker(strategy))


@dataclass(eq=False)
class _OnWorker:
    """Runs an algorithm of several messages on a worker thread while backward runs."""

    algorithm: str
    _worker: "BucketWorker | None" = None
    _average: Callable[[Tensor], None] | None = None

    def __call__(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        tensor = bucket.buffer()
        if self._worker is None:  # the first bucket, on a thread in step on all ranks
            if tensor.is_cuda:  # NCCL runs a group's messages and collectives in one order
                group = group_of_its_own(group, tensor.device)
            comm = ProcessGroupCommunicator(group)
            self._average = _averaging(self.algorithm, comm)
            self._worker = BucketWorker(tensor.device)
        average = self._average
        assert average is not None
        return self._worker.submit(tensor, lambda: average(tensor))


def _averaging(algorithm: str, comm: Communicator) -> Callable[[Tensor], None]:
    """Make `average(tensor)` over the ranks of `comm`: in place, blocking, using messages only."""
    all_reduce = partial(ring_all_reduce, comm)
    if algorithm == "hierarchical":
        # `from_process_group` asks all ranks, but ranks that are not in the group do not answer.
        if comm.world_size != dist.get_world_size():
            raise ConfigError(
                f"comm_hook('hierarchical'): the model's group has {comm.world_size} of "
                f"{dist.get_world_size()} ranks, and it takes all; use 'ring'"
            )
        hosts = share_placement(comm, World.from_process_group())
        intra, inter, equal_nodes = levels_of(comm, hosts)
        all_reduce = partial(hierarchical_all_reduce, intra, inter, equal_nodes=equal_nodes)

    def average(tensor: Tensor) -> None:
        all_reduce(tensor)
        tensor.div_(comm.world_size)  # the one division

    return average


class PowerSgd:
    """Torch's PowerSGD hook and its state.

    Low-rank gradients on the wire, with error feedback: Vogels, Karimireddy & Jaggi 2019 (arXiv
    1905.13727). A gradient matrix M, [n, m], is sent as P, [n, r], and Q, [m, r]:

        bucket     M = gradient + error of the last step
        wire       [vectors] ─ [P] ─ [Q]
        then       gradient = mean of P Q^T,  error = M - P Q^T

    Bytes per rank: 2(W-1)/W of r (n + m) per compressed matrix instead of n m. The error is private
    to each rank and not part of a checkpoint: after a resume it is empty, and the first
    `start_powerSGD_iter` steps are sent whole again.

    [Note: PowerSGD on the CPU] Torch's hook waits for one all-reduce in the callback of another.
    On NCCL this only orders streams. On Gloo it blocks one of the group's two worker threads: with
    two buckets in progress both block indefinitely, or ranks issue their all-reduces in different
    orders. So on the CPU buckets run one after the other, on a separate thread and group.

    Args:
        options: of torch's `PowerSGDState`. `matrix_approximation_rank` (r above, 1) should be 1 to
            4. `start_powerSGD_iter` (10) is the first step that compresses; it is at least 2, since
            DDP regroups its buckets after the first backward. `min_compression_rate` (2): a matrix
            is compressed if this makes it smaller by this factor. Without `use_error_feedback`
            (True) the result is biased. `warm_start` (True): begin with the last step's Q (then
            one power iteration per step is enough).
    """

    def __init__(self, **options: Any) -> None:
        # Without an epsilon a matrix whose gradient is all zero (an unused layer) becomes nan.
        defaults: dict[str, Any] = {"start_powerSGD_iter": 10, "orthogonalization_epsilon": 1e-8}
        self.state = PowerSGDState(process_group=None, **defaults | options)
        self._worker: BucketWorker | None = None
        self._begun = False

    def __call__(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A future of the bucket's buffer, averaged over `group` in place."""
        tensor = bucket.buffer()
        if not self._begun:  # all ranks make thread and group at their first bucket
            self._begun = True
            if tensor.device.type == "cpu":  # [Note: PowerSGD on the CPU]
                group = group_of_its_own(group, tensor.device)
                self._worker = BucketWorker(tensor.device)
            self.state.process_group = group
        if self._worker is None:
            return powerSGD_hook(self.state, bucket)
        return self._worker.submit(tensor, lambda: powerSGD_hook(self.state, bucket).wait())


class BucketWorker:
    """Runs buckets one after the other while backward runs, in the order in which DDP passes them.

    After a failure nothing more runs. Later futures fail too; else backward would wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._background = Background(device)
        self._failure: BaseException | None = None

    def submit(self, tensor: Tensor, fn: Callable[[], object]) -> torch.futures.Future[Tensor]:
        """Run `fn()`, which leaves its result in `tensor`; backward raises its exception."""
        devices: list[torch.device | int | str] = [tensor.device] if tensor.is_cuda else []
        finished = torch.futures.Future[Any](devices=devices or None)
        failed: list[BaseException] = []

        # Not `set_exception`: DDP reads futures without the part that is written in Python. It does
        # see an exception raised by a callback. A future must not hold the exception itself: its
        # traceback refers to frames, these refer to the future, and the garbage collector does not
        # look into futures.
        def outcome(_: torch.futures.Future[Any]) -> Tensor:
            if failed:
                raise failed[0]
            return tensor

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                fn()
            except BaseException as failure:
                self._failure = failure
                failed.append(failure)
            finished.set_result(None if failed else tensor)

        result = finished.then(outcome)
        self._background.submit(run)
        return result


def group_of_its_own(group: Any, device: torch.device) -> Any:
    """Make a second group over the same ranks, for one thread's collectives; all its ranks call it.

    With one group, two threads would issue its collectives in different orders on different ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        ranks,
        timeout=timeout_of(group, device),
        # Ask only the members. Torch then names the group after how many groups *this* rank has,
        # which must be equal on all members. Not needed if the group contains all ranks.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
