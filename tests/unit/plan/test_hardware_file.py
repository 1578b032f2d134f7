"""Machines by name and as files: what is written is read back, and what cannot be is said in one
line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradsync.commands.plan.description import (
    DEVICES,
    GB,
    LINKS,
    NETWORKS,
    Device,
    Hardware,
    Link,
    device_of,
    named_hardware,
    usual_host,
    usual_link,
)
from gradsync.commands.plan.hardware_file import (
    Quantity,
    dump_hardware,
    hardware_document,
    load_hardware,
    read_quantity,
)
from gradsync.commands.plan.machine import detected_device
from gradsync.errors import ConfigError


@pytest.mark.parametrize("key", DEVICES)
def test_every_device_is_found_by_the_name_its_driver_gives(key: str) -> None:
    device = device_of(key)
    assert device.compute_capability is not None
    for name in (device.name, device.name.removeprefix("NVIDIA ")):
        found = detected_device(SimpleNamespace(name=name, total_memory=7))
        assert found == replace(device, memory_bytes=7)
        assert usual_link([found]) == usual_link([device])


@pytest.mark.parametrize(
    ("name", "memories_gb", "link"),
    [
        ("h100x3", [80] * 3, "nvlink4"),
        ("a100-40x2", [40] * 2, "nvlink3"),
        ("rtx4090", [24], "pcie4"),  # its x does not count
        ("rtx4090x2", [24] * 2, "pcie4"),
    ],
)
def test_hosts_by_name(name: str, memories_gb: list[int], link: str) -> None:
    hardware = named_hardware(name)
    assert [device.memory_bytes for device in hardware.devices] == [n * GB for n in memories_gb]
    assert hardware.hosts[0].link == LINKS[link]
    assert (len(hardware.hosts), hardware.network) == (1, None)


def test_several_hosts_get_a_network_and_say_that_it_is_assumed() -> None:
    hardware = named_hardware("h100x8@2")
    assert (len(hardware.hosts), len(hardware.devices)) == (2, 16)
    assert hardware.network is not None
    assert any("infiniband" in note for note in hardware.notes)


# A 40 and an 80 GB card share the name a100: nothing may be guessed.
@pytest.mark.parametrize("name", ["h10x4", "a100", "h100x0", "h100x8@", "h100@0", "", "l4+t4"])
def test_what_is_no_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .* a100-80, a100-40, [^\n]*$"):
        load_hardware(name)


def test_links_are_as_nccl_reckons_and_networks_as_their_names_say() -> None:
    assert LINKS["nvlink4"].bytes_per_s == pytest.approx(18 * 20.6e9)
    assert [LINKS[f"pcie{n}"].bytes_per_s for n in (3, 5)] == pytest.approx([12e9, 48e9])
    for name, link in NETWORKS.items():
        assert link.name == name
    assert NETWORKS["infiniband-ndr"].bytes_per_s == 50e9
    assert NETWORKS["ethernet-10g"].bytes_per_s == pytest.approx(1.25e9 * 1448 / 1538)


ODD = Link(name="a: b", alpha_s=3.3e-7, bytes_per_s=1.7e9, source="𐀀 # é", per_host=True)
CPU = Device(kind="cpu", name="a CPU", memory_bytes=7, peak_flops=1.5e11, free_bytes=0, source="'")
MACHINES = [
    named_hardware("h100x8@2"),
    Hardware(
        hosts=(
            *named_hardware("t4x3").hosts,
            replace(usual_host([CPU, CPU, device_of("l4")]), instructions=("avx", "no: yes")),
            replace(usual_host([CPU]), link=replace(LINKS["pcie4"], bytes_per_s=1e9)),
        ),
        network=ODD,
        notes=("1.5", "- a\n"),
    ),
]


@pytest.mark.parametrize("hardware", MACHINES)
def test_a_file_says_exactly_what_was_written(tmp_path: Path, hardware: Hardware) -> None:
    """Also of a known link with other figures."""
    assert load(tmp_path, dump_hardware(hardware)) == hardware
    json.dumps(hardware_document(hardware))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("85520.809984MB", 85_520_809_984)),
        *(("50GB/s", 50 * 10**9), ("3.35TB/s", 3.35e12), ("400Gbit/s", 50e9)),
        *(("989.5TFLOP/s", 989.5e12), ("3.4us", 3.4e-6), ("1e3", 1000), (7, 7)),
    ],
)
def test_units_as_people_write_them(text: object, number: float) -> None:
    assert read_quantity(Quantity, text) == pytest.approx(number, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["80Gb", "80gb", "80 G B", "GB", "", "nan", "0x10", "1e900", True, [], "80٣GB", "-1"]
)
def test_units_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match=r"Expected a number such as 80GB"):
        read_quantity(Quantity, text)


def load(tmp_path: Path, text: str) -> Hardware:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return load_hardware(str(path))


def test_the_file_of_the_documentation(tmp_path: Path) -> None:
    hardware = load(
        tmp_path,
        """
        hosts:
        - count: 2
          devices:
          - {type: h100, count: 3}
          - {type: h100, free: 60GB}
          link: nvlink4
          cores: 64
          memory: 512GB
        - devices: a100-40x4
        network: infiniband-ndr
        """,
    )
    first, second, third = hardware.hosts
    assert first == second
    assert first.devices[:3] == (device_of("h100"),) * 3
    assert first.devices[3].usable_bytes == 60 * GB
    assert (first.cores, first.memory_bytes) == (64, 512 * GB)
    assert third == named_hardware("a100-40x4").hosts[0]
    assert hardware.network == NETWORKS["infiniband-ndr"]


def test_listed_devices(tmp_path: Path) -> None:
    """A listed kind is connected as a named one; what is written over a data sheet is `given`."""
    listed = load(tmp_path, "hosts: [{devices: [{type: h100, count: 4}]}]")
    assert listed.hosts == named_hardware("h100x4").hosts
    mixed = load(tmp_path, "hosts: [{devices: [{type: h100}, {type: a100-80}]}]")
    assert mixed.hosts[0].link == LINKS["pcie4"]
    over = load(tmp_path, "hosts: [{devices: [{type: h100, flops: 400TFLOP/s}]}]").devices[0]
    assert (over.peak_flops, over.source) == (400e12, "given")
    own = "{name: X1, memory: 24GiB, flops: 50TFLOP/s, compute_capability: [8, 9], free: 0}"
    device = load(tmp_path, f"hosts: [{{devices: [{own}]}}]").devices[0]
    assert (device.memory_bytes, device.usable_bytes) == (24 * 2**30, 0)
    assert (device.compute_capability, device.kind) == ((8, 9), "cuda")


ERRORS = """
hosts: []                               length >= 1 - at `$.hosts`
host: 1                                 unknown field `host`
- 1                                     Expected `object`, got `array`
HOST count: 2                           2 hosts need a network
{hosts: [{devices: h100}], network: ndr}  unknown network 'ndr'
hosts: [{cores: 3}]                     missing required field `devices` - at `$.hosts[0]`
hosts: [{devices: h10x4}]               unknown device 'h10'
HOST cores: 0                           `int` >= 1 - at `$.hosts[0].cores`
HOST count: 1.5                         - at `$.hosts[0].count`
HOST count: 99999999999                 - at `$.hosts[0].count`
HOST link: nvlnk4                       unknown link 'nvlnk4'; perhaps you meant 'nvlink4'
HOST link: {name: a, latency: 1us}      missing required field `bandwidth` - at `$.hosts[0].link`
DEVICE type: h100, memory: 80 Gb        got '80 Gb' - at `$.hosts[0]
DEVICE type: h100, memroy: 3GB          unknown field `memroy` - at `$.hosts[0].devices[0]`
DEVICE type: h100, kind: gpu            'gpu' - at `$.hosts[0].devices[0].kind`
DEVICE name: x                          a device without type needs memory, flops
"""


@pytest.mark.parametrize("line", ERRORS.strip().splitlines())
def test_a_bad_file_is_refused_with_file_key_and_what_was_expected(
    tmp_path: Path, line: str
) -> None:
    """HOST is a host of one H100 with further keys, DEVICE the one device of a host."""
    text, words = re.split(" {2,}", line)
    kind, _, rest = text.partition(" ")
    if kind == "HOST":
        text = f"hosts: [{{devices: h100, {rest}}}]"
    if kind == "DEVICE":
        text = f"hosts: [{{devices: [{{{rest}}}]}}]"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"hardware file {tmp_path / 'a.yaml'}: ")
    assert words in message
    assert "\n" not in message
