"""Detection on a machine whose driver, kernel and torch a test writes down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import psutil
import pytest

from gradsync.commands.bench import sync as bench_sync
from gradsync.commands.cli.main import main
from gradsync.commands.plan import machine
from gradsync.commands.plan.description import Device, Hardware, fast_switches, usual_host
from gradsync.commands.plan.machine import (
    DEFAULT_LINK,
    Processor,
    cpu_devices,
    cpu_link,
    detect_hardware,
    detected_device,
    fast_dtype,
    network_link,
    read_processor,
)
from gradsync.commands.plan.measured import Fit
from gradsync.errors import LaunchError
from gradsync.world import World
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


def told_gpu(name: str, capability: tuple[int, int] = (8, 0)) -> SimpleNamespace:
    """Torch's properties of a GPU."""
    major, minor = capability
    return SimpleNamespace(
        name=name, total_memory=42 * GB, major=major, minor=minor, multi_processor_count=108
    )


def fake_torch(*names: str, used: int = 0) -> SimpleNamespace:
    """Torch on a host with these GPUs, each with `used` bytes in use."""
    told = [told_gpu(name) for name in names]
    return SimpleNamespace(
        __version__="2.13.0",
        cuda=SimpleNamespace(
            is_available=lambda: bool(told),
            device_count=lambda: len(told),
            get_device_properties=told.__getitem__,
            device_memory_used=lambda _: used,
        ),
    )


def found(torch: Any = None, env: dict[str, str] | None = None, **more: Any) -> Hardware:
    """The hardware detected on `EPYC` with GPUs as `torch` sees them (None: there is no driver);
    nothing of this machine shows through."""

    def imported(_: str) -> Any:
        assert torch is not None, "torch was imported without a driver"
        return torch

    seen = {"import_module": imported, "has_driver": lambda _: torch is not None}
    seen |= {"read_processor": lambda: EPYC, "load_fits": lambda _: ()}
    with patch.multiple(machine, **seen):
        return detect_hardware(env or {}, **more)


def test_memory_is_the_drivers_and_arithmetic_the_data_sheets() -> None:
    hardware = found(fake_torch("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", used=2 * GB))
    for device in hardware.devices:
        assert (device.memory_bytes, device.usable_bytes) == (42 * GB, 40 * GB)
        assert (device.peak_flops, device.memory_bytes_per_s) == (312e12, 1555e9)
    host = hardware.hosts[0]
    assert (host.cores, host.memory_bytes, host.link.name) == (8, 64 * GIB, "nvlink3")
    assert (hardware.network, hardware.notes) == (None, ())


def test_a_device_without_a_data_sheet_is_estimated_and_says_so() -> None:
    hardware = found(fake_torch("NVIDIA A100-SXM4-40GB", "NVIDIA X9"))
    unknown = hardware.devices[1]
    assert unknown.peak_flops == pytest.approx(2048 * 108 * 1.5e9)
    assert unknown.source.startswith("estimate: 108 multiprocessors of compute capability 8.0")
    assert hardware.hosts[0].link.name == "pcie4"  # of two kinds


def test_all_memory_counts_where_nothing_tells_what_is_free() -> None:
    torch = fake_torch("NVIDIA X9")
    torch.cuda.device_memory_used = Mock(side_effect=ModuleNotFoundError("no nvidia-ml-py"))
    hardware = found(torch)
    assert hardware.devices[0].usable_bytes == 42 * GB
    assert hardware.notes == ("free memory is unknown: no nvidia-ml-py",)


def test_gpus_that_cannot_be_used() -> None:
    hidden = found(fake_torch("NVIDIA X9"), {"CUDA_VISIBLE_DEVICES": ""})
    assert (hidden.devices[0].kind, hidden.notes) == ("cpu", ())
    unusable = found(fake_torch())
    assert unusable.devices[0].kind == "cpu"
    assert unusable.notes == ("torch 2.13.0 cannot use the GPUs here",)
    assert found().devices[0].kind == "cpu"


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
    assert len(found(fake_torch("NVIDIA X9"), num_hosts=2).devices) == 2
    with pytest.raises(LaunchError):
        found(env={"RANK": "1"})


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
    ("ranks", "measured", "seconds"), [(4, "(ring) of 4 ranks", 6e-5), (1, "of 2 ranks", 5e-5)]
)
def test_the_cpu_link_gives_back_the_time_that_was_measured(
    ranks: int, measured: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(environment: dict[str, Any]) -> list[Fit]:
        lines = LINES.get(environment["world_size"], ())
        return [line("all_reduce", *values) for values in lines]

    monkeypatch.setattr(machine, "load_fits", load)
    link = cpu_link(ranks)
    assert 2 * (max(ranks, 2) - 1) * link.seconds(0) == pytest.approx(seconds)
    assert measured in link.source
    assert cpu_link(3) == DEFAULT_LINK


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
    link = network_link(6, tmp_path)
    assert (link.name, link.per_host) == ("infiniband", False)
    assert link.bytes_per_s == pytest.approx(12.5e9)


@pytest.mark.parametrize(
    ("speeds", "name", "source"),
    [([0, 25_000, 65_535], "ethernet-25g", "25000 Mbit/s"), ([0], "ethernet-10g", "assumed: no")],
)
def test_the_network_is_what_the_fastest_interface_says(
    speeds: list[int], name: str, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """65535: its driver does not know."""
    stats = {str(n): SimpleNamespace(isup=True, speed=speed) for n, speed in enumerate(speeds)}
    stats["down"] = SimpleNamespace(isup=False, speed=99_000)
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: stats)
    link = network_link(4, tmp_path)
    assert (link.name, link.per_host) == (name, True)
    assert link.source.startswith(source)


def gpu(capability: tuple[int, int]) -> Device:
    return detected_device(told_gpu("a GPU", capability))


@pytest.mark.parametrize(
    ("devices", "instructions", "dtype", "reason"),
    [
        ([gpu((9, 0))], (), "bf16", "9.0: bf16, TF32, flash attention, fused AdamW"),
        ([gpu((9, 0)), gpu((7, 5))], (), "fp32", "7.5 has no bf16"),  # the oldest decides
        (cpu_devices(EPYC, 1), ("avx2", "amx_bf16"), "bf16", "multiplies in hardware"),
        (cpu_devices(EPYC, 1), ("avx2", "avx512f"), "fp32", "the CPU emulates bf16"),
    ],
)
def test_the_dtype_is_by_what_devices_can_do(
    devices: Any, instructions: tuple[str, ...], dtype: str, reason: str
) -> None:
    host = replace(usual_host(devices), instructions=instructions)
    found, said = fast_switches(Hardware(hosts=(host,)))
    assert found == dtype
    assert reason in said


@pytest.mark.parametrize("instruction", ["avx512f", "avx512_bf16"])
def test_commands_know_a_cpu_that_emulates_bf16(
    instruction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train`, `tune` and `bench sync` then take fp32."""
    taken, processor = "fp32", SimpleNamespace(instructions=(instruction,))
    if instruction == "avx512_bf16":
        taken = "bf16"
    monkeypatch.setattr(machine, "read_processor", lambda: processor)
    options = bench_sync.SyncOptions(device="cpu")
    for asked, measured in ((options, taken), (replace(options, dtype="bf16"), "bf16")):
        assert bench_sync.plan_of(asked, World()).settings.dtype == measured
    assert main(["train", "tiny", "--device", "cpu", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["dtype"] == taken


@pytest.mark.parametrize("fast", [True, False])
def test_a_gpu_is_asked(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: fast)
    assert fast_dtype("cuda:1") == ("bf16" if fast else "fp32")
    monkeypatch.setattr(machine, "read_processor", lambda: SimpleNamespace(instructions=()))
    assert {fast_dtype("cpu"), fast_dtype("auto", tmp_path)} == {"fp32"}
