"""How ranks are divided into data-parallel, pipeline and tensor groups; pure, no torch.

    dp=2,pp=2,tp=1      rank = (data index * pp + stage) * tp + shard

    ranks     0 1 2 3
    data      0 0 1 1
    stage     0 1 0 1

The fastest index is the one that talks most: tensor shards are neighbours (and so on one host),
then stages, and replicas are furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gradsync.errors import ConfigError
from gradsync.runtime.bounds import whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """The place of one rank in a layout."""

    data: int
    """Which replica, 0 .. dp-1."""
    stage: int
    """Which pipeline stage, 0 .. pp-1."""
    shard: int
    """Which tensor shard, 0 .. tp-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the three dimensions; their product is the number of ranks.

    Raises:
        ConfigError: a size that is not a positive integer.
    """

    dp: int = 1
    """Replicas, which share out the leaves of a step."""
    pp: int = 1
    """Pipeline stages of a replica."""
    tp: int = 1
    """Tensor shards of a stage."""

    def __post_init__(self) -> None:
        for f in fields(self):
            size = getattr(self, f.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"parallel: {f.name} must be a positive integer; got {size!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one replica."""
        return self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands, 0 <= rank < `world_size`."""
        replica, shard = divmod(rank, self.tp)
        data, stage = divmod(replica, self.pp)
        return Coordinates(data=data, stage=stage, shard=shard)

    def rank(self, place: Coordinates) -> int:
        """The rank at `place`."""
        return (place.data * self.pp + place.stage) * self.tp + place.shard

    def __str__(self) -> str:
        return f"dp={self.dp},pp={self.pp},tp={self.tp}"


def parse_layout(text: str, world_size: int) -> Layout:
    """`"pp=2,dp=2"` as a layout. What is not named is 1; a missing `dp` is what is left.

    Args:
        text: empty for plain data parallelism.
        world_size: ranks there are.

    Raises:
        ConfigError: malformed, an unknown name, one given twice, or sizes whose product is not
            `world_size`.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        number = whole_number(value)
        if name not in ("dp", "pp", "tp") or number is None:
            raise ConfigError(
                f"parallel: got {part[:80]!r}, expected sizes such as pp=2,dp=2 or tp=2"
            )
        if name in sizes:
            raise ConfigError(f"parallel: {name} is given twice in {text!r}")
        sizes[name] = number
    if "dp" not in sizes:
        model_ranks = Layout(**sizes).model_ranks
        sizes["dp"] = max(world_size // model_ranks, 1)
    layout = Layout(**sizes)
    if layout.world_size != world_size:
        raise ConfigError(
            f"parallel: {layout} is {layout.world_size} ranks, but there are {world_size}: start "
            "as many as the sizes' product, or change the sizes"
        )
    return layout
