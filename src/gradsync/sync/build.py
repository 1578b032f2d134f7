"""Builds what a recipe names (sums, exchange, shards) and composes it in an `Engine`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator, Messenger
from gradsync.comm.groups import Groups, Hosts, RankPlacement, Subset, for_background, group_of_pair
from gradsync.comm.p2p_collectives import hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.process_group import Channel, ProcessGroupCommunicator, draw_channel
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.hierarchy import all_reduce_over_hosts, share_hosts
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import ConfigError
from gradsync.sync.buckets import PlainSums, TreeSums
from gradsync.sync.engine import Engine, lay_out_buckets
from gradsync.sync.exchange import (
    Algorithm,
    AllReduce,
    Exchange,
    HalfWire,
    OverHosts,
    ReduceScatter,
)
from gradsync.sync.late_update import LateReplicas
from gradsync.sync.options import Recipe
from gradsync.sync.ownership.host_step import SharedMemoryExchange, SharedMemoryShards
from gradsync.sync.ownership.zero import ZeroShards
from gradsync.sync.reducer import Replicas, trainable
from gradsync.sync.tree_exchange import TreeExchange

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("gradsync")


def build_engine(
    model: nn.Module,
    comm: Communicator,
    recipe: Recipe,
    groups: Hosts | None = None,
) -> Engine:
    """Bind `recipe` to a model and the ranks of `comm`.

    Args:
        model: on its device; its replicas are already equal.
        comm: all ranks.
        recipe: describes the strategy.
        groups: ranks within the host and between hosts, for `reduction='hierarchical'`; the hosts
            of all ranks, for sums along the tree.

    Raises:
        ConfigError: a hierarchical recipe without groups.
    """
    parameters = [parameter for _, parameter in trainable(model)]
    buckets = lay_out_buckets(parameters, recipe, comm.world_size)
    invariant = recipe.order == "invariant"
    exchange: Exchange | None = None
    # What the recipe does in shared memory, apart from carrying messages.
    plain = (recipe.shard, recipe.reduction, recipe.wire) == ("none", "backend", "same")
    divides = plain and recipe.grouping == "buckets"
    shards: Replicas | None = None
    # With shards, or weights held once, `optimizer.step()` would be the whole optimizer's.
    user_loop = recipe.shard == "none"
    adds_there = invariant and recipe.node_dtype is None
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
    in_memory = isinstance(comm, SharedMemoryCommunicator)
    by_messages, device = exchange is None, parameters[0].device
    later = comm.world_size > 1 and not in_memory and publishes_later(recipe, device)
    late = later and recipe.overlap and recipe.shard == "none"
    if exchange is None:
        exchange = _exchange(comm, recipe, groups, device, by_halves=late)
    tree = exchange if isinstance(exchange, TreeExchange) and comm.world_size > 1 else None
    if recipe.shard != "none":
        in_shards = recipe.shard == "gradients"
        how = {"gradients": in_shards, "exchange": tree, "late": later}
        shards = ZeroShards(model, parameters, comm, buckets, **how)
    elif late and tree is not None:
        measures = recipe.overlap_publish == "auto"
        shards = LateReplicas(model, parameters, comm, tree, measures=measures)
    engine = Engine(
        *(model, comm, buckets),
        # The core that would add while backward runs is busy computing.
        recipe=recipe if by_messages else replace(recipe, overlap=False),
        sums=TreeSums() if invariant else PlainSums(),
        exchange=exchange,
        shards=shards,
        # Shards of optimizer state belong to places in buckets, so places must not change.
        learns=recipe.grouping == "buckets" and recipe.shard == "none" and by_messages,
    )
    engine.user_loop = user_loop
    return engine


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
    groups: Hosts | None,
    device: torch.device,
    *,
    by_halves: bool,
) -> Exchange:
    plain = (recipe.grouping, recipe.reduction, recipe.wire) == ("buckets", "backend", "same")
    if recipe.order == "invariant" or (by_halves and plain and device.type == "cpu"):
        channel = draw_channel(comm)
        own = for_background(comm, device)
        levels = [Channel(level, channel) for level in _tree_levels(own, recipe, groups)]
        over_leaves = recipe.order == "invariant"
        adds = device.type == "cpu" and (recipe.shard, recipe.node_dtype) == ("none", None)
        pair = group_of_pair(comm) if adds else None
        made = _made_for(comm, own, pair)
        gather = own if gathers(device) and len(levels) == 1 else None
        how = {"over_leaves": over_leaves, "pair": pair, "gather": gather, "made": made}
        return TreeExchange(Channel(own, channel), levels, device, **how)
    if recipe.shard == "gradients":
        return ReduceScatter(comm)
    if recipe.wire != "same":
        return HalfWire(comm, torch.bfloat16 if recipe.wire == "bf16" else torch.float16)
    if recipe.reduction == "backend":
        return AllReduce(comm)
    if recipe.reduction == "hierarchical" and device.type == "cpu":
        exchange = _over_hosts(comm, recipe, _known(groups))
        if exchange is not None:
            return exchange
    own = for_background(comm, device)
    return Algorithm(_algorithm(own, recipe, groups), device, _made_for(comm, own))


def _made_for(comm: Communicator, *used: Communicator | None) -> list[ProcessGroupCommunicator]:
    """The communicators in `used` that are not `comm`."""
    return [c for c in used if isinstance(c, ProcessGroupCommunicator) and c is not comm]


def _over_hosts(comm: Communicator, recipe: Recipe, groups: Groups) -> OverHosts | None:
    """Shared memory within hosts; None if it is not wanted or not possible."""
    hosts = groups.placement.nodes
    if recipe.collective == "backend" or len(hosts) == comm.world_size:
        return None
    channel = draw_channel(comm)
    inter = Channel(groups.inter, channel)
    try:
        host = share_hosts(comm, groups.intra, channel)
    except SharedMemoryError as error:
        if recipe.collective == "shared_memory":
            raise
        if comm.rank == 0:
            log.info("inside of hosts by messages: %s", str(error))
        return None
    if comm.rank == 0:
        log.info("through shared memory inside of hosts, of which there are %d", len(hosts))
    equal_nodes = groups.equal_nodes
    return OverHosts(
        host, lambda flat: all_reduce_over_hosts(host, inter, flat, equal_nodes=equal_nodes)
    )


def _tree_levels(comm: Communicator, recipe: Recipe, groups: Hosts | None) -> list[Messenger]:
    """The messengers for sums along the tree: `[comm]`, or `[within hosts, between hosts]` if the
    placement of ranks allows it."""
    required = recipe.reduction == "hierarchical"
    if groups is None and not required:
        return [comm]
    placement = groups if isinstance(groups, RankPlacement) else _known(groups).placement
    hosts = placement.nodes
    in_order = [rank for ranks in hosts for rank in ranks] == list(range(comm.world_size))
    if placement.equal_nodes and in_order:
        inside, between = placement.node_of(comm.rank), placement.column_of(comm.rank)
        if comm.rank == 0:
            log.info("sums along the tree: inside of %d hosts, then between them", len(hosts))
        return [Subset(comm, inside), Subset(comm, between)]
    said = f"hosts with equally many ranks, numbered host by host; got {hosts}"
    if required:
        raise ConfigError(
            f"order='invariant' with reduction='hierarchical' needs {said}; use reduction='backend'"
        )
    if comm.rank == 0:
        log.warning("each rank's sums cross between hosts apart; quicker with %s", said)
    return [comm]


def _algorithm(
    comm: Communicator, recipe: Recipe, groups: Hosts | None
) -> Callable[[Tensor], None]:
    channel = draw_channel(comm)
    everyone = Channel(comm, channel)
    if recipe.reduction == "ring":
        return lambda flat: ring_all_reduce(everyone, flat, "sum")
    # By messages of `comm`, owned by this thread: `intra` on one host is the default group.
    placement = _known(groups).placement
    intra = Subset(everyone, placement.node_of(comm.rank))
    inter = Subset(everyone, placement.column_of(comm.rank))
    return lambda flat: hierarchical_all_reduce(
        intra, inter, flat, "sum", equal_nodes=placement.equal_nodes
    )


def _known(groups: Hosts | None) -> Groups:
    if not isinstance(groups, Groups):
        raise ConfigError(
            "reduction='hierarchical' needs to know which ranks share a host: give `replicate` the "
            "world of `gs.init()`"
        )
    return groups
