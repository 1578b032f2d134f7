"""Networks by name and out of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.errors import ConfigError
from gradsync.plan.catalog import NETWORKS
from gradsync.plan.hardware_file import load_network


def test_every_name_has_a_source() -> None:
    for name, link in NETWORKS.items():
        assert load_network(name) is link
        assert link.source
        assert link.name == name


def test_rates_are_those_of_the_names() -> None:
    assert load_network("infiniband-ndr").bytes_per_s == 50e9
    assert load_network("ethernet-10g").bytes_per_s == pytest.approx(1.25e9 * 1448 / 1538)
    assert load_network("wan-1g-50ms").alpha_s == 0.05


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sites.yaml"
    path.write_text("latency: 20ms\nbandwidth: 10Gbit/s\nper_host: true\n")
    link = load_network(str(path))
    assert (link.name, link.alpha_s, link.bytes_per_s) == ("sites", 0.02, 1.25e9)
    assert link.per_host
    assert link.source == "file sites.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency: 1ms", "bandwidth is missing; expected a rate"),
        ("bandwidth: 1GB/s", "latency is missing; expected a time"),
        ("latency: soon\nbandwidth: 1GB/s", "latency: got 'soon', expected a time"),
        ("latency: -1ms\nbandwidth: 1GB/s", "latency: got '-1ms'"),
        ("latency: 1ms\nbandwidth: 0", "bandwidth: got 0, expected a rate such as"),
        ("latency: 1ms\nbandwidth: 1ms", "bandwidth: got '1ms'"),
        ("latency: 1ms\nbandwith: 1GB/s", "unknown key 'bandwith'; perhaps 'bandwidth'"),
        ("latency: 1\nbandwidth: 1\nper_host: 2", "per_host: got 2, expected true or false"),
        ("latency: 1\nbandwidth: 1\nname: 7", "name: got 7, expected text"),
        ("- 1", "got [1], expected keys and values (name, latency"),
        ("a: [", "does not parse"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_network(str(path))
    assert str(caught.value).startswith(f"network file {path}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neither_a_name_nor_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown network 'infiniband-ndx'; perhaps you meant"):
        load_network("infiniband-ndx")
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load_network(str(tmp_path / "missing.yaml"))
