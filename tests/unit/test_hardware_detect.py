"""What is found on a machine, with a driver, a kernel and a torch that a test writes down."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradsync.errors import ConfigError, LaunchError
from gradsync.plan.machine import detect_hardware
from support.fake_machine import found
from support.fake_nvml import FakeGpu, FakeNvml, FakeSlice, h100

GB = 10**9
GIB = 2**30


def a100(index: int, **values: Any) -> FakeGpu:
    given = {
        "name": "NVIDIA A100-SXM4-40GB",
        "total": 40536 * 2**20,
        "capability": (8, 0),
        "wires": (),
        "pcie": (4, 16),
    }
    return h100(index, **given | values)


def divided(index: int = 0) -> FakeGpu:
    """An A100 in two slices, with a free place between them."""
    letter = "abc"[index]
    one = FakeSlice(uuid=f"MIG-{letter}aa1", total=19968 * 2**20, sms=42, compute_slices=3)
    two = FakeSlice(
        uuid=f"MIG-{letter}ab2",
        total=4864 * 2**20,
        sms=14,
        compute_slices=1,
        instance=(9, 0),
        pids=(77,),
    )
    return a100(index, mig=True, slices=(one, None, two))


def test_memory_is_the_drivers_and_arithmetic_the_data_sheets() -> None:
    nvml = FakeNvml(gpus=[h100(0, free=70 * GIB), h100(1)])
    hardware = found(nvml)
    first, second = hardware.devices
    assert first.memory_bytes == 81559 * 2**20
    assert first.usable_bytes == 70 * GIB
    assert first.peak_flops == pytest.approx(989.5e12)
    assert first.compute_capability == (9, 0)
    assert first.memory_bytes_per_s == pytest.approx(3.35e12)
    assert not first.shared
    assert second.usable_bytes == 81559 * 2**20
    host = hardware.hosts[0]
    assert (host.cores, host.memory_bytes, host.interfaces) == (8, 64 * GIB, ("eth0",))
    assert hardware.network is None
    assert hardware.notes == ()
    assert nvml.open_sessions == 0


def test_a_name_never_decides_about_memory() -> None:
    # The trap of fixed tables: 80 GB under the name of the 40 GB card, and the reverse.
    large = found(FakeNvml(gpus=[a100(0, total=81920 * 2**20)])).devices[0]
    assert large.memory_bytes == 81920 * 2**20
    small = found(FakeNvml(gpus=[h100(0, total=20 * GIB)])).devices[0]
    assert small.memory_bytes == 20 * GIB


def test_a_device_without_a_data_sheet_is_estimated_and_says_so() -> None:
    gpu = h100(0, name="NVIDIA H300", sms=100, megahertz=2000)
    device = found(FakeNvml(gpus=[gpu])).devices[0]
    assert device.peak_flops == pytest.approx(4096 * 100 * 2e9)
    assert device.source.startswith("estimate: 100 multiprocessors of compute capability 9.0")
    assert device.memory_bytes_per_s is None
    silent = frozenset({"nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMaxClockInfo"})
    assert found(FakeNvml(gpus=[gpu], silent=silent)).devices[0].peak_flops > 0


def test_processes_of_others_are_seen_and_our_own_is_not() -> None:
    nvml = FakeNvml(gpus=[h100(0, pids=(os.getpid(),)), h100(1, pids=(os.getpid(), 999_999_999))])
    hardware = found(nvml)
    assert [device.shared for device in hardware.devices] == [False, True]
    assert "other processes use device 1" in hardware.notes


GPUS = [h100(0), h100(1), h100(2), h100(3)]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, "0123"),
        ("", ""),
        ("-1", ""),
        ("2", "2"),
        ("2,0", "20"),
        (" 1 , 3 ", "13"),
        ("0,2,-1,1", "02"),  # NVIDIA's own example
        ("1,9,0", "1"),
        ("1,2,1", ""),
        ("GPU-11111111", "1"),
        ("GPU-21111111-aaaa,GPU-0", "20"),
        ("GPU-", ""),  # fits all
        ("GPU-9", ""),
        ("2,GPU-21111111", ""),
        ("NoDevFiles", ""),
        ("MIG-aaa1", ""),
    ],
)
def test_visible_devices_are_those_that_cuda_would_show(value: str | None, chosen: str) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    before = dict(env)
    # Free memory tells them apart.
    gpus = [replace(gpu, free=index) for index, gpu in enumerate(GPUS)]
    hardware = found(FakeNvml(gpus=gpus), env)
    assert env == before
    if chosen:
        assert "".join(str(device.free_bytes) for device in hardware.devices) == chosen
    else:
        assert {device.kind for device in hardware.devices} == {"cpu"}
        assert hardware.notes == (
            f"4 GPU(s) are here, none may be used: CUDA_VISIBLE_DEVICES={value!r}",
        )


def test_cuda_counts_the_fastest_first_unless_told_otherwise() -> None:
    gpus = [a100(0), h100(1), a100(2)]
    names = [device.name for device in found(FakeNvml(gpus=gpus)).devices]
    assert [name.split()[1][:4] for name in names] == ["H100", "A100", "A100"]
    in_order = found(FakeNvml(gpus=gpus), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [device.name.split()[1][:4] for device in in_order.devices] == ["A100", "H100", "A100"]
    first = found(FakeNvml(gpus=gpus), {"CUDA_VISIBLE_DEVICES": "0"})
    assert [device.compute_capability for device in first.devices] == [(9, 0)]


def test_a_divided_gpu_is_its_slices() -> None:
    hardware = found(FakeNvml(gpus=[divided()]))
    large, small = hardware.devices
    assert large.mig
    assert small.mig
    assert large.memory_bytes == 19968 * 2**20
    assert large.peak_flops == pytest.approx(312e12 * 42 / 108)
    assert large.memory_bytes_per_s == pytest.approx(1555e9 * 19968 / 40536)
    assert large.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert small.name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert "of the 42.5 GB of NVIDIA A100-SXM4-40GB" in small.source
    assert (large.shared, small.shared) == (False, True)
    assert hardware.hosts[0].link.name == "pcie4"
    assert any("2 MIG slices" in note for note in hardware.notes)


def test_slices_have_no_nvlink() -> None:
    parts = [replace(divided(i), wires=GPUS[i].wires) for i in (0, 1)]
    env = {"CUDA_VISIBLE_DEVICES": "MIG-aaa1,MIG-baa1"}
    assert found(FakeNvml(gpus=parts), env).hosts[0].link.name == "pcie4"


def test_a_slice_of_an_unknown_gpu_counts_in_sevenths() -> None:
    gpu = replace(divided(), name="NVIDIA X9")
    whole = found(FakeNvml(gpus=[replace(gpu, mig=False)])).devices[0]
    large = found(FakeNvml(gpus=[gpu])).devices[0]
    assert large.peak_flops == pytest.approx(whole.peak_flops * 3 / 7)


@pytest.mark.parametrize(
    ("value", "memory"),
    [
        ("MIG-aab2", [4864]),
        ("MIG-aab2,MIG-aaa1", [4864, 19968]),
        ("MIG-aa", None),
        ("MIG-GPU-01111111-aaaa/9/0", [4864]),
        ("0", [19968, 4864]),
    ],
)
def test_slices_are_chosen_by_name(value: str, memory: list[int] | None) -> None:
    hardware = found(FakeNvml(gpus=[divided()]), {"CUDA_VISIBLE_DEVICES": value})
    if memory is None:
        assert hardware.devices[0].kind == "cpu"
    else:
        assert [device.memory_bytes // 2**20 for device in hardware.devices] == memory


def test_a_divided_gpu_without_slices_cannot_be_used() -> None:
    hardware = found(FakeNvml(gpus=[a100(0, mig=True)]))
    assert hardware.devices[0].kind == "cpu"
    mixed = found(FakeNvml(gpus=[a100(0, mig=True), a100(1)]))
    assert [device.kind for device in mixed.devices] == ["cuda"]


def test_switches_join_all_gpus_at_full_speed() -> None:
    link = found(FakeNvml(gpus=GPUS)).hosts[0].link
    assert link.name == "nvlink4"
    assert link.bytes_per_s == pytest.approx(18 * 20.6e9)
    assert link.source.startswith("every pair of devices; NCCL's own figure for 18 links")


def test_the_slowest_pair_counts_and_is_named() -> None:
    # Two pairs of bridged cards: 12 links in a pair, PCIe between pairs.
    buses = [h100(index).bus for index in range(4)]
    peers = [1, 0, 3, 2]
    gpus = [a100(i, wires=(buses[peer],) * 12) for i, peer in enumerate(peers)]
    hardware = found(FakeNvml(gpus=gpus))
    link = hardware.hosts[0].link
    assert link.name == "pcie4"
    assert link.bytes_per_s == pytest.approx(24e9)
    assert link.source.startswith("devices 0 and 2, the slowest pair")
    assert hardware.notes == (
        "pairs of devices by link: pcie4 4, nvlink3 2; plans reckon with the slowest, 0 to 2",
    )
    pair = found(FakeNvml(gpus=gpus), {"CUDA_VISIBLE_DEVICES": "2,3"}).hosts[0].link
    assert (pair.name, pair.bytes_per_s) == ("nvlink3", pytest.approx(12 * 20e9))


def test_pcie_is_the_narrower_of_two_slots() -> None:
    gpus = [a100(0), a100(1, pcie=(4, 8))]
    link = found(FakeNvml(gpus=gpus)).hosts[0].link
    assert (link.name, link.bytes_per_s) == ("pcie4", pytest.approx(12e9))
    silent = {"nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"}
    link = found(FakeNvml(gpus=gpus, silent=frozenset(silent))).hosts[0].link
    assert link.name == "pcie3"


def test_cpus_of_their_own_slow_pcie_down() -> None:
    gpus = [h100(0, wires=()), h100(1, wires=())]
    link = found(FakeNvml(gpus=gpus, sockets={gpus[1].bus: 1})).hosts[0].link
    assert link.name == "pcie5 across sockets"
    assert link.bytes_per_s == pytest.approx(10e9)


def test_a_driver_without_topology_still_gives_a_link() -> None:
    silent = {
        *("nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetPciInfo"),
        *("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetMigMode"),
        "nvmlDeviceGetComputeRunningProcesses",
    }
    hardware = found(FakeNvml(gpus=GPUS, silent=frozenset(silent)))
    assert hardware.hosts[0].link.name == "pcie5"
    assert len(hardware.devices) == 4


def test_links_to_unnamed_ends_count_as_switches() -> None:
    silent = frozenset({"nvmlDeviceGetNvLinkRemotePciInfo"})
    assert found(FakeNvml(gpus=GPUS, silent=silent)).hosts[0].link.name == "nvlink4"


def test_a_lost_gpu_is_left_out() -> None:
    nvml = FakeNvml(gpus=[h100(0), h100(1, broken="GPU is lost")])
    hardware = found(nvml)
    assert len(hardware.devices) == 1
    assert hardware.notes == ("GPU 1 is left out: GPU is lost",)
    assert nvml.open_sessions == 0


def test_a_driver_that_tells_no_memory_leaves_it_to_torch(tmp_path: Path) -> None:
    # As where GPU and CPU share theirs.
    nvml = FakeNvml(gpus=[h100(0)], silent=frozenset({"nvmlDeviceGetMemoryInfo"}))
    torch = fake_torch("NVIDIA GB10")
    hardware = found(nvml, root=driver(tmp_path), torch=lambda: torch)
    assert hardware.devices[0].name == "NVIDIA GB10"
    assert hardware.notes[0] == "GPU 0 is left out: Not Supported"


def driver(tmp_path: Path) -> Path:
    """The root of a system on which an NVIDIA driver is loaded."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    return tmp_path


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


def test_a_driver_that_fails_is_one_note_and_the_cpu(tmp_path: Path) -> None:
    nvml = FakeNvml(gpus=GPUS, failure="Driver/library version mismatch")
    hardware = found(nvml, root=driver(tmp_path))
    assert {device.kind for device in hardware.devices} == {"cpu"}
    assert hardware.notes == ("the NVIDIA driver does not answer: Driver/library version mismatch",)
    assert nvml.open_sessions == 0
    # Where there is no driver, its library's complaint is no news.
    assert found(nvml).notes == ()


def test_without_the_library_torch_is_asked(tmp_path: Path) -> None:
    torch = fake_torch("NVIDIA A100-SXM4-40GB", "NVIDIA X9")
    hardware = found(None, root=driver(tmp_path), torch=lambda: torch)
    known, unknown = hardware.devices
    assert known.memory_bytes == 42 * GB
    assert known.peak_flops == pytest.approx(312e12)
    assert known.free_bytes is None
    assert unknown.source.startswith("estimate: 108 multiprocessors")
    assert hardware.hosts[0].link.name == "pcie4"
    assert any("nvidia-ml-py" in note for note in hardware.notes)
    torch.cuda.is_available = lambda: False
    assert found(None, root=tmp_path, torch=lambda: torch).devices[0].kind == "cpu"


def test_torch_is_not_imported_where_there_is_no_driver() -> None:
    def imported() -> None:
        raise AssertionError("torch was imported")

    assert found(None, torch=imported).devices[0].kind == "cpu"
    assert found(FakeNvml(gpus=GPUS), torch=imported).devices[0].kind == "cuda"


def test_a_torch_that_cannot_use_the_gpus_is_said() -> None:
    hardware = found(FakeNvml(gpus=GPUS), torch_version="2.13.0+cpu")
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
    assert len(found(FakeNvml(gpus=GPUS), num_hosts=2).devices) == 8


def test_bad_numbers_and_contradicting_launchers_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_hosts must be at least 1; got 0"):
        found(num_hosts=0)
    with pytest.raises(ConfigError, match="ranks_per_host must be at least 1; got -2"):
        found(ranks_per_host=-2)
    with pytest.raises(LaunchError):
        found(env={"RANK": "1"})


def test_this_machine_is_found() -> None:
    hardware = detect_hardware({}, ranks_per_host=2)
    assert len(hardware.devices) == 2 or hardware.devices[0].kind == "cuda"
    assert hardware.hosts[0].cores >= 1


def test_the_stand_in_has_the_librarys_functions_and_numbers() -> None:
    import pynvml  # of the test group: CI may not do without

    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 20
    for name in names:
        ours, theirs = getattr(FakeNvml, name), getattr(pynvml, name)
        if isinstance(ours, int):
            assert ours == theirs, name
        elif name != "NVMLError":
            parameters = list(inspect.signature(ours).parameters)[1:]
            required = [
                value
                for value in inspect.signature(theirs).parameters.values()
                if value.default is value.empty
            ]
            assert len(parameters) == len(required), name
