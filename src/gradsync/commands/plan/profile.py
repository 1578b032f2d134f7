"""The costs of one micro-batch and one update on a device, estimated from peaks or measured.

A probe must take seconds, but a real run's micro-batch can take minutes on a CPU. A smaller one is
therefore measured, and scaled by the number of operations (`GPTConfig.flops_per_token`); recomputed
activations add one forward. Only a probe imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from gradsync.commands.plan.description import Device
from gradsync.commands.plan.measured import Cache
from gradsync.commands.plan.workload import Workload
from gradsync.runtime.machine import choose_threads, keep_freed_memory, pin_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One rank's work, alone on its device, without communication."""

    forward_s: float  # One micro-batch's; likewise `backward_s`
    backward_s: float
    update_s: float  # Clipping and optimizer over all parameters

    @property
    def leaf_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


UTILISATION = 0.415
"""Model FLOPs over peak: a 22B model on one host of eight A100 (Korthikanti et al. 2022, arXiv
2205.05198, table 5); PaLM's over 6144 TPUs is 46.2 % (arXiv 2204.02311, table 3). Small models
reach less: measure them (`probe_profile`) if the device is available."""
FORWARD_PART = 1 / 3  # Each product of forward has two in backward (arXiv 2001.08361, section 2.1)
FP32_PART = 0.5
"""Fraction of the bf16 peak that fp32 products reach at best, as TF32: NVIDIA's data sheets of A100
and H100. On a CPU with AMX or AVX-512 bf16 it is less."""
UPDATE_BYTES = 40
"""Per parameter, all fp32: the norm reads the gradient (4), clipping reads and writes it (8), and
AdamW reads weight, gradient and two moments, and writes all but the gradient (16 + 12)."""
FLOPS_PER_BYTE = 153.0  # If the bandwidth is unknown: A100's 312 TFLOP/s over 2.039 TB/s


def leaf_operations(work: Workload) -> float:
    """Floating-point operations of a micro-batch's forward and backward."""
    return work.model.flops_per_token(work.seq_len) * work.leaf_tokens


def estimate_profile(work: Workload, device: Device) -> StepProfile:
    """The time of one micro-batch of the whole model, and of one whole update, on `device`.

    micro-batch    6 N + 12 L H Q T flops a token (`GPTConfig.flops_per_token`) over UTILISATION of
                   the peak; a third of it forward. Recomputed activations add one more forward.
    update         UPDATE_BYTES a parameter over the memory's bandwidth
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
    )


_CPU_OPERATIONS = 1.25e11
"""Operations of a probe's micro-batch on a CPU: about a second at 0.1 TFLOP/s, which a core reached
in `benchmarks/sync/mini-512/record.json`."""
_FEWEST_TOKENS = 64


def probe_work(work: Workload) -> Workload:
    """The micro-batch to measure: the requested one on a GPU; on a CPU the part of it that takes a
    second or two. Activations are kept."""
    work = replace(work, activation_checkpointing=False)
    if work.kind == "cuda":
        return work
    while leaf_operations(work) > _CPU_OPERATIONS and work.micro_batch_size > 1:
        work = replace(work, micro_batch_size=work.micro_batch_size // 2)
    while leaf_operations(work) > _CPU_OPERATIONS and work.seq_len >= 2 * _FEWEST_TOKENS:
        work = replace(work, seq_len=work.seq_len // 2)
    return work


def scaled_profile(profile: StepProfile, measured: Workload, work: Workload) -> StepProfile:
    """The profile of the micro-batch of `work`, scaled from `measured`, one of the same model."""
    factor = leaf_operations(work) / leaf_operations(measured)
    forward_s = profile.forward_s * factor
    backward_s = profile.backward_s * factor + forward_s * work.activation_checkpointing
    return replace(profile, forward_s=forward_s, backward_s=backward_s)


_CLIP_NORM = 1.0
_FEWEST, _MOST = 3, 8  # Micro-batches
_BUDGET_S = 8.0  # At least `_FEWEST` are measured, whatever they take
PROFILES = Cache("profiles", lambda document: msgspec.convert(document, StepProfile))


def moment(device: str) -> Any:
    """Now: on "cuda", when its stream has done all work so far."""
    if device != "cuda":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(moments: Sequence[Any]) -> list[float]:
    """From each moment to the next one; waits for the device."""
    if isinstance(moments[-1], float):
        return [last - first for first, last in pairwise(moments)]
    moments[-1].synchronize()
    return [first.elapsed_time(last) / 1000 for first, last in pairwise(moments)]


def probe_profile(work: Workload, ranks_per_host: int) -> StepProfile:
    """Measure one rank alone: forward and backward of one micro-batch, clipping and fused AdamW.

    On a CPU this process keeps freed memory from now on, as the trainer does
    (`runtime.machine.keep_freed_memory`); torch's thread count, a rank's, is restored afterwards.
    """
    if work.kind == "cpu":
        keep_freed_memory()
    before = pin_threads(choose_threads(ranks_per_host))
    try:
        return _measure(work)
    finally:
        pin_threads(before)


def _measure(work: Workload) -> StepProfile:
    import torch

    from gradsync.commands.models.gpt import GPT, loss_sum

    model = GPT(work.model, seed=0, activation_checkpointing=work.activation_checkpointing).to(
        work.kind
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = (2, work.micro_batch_size, work.seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(work.model.vocab_size, shape, generator=generator).to(work.kind)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(work.dtype)

    def steps(count: int) -> list[float]:
        """Median seconds of forward, backward and update."""
        found = []
        for _ in range(count):
            moments = [moment(work.kind)]
            with torch.autocast(work.kind, dtype=dtype, enabled=dtype is not None):
                loss = loss_sum(model(tokens[0]), tokens[1]) / tokens[0].numel()
            moments.append(moment(work.kind))
            loss.backward()
            moments.append(moment(work.kind))
            torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            found.append([*moments, moment(work.kind)])
        return [median(part) for part in zip(*map(seconds_between, found), strict=True)]

    steps(1)
    one_s = sum(steps(1))
    forward_s, backward_s, update_s = steps(max(_FEWEST, min(_MOST, int(_BUDGET_S / one_s))))
    return StepProfile(forward_s=forward_s, backward_s=backward_s, update_s=update_s)
