"""The parts of a step, each with its duration, and their sum by closed formula; no torch.

    leaf 1 .. k-1    forward, backward, and the leaf's waits
    leaf k           the same; its backward fills buckets, which are then sent
    update           clipping and optimizer
    after            weights gathered, if each rank updated a share

`predict_step` adds them up: every rank equally fast, no failures, the computing first, then the
communication that it could not hide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from gradsync.commands.plan.collectives import GroupPlace, Traffic, all_reduce_s, half_s, traffic_of
from gradsync.commands.plan.description import Hardware
from gradsync.commands.plan.profile import (
    GRADIENT_BYTES,
    Parameter,
    StepProfile,
    buckets_of,
    parameters_of,
)
from gradsync.commands.plan.workload import Split, Workload

_AGREE_BYTES = 64
"""The message in which ranks agree on loss, weight and flags at the end of each step."""
_ACTIVATION_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TENSOR_PARALLEL_SUMS = 4
"""Sums of activations, per layer and leaf: two in forward, two in backward (arXiv 1909.08053)."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A bucket to send."""

    ready_s: float  # After the last leaf's backward began
    cost_s: float  # Time that it occupies the channel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step, seconds; the mean if ranks do not synchronise in each."""

    compute_s: float  # Forward and backward of a rank's leaves
    exposed_comm_s: float  # Communication that no computing hides
    bubble_s: float  # Idle time of a pipeline stage
    update_s: float  # Clipping and optimizer
    comm_s: float  # All communication of a rank, hidden or not
    tokens_per_s: float  # All ranks together
    efficiency: float
    """Tokens per second and rank, over one rank alone with as many leaves as a replica has."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_comm_s + self.bubble_s + self.update_s


def predict_step(
    work: Workload, split: Split, hardware: Hardware, profile: StepProfile
) -> StepTime:
    """Duration of a step; ranks fill hosts in order.

        data parallel    k leaves, buckets on one channel during the last backward, update
        pipeline         (p - 1) / (m + p - 1) of the leaves' time is bubble (1F1B, arXiv
                         1806.03377)
        tensor parallel  four sums of activations per layer and leaf (arXiv 1909.08053)
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
    device, on_cpu = host.devices[0], host.devices[0].kind == "cpu"
    traffic = traffic_of(split.strategy, device.kind)
    prices = Prices(used, split, traffic)
    # CPU ranks compute more slowly if a host has more ranks than cores.
    scale = (max(1.0, len(host.devices) / host.cores) if on_cpu else 1.0) / parts
    forward_s, backward_s = profile.forward_s * scale, profile.backward_s * scale
    leaf_s = forward_s + backward_s
    parameters = parameters_of(work.model, work.seq_len)
    whole_bytes = _bytes(parameters) / parts

    # In each leaf: activations between stages and shards, gathered weights.
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
        gathers = [prices.half_s(_bytes(block) / parts) for block in _blocks(parameters)]
        wait_s, last_wait_s = _gather_waits(gathers, forward_s, backward_s, hides=prices.hides)
    waits_s = leaves * tensor_s + (leaves - 1) * wait_s + last_wait_s + hop_s

    # After backward: buckets in flight, the small message. After the update: what is gathered.
    sendings: tuple[Sending, ...] = ()
    copy_s = agree_s = 0.0
    if not alone:
        sendings = _sendings(parameters, traffic, prices, profile, scale=scale, parts=parts)
        # Weights that all ranks of a host read are written between two more synchronisations.
        agree_s = (3 if prices.divided else 1) * prices.all_reduce_s(_AGREE_BYTES)
        rate = device.memory_bytes_per_s  # None: unknown, copies count as free
        copy_s = 0.0 if rate is None else traffic.copies * 2 * whole_bytes / rate
    sendings, late_s, after_s = _published(prices, sendings, whole_bytes, forward_s)
    sent_s = sum(sending.cost_s for sending in sendings)
    open_s = sent_s
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
        comm_s=waits_s + (sent_s + agree_s) / every + late_s,
        tokens_per_s=tokens_per_s,
        efficiency=tokens_per_s / split.world_size / (leaves * work.leaf_tokens / alone_s),
    )


class Prices:
    """Seconds of one split's messages on exactly the used devices; ranks fill hosts in order."""

    def __init__(self, hardware: Hardware, split: Split, traffic: Traffic) -> None:
        layout, host, network = split.layout, hardware.hosts[0], hardware.network
        on_cpu = host.devices[0].kind == "cpu"
        on_cpu_host = on_cpu and len(hardware.hosts) == 1
        local, along_tree = len(host.devices), traffic.algorithm == "tree"
        per_host = max(local // layout.model_ranks, 1)
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
        self.hides = not on_cpu_host
        """False for CPU ranks of one host: the cores that would communicate run backward."""
        self.divided = on_cpu_host and traffic.through_host and layout.model_ranks == 1 < layout.dp
        """Whether the ranks of a host sum and update in shares, through shared memory."""
        self.in_shares = traffic.shard != "none" or self.divided
        self.gathers = traffic.shard in ("optimizer", "gradients")
        """Whether updated weights are gathered."""
        self.late = traffic.late and not (self.in_shares and on_cpu_host)
        """Whether what follows the update goes on beside the next forward."""
        to_owners = traffic.shard == "optimizer" and along_tree
        to_owners &= self.hides or traffic.by_library  # in one host's memory the sums are whole
        self.in_halves = to_owners or (self.late and not self.gathers and (on_cpu or along_tree))
        """Whether backward sends one half of an all-reduce, and the other follows the update."""
        self._traffic = traffic
        # Gloo's all_reduce is always a ring; NCCL selects by size.
        gloo = on_cpu and traffic.algorithm == "best"
        self._algorithm = "ring" if gloo else traffic.algorithm

    def all_reduce_s(self, num_bytes: float) -> float:
        """Among replicas."""
        return all_reduce_s(self.data, num_bytes, self._algorithm)

    def half_s(self, num_bytes: float) -> float:
        """reduce_scatter or all_gather among replicas, over `num_bytes` of the whole tensor."""
        return half_s(self.data, num_bytes)

    def bucket_s(self, num_bytes: float) -> float:
        """The strategy's collective of a bucket."""
        in_halves = self._traffic.shard in ("gradients", "weights")
        return self.half_s(num_bytes) if in_halves else self.all_reduce_s(num_bytes)


def _sendings(
    parameters: Sequence[Parameter],
    traffic: Traffic,
    prices: Prices,
    profile: StepProfile,
    *,
    scale: float,
    parts: int,
) -> tuple[Sending, ...]:
    """Buckets of the strategy, ready according to the profile's timeline."""
    if prices.divided:  # one pass over all buckets, after backward
        last_s = max(bucket.ready_s for bucket in profile.buckets)
        return (Sending(last_s * scale, prices.half_s(_bytes(parameters) / parts)),)
    blocks = [[parameters[index] for index in each] for each in buckets_of(parameters, traffic)]
    if traffic.shard == "weights":
        blocks = _blocks(parameters)[::-1]
    # Between the buckets of the profile gradients come evenly: strategies cut buckets elsewhere.
    sizes = [0.0, *accumulate(bucket.num_bytes for bucket in profile.buckets)]
    times = [0.0, *accumulate((bucket.ready_s for bucket in profile.buckets), max)]
    ready_s = np.interp(list(accumulate(map(_bytes, blocks))), sizes, times)
    found = []
    for block, block_ready_s in zip(blocks, ready_s, strict=True):
        sent = _bytes(block) * traffic.wire
        if traffic.low_rank is not None:
            sent = _factor_bytes(block, traffic.low_rank)
        seconds = prices.bucket_s(sent / parts)
        if traffic.shard == "weights" and prices.hides:
            # Backward gathers the next block's weights over the same channel.
            seconds += prices.half_s(_bytes(block) / parts)
        found.append(Sending(float(block_ready_s) * scale, seconds))
    return tuple(found)


def _published(
    prices: Prices, sendings: tuple[Sending, ...], whole_bytes: float, forward_s: float
) -> tuple[tuple[Sending, ...], float, float]:
    """What backward sends, what follows the update, and how much of that no forward hides."""
    late_s = prices.half_s(whole_bytes) if prices.gathers else 0.0
    if prices.in_halves:
        sendings = tuple(replace(each, cost_s=each.cost_s / 2) for each in sendings)
        late_s = sum(each.cost_s for each in sendings)
    if not (late_s and prices.late and prices.hides):
        return sendings, late_s, late_s
    # The next forward needs the last bucket first.
    first_s = late_s * sendings[-1].cost_s / sum(each.cost_s for each in sendings)
    return sendings, late_s, _not_hidden(late_s, first_s, forward_s)


def _not_hidden(whole_s: float, first_s: float, computing_s: float) -> float:
    """What a pass waits for if it computes beside its messages: the first of them, and what takes
    longer than the computing."""
    return first_s + max(0.0, whole_s - first_s - computing_s)


def _gather_waits(
    gathers: Sequence[float], forward_s: float, backward_s: float, *, hides: bool
) -> tuple[float, float]:
    """The time that fsdp's gathers of weights add to a leaf, and to the last one: the next block is
    gathered while one computes. The last leaf's backward shares the channel with the gradients: the
    buckets account for it there."""
    whole, first = sum(gathers), max(gathers)
    if not hides:
        return 2 * whole, 2 * whole
    forward = _not_hidden(whole, first, forward_s)
    return forward + _not_hidden(whole, first, backward_s), forward


def _blocks(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The groups that fsdp gathers: the root (embedding, last norm, head), then each block."""
    found: dict[str, list[Parameter]] = {"": []}
    for parameter in parameters:
        words = parameter.name.split(".")
        found.setdefault(words[1] if words[0] == "blocks" else "", []).append(parameter)
    return list(found.values())


def _bytes(parameters: Sequence[Parameter]) -> float:
    return GRADIENT_BYTES * sum(parameter.numel for parameter in parameters)


def _factor_bytes(parameters: Sequence[Parameter], rank: int) -> float:
    """PowerSGD's message (arXiv 1905.13727): a matrix n x m as factors n x r and m x r, if that is
    smaller."""
    return GRADIENT_BYTES * sum(
        min(p.numel, rank * sum(p.shape)) if len(p.shape) == 2 else p.numel for p in parameters
    )


def channel_end(sendings: Sequence[Sending]) -> float:
    """When a channel that sends one bucket after another is done, after backward began."""
    free = 0.0
    for sending in sendings:
        free = max(free, sending.ready_s) + sending.cost_s
    return free
