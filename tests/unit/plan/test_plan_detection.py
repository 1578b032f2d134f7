"""Detection on a machine whose driver, kernel and torch a test writes down."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from gradsync.commands.plan import gpus, machine
from gradsync.commands.plan.description import Hardware
from gradsync.commands.plan.machine import (
    DEFAULT_LINK,
    Processor,
    cpu_devices,
    cpu_link,
    detect_hardware,
    infiniband_ports,
    network_link,
    read_processor,
)
from gradsync.commands.plan.measured import Fit
from gradsync.errors import LaunchError
from support.planned_machines import line

GB = 10**9
GIB = 2**30

EPYC = Processor(
    name="AMD EPYC",
    cores=8,
    memory_bytes=64 * GIB,
    free_bytes=48 * GIB,
    instructions=("avx512_bf16", "avx512f", "fma"),
    clock_hz=2.5e9,
)


class NVMLError(Exception):
    """As the library's own."""


def fake_nvml(*gpus: SimpleNamespace, failure: str = "", silent: Sequence[str] = ()) -> Any:
    """The functions of pynvml that gradsync calls, for a host with these GPUs; `silent` ones answer
    with an error, and `failure` is why the driver does not start."""

    def refuse(why: str) -> Any:
        raise NVMLError(why)

    def start(difference: int) -> None:
        nvml.open_sessions += difference

    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_NVLINK_MAX_LINKS": 36,
        "NVML_CLOCK_SM": 1,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "nvmlInit": lambda: refuse(failure) if failure else start(1),
        "nvmlShutdown": lambda: start(-1),
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda n: refuse(gpus[n].lost) if gpus[n].lost else gpus[n],
        "nvmlDeviceGetName": lambda gpu: gpu.name,
        "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
        "nvmlDeviceGetMemoryInfo": lambda gpu: gpu,
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
        "nvmlDeviceGetNumGpuCores": lambda gpu: gpu.sms * 128,
        "nvmlDeviceGetMaxClockInfo": lambda gpu, _clock: gpu.megahertz,
        "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < gpu.links),
        "nvmlDeviceGetP2PStatus": lambda one, two, _: 0 if one.links and two.links else 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.pcie[0],
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: gpu.pcie[1],
    }
    answers |= {name: lambda *_: refuse("Not Supported") for name in silent}
    nvml = SimpleNamespace(**answers, open_sessions=0)
    return nvml


def h100(index: int, **values: Any) -> SimpleNamespace:
    """One of an HGX board, whose 18 links lead to switches."""
    usual = {"name": "NVIDIA H100 80GB HBM3", "total": 81559 * 2**20, "capability": (9, 0)}
    usual |= {"uuid": f"GPU-{index}1111111-aaaa", "links": 18, "pcie": (5, 16), "lost": ""}
    found = usual | {"sms": 132, "megahertz": 1980} | values
    return SimpleNamespace(**{"free": found["total"], **found})


def a100(index: int, **values: Any) -> SimpleNamespace:
    """On a PCIe card."""
    usual = {"name": "NVIDIA A100-SXM4-40GB", "total": 40536 * 2**20, "capability": (8, 0)}
    return h100(index, **usual | {"links": 0, "pcie": (4, 16)} | values)


def found(
    nvml: Any = None,
    env: dict[str, str] | None = None,
    *,
    torch: Any = lambda: None,
    torch_version: str = "2.13.0",
    **more: Any,
) -> Hardware:
    """The hardware detected on `EPYC` where `nvml` is the driver's library (None: not installed);
    nothing of this machine shows through."""
    with (
        patch.object(gpus, "_module", lambda name: nvml if name == "pynvml" else torch()),
        patch.object(gpus, "version_of", lambda _: torch_version),
        patch.multiple(machine, read_processor=lambda: EPYC, load_fits=lambda _: ()),
    ):
        return detect_hardware(env or {}, **{"root": Path("/nowhere"), **more})


def test_memory_is_the_drivers_and_arithmetic_the_data_sheets() -> None:
    nvml = fake_nvml(h100(0, free=70 * GIB), h100(1))
    hardware = found(nvml)
    first, second = hardware.devices
    assert first.memory_bytes == 81559 * 2**20
    assert first.usable_bytes == 70 * GIB
    assert first.peak_flops == pytest.approx(989.5e12)
    assert first.compute_capability == (9, 0)
    assert first.memory_bytes_per_s == pytest.approx(3.35e12)
    assert second.usable_bytes == 81559 * 2**20
    host = hardware.hosts[0]
    assert (host.cores, host.memory_bytes) == (8, 64 * GIB)
    assert (hardware.network, hardware.notes) == (None, ())
    assert nvml.open_sessions == 0


def test_a_device_without_a_data_sheet_is_estimated_and_says_so() -> None:
    gpu = h100(0, name="NVIDIA H300", sms=100, megahertz=2000)
    device = found(fake_nvml(gpu)).devices[0]
    assert (device.peak_flops, device.memory_bytes_per_s) == (pytest.approx(4096 * 100 * 2e9), None)
    assert device.source.startswith("estimate: 100 multiprocessors of compute capability 9.0")
    silent = ("nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMaxClockInfo")
    assert found(fake_nvml(gpu, silent=silent)).devices[0].peak_flops > 0


GPUS = [h100(0), h100(1), h100(2), h100(3)]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, "0123"),
        ("", ""),
        ("2,0", "20"),
        (" 1 , 3 ", "13"),
        ("0,2,-1,1", "02"),  # NVIDIA's own example
        ("1,2,1", ""),
        ("GPU-11111111", "1"),
        ("GPU-21111111-aaaa,GPU-0", "20"),
        ("GPU-", ""),  # fits all
        ("2,GPU-21111111", ""),
        ("MIG-aaa1", ""),
    ],
)
def test_visible_devices_are_those_that_cuda_would_show(value: str | None, chosen: str) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    # Free memory tells them apart.
    gpus = [h100(index, free=index) for index in range(4)]
    hardware = found(fake_nvml(*gpus), env)
    if chosen:
        assert "".join(str(device.free_bytes) for device in hardware.devices) == chosen
    else:
        assert {device.kind for device in hardware.devices} == {"cpu"}
        assert hardware.notes == (
            f"none of 4 GPUs here may be used: CUDA_VISIBLE_DEVICES={value!r}",
        )


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, ["H100", "A100", "A100"]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["A100", "H100", "A100"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["H100"]),
    ],
)
def test_cuda_counts_the_fastest_first_unless_told_otherwise(
    env: dict[str, str], names: list[str]
) -> None:
    devices = found(fake_nvml(a100(0), h100(1), a100(2)), env).devices
    assert [device.name.split()[1][:4] for device in devices] == names


PATHS = ("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth")
NARROW = [a100(0), a100(1, pcie=(4, 8))]


@pytest.mark.parametrize(
    ("nvml", "name", "bytes_per_s"),
    [
        (fake_nvml(*GPUS), "nvlink4", 18 * 20.6e9),
        (fake_nvml(a100(0, links=12), a100(1, links=12)), "nvlink3", 12 * 20e9),
        (fake_nvml(a100(0, links=12), a100(1)), "pcie4", 24e9),  # not all are joined
        (fake_nvml(*NARROW), "pcie4", 12e9),  # the narrower of two slots
        (fake_nvml(*NARROW, silent=PATHS), "pcie3", 12e9),
        (fake_nvml(*GPUS, silent=["nvmlDeviceGetP2PStatus"]), "pcie5", 48e9),
    ],
)
def test_the_link_of_a_host(nvml: Any, name: str, bytes_per_s: float) -> None:
    link = found(nvml).hosts[0].link
    assert (link.name, link.bytes_per_s) == (name, pytest.approx(bytes_per_s))


def test_a_lost_gpu_is_left_out() -> None:
    nvml = fake_nvml(h100(0), h100(1, lost="GPU is lost"))
    hardware = found(nvml)
    assert len(hardware.devices) == 1
    assert hardware.notes == ("GPU 1 is left out: GPU is lost",)
    assert nvml.open_sessions == 0


def fake_torch(*names: str) -> SimpleNamespace:
    properties = [
        SimpleNamespace(
            name=name, total_memory=42 * GB, major=8, minor=0, multi_processor_count=108
        )
        for name in names
    ]
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: bool(properties),
            device_count=lambda: len(properties),
            get_device_properties=properties.__getitem__,
        )
    )


NO_MEMORY = fake_nvml(h100(0), silent=["nvmlDeviceGetMemoryInfo"])
BROKEN = fake_nvml(*GPUS, failure="Driver/library version mismatch")


@pytest.mark.parametrize(
    ("nvml", "note"),
    [
        (NO_MEMORY, "GPU 0 is left out: Not Supported"),  # as where GPU and CPU share theirs
        (BROKEN, "the NVIDIA driver does not answer: Driver/library version mismatch"),
        (None, "the GPUs are as torch sees them; nvidia-ml-py tells free memory and links"),
    ],
)
def test_what_the_library_does_not_tell_torch_is_asked(
    nvml: Any, note: str, tmp_path: Path
) -> None:
    torch = fake_torch("NVIDIA A100-SXM4-40GB", "NVIDIA X9")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    hardware = found(nvml, root=tmp_path, torch=lambda: torch)
    known, unknown = hardware.devices
    assert (known.memory_bytes, known.free_bytes) == (42 * GB, None)
    assert known.peak_flops == pytest.approx(312e12)
    assert unknown.source.startswith("estimate: 108 multiprocessors")
    assert hardware.hosts[0].link.name == "pcie4"
    assert hardware.notes[0] == note
    torch.cuda.is_available = lambda: False
    assert found(nvml, root=tmp_path, torch=lambda: torch).devices[0].kind == "cpu"


def test_torch_is_not_imported_where_there_is_no_driver() -> None:
    """And its library's complaint is no news there."""

    def imported() -> None:
        raise AssertionError("torch was imported")

    for nvml in (None, BROKEN):
        hardware = found(nvml, torch=imported)
        assert (hardware.devices[0].kind, hardware.notes) == ("cpu", ())
    assert BROKEN.open_sessions == 0
    assert found(fake_nvml(*GPUS), torch=imported).devices[0].kind == "cuda"


def test_a_torch_that_cannot_use_the_gpus_is_said() -> None:
    hardware = found(fake_nvml(*GPUS), torch_version="2.13.0+cpu")
    assert "torch 2.13.0+cpu is built for the CPU and cannot use the GPUs" in hardware.notes


def test_the_launcher_tells_hosts_and_ranks() -> None:
    env = {
        **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        **{"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "TORCHELASTIC_RUN_ID": "x",
    }
    hardware = found(env=env)
    assert [len(host.devices) for host in hardware.hosts] == [4, 4]
    assert hardware.network is not None
    given = found(env=env, num_hosts=3, ranks_per_host=2)
    assert [len(host.devices) for host in given.hosts] == [2, 2, 2]
    assert len(found(fake_nvml(*GPUS), num_hosts=2).devices) == 8
    with pytest.raises(LaunchError):
        found(env={"RANK": "1"})


def test_the_stand_in_has_the_librarys_functions_and_numbers() -> None:
    import pynvml  # of the test group: CI may not do without

    for name, ours in vars(fake_nvml()).items():
        if isinstance(ours, int) and name != "open_sessions":
            assert ours == getattr(pynvml, name), name
        elif name.startswith("nvml"):
            theirs = inspect.signature(getattr(pynvml, name)).parameters.values()
            required = [value for value in theirs if value.default is value.empty]
            assert len(inspect.signature(ours).parameters) == len(required), name


def test_a_cpu_is_shared_out_among_ranks() -> None:
    hardware = found(ranks_per_host=4)
    device = hardware.devices[0]
    assert len(hardware.devices) == 4
    assert device.kind == "cpu"
    assert device.memory_bytes == 16 * GIB
    assert device.free_bytes == 12 * GIB
    assert device.peak_flops == pytest.approx(2 * 2.5e9 * 64)
    assert device.source.startswith("estimate: cores 2 x 2.5 GHz x 64 operations per cycle")
    assert hardware.hosts[0].instructions == EPYC.instructions
    assert len(found().devices) == 8  # one per core


@pytest.mark.parametrize(
    ("instructions", "per_cycle"),
    [
        (("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"), 1024),
        (("avx2", "fma", "avx512f", "avx512_bf16"), 64),
        (("avx", "avx2", "fma"), 32),
        (("asimd", "bf16"), 32),
        ((), 8),
    ],
)
def test_the_widest_instruction_decides(instructions: tuple[str, ...], per_cycle: int) -> None:
    device = cpu_devices(replace(EPYC, instructions=instructions, cores=1), 1)[0]
    assert device.peak_flops == pytest.approx(2.5e9 * per_cycle)
    # More ranks than cores, and a clock that is not told
    (device, *_) = cpu_devices(replace(EPYC, instructions=instructions, clock_hz=None), 16)
    assert device.peak_flops == pytest.approx(0.5 * 2e9 * per_cycle)
    assert "(assumed)" in device.source


CPU_INFO = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
cpu MHz\t\t: 2000.000
flags\t\t: fpu avx avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480+
cpu MHz\t\t: 3800.000
flags\t\t: fpu avx avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile amx_int8
"""


def system(root: Path, info: str, **limits: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(info)
    cgroup = root / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    for name, text in limits.items():
        (cgroup / name.replace("_", ".")).write_text(text)
    return root


def test_the_kernel_tells_instructions_clock_and_limits(tmp_path: Path) -> None:
    memory = {"memory_max": "300000000", "memory_current": "1000"}
    stat = "inactive_file 600\nactive_file 0\n"
    root = system(tmp_path, CPU_INFO, cpu_max="100000 100000", memory_stat=stat, **memory)
    assert read_processor(root) == Processor(
        name="Intel(R) Xeon(R) Platinum 8480+",
        cores=1,
        memory_bytes=300_000_000,
        free_bytes=300_000_000 - 1000 + 600,
        instructions=("amx_bf16", "avx512_bf16", "avx512f", "fma", "avx"),
        clock_hz=3.8e9,
    )


def test_what_a_system_does_not_tell(tmp_path: Path) -> None:
    assert read_processor(tmp_path).instructions == ()  # it has no /proc
    assert read_processor(tmp_path).name
    root = system(tmp_path, "Features\t: fp asimd bf16 i8mm sve\n", cpu_max="max 100000")
    processor = read_processor(root)
    assert processor.instructions == ("bf16", "asimd")
    assert processor.clock_hz is None
    assert processor.memory_bytes == psutil.virtual_memory().total
    assert processor.cores >= 1


LINES = {
    4: [("backend", 9e-4, 9e-9), ("ring", 6e-5, 3e-10), ("tree", 1e-6, 1e-12)],
    2: [("shared", 5e-5, 1e-10)],
}


@pytest.mark.parametrize(
    ("ranks", "measured", "seconds"),
    [(4, "(ring) of 4 ranks", 6e-5), (3, "(shared) of 2 ranks", 5e-5), (1, "of 2 ranks", 5e-5)],
)
def test_the_cpu_link_gives_back_the_time_that_was_measured(
    ranks: int, measured: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of other world sizes are better than none."""

    def load(environment: dict[str, Any]) -> list[Fit]:
        lines = LINES.get(environment["world_size"], ())
        return [line("all_reduce", *values) for values in lines]

    monkeypatch.setattr(machine, "load_fits", load)
    link, of = cpu_link(ranks), 4 if ranks == 4 else 2
    assert 2 * (of - 1) * link.seconds(0) == pytest.approx(seconds)
    assert measured in link.source


def test_without_figures_the_default_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [line("broadcast", "shared", 1e-5, 1e-10), line("all_reduce", "shared", 1e-5)]
    for fits in ([], others):
        monkeypatch.setattr(machine, "load_fits", lambda _, fits=fits: fits)
        assert cpu_link(2) == DEFAULT_LINK
    assert "default" in DEFAULT_LINK.source


def test_active_ports_are_the_network(tmp_path: Path) -> None:
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("mlx5_2", "1: DOWN", "400 Gb/sec (4X NDR)"),
        ("mlx5_3", "4: ACTIVE", ""),
    ):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
    assert infiniband_ports(tmp_path) == [400.0, 200.0]
    link = network_link(6, tmp_path)
    assert (link.name, link.per_host) == ("infiniband", False)
    assert link.bytes_per_s == pytest.approx(12.5e9)


@pytest.mark.parametrize(
    ("speeds", "name", "source"),
    [([0, 25_000, 65_535], "ethernet-25g", "25000 Mbit/s"), ([0], "ethernet-10g", "assumed: no")],
)
def test_the_network_is_what_the_fastest_interface_says(
    speeds: list[int],
    name: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """65535: its driver does not know."""
    stats = {str(n): SimpleNamespace(isup=True, speed=speed) for n, speed in enumerate(speeds)}
    stats["down"] = SimpleNamespace(isup=False, speed=99_000)
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: stats)
    link = network_link(4, tmp_path)
    assert (link.name, link.per_host) == (name, True)
    assert link.source.startswith(source)
