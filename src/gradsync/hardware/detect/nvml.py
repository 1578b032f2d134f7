"""GPUs as the NVIDIA driver tells them, through `nvidia-ml-py` (module pynvml); no torch.

The library comes in as an object, so that another one can stand in for it. Memory is always what
the driver says; the catalogue only has the peak arithmetic of a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gradsync.hardware.described.catalog import by_driver_name, rates_of, slice_of
from gradsync.hardware.description import Device

_MIG_SLICES = 7
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""CUDA cores of a multiprocessor, by compute capability; 128 for all others since Maxwell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A MIG device."""

    device: Device
    uuid: str
    """Such as `MIG-41b36014-…`."""
    old_name: str
    """As drivers before 470 call it: `MIG-GPU-…/gpu instance/compute instance`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of the host, whether this process may use it or not."""

    index: int
    """As `nvidia-smi` counts, by PCI bus."""
    device: Device
    uuid: str
    """Such as `GPU-8932f937-…`."""
    handle: Any
    """Of the library."""
    mig: bool = False
    """It is divided, and can only be used in slices."""
    slices: tuple[Slice, ...] = ()
    """MIG devices that were made of it."""


def read_gpus(nvml: Any, *, own_pid: int | None = None) -> tuple[list[Gpu], list[str]]:
    """Every GPU that the driver shows, and a line for each that cannot be asked.

    Args:
        nvml: `pynvml`, initialised.
        own_pid: the process that does not count as another user; this one when None.

    Raises:
        nvml.NVMLError: the driver does not answer at all.
    """
    pid = os.getpid() if own_pid is None else own_pid
    gpus, notes = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(nvml, index, pid))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} is left out: {error}")
    return gpus, notes


def _read_gpu(nvml: Any, index: int, pid: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _text(nvml.nvmlDeviceGetName(handle))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    cores = ask(nvml, 0, nvml.nvmlDeviceGetNumGpuCores, handle)
    megahertz = ask(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    num_sms = max(cores // _CORES_PER_SM.get((major, minor), 128), 1)
    flops, rate, source = rates_of(name, (major, minor), num_sms, megahertz * 1e6 or None)
    gpu = Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        handle=handle,
        device=Device(
            kind="cuda",
            name=name,
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            peak_flops=flops,
            compute_capability=(major, minor),
            memory_bytes_per_s=rate,
            shared=_is_shared(nvml, handle, pid),
            source=source,
        ),
    )
    if not ask(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)[0]:
        return gpu
    return replace(gpu, mig=True, slices=tuple(_slices(nvml, gpu, pid)))


def _slices(nvml: Any, gpu: Gpu, pid: int) -> list[Slice]:
    """The MIG devices of a GPU; places that are not taken answer with an error."""
    found = []
    for place in range(ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, gpu.handle)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
            found.append(_read_slice(nvml, gpu, handle, pid))
        except nvml.NVMLError:
            continue
    return found


def _read_slice(nvml: Any, gpu: Gpu, handle: Any, pid: int) -> Slice:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    parts = nvml.nvmlDeviceGetAttributes(handle)
    model = by_driver_name(gpu.device.name)
    if model is not None:
        share = parts.multiprocessorCount / model.num_sms
    else:
        share = parts.computeInstanceSliceCount / _MIG_SLICES
    whole = gpu.device
    device = slice_of(whole, arithmetic=min(share, 1.0), memory_bytes=int(memory.total))
    instances = (
        nvml.nvmlDeviceGetGpuInstanceId(handle),
        nvml.nvmlDeviceGetComputeInstanceId(handle),
    )
    name = _text(nvml.nvmlDeviceGetName(handle))
    if "MIG" not in name:  # as older drivers answer
        profile = f"{parts.computeInstanceSliceCount}g.{round(memory.total / 2**30)}gb"
        name = f"{whole.name} MIG {profile}"
    return Slice(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        old_name=f"MIG-{gpu.uuid}/{instances[0]}/{instances[1]}",
        device=replace(
            device,
            name=name,
            free_bytes=int(memory.free),
            shared=_is_shared(nvml, handle, pid),
            source=(
                f"{share:.3g} of the arithmetic and {memory.total / whole.memory_bytes:.3g} of the "
                f"{whole.memory_bytes / 1e9:.1f} GB of {whole.name}; {whole.source}"
            ),
        ),
    )


def _is_shared(nvml: Any, handle: Any, pid: int) -> bool:
    """Whether another process computes on it. Inside a container the driver may not say."""
    processes = ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return any(process.pid != pid for process in processes)


def ask(nvml: Any, otherwise: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or `otherwise` where the device or the driver has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return otherwise


def _text(value: str | bytes) -> str:
    """Older versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
