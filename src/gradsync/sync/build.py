"""Builds the reducer of a strategy: what a recipe names (sums, exchange, shards), composed in an
`Engine`, or an adapter of torch's own classes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator, Messenger
from gradsync.comm.groups import RankPlacement, for_background, group_of_pair, levels_of
from gradsync.comm.p2p_collectives import hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator, Subset, draw_channel
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import ConfigError
from gradsync.sync.buckets import PlainSums, TreeSums
from gradsync.sync.engine import Engine, lay_out_buckets
from gradsync.sync.exchange import Algorithm, AllReduce, Exchange, HalfWire, ReduceScatter
from gradsync.sync.late_update import LateReplicas
from gradsync.sync.options import (
    DdpOptions,
    DilocoOptions,
    FsdpOptions,
    LocalSgdOptions,
    Options,
    Recipe,
)
from gradsync.sync.ownership.host_step import SharedMemoryExchange, SharedMemoryShards
from gradsync.sync.ownership.zero import ZeroShards
from gradsync.sync.reducer import NaiveReducer, Reducer, trainable
from gradsync.sync.registry import Strategy
from gradsync.sync.replicas import Replicas
from gradsync.sync.tree_exchange import TreeExchange

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("gradsync")

_NO_HOSTS = (
    "reduction='hierarchical' needs to know which ranks share a host: give `replicate` the world "
    "of `gs.init()`"
)


def build_reducer(
    strategy: Strategy,
    model: nn.Module,
    comm: Communicator,
    hosts: RankPlacement | None,
    options: Options,
) -> Reducer:
    """Bind `strategy` to a model and a communicator.

    Args:
        strategy: a value of `STRATEGIES`.
        model: on its device; its replicas are equal.
        comm: all ranks.
        hosts: of all ranks; without them, sums along the tree go straight from each rank to each.
        options: from `check_options`.
    """
    name = strategy.name
    if strategy.needs_group and comm.world_size == 1:
        return NaiveReducer(model, comm, strategy=name, needs_micro_step=True)
    match options:
        case Recipe():
            return build_engine(model, comm, options, hosts, strategy=name)
        case DdpOptions():  # powersgd's too
            from gradsync.sync.torch_ddp import TorchDdpReducer

            return TorchDdpReducer(model, comm, options)
        case FsdpOptions():
            from gradsync.sync.fsdp import FsdpReducer

            return FsdpReducer(model, comm, options)
        case LocalSgdOptions() | DilocoOptions():
            from gradsync.sync.periodic import PeriodicReducer

            return PeriodicReducer(model, comm, options)
    return NaiveReducer(model, comm)


def build_engine(
    model: nn.Module,
    comm: Communicator,
    recipe: Recipe,
    hosts: RankPlacement | None = None,
    *,
    strategy: str = "",
) -> Engine:
    """Compose what `recipe` names; the arguments are those of `build_reducer`.

    Raises:
        ConfigError: a hierarchical recipe without hosts.
    """
    parameters = [parameter for _, parameter in trainable(model)]
    buckets = lay_out_buckets(parameters, recipe, comm.world_size)
    invariant, device = recipe.order == "invariant", parameters[0].device
    exchange: Exchange | None = None
    shards: Replicas | None = None
    # With shards, or weights held once, `optimizer.step()` would be the whole optimizer's.
    user_loop = recipe.shard == "none"
    # What the recipe does in shared memory, apart from carrying messages.
    plain = (recipe.shard, recipe.reduction, recipe.wire) == ("none", "backend", "same")
    divides = plain and recipe.grouping == "buckets"
    adds_there = invariant and recipe.node_dtype is None
    in_memory = isinstance(comm, SharedMemoryCommunicator)
    if isinstance(comm, SharedMemoryCommunicator) and (adds_there or divides):
        try:
            exchange = SharedMemoryExchange(comm, buckets, along_tree=invariant)
            if divides:
                shards = SharedMemoryShards(model, parameters, exchange, recipe)
                user_loop = recipe.weights != "shared"
        except SharedMemoryError as error:
            exchange, buckets = None, lay_out_buckets(parameters, recipe, comm.world_size)
            if comm.rank == 0:
                log.warning("buckets by messages: %s", str(error))
    by_messages = exchange is None
    later = comm.world_size > 1 and not in_memory and publishes_later(recipe, device)
    late = later and recipe.overlap and recipe.shard == "none"
    if exchange is None:
        exchange = _exchange(comm, recipe, hosts, device, by_halves=late)
    tree = exchange if isinstance(exchange, TreeExchange) and comm.world_size > 1 else None
    if recipe.shard != "none":
        in_shards = recipe.shard == "gradients"
        how = {"gradients": in_shards, "exchange": tree, "late": later}
        shards = ZeroShards(model, parameters, comm, buckets, **how)
    elif late and tree is not None:
        measures = recipe.overlap_publish == "auto"
        shards = LateReplicas(model, parameters, comm, tree, measures=measures)
    return Engine(
        *(model, comm, buckets),
        # The core that would add while backward runs is busy computing.
        recipe=recipe if by_messages else replace(recipe, overlap=False),
        sums=TreeSums() if invariant else PlainSums(),
        exchange=exchange,
        shards=shards,
        # Shards of optimizer state belong to places in buckets, so places must not change.
        learns=recipe.grouping == "buckets" and recipe.shard == "none" and by_messages,
        user_loop=user_loop,
        strategy=strategy,
    )


def publishes_later(recipe: Recipe, device: torch.device) -> bool:
    """Whether sums may be sent to all ranks during the next forward. On GPUs only if explicitly
    requested: it costs the host two waits and an optimizer call per bucket, and links are fast."""
    return recipe.overlap_publish is True or bool(recipe.overlap_publish and device.type == "cpu")


def gathers(device: torch.device) -> bool:
    """Whether sums go down by an all-gather in the lane's own group, which needs few launches."""
    return device.type == "cuda"


def _exchange(
    comm: Communicator,
    recipe: Recipe,
    hosts: RankPlacement | None,
    device: torch.device,
    *,
    by_halves: bool,
) -> Exchange:
    plain = (recipe.grouping, recipe.reduction, recipe.wire) == ("buckets", "backend", "same")
    along_tree = recipe.order == "invariant"
    if along_tree or (by_halves and plain and device.type == "cpu"):
        channel = draw_channel(comm)
        own = for_background(comm, device)
        levels = [Subset(level, channel=channel) for level in _tree_levels(own, recipe, hosts)]
        adds = device.type == "cpu" and (recipe.shard, recipe.node_dtype) == ("none", None)
        pair = group_of_pair(comm) if adds else None
        gather = own if gathers(device) and len(levels) == 1 else None
        how = {"over_leaves": along_tree, "pair": pair, "gather": gather}
        everyone = Subset(own, channel=channel)
        return TreeExchange(everyone, levels, device, made=_made_for(comm, own, pair), **how)
    if recipe.shard == "gradients":
        return ReduceScatter(comm)
    if recipe.wire != "same":
        return HalfWire(comm, torch.bfloat16 if recipe.wire == "bf16" else torch.float16)
    if recipe.reduction == "backend":
        return AllReduce(comm)
    own = for_background(comm, device)
    everyone = Subset(own, channel=draw_channel(own))
    all_reduce = partial(ring_all_reduce, everyone)
    if recipe.reduction == "hierarchical":
        if hosts is None:
            raise ConfigError(_NO_HOSTS)
        intra, inter, equal = levels_of(everyone, hosts)
        all_reduce = partial(hierarchical_all_reduce, intra, inter, equal_nodes=equal)
    return Algorithm(all_reduce, device, _made_for(comm, own))


def _made_for(comm: Communicator, *used: Communicator | None) -> list[ProcessGroupCommunicator]:
    """The communicators in `used` that are not `comm`."""
    return [c for c in used if isinstance(c, ProcessGroupCommunicator) and c is not comm]


def _tree_levels(
    comm: Communicator, recipe: Recipe, hosts: RankPlacement | None
) -> list[Messenger]:
    """The messengers for sums along the tree: `[comm]`, or `[within hosts, between hosts]` if the
    placement of ranks allows it."""
    required = recipe.reduction == "hierarchical"
    if hosts is None and required:
        raise ConfigError(_NO_HOSTS)
    if hosts is None:
        return [comm]
    nodes = hosts.nodes
    in_order = [rank for ranks in nodes for rank in ranks] == list(range(comm.world_size))
    inside, between, equal = levels_of(comm, hosts)
    if equal and in_order:
        if comm.rank == 0:
            log.info("sums along the tree: inside of %d hosts, then between them", len(nodes))
        return [inside, between]
    said = f"hosts with equally many ranks, numbered host by host; got {nodes}"
    if required:
        raise ConfigError(
            f"order='invariant' with reduction='hierarchical' needs {said}; use reduction='backend'"
        )
    if comm.rank == 0:
        log.warning("each rank's sums cross between hosts apart; quicker with %s", said)
    return [comm]
