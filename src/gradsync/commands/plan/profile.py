"""The costs of one leaf and one update on a device, and when each gradient is ready; no torch.

Backward runs through the layers from the last to the first, and each gradient takes its share of
the products (`Parameter.backward_units`). Buckets follow the engine's own plan over parameters in
reverse order.

A profile is estimated from peaks, or measured (`probe.py`). A probe must take seconds, but a real
run's leaf can take minutes on a CPU. A smaller leaf is therefore measured, and scaled by the number
of operations (`GPTConfig.flops_per_token`); recomputed activations add one forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import EMBEDDING, weights_of
from gradsync.commands.plan.collectives import Traffic, traffic_of
from gradsync.commands.plan.description import Device
from gradsync.commands.plan.workload import Workload
from gradsync.sync.layout import Item, plan_buckets

MIB = 2**20
GRADIENT_BYTES = 4  # Weights and gradients are fp32, with any autocast


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketReady:
    """When a bucket's last gradient is ready."""

    num_bytes: int  # Bytes of its gradients
    ready_s: float
    """Seconds after backward began; the last one's is at most `StepProfile.backward_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One rank's work, alone on its device, without communication."""

    forward_s: float  # One leaf's; likewise `backward_s`
    backward_s: float
    update_s: float  # Clipping and optimizer over all parameters
    buckets: tuple[BucketReady, ...]  # In the order in which they fill
    measured: bool = False  # False: estimated from peak arithmetic and bandwidth

    @property
    def leaf_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One trained tensor."""

    name: str  # The name in `named_parameters`
    shape: tuple[int, ...]
    backward_units: int
    """Backward's work from the previous gradient to this one, in products per token. Each takes 4
    floating-point operations (2 for the gradient of the weight, 2 for that of the input). It is the
    parameter's elements, plus attention itself for the projection that is first in backward."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def parameters_of(config: GPTConfig, seq_len: int) -> list[Parameter]:
    """Every parameter of `GPT(config)`, in `named_parameters` order."""
    head = config.vocab_size * config.n_embd if config.tie_head else 0
    found = []
    for weight in weights_of(config):
        units = prod(weight.shape)
        if weight.name == EMBEDDING:
            units = 0
        elif weight.name.endswith("attention.v.weight"):
            # Forward's two products of 2 T C operations each cost 8 T C in backward. They come
            # before the three projections' gradients; this one is ready first.
            units += 2 * seq_len * config.n_embd
        elif weight.name == "norm.weight":
            # The head's products come first in backward; a tied one adds its gradient to the
            # embedding's, which is complete last.
            units += head
        found.append(Parameter(name=weight.name, shape=weight.shape, backward_units=units))
    return found


def buckets_of(parameters: Sequence[Parameter], traffic: Traffic) -> list[list[int]]:
    """Indices of the parameters that travel together, in the order in which backward finishes
    them."""
    sizes = {"parameter": 0.0, "flat": math.inf, "buckets": traffic.bucket_mb * MIB}
    first = traffic.first_bucket_mb * MIB if traffic.grouping == "buckets" else None
    plans = plan_buckets(
        [Item(numel=p.numel, itemsize=GRADIENT_BYTES, kind="fp32") for p in parameters],
        range(len(parameters))[::-1],
        bucket_bytes=sizes[traffic.grouping],
        first_bucket_bytes=first,
        like_ddp=traffic.by_library,
        world_size=1,
    )
    return [[slot.index for slot in plan.slots] for plan in plans]


def bucket_timeline(work: Workload, traffic: Traffic, backward_s: float) -> tuple[BucketReady, ...]:
    """Each bucket's bytes and when it is full, in the order in which they fill; the last one fills
    at the end of a leaf's backward."""
    parameters = parameters_of(work.model, work.seq_len)
    done = list(accumulate(p.backward_units for p in reversed(parameters)))
    ready = [backward_s * units / done[-1] for units in reversed(done)]
    buckets = [
        BucketReady(
            num_bytes=sum(parameters[index].numel for index in bucket) * GRADIENT_BYTES,
            ready_s=max(ready[index] for index in bucket),
        )
        for bucket in buckets_of(parameters, traffic)
    ]
    return tuple(sorted(buckets, key=lambda bucket: bucket.ready_s))


UTILISATION = 0.415
"""Model FLOPs over peak: a 22B model on one host of eight A100 (Korthikanti et al. 2022, arXiv
2205.05198, table 5); PaLM's over 6144 TPUs is 46.2 % (arXiv 2204.02311, table 3). Small models
reach less: measure them (`probe.probe_profile`) if the device is available."""
FORWARD_PART = 1 / 3  # Each product of forward has two in backward (arXiv 2001.08361, section 2.1)
FP32_PART = 0.5
"""Fraction of the bf16 peak that fp32 products reach at best, as TF32: NVIDIA's data sheets of A100
and H100. On a CPU with AMX or AVX-512 bf16 it is less."""
UPDATE_BYTES = 40
"""Per parameter, all fp32: the norm reads the gradient (4), clipping reads and writes it (8), and
AdamW reads weight, gradient and two moments, and writes all but the gradient (16 + 12)."""
FLOPS_PER_BYTE = 153.0
"""Assumed if the bandwidth is unknown: A100's 312 TFLOP/s over 2.039 TB/s (NVIDIA)."""


def leaf_operations(work: Workload) -> float:
    """Floating-point operations of a leaf's forward and backward."""
    return work.model.flops_per_token(work.seq_len) * work.leaf_tokens


def estimate_profile(work: Workload, device: Device) -> StepProfile:
    """The time of one leaf of the whole model, and of one whole update, on `device`.

    leaf      6 N + 12 L H Q T flops a token (`GPTConfig.flops_per_token`) over UTILISATION of
              the peak; a third of it forward. Recomputed activations add one more forward.
    update    UPDATE_BYTES a parameter over the memory's bandwidth
    buckets   of 25 MiB; `step_costs` derives any strategy's buckets from them
    """
    peak = device.peak_flops * (FP32_PART if work.dtype == "fp32" else 1.0)
    leaf_s = leaf_operations(work) / (UTILISATION * peak)
    forward_s = leaf_s * FORWARD_PART
    backward_s = leaf_s - forward_s + (forward_s if work.activation_checkpointing else 0.0)
    bandwidth = device.memory_bytes_per_s or device.peak_flops / FLOPS_PER_BYTE
    return StepProfile(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=UPDATE_BYTES * work.model.num_params() / bandwidth,
        buckets=bucket_timeline(work, traffic_of("bucketed"), backward_s),
    )


_CPU_OPERATIONS = 1.25e11
"""Operations of a probe's leaf on a CPU: about a second at 0.1 TFLOP/s, which a core reached in
`benchmarks/sync/mini-512/record.json`."""
_FEWEST_TOKENS = 64


def probe_work(work: Workload) -> Workload:
    """The leaf to measure: the requested one on a GPU; on a CPU the part of it that takes a second
    or two. Activations are kept."""
    work = replace(work, activation_checkpointing=False)
    if work.kind == "cuda":
        return work
    while leaf_operations(work) > _CPU_OPERATIONS and work.micro_batch_size > 1:
        work = replace(work, micro_batch_size=work.micro_batch_size // 2)
    while leaf_operations(work) > _CPU_OPERATIONS and work.seq_len >= 2 * _FEWEST_TOKENS:
        work = replace(work, seq_len=work.seq_len // 2)
    return work


def scaled_profile(profile: StepProfile, measured: Workload, work: Workload) -> StepProfile:
    """The profile of the leaf of `work`, scaled from `measured`, a leaf of the same model."""
    factor = leaf_operations(work) / leaf_operations(measured)
    forward_s = profile.forward_s * factor
    backward_s = profile.backward_s * factor + forward_s * work.activation_checkpointing
    later = backward_s / profile.backward_s
    return replace(
        profile,
        forward_s=forward_s,
        backward_s=backward_s,
        buckets=tuple(
            BucketReady(num_bytes=bucket.num_bytes, ready_s=bucket.ready_s * later)
            for bucket in profile.buckets
        ),
    )
