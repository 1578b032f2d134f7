"""`gs.replicate`: make a model one of W equal replicas, in place."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator, share_placement, with_cpu_group
from gradsync.comm.shared_memory.choose import fastest, share_memory
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.sync.batch_norm import NOT_INVARIANT, choose_batch_norm
from gradsync.sync.check_model import broadcast_model, check_same_model, refuse_synchronised
from gradsync.sync.gradient_sync import HANDLE, GradientSync
from gradsync.sync.options import take_torchs
from gradsync.sync.reducer import trainable
from gradsync.sync.registry import (
    Strategy,
    build_reducer,
    check_options,
    find_strategy,
    follows_hosts,
    wants_groups,
)
from gradsync.sync.watch import optimizer_watch
from gradsync.world import NO_GROUP, World

if TYPE_CHECKING:
    from torch import nn

    from gradsync.comm.groups import Hosts

log = logging.getLogger("gradsync")

_OTHER_BITS = (
    "the same bits need deterministic kernels on a GPU: call "
    "torch.use_deterministic_algorithms(True) first (attention and embedding add with atomics)"
)
_OTHER_THREADS = (
    "bits on a CPU depend on a rank's threads, here %d, and launchers give other numbers: for the "
    "same ones everywhere take gs.init(threads=1) or torch.set_num_threads(1)"
)


def replicate(
    model: nn.Module,
    world: World | None = None,
    *,
    strategy: str = "invariant",
    batch_norm: str | None = None,
    comm: Communicator | None = None,
    groups: Hosts | None = None,
    **options: Any,
) -> GradientSync:
    """Replicate `model` over the ranks of `world`. All start from rank 0's weights, and stay equal.

    The model is not wrapped: names, checkpoints and frozen parts do not change. The model and each
    part of it that directly holds trainable parameters refer to the returned handle, so
    synchronisation lasts as long as the parts. The handle does not know parameters that you replace
    or unfreeze later: close it and replicate again.

    Pass models that take part in one backward in one call, as `nn.ModuleList([encoder, head])`.
    Several handles on one process group must take their steps in the same order on all ranks.

    Args:
        model: on its device already.
        world: from `gs.init()` or `gs.World.from_process_group()`; None uses the latter if torch's
            default process group exists, else one rank.
        strategy: a name in `gradsync.sync.registry.STRATEGIES`.
        batch_norm: "sync", "local" or "freeze": required if the model has BatchNorm, see
            `gradsync.sync.batch_norm`. With "local" running statistics move once per step, in DDP
            once per micro-batch: `momentum=1 - (1 - m) ** k` keeps DDP's pace for k micro-batches.
        comm: a communicator to use instead of the world's own.
        groups: from `gradsync.comm.groups.groups(world)`, for `strategy="hierarchical"`; None makes
            them from `world`. Sums along the tree follow the hosts without `groups`, using the
            placement in `world`.
        options: of the strategy, such as `bucket_mb=25.0`. DDP's `bucket_cap_mb` (torch's own name)
            means `bucket_mb`; its options at their default, or that change no result, are ignored.

    Raises:
        ConfigError: unknown strategy or option; the model or a part of it is replicated (also by
            DDP, FSDP …); ranks have different models or arguments; BatchNorm without a choice.
        RunError: several ranks (of `world`, or by the launcher's variables) but no process group;
            no trainable parameter.
    """
    found = find_strategy(strategy)
    ddp = torch.nn.parallel.DistributedDataParallel
    take_torchs(f"strategy={strategy!r}", options, found.options, ddp)
    for name, parameter in trainable(model):
        if optimizer_watch().owner_of(parameter) is not None:
            said = f"parameter {name!r} of this model is replicated already"
            raise ConfigError(f"{said}; call close() on its handle first")
    refuse_synchronised(model)
    if not isinstance(world, World | None):
        raise ConfigError(
            f"expected a gs.World, got {type(world).__name__}: write `with gs.init() as world:`"
        )
    if comm is None:
        if world is None or world.launcher == NO_GROUP:
            world = _world_here()
        comm = communicator(world)
    one_host = world is None or world.one_host
    if groups is None and world is not None and wants_groups(found, options):
        from gradsync.comm.groups import groups as make_groups

        groups = make_groups(world)
    elif groups is None and world is not None and follows_hosts(found, options, world):
        groups = _placement(comm, world)
    handle = _bind(
        found, model, comm, options, groups=groups, batch_norm=batch_norm, one_host=one_host
    )
    # Hooks do not keep their handle alive; the model does. See GradientSync.__deepcopy__.
    for part in model.modules():
        own = part.parameters(recurse=False)
        if part is model or any(parameter.requires_grad for parameter in own):
            part.__dict__[HANDLE] = handle
    return handle


def _world_here() -> World:
    """The world of torch's process group, else one rank. Raises if a launcher has started several
    ranks, since each would silently train alone."""
    if not dist.is_initialized():
        started = resolve(environ.snapshot()).world.world_size
        if started > 1:
            raise RunError(
                f"the launcher says that there are {started} ranks, but no process group: each "
                "would train alone; write `with gs.init() as world:` and "
                "gs.replicate(model, world), or give world=gs.World() for one rank on purpose"
            )
    return World.from_process_group()


def _placement(comm: Communicator, world: World) -> Hosts | None:
    """Placement of all ranks. None if the caller's communicator has other ranks than the world, or
    if two ranks report the same place (hosts with equal names, a `World` made by hand)."""
    if comm.world_size == world.world_size:
        with suppress(ConfigError):  # on all ranks
            return share_placement(comm, world)
    return None


def _bind(
    strategy: Strategy,
    model: nn.Module,
    comm: Communicator,
    options: dict[str, Any],
    *,
    groups: Hosts | None,
    batch_norm: str | None,
    one_host: bool,
) -> GradientSync:
    comm = getattr(comm, "unchecked", comm)  # models are compared only once, here
    if not trainable(model):
        raise RunError("the model has no trainable parameter: nothing to synchronise")
    check_options(strategy, options)
    if options.get("overlap_publish") and not hasattr(model, "read_after"):
        raise ConfigError(
            "overlap_publish updates weights in the next forward, and a script may read them "
            "before: only `gradsync train` takes it; drop it"
        )
    if batch_norm == "sync" and strategy.recipe is not None:
        # Its sums are sent in backward too, on the same group. Buckets would come between them, at
        # different places on ranks that use other parameters.
        options = {"overlap": False, **options}
    settings = {"strategy": strategy.name, "batch_norm": batch_norm}
    check_same_model(model, comm, settings | {name: repr(v) for name, v in options.items()})
    order = options.get("order", strategy.recipe.order if strategy.recipe else "any")
    if order == "invariant" and batch_norm == "sync":
        raise ConfigError(f"strategy={strategy.name!r}: {NOT_INVARIANT}")
    comm = with_cpu_group(comm)
    handling = choose_batch_norm(model, comm, batch_norm)
    if order == "invariant" and comm.rank == 0:
        device, threads = trainable(model)[0][1].device.type, torch.get_num_threads()
        if device == "cuda" and not torch.are_deterministic_algorithms_enabled():
            log.warning("strategy=%r: %s", strategy.name, _OTHER_BITS)
        if device == "cpu" and threads > 1:
            log.warning(f"strategy=%r: {_OTHER_THREADS}", strategy.name, threads)
    broadcast_model(model, comm)
    if one_host:
        comm = _fastest(strategy, model, comm, options)
    # Whole group, int64 [1], blocking, rank 0's count: gives the model one number on all ranks.
    number = torch.tensor([optimizer_watch().added])
    comm.broadcast(number).wait()
    reducer = build_reducer(strategy, model, comm, groups, options)
    return GradientSync(model, comm, reducer, handling, number=int(number))


def _fastest(
    strategy: Strategy, model: nn.Module, comm: Communicator, options: dict[str, Any]
) -> Communicator:
    """Communicator for this strategy's sums: `comm`, or shared memory in its place."""
    if strategy.recipe is None:
        return comm
    recipe = replace(strategy.recipe, **options)
    device = trainable(model)[0][1].device
    if recipe.reduction != "backend" or recipe.collective == "backend":
        return comm
    known = [listener.comm for listener in optimizer_watch().present()]
    present = [c for c in known if isinstance(c, SharedMemoryCommunicator)]
    found = fastest(comm, device, present)
    if recipe.collective == "shared_memory" and not isinstance(found, SharedMemoryCommunicator):
        return share_memory(comm)  # raises with the reason if that fails
    return found
