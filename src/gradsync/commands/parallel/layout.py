"""How ranks are divided into data-parallel, pipeline and tensor groups, and which part of a GPT
each rank holds. Pure; no torch.

    dp=2,pp=2,tp=1      rank = (data index * pp + stage) * tp + shard

    ranks     0 1 2 3
    data      0 0 1 1
    stage     0 1 0 1

The fastest index belongs to the group that communicates most: tensor shards are neighbours (and so
on one host), then stages, and replicas are furthest apart.

    pp   blocks are dealt to stages in order; the embedding is on the first, norm and head on the
         last. A tied head is the embedding's weight, so it is on both ends.
    tp   heads and the SwiGLU's width are divided; embedding, norms and head are on every shard.

A part keeps the whole model's names, so two layouts' contents can be compared name by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from gradsync.checkpoint.pieces import SavedPiece, nth_piece, whole_piece
from gradsync.commands.models.config import GPTConfig
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import whole_number

EMBEDDING = "embed.weight"
COLUMNS, ROWS = 0, 1
"""Dimension of a weight (outputs, inputs) that shards divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """The place of one rank in a layout."""

    data: int  # Which replica, 0 .. dp-1
    stage: int  # Which pipeline stage, 0 .. pp-1
    shard: int  # Which tensor shard, 0 .. tp-1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of the three dimensions; their product is the number of ranks."""

    dp: int = 1  # Replicas, which divide the micro-batches of a step
    pp: int = 1  # Pipeline stages of a replica
    tp: int = 1  # Tensor shards of a stage

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one replica."""
        return self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`, 0 <= rank < `world_size`."""
        replica, shard = divmod(rank, self.tp)
        data, stage = divmod(replica, self.pp)
        return Coordinates(data=data, stage=stage, shard=shard)

    def rank(self, place: Coordinates) -> int:
        """The rank at `place`."""
        return (place.data * self.pp + place.stage) * self.tp + place.shard

    def __str__(self) -> str:
        return f"dp={self.dp},pp={self.pp},tp={self.tp}"


def parse_layout(text: str, world_size: int) -> ParallelLayout:
    """Parse `"pp=2,dp=2"` as a layout of `world_size` ranks. A missing size is 1; a missing `dp`
    takes all remaining ranks, so "" is plain data parallelism. ConfigError for other text, or
    another number of ranks."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        number = whole_number(value)
        if name not in ("dp", "pp", "tp") or not number:
            raise ConfigError(
                f"parallel: got {part[:80]!r}, expected sizes such as pp=2,dp=2 or tp=2"
            )
        sizes[name] = number
    if "dp" not in sizes:
        model_ranks = ParallelLayout(**sizes).model_ranks
        sizes["dp"] = max(world_size // model_ranks, 1)
    layout = ParallelLayout(**sizes)
    if layout.world_size != world_size:
        raise ConfigError(
            f"parallel: {layout} is {layout.world_size} ranks, but there are {world_size}: start "
            "as many as the sizes' product, or change the sizes"
        )
    return layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    divided: int | None = None
    """The dimension that tensor shards divide; None: every shard has all of it."""
    block: int | None = None  # The weight's decoder block; None for embedding, last norm and head


def weights_of(config: GPTConfig) -> tuple[Weight, ...]:
    """All parameters of the whole model, in `named_parameters` order."""
    width, hidden = config.n_embd, config.mlp_dim
    kv_width = config.num_kv_heads * config.head_dim
    kinds = ("weight", "bias") if config.bias else ("weight",)
    in_block: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
        ("attention_norm", (width,), None),
        ("attention.q", (width, width), COLUMNS),
        ("attention.k", (kv_width, width), COLUMNS),
        ("attention.v", (kv_width, width), COLUMNS),
        ("attention.out", (width, width), ROWS),
        ("mlp_norm", (width,), None),
        *(() if config.is_gpt2 else (("mlp.gate", (hidden, width), COLUMNS),)),
        ("mlp.up", (hidden, width), COLUMNS),
        ("mlp.down", (width, hidden), ROWS),
    )
    table = (config.vocab_size, width)
    found = [Weight(name=EMBEDDING, shape=table)]
    if config.is_gpt2:
        found.append(Weight(name="positions.weight", shape=(config.block_size, width)))
    found += [
        Weight(
            name=f"blocks.{block}.{name}.{kind}",
            shape=shape if kind == "weight" else shape[:1],
            divided=divided if kind == "weight" else None,
            block=block,
        )
        for block in range(config.n_layer)
        for name, shape, divided in in_block
        for kind in kinds
    ]
    found += [Weight(name=f"norm.{kind}", shape=(width,)) for kind in kinds]
    if not config.tie_head:
        found.append(Weight(name="head.weight", shape=table))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """The part of the model that one rank holds; `config` and `weights` are the whole model's."""

    config: GPTConfig
    layout: ParallelLayout
    place: Coordinates
    weights: tuple[Weight, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", weights_of(self.config))

    @property
    def is_first(self) -> bool:
        """Whether this part begins with the embedding."""
        return self.place.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this part ends with the head."""
        return self.place.stage == self.layout.pp - 1

    @property
    def counts_loss(self) -> bool:
        """Whether this rank reports losses, which only ranks with the head know."""
        return self.is_last and self.place.shard == 0

    @property
    def blocks(self) -> range:
        """The part's decoder blocks, numbered as in the whole model."""
        return share(self.config.n_layer, self.place.stage, self.layout.pp)

    @property
    def other_end(self) -> int | None:
        """The rank at the other end that has a copy of this rank's embedding; None without one."""
        layout = self.layout
        if not self.config.tie_head or layout.pp == 1 or not (self.is_first or self.is_last):
            return None
        return layout.rank(replace(self.place, stage=layout.pp - 1 if self.is_first else 0))

    def pieces(self) -> dict[str, SavedPiece]:
        """This rank's box of each parameter that it holds, by name, in the whole model's order."""
        tp, shard = self.layout.tp, self.place.shard
        return {
            weight.name: nth_piece(weight.shape, weight.divided, shard, tp)
            for weight in self.weights
            if self._holds(weight)
        }

    def owned(self) -> dict[str, SavedPiece]:
        """The `pieces` that this rank saves and counts: in every replica, one rank owns each box of
        the model."""
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


def check_divisible(config: GPTConfig, layout: ParallelLayout) -> None:
    """ConfigError if the model has fewer blocks than stages, heads or widths that shards do not
    divide, or parts of GPT-2."""
    if config.is_gpt2 and layout.model_ranks > 1:
        raise ConfigError(
            "parallel: only models of architecture llama are split; this one is gpt2: drop parallel"
        )
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
    pieces: Mapping[str, SavedPiece], whole: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, SavedPiece]:
    """The pieces of whole tensors (name, shape) that belong to the parameters in `pieces`; the part
    of a name after the last "/" is the parameter. A tensor of the parameter's shape is cut like it,
    any other is not cut (the number of steps)."""
    found = {}
    for name, shape in whole:
        piece = pieces.get(name.rpartition("/")[2])
        if piece is not None:
            found[name] = piece if tuple(shape) == piece.whole else whole_piece(shape)
    return found


def place_tensors(
    part: ModelPart, cut: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, SavedPiece]:
    """The inverse: the positions in whole tensors of the tensors that `part` saves, from the (name,
    shape) of each tensor it holds. A tensor without its parameter's shape is the same on all
    shards: the first shard saves it."""
    owned, found = part.owned(), {}
    for name, shape in cut:
        piece = owned.get(name.rpartition("/")[2])
        if piece is not None and tuple(shape) == piece.shape:
            found[name] = piece
        elif piece is not None and part.place.shard == 0:
            found[name] = whole_piece(shape)
    return found


def norm_places(part: ModelPart, block: int) -> tuple[dict[str, int], int]:
    """Offsets, by name, of the norms of the parameters that `part` owns in the vector that ranks
    sum; and the length of the vector.

    The gradient's norm is the root of a sum of squares over fixed blocks of `block` elements
    (`reducer.py`). A rank of a split model writes the norms that it owns to their places in a
    vector of zeros, and ranks sum the vectors. Adding zeros is exact, so all ranks get one rank's
    blocks in one rank's order, and without tensor shards one rank's norm, bit for bit.
    """
    owned, places, end = part.owned(), {}, 0
    for weight in part.weights:
        count = part.layout.tp if weight.divided is not None else 1
        for shard in range(count):
            piece = nth_piece(weight.shape, weight.divided, shard, count)
            if owned.get(weight.name) == piece:
                places[weight.name] = end
            end += -(-prod(piece.shape) // block)
    return places, end


def join_states(part: ModelPart, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON of the whole model's optimizer (`checkpoint/optimizer_state.py`) from those of all
    parts; `part` is any of them. Parameters are in the whole model's order."""
    shapes = {weight.name: weight.shape for weight in part.weights}
    entries: dict[str, Any] = {}
    for state in states:
        entries |= state["params"]
    groups = []
    for index, group in enumerate(states[0]["groups"]):
        named = {name for state in states for name in state["groups"][index]["params"]}
        groups.append({**group, "params": [name for name in shapes if name in named]})
    params = {name: {**entries[name], "shape": list(shapes[name])} for name in shapes}
    return {"class": states[0]["class"], "groups": groups, "params": params}


def state_of_part(part: ModelPart, state: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of the optimizer of `part`, from the whole model's."""
    pieces = part.pieces()
    params = {
        name: {**entry, "shape": list(pieces[name].shape)}
        for name, entry in state["params"].items()
        if name in pieces
    }
    groups = [
        {**group, "params": [name for name in group["params"] if name in pieces]}
        for group in state["groups"]
    ]
    return {"class": state["class"], "groups": groups, "params": params}
