"""Frozen submodels beside a model that trains: how many devices a replica needs; pure, no torch.

Published for one to four GPUs and a pair of frozen language models: data parallel where both fit
beside what trains, else a model split, with three GPUs 2 + 1, with four two replicas of two. Here
it follows from sizes: a replica takes as few devices as its parts have room on (`place_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from gradsync.errors import ConfigError, RunError
from gradsync.plan.choice.choose import MARGIN
from gradsync.plan.choice.words import gb
from gradsync.plan.described.section import SIZES, read_quantity
from gradsync.plan.description import Hardware
from gradsync.plan.placement import Part, Placement, place_parts
from gradsync.runtime.bounds import whole_number

_PARAMETERS = "params"
_BYTES_OF_A_WEIGHT = 2
_MOST_BLOCKS = 10_000
"""Frozen weights are held in 16 bits."""
_EXPECTED = (
    "expected NAME:SIZE, such as llama:16GB, llama:8e9params, or llama:16GB/32 for 32 blocks"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Submodels:
    """Replicas, and where each part of one is."""

    groups: tuple[tuple[int, ...], ...]
    """Devices of each replica, counted over all hosts."""
    placements: tuple[Placement, ...]
    """Each replica's; devices are counted within it."""
    idle: tuple[int, ...]
    """Devices of no replica."""
    trained_bytes: int
    """Taken by what trains, on the first device of each replica."""

    def words(self) -> str:
        """The strategy, as the published table names it."""
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
        """As JSON can hold it."""
        return {
            "strategy": self.words(),
            "replicas": [list(group) for group in self.groups],
            "idle": list(self.idle),
            "trained_bytes": self.trained_bytes,
            "placements": [asdict(placement) for placement in self.placements],
        }


def parse_submodel(text: str) -> Part:
    """`NAME:SIZE`, or `NAME:SIZE/BLOCKS` for one that may be cut between equal blocks.

    Raises:
        ConfigError: malformed.
    """
    name, _, rest = text.partition(":")
    size, cut, count = rest.partition("/")
    if size.endswith(_PARAMETERS):
        number = read_quantity(size.removesuffix(_PARAMETERS), {"": Decimal(_BYTES_OF_A_WEIGHT)})
    else:
        number = read_quantity(size, SIZES)
    num_bytes = int(number or 0)
    blocks = whole_number(count, _MOST_BLOCKS) or 0
    if not name or num_bytes < 1 or (cut and blocks < 1):
        raise ConfigError(f"--submodel: got {text[:80]!r}, {_EXPECTED}")
    return Part(
        name=name, num_bytes=num_bytes, blocks=(num_bytes // blocks,) * blocks if cut else ()
    )


def place_submodels(parts: Sequence[Part], trained_bytes: int, hardware: Hardware) -> Submodels:
    """As many replicas as there is room for; what is left of a host's devices stays free, since a
    replica that has room is not faster on more.

    Args:
        parts: frozen.
        trained_bytes: what trains, with all that belongs to it.
        hardware: a replica stays on one host.

    Raises:
        ConfigError: two parts of one name.
        RunError: not even a whole host has room for one replica.
    """
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"--submodel: two parts have one name: {', '.join(names)}")
    sizes = [len(host.devices) for host in hardware.hosts]
    room = [int((1 - MARGIN) * device.usable_bytes) for device in hardware.devices]
    trouble = ""
    for each in range(1, max(sizes) + 1):
        groups = _groups(sizes, each)
        try:
            placements = [
                _place(parts, trained_bytes, [room[n] for n in group]) for group in groups
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


def _groups(sizes: Sequence[int], each: int) -> list[tuple[int, ...]]:
    """Neighbours on a host, `each` at a time."""
    groups, first = [], 0
    for size in sizes:
        starts = range(first, first + size - each + 1, each)
        groups += [tuple(range(start, start + each)) for start in starts]
        first += size
    return groups


def _place(parts: Sequence[Part], trained_bytes: int, room: Sequence[int]) -> Placement:
    if room[0] < trained_bytes:
        missing = gb(trained_bytes - room[0])
        raise ConfigError(
            f"what trains needs {gb(trained_bytes)} of {gb(room[0])}: {missing} short"
        )
    return place_parts(parts, [room[0] - trained_bytes, *room[1:]])
