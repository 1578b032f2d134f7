"""Builds the reducer of a strategy: what a recipe names (sums, exchange, shards), composed in an
`Engine`, or an adapter of torch's own classes.

Contains the exchanges that use a communicator's collectives, or messages in rounds. For sums along
the tree see tree_exchange.py, for sums in memory that ranks share ownership/host_step.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Messenger, Work
from gradsync.comm.groups import RankPlacement, for_background, group_of_pair, levels_of
from gradsync.comm.p2p_collectives import hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.process_group import (
    Background,
    Done,
    ProcessGroupCommunicator,
    Subset,
    Then,
    draw_channel,
)
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket
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
from gradsync.sync.reducer import (
    Engine,
    Exchange,
    NaiveReducer,
    Reducer,
    lay_out_buckets,
    trainable,
)
from gradsync.sync.registry import Strategy
from gradsync.sync.replicas import Replicas
from gradsync.sync.tree_exchange import TreeExchange

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        naive = NaiveReducer(model, comm, strategy=name)
        naive.needs_micro_step = True  # as on several ranks
        return naive
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
    return NaiveReducer(model, comm, strategy=name)


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
                shards = SharedMemoryShards(model, exchange, recipe)
                user_loop = recipe.weights != "shared"
        except SharedMemoryError as error:
            exchange, buckets = None, lay_out_buckets(parameters, recipe, comm.world_size)
            if comm.rank == 0:
                log.warning("buckets by messages: %s", str(error))
    by_messages = exchange is None
    later = comm.world_size > 1 and not in_memory and publishes_later(recipe, device)
    late = later and recipe.overlap and recipe.shard == "none"
    if exchange is None:
        exchange = build_exchange(comm, recipe, hosts, device, by_halves=late)
    tree = exchange if isinstance(exchange, TreeExchange) and comm.world_size > 1 else None
    if recipe.shard != "none":
        in_shards = recipe.shard == "gradients"
        how = {"gradients": in_shards, "exchange": tree, "late": later}
        shards = ZeroShards(model, comm, buckets, **how)
    elif late and tree is not None:
        measures = recipe.overlap_publish == "auto"
        shards = LateReplicas(model, comm, tree, measures=measures)
    return Engine(
        *(model, comm, buckets),
        # The core that would add while backward runs is busy computing.
        recipe=recipe if by_messages else replace(recipe, overlap=False),
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


def build_exchange(
    comm: Communicator,
    recipe: Recipe,
    hosts: RankPlacement | None,
    device: torch.device,
    *,
    by_halves: bool,
) -> Exchange:
    """The exchange by messages or collectives that `recipe` names; the arguments are those of
    `build_reducer`. `by_halves`: the second half of each sum may come later."""
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
        made = [c for c in (own, pair) if c is not comm and isinstance(c, ProcessGroupCommunicator)]
        return TreeExchange(everyone, levels, device, made=made, **how)
    if recipe.shard == "gradients":
        return Collective(partial(reduce_scatter, comm))
    if recipe.wire != "same":
        return HalfWire(comm, torch.bfloat16 if recipe.wire == "bf16" else torch.float16)
    if recipe.reduction == "backend":
        return Collective(lambda bucket: comm.all_reduce(bucket.flat(0)))
    own = for_background(comm, device)
    everyone = Subset(own, channel=draw_channel(own))
    all_reduce = partial(ring_all_reduce, everyone)
    if recipe.reduction == "hierarchical":
        if hosts is None:
            raise ConfigError(_NO_HOSTS)
        intra, inter, equal = levels_of(everyone, hosts)
        all_reduce = partial(hierarchical_all_reduce, intra, inter, equal_nodes=equal)
    lane = Background(device, lost=getattr(comm, "lost", None))
    return Collective(
        lambda bucket: lane.submit(partial(all_reduce, bucket.flat(0))),
        [lane, own] if isinstance(own, ProcessGroupCommunicator) and own is not comm else [lane],
    )


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


# -- exchanges by collectives


@dataclass(eq=False)
class Collective(Exchange):
    """Sums by one function, which works in place on a bucket's [numel], in its dtype."""

    start: Callable[[Bucket], Work]
    """Starts the sum of a bucket, of the whole group; overlaps backward."""
    made: Sequence[Background | ProcessGroupCommunicator] = ()
    """What `start` uses, to be closed."""

    def launch(self, bucket: Bucket, *, half: bool = False) -> Work:
        return self.start(bucket)


def reduce_scatter(comm: Communicator, bucket: Bucket) -> Work:
    """Give each rank its shard's sum, in place in `flat(0)`; half the bytes of an all-reduce."""
    flat = bucket.flat(0)
    mine = bucket.plan.shard(comm.rank, comm.world_size)
    shard = flat[mine.start : mine.stop]
    # Not into `shard` itself: backends may refuse to read and write the same memory.
    result = torch.empty_like(shard)
    # Whole group, the bucket's [numel] and dtype in, [numel / W] out; overlaps backward.
    return Then(comm.reduce_scatter(result, flat), lambda: shard.copy_(result))


@dataclass(eq=False)
class HalfWire(Exchange):
    """All-reduce in 16 bits: half the bytes; rounds when sending and at every addition.

    [Note: fp16 on the wire] Gradients here are sums over targets and would exceed 65,504, fp16's
    largest number. So a bucket is first multiplied by the power of two that brings ranks x largest
    magnitude just below 65,504; a power of two rounds nothing. Ranks agree on that magnitude by one
    all-reduce (max, fp32 [1]). On a CPU backward waits for it; on CUDA only a separate stream does.
    bf16 has fp32's range.

    Complex numbers are sent as pairs of real numbers, because there is no complex bf16.
    """

    comm: Communicator
    dtype: torch.dtype
    _stream: Any = None

    def launch(self, bucket: Bucket, *, half: bool = False) -> Work:
        device = bucket.flat(0).device
        if device.type != "cuda":
            return self._launch(bucket)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # After this bucket's gradients, and after the last use of what this stream has allocated.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            return self._launch(bucket)

    def _launch(self, bucket: Bucket) -> Work:
        flat = bucket.flat(0)
        if self.comm.world_size == 1:
            return Done()  # nothing is sent, nothing is rounded
        if flat.is_complex():
            flat = torch.view_as_real(flat)  # [numel, 2], the same memory
        if self.dtype == torch.bfloat16:
            small = flat.to(self.dtype)  # whole group, bf16 [numel], overlaps backward
            return Then(self.comm.all_reduce(small), lambda: flat.copy_(small))
        scale = self._scale(flat)
        small = (flat.float() * scale).to(self.dtype)
        # Whole group, fp16 [numel], overlaps backward.
        return Then(self.comm.all_reduce(small), lambda: flat.copy_(small.float() / scale))

    def _scale(self, flat: Tensor) -> Tensor:
        """Power of two, [1]; 1 if the gradient is all zeros or not finite."""
        largest = flat.abs().max().reshape(1).float()  # 16 bits would round the scale up
        self.comm.all_reduce(largest, "max").wait()  # see [Note: fp16 on the wire]
        limit = torch.finfo(torch.float16).max / self.comm.world_size
        scale = torch.exp2(torch.floor(torch.log2(limit / largest)).clamp(-120, 120))
        return torch.where(torch.isfinite(largest) & (largest > 0), scale, torch.ones_like(scale))
