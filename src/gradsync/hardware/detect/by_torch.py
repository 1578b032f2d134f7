"""GPUs as torch tells them, where `nvidia-ml-py` is missing."""

from __future__ import annotations

from typing import Any

from gradsync.hardware.described.catalog import rates_of
from gradsync.hardware.description import Device


def torch_devices(torch: Any) -> list[Device]:
    """The CUDA devices that this process sees; none without CUDA.

    How much memory is free is not asked: that would take some of it.

    Args:
        torch: the module.
    """
    if not torch.cuda.is_available():
        return []
    return [
        _device(torch.cuda.get_device_properties(index))
        for index in range(torch.cuda.device_count())
    ]


def _device(properties: Any) -> Device:
    capability = (properties.major, properties.minor)
    flops, rate, source = rates_of(
        properties.name, capability, properties.multi_processor_count, None
    )
    return Device(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        peak_flops=flops,
        compute_capability=capability,
        memory_bytes_per_s=rate,
        mig="MIG" in properties.name,
        source=source,
    )
