"""The duration of a step: its parts by closed formula, down to each message; no torch.

    micro-batch 1 .. k-1    forward, backward, and what they wait for
    micro-batch k           the same; its backward fills buckets, which are then sent
    update                  clipping and optimizer
    after                   weights gathered, if each rank updated a share

`predict_step` adds them up: every rank equally fast, no failures, the computing first, then the
communication that it could not hide.

Messages count by latency and bandwidth only: n ranks, S bytes of the whole tensor, a the latency of
a message (s), b its seconds per byte (Hockney 1994, "The communication challenge for MPP").
Additions are left out: on a GPU these run at the memory's rate, far above any link; on a CPU, a
measured line defines the link (`machine.cpu_link`).

    reduce_scatter, all_gather   ring        (n-1) a + (n-1)/n S b
    all_reduce                   ring        2 (n-1) a + 2 (n-1)/n S b
                                 halving     2 lg n a + 2 (n-1)/n S b
                                 doubling    lg n (a + S b)

Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH"
(ring, recursive doubling); Rabenseifner 2004, "Optimization of collective reduction operations"
(recursive halving, then doubling: powers of two).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from gradsync.commands.parallel.layout import EMBEDDING, Weight, weights_of
from gradsync.commands.plan.description import Hardware, Link
from gradsync.commands.plan.profile import StepProfile
from gradsync.commands.plan.workload import Split, Traffic, Workload, traffic_of
from gradsync.sync.layout import Item, plan_buckets
from gradsync.sync.options import Recipe

_FP32 = 4  # Weights and gradients are fp32, with any autocast
_AGREE_BYTES = 64  # The small message of each step: loss, weight, flags
_ACTIVATION_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TENSOR_PARALLEL_SUMS = 4  # Of activations, per layer and micro-batch (arXiv 1909.08053)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Hosts of a group's `ranks`: `per_host` on each host except the last."""

    ranks: int
    per_host: int
    link: Link  # Between ranks of a host
    network: Link | None = None  # Between hosts
    groups_per_host: int = 1  # Groups like this one that use a host's single port together

    @property
    def local(self) -> int:
        """Ranks of the group on one host."""
        return min(self.ranks, self.per_host)

    @property
    def num_hosts(self) -> int:
        """Hosts that the group spans."""
        return -(-self.ranks // self.per_host)

    def seconds(self, num_bytes: float, *, far: bool, senders: int = 1) -> float:
        """One message of each rank, between hosts if `far`; `senders` of a host send at once."""
        if not far or self.network is None:
            return self.link.seconds(num_bytes)
        share = senders * self.groups_per_host if self.network.per_host else 1
        return self.network.alpha_s + num_bytes * share / self.network.bytes_per_s

    def levels(self) -> tuple[GroupPlace, GroupPlace]:
        """The ranks of one host, and the ranks that own the same shard on all hosts."""
        groups = self.local * self.groups_per_host
        return (
            replace(self, ranks=self.local, network=None),
            replace(self, ranks=self.num_hosts, per_host=1, groups_per_host=groups),
        )


def ring_pass(place: GroupPlace, num_bytes: float) -> float:
    """reduce_scatter or all_gather around a ring: n - 1 messages of S/n.

    On several hosts the slowest edge sets the pace, and one rank of each host sends to another
    host. The latency is that of one piece around the ring, which crosses hosts H - 1 times (as NCCL
    counts it, `src/graph/tuning.cc`).
    """
    n, hosts = place.ranks, place.num_hosts
    if hosts == 1:
        return (n - 1) * place.link.seconds(num_bytes / n)
    latency = (n - hosts) * place.link.alpha_s + (hosts - 1) * place.seconds(0, far=True)
    near = (n - 1) * num_bytes / n / place.link.bytes_per_s
    crossing = (n - 1) * (place.seconds(num_bytes / n, far=True) - place.seconds(0, far=True))
    return latency + max(crossing, near if place.local > 1 else 0.0)


def ring(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce: reduce_scatter, then all_gather, around a ring."""
    return 2 * ring_pass(place, num_bytes)


def _distances_are_far(place: GroupPlace) -> list[bool]:
    """For the distances 1, 2, 4, ...: whether partners at that distance are on different hosts."""
    steps = place.ranks.bit_length() - 1
    return [place.num_hosts > 1 and 2**step >= place.local for step in range(steps)]


def halving(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce by recursive halving, then doubling; near partners exchange the large pieces."""
    return 2 * sum(
        place.seconds(num_bytes / 2 ** (step + 1), far=far, senders=place.local)
        for step, far in enumerate(_distances_are_far(place))
    )


def doubling(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce by recursive doubling: the whole tensor, lg n times; for short tensors."""
    return sum(
        place.seconds(num_bytes, far=far, senders=place.local) for far in _distances_are_far(place)
    )


def hierarchical(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce in two levels: shards in each host, each shard between hosts, then back."""
    if place.num_hosts == 1:
        return ring(place, num_bytes)
    inside, between = place.levels()
    return 2 * ring_pass(inside, num_bytes) + ring(between, num_bytes / place.local)


def tree(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce of `invariant` with one node per rank (sync/tree_exchange.py): shards in each
    host, each shard between hosts, and back; across all ranks if hosts are unequal. With a power of
    two ranks, halves go up the tree. Otherwise every rank sends each other rank that one's S/n to
    sum, and gets each sum back; the n - 1 messages of each direction start at once, and are posted
    one after another."""
    n, crossing = place.ranks, place.ranks - place.local
    if place.num_hosts > 1 and place.local > 1 and n % place.local == 0:
        inside, between = place.levels()
        return tree(inside, num_bytes) + tree(between, num_bytes / place.local)
    if n & (n - 1) == 0 and not n % place.local:
        return halving(place, num_bytes)
    one_way = (place.local - 1) * place.link.seconds(num_bytes / n)
    one_way += crossing * place.seconds(num_bytes / n, far=True, senders=place.local)
    return 2 * one_way


ALL_REDUCE = {cost.__name__: cost for cost in (ring, halving, doubling, hierarchical, tree)}


def all_reduce_s(place: GroupPlace, num_bytes: float, algorithm: str = "best") -> float:
    """Seconds of one all_reduce by an algorithm of `ALL_REDUCE`; best: the fastest that a library
    selects by size (NCCL between rings and trees, MPI between all)."""
    if place.ranks == 1:
        return 0.0
    if algorithm != "best":
        return ALL_REDUCE[algorithm](place, num_bytes)
    known = [ring, hierarchical]
    if place.ranks & (place.ranks - 1) == 0:
        known += [halving, doubling]
    return min(cost(place, num_bytes) for cost in known)


def half_s(place: GroupPlace, num_bytes: float) -> float:
    """Seconds of one reduce_scatter or all_gather over `num_bytes` of the whole tensor."""
    if place.ranks == 1:
        return 0.0
    if place.num_hosts == 1 or place.local == 1:
        return ring_pass(place, num_bytes)
    return min(ring_pass(place, num_bytes), hierarchical(place, num_bytes) / 2)


@dataclass(frozen=True, slots=True)
class Sending:
    """A bucket to send."""

    ready_s: float  # After the last micro-batch's backward began
    cost_s: float  # Time that it occupies the channel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step, seconds; the mean if ranks do not synchronise in each."""

    compute_s: float  # Forward and backward of a rank's micro-batches
    exposed_comm_s: float  # Communication that no computing hides
    bubble_s: float  # Idle time of a pipeline stage
    update_s: float  # Clipping and optimizer
    tokens_per_s: float  # All ranks together
    efficiency: float
    """Tokens per second and rank, over one rank alone with as many micro-batches as a replica."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_comm_s + self.bubble_s + self.update_s


def predict_step(
    work: Workload, split: Split, hardware: Hardware, profile: StepProfile
) -> StepTime:
    """Duration of a step; ranks fill hosts in order.

        data parallel    k micro-batches, buckets on one channel during the last backward, update
        pipeline         (p - 1) / (m + p - 1) of the micro-batches' time is bubble (1F1B, arXiv
                         1806.03377)
        tensor parallel  four sums of activations per layer and micro-batch (arXiv 1909.08053)
        local_sgd        a synchronisation's messages, divided by the steps between two

    Args:
        work: the training run; `num_leaves` of the whole step.
        split: its strategy and layout.
        hardware: at least as many devices as the split has ranks, else ConfigError.
        profile: of the whole model on one of the devices.
    """
    layout, used = split.layout, hardware.with_devices(split.world_size)
    leaves = math.ceil(work.num_leaves / layout.dp)  # of the replica with the most
    host, parts, alone = used.hosts[0], layout.model_ranks, layout.dp == 1
    device = host.devices[0]
    traffic = traffic_of(split.strategy, device.kind)
    prices = Prices(used, split, traffic)
    # CPU ranks compute more slowly if a host has more ranks than cores.
    scale = max(1.0, len(host.devices) / host.cores) if device.kind == "cpu" else 1.0
    scale /= parts
    forward_s, backward_s = profile.forward_s * scale, profile.backward_s * scale
    leaf_s = forward_s + backward_s
    parameters = weights_of(work.model)
    whole_bytes = _bytes(parameters) / parts

    # In each micro-batch: activations between stages and shards, gathered weights.
    activation_bytes = work.leaf_tokens * work.model.n_embd * _ACTIVATION_BYTES[work.dtype]
    hop_s = tensor_s = wait_s = last_wait_s = 0.0
    if layout.pp > 1:
        # On the longest way: in while it fills, and out while it empties.
        hops = 2 * (layout.pp - 1) + (0 if prices.hides and traffic.overlap else 2 * (leaves - 1))
        hop_s = hops * prices.data.seconds(activation_bytes, far=parts > len(host.devices))
    if layout.tp > 1:  # nothing hides these
        sums = _TENSOR_PARALLEL_SUMS * work.model.n_layer
        tensor_s = sums * all_reduce_s(prices.shards, activation_bytes)
    if traffic.shard == "weights" and not alone:
        gathers = [half_s(prices.data, _bytes(block) / parts) for block in _blocks(parameters)]
        wait_s, last_wait_s = _gather_waits(gathers, forward_s, backward_s, hides=prices.hides)
    waits_s = leaves * tensor_s + (leaves - 1) * wait_s + last_wait_s + hop_s

    # After backward: buckets in flight, the small message. After the update: what is gathered.
    sendings: tuple[Sending, ...] = ()
    copy_s = agree_s = 0.0
    if not alone:
        sendings = _sendings(parameters, prices, backward_s)
        # Weights that all ranks of a host read are written between two more synchronisations.
        agree_s = (3 if prices.divided else 1) * prices.all_reduce_s(_AGREE_BYTES)
        rate = device.memory_bytes_per_s  # None: unknown, copies count as free
        copy_s = 0.0 if rate is None else traffic.copies * 2 * whole_bytes / rate
    sendings, after_s = _published(prices, sendings, whole_bytes, forward_s)
    open_s = sum(sending.cost_s for sending in sendings)
    if prices.hides and traffic.overlap:
        open_s = max(0.0, channel_end(sendings) - backward_s)
    every = 1 if alone else traffic.every

    compute_s = leaves * leaf_s
    exposed_s = waits_s + (open_s + agree_s) / every + copy_s + after_s
    bubble_s = (layout.pp - 1) * (leaf_s + tensor_s + wait_s)
    update_s = profile.update_s * scale / (layout.dp if prices.in_shares else 1)
    tokens_per_s = work.step_tokens / (compute_s + exposed_s + bubble_s + update_s)
    alone_s = leaves * profile.leaf_s + profile.update_s
    return StepTime(
        compute_s=compute_s,
        exposed_comm_s=exposed_s,
        bubble_s=bubble_s,
        update_s=update_s,
        tokens_per_s=tokens_per_s,
        efficiency=tokens_per_s / split.world_size / (leaves * work.leaf_tokens / alone_s),
    )


class Prices:
    """The messages of one split on exactly the used devices; ranks fill hosts in order."""

    def __init__(self, hardware: Hardware, split: Split, traffic: Traffic) -> None:
        self.traffic, self.parts = traffic, split.layout.model_ranks
        layout, host, network = split.layout, hardware.hosts[0], hardware.network
        on_cpu = host.devices[0].kind == "cpu"
        on_cpu_host = on_cpu and len(hardware.hosts) == 1
        local, along_tree = len(host.devices), traffic.algorithm == "tree"
        per_host = max(local // self.parts, 1)
        self.data = GroupPlace(
            ranks=layout.dp,
            per_host=per_host,
            link=host.link,
            network=network,
            groups_per_host=max(local // per_host, 1),
        )
        self.shards = GroupPlace(
            ranks=layout.tp, per_host=min(layout.tp, local), link=host.link, network=network
        )
        self.hides = not on_cpu_host  # There the cores that would communicate run backward
        self.divided = on_cpu_host and traffic.through_host and self.parts == 1 < layout.dp
        """Whether the ranks of a host sum and update in shares, through shared memory."""
        self.in_shares = traffic.shard != "none" or self.divided
        self.gathers = traffic.shard in ("optimizer", "gradients")  # Updated weights
        self.late = traffic.late and not (self.in_shares and on_cpu_host)
        """Whether what follows the update goes on beside the next forward."""
        to_owners = traffic.shard == "optimizer" and self.hides  # on one host the sums are whole
        self.in_halves = to_owners or (self.late and not self.gathers and (on_cpu or along_tree))
        """Whether backward sends one half of an all-reduce, and the other follows the update."""
        # Gloo's all_reduce is always a ring; NCCL selects by size.
        gloo = on_cpu and traffic.algorithm == "best"
        self._algorithm = "ring" if gloo else traffic.algorithm

    def all_reduce_s(self, num_bytes: float) -> float:
        """Among replicas."""
        return all_reduce_s(self.data, num_bytes, self._algorithm)


def _sendings(
    parameters: Sequence[Weight], prices: Prices, backward_s: float
) -> tuple[Sending, ...]:
    """Buckets of the strategy. Backward takes its time in proportion to elements, from the last
    parameter to the first; the embedding needs no product, a tied head has its own first."""
    traffic, parts = prices.traffic, prices.parts
    if prices.divided:  # one pass over all buckets, after backward
        return (Sending(backward_s, half_s(prices.data, _bytes(parameters) / parts)),)
    blocks = _buckets(parameters, traffic)
    if traffic.shard == "weights":
        blocks = _blocks(parameters)[::-1]
    is_tied = all(each.name != "head.weight" for each in parameters)
    ahead = sum(_bytes([each]) for each in parameters if each.name == EMBEDDING and is_tied)
    work = [_bytes([each for each in block if each.name != EMBEDDING]) for block in blocks]
    found = []
    for block, done in zip(blocks, accumulate(work), strict=True):
        ready_s = backward_s * (ahead + done) / (ahead + sum(work))
        sent = _bytes(block) * traffic.wire / parts
        if traffic.low_rank is not None:
            sent = _factor_bytes(block, traffic.low_rank)
        if traffic.shard in ("gradients", "weights"):
            seconds = half_s(prices.data, sent)
        else:
            seconds = prices.all_reduce_s(sent)
        if traffic.shard == "weights" and prices.hides:
            # Backward gathers the next block's weights over the same channel.
            seconds *= 2
        found.append(Sending(ready_s, seconds))
    return tuple(found)


def _buckets(parameters: Sequence[Weight], traffic: Traffic) -> list[list[Weight]]:
    """Parameters that travel together, in the order in which backward finishes them, by the
    engine's own plan."""
    sizes = {"parameter": 0.0, "flat": math.inf, "buckets": traffic.bucket_mb * 2**20}
    first = Recipe().first_bucket_mb * 2**20 if traffic.grouping == "buckets" else None
    plans = plan_buckets(
        [Item(numel=math.prod(p.shape), itemsize=_FP32, kind="fp32") for p in parameters],
        range(len(parameters))[::-1],
        bucket_bytes=sizes[traffic.grouping],
        first_bucket_bytes=first,
        like_ddp=traffic.by_library,
        world_size=1,
    )
    return [[parameters[slot.index] for slot in plan.slots] for plan in plans]


def _published(
    prices: Prices, sendings: tuple[Sending, ...], whole_bytes: float, forward_s: float
) -> tuple[tuple[Sending, ...], float]:
    """What backward sends, and the seconds of what follows the update that no forward hides."""
    late_s = half_s(prices.data, whole_bytes) if prices.gathers else 0.0
    if prices.in_halves:
        sendings = tuple(replace(each, cost_s=each.cost_s / 2) for each in sendings)
        late_s = sum(each.cost_s for each in sendings)
    if not (late_s and prices.late and prices.hides):
        return sendings, late_s
    # The next forward needs the last bucket first.
    first_s = late_s * sendings[-1].cost_s / sum(each.cost_s for each in sendings)
    return sendings, _not_hidden(late_s, first_s, forward_s)


def _not_hidden(whole_s: float, first_s: float, computing_s: float) -> float:
    """What computing beside messages waits for: the first one, and what takes longer than it."""
    return first_s + max(0.0, whole_s - first_s - computing_s)


def _gather_waits(
    gathers: Sequence[float], forward_s: float, backward_s: float, *, hides: bool
) -> tuple[float, float]:
    """The time that fsdp's gathers of weights add to a micro-batch, and to the last one, whose
    backward shares the channel with the gradients: the buckets account for it there."""
    whole, first = sum(gathers), max(gathers)
    if not hides:
        return 2 * whole, 2 * whole
    forward = _not_hidden(whole, first, forward_s)
    return forward + _not_hidden(whole, first, backward_s), forward


def _blocks(parameters: Sequence[Weight]) -> list[list[Weight]]:
    """The groups that fsdp gathers: the root (embedding, last norm, head), then each block."""
    found: dict[int | None, list[Weight]] = {None: []}
    for parameter in parameters:
        found.setdefault(parameter.block, []).append(parameter)
    return list(found.values())


def _bytes(parameters: Sequence[Weight]) -> float:
    return _FP32 * sum(math.prod(parameter.shape) for parameter in parameters)


def _factor_bytes(parameters: Sequence[Weight], rank: int) -> float:
    """PowerSGD's message (arXiv 1905.13727): a matrix n x m as factors n x r and m x r, if that is
    smaller."""
    matrices = [p for p in parameters if len(p.shape) == 2]
    others = _bytes([p for p in parameters if len(p.shape) != 2])
    return others + sum(min(_bytes([p]), _FP32 * rank * sum(p.shape)) for p in matrices)


def channel_end(sendings: Sequence[Sending]) -> float:
    """When a channel that sends one bucket after another is done, after backward began."""
    free = 0.0
    for sending in sendings:
        free = max(free, sending.ready_s) + sending.cost_s
    return free


def simulate(
    work: Workload,
    hardware: Hardware,
    world_sizes: Sequence[int],
    splits: Sequence[Split],
    profile: StepProfile,
) -> list[dict[str, Any]]:
    """A step of each split, of one replica, on each number of ranks that it divides, as values for
    JSON. Ranks fill hosts like the first one; each replica has the micro-batches of `work` (weak
    scaling)."""
    host = hardware.hosts[0]
    points = []
    for split in splits:
        parts = split.layout.model_ranks
        for size in sorted(each for each in set(world_sizes) if each % parts == 0):
            replicas, hosts = size // parts, -(-size // len(host.devices))
            time = predict_step(
                replace(work, num_leaves=work.num_leaves * replicas),
                replace(split, layout=replace(split.layout, dp=replicas)),
                replace(hardware, hosts=(host,) * hosts),
                profile,
            )
            figures = {name: getattr(time, name) for name in ("tokens_per_s", "efficiency")}
            point = {"name": str(split), "world_size": size, "step_s": time.total_s}
            points.append(point | figures)
    return points
