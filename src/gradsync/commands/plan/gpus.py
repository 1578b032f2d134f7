"""GPUs that a process may use, as torch sees them, and the link between them.

Memory is the driver's figure; data sheets supply only the arithmetic. Torch learns from
`nvidia-ml-py` how much memory is free. The link is the usual one of such devices
(`description.usual_link`): a hardware file describes any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from gradsync.commands.plan.description import DEVICES, Device
from gradsync.core.files import one_line

_DRIVER_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""Files that an NVIDIA driver creates, the last one on Windows."""
_FLOP_PER_CYCLE = {
    **{(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512},
    **{(9, 0): 4096, (10, 0): 8192, (12, 0): 512},
}
"""Dense 16-bit products with fp32 sums, of one multiprocessor, by compute capability. From the
white papers' peak / (multiprocessors x boost clock), such as 312e12 / (108 x 1.41e9) = 2049. If
GeForce parts run at half the rate of professional ones, the GeForce figure."""
_OTHERS = 512
_USUAL_CLOCK_HZ = 1.5e9


def has_driver(root: Path) -> bool:
    """Whether an NVIDIA driver is loaded on the system whose /proc and /dev lie under `root`."""
    return any((root / sign).exists() for sign in _DRIVER_SIGNS)


def find_gpus(env: Mapping[str, str], root: Path, notes: list[str]) -> list[Device]:
    """The usable GPUs with their free memory; adds problems to `notes`. Torch is imported only if
    there is a driver, and `env` hides not all devices."""
    if not has_driver(root) or env.get("CUDA_VISIBLE_DEVICES", "all").strip() == "":
        return []
    torch: Any = import_module("torch")
    devices = torch_devices(torch)
    if not devices:
        notes.append(f"torch {torch.__version__} cannot use the GPUs here")
    try:
        used = [torch.cuda.device_memory_used(index) for index in range(len(devices))]
    except Exception as error:  # each library behind it has its own; all memory counts as free
        notes.append(f"free memory is unknown: {one_line(error)}")
        return devices
    return [
        replace(device, free_bytes=max(device.memory_bytes - num_bytes, 0))
        for device, num_bytes in zip(devices, used, strict=True)
    ]


def torch_devices(torch: Any) -> list[Device]:
    """The CUDA devices that torch (the module) sees; none without CUDA. Free memory is not queried,
    as that would allocate some."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        detected_device(
            told.name,
            (told.major, told.minor),
            told.multi_processor_count,
            told.total_memory,
        )
        for told in map(torch.cuda.get_device_properties, range(count))
    ]


def detected_device(
    name: str, capability: tuple[int, int], num_sms: int, memory_bytes: int
) -> Device:
    """A device with the data sheet's rates for its driver's name, else an estimated peak."""
    for known in DEVICES.values():
        if known.name.removeprefix("NVIDIA ") == name.removeprefix("NVIDIA "):  # as older drivers
            return replace(known, memory_bytes=memory_bytes)
    return Device(
        kind="cuda",
        name=name,
        memory_bytes=memory_bytes,
        compute_capability=capability,
        peak_flops=_FLOP_PER_CYCLE.get(capability, _OTHERS) * num_sms * _USUAL_CLOCK_HZ,
        source=(
            f"estimate: {num_sms} multiprocessors of compute capability "
            f"{capability[0]}.{capability[1]} x {_USUAL_CLOCK_HZ / 1e9:.3g} GHz (assumed)"
        ),
    )
