"""Speed switches by what a device can do; pure, no torch.

What they go by:

    bf16, TF32        tensor cores of compute capability 8.0 (Ampere) and later
    fp16              tensor cores of 7.0 (Volta) and later; it needs a GradScaler
    flash attention   torch's kernel takes 8.0 and later, and 16-bit inputs; it is chosen by torch
                      itself inside `scaled_dot_product_attention`
    bf16 on a CPU     AMX or AVX-512 BF16 (on Arm: bf16). Without them it is emulated: measured
                      with oneDNN, one thread, a product of 1024 x 512 x 2048, bf16 took 0.40 of
                      fp32's time with AVX-512 BF16 and 2.3 times it without, on the same CPU

Environment variables are never set, only suggested, and none that the user has set already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gradsync.plan.description import Hardware

_AMPERE, _VOLTA = (8, 0), (7, 0)
_CPU_BF16 = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """The settings to turn on; the same for all devices."""

    dtype: Literal["bf16", "fp16", "fp32"]
    """The fastest that every device multiplies in hardware."""
    tf32: bool
    """TF32 in fp32 matrix products."""
    flash_attention: bool
    """Whether torch will take its flash kernel, under `dtype`."""
    fused: bool
    """Fused AdamW: one pass over the parameters (CUDA and CPU have it)."""
    keep_memory: bool
    """Freed memory stays in the process: saves page faults on a CPU."""
    reasons: tuple[str, ...]
    """Why, a line each."""
    suggestions: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that may help and are not set."""

    def suggestion_lines(self) -> list[str]:
        """`export NAME=value`, to type or to leave."""
        return [f"export {name}={value}" for name, value in self.suggestions.items()]


def speed_switches(hardware: Hardware, env: Mapping[str, str]) -> Switches:
    """The switches that suit all devices of `hardware`.

    Args:
        hardware: detected or described.
        env: the environment; variables that are set in it are the user's own.
    """
    if hardware.devices[0].kind == "cpu":
        return _on_cpu(hardware)
    oldest = min(device.compute_capability or (0, 0) for device in hardware.devices)
    dtype, reason = _cuda_dtype(oldest)
    new = oldest >= _AMPERE
    mig = "MIG slices: NCCL has no direct path between them, messages go through the host"
    return Switches(
        dtype=dtype,
        tf32=new,
        flash_attention=new and dtype != "fp32",
        fused=True,
        keep_memory=False,
        reasons=(reason, mig) if any(d.mig for d in hardware.devices) else (reason,),
        suggestions=_suggestions(hardware, env),
    )


def multiplies_bf16(instructions: Collection[str]) -> bool:
    """Whether a CPU with these instructions has bf16 in hardware, and need not emulate it."""
    return any(name in instructions for name in _CPU_BF16)


def _cuda_dtype(oldest: tuple[int, int]) -> tuple[Literal["bf16", "fp16", "fp32"], str]:
    capability = f"compute capability {oldest[0]}.{oldest[1]}"
    if oldest >= _AMPERE:
        return "bf16", f"{capability}: bf16, TF32, flash attention, fused AdamW"
    if oldest >= _VOLTA:
        return "fp16", f"{capability} has no bf16 (8.0 has): fp16, fused AdamW"
    return "fp32", f"{capability} has no tensor cores (7.0 has): fp32, fused AdamW"


def _on_cpu(hardware: Hardware) -> Switches:
    fast = [
        next((name for name in _CPU_BF16 if name in host.instructions), "")
        for host in hardware.hosts
    ]
    if all(fast):
        dtype, reason = "bf16", f"bf16: the CPU multiplies it in hardware ({fast[0]})"
    else:
        dtype, reason = "fp32", "fp32: without AMX or AVX-512 BF16 the CPU emulates bf16, slower"
    return Switches(
        dtype=dtype,
        tf32=False,
        flash_attention=False,
        fused=True,
        keep_memory=True,
        reasons=(f"{reason}; fused AdamW; freed memory kept",),
    )


def _suggestions(hardware: Hardware, env: Mapping[str, str]) -> dict[str, str]:
    """NCCL's and the allocator's variables, but for those that are set."""
    wanted = {}
    if "PYTORCH_CUDA_ALLOC_CONF" not in env:  # the older name
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if len(hardware.devices) > 1:
        wanted["NCCL_DEBUG"] = "WARN"
    if len(hardware.hosts) > 1 and (interface := env.get("GLOO_SOCKET_IFNAME")):
        # What the user chose for one library; "=" is NCCL's way to say exactly this name.
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {name: value for name, value in wanted.items() if name not in env}
