"""Frozen parts on devices, by memory."""

from __future__ import annotations

import pytest

from gradsync.compat.elastic_gpu import FrozenPart, PartPlace, place_parts
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
    lines = ["device 0: llama; 12.0", "device 1: llama; 12.0", "device 2: qwen; 8.0"]
    assert str(placement).splitlines() == [f"{line} GB left" for line in lines]


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


@pytest.mark.parametrize("parts", [(), blocks(9, 10), (90 * GB - 1, 1)])
def test_what_fits_nowhere_is_said_in_gb(parts: tuple[int, ...]) -> None:
    whole = FrozenPart(name="llm", num_bytes=90 * GB, blocks=parts)
    with pytest.raises(ConfigError, match=r"llm \(90.0 GB\) fits nowhere.* 40.0, 30.0 GB left"):
        place_parts([whole], [40 * GB, 30 * GB])


def test_what_trains_must_fit_everywhere() -> None:
    with pytest.raises(ConfigError, match=r"not fit on device 1: .* each, 2.0 GB are missing"):
        place_parts([], [9 * GB, 5 * GB], replicated_bytes=7 * GB)
