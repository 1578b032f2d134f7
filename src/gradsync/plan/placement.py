"""Which device holds which frozen part of a model; pure, no torch.

First-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"; at most 11/9 of the
fewest bins): the largest part first, each onto the first device with room. What trains is
replicated, so its bytes are taken from every device beforehand. A part with room on no single
device, if it is a sequence of blocks, is cut in two between the first pair of devices that holds
it, where the fuller of the two is left emptiest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from gradsync.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A frozen submodule.

    Raises:
        ConfigError: a size that is no size.
    """

    name: str
    """As `named_modules` calls it."""
    num_bytes: int
    """All of it, and what it needs beside its weights."""
    blocks: tuple[int, ...] = ()
    """Bytes of each of the blocks that it runs one after the other; empty: it cannot be cut. What
    is in no block stays with the first."""

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or min(self.blocks, default=0) < 0:
            raise ConfigError(f"part {self.name}: bytes must not be negative")
        if sum(self.blocks) > self.num_bytes:
            raise ConfigError(f"part {self.name}: its blocks are larger than it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a part is."""

    devices: tuple[int, ...]
    """One device, or the two it is cut between."""
    first_blocks: int = 0
    """For a part in two: how many blocks are on the first device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where every part is."""

    places: Mapping[str, Place]
    """By name of the part."""
    left: tuple[int, ...]
    """Bytes that stay free on each device."""

    def describe(self) -> str:
        """One line a device: its parts, and what stays free."""
        lines = []
        for device, free in enumerate(self.left):
            held = [
                name if len(place.devices) == 1 else f"{name} (in two)"
                for name, place in self.places.items()
                if device in place.devices
            ]
            lines.append(f"device {device}: {', '.join(held) or '-'}; {free / 1e9:.1f} GB left")
        return "\n".join(lines)


def place_parts(
    parts: Sequence[Part], room: Sequence[int], *, replicated_bytes: int = 0
) -> Placement:
    """A place for every part.

    Args:
        parts: with different names; equal sizes keep their order.
        room: bytes that may be taken on each device.
        replicated_bytes: what every device holds beside: what trains, its gradients, optimizer
            state and activations.

    Raises:
        ConfigError: no device; two parts of one name; a part has room nowhere, and how much is
            missing.
    """
    if not room:
        raise ConfigError("placement needs a device")
    left = [free - replicated_bytes for free in room]
    if min(left) < 0:
        device = left.index(min(left))
        raise ConfigError(
            f"what trains does not fit on device {device}: {replicated_bytes / 1e9:.1f} GB are "
            f"needed on each, {-left[device] / 1e9:.1f} GB are missing"
        )
    places: dict[str, Place] = {}
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        if part.name in places:
            raise ConfigError(f"two parts are called {part.name}")
        fitting = (device for device, free in enumerate(left) if part.num_bytes <= free)
        device = next(fitting, None)
        place = _in_two(part, left) if device is None else Place(devices=(device,))
        if place is None:
            raise ConfigError(_nowhere(part, left))
        places[part.name] = place
        for device, num_bytes in zip(place.devices, _shares(part, place), strict=True):
            left[device] -= num_bytes
    ordered = {part.name: places[part.name] for part in parts}
    return Placement(places=ordered, left=tuple(left))


def _in_two(part: Part, left: Sequence[int]) -> Place | None:
    for pair in combinations(range(len(left)), 2):
        found: list[tuple[int, Place]] = []
        for cut in range(1, len(part.blocks)):
            place = Place(devices=pair, first_blocks=cut)
            shares = zip(pair, _shares(part, place), strict=True)
            found.append((min(left[device] - share for device, share in shares), place))
        # What is left on the fuller device: the cut that leaves most.
        spare, best = max(found, key=lambda entry: entry[0], default=(-1, None))
        if spare >= 0:
            return best
    return None


def _shares(part: Part, place: Place) -> tuple[int, ...]:
    """Bytes on each device of its place."""
    if len(place.devices) == 1:
        return (part.num_bytes,)
    outside = part.num_bytes - sum(part.blocks)
    first = outside + [0, *accumulate(part.blocks)][place.first_blocks]
    return first, part.num_bytes - first


def _nowhere(part: Part, left: Sequence[int]) -> str:
    most = sorted(left, reverse=True)
    missing = part.num_bytes - most[0]
    where = f"the roomiest of {len(left)} devices has {most[0] / 1e9:.1f} GB left"
    if len(part.blocks) > 1 and len(most) > 1:
        missing = max(part.num_bytes - most[0] - most[1], 0)
        where = f"the two roomiest have {(most[0] + most[1]) / 1e9:.1f} GB left"
    short = f"{missing / 1e9:.1f} GB are missing" if missing else "no cut between blocks fits"
    return (
        f"{part.name} ({part.num_bytes / 1e9:.1f} GB) fits nowhere: {where}, {short}; use devices "
        "with more memory, more of them, or fewer bytes a weight"
    )
