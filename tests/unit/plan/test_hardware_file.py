"""Machines by name and as files: what is written is read back, and what cannot be is said in one
line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.commands.plan.catalog import (
    GB,
    LINKS,
    MAX_DEVICES,
    MODELS,
    NETWORKS,
    by_driver_name,
    device_of,
    estimated_flops,
    hardware_of,
    nvlink,
    pcie,
)
from gradsync.commands.plan.description import Device, Hardware, Host, Link
from gradsync.commands.plan.hardware_file import (
    FLOP_RATE,
    FLOPS,
    RATE,
    RATES,
    SIZES,
    TIME,
    TIMES,
    dump_hardware,
    hardware_document,
    load_hardware,
    load_network,
    read_hardware,
    read_quantity,
    write_bytes,
)
from gradsync.errors import ConfigError

BOOST = {
    **{"h100": (132, 1.83e9), "a100-40": (108, 1.41e9), "t4": (40, 1.59e9)},
    **{"v100-16": (80, 1.53e9), "rtx4090": (128, 2.52e9)},
}
"""Multiprocessors and their clock, from the architectures' white papers."""


@pytest.mark.parametrize("key", MODELS)
def test_every_model_is_found_by_the_name_its_driver_gives(key: str) -> None:
    model, device = MODELS[key], device_of(key)
    for name in (model.name, model.name.lower(), model.name.removeprefix("NVIDIA ")):
        assert by_driver_name(name) is model
    assert (device.memory_bytes, device.free_bytes) == (model.memory_gb * GB, None)
    assert model.link in LINKS
    assert device.source
    if key in BOOST:
        estimate = estimated_flops(model.capability, *BOOST[key])
        assert estimate == pytest.approx(model.tflops * 1e12, rel=0.01)


def test_names_and_generations_that_are_not_known() -> None:
    # An A10G is no A10, and an H100 with 96 GB no H100 with 80.
    assert by_driver_name("NVIDIA A10G") is None
    assert by_driver_name("NVIDIA H100") is None
    assert estimated_flops((13, 0), 10, 1e9) == 512 * 10 * 1e9
    assert estimated_flops((6, 1), 10, 1e9) == 128 * 10 * 1e9


@pytest.mark.parametrize(
    ("name", "memories_gb", "link"),
    [
        ("h100x3", [80] * 3, "nvlink4"),
        ("a100-40x2", [40] * 2, "nvlink3"),
        ("h200", [141], "nvlink4"),
        ("rtx4090", [24], "pcie4"),  # its x does not count
        ("rtx4090x2", [24] * 2, "pcie4"),
        ("a100-40x2+h100", [40, 40, 80], "pcie4"),  # the older PCIe joins several kinds
    ],
)
def test_hosts_by_name(name: str, memories_gb: list[int], link: str) -> None:
    hardware = hardware_of(name)
    assert [device.memory_bytes for device in hardware.devices] == [n * GB for n in memories_gb]
    assert hardware.hosts[0].link == LINKS[link]
    assert (len(hardware.hosts), hardware.network) == (1, None)


def test_several_hosts_get_a_network_and_say_that_it_is_assumed() -> None:
    hardware = hardware_of("h100x8@2")
    assert (len(hardware.hosts), len(hardware.devices)) == (2, 16)
    assert hardware.network is not None
    assert any("infiniband" in note for note in hardware.notes)


NO_NAMES = {
    "h10x4": "unknown device 'h10'; perhaps h100 or",
    # A 40 and an 80 GB card share this name: nothing may be guessed.
    "a100x2": "unknown device 'a100'; perhaps a100-80 or a100-40",
    "h100x0": "count must be at least 1",
    "h100x8@": "got '' after @, expected a number of hosts",
    "h100x8@0": "got '0' after @",
    "h100@two": "got 'two' after @",
    "": "unknown device ''",
    "h100x4+": "unknown device ''",
    f"h100x{MAX_DEVICES + 1}": f"at most {MAX_DEVICES}",
    "h100x8@99999999": f"at most {MAX_DEVICES}",
}


@pytest.mark.parametrize(("name", "words"), NO_NAMES.items())
def test_what_is_no_name_is_refused_in_one_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_of(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"a file that describes a machine ends in \.yaml"):
        load_hardware(name)


def test_links_are_as_nccl_reckons_and_networks_as_their_names_say() -> None:
    assert nvlink((9, 0), 18).bytes_per_s == pytest.approx(18 * 20.6e9)
    assert "450 GB/s as specified" in nvlink((9, 0), 18).source
    assert nvlink((8, 0), 12).name == "nvlink3"
    assert nvlink((8, 6), 4).bytes_per_s == pytest.approx(4 * 12e9)
    assert nvlink((12, 1), 4).name == "nvlink5"
    assert pcie(3).bytes_per_s == pytest.approx(12e9)
    assert pcie(5, 8).bytes_per_s == pytest.approx(24e9)
    assert pcie(9).name == "pcie6"
    for name, link in NETWORKS.items():
        assert load_network(name) is link
        assert link.source
        assert link.name == name
    assert NETWORKS["infiniband-ndr"].bytes_per_s == 50e9
    assert NETWORKS["ethernet-10g"].bytes_per_s == pytest.approx(1.25e9 * 1448 / 1538)
    assert NETWORKS["wan-1g-50ms"].alpha_s == 0.05


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=30)
SPEED = st.floats(1e-3, 1e20, allow_nan=False)
SIZE = st.integers(1, 2**60)
LINK = st.builds(
    Link,
    name=WORDS,
    alpha_s=st.floats(0, 10, allow_subnormal=False),
    bytes_per_s=SPEED,
    source=WORDS,
    per_host=st.booleans(),
)
DEVICE = st.builds(
    Device,
    kind=st.sampled_from(["cuda", "cpu"]),
    name=WORDS,
    memory_bytes=st.integers(2**40, 2**60),
    peak_flops=SPEED,
    free_bytes=st.none() | st.integers(0, 2**40),
    compute_capability=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
    memory_bytes_per_s=st.none() | SPEED,
    shared=st.booleans(),
    source=WORDS,
)
HOST = st.builds(
    Host,
    devices=st.lists(DEVICE, min_size=1, max_size=3).map(lambda found: (*found, found[0])),
    link=LINK | st.sampled_from(list(LINKS.values())),
    cores=st.integers(1, 10_000),
    memory_bytes=SIZE,
    instructions=st.lists(WORDS, max_size=2).map(tuple),
    interfaces=st.lists(WORDS, max_size=2).map(tuple),
)
MACHINE = st.builds(
    Hardware,
    hosts=st.lists(HOST, min_size=1, max_size=2).map(lambda found: (found[0], *found)),
    network=LINK | st.sampled_from(list(NETWORKS.values())),
    notes=st.lists(WORDS, max_size=2).map(tuple),
)


@settings(max_examples=20, deadline=None)
@given(MACHINE)
def test_a_file_says_exactly_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, hardware: Hardware
) -> None:
    assert load(tmp_path_factory.getbasetemp(), dump_hardware(hardware)) == hardware
    document = json.loads(json.dumps(hardware_document(hardware)))
    assert read_hardware(document, "document") == hardware


def test_a_known_link_with_other_figures_keeps_them(tmp_path: Path) -> None:
    host = hardware_of("h100x2").hosts[0]
    slower = replace(host.link, bytes_per_s=1e9)
    hardware = Hardware(hosts=(replace(host, link=slower),))
    assert load(tmp_path, dump_hardware(hardware)) == hardware


@settings(max_examples=50)
@given(st.integers(0, 2**70), st.floats(0, 1e25), st.floats(0, 1e6))
def test_units_lose_nothing(size: int, rate: float, seconds: float) -> None:
    assert read_quantity(write_bytes(size), SIZES) == size
    assert float(read_quantity(RATE.write(rate), RATES) or 0) == rate
    assert float(read_quantity(FLOP_RATE.write(rate), FLOPS) or 0) == rate
    assert float(read_quantity(TIME.write(seconds), TIMES) or 0) == seconds


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        ("80GB", SIZES, 80 * 10**9),
        ("80 GiB", SIZES, 80 * 2**30),
        ("1e3MB", SIZES, 10**9),
        (".5TB", SIZES, 5 * 10**11),
        (512, SIZES, 512),
        ("400Gbit/s", RATES, 50 * 10**9),
        ("3.35TB/s", RATES, 3_350_000_000_000),
        ("989.5TFLOP/s", FLOPS, 989_500_000_000_000),
        ("312TFLOPS", FLOPS, 312 * 10**12),
        ("5us", TIMES, Decimal("5e-6")),
        ("5µs", TIMES, Decimal("5e-6")),
        *((text, SIZES, None) for text in ("80Gb", "80gb", "80 G B", "GB", "", "nan", "inf")),
        *((text, SIZES, None) for text in ("1e9999GB", "0x10", True, None, [], "80٣GB")),
    ],
)
def test_units_as_people_write_them(text, units, number) -> None:
    assert read_quantity(text, units) == number


def test_sizes_are_written_as_they_are_meant() -> None:
    assert write_bytes(80 * 10**9) == "80GB"
    assert write_bytes(80 * 2**30) == "80GiB"
    assert write_bytes(85_520_809_984) == "85.520809984GB"
    assert (RATE.write(3.35e12), FLOP_RATE.write(989.5e12)) == ("3.35TB/s", "989.5TFLOP/s")
    assert TIME.write(3.4e-6) == "3.4us"


def load(tmp_path: Path, text: str, name: str = "a.yaml") -> Hardware:
    path = tmp_path / name
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
          - {type: h100, free: 60GB, shared: true}
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
    assert first.devices[3].shared
    assert (first.cores, first.memory_bytes) == (64, 512 * GB)
    assert third == hardware_of("a100-40x4").hosts[0]
    assert hardware.network == NETWORKS["infiniband-ndr"]


def test_listed_devices(tmp_path: Path) -> None:
    """A listed kind is connected as a named one; what is written over a data sheet is `given`."""
    listed = load(tmp_path, "hosts: [{devices: [{type: h100, count: 4}]}]")
    assert listed.hosts == hardware_of("h100x4").hosts
    mixed = load(tmp_path, "hosts: [{devices: [{type: h100}, {type: a100-80}]}]")
    assert mixed.hosts[0].link == LINKS["pcie4"]
    over = load(tmp_path, "hosts: [{devices: [{type: h100, flops: 400TFLOP/s}]}]").devices[0]
    assert (over.peak_flops, over.source) == (400e12, "given")
    own = "{name: X1, memory: 24GiB, flops: 50TFLOP/s, compute_capability: 8.9, free: 0}"
    device = load(tmp_path, f"hosts: [{{devices: [{own}]}}]").devices[0]
    assert (device.memory_bytes, device.usable_bytes) == (24 * 2**30, 0)
    assert (device.compute_capability, device.kind) == ((8, 9), "cuda")


ERRORS = """
hosts: []                               hosts: got [], expected a list with at least one entry
host: 1                                 unknown key 'host'; perhaps you meant 'hosts'
- 1                                     got [1], expected keys and values (hosts, network, notes)
null                                    got None, expected keys and values
1: 2                                    unknown key 1
HOST count: 2                           network is missing; 2 hosts need one
{hosts: [{devices: h100}], network: ndr}  network: unknown network 'ndr'
{hosts: [{devices: h100}], notes: {}}   notes: got {}, expected a list of words
hosts: [{cores: 3}]                     hosts[0].devices is missing
hosts: [{devices: h10x4}]               hosts[0].devices: unknown device 'h10'; perhaps h100
HOST cores: 0                           hosts[0].cores: got 0, expected a whole number
HOST cores: true                        hosts[0].cores: got True
HOST count: 1.5                         hosts[0].count: got 1.5
HOST count: 99999999999                 hosts[0]: 99999999999 devices; at most
HOST memory: -1                         hosts[0].memory: got -1, expected a size such as
HOST memory: 1e900                      hosts[0].memory: got '1e900', expected a size
HOST interfaces: eth0                   hosts[0].interfaces: got 'eth0', expected a list
HOST link: nvlnk4                       hosts[0].link: unknown link 'nvlnk4'
HOST link: 4                            hosts[0].link: got 4, expected keys and values
HOST link: {name: a, latency: 1us}      hosts[0].link.bandwidth is missing; expected a rate
HOST link: {name: a, latency: -1us, bandwidth: 1GB/s}  .link.latency: got '-1us', expected a time
DEVICE type: h100, memroy: 3GB          hosts[0].devices[0]: unknown key 'memroy'; perhaps you meant
DEVICE type: h100, memory: 80 Gb        .memory: got '80 Gb', expected a size such as 80GB or 80GiB
DEVICE type: h100, free: 81GB           .free: got '81GB', expected at most
DEVICE type: h100, kind: gpu            .kind: got 'gpu', expected cuda or cpu
DEVICE type: h100, shared: 1            .shared: got 1, expected true or false
DEVICE type: h100, count: 99999999999   : 99999999999 devices; at most
DEVICE type: h100, compute_capability: new        .compute_capability: got 'new', expected two num
DEVICE type: h100, compute_capability: [9, 0, 1]  .compute_capability: got [9, 0, 1]
DEVICE type: 3                          hosts[0].devices[0].type: got 3, expected text
DEVICE name: x                          hosts[0].devices[0].memory is missing
DEVICE memory: 3GB                      hosts[0].devices[0].name is missing
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
    assert words in message
    assert str(tmp_path / "a.yaml") in message
    assert "\n" not in message
    assert len(message) < 700


def test_what_is_no_file_of_hardware(tmp_path: Path) -> None:
    """`core/test_document.py` has what no document may be."""
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        load_hardware(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"its name must end in \.yaml"):
        load(tmp_path, "hosts: []", "machine.txt")
    with pytest.raises(ConfigError, match="expected a size"):
        read_hardware({"hosts": [{"devices": "h100", "memory": float("inf")}]}, "document")


def test_a_network_file(tmp_path: Path) -> None:
    path = tmp_path / "sites.yaml"
    path.write_text("latency: 20ms\nbandwidth: 10Gbit/s\nper_host: true\n")
    source = "file sites.yaml"
    link = Link(name="sites", alpha_s=0.02, bytes_per_s=1.25e9, per_host=True, source=source)
    assert load_network(str(path)) == link
    with pytest.raises(ConfigError, match="unknown network 'infiniband-ndx'; perhaps you meant"):
        load_network("infiniband-ndx")
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load_network(str(tmp_path / "missing.yaml"))


NO_NETWORKS = {
    "latency: 1ms": "bandwidth is missing; expected a rate",
    "bandwidth: 1GB/s": "latency is missing; expected a time",
    "latency: soon\nbandwidth: 1GB/s": "latency: got 'soon', expected a time",
    "latency: 1ms\nbandwidth: 0": "bandwidth: got 0, expected a rate such as",
    "latency: 1ms\nbandwidth: 1ms": "bandwidth: got '1ms'",
    "latency: 1ms\nbandwith: 1GB/s": "unknown key 'bandwith'; perhaps you meant 'bandwidth'",
    "latency: 1\nbandwidth: 1\nper_host: 2": "per_host: got 2, expected true or false",
    "latency: 1\nbandwidth: 1\nname: 7": "name: got 7, expected text",
    "- 1": "got [1], expected keys and values (name, latency",
}


@pytest.mark.parametrize(("text", "words"), NO_NETWORKS.items())
def test_a_malformed_network_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_network(str(path))
    assert str(caught.value).startswith(f"network file {path}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
