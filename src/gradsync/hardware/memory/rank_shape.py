"""Which parameters one rank holds, as numbers of elements; pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gradsync.models.config import GPTConfig
from gradsync.parallel.layout import Coordinates, Layout
from gradsync.parallel.partition import EMBEDDING, Part, check_divisible


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShape:
    """Of a rank on one stage of a layout; all shards of a stage are alike."""

    layout: Layout
    stage: int
    sizes: tuple[int, ...]
    """Elements of each parameter, in `named_parameters` order."""
    block_params: int
    """Elements of one block."""
    blocks: int
    """How many there are."""
    table_params: int
    """Elements of the embedding, and of the head."""
    is_tied: bool
    """Whether both are one parameter of this rank."""

    @property
    def has_embedding(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.layout.pp - 1

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def root_params(self) -> int:
        """Elements outside of the blocks."""
        return self.num_params - self.blocks * self.block_params


@cache
def rank_shape(model: GPTConfig, layout: Layout, stage: int) -> RankShape:
    """The rank's on stage `stage`.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    check_divisible(model, layout)
    part = Part(config=model, layout=layout, place=Coordinates(data=0, stage=stage, shard=0))
    sizes = {name: piece.numel for name, piece in part.pieces().items()}
    first = f"blocks.{part.blocks.start}."
    return RankShape(
        layout=layout,
        stage=stage,
        sizes=tuple(sizes.values()),
        block_params=sum(size for name, size in sizes.items() if name.startswith(first)),
        blocks=len(part.blocks),
        table_params=model.vocab_size * model.n_embd,
        is_tied=model.tie_head and EMBEDDING in sizes and layout.pp == 1,
    )
