"""A Llama-style decoder.

Shape suffixes: B batch, T time (tokens), C channels (width), H query heads, G key/value heads,
K head size, F hidden width of the SwiGLU, V vocabulary.

    tokens_BT -> embed -> n_layer x { + attention(norm(x)), + SwiGLU(norm(x)) } -> norm -> head

[Note: a head without weights]
With `tie_head` there is no second parameter that must be kept equal: the output layer multiplies by
the embedding's own weight. So it is counted, reduced, clipped and saved once by construction, and
survives `to_empty`, which separates parameters that are merely shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.loss import loss_sum_in_rows

_INIT_STD = 0.02


def rope_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, always computed in fp32 on the CPU.

    Half the frequencies are written twice, side by side, for the rotate-half convention
    (arXiv 2104.09864, in the layout of Llama).

    Returns:
        cos_TK, sin_TK: `(block_size, head_dim)`, fp32.
    """
    # Named device and dtype: neither a default device nor a default dtype may reach these values.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float()
    frequency = 1.0 / (config.rope_theta ** (exponent / config.head_dim))
    position = torch.arange(config.block_size, dtype=torch.float32, device="cpu")
    angle_TK = torch.outer(position, frequency).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) by its position's angle; the result has x's dtype."""
    low, high = x_BHTK.chunk(2, dim=-1)
    # The tables are fp32, so the products are: in bf16, with 8 bits, far positions would blur.
    turned = x_BHTK * cos_TK + torch.cat((-high, low), dim=-1) * sin_TK
    return turned.to(x_BHTK.dtype)


def initial_weight(
    name: str, shape: tuple[int, ...], n_layer: int, generator: torch.Generator
) -> Tensor:
    """The start value of one parameter of a model with `n_layer` blocks, fp32 on the CPU.

    Normal with deviation 0.02; the projections into the residual stream are scaled by
    `1 / sqrt(2 n_layer)` so that its variance does not grow with depth (GPT-2); gains are one, and
    take nothing from the generator.
    """
    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    into_residual = name.endswith(("attention.out.weight", "down.weight"))
    std = _INIT_STD / math.sqrt(2 * n_layer) if into_residual else _INIT_STD
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
    return drawn.normal_(0.0, std, generator=generator)


class KeyValueCache:
    """Keys and values that one attention has computed for the positions so far: for generation."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Positions so far."""
        return 0 if self._kept is None else self._kept[0].shape[2]

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, with these at the end."""
        if self._kept is not None:
            old_k, old_v = self._kept
            k_BGTK, v_BGTK = torch.cat((old_k, k_BGTK), dim=2), torch.cat((old_v, v_BGTK), dim=2)
        self._kept = k_BGTK, v_BGTK
        return self._kept


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.num_kv_heads
        kv_width = config.num_kv_heads * config.head_dim
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k = nn.Linear(config.n_embd, kv_width, bias=False)
        self.v = nn.Linear(config.n_embd, kv_width, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self, x_BTC: Tensor, cos_TK: Tensor, sin_TK: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C); where `cache` holds positions already, T is 1."""
        q_BHTK = self.q(x_BTC).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k_BGTK = self.k(x_BTC).unflatten(-1, (self.n_kv_head, -1)).transpose(1, 2)
        v_BGTK = self.v(x_BTC).unflatten(-1, (self.n_kv_head, -1)).transpose(1, 2)
        q_BHTK = rotate(q_BHTK, cos_TK, sin_TK)
        k_BGTK = rotate(k_BGTK, cos_TK, sin_TK)
        is_causal = True
        if cache is not None:
            is_causal = cache.length == 0  # a single new position may look at all others
            k_BGTK, v_BGTK = cache.extend(k_BGTK, v_BGTK)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            is_causal=is_causal,
            enable_gqa=self.n_kv_head != self.n_head,
        )
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, arXiv 2002.05202."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.n_embd, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.n_embd, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C), (B, T, F) inside."""
        hidden_BTF = F.silu(self.gate(x_BTC)) * self.up(x_BTC)
        return self.down(hidden_BTF)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTC: Tensor, cos_TK: Tensor, sin_TK: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        attended_BTC = self.attention(self.attention_norm(x_BTC), cos_TK, sin_TK, cache)
        x_BTC = x_BTC + self.dropout(attended_BTC)
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


class GPT(nn.Module):
    """The decoder. Same weights for the same seed, whatever the rank or the device.

    Weights are drawn on the CPU from a generator of their own, so building a model neither reads
    nor moves torch's global random state; they are then moved to the default device. Under
    `torch.device("meta")` nothing is drawn: call `to_empty(device=…)`, then `init_weights`.

    Args:
        config: the shape.
        seed: of the initial weights.
        activation_checkpointing: recompute each block in backward instead of keeping its
            activations (arXiv 1604.06174); gradients keep the same bits.
        loss_rows: compute the loss of so many positions at a time, see [Note: Loss in rows]; None
            computes it at once.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 0,
        activation_checkpointing: bool = False,
        loss_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.loss_rows = loss_rows
        home = torch.get_default_device()
        with torch.device("meta"):  # layers would draw their own, rank-dependent start values
            self.embed = nn.Embedding(config.vocab_size, config.n_embd)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
            # [Note: a head without weights]
            self.head = None
            if not config.tie_head:
                self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            table = torch.empty(config.block_size, config.head_dim, dtype=torch.float32)
        self.register_buffer("rope_cos", table, persistent=False)
        self.register_buffer("rope_sin", table.clone(), persistent=False)
        if home.type != "meta":
            self.to_empty(device=home)
            self.init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw all weights anew, in `named_parameters` order, and fill the rotary tables.

        Args:
            generator: a CPU generator.
        """
        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(initial_weight(name, shape, self.config.n_layer, generator))
        for buffer, table in zip(
            (self.rope_cos, self.rope_sin), rope_tables(self.config), strict=True
        ):
            buffer.copy_(table)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits of the next token at every position, or the loss where targets are given.

        Args:
            tokens_BT: token ids, int64, `T <= block_size`.
            targets_BT: as for `loss_sum`.

        Returns:
            logits_BTV, or the summed loss, fp32, 0-dim.

        Raises:
            ConfigError: more tokens than `block_size`.
        """
        x_BTC = self.features(tokens_BT)
        if targets_BT is None:
            return self.logits(x_BTC)
        if self.loss_rows is None:
            return loss_sum(self.logits(x_BTC), targets_BT)
        return loss_sum_in_rows(
            x_BTC.flatten(0, 1), self._head_weight, targets_BT.flatten(), self.loss_rows
        )

    def features(self, tokens_BT: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Input of the head: `tokens_BT -> x_BTC`, after the last norm. Raises as `forward`.

        Args:
            tokens_BT: as for `forward`.
            caches: one for each block; they hold the positions before these, and then these too.
                Where they hold some, one token at a time.
        """
        first = 0 if caches is None else caches[0].length
        T = first + tokens_BT.shape[1]
        if self.config.block_size < T:
            raise ConfigError(
                f"sequence of {T} tokens: this model was built for block_size="
                f"{self.config.block_size}; shorten it or build a longer model"
            )
        cos_TK, sin_TK = self.rope_cos[first:T], self.rope_sin[first:T]
        x_BTC = self.dropout(self.embed(tokens_BT))
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for number, block in enumerate(self.blocks):
            if recompute:
                x_BTC = checkpoint(block, x_BTC, cos_TK, sin_TK, use_reentrant=False)
            elif caches is not None:
                x_BTC = block(x_BTC, cos_TK, sin_TK, caches[number])
            else:
                x_BTC = block(x_BTC, cos_TK, sin_TK)
        return self.norm(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """The head alone: `x_BTC -> logits_BTV`; any number of positions."""
        return F.linear(x_BTC, self._head_weight)

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor, ignore_index: int = -100) -> Tensor:
    """Cross-entropy summed over the targets that count, in nats.

    A sum, not a mean: sums of leaves add up to the sum of the batch however it was cut, and one
    division by the global number of targets makes the exact mean.

    Args:
        logits_BTV: any float dtype; computed in fp32.
        targets_BT: int64 token ids; `ignore_index` where there is nothing to predict.

    Returns:
        fp32, 0-dim.
    """
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1),  # a bf16 sum over thousands of targets stops growing
        targets_BT.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
