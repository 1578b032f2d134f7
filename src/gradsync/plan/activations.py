"""A rank's parameters, and the activations that forward keeps for backward; no torch.

Activations are counted tensor by tensor. A block keeps, in bytes a token, with C width, G = K x
key/value heads, F width of the SwiGLU, H heads, and e bytes of an element where products are
computed (2 under autocast, else 4); after Korthikanti et al. 2022, arXiv 2205.05198, section 4,
counted anew for this decoder, whose norms are RMSNorm in fp32 and whose attention is fused:

    two norms          2 (4 C + 4 C + 4)   the residual stream, the normalised, 1 / root mean square
    inputs of q, k, v  3 e C               autocast casts each time; fp32: one C for all, 4 C
    attention          e (2 C + 2 G) + 4 H q, k, v, its result (which `out` needs too), logsumexp
    inputs of gate, up 2 e C               likewise; fp32: 4 C
    SwiGLU             4 e F               gate, silu(gate), up, their product

and under autocast a 16-bit copy of each weight that it multiplies by, however many tokens there
are. A test counts the same with torch's saved-tensor hooks, to the byte. The count is the CPU's: on
CUDA the fused RMSNorm does not keep the normalised input, so there it is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gradsync.models.config import GPTConfig
from gradsync.parallel.layout import (
    EMBEDDING,
    Coordinates,
    ModelPart,
    ParallelLayout,
    check_divisible,
)
from gradsync.plan.workload import Workload

FP32, _HALF = 4, 2
"""Bytes of an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShape:
    """The parameters of a rank on one stage of a layout; all shards of a stage are alike."""

    layout: ParallelLayout
    stage: int
    sizes: tuple[int, ...]  # Elements of each parameter, in `named_parameters` order
    block_params: int  # Elements of one of its blocks
    blocks: int
    table_params: int  # Elements of the embedding, and of the head
    is_tied: bool  # Whether both are one parameter of this rank

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def root_params(self) -> int:
        """Elements outside of the blocks."""
        return self.num_params - self.blocks * self.block_params


@cache
def rank_shape(model: GPTConfig, layout: ParallelLayout, stage: int) -> RankShape:
    """The shape of a rank on this stage; ConfigError where the model cannot be divided so."""
    check_divisible(model, layout)
    part = ModelPart(config=model, layout=layout, place=Coordinates(data=0, stage=stage, shard=0))
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


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes kept by one rank that holds `blocks` blocks in `tp` shards, for one leaf.

    [Note: Tensor shards] Heads, the SwiGLU's width and the weights' copies are divided by `tp`.
    The residual stream and what is computed from all of it (norms, inputs of q, k, v, gate and up)
    is whole on every shard, as in Korthikanti et al. without sequence parallelism.
    """

    work: Workload
    blocks: int
    tp: int = 1

    @property
    def element(self) -> int:
        """Bytes of one where products are computed."""
        return FP32 if self.work.dtype == "fp32" else _HALF

    @property
    def _kv_width(self) -> int:
        return self.work.model.num_kv_heads * self.work.model.head_dim

    @property
    def weight_copies(self) -> int:
        """16-bit copies of one block's matrices; 0 in fp32."""
        model = self.work.model
        if self.element == FP32:
            return 0
        width = model.n_embd
        elements = 2 * width * width + 2 * width * self._kv_width + 3 * width * model.mlp_dim
        return _HALF * elements // self.tp

    @property
    def block(self) -> int:
        """All that one block keeps, see the module's table."""
        model, size, width = self.work.model, self.element, self.work.model.n_embd
        whole = 2 * (2 * FP32 * width + FP32)
        whole += (2 * FP32 if size == FP32 else 5 * size) * width
        parts = size * (2 * width + 2 * self._kv_width)
        parts += FP32 * model.n_head + 4 * size * model.mlp_dim
        per_token = whole + parts // self.tp + 2 * self._dropout_bytes(size)
        return self.work.leaf_tokens * per_token + self.weight_copies

    @property
    def stream(self) -> int:
        """The residual stream at one place, fp32."""
        return FP32 * self.work.leaf_tokens * self.work.model.n_embd

    @property
    def kept(self) -> int:
        """By all blocks. With checkpointing only the stream at the beginning of each
        (arXiv 1604.06174)."""
        each = self.stream if self.work.activation_checkpointing else self.block
        return self.blocks * each + self.work.leaf_tokens * self._dropout_bytes(FP32)

    @property
    def recomputed(self) -> int:
        """One block's, made again in backward; 0 without checkpointing."""
        return self.block if self.work.activation_checkpointing and self.blocks else 0

    @property
    def last_norm(self) -> int:
        """The norm before the head, and the head's input."""
        per_token = (2 * FP32 + self.element) * self.work.model.n_embd + FP32
        return self.work.leaf_tokens * per_token

    def _dropout_bytes(self, size: int) -> int:
        """A token's mask: of the dtype of what is masked on a CPU, bool on CUDA."""
        if not self.work.model.dropout:
            return 0
        return self.work.model.n_embd * (1 if self.work.kind == "cuda" else size)
