"""`gs.replicate`: a model becomes one of W equal replicas, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.comm.choose import communicator
from gradsync.errors import ConfigError, RunError
from gradsync.sync.batch_norm import NOT_INVARIANT, choose_batch_norm
from gradsync.sync.gradient_sync import HANDLE, GradientSync
from gradsync.sync.reducer import trainable
from gradsync.sync.registry import (
    Strategy,
    build_reducer,
    check_options,
    find_strategy,
    wants_groups,
)
from gradsync.sync.structure import broadcast_model, check_same_model
from gradsync.world import World

if TYPE_CHECKING:
    from torch import nn

    from gradsync.comm.groups import Groups


def replicate(
    model: nn.Module,
    world: World | None = None,
    *,
    sync: str = "invariant",
    batch_norm: str | None = None,
    comm: Communicator | None = None,
    groups: Groups | None = None,
    **options: Any,
) -> GradientSync:
    """Replicate `model` over the ranks of `world`: all start from rank 0's weights, and stay equal.

    The model is not wrapped: names, checkpoints and frozen parts stay as they are. It holds on to
    the returned handle, so that synchronisation lasts as long as the model.

    Args:
        model: on its device already.
        world: from `gs.init()` or `gs.World.from_process_group()`; None takes the latter when
            torch's default process group is there, else one rank.
        sync: a strategy of `gradsync.sync.registry.STRATEGIES`.
        batch_norm: "sync", "local" or "freeze": must be said when the model has BatchNorm, see
            `gradsync.sync.batch_norm`.
        comm: a communicator to use instead of the world's own.
        groups: from `gs.groups(world)`, for `sync="hierarchical"`; None makes them from `world`.
        options: of the strategy, such as `bucket_mb=25.0`.

    Raises:
        ConfigError: unknown strategy or option; the model is replicated already; ranks have
            different models or arguments; BatchNorm without a choice.
        RunError: several ranks but no process group; no trainable parameter.
    """
    strategy = find_strategy(sync)
    if getattr(model, HANDLE, None) is not None:
        raise ConfigError("this model is replicated already; call close() on its handle first")
    if comm is None:
        world = World.from_process_group() if world is None else world
        comm = communicator(world)
    if groups is None and world is not None and wants_groups(strategy, options):
        from gradsync.comm.groups import groups as make_groups

        groups = make_groups(world)
    handle = _bind(strategy, model, comm, options, groups=groups, batch_norm=batch_norm)
    # Hooks do not keep what they call alive; the model does. See GradientSync.__deepcopy__.
    model.__dict__[HANDLE] = handle
    return handle


def _bind(
    strategy: Strategy,
    model: nn.Module,
    comm: Communicator,
    options: dict[str, Any],
    *,
    groups: Groups | None,
    batch_norm: str | None,
) -> GradientSync:
    if not trainable(model):
        raise RunError("the model has no trainable parameter: nothing to synchronise")
    check_options(strategy, options)
    settings = {"sync": strategy.name, "batch_norm": batch_norm}
    check_same_model(model, comm, settings | {name: repr(v) for name, v in options.items()})
    order = options.get("order", strategy.recipe.order if strategy.recipe else "any")
    if order == "invariant" and batch_norm in NOT_INVARIANT:
        raise ConfigError(f"sync={strategy.name!r}: {NOT_INVARIANT[batch_norm]}")
    handling = choose_batch_norm(model, comm, batch_norm)
    broadcast_model(model, comm)
    reducer = build_reducer(strategy, model, comm, groups, options)
    return GradientSync(model, comm, reducer, handling)
