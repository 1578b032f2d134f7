"""Named model shapes, as width x depth. No torch here."""

from __future__ import annotations

from difflib import get_close_matches

from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig

_GPT2_VOCAB = 50_257


def _shape(
    width: int, depth: int, n_head: int, *, vocab_size: int = _GPT2_VOCAB, block_size: int = 1024
) -> GPTConfig:
    return GPTConfig(
        n_embd=width,
        n_layer=depth,
        n_head=n_head,
        vocab_size=vocab_size,
        block_size=block_size,
    )


PRESETS: dict[str, GPTConfig] = {
    "tiny": _shape(192, 4, 3, vocab_size=256, block_size=256),
    "mini": _shape(512, 8, 8, vocab_size=8_192, block_size=512),
    "small": _shape(768, 12, 12),
    "medium": _shape(1024, 24, 16),
    "large": _shape(1280, 36, 20),
    "xl": _shape(1600, 48, 25),
    "1.3b": _shape(2048, 24, 16, block_size=2048),
    "2.7b": _shape(2560, 32, 20, block_size=2048),
}
"""The vocabulary here is a default: a run takes the one of its data with `dataclasses.replace`."""


def preset(name: str) -> GPTConfig:
    """The shape called `name`.

    Raises:
        ConfigError: no such preset; the message shows the nearest names.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(f"unknown model preset {name!r}: {hint}known are {', '.join(PRESETS)}")
