"""Places the frozen parts of a model on devices that also train; pure, no torch.

First-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"; at most 11/9 of the
fewest bins): the largest part first, each on the first device with room. The trained part is
replicated, so its bytes are taken from every device first. If a part fits on no single device and
is a sequence of blocks, it is cut in two, between the first pair of devices that holds it, at the
cut that leaves the fuller of the two emptiest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from gradsync.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A frozen submodule."""

    name: str  # The name in `named_modules`
    num_bytes: int  # All of it, including what it needs in addition to its weights
    blocks: tuple[int, ...] = ()
    """Bytes of each block that it runs in sequence; empty: it cannot be cut. What is in no block
    stays with the first."""

    def __post_init__(self) -> None:
        if min(self.blocks, default=0) < 0 or sum(self.blocks) > self.num_bytes:
            raise ConfigError(f"part {self.name}: its blocks are larger than it, or below 0 bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlace:
    """Devices of a part."""

    devices: tuple[int, ...]  # One device, or the two it is cut between
    first_blocks: int = 0  # For a part cut in two: the number of blocks on the first device


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPlacement:
    """Places of all parts."""

    places: Mapping[str, PartPlace]  # By name of the part
    left: tuple[int, ...]  # Bytes that stay free on each device

    def describe(self) -> str:
        """One line per device: its parts, and what stays free."""
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
    parts: Sequence[FrozenPart], room: Sequence[int], *, replicated_bytes: int = 0
) -> FrozenPlacement:
    """A place for every part; parts of equal size keep their order.

    Args:
        parts: with different names.
        room: usable bytes of each device.
        replicated_bytes: other bytes on every device: the trained part, its gradients, optimizer
            state and activations.

    Raises:
        ConfigError: a part fits nowhere; says how much memory is missing.
    """
    left = [free - replicated_bytes for free in room]
    if min(left) < 0:
        device = left.index(min(left))
        raise ConfigError(
            f"what trains does not fit on device {device}: {replicated_bytes / 1e9:.1f} GB are "
            f"needed on each, {-left[device] / 1e9:.1f} GB are missing"
        )
    places: dict[str, PartPlace] = {}
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        if part.name in places:
            raise ConfigError(f"two parts are called {part.name}")
        whole = next((n for n, free in enumerate(left) if part.num_bytes <= free), None)
        place = _in_two(part, left) if whole is None else PartPlace(devices=(whole,))
        if place is None:
            raise ConfigError(_nowhere(part, left))
        places[part.name] = place
        for device, num_bytes in zip(place.devices, _shares(part, place), strict=True):
            left[device] -= num_bytes
    ordered = {part.name: places[part.name] for part in parts}
    return FrozenPlacement(places=ordered, left=tuple(left))


def _in_two(part: FrozenPart, left: Sequence[int]) -> PartPlace | None:
    for pair in combinations(range(len(left)), 2):
        found: list[tuple[int, PartPlace]] = []
        for cut in range(1, len(part.blocks)):
            place = PartPlace(devices=pair, first_blocks=cut)
            shares = zip(pair, _shares(part, place), strict=True)
            found.append((min(left[device] - share for device, share in shares), place))
        # Bytes left on the fuller device: choose the cut that leaves most.
        spare, best = max(found, key=lambda entry: entry[0], default=(-1, None))
        if spare >= 0:
            return best
    return None


def _shares(part: FrozenPart, place: PartPlace) -> tuple[int, ...]:
    """Bytes on each device of its place."""
    if len(place.devices) == 1:
        return (part.num_bytes,)
    outside = part.num_bytes - sum(part.blocks)
    first = outside + [0, *accumulate(part.blocks)][place.first_blocks]
    return first, part.num_bytes - first


def _nowhere(part: FrozenPart, left: Sequence[int]) -> str:
    most = sorted(left, reverse=True)[: 2 if len(part.blocks) > 1 else 1]
    missing = max(part.num_bytes - sum(most), 0)
    where = "roomiest device has" if len(most) == 1 else "two roomiest devices have"
    short = f"{missing / 1e9:.1f} GB are missing" if missing else "no cut between blocks fits"
    return (
        f"{part.name} ({part.num_bytes / 1e9:.1f} GB) fits nowhere: the {where} "
        f"{sum(most) / 1e9:.1f} GB left, {short}; use devices with more memory, more of them, or "
        "fewer bytes a weight"
    )
