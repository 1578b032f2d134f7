"""Which GPUs a process may use: `CUDA_VISIBLE_DEVICES` as CUDA reads it; pure.

CUDA C++ Programming Guide, "CUDA Environment Variables". Identifiers are indices or names, of which
a beginning is enough when only one device has it. The first that is no device ends the list; one
that occurs twice empties it. Unset means all, empty means none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.hardware.description import Device
from gradsync.hardware.detect.nvml import Gpu, Slice
from gradsync.runtime.bounds import whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Visible:
    """A device that may be used."""

    device: Device
    gpu: Gpu
    """Which it is, or is a slice of."""


def visible_devices(env: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Visible]:
    """Devices in the order in which CUDA counts them; of a divided GPU, its slices.

    CUDA itself shows a process one slice at most. As a description of the host all are listed:
    each rank can be given its own.

    Args:
        env: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER count.
        gpus: as the driver lists them, by PCI bus.
    """
    ordered = _in_order(env.get("CUDA_DEVICE_ORDER", ""), gpus)
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [entry for gpu in ordered for entry in _parts(gpu)]
    chosen: list[Visible] = []
    seen: set[str] = set()
    for word in value.split(","):
        found = _find(word.strip(), ordered)
        if found is None:
            break
        key, entries = found
        if key in seen:
            return []
        seen.add(key)
        chosen += entries
    return chosen


def _in_order(order: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """FASTEST_FIRST unless told otherwise; CUDA does not say by which measure: by peak here."""
    if order.strip().upper() == "PCI_BUS_ID":
        return list(gpus)
    return sorted(gpus, key=lambda gpu: -gpu.device.peak_flops)


def _find(word: str, gpus: Sequence[Gpu]) -> tuple[str, list[Visible]] | None:
    """What an identifier stands for, and a name that is equal for equal things."""
    if word.isascii() and word.isdecimal():
        number = whole_number(word)
        if number is None or number >= len(gpus):
            return None
        gpu = gpus[number]
        return gpu.uuid, _parts(gpu)
    if word.startswith("GPU-"):
        named = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        return (named[0].uuid, _parts(named[0])) if len(named) == 1 else None
    if word.startswith("MIG-"):
        slices = [(gpu, part) for gpu in gpus for part in gpu.slices if _is_called(part, word)]
        if len(slices) == 1:
            gpu, part = slices[0]
            return part.uuid, [Visible(device=part.device, gpu=gpu)]
    return None


def _is_called(part: Slice, word: str) -> bool:
    return part.uuid.startswith(word) or part.old_name == word


def _parts(gpu: Gpu) -> list[Visible]:
    if gpu.mig:
        return [Visible(device=part.device, gpu=gpu) for part in gpu.slices]
    return [Visible(device=gpu.device, gpu=gpu)]
