"""From one measured leaf to the profiles of all candidates; pure, no torch.

A probe must take seconds, and a leaf of a real run can take minutes on a CPU. So a smaller leaf is
measured, and others are taken to cost in proportion to their operations
(`GPTConfig.flops_per_token`). Recomputed activations add one forward.
"""

from __future__ import annotations

from dataclasses import replace

from gradsync.hardware.timing.step_profile import BucketReady, StepProfile
from gradsync.hardware.workload import Workload

_CPU_OPERATIONS = 1.25e11
"""Of a probe's leaf on a CPU: about a second at the 0.1 TFLOP/s that a core reached in
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
    """What was measured for one leaf, for another one of the same model.

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
