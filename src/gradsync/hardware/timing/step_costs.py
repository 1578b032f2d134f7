"""The pieces of a step, each with its duration: what `step_time` adds up and `simulate` plays.

    leaf 1 .. k-1    forward, backward, and what a leaf itself waits for
    leaf k           the same; its backward fills the buckets, each of which then travels
    update           clipping and optimizer
    after            weights gathered, where each rank updated a share

Pure, no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from gradsync.errors import ConfigError
from gradsync.hardware.description import Hardware
from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.hardware.timing.bucket_timeline import GRADIENT_BYTES, bucket_plan
from gradsync.hardware.timing.parameter_sizes import Parameter, parameters_of
from gradsync.hardware.timing.prices import Prices
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.timing.traffic import Traffic, traffic_of
from gradsync.hardware.workload import Split, Workload

_AGREE_BYTES = 64
"""Of the message in which ranks agree on loss, weight and flags at the end of each step."""
_ACTIVATION_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TENSOR_PARALLEL_SUMS = 4
"""Of activations, per layer and leaf: two in forward, two in backward (arXiv 1909.08053)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """A bucket on its way."""

    ready_s: float
    """After the last leaf's backward began."""
    cost_s: float
    """While the channel is busy with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Durations of one rank's step, seconds."""

    replicas: int
    """Data-parallel ones."""
    stages: int
    """Of a pipeline; 1 without one."""
    schedule: Literal["gpipe", "1f1b"]
    """Of a pipeline."""
    leaves: int
    """Of a replica with the most."""
    forward_s: float
    """Of a leaf, a rank's part of the model."""
    backward_s: float
    """Likewise."""
    leaf_wait_s: float
    """What each leaf but the last waits for."""
    leaves_meet: bool
    """Whether all replicas wait for each other in every leaf (fsdp's gathers)."""
    last_leaf_wait_s: float
    """What the last one waits for, buckets aside."""
    hop_s: float
    """From stage to stage: activations, or their gradients."""
    sendings: tuple[Sending, ...]
    """In the order in which they are launched."""
    hides: bool
    """Whether they travel beside backward; else after it, one behind the other."""
    copy_s: float
    """Gradients into buckets and out of them, in every step."""
    agree_s: float
    """The small message at the step's end, and whatever else ranks meet for."""
    update_s: float
    """Clipping and optimizer, a rank's part."""
    after_s: float
    """Gathering of weights."""
    every: int
    """Steps between two meetings. Above 1, `sendings` and `agree_s` are those of a meeting."""

    @property
    def leaf_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def step_costs(
    work: Workload,
    split: Split,
    hardware: Hardware,
    profile: StepProfile,
    *,
    options: Mapping[str, Any] | None = None,
    fits: Sequence[Fit] = (),
) -> StepCosts:
    """Take a step apart.

    Args:
        work: what is trained; `num_leaves` of the whole step.
        split: its strategy and layout.
        hardware: at least as many devices as the split has ranks; ranks fill hosts in order.
        profile: of the whole model on one of the devices.
        options: of the strategy.
        fits: lines measured here for as many ranks on one host; they take the place of formulas.

    Raises:
        ConfigError: unknown strategy or option, fewer devices than ranks, fewer leaves than
            replicas.
    """
    layout, traffic = split.layout, traffic_of(split.strategy, options)
    if work.num_leaves < layout.dp:
        raise ConfigError(
            f"{work.num_leaves} leaves for {layout.dp} replicas: each needs at least one"
        )
    used = hardware.with_devices(split.world_size)
    prices = Prices(used, split, traffic, fits)
    parts = layout.model_ranks
    scale = _contention(used) / parts
    forward_s, backward_s = profile.forward_s * scale, profile.backward_s * scale
    alone = layout.dp == 1
    model = _Model(work, traffic, profile, prices, scale=scale, parts=parts)
    tensor = _tensor_wait(work, layout.tp, prices)
    waits, last_waits = model.gather_waits(forward_s, backward_s)
    in_shares = traffic.update_in_shares or prices.divided
    # Weights that all ranks of a host read are written between two more meetings (host/update.py).
    meetings = 3 if prices.divided else int(traffic.agrees)
    return StepCosts(
        replicas=layout.dp,
        stages=layout.pp,
        schedule=split.schedule,
        leaves=math.ceil(work.num_leaves / layout.dp),
        forward_s=forward_s,
        backward_s=backward_s,
        leaf_wait_s=tensor + waits,
        leaves_meet=traffic.gathers_blocks and not alone,
        last_leaf_wait_s=tensor + last_waits,
        hop_s=prices.hop_s(_activation_bytes(work)) if layout.pp > 1 else 0.0,
        sendings=() if alone else model.sendings(),
        hides=prices.hides and traffic.overlap,
        copy_s=0.0 if alone else traffic.copies * model.copy_s(),
        agree_s=0.0 if alone else meetings * prices.all_reduce_s(_AGREE_BYTES),
        update_s=profile.update_s * scale / (layout.dp if in_shares else 1),
        after_s=model.gather_weights_s() if traffic.gathers_weights else 0.0,
        every=1 if alone else traffic.every,
    )


class _Model:
    """The model's gradients and weights as messages."""

    def __init__(
        self,
        work: Workload,
        traffic: Traffic,
        profile: StepProfile,
        prices: Prices,
        *,
        scale: float,
        parts: int,
    ) -> None:
        self._traffic, self._prices = traffic, prices
        self._scale, self._parts = scale, parts
        self._profile = profile
        self._parameters = parameters_of(work.model, work.seq_len)

    def sendings(self) -> tuple[Sending, ...]:
        """Buckets of the strategy, ready when the profile's timeline says."""
        traffic, prices = self._traffic, self._prices
        if traffic.gathers_blocks:
            blocks = _blocks(self._parameters)[::-1]
        else:
            plans = bucket_plan(self._parameters, traffic)
            blocks = [[self._parameters[slot.index] for slot in plan.slots] for plan in plans]
        curve = _Curve(self._profile)
        cost = prices.all_reduce_s if traffic.operation == "all_reduce" else prices.scatter_s
        if prices.divided:  # one pass over all buckets, after backward
            return (Sending(ready_s=curve.end * self._scale, cost_s=prices.scatter_s(self._bytes)),)
        done, found = 0.0, []
        for block in blocks:
            done += _bytes(block)
            seconds = cost(self._travelling(block))
            if traffic.gathers_blocks and prices.hides:
                # Backward gathers the next block's weights over the same channel.
                seconds += prices.gather_s(_bytes(block) * traffic.wire / self._parts)
            found.append(Sending(ready_s=curve.ready_s(done) * self._scale, cost_s=seconds))
        return tuple(found)

    def gather_waits(self, forward_s: float, backward_s: float) -> tuple[float, float]:
        """What fsdp's gathers of weights add to a leaf, and to the last one.

        The next block is gathered while one computes, so that a pass waits for its first gather,
        and for what is longer than the computing. The last leaf's backward shares the channel with
        the gradients: there it stands with the buckets.
        """
        if not self._traffic.gathers_blocks or self._prices.data.ranks == 1:
            return 0.0, 0.0
        wire = self._traffic.wire / self._parts
        gathers = [self._prices.gather_s(_bytes(b) * wire) for b in _blocks(self._parameters)]
        whole, first = sum(gathers), max(gathers)
        if not self._prices.hides:
            return 2 * whole, 2 * whole
        forward = first + max(0.0, whole - first - forward_s)
        return forward + first + max(0.0, whole - first - backward_s), forward

    def copy_s(self) -> float:
        """Of all gradients, once."""
        return self._prices.copy_s(self._bytes)

    def gather_weights_s(self) -> float:
        """Of all weights, after the update."""
        return self._prices.gather_s(self._bytes)

    @property
    def _bytes(self) -> float:
        return _bytes(self._parameters) / self._parts

    def _travelling(self, block: Sequence[Parameter]) -> float:
        """Bytes that a bucket sends."""
        rank = self._traffic.low_rank
        if rank is None:
            return _bytes(block) * self._traffic.wire / self._parts
        # PowerSGD, arXiv 1905.13727: a matrix n x m as factors n x r and m x r, where that is less.
        factors = (
            min(p.numel, rank * sum(p.shape)) if len(p.shape) == 2 else p.numel for p in block
        )
        return GRADIENT_BYTES * sum(factors) / self._parts


class _Curve:
    """How many bytes of gradients are there by when, between a profile's buckets on straight
    lines: strategies cut buckets elsewhere than the profile did."""

    def __init__(self, profile: StepProfile) -> None:
        self._bytes = [0.0, *accumulate(bucket.num_bytes for bucket in profile.buckets)]
        self._times = [0.0, *accumulate((bucket.ready_s for bucket in profile.buckets), max)]
        self.end = self._times[-1]
        """When all are there; seconds after backward began."""

    def ready_s(self, num_bytes: float) -> float:
        """When so many bytes are there."""
        place = bisect_left(self._bytes, num_bytes * (1 - 1e-9))
        if place >= len(self._bytes):
            return self.end
        if place == 0:
            return 0.0
        low, high = self._bytes[place - 1], self._bytes[place]
        part = min(1.0, (num_bytes - low) / (high - low))
        return self._times[place - 1] + part * (self._times[place] - self._times[place - 1])


def _contention(hardware: Hardware) -> float:
    """How much longer CPU ranks compute where a host has more of them than cores."""
    host = hardware.hosts[0]
    return max(1.0, len(host.devices) / host.cores) if host.devices[0].kind == "cpu" else 1.0


def _activation_bytes(work: Workload) -> int:
    """Of one leaf between two blocks: B T C."""
    return work.leaf_tokens * work.model.n_embd * _ACTIVATION_BYTES[work.dtype]


def _tensor_wait(work: Workload, shards: int, prices: Prices) -> float:
    """Sums of activations between tensor shards, of one leaf; nothing hides them."""
    if shards == 1:
        return 0.0
    sums = _TENSOR_PARALLEL_SUMS * work.model.n_layer
    return sums * prices.tensor_s(_activation_bytes(work))


def _blocks(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """What fsdp gathers as one: the root (embedding, last norm, head) first, then each block."""
    found: dict[str, list[Parameter]] = {"": []}
    for parameter in parameters:
        words = parameter.name.split(".")
        found.setdefault(words[1] if words[0] == "blocks" else "", []).append(parameter)
    return list(found.values())


def _bytes(parameters: Sequence[Parameter]) -> float:
    return GRADIENT_BYTES * sum(parameter.numel for parameter in parameters)
