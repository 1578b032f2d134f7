"""Profiles without a measurement: from peaks, in proportion to a measured leaf, or out of a cache.

A probe must take seconds, and a leaf of a real run can take minutes on a CPU. So a smaller leaf is
measured, and others are taken to cost in proportion to their operations
(`GPTConfig.flops_per_token`). Recomputed activations add one forward.

The cache holds one file per model, leaf and machine, and is nothing else: a file that cannot be
read is measured again, one that cannot be written is lost. No torch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from gradsync.core.files import cache_entry, read_entry, write_entry
from gradsync.errors import ConfigError, RunError
from gradsync.plan.description import Device
from gradsync.plan.timing.profile import BucketReady, StepProfile, bucket_timeline
from gradsync.plan.timing.traffic import traffic_of
from gradsync.plan.workload import Split, Workload
from gradsync.runtime import environ
from gradsync.runtime.machine import cpu_model, host_cores

UTILISATION = 0.415
"""Model FLOPs over peak: a 22B model on one host of eight A100 (Korthikanti et al. 2022, arXiv
2205.05198, table 5); PaLM's over 6144 TPUs is 46.2 % (arXiv 2204.02311, table 3). Small models
reach less: measure (`probe.probe_profile`) where the device is at hand."""
FORWARD_PART = 1 / 3
"""Each product of forward has two in backward (arXiv 2001.08361, section 2.1)."""
FP32_PART = 0.5
"""Part of the bf16 peak that fp32 products reach at best, as TF32: NVIDIA's data sheets of A100 and
H100. On a CPU with AMX or AVX-512 bf16 it is less."""
UPDATE_BYTES = 40
"""Per parameter, all fp32: the norm reads the gradient (4), clipping reads and writes it (8), and
AdamW reads weight, gradient and two moments, and writes all but the gradient (16 + 12)."""
FLOPS_PER_BYTE = 153.0
"""Assumed where bandwidth is not known: A100's 312 TFLOP/s over 2.039 TB/s (NVIDIA)."""


def estimate_profile(work: Workload, device: Device, *, split: Split | None = None) -> StepProfile:
    """The time of one leaf of the whole model, and of one whole update, on `device`.

        leaf      6 N + 12 L H Q T flops a token (`GPTConfig.flops_per_token`) over UTILISATION of
                  the peak; a third of it forward. Recomputed activations add one more forward.
        update    UPDATE_BYTES a parameter over the memory's bandwidth

    Args:
        work: model, leaf and dtype.
        device: with its peaks.
        split: whose strategy says which gradients travel together; None: buckets of 25 MiB. The
            times are those of the undivided model all the same: `predict_step` divides.

    Raises:
        ConfigError: unknown strategy.
    """
    peak = device.peak_flops * (FP32_PART if work.dtype == "fp32" else 1.0)
    flops = work.model.flops_per_token(work.seq_len) * work.leaf_tokens
    leaf_s = flops / (UTILISATION * peak)
    forward_s = leaf_s * FORWARD_PART
    backward_s = leaf_s - forward_s + (forward_s if work.activation_checkpointing else 0.0)
    bandwidth = device.memory_bytes_per_s or device.peak_flops / FLOPS_PER_BYTE
    strategy = "bucketed" if split is None else split.strategy
    return StepProfile(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=UPDATE_BYTES * work.model.num_params() / bandwidth,
        buckets=bucket_timeline(work, traffic_of(strategy), backward_s),
    )


_CPU_OPERATIONS = 1.25e11
"""Operations of a probe's leaf on a CPU: about a second at the 0.1 TFLOP/s that a core reached in
`benchmarks/sync/mini-512/record.json`."""
_FEWEST_TOKENS = 64


def leaf_operations(work: Workload) -> float:
    """Floating-point operations of a leaf's forward and backward."""
    return work.model.flops_per_token(work.seq_len) * work.leaf_tokens


def probe_work(work: Workload) -> Workload:
    """A leaf to measure: the asked one on a GPU, on a CPU as much of it as takes a second or two;
    activations kept."""
    work = replace(work, activation_checkpointing=False)
    if work.kind == "cuda":
        return work
    while leaf_operations(work) > _CPU_OPERATIONS and work.micro_batch_size > 1:
        work = replace(work, micro_batch_size=work.micro_batch_size // 2)
    while leaf_operations(work) > _CPU_OPERATIONS and work.seq_len >= 2 * _FEWEST_TOKENS:
        work = replace(work, seq_len=work.seq_len // 2)
    return work


def scaled_profile(profile: StepProfile, measured: Workload, work: Workload) -> StepProfile:
    """The profile of a leaf, from that of another leaf of the same model.

    Args:
        profile: of `measured`.
        measured: see `probe_work`.
        work: the leaf wanted.
    """
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


log = logging.getLogger("gradsync")

_FORMAT = 1
"""The measurement's version: another number makes old files unknown."""


def profile_path(work: Workload, *, device: str, threads: int) -> Path | None:
    """Where the profile of `work` on this machine is kept; None: there is no place for a cache.

    Args:
        work: the number of leaves does not count.
        device: cpu or cuda.
        threads: intra-op threads that compute.
    """
    accelerator = None
    if device == "cuda":
        import torch

        accelerator = torch.cuda.get_device_name()
    about = {k: v for k, v in asdict(work).items() if k not in ("num_leaves", "kind")}
    key = json.dumps(
        {
            **about,
            "format": _FORMAT,
            "device": device,
            "accelerator": accelerator,
            "cpu": cpu_model(),
            "cores": host_cores(),
            "threads": threads,
            "torch": version("torch"),
        },
        sort_keys=True,
    )
    try:
        return cache_entry(environ.cache_dir() / "profiles", key)
    except ConfigError:
        return None


def load_profile(path: Path | None) -> StepProfile | None:
    """The profile that `save_profile` kept there; None when none can be read."""
    return None if path is None else read_entry(path, StepProfile.from_json)


def save_profile(path: Path | None, profile: StepProfile) -> None:
    """Keep it, if that is possible."""
    if path is None:
        return
    try:
        write_entry(path, asdict(profile))
    except RunError as error:
        log.info("the measured profile is not kept: %s", str(error))
