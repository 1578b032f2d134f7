"""Bytes of activations: what forward keeps for backward, counted tensor by tensor; no torch.

Symbols as in `models/gpt.py`: N tokens of a leaf, C width, G = K x key/value heads, F width of the
SwiGLU, H heads, V vocabulary; e is 2 under bf16 and fp16 autocast, 4 in fp32.

A block keeps, in bytes a token (after Korthikanti et al. 2022, arXiv 2205.05198, section 4, counted
anew for this decoder, whose norms are RMSNorm in fp32 and whose attention is a fused kernel):

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

from gradsync.hardware.workload import Workload
from gradsync.models.config import GPTConfig

FP32 = 4
_HALF = 2


def compute_bytes(work: Workload) -> int:
    """Bytes of an element where products are computed."""
    return FP32 if work.dtype == "fp32" else _HALF


def block_matrix_elements(model: GPTConfig) -> int:
    """Elements of the matrices of one block."""
    width, kv_width = model.n_embd, model.num_kv_heads * model.head_dim
    return 2 * width * width + 2 * width * kv_width + 3 * width * model.mlp_dim


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one rank that holds `blocks` blocks in `tp` shards, for one leaf; bytes.

    [Note: Tensor shards] Heads, the SwiGLU's width and the weights' copies are divided by `tp`.
    The residual stream and what is computed from all of it (norms, inputs of q, k, v, gate and up)
    is whole on every shard, as in Korthikanti et al. without sequence parallelism.
    """

    work: Workload
    blocks: int
    tp: int = 1

    @property
    def weight_copies(self) -> int:
        """16-bit copies of one block's matrices; 0 in fp32."""
        if self.work.dtype == "fp32":
            return 0
        return _HALF * block_matrix_elements(self.work.model) // self.tp

    @property
    def block(self) -> int:
        """All that one block keeps, see the module's table."""
        work, model = self.work, self.work.model
        size, width = compute_bytes(work), model.n_embd
        kv_width = model.num_kv_heads * model.head_dim
        whole = 2 * (2 * FP32 * width + FP32)
        whole += (2 * FP32 if work.dtype == "fp32" else 5 * size) * width
        parts = size * (2 * width + 2 * kv_width) + FP32 * model.n_head + 4 * size * model.mlp_dim
        per_token = whole + parts // self.tp + 2 * self._dropout_bytes(size)
        return work.leaf_tokens * per_token + self.weight_copies

    @property
    def stream(self) -> int:
        """The residual stream at one place, fp32."""
        return FP32 * self.work.leaf_tokens * self.work.model.n_embd

    @property
    def kept(self) -> int:
        """By all blocks. With checkpointing only the stream at the beginning of each
        (arXiv 1604.06174)."""
        each = self.stream if self.work.activation_checkpointing else self.block
        embedding = self.work.leaf_tokens * self._dropout_bytes(FP32)
        return self.blocks * each + embedding

    @property
    def recomputed(self) -> int:
        """One block's, made again in backward; 0 without checkpointing."""
        return self.block if self.work.activation_checkpointing and self.blocks else 0

    @property
    def last_norm(self) -> int:
        """The norm before the head, and the head's input."""
        size = compute_bytes(self.work)
        return self.work.leaf_tokens * ((2 * FP32 + size) * self.work.model.n_embd + FP32)

    def _dropout_bytes(self, size: int) -> int:
        """A token's mask: of the dtype of what is masked on a CPU, bool on CUDA."""
        if not self.work.model.dropout:
            return 0
        return self.work.model.n_embd * (1 if self.work.kind == "cuda" else size)
