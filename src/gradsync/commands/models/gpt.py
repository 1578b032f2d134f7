"""A Llama-style decoder, or GPT-2's, its loss, and text from it.

Shape suffixes: B batch, T time (tokens), C channels (width), H query heads, G key/value heads,
K head size, F hidden width of the SwiGLU or GELU, V vocabulary.

    tokens_BT -> embed -> n_layer x { + attention(norm(x)), + SwiGLU(norm(x)) } -> norm -> head

With `architecture="gpt2"` (Radford et al. 2019) positions are added to the embedding instead of
rotating, norms are LayerNorms, and a GELU replaces the SwiGLU.

[Note: a head without weights]
With `tie_head` there is no second parameter to keep equal: the output layer multiplies by the
embedding's weight. So by construction it is counted, reduced, clipped and saved once, and it
survives `to_empty`, which separates parameters that are merely shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_sum
from gradsync.commands.models.config import GPTConfig
from gradsync.data.loader import EvalLoader
from gradsync.errors import ConfigError, RunError
from gradsync.sync.step_metadata import LossSum

Autocast = AbstractContextManager[Any]
"""The mixed precision of a forward."""
Cache = list[Tensor]
"""Keys and values of the positions that one attention has seen, for generation; empty at first."""
_INIT_STD = 0.02


def rope_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, always computed in fp32 on the CPU.

    Half the frequencies are written twice, side by side, for the rotate-half convention
    (arXiv 2104.09864, in the layout of Llama): cos_TK, sin_TK, T is `block_size`. The first half
    of the sines is negated, see `rotate`.
    """
    # Device and dtype are explicit, so that torch's defaults do not affect these values.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float()
    frequency = 1.0 / (config.rope_theta ** (exponent / config.head_dim))
    position = torch.arange(config.block_size, dtype=torch.float32, device="cpu")
    angle_TL = torch.outer(position, frequency)
    cos_TL, sin_TL = angle_TL.cos(), angle_TL.sin()
    return torch.cat((cos_TL, cos_TL), dim=1), torch.cat((-sin_TL, sin_TL), dim=1)


def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) by its position's angle; the result has x's dtype."""
    low, high = x_BTHK.chunk(2, dim=-1)
    # The tables are fp32, so the products are too: in bf16, with 8 bits, far positions would blur.
    # The first half of sin_TK is negative, which avoids negating `high`.
    turned = x_BTHK * cos_TK[:, None] + torch.cat((high, low), dim=-1) * sin_TK[:, None]
    return turned.to(x_BTHK.dtype)


def initial_weight(
    name: str, shape: tuple[int, ...], n_layer: int, generator: torch.Generator
) -> Tensor:
    """The initial value of one parameter of a model with `n_layer` blocks, fp32 on the CPU.

    Normal with deviation 0.02. Projections into the residual stream are scaled by
    `1 / sqrt(2 n_layer)`, so that its variance does not grow with depth (GPT-2). Gains are one,
    biases zero; both draw nothing from the generator.
    """
    if len(shape) < 2:
        value = 0.0 if name.endswith(".bias") else 1.0
        return torch.full(shape, value, dtype=torch.float32, device="cpu")
    into_residual = name.endswith(("attention.out.weight", "down.weight"))
    std = _INIT_STD / math.sqrt(2 * n_layer) if into_residual else _INIT_STD
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
    return drawn.normal_(0.0, std, generator=generator)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; rotary positions except for GPT-2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.num_kv_heads
        self.is_rotary = not config.is_gpt2
        kv_width = config.num_kv_heads * config.head_dim
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.k = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.v = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self, x_BTC: Tensor, cos_TK: Tensor, sin_TK: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C); if `cache` already holds positions, T is 1."""
        q_BTHK = self.q(x_BTC).unflatten(-1, (self.n_head, -1))
        k_BTGK = self.k(x_BTC).unflatten(-1, (self.n_kv_head, -1))
        v_BGTK = self.v(x_BTC).unflatten(-1, (self.n_kv_head, -1)).transpose(1, 2)
        if self.is_rotary:  # both at once: each operation is a launch
            both = rotate(torch.cat((q_BTHK, k_BTGK), dim=2), cos_TK, sin_TK)
            q_BTHK, k_BTGK = both.split((self.n_head, self.n_kv_head), dim=2)
        q_BHTK, k_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)
        is_causal = True
        if cache is not None:
            if cache:
                is_causal = False  # a single new position may attend to all others
                k_BGTK = torch.cat((cache[0], k_BGTK), dim=2)
                v_BGTK = torch.cat((cache[1], v_BGTK), dim=2)
            cache[:] = k_BGTK, v_BGTK
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, is_causal=is_causal, enable_gqa=self.n_kv_head != self.n_head
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


class GELU(nn.Module):
    """`down(gelu(up(x)))`, the exact GELU of arXiv 1606.08415."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.mlp_dim, bias=config.bias)
        self.down = nn.Linear(config.mlp_dim, config.n_embd, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C), (B, T, F) inside."""
        return self.down(F.gelu(self.up(x_BTC)))


def make_norm(config: GPTConfig) -> nn.Module:
    """The norm before each part of a block, and before the head."""
    if config.is_gpt2:
        return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=config.norm_eps)


class Block(nn.Module):
    """Attention and SwiGLU or GELU, each with a norm before it and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = GELU(config) if config.is_gpt2 else SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTC: Tensor, cos_TK: Tensor, sin_TK: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        normed_BTC = narrowed(self.attention_norm(x_BTC))
        x_BTC = x_BTC + self.dropout(self.attention(normed_BTC, cos_TK, sin_TK, cache))
        return x_BTC + self.dropout(self.mlp(narrowed(self.mlp_norm(x_BTC))))


def narrowed(x: Tensor) -> Tensor:
    """`x` in autocast's dtype, cast once: otherwise each layer that reads it would cast it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _Undrawn(TorchFunctionMode):
    """Skips initialisation of new weights. ("meta" would work too, but makes torch import sympy and
    its compiler, a second and a half.)"""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


class GPT(nn.Module):
    """The decoder. The same seed gives the same weights, whatever the rank or the device.

    Weights are drawn on the CPU from a separate generator, so building a model neither reads nor
    advances torch's global random state; then they move to the default device. Under
    `torch.device("meta")` nothing is drawn.

    Args:
        activation_checkpointing: recompute each block in backward instead of keeping its
            activations (arXiv 1604.06174); gradients keep the same bits.
    """

    read_after: ClassVar[Mapping[str, str]] = {"head": "norm", "positions": "embed"}
    """Modules whose weights the forward reads, each with the module that is called before it."""
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self, config: GPTConfig, *, seed: int = 0, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        with _Undrawn():  # layers would draw rank-dependent initial values
            self.embed = nn.Embedding(config.vocab_size, config.n_embd)
            self.positions = None
            if config.is_gpt2:
                self.positions = nn.Embedding(config.block_size, config.n_embd)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.norm = make_norm(config)
            # [Note: a head without weights]
            self.head = None
            if not config.tie_head:
                self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            turned = 0 if config.is_gpt2 else config.block_size
            table = torch.empty(turned, config.head_dim, dtype=torch.float32)
        self.register_buffer("rope_cos", table, persistent=False)
        self.register_buffer("rope_sin", table.clone(), persistent=False)
        if table.device.type == "meta":
            return
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                shape = tuple(parameter.shape)
                parameter.copy_(initial_weight(name, shape, config.n_layer, generator))
        if not config.is_gpt2:
            self.rope_cos, self.rope_sin = (t.to(table.device) for t in rope_tables(config))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, logits_BTV. Token ids are int64; ConfigError
        if T exceeds `block_size`."""
        return self.logits(self.features(tokens_BT))

    def features(self, tokens_BT: Tensor, caches: Sequence[Cache] = ()) -> Tensor:
        """Input of the head: `tokens_BT -> x_BTC`, after the last norm.

        `caches`, one per block, hold the earlier positions, and afterwards these too. If they hold
        some, only one token is allowed at a time.
        """
        first = caches[0][0].shape[2] if caches and caches[0] else 0
        T = first + tokens_BT.shape[1]
        if self.config.block_size < T:
            raise ConfigError(
                f"sequence of {T} tokens: this model was built for block_size="
                f"{self.config.block_size}; shorten it or build a longer model"
            )
        x_BTC = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions.weight[first:T]
        return self.norm(self.through(self.blocks, self.dropout(x_BTC), first, caches))

    def through(
        self, blocks: Iterable[nn.Module], x_BTC: Tensor, at: int = 0, caches: Sequence[Cache] = ()
    ) -> Tensor:
        """`x_BTC` after some of the blocks; `at` is the position of its first token."""
        cos_TK, sin_TK = (t[at : at + x_BTC.shape[1]] for t in (self.rope_cos, self.rope_sin))
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for number, block in enumerate(blocks):
            if recompute:
                x_BTC = checkpoint(block, x_BTC, cos_TK, sin_TK, use_reentrant=False)
            else:
                x_BTC = block(x_BTC, cos_TK, sin_TK, caches[number] if caches else None)
        return x_BTC

    def logits(self, x_BTC: Tensor) -> Tensor:
        """The head alone: `x_BTC -> logits_BTV`; any number of positions."""
        owner = self.embed if self.head is None else self.head
        return F.linear(x_BTC, owner.weight)


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy summed over the targets that count, in nats.

    A sum, not a mean: sums of micro-batches add up to the batch's sum however it is cut, and one
    division by the global number of targets gives the exact mean. Targets are int64 token ids, or
    -100, torch's default, for no target. Computed in fp32; 0-dim.
    """
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1),  # a bf16 sum over thousands of targets stops growing
        targets_BT.flatten(),
        reduction="sum",
    )


@torch.no_grad()
def evaluate(
    model: GPT,
    loader: EvalLoader,
    comm: Communicator,
    autocast: Autocast,
    *,
    equal_forwards: bool = False,
) -> float:
    """Mean loss per target over the evaluation set, nats, the same on all ranks. Every sample
    counts once, with no padded duplicates.

    It calls the model, not its wrapper, whose forward would communicate. With `equal_forwards` all
    ranks call the model equally often and discard some results: if parameters are sharded, a
    forward takes all ranks.
    """
    was_training = model.training
    model.eval()
    device = model.embed.weight.device
    total, samples = LossSum(device), 0
    try:
        for mine in loader:
            with autocast:
                loss = loss_sum(model(mine.inputs), mine.targets)
            total.add(loss, mine.num_targets)
            samples += mine.num_samples
        for _ in range(loader.most - len(loader) if equal_forwards else 0):
            with autocast:
                model(torch.zeros((1, 1), dtype=torch.int64, device=device))
    finally:
        model.train(was_training)
    return mean_over_ranks(total, samples, loader, comm)


def mean_over_ranks(total: LossSum, samples: int, loader: EvalLoader, comm: Communicator) -> float:
    """The mean loss per target of what all ranks have added. Ranks may have had different numbers
    of micro-batches, and have not communicated: one all-reduce sums loss, targets and samples.

    Raises:
        RunError: the number of samples counted is not that of the set, or no target counts.
    """
    *summed, num_samples = all_sum(comm, *total.message(), samples)
    total_loss, num_targets = total.over_ranks(comm, summed)
    if num_samples != loader.total_samples:
        raise RunError(
            f"evaluation counted {num_samples:.0f} samples, the set has {loader.total_samples}"
        )
    if not num_targets:
        raise RunError("the evaluation set has no target that counts: all of them are -100")
    return float(total_loss) / num_targets


@torch.no_grad()
def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> list[int]:
    """`prompt_ids` and `max_new_tokens` more; the same call on the same kind of device gives the
    same.

    A token costs a forward over one position, because keys and values of earlier ones are kept.
    After `block_size` tokens it costs a forward over the last `block_size`: the window slides, and
    deeper layers' kept values come from positions that it no longer contains.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample only among the k most likely; None: among all.
        seed: of the draws.

    Raises:
        ConfigError: an empty prompt, an id outside the vocabulary, temperature < 0, top_k < 1.
    """
    ids, vocab_size = [int(token) for token in prompt_ids], model.config.vocab_size
    if not ids or not all(0 <= token < vocab_size for token in ids):
        raise ConfigError(f"the prompt must be token ids of 0..{vocab_size - 1}, at least one")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ConfigError(
            f"temperature must be 0 or more, top_k at least 1; got {temperature}, {top_k}"
        )
    generator = torch.Generator().manual_seed(seed)
    device = model.embed.weight.device
    caches: list[Cache] = [[] for _ in model.blocks]
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if len(ids) <= model.config.block_size:
                first = caches[0][0].shape[2] if caches[0] else 0
                new_BT = torch.tensor([ids[first:]], device=device)
                x_BTC = model.features(new_BT, caches)
            else:
                context_BT = torch.tensor([ids[-model.config.block_size :]], device=device)
                x_BTC = model.features(context_BT)
            logits_V = model.logits(x_BTC[:, -1])[0].float().cpu()
            if temperature == 0:
                ids.append(int(logits_V.argmax()))
                continue
            kept, index = logits_V.topk(min(top_k or vocab_size, vocab_size))
            chosen = torch.multinomial((kept / temperature).softmax(-1), 1, generator=generator)
            ids.append(int(index[chosen]))
    finally:
        model.train(was_training)
    return ids
