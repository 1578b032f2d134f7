"""Devices and links with public figures, and machines by name."""

from __future__ import annotations

import pytest

from gradsync.errors import ConfigError
from gradsync.plan.catalog import (
    GB,
    LINKS,
    MAX_DEVICES,
    MODELS,
    by_driver_name,
    device_of,
    estimated_flops,
    hardware_of,
    nvlink,
    pcie,
)

BOOST_HZ = {"h100": 1.83e9, "a100-40": 1.41e9, "t4": 1.59e9, "v100-16": 1.53e9, "rtx4090": 2.52e9}
"""From the architectures' white papers."""


@pytest.mark.parametrize("key", MODELS)
def test_every_model_is_found_by_the_name_its_driver_gives(key: str) -> None:
    model = MODELS[key]
    assert by_driver_name(model.name) is model
    assert by_driver_name(model.name.lower()) is model
    assert by_driver_name(model.name.removeprefix("NVIDIA ")) is model
    device = device_of(key)
    assert device.memory_bytes == model.memory_gb * GB
    assert device.free_bytes is None
    assert not device.mig
    assert model.link in LINKS
    assert device.source


def test_a_name_that_only_resembles_one_is_unknown() -> None:
    # An A10G is no A10, and an H100 with 96 GB no H100 with 80.
    assert by_driver_name("NVIDIA A10G") is None
    assert by_driver_name("NVIDIA H100") is None


@pytest.mark.parametrize(("key", "clock_hz"), BOOST_HZ.items())
def test_data_sheets_agree_with_size_times_clock(key: str, clock_hz: float) -> None:
    model = MODELS[key]
    estimate = estimated_flops(model.capability, model.num_sms, clock_hz)
    assert estimate == pytest.approx(model.tflops * 1e12, rel=0.01)


def test_an_unknown_generation_is_estimated_as_the_humblest_new_one() -> None:
    assert estimated_flops((13, 0), 10, 1e9) == 512 * 10 * 1e9
    assert estimated_flops((6, 1), 10, 1e9) == 128 * 10 * 1e9


ROWS = [
    (f"{kind}x{count}", count, memory)
    for kind, memory in (("h100", 80), ("a100-40", 40), ("a100-80", 80), ("h200", 141))
    for count in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("name", "count", "memory_gb"), ROWS)
def test_every_row_of_the_strategy_table_has_a_name(name: str, count: int, memory_gb: int) -> None:
    hardware = hardware_of(name)
    assert [device.memory_bytes for device in hardware.devices] == [memory_gb * GB] * count
    assert len(hardware.hosts) == 1
    assert hardware.network is None
    assert hardware.hosts[0].link.name.startswith("nvlink")


def test_a_mig_slice_has_its_share() -> None:
    whole, part = device_of("a100-80"), device_of("a100-80-3g.40gb")
    assert part.mig
    assert part.memory_bytes == 40 * GB
    assert part.peak_flops == pytest.approx(whole.peak_flops * 3 / 7)
    assert part.memory_bytes_per_s is not None
    assert whole.memory_bytes_per_s is not None
    assert part.memory_bytes_per_s == pytest.approx(whole.memory_bytes_per_s / 2)
    assert "MIG 3g.40gb" in part.name
    host = hardware_of("a100-80-3g.40gbx2").hosts[0]
    assert len(host.devices) == 2
    assert host.link == LINKS["pcie4"]  # slices have no NVLink


def test_a_host_with_several_kinds_is_joined_by_the_older_pcie() -> None:
    hardware = hardware_of("a100-40x2+h100")
    assert [device.memory_bytes // GB for device in hardware.devices] == [40, 40, 80]
    assert hardware.hosts[0].link == LINKS["pcie4"]


def test_several_hosts_get_a_network_and_say_that_it_is_assumed() -> None:
    hardware = hardware_of("h100x8@2")
    assert len(hardware.hosts) == 2
    assert len(hardware.devices) == 16
    assert hardware.network is not None
    assert any("infiniband" in note for note in hardware.notes)


def test_the_x_in_a_name_does_not_count() -> None:
    assert len(hardware_of("rtx4090").devices) == 1
    assert len(hardware_of("rtx4090x2").devices) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h10x4", "unknown device 'h10'; perhaps h100 or"),
        # A 40 and an 80 GB card share this name: nobody may guess.
        ("a100x2", "unknown device 'a100'; perhaps a100-80 or a100-40"),
        ("h100x0", "count must be at least 1"),
        ("h100x8@", "got '' after @, expected a number of hosts"),
        ("h100x8@0", "got '0' after @"),
        ("h100@two", "got 'two' after @"),
        ("h100-9g.10gb", "1 to 7 compute slices and at most 80 GB"),
        ("h100-1g.90gb", "at most 80 GB"),
        ("", "unknown device ''"),
        ("h100x4+", "unknown device ''"),
        (f"h100x{MAX_DEVICES + 1}", f"at most {MAX_DEVICES}"),
        ("h100x8@99999999", f"at most {MAX_DEVICES}"),
    ],
)
def test_what_is_no_name_is_refused_in_one_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_of(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_are_as_nccl_reckons() -> None:
    assert nvlink((9, 0), 18).bytes_per_s == pytest.approx(18 * 20.6e9)
    assert "450 GB/s as specified" in nvlink((9, 0), 18).source
    assert nvlink((8, 0), 12).name == "nvlink3"
    assert nvlink((8, 6), 4).bytes_per_s == pytest.approx(4 * 12e9)
    assert nvlink((12, 1), 4).name == "nvlink5"
    assert pcie(3).bytes_per_s == pytest.approx(12e9)
    assert pcie(5, 8).bytes_per_s == pytest.approx(24e9)
    assert pcie(9).name == "pcie6"
