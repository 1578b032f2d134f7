"""What a leaf and an update cost on a device that nobody measured: arithmetic over peaks; pure."""

from __future__ import annotations

from gradsync.hardware.description import Device
from gradsync.hardware.timing.bucket_timeline import bucket_timeline
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.timing.traffic import traffic_of
from gradsync.hardware.workload import Split, Workload

UTILISATION = 0.415
"""Model FLOPs over peak: a 22B model on one host of eight A100 (Korthikanti et al. 2022, arXiv
2205.05198, table 5); PaLM's over 6144 TPUs is 46.2 % (arXiv 2204.02311, table 3). Small models
reach less: measure (`probe.probe_profile`) where the device is at hand."""
FORWARD_PART = 1 / 3
"""Each product of forward has two in backward (arXiv 2001.08361, section 2.1)."""
FP32_PART = 0.5
"""Of the bf16 peak that fp32 products reach at best, as TF32: NVIDIA's data sheets of A100 and
H100. On a CPU with AMX or AVX-512 bf16 it is less."""
UPDATE_BYTES = 40
"""Per parameter, all fp32: the norm reads the gradient (4), clipping reads and writes it (8), and
AdamW reads weight, gradient and two moments, and writes all but the gradient (16 + 12)."""
FLOPS_PER_BYTE = 153.0
"""Of a device whose memory bandwidth nobody told: A100's 312 TFLOP/s over 2.039 TB/s (NVIDIA)."""


def estimate_profile(work: Workload, device: Device, *, split: Split | None = None) -> StepProfile:
    """What one leaf of the whole model and one whole update take on `device`.

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
