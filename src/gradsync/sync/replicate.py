"""`gs.replicate`: make a model one of W equal replicas, in place."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.groups import RankPlacement, communicator, share_placement, with_cpu_group
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator, fastest, share_memory
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.sync.batch_norm import NOT_INVARIANT, choose_batch_norm
from gradsync.sync.build import build_reducer
from gradsync.sync.check_replicas import broadcast_model, check_same_model, refuse_synchronised
from gradsync.sync.gradient_sync import HANDLE, Built, GradientSync
from gradsync.sync.options import FsdpOptions, Options, Recipe, check_value
from gradsync.sync.reducer import trainable
from gradsync.sync.registry import Strategy, check_options, find_strategy
from gradsync.sync.watch import optimizer_watch
from gradsync.world import NO_GROUP, World

if TYPE_CHECKING:
    from torch import nn


log = logging.getLogger("gradsync")

_OTHER_BITS = (
    "the same bits need deterministic kernels on a GPU: call "
    "torch.use_deterministic_algorithms(True) first (attention and embedding add with atomics)"
)
_OTHER_THREADS = (
    "bits on a CPU depend on a rank's threads, here %d, and launchers give other numbers: for the "
    "same ones everywhere take gs.init(threads=1) or torch.set_num_threads(1)"
)
_CHANGES_NOTHING = (
    *("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb"),
    *("device_ids", "output_device", "dim", "broadcast_buffers", "forward_sync_buffers"),
)


def replicate(
    model: nn.Module,
    world: World | None = None,
    *,
    strategy: str = "invariant",
    batch_norm: str | None = None,
    comm: Communicator | None = None,
    hosts: RankPlacement | None = None,
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
        hosts: of all ranks; None asks them, if the strategy depends on it (`hierarchical`, sums
            along the tree).
        options: of the strategy, such as `bucket_mb=25.0`. DDP's `bucket_cap_mb` (torch's own name)
            means `bucket_mb`; its options at their default, or that change no result, are ignored.

    Raises:
        ConfigError: unknown strategy or option; the model or a part of it is replicated (also by
            DDP, FSDP …); ranks have different models or arguments; BatchNorm without a choice.
        RunError: several ranks (of `world`, or by the launcher's variables) but no process group;
            no trainable parameter.
    """
    found = find_strategy(strategy)
    _translate(options, found)
    _refuse_replicated(model)
    if comm is None:
        if world is None or world.launcher == NO_GROUP:
            world = _world_here()
        comm = communicator(world)
    comm = getattr(comm, "unchecked", comm)  # models are compared only once, here
    checked = _checked(found, options, model, batch_norm)
    settings = {"strategy": strategy, "batch_norm": batch_norm}
    settings["on_loss"] = "end" if world is None or world.recovery is None else "shrink"
    settings |= {name: repr(value) for name, value in asdict(checked).items()}
    check_same_model(model, comm, settings)
    if world is not None and world.recovery is not None:
        checked = _recoverable(found, checked, batch_norm, comm, world)

    def build(comm: Communicator, hosts: RankPlacement | None) -> Built:
        recipe = checked
        handling = choose_batch_norm(model, comm, batch_norm)
        if isinstance(recipe, Recipe):
            comm, hosts, recipe = _places(model, comm, hosts, recipe, world)
        return comm, build_reducer(found, model, comm, hosts, recipe), handling

    comm = with_cpu_group(comm)
    broadcast_model(model, comm)
    # Whole group, int64 [1], blocking: one number of the model on all ranks, rank 0's.
    number = torch.tensor([next(optimizer_watch().numbers)])
    comm.broadcast(number).wait()
    handle = GradientSync(
        *(model, *build(comm, hosts)),
        number=int(number),
        world=world,
        build=lambda: build(with_cpu_group(communicator(world)), None),
    )
    # Hooks do not keep their handle alive; the model does. See GradientSync.__reduce__.
    for part in model.modules():
        own = part.parameters(recurse=False)
        if part is model or any(parameter.requires_grad for parameter in own):
            part.__dict__[HANDLE] = handle
    return handle


def _recoverable(
    strategy: Strategy, options: Options, batch_norm: str | None, comm: Communicator, world: World
) -> Options:
    """The options under which a loss leaves every rank with whole weights and whole sums."""
    if comm.world_size != world.world_size:
        raise ConfigError("on_loss='shrink' needs all ranks in one group: drop comm=")
    if strategy.name not in ("naive", "flat", "overlap", "bucketed", "invariant"):
        raise ConfigError(
            f"strategy={strategy.name!r} cannot go on after a loss, since ranks hold parts or "
            "differ: take 'invariant', 'bucketed' or 'naive', or on_loss='end' and a restart from "
            "a checkpoint"
        )
    if batch_norm == "sync":
        raise ConfigError("on_loss='shrink' does not work with batch_norm='sync'; use 'freeze'")
    if not isinstance(options, Recipe):
        return options
    needed = {"shard": "none", "overlap_publish": False, "weights": "replicas"}
    for name, value in needed.items():
        if (given := getattr(options, name)) != value:
            raise ConfigError(f"on_loss='shrink' needs {name}={value!r}; got {given!r}")
    if options.collective == "shared_memory":
        raise ConfigError("on_loss='shrink' needs collective='backend': weights of each rank's own")
    return replace(options, collective="backend")


def _translate(options: dict[str, Any], strategy: Strategy) -> None:
    """Translate, or drop if they change no result, options of torch's DDP that the strategy does
    not have, in place."""
    known = strategy.options
    if (size := options.get("bucket_cap_mb")) is not None:
        check_value("bucket_cap_mb", size, "size")
        if "bucket_mb" in options:
            raise ConfigError("bucket_cap_mb and bucket_mb are one option: give one of them")
        if "bucket_mb" in known:
            options["bucket_mb"] = options.pop("bucket_cap_mb")
    theirs = signature(torch.nn.parallel.DistributedDataParallel).parameters
    for name in [name for name in options if name not in known]:
        default = name in theirs and options[name] is theirs[name].default
        if default or name in _CHANGES_NOTHING:
            del options[name]


def _refuse_replicated(model: nn.Module) -> None:
    named = trainable(model)
    if not named:
        raise RunError("the model has no trainable parameter: nothing to synchronise")
    for name, parameter in named:
        if optimizer_watch().owner_of(parameter) is not None:
            said = f"parameter {name!r} of this model is replicated already"
            raise ConfigError(f"{said}; call close() on its handle first")
    refuse_synchronised(model)


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


def _checked(
    strategy: Strategy, given: dict[str, Any], model: nn.Module, batch_norm: str | None
) -> Options:
    """The strategy's options; ConfigError if the model or `batch_norm` does not go with them."""
    options = check_options(strategy, given)
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    limited = any(isinstance(m, kinds) and m.max_norm is not None for m in model.modules())
    if limited and isinstance(options, FsdpOptions):
        raise ConfigError("strategy='fsdp' loses what Embedding(max_norm=...) does to weights")
    if not isinstance(options, Recipe):
        return options
    if options.overlap_publish and not hasattr(model, "read_after"):
        raise ConfigError(
            "overlap_publish updates weights in the next forward, and a script may read them "
            "before: only `gradsync train` takes it; drop it"
        )
    if options.order == "invariant" and batch_norm == "sync":
        raise ConfigError(f"strategy={strategy.name!r}: {NOT_INVARIANT}")
    if batch_norm == "sync" and "overlap" not in given:
        # Its sums are sent in backward too, on the same group. Buckets would come between them, at
        # different places on ranks that use other parameters.
        return replace(options, overlap=False)
    return options


def _places(
    model: nn.Module,
    comm: Communicator,
    hosts: RankPlacement | None,
    recipe: Recipe,
    world: World | None,
) -> tuple[Communicator, RankPlacement | None, Recipe]:
    """What carries the sums, the hosts of all ranks where they matter, and the recipe there."""
    invariant = recipe.order == "invariant"
    device, threads = trainable(model)[0][1].device, torch.get_num_threads()
    if invariant and comm.rank == 0:
        if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            log.warning(_OTHER_BITS)
        if device.type == "cpu" and threads > 1:
            log.warning(_OTHER_THREADS, threads)
    one_host = world is None or world.one_host
    if world is not None and hosts is None and (invariant or recipe.reduction == "hierarchical"):
        if one_host:
            recipe = replace(recipe, reduction="backend")  # there is only one level
        elif comm.world_size == world.world_size:
            hosts = share_placement(comm, world)
    if not one_host or recipe.reduction != "backend" or recipe.collective == "backend":
        return comm, hosts, recipe
    known = [listener.comm for listener in optimizer_watch().present()]
    present = [c for c in known if isinstance(c, SharedMemoryCommunicator)]
    carrier = fastest(comm, device, present)
    if recipe.collective == "shared_memory" and not isinstance(carrier, SharedMemoryCommunicator):
        carrier = share_memory(comm)  # raises with the reason if that fails
    return carrier, hosts, recipe
