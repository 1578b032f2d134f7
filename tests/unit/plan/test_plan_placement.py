"""Frozen parts on devices, by memory, and how many devices a replica takes."""

from __future__ import annotations

import pytest

from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.plan.placement import (
    FrozenPart,
    PartPlace,
    parse_submodel,
    place_parts,
    place_submodels,
)
from gradsync.errors import ConfigError

GB = 10**9


def blocks(count: int, each: int) -> tuple[int, ...]:
    return (each * GB,) * count


def test_the_largest_goes_first_and_onto_the_first_device_with_room() -> None:
    parts = [FrozenPart(name="small", num_bytes=10), FrozenPart(name="large", num_bytes=60)]
    placement = place_parts(parts, [50, 70, 70])
    assert placement.places == {"small": PartPlace(devices=(0,)), "large": PartPlace(devices=(1,))}
    assert placement.left == (40, 10, 70)


def test_what_trains_is_taken_from_every_device() -> None:
    part = FrozenPart(name="frozen", num_bytes=60)
    assert place_parts([part], [70, 90]).places["frozen"] == PartPlace(devices=(0,))
    placement = place_parts([part], [70, 90], replicated_bytes=20)
    assert placement.places["frozen"] == PartPlace(devices=(1,))
    assert placement.left == (50, 10)


def test_three_devices_two_and_one() -> None:
    """The hybrid row of the strategy table: one submodel over two devices, another on the third."""
    llama = FrozenPart(name="llama", num_bytes=48 * GB, blocks=blocks(16, 3))
    qwen = FrozenPart(name="qwen", num_bytes=28 * GB, blocks=blocks(14, 2))
    placement = place_parts([qwen, llama], [40 * GB] * 3, replicated_bytes=4 * GB)
    assert placement.places == {
        "qwen": PartPlace(devices=(2,)),
        "llama": PartPlace(devices=(0, 1), first_blocks=8),
    }
    assert placement.left == (12 * GB, 12 * GB, 8 * GB)
    assert placement.describe() == (
        "device 0: llama (in two); 12.0 GB left\n"
        "device 1: llama (in two); 12.0 GB left\n"
        "device 2: qwen; 8.0 GB left"
    )


def test_the_cut_suits_unequal_devices() -> None:
    part = FrozenPart(
        name="frozen", num_bytes=11, blocks=(2, 2, 2, 2, 2)
    )  # 1 is outside of the blocks
    placement = place_parts([part], [5, 9])
    assert placement.places["frozen"] == PartPlace(devices=(0, 1), first_blocks=1)
    assert placement.left == (2, 1)


def test_the_same_placement_whatever_the_order_of_equals() -> None:
    names = ("a", "b", "c")
    placement = place_parts([FrozenPart(name=name, num_bytes=3) for name in names], [6, 6])
    assert [placement.places[name].devices for name in names] == [(0,), (0,), (1,)]


def test_what_fits_nowhere_is_said_in_gb() -> None:
    whole = FrozenPart(name="llm", num_bytes=90 * GB)
    with pytest.raises(ConfigError, match=r"llm \(90.0 GB\) fits nowhere: .* 50.0 GB are missing"):
        place_parts([whole], [40 * GB, 30 * GB])
    cut = FrozenPart(name="llm", num_bytes=90 * GB, blocks=blocks(9, 10))
    with pytest.raises(ConfigError, match=r"two roomiest have 70.0 GB left, 20.0 GB are missing"):
        place_parts([cut], [40 * GB, 30 * GB])
    coarse = FrozenPart(name="llm", num_bytes=60 * GB, blocks=(60 * GB - 1, 1))
    with pytest.raises(ConfigError, match="no cut between blocks fits"):
        place_parts([coarse], [40 * GB, 30 * GB])


def test_what_trains_must_fit_everywhere() -> None:
    with pytest.raises(ConfigError, match=r"not fit on device 1: .* each, 2.0 GB are missing"):
        place_parts([], [9 * GB, 5 * GB], replicated_bytes=7 * GB)


def test_bad_parts() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        FrozenPart(name="a", num_bytes=-1)
    with pytest.raises(ConfigError, match="blocks are larger"):
        FrozenPart(name="a", num_bytes=3, blocks=(2, 2))
    with pytest.raises(ConfigError, match="two parts are called a"):
        place_parts([FrozenPart(name="a", num_bytes=1)] * 2, [5])
    with pytest.raises(ConfigError, match="needs a device"):
        place_parts([], [])


PAIR = ("llama:8.03e9params", "qwen:7.62e9params")
"""The published case: two frozen language models, 31.3 GB in 16 bits, beside a small one."""


@pytest.mark.parametrize(
    ("hardware", "parts", "words", "groups"),
    [
        ("h100", PAIR, "single device", ((0,),)),
        ("h100x2", PAIR, "data parallel", ((0,), (1,))),
        ("h100x4", PAIR, "data parallel", ((0,), (1,), (2,), (3,))),
        ("a100-40x2", PAIR, "model split", ((0, 1),)),
        ("a100-40x3", PAIR, "model split", ((0, 1),)),
        ("a100-40x4", PAIR, "data parallel x model split", ((0, 1), (2, 3))),
        ("a100-40x3@2", PAIR, "data parallel x model split", ((0, 1), (3, 4))),
        (
            "a100-40x3",  # one submodel over two devices, another on the third
            ("llama:60GB/80", "qwen:30GB"),
            "hybrid: one replica over 3 devices",
            ((0, 1, 2),),
        ),
    ],
)
def test_published_table_of_two_submodels(
    hardware: str, parts: tuple[str, ...], words: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    machine = load_hardware(hardware)
    found = place_submodels([parse_submodel(each) for each in parts], 8 * GB, machine)
    assert (found.words(), found.groups) == (words, groups)
    used = {device for group in groups for device in group}
    assert used | set(found.idle) == set(range(len(machine.devices)))
    if words.startswith("hybrid"):
        assert len(found.placements[0].places["llama"].devices) == 2
        assert found.placements[0].places["qwen"].devices == (2,)


@pytest.mark.parametrize("text", ["llama", ":16GB", "llama:", "llama:0GB", "llama:-1GB", "a:1GB/0"])
def test_submodel_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME:SIZE, such as llama:16GB"):
        parse_submodel(text)
