"""A stand-in for the module pynvml: a host with whatever GPUs a test writes down."""

# ruff: noqa: N802 (the names are the library's)

from __future__ import annotations

from dataclasses import dataclass, field
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
    pids: tuple[int, ...] = ()
    bus: str = ""
    pcie: tuple[int, int] = (5, 16)
    wires: tuple[str, ...] = ()
    """Far ends of its NVLinks that are up; "switch…" for switches."""
    sms: int = 132
    megahertz: int = 1980
    mig: bool = False
    broken: str = ""
    """Why it does not answer."""


@dataclass(kw_only=True, eq=False)
class FakeNvml:
    """The functions that gradsync calls; `silent` ones answer with an error."""

    gpus: list[FakeGpu]
    failure: str = ""
    """Why the driver does not start."""
    sockets: dict[str, int] = field(default_factory=dict)
    """CPU of each GPU, by name of its bus; 0 for those left out."""
    silent: frozenset[str] = frozenset()
    open_sessions: int = 0
    NVMLError: type[NVMLError] = NVMLError
    NVML_NVLINK_MAX_LINKS: int = 36
    NVML_CLOCK_SM: int = 1
    NVML_P2P_CAPS_INDEX_NVLINK: int = 2
    NVML_P2P_STATUS_OK: int = 0
    NVML_TOPOLOGY_SYSTEM: int = 50

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

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in handle.pids]

    def nvmlDeviceGetNumGpuCores(self, handle):
        return handle.sms * 128

    def nvmlDeviceGetMaxClockInfo(self, handle, _clock):
        return handle.megahertz

    def nvmlDeviceGetMigMode(self, handle):
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=handle.bus.encode())

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return int(link < len(handle.wires))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return SimpleNamespace(busId=handle.wires[link].upper().encode())

    def nvmlDeviceGetP2PStatus(self, one, other, _index):
        ends = [{w for w in gpu.wires if w.startswith("switch")} for gpu in (one, other)]
        return 0 if other.bus in one.wires or ends[0] & ends[1] else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        alike = self.sockets.get(one.bus, 0) == self.sockets.get(other.bus, 0)
        return 30 if alike else 50

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return handle.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return handle.pcie[1]


def h100(index: int, **values) -> FakeGpu:
    """One of an HGX board: all 18 links lead to its four switches."""
    given = {
        "name": "NVIDIA H100 80GB HBM3",
        "total": 81559 * 2**20,
        "uuid": f"GPU-{index}1111111-aaaa",
        "bus": f"0000000{index}:00:00.0",
        "wires": tuple(f"switch{link % 4}" for link in range(18)),
    }
    return FakeGpu(**given | values)


def _refuse(why: str):
    raise NVMLError(why)
