"""Construction of an engine from a recipe."""

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
from gradsync.sync.engine.engine import Engine
from gradsync.sync.engine.over_hosts import OverHosts
from gradsync.sync.engine.recipe import Recipe
from gradsync.sync.engine.sums import PlainSums, Sums, TreeSums
from gradsync.sync.engine.transport import (
    Algorithm,
    AllReduce,
    HalfWire,
    ReduceScatter,
    Transport,
)
from gradsync.sync.engine.tree_transport import TreeTransport
from gradsync.sync.host.engine import HostEngine
from gradsync.sync.host.tree import SharedTree
from gradsync.sync.sharded.zero import ShardedEngine

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
        recipe: describes the engine.
        groups: ranks inside the host and between hosts, for `reduction='hierarchical'`.

    Raises:
        ConfigError: a hierarchical recipe without groups.
    """
    device = next(p.device for p in model.parameters() if p.requires_grad)
    invariant = recipe.order == "invariant"
    sums = TreeSums if invariant else PlainSums
    if isinstance(comm, SharedMemoryCommunicator) and (invariant or _by_host(recipe)):
        try:
            return _on_one_host(model, comm, recipe, sums())
        except SharedMemoryError as error:
            if comm.rank == 0:
                log.warning("buckets by messages: %s", str(error))
    return _kind(recipe)(
        model,
        comm,
        recipe=recipe,
        sums=sums(),
        transport=_transport(comm, recipe, groups, device),
    )


def _on_one_host(
    model: nn.Module, comm: SharedMemoryCommunicator, recipe: Recipe, sums: Sums
) -> Engine:
    """An engine whose gradients lie in memory that all ranks see."""
    if _by_host(recipe):
        return HostEngine(model, comm, recipe=recipe, sums=sums)
    tree = SharedTree(comm)
    recipe = replace(recipe, overlap=False)  # the core that would add beside backward computes
    engine = _kind(recipe)(model, comm, recipe=recipe, sums=sums, transport=tree)
    try:
        tree.lay_out(engine.buckets)
    except SharedMemoryError:
        engine.close()
        raise
    return engine


def _kind(recipe: Recipe) -> type[Engine]:
    return Engine if recipe.shard == "none" else ShardedEngine


def _by_host(recipe: Recipe) -> bool:
    """Whether shared memory can do more for the recipe than carry messages."""
    plain = (recipe.shard, recipe.reduction, recipe.wire) == ("none", "backend", "same")
    return plain and recipe.grouping == "buckets"


def _transport(
    comm: Communicator, recipe: Recipe, groups: Groups | None, device: torch.device
) -> Transport:
    if recipe.order == "invariant":
        channel = draw_channel(comm)
        own = for_background(comm, device)
        levels = [Channel(level, channel) for level in _tree_levels(own, recipe, groups)]
        return TreeTransport(Channel(own, channel), levels, device)
    if recipe.shard == "gradients":
        return ReduceScatter(comm)
    if recipe.wire != "same":
        return HalfWire(comm, torch.bfloat16 if recipe.wire == "bf16" else torch.float16)
    if recipe.reduction == "backend":
        return AllReduce(comm)
    if recipe.reduction == "hierarchical" and device.type == "cpu":
        transport = _over_hosts(comm, recipe, _known(groups))
        if transport is not None:
            return transport
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
