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
from typing import NamedTuple

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
    num_params: int  # Elements of all parameters
    root_params: int  # Elements outside of the blocks


@cache
def rank_shape(model: GPTConfig, layout: ParallelLayout, stage: int) -> RankShape:
    """The shape of a rank on this stage; ConfigError where the model cannot be divided so."""
    check_divisible(model, layout)
    part = ModelPart(config=model, layout=layout, place=Coordinates(data=0, stage=stage, shard=0))
    sizes = {name: piece.numel for name, piece in part.pieces().items()}
    first, total = f"blocks.{part.blocks.start}.", sum(sizes.values())
    block_params = sum(size for name, size in sizes.items() if name.startswith(first))
    return RankShape(
        layout=layout,
        stage=stage,
        sizes=tuple(sizes.values()),
        block_params=block_params,
        blocks=len(part.blocks),
        table_params=model.vocab_size * model.n_embd,
        is_tied=model.tie_head and EMBEDDING in sizes and layout.pp == 1,
        num_params=total,
        root_params=total - len(part.blocks) * block_params,
    )


class Activations(NamedTuple):
    """Bytes that one rank has of one leaf."""

    element: int  # One, where products are computed
    weight_copies: int  # 16-bit copies of one block's matrices; 0 in fp32
    block: int  # All that one block keeps, see the module's table
    stream: int  # The residual stream at one place, fp32
    kept: int
    """By all blocks. With checkpointing only the stream at the beginning of each (arXiv
    1604.06174)."""
    recomputed: int  # One block's, made again in backward; 0 without checkpointing
    last_norm: int  # The norm before the head, and the head's input


def activations(work: Workload, blocks: int, tp: int = 1) -> Activations:
    """The bytes of a rank that holds `blocks` blocks in `tp` shards.

    [Note: Tensor shards] Heads, the SwiGLU's width and the weights' copies are divided by `tp`.
    The residual stream and what is computed from all of it (norms, inputs of q, k, v, gate and up)
    is whole on every shard, as in Korthikanti et al. without sequence parallelism.
    """
    model, width, tokens = work.model, work.model.n_embd, work.leaf_tokens
    kv_width, is_fp32 = model.num_kv_heads * model.head_dim, work.dtype == "fp32"
    size = FP32 if is_fp32 else _HALF

    def mask(element: int) -> int:
        """A token's dropout: of the dtype of what is masked on a CPU, bool on CUDA."""
        return width * (1 if work.kind == "cuda" else element) if model.dropout else 0

    matrices = 2 * width * width + 2 * width * kv_width + 3 * width * model.mlp_dim
    copies = 0 if is_fp32 else _HALF * matrices // tp
    whole = 2 * (2 * FP32 * width + FP32) + (2 * FP32 if is_fp32 else 5 * size) * width
    parts = size * (2 * width + 2 * kv_width) + FP32 * model.n_head + 4 * size * model.mlp_dim
    block = tokens * (whole + parts // tp + 2 * mask(size)) + copies
    stream, recomputes = FP32 * tokens * width, work.activation_checkpointing
    return Activations(
        element=size,
        weight_copies=copies,
        block=block,
        stream=stream,
        kept=blocks * (stream if recomputes else block) + tokens * mask(FP32),
        recomputed=block if recomputes and blocks else 0,
        last_norm=tokens * ((2 * FP32 + size) * width + FP32),
    )
