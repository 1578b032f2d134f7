"""The shape of a decoder (`Fixed`: no flag sets it), its arithmetic, and presets. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Fixed

from gradsync.core.files import check_name
from gradsync.errors import ConfigError

_HIDDEN_MULTIPLE = 64
_GPT2_VOCAB = 50_257


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention. Or
    GPT-2's, as in nanoGPT: LayerNorm, learned positions, the exact GELU.

    Raises:
        ConfigError: a size that is not a positive integer, heads that do not divide the width or
            each other, an odd head size (rotary positions turn pairs), dropout outside [0, 1),
            biases or grouped heads in the other architecture.
    """

    n_layer: int = 4  # Decoder blocks.
    n_head: int = 4  # Query heads; each is `n_embd / n_head` wide.
    n_kv_head: Fixed[int | None] = None
    """Key and value heads, shared by groups of query heads (arXiv 2305.13245); default:
    `n_head`."""
    n_embd: int = 256  # Width of the residual stream.
    vocab_size: int = 256  # Number of token ids.
    block_size: int = 256  # Longest sequence, in tokens.
    hidden_dim: Fixed[int | None] = None
    """Width inside the SwiGLU; default: 8/3 of `n_embd`, rounded up to a multiple of 64. gpt2:
    inside the GELU; default: 4 times `n_embd`."""
    dropout: float = 0.0
    """Probability of zeroing an element of the embeddings and of each branch's output."""
    tie_head: Fixed[bool] = True
    """Whether the output layer uses the embedding's weights (arXiv 1608.05859)."""
    rope_theta: Fixed[float] = 10_000.0  # Base of the rotary wave lengths (arXiv 2104.09864).
    norm_eps: Fixed[float] = 1e-5
    """Added to the mean square inside each RMSNorm (arXiv 1910.07467), to LayerNorm's variance."""
    architecture: Fixed[Literal["llama", "gpt2"]] = "llama"
    """llama: RMSNorm, rotary positions, SwiGLU. gpt2: LayerNorm, learned positions, GELU."""
    bias: Fixed[bool] = False  # gpt2: whether the norms and all matrices but the head have biases.

    def __post_init__(self) -> None:
        names = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
        names += tuple(n for n in ("n_kv_head", "hidden_dim") if getattr(self, n) is not None)
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: got {value!r}, expected a positive integer")
        width, heads, gpt2 = self.n_embd, self.n_head, self.is_gpt2
        rules = {
            f"n_embd must be a multiple of n_head; got {width} and {heads}": width % heads == 0,
            f"architecture: got {self.architecture!r}, expected llama or gpt2": (
                self.architecture in ("llama", "gpt2")
            ),
            "bias: got True, but only architecture gpt2 has biases": gpt2 or not self.bias,
            f"n_kv_head: got {self.n_kv_head}, but architecture gpt2 has as many as n_head": (
                not gpt2 or self.num_kv_heads == heads
            ),
            "the head size n_embd / n_head must be even for rotary positions": (
                gpt2 or self.head_dim % 2 == 0
            ),
            f"n_head must be a multiple of n_kv_head; got {heads} and {self.n_kv_head}": (
                heads % self.num_kv_heads == 0
            ),
            f"dropout: got {self.dropout}, expected 0 <= dropout < 1": 0 <= self.dropout < 1,
            "rope_theta and norm_eps must be positive": self.rope_theta > 0 and self.norm_eps > 0,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ConfigError(rule)

    @property
    def is_gpt2(self) -> bool:
        """Whether the decoder has the parts of GPT-2, not those of Llama."""
        return self.architecture == "gpt2"

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def mlp_dim(self) -> int:
        """Width inside the SwiGLU or the GELU, with the default resolved."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        if self.is_gpt2:
            return 4 * self.n_embd
        wanted = -(-8 * self.n_embd // 3)
        return -(-wanted // _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE

    def num_params(self) -> int:
        """Number of trained values; a tied head counts once."""
        width, kv_width = self.n_embd, self.num_kv_heads * self.head_dim
        matrices = 2 * width * width + 2 * width * kv_width
        matrices += (2 if self.is_gpt2 else 3) * width * self.mlp_dim
        biases = (3 * width + 2 * kv_width + self.mlp_dim) if self.bias else 0
        norm = (2 if self.bias else 1) * width
        tables = self.vocab_size * (1 if self.tie_head else 2)
        tables += self.block_size if self.is_gpt2 else 0  # learned positions
        return tables * width + self.n_layer * (matrices + biases + 2 * norm) + norm

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations to train on one token: `6 N + 12 L H Q T`.

        `N` is the number of parameters that multiply something: all of them, without learned
        positions, and without the embedding if the head has a separate table (a look-up multiplies
        nothing). `L` layers, `H` heads of size `Q`, `T` tokens; attention counts in full, not
        halved for the causal mask. Recomputation under activation checkpointing does not count, so
        it shows as lower utilisation.
        Source: PaLM, arXiv 2204.02311, appendix B.
        """
        lookup = 0 if self.tie_head else self.vocab_size * self.n_embd
        lookup += self.block_size * self.n_embd if self.is_gpt2 else 0
        return 6 * (self.num_params() - lookup) + 12 * self.n_layer * self.n_embd * seq_len


PRESETS: dict[str, GPTConfig] = {
    name: GPTConfig(n_embd=width, n_layer=depth, n_head=heads, vocab_size=words, block_size=length)
    for name, width, depth, heads, words, length in (
        ("tiny", 192, 4, 3, 256, 256),
        ("mini", 512, 8, 8, 8_192, 512),
        ("small", 768, 12, 12, _GPT2_VOCAB, 1024),
        ("medium", 1024, 24, 16, _GPT2_VOCAB, 1024),
        ("large", 1280, 36, 20, _GPT2_VOCAB, 1024),
        ("xl", 1600, 48, 25, _GPT2_VOCAB, 1024),
        ("1.3b", 2048, 24, 16, _GPT2_VOCAB, 2048),
        ("2.7b", 2560, 32, 20, _GPT2_VOCAB, 2048),
    )
}
"""The vocabulary is a default: a run replaces it with its data's by `dataclasses.replace`."""


def preset(name: str) -> GPTConfig:
    """The shape called `name`."""
    check_name("model preset", name, PRESETS)
    return PRESETS[name]
