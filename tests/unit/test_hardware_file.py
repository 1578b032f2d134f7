"""Hardware as a file: what is written is read back, and what cannot be is said in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.errors import ConfigError
from gradsync.plan.catalog import GB, LINKS, NETWORKS, device_of, hardware_of
from gradsync.plan.description import Device, Hardware, Host, Link
from gradsync.plan.hardware_file import (
    FLOPS,
    RATES,
    SIZES,
    TIMES,
    dump_hardware,
    hardware_document,
    load_hardware,
    read_hardware,
    read_quantity,
    write_bytes,
    write_flops,
    write_rate,
    write_time,
)

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=30)
rates = st.floats(1e-3, 1e20, allow_nan=False)
sizes = st.integers(1, 2**60)
links = st.builds(
    Link,
    name=texts,
    alpha_s=st.floats(0, 10, allow_subnormal=False),
    bytes_per_s=rates,
    source=texts,
    per_host=st.booleans(),
)


@st.composite
def devices(draw: st.DrawFn) -> Device:
    memory = draw(sizes)
    return Device(
        kind=draw(st.sampled_from(["cuda", "cpu"])),
        name=draw(texts),
        memory_bytes=memory,
        peak_flops=draw(rates),
        free_bytes=draw(st.none() | st.integers(0, memory)),
        compute_capability=draw(st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99))),
        memory_bytes_per_s=draw(st.none() | rates),
        mig=draw(st.booleans()),
        shared=draw(st.booleans()),
        source=draw(texts),
    )


hosts = st.builds(
    Host,
    devices=st.lists(devices(), min_size=1, max_size=3).map(lambda found: (*found, found[0])),
    link=links | st.sampled_from(list(LINKS.values())),
    cores=st.integers(1, 10_000),
    memory_bytes=sizes,
    instructions=st.lists(texts, max_size=2).map(tuple),
    interfaces=st.lists(texts, max_size=2).map(tuple),
)
machines = st.builds(
    Hardware,
    hosts=st.lists(hosts, min_size=1, max_size=2).map(lambda found: (found[0], *found)),
    network=links | st.sampled_from(list(NETWORKS.values())),
    notes=st.lists(texts, max_size=2).map(tuple),
)


@settings(max_examples=20, deadline=None)
@given(machines)
def test_a_file_says_exactly_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, hardware: Hardware
) -> None:
    path = tmp_path_factory.getbasetemp() / "machine.yaml"
    path.write_text(dump_hardware(hardware), encoding="utf-8")
    assert load_hardware(str(path)) == hardware
    document = json.loads(json.dumps(hardware_document(hardware)))
    assert read_hardware(document, "document") == hardware


def test_a_link_of_ones_own_under_a_known_name_keeps_its_figures(tmp_path: Path) -> None:
    host = hardware_of("h100x2").hosts[0]
    slower = replace(host.link, bytes_per_s=1e9)
    hardware = Hardware(hosts=(replace(host, link=slower),))
    assert load(tmp_path, dump_hardware(hardware)) == hardware


@settings(max_examples=50)
@given(st.integers(0, 2**70), st.floats(0, 1e25), st.floats(0, 1e6))
def test_units_lose_nothing(size: int, rate: float, seconds: float) -> None:
    assert read_quantity(write_bytes(size), SIZES) == size
    for write, units, value in (
        (write_rate, RATES, rate),
        (write_flops, FLOPS, rate),
        (write_time, TIMES, seconds),
    ):
        read = read_quantity(write(value), units)
        assert read is not None
        assert float(read) == value


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
    ],
)
def test_units_as_people_write_them(text, units, number) -> None:
    assert read_quantity(text, units) == number


@pytest.mark.parametrize(
    "text",
    ["80Gb", "80gb", "80 G B", "GB", "", "nan", "inf", "1e9999GB", "0x10", True, None, [], "80٣GB"],
)
def test_what_is_no_size(text) -> None:
    assert read_quantity(text, SIZES) is None


def test_sizes_are_written_as_they_are_meant() -> None:
    assert write_bytes(80 * 10**9) == "80GB"
    assert write_bytes(80 * 2**30) == "80GiB"
    assert write_bytes(85_520_809_984) == "85.520809984GB"
    assert write_rate(3.35e12) == "3.35TB/s"
    assert write_time(3.4e-6) == "3.4us"
    assert write_flops(989.5e12) == "989.5TFLOP/s"


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
    assert len(hardware.devices) == 12


def test_a_listed_kind_is_connected_as_a_named_one(tmp_path: Path) -> None:
    listed = load(tmp_path, "hosts: [{devices: [{type: h100, count: 4}]}]")
    assert listed.hosts == hardware_of("h100x4").hosts
    mixed = load(tmp_path, "hosts: [{devices: [{type: h100}, {type: a100-80}]}]")
    assert mixed.hosts[0].link == LINKS["pcie4"]


def test_a_device_that_no_data_sheet_describes(tmp_path: Path) -> None:
    device = load(
        tmp_path,
        """
        hosts:
        - devices:
          - {name: X1, memory: 24GiB, flops: 50TFLOP/s, bandwidth: 500GB/s, mig: true,
             compute_capability: 8.9, free: 0}
        """,
    ).devices[0]
    assert device.memory_bytes == 24 * 2**30
    assert device.usable_bytes == 0
    assert device.compute_capability == (8, 9)
    assert device.kind == "cuda"
    assert device.mig


def test_what_is_written_over_a_data_sheet_is_called_given(tmp_path: Path) -> None:
    device = load(tmp_path, "hosts: [{devices: [{type: h100, flops: 400TFLOP/s}]}]").devices[0]
    assert device.peak_flops == 400e12
    assert device.source == "given"


BAD = [
    ("hosts: []", "hosts: got [], expected a list with at least one entry"),
    ("host: 1", "unknown key 'host'; perhaps 'hosts'"),
    ("- 1", "got [1], expected keys and values (hosts, network, notes)"),
    ("", "got None, expected keys and values"),
    ("1: 2", "unknown key 1"),
    ("hosts: [", "does not parse: "),
    ("hosts: [{devices: h10x4}]", "hosts[0].devices: unknown device 'h10'; perhaps h100"),
    ("hosts: [{cores: 3}]", "hosts[0].devices is missing"),
    ("hosts: [{devices: h100, cores: 0}]", "hosts[0].cores: got 0, expected a whole number"),
    ("hosts: [{devices: h100, cores: true}]", "hosts[0].cores: got True"),
    ("hosts: [{devices: h100, count: 1.5}]", "hosts[0].count: got 1.5"),
    ("hosts: [{devices: h100, memory: -1}]", "hosts[0].memory: got -1, expected a size such as"),
    ("hosts: [{devices: h100, link: nvlnk4}]", "hosts[0].link: unknown link 'nvlnk4'"),
    ("hosts: [{devices: h100, link: 4}]", "hosts[0].link: got 4, expected keys and values"),
    (
        "hosts: [{devices: h100, link: {name: a, latency: 1us}}]",
        "hosts[0].link.bandwidth is missing; expected a rate such as",
    ),
    (
        "hosts: [{devices: h100, link: {name: a, latency: -1us, bandwidth: 1GB/s}}]",
        "hosts[0].link.latency: got '-1us', expected a time such as 5us",
    ),
    ("hosts: [{devices: h100, count: 2}]", "network is missing; 2 hosts need one"),
    ("{hosts: [{devices: h100, count: 2}], network: ndr}", "network: unknown network 'ndr'"),
    (
        "hosts: [{devices: [{type: h100, memroy: 3GB}]}]",
        "hosts[0].devices[0]: unknown key 'memroy'; perhaps 'memory'",
    ),
    (
        "hosts: [{devices: [{type: h100}, {type: h100, memory: 80 Gb}]}]",
        "hosts[0].devices[1].memory: got '80 Gb', expected a size such as 80GB or 80GiB",
    ),
    ("hosts: [{devices: [{name: x}]}]", "hosts[0].devices[0].memory is missing"),
    ("hosts: [{devices: [{memory: 3GB}]}]", "hosts[0].devices[0].name is missing"),
    ("hosts: [{devices: [{type: 3}]}]", "hosts[0].devices[0].type: got 3, expected text"),
    ("hosts: [{devices: [{type: h100, free: 81GB}]}]", "free: got '81GB', expected at most"),
    ("hosts: [{devices: [{type: h100, kind: gpu}]}]", "kind: got 'gpu', expected cuda or cpu"),
    ("hosts: [{devices: [{type: h100, mig: 1}]}]", "mig: got 1, expected true or false"),
    (
        "hosts: [{devices: [{type: h100, compute_capability: new}]}]",
        "compute_capability: got 'new', expected two numbers such as [9, 0]",
    ),
    (
        "hosts: [{devices: [{type: h100, compute_capability: [9, 0, 1]}]}]",
        "compute_capability: got [9, 0, 1]",
    ),
    ("hosts: [{devices: h100, interfaces: eth0}]", "interfaces: got 'eth0', expected a list"),
    ("hosts: [{devices: h100, count: 99999999999}]", "hosts[0]: 99999999999 devices; at most"),
    ("hosts: [{devices: [{type: h100, count: 99999999999}]}]", "devices; at most"),
    ("{hosts: [{devices: h100}], notes: {}}", "notes: got {}, expected a list of words"),
    ("hosts: [{devices: h100, memory: &a [*a]}]", "a value contains itself"),
    (
        "notes:\n"
        + "\n".join(f"- &n{i} [*n{i - 1}, *n{i - 1}]" for i in range(1, 60)).replace(
            "[*n0, *n0]", "[a, a]"
        )
        + "\nhosts: [{devices: h100}]",
        "nested deeper than 20 levels",
    ),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_bad_file_is_refused_with_file_key_and_what_was_expected(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path / "a.yaml") in message
    assert "\n" not in message
    assert len(message) < 700


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        load_hardware(str(tmp_path / "none.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        load_hardware(str(tmp_path / "folder.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_hardware(str(tmp_path / "bytes.yaml"))
    with pytest.raises(ConfigError, match="does not parse"):
        load(tmp_path, "{", "a.json")
    with pytest.raises(ConfigError, match="does not parse"):
        load(tmp_path, "[" * 100_000, "deep.json")
    with pytest.raises(ConfigError, match="does not parse"):
        load(tmp_path, "hosts: \x00", "control.yaml")
    with pytest.raises(ConfigError, match="expected at most 131072"):
        load(tmp_path, "#" * (2**17 + 1), "large.yaml")
    with pytest.raises(ConfigError, match=r"its name must end in \.yaml"):
        load(tmp_path, "hosts: []", "machine.txt")


def test_what_is_neither_a_name_nor_a_file() -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'h10'.*a file .* ends in \.yaml"):
        load_hardware("h10x2")


def test_a_number_too_large_for_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        load(tmp_path, "hosts: [{devices: h100, memory: 1e900}]")
    with pytest.raises(ConfigError, match="expected a size"):
        read_hardware({"hosts": [{"devices": "h100", "memory": float("inf")}]}, "document")
