"""From a recipe to what it names: sums, exchange and shards, composed in an `Engine`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.groups import Groups, for_background
from gradsync.comm.p2p_collectives import (
    doubling_all_reduce,
    hierarchical_all_reduce,
    ring_all_reduce,
)
from gradsync.comm.process_group import Channel, draw_channel
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
from gradsync.sync.options import Recipe
from gradsync.sync.reducer import Replicas, trainable
from gradsync.sync.shared_memory import SharedMemoryExchange, SharedMemoryShards
from gradsync.sync.tree_exchange import TreeExchange
from gradsync.sync.zero import ZeroShards

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("gradsync")


def build_engine(
    model: nn.Module, comm: Communicator, recipe: Recipe, groups: Groups | None = None
) -> Engine:
    """Bind `recipe` to a model and the ranks of `comm`.

    Args:
        model: on its device; its replicas are equal already.
        comm: all ranks.
        recipe: describes the strategy.
        groups: ranks inside the host and between hosts, for `reduction='hierarchical'`.

    Raises:
        ConfigError: a hierarchical recipe without groups.
    """
    parameters = [parameter for _, parameter in trainable(model)]
    buckets = lay_out_buckets(parameters, recipe, comm.world_size)
    invariant, exchange = recipe.order == "invariant", None
    # What shared memory can do for the recipe beyond carrying messages.
    plain = (recipe.shard, recipe.reduction, recipe.wire) == ("none", "backend", "same")
    divides = plain and recipe.grouping == "buckets"
    shards: Replicas | None = None
    # With shards, or with memory held once, `optimizer.step()` would be the whole optimizer's.
    user_loop = recipe.shard == "none"
    if isinstance(comm, SharedMemoryCommunicator) and (invariant or divides):
        try:
            exchange = SharedMemoryExchange(comm, buckets, along_tree=invariant)
            if divides:
                shards = SharedMemoryShards(model, parameters, exchange, recipe)
                user_loop = recipe.weights != "shared"
        except SharedMemoryError as error:
            exchange, buckets = None, lay_out_buckets(parameters, recipe, comm.world_size)
            if comm.rank == 0:
                log.warning("buckets by messages: %s", str(error))
    if recipe.shard != "none":
        in_shards = recipe.shard == "gradients"
        shards = ZeroShards(model, parameters, comm, buckets, gradients=in_shards)
    engine = Engine(
        *(model, comm, buckets),
        # The core that would add beside backward computes.
        recipe=recipe if exchange is None else replace(recipe, overlap=False),
        sums=TreeSums() if invariant else PlainSums(),
        exchange=exchange or _exchange(comm, recipe, groups, parameters[0].device),
        shards=shards,
        # Shards of optimizer state belong to places in buckets: then places must not change.
        learns=recipe.grouping == "buckets" and recipe.shard == "none" and exchange is None,
    )
    engine.user_loop = user_loop
    return engine


def _exchange(
    comm: Communicator, recipe: Recipe, groups: Groups | None, device: torch.device
) -> Exchange:
    if recipe.order == "invariant":
        channel = draw_channel(comm)
        own = for_background(comm, device)
        levels = [Channel(level, channel) for level in _tree_levels(own, recipe, groups)]
        return TreeExchange(Channel(own, channel), levels, device)
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
    return Algorithm(_algorithm(for_background(comm, device), recipe, groups), device)


def _over_hosts(comm: Communicator, recipe: Recipe, groups: Groups) -> OverHosts | None:
    """Shared memory inside of hosts; None where it is not wanted or not possible."""
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


def _tree_levels(comm: Communicator, recipe: Recipe, groups: Groups | None) -> list[Communicator]:
    if recipe.reduction == "backend":
        return [comm]
    groups = _known(groups)
    in_order = [rank for ranks in groups.placement.nodes for rank in ranks]
    if not groups.equal_nodes or in_order != list(range(comm.world_size)):
        raise ConfigError(
            "order='invariant' with reduction='hierarchical' needs hosts with equally many ranks, "
            f"numbered host by host; got {groups.placement.nodes}; use reduction='backend'"
        )
    return [groups.intra, groups.inter]


def _algorithm(
    comm: Communicator, recipe: Recipe, groups: Groups | None
) -> Callable[[Tensor], None]:
    channel = draw_channel(comm)
    everyone = Channel(comm, channel)
    if recipe.reduction == "ring":
        return lambda flat: ring_all_reduce(everyone, flat, "sum")
    if recipe.reduction == "recursive_doubling":
        return lambda flat: doubling_all_reduce(everyone, flat, "sum")
    known = _known(groups)
    intra, inter = Channel(known.intra, channel), Channel(known.inter, channel)
    return lambda flat: hierarchical_all_reduce(
        intra, inter, flat, "sum", equal_nodes=known.equal_nodes
    )


def _known(groups: Groups | None) -> Groups:
    if groups is None:
        raise ConfigError(
            "reduction='hierarchical' needs to know which ranks share a host: give `replicate` the "
            "world of `gs.init()`, or `groups=gs.groups(world)`"
        )
    return groups
