"""Places the frozen parts of a model on devices that also train; pure, no torch.

First-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"; at most 11/9 of the
fewest bins): the largest part first, each on the first device with room. The trained part is
replicated, so its bytes are taken from every device first. If a part fits on no single device and
is a sequence of blocks, it is cut in two, between the first pair of devices that holds it, at the
cut that leaves the fuller of the two emptiest.

`place_submodels` computes how many devices a replica needs: as few as its parts fit on. Published
for one to four GPUs and a pair of frozen language models: data parallel if both fit with the
trained part, else a model split, with three GPUs 2 + 1, with four two replicas of two. Here it
follows from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import accumulate, combinations
from typing import Any

from gradsync.commands.plan.description import Hardware
from gradsync.commands.plan.hardware_file import SIZES, read_quantity
from gradsync.errors import ConfigError, RunError
from gradsync.runtime.bounds import whole_number

MARGIN = 0.1
"""Fraction of a device's usable memory that stays free: the memory model is accurate to 10 %."""
_PARAMETERS = "params"
_BYTES_OF_A_WEIGHT = 2  # Frozen weights are stored in 16 bits
_MOST_BLOCKS = 10_000


def gb(num_bytes: float) -> str:
    """Gigabytes of 10**9 bytes, as in data sheets."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A frozen submodule."""

    name: str  # The name in `named_modules`
    num_bytes: int  # All of it, including what it needs in addition to its weights
    blocks: tuple[int, ...] = ()
    """Bytes of each block that it runs in sequence; empty: it cannot be cut. What is in no block
    stays with the first."""

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or min(self.blocks, default=0) < 0:
            raise ConfigError(f"part {self.name}: bytes must not be negative")
        if sum(self.blocks) > self.num_bytes:
            raise ConfigError(f"part {self.name}: its blocks are larger than it")


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
    if not room:
        raise ConfigError("placement needs a device")
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
        whole = (n for n, free in enumerate(left) if part.num_bytes <= free)
        device = next(whole, None)
        place = _in_two(part, left) if device is None else PartPlace(devices=(device,))
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


def parse_submodel(text: str) -> FrozenPart:
    """`NAME:SIZE`, or `NAME:SIZE/BLOCKS` for one that may be cut between equal blocks."""
    name, _, rest = text.partition(":")
    size, cut, count = rest.partition("/")
    units = SIZES
    if size.endswith(_PARAMETERS):
        size, units = size.removesuffix(_PARAMETERS), {"": Decimal(_BYTES_OF_A_WEIGHT)}
    num_bytes = int(read_quantity(size, units) or 0)
    blocks = whole_number(count, _MOST_BLOCKS) or 0
    if not name or num_bytes < 1 or (cut and blocks < 1):
        raise ConfigError(
            f"--submodel: got {text[:80]!r}, expected NAME:SIZE, such as llama:16GB, "
            "llama:8e9params, or llama:16GB/32 for 32 blocks"
        )
    return FrozenPart(
        name=name, num_bytes=num_bytes, blocks=(num_bytes // blocks,) * blocks if cut else ()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Submodels:
    """Replicas, and the places of each one's parts."""

    groups: tuple[tuple[int, ...], ...]  # Devices of each replica, counted over all hosts
    placements: tuple[FrozenPlacement, ...]  # Each replica's; devices are numbered within it
    idle: tuple[int, ...]  # Devices in no replica
    trained_bytes: int  # Bytes of the trained part, on the first device of each replica

    def words(self) -> str:
        """The strategy, under the published table's name."""
        replicas, most = len(self.groups), max(map(len, self.groups))
        if most == 1:
            return "data parallel" if replicas > 1 else "single device"
        if replicas > 1:
            return "data parallel x model split"
        return "model split" if most == 2 else f"hybrid: one replica over {most} devices"

    def lines(self) -> list[str]:
        """For people: the strategy, then each kind of replica."""
        found = [f"{self.words()}; what trains takes {gb(self.trained_bytes)} of a replica"]
        alike: dict[str, list[str]] = {}
        for group, placement in zip(self.groups, self.placements, strict=True):
            alike.setdefault(placement.describe(), []).append("+".join(map(str, group)))
        for text, groups in alike.items():
            found.append(f"replica{'s' * (len(groups) > 1)} on {', '.join(groups)}:")
            found += [f"  {line}" for line in text.splitlines()]
        if self.idle:
            found.append(f"not needed: device {', '.join(map(str, self.idle))}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "strategy": self.words(),
            "replicas": [list(group) for group in self.groups],
            "idle": list(self.idle),
            "trained_bytes": self.trained_bytes,
            "placements": [asdict(placement) for placement in self.placements],
        }


def place_submodels(
    parts: Sequence[FrozenPart], trained_bytes: int, hardware: Hardware
) -> Submodels:
    """As many replicas as fit, each on neighbours of one host. Other devices stay free: a replica
    that fits is not faster on more. RunError if not even a whole host has room for one replica."""
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"--submodel: two parts have one name: {', '.join(names)}")
    sizes = [len(host.devices) for host in hardware.hosts]
    ends = list(accumulate(sizes))
    room = [int((1 - MARGIN) * device.usable_bytes) for device in hardware.devices]
    trouble = ""
    for each in range(1, max(sizes) + 1):
        groups = [
            tuple(range(start, start + each))
            for end, size in zip(ends, sizes, strict=True)
            for start in range(end - size, end - each + 1, each)
        ]
        try:
            placements = [
                _place_replica(parts, trained_bytes, [room[n] for n in group]) for group in groups
            ]
        except ConfigError as error:
            trouble = str(error)
            continue
        used = {device for group in groups for device in group}
        return Submodels(
            groups=tuple(groups),
            placements=tuple(placements),
            idle=tuple(device for device in range(sum(sizes)) if device not in used),
            trained_bytes=trained_bytes,
        )
    raise RunError(f"--submodel: {trouble}")


def _place_replica(
    parts: Sequence[FrozenPart], trained_bytes: int, room: Sequence[int]
) -> FrozenPlacement:
    if room[0] < trained_bytes:
        missing = gb(trained_bytes - room[0])
        raise ConfigError(
            f"what trains needs {gb(trained_bytes)} of {gb(room[0])}: {missing} short"
        )
    return place_parts(parts, [room[0] - trained_bytes, *room[1:]])
