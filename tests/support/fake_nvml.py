"""A stand-in for the module pynvml: a host with whatever GPUs a test writes down."""

# ruff: noqa: N802 (the names are the library's)

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


class NVMLError(Exception):
    """As the library's own."""


@dataclass(kw_only=True, eq=False)
class FakeGpu:
    """The answers of one GPU."""

    name: str
    total: int
    uuid: str
    free: int | None = None
    capability: tuple[int, int] = (9, 0)
    pcie: tuple[int, int] = (5, 16)
    links: int = 18  # NVLinks that are up
    sms: int = 132
    megahertz: int = 1980
    broken: str = ""
    """Why it does not answer."""


@dataclass(kw_only=True, eq=False)
class FakeNvml:
    """The functions that gradsync calls; `silent` ones answer with an error."""

    gpus: list[FakeGpu]
    failure: str = ""
    """Why the driver does not start."""
    silent: frozenset[str] = frozenset()
    open_sessions: int = 0
    NVMLError: type[NVMLError] = NVMLError
    NVML_NVLINK_MAX_LINKS: int = 36
    NVML_CLOCK_SM: int = 1
    NVML_P2P_CAPS_INDEX_NVLINK: int = 2
    NVML_P2P_STATUS_OK: int = 0

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "silent"):
            return lambda *_: _refuse("Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        if self.failure:
            raise NVMLError(self.failure)
        self.open_sessions += 1

    def nvmlShutdown(self):
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        gpu = self.gpus[index]
        return gpu if not gpu.broken else _refuse(gpu.broken)

    def nvmlDeviceGetName(self, handle):
        return handle.name

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle):
        free = handle.total if handle.free is None else handle.free
        return SimpleNamespace(total=handle.total, free=free)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return handle.capability

    def nvmlDeviceGetNumGpuCores(self, handle):
        return handle.sms * 128

    def nvmlDeviceGetMaxClockInfo(self, handle, _clock):
        return handle.megahertz

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return int(link < handle.links)

    def nvmlDeviceGetP2PStatus(self, one, other, _index):
        return 0 if one.links and other.links else 5

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return handle.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return handle.pcie[1]


def _refuse(why: str):
    raise NVMLError(why)
