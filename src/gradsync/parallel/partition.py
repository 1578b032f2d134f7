"""Which part of a GPT each rank of a layout holds; pure, no torch.

    pp   blocks are dealt to stages in order; the embedding is on the first, norm and head on the
         last. A tied head is the embedding's weight, so that one lies on both ends.
    tp   heads and the SwiGLU's width are divided; embedding, norms and head are on every shard.

A part keeps the whole model's names, so what two layouts hold can be compared name by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradsync.checkpoint.reshard import Piece, nth_piece, whole_piece
from gradsync.data.plan import share
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.parallel.layout import Coordinates, Layout

EMBEDDING = "embed.weight"
COLUMNS, ROWS = 0, 1
"""Dimension of a weight (outputs, inputs) that shards divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    divided: int | None
    """The dimension that tensor shards divide; None: each has all of it."""
    block: int | None
    """The decoder block it belongs to; None for embedding, last norm and head."""


def weights_of(config: GPTConfig) -> tuple[Weight, ...]:
    """All parameters of the whole model, in `named_parameters` order."""
    width, hidden = config.n_embd, config.mlp_dim
    kv_width = config.num_kv_heads * config.head_dim
    in_block: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
        ("attention_norm", (width,), None),
        ("attention.q", (width, width), COLUMNS),
        ("attention.k", (kv_width, width), COLUMNS),
        ("attention.v", (kv_width, width), COLUMNS),
        ("attention.out", (width, width), ROWS),
        ("mlp_norm", (width,), None),
        ("mlp.gate", (hidden, width), COLUMNS),
        ("mlp.up", (hidden, width), COLUMNS),
        ("mlp.down", (width, hidden), ROWS),
    )
    table = (config.vocab_size, width)
    found = [Weight(name=EMBEDDING, shape=table, divided=None, block=None)]
    found += [
        Weight(name=f"blocks.{block}.{name}.weight", shape=shape, divided=divided, block=block)
        for block in range(config.n_layer)
        for name, shape, divided in in_block
    ]
    found.append(Weight(name="norm.weight", shape=(width,), divided=None, block=None))
    if not config.tie_head:
        found.append(Weight(name="head.weight", shape=table, divided=None, block=None))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part of the model that one rank holds."""

    config: GPTConfig
    """Sizes of the whole model."""
    layout: Layout
    place: Coordinates
    weights: tuple[Weight, ...] = field(init=False)
    """Parameters of the whole model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", weights_of(self.config))

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.place.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the head."""
        return self.place.stage == self.layout.pp - 1

    @property
    def counts_loss(self) -> bool:
        """Whether this rank tells its leaves' losses: one of those that know them."""
        return self.is_last and self.place.shard == 0

    @property
    def blocks(self) -> range:
        """Its decoder blocks, numbered as in the whole model."""
        return share(self.config.n_layer, self.place.stage, self.layout.pp)

    @property
    def tied_ends(self) -> tuple[int, ...]:
        """Ranks with a copy of this rank's embedding at another stage, and this rank: () where
        there is nothing to keep equal."""
        layout, place = self.layout, self.place
        if not self.config.tie_head or layout.pp == 1 or not (self.is_first or self.is_last):
            return ()
        stages = (0, layout.pp - 1)
        return tuple(
            layout.rank(Coordinates(data=place.data, stage=stage, shard=place.shard))
            for stage in stages
        )

    def pieces(self) -> dict[str, Piece]:
        """Its box of each parameter that it holds, by name, in the whole model's order."""
        tp, shard = self.layout.tp, self.place.shard
        return {
            weight.name: nth_piece(weight.shape, weight.divided, shard, tp)
            for weight in self.weights
            if self._holds(weight)
        }

    def owned(self) -> dict[str, Piece]:
        """The `pieces` that this rank saves and counts: each box of the model is one rank's
        of every replica."""
        divided = {weight.name for weight in self.weights if weight.divided is not None}
        return {
            name: piece
            for name, piece in self.pieces().items()
            if (name in divided or self.place.shard == 0) and (name != EMBEDDING or self.is_first)
        }

    def _holds(self, weight: Weight) -> bool:
        if weight.block is not None:
            return weight.block in self.blocks
        if weight.name == EMBEDDING:
            return self.is_first or (self.is_last and self.config.tie_head)
        return self.is_last


def check_divisible(config: GPTConfig, layout: Layout) -> None:
    """Whether the model can be divided so.

    Raises:
        ConfigError: more stages than blocks, or heads or widths that shards do not divide.
    """
    if layout.pp > config.n_layer:
        raise ConfigError(
            f"parallel: pp={layout.pp} stages need a block each, the model has {config.n_layer}"
        )
    for size, what in (
        (config.n_head, "query heads"),
        (config.num_kv_heads, "key and value heads"),
        (config.mlp_dim, "columns of the SwiGLU"),
    ):
        if size % layout.tp:
            raise ConfigError(f"parallel: tp={layout.tp} does not divide the model's {size} {what}")


def cut_tensors(
    pieces: Mapping[str, Piece], whole: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, Piece]:
    """The pieces of whole tensors that belong to parameters: weights, or what an optimizer keeps.

    Args:
        pieces: of parameters, by name.
        whole: (name, shape); the name's part after the last "/" is the parameter. A tensor of the
            parameter's shape is cut as it is, any other not at all (the number of steps).

    Returns:
        those whose parameter is in `pieces`.
    """
    found = {}
    for name, shape in whole:
        piece = pieces.get(_parameter(name))
        if piece is not None:
            found[name] = piece if tuple(shape) == piece.whole else whole_piece(shape)
    return found


def place_tensors(part: Part, cut: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Piece]:
    """The other way round: where the tensors that `part` saves lie in whole ones.

    Args:
        part: this rank's.
        cut: (name, shape) of its tensors, as it holds them. What is not of its parameter's shape
            is the same on all shards, of which the first saves it.
    """
    owned, found = part.owned(), {}
    for name, shape in cut:
        piece = owned.get(_parameter(name))
        if piece is not None and tuple(shape) == piece.shape:
            found[name] = piece
        elif piece is not None and part.place.shard == 0:
            found[name] = whole_piece(shape)
    return found


def _parameter(name: str) -> str:
    return name.rpartition("/")[2]
