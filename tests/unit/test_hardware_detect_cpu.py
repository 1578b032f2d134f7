"""What a host offers without a GPU: cores, memory, instructions, interfaces, links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gradsync.errors import RunError
from gradsync.plan import machine
from gradsync.plan.collectives import Fit
from gradsync.plan.machine import (
    DEFAULT_LINK,
    cpu_devices,
    cpu_link,
    network_link,
    read_interfaces,
    read_processor,
)
from support.fake_machine import EPYC, GIB, WIRED, found


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
        (("avx2", "fma", "avx512f"), 32),
        (("avx", "avx2", "fma"), 32),
        (("avx",), 16),
        (("asimd", "bf16"), 32),
        (("asimd",), 16),
        ((), 8),
    ],
)
def test_the_widest_instruction_decides(instructions: tuple[str, ...], per_cycle: int) -> None:
    device = cpu_devices(replace(EPYC, instructions=instructions, cores=1), 1)[0]
    assert device.peak_flops == pytest.approx(2.5e9 * per_cycle)


def test_more_ranks_than_cores_and_an_unknown_clock() -> None:
    (device, *_) = cpu_devices(replace(EPYC, clock_hz=None), 16)
    assert device.peak_flops == pytest.approx(0.5 * 2e9 * 64)
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


def system(root: Path, *, info: str, cpu_max: str = "", memory_max: str = "") -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(info)
    cgroup = root / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    if cpu_max:
        (cgroup / "cpu.max").write_text(cpu_max)
    if memory_max:
        (cgroup / "memory.max").write_text(memory_max)
        (cgroup / "memory.current").write_text("1000")
        (cgroup / "memory.stat").write_text("inactive_file 600\nactive_file 0\n")
    return root


def test_the_kernel_tells_instructions_clock_and_limits(tmp_path: Path) -> None:
    root = system(tmp_path, info=CPU_INFO, cpu_max="100000 100000", memory_max="300000000")
    processor = read_processor(root)
    assert processor.name == "Intel(R) Xeon(R) Platinum 8480+"
    assert processor.cores == 1
    assert processor.memory_bytes == 300_000_000
    assert processor.free_bytes == 300_000_000 - 1000 + 600
    assert processor.clock_hz == pytest.approx(3.8e9)
    assert processor.instructions[-3:] == ("amx_tile", "amx_int8", "amx_bf16")


def test_an_arm_host_tells_no_clock(tmp_path: Path) -> None:
    root = system(tmp_path, info="Features\t: fp asimd bf16 i8mm sve\n", cpu_max="max 100000")
    processor = read_processor(root)
    assert processor.instructions == ("asimd", "bf16", "i8mm", "sve")
    assert processor.clock_hz is None
    assert processor.memory_bytes == psutil.virtual_memory().total
    assert processor.cores >= 1


def test_a_system_without_proc_is_no_error(tmp_path: Path) -> None:
    processor = read_processor(tmp_path)
    assert processor.instructions == ()
    assert processor.name


def fit(algorithm: str, alpha_s: float, beta: float, operation: str = "all_reduce") -> Fit:
    return Fit(
        operation=operation,
        algorithm=algorithm,
        alpha_s=alpha_s,
        beta_s_per_byte=beta,
        residual=0.1,
        worst=1.2,
        num_sizes=5,
    )


def test_the_cpu_link_gives_back_the_time_that_was_measured() -> None:
    asked = []

    def load(environment: dict[str, Any]) -> list[Fit]:
        asked.append(environment["world_size"])
        return [fit("backend", 9e-4, 9e-9), fit("ring", 6e-5, 3e-10), fit("tree", 1e-6, 1e-12)]

    link, trouble = cpu_link(4, load)
    assert trouble == ""
    assert asked == [4]
    size = 10**6
    ring = 2 * 3 * link.seconds(size / 4)
    assert ring == pytest.approx(6e-5 + 3e-10 * size)
    assert link.source == "all_reduce (ring) of 4 ranks, measured on this machine"


def test_figures_of_other_world_sizes_are_better_than_none() -> None:
    def load(environment: dict[str, Any]) -> list[Fit]:
        return [fit("shared", 5e-5, 1e-10)] if environment["world_size"] == 2 else []

    assert "of 2 ranks" in cpu_link(3, load)[0].source
    assert cpu_link(1, load)[0].bytes_per_s == pytest.approx(1e10)


def test_without_figures_the_default_says_that_it_is_one() -> None:
    others = [fit("shared", 1e-5, 1e-10, "broadcast"), fit("shared", 1e-5, 0.0)]
    for fits in ([], others):
        link, trouble = cpu_link(2, lambda _, fits=fits: fits)
        assert link == DEFAULT_LINK
        assert trouble == ""
    assert "default" in DEFAULT_LINK.source


def test_a_damaged_cache_is_a_note() -> None:
    def load(_: dict[str, Any]) -> list[Fit]:
        raise RunError("could not read the cache")

    link, trouble = cpu_link(2, load)
    assert link == DEFAULT_LINK
    hardware = found(cpu_link=lambda _: (link, trouble))
    assert hardware.notes == ("could not read the cache",)


def test_interfaces_that_are_up_without_the_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interface(isup: bool, speed: int, flags: str = "up,running") -> SimpleNamespace:
        return SimpleNamespace(isup=isup, speed=speed, flags=flags)

    stats = {
        "lo": interface(True, 0, "up,loopback,running"),
        "eth1": interface(True, 25_000),
        "eth0": interface(True, 65_535),  # its driver does not know
        "wlan0": interface(False, 99_000),
    }
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: stats)
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
    interfaces = read_interfaces(tmp_path)
    assert interfaces.names == ("eth0", "eth1")
    assert interfaces.megabits == 25_000
    assert interfaces.infiniband_gigabits == (400.0, 200.0)
    link = network_link(interfaces, 6)
    assert (link.name, link.per_host) == ("infiniband", False)
    assert link.bytes_per_s == pytest.approx(12.5e9)


def test_the_network_is_what_the_fastest_interface_says() -> None:
    link = network_link(replace(WIRED, megabits=25_000), 4)
    assert link.name == "ethernet-25g"
    assert link.per_host
    assert link.bytes_per_s == pytest.approx(25e9 / 8 * 1448 / 1538)
    assert "assumed" in network_link(WIRED, 4).source
