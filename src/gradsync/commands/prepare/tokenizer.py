"""Tokenizers that work offline: plain bytes, or byte-level BPE trained on the user's text.

Both have `name` (as in `meta.json`), `vocab_size`, and `end_of_text_id`: the token after each
document, to which no text encodes. A literal `<|endoftext|>` is plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.core.files import one_line, read_bytes
from gradsync.data.meta import Meta, read_meta
from gradsync.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.json"
_NUM_BYTES = 256


class ByteTokenizer:
    """One token per byte, and 256 for the end of a text. No training, any language."""

    name = "byte"
    vocab_size = _NUM_BYTES + 1
    end_of_text_id = _NUM_BYTES

    def encode(self, text: bytes | str) -> np.ndarray:
        """Token ids of `text`, uint32, shape [T]."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """`encode` for several texts at once."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; the end of a text reads `<|endoftext|>`. Invalid UTF-8 becomes
        U+FFFD."""
        raw = bytearray()
        for token in ids:
            raw += END_OF_TEXT.encode() if token == _NUM_BYTES else bytes((token,))
        return raw.decode(errors="replace")

    def document(self) -> dict[str, Any]:
        """An equivalent `tokenizer.json` for transformers: byte-level, without merges."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        byte_level["trim_offsets"] = True
        vocab = {char: number for number, char in enumerate(_byte_characters())}
        end = {"id": _NUM_BYTES, "content": END_OF_TEXT, "special": True, "normalized": False}
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        nothing = ("truncation", "padding", "normalizer", "post_processor")
        return {
            "version": "1.0",
            **dict.fromkeys(nothing),
            "added_tokens": [end | plain],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab | {END_OF_TEXT: _NUM_BYTES}, "merges": []},
        }


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself if it is visible, else
    the next one from 256 on (Radford et al. 2019, GPT-2's `bytes_to_unicode`)."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte if byte in seen else next(others)) for byte in range(_NUM_BYTES)]


class BpeTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al., https://arxiv.org/abs/1508.07909), through
    the `tokenizers` package (extra `gradsync[tokenizers]`).

    Its `tokenizer.json` opens in transformers unchanged. No text is unknown, since the vocabulary
    includes the 256 bytes.
    """

    name = "bpe"

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # A document that contains the separator's spelling must not end there.
        self._inner.encode_special_tokens = True
        self.vocab_size: int = inner.get_vocab_size()
        found = inner.token_to_id(END_OF_TEXT)
        if found is None:
            raise DataError(f"the tokenizer has no token {END_OF_TEXT}")
        self.end_of_text_id: int = found

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """Learn a vocabulary of at most `vocab_size` tokens (fewer when the text is short);
        ConfigError when that is below 257, or the extra is missing."""
        if vocab_size <= _NUM_BYTES:
            raise ConfigError(f"a bpe vocabulary has at least 257 tokens; got {vocab_size}")
        _require_tokenizers()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: Path) -> BpeTokenizer:
        """Read a `tokenizer.json`; DataError if it is missing or invalid."""
        _require_tokenizers()
        from tokenizers import Tokenizer

        try:
            text = read_bytes(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        try:
            inner = Tokenizer.from_str(text.decode())
        except Exception as error:  # the package raises bare `Exception` for every error
            raise DataError(f"{path}: is no tokenizer: {one_line(error)}") from error
        return cls(inner)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        path.write_text(self._inner.to_str(pretty=True), encoding="utf-8")

    def document(self) -> dict[str, Any]:
        """Its `tokenizer.json`."""
        return json.loads(self._inner.to_str())

    def encode(self, text: bytes | str) -> np.ndarray:
        """Token ids of `text`, uint32, shape [T]; bytes that are not UTF-8 become U+FFFD."""
        words = text if isinstance(text, str) else text.decode(errors="replace")
        return np.array(self._inner.encode(words).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """`encode` for several texts at once, on all cores."""
        words = [text.decode(errors="replace") for text in texts]
        encoded = self._inner.encode_batch_fast(words)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; the end of a text reads `<|endoftext|>`."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=False)


Tokenizer = ByteTokenizer | BpeTokenizer


def load_tokenizer(meta: Meta, directory: Path | str) -> Tokenizer:
    """The tokenizer of a prepared data directory; DataError when it is missing or does not match
    `meta.json`, ConfigError when it needs an extra that is not installed."""
    tokenizer: Tokenizer
    if meta.tokenizer == "byte":
        tokenizer = ByteTokenizer()
    elif meta.tokenizer == "bpe":
        tokenizer = BpeTokenizer.load(Path(directory) / FILE_NAME)
    else:
        raise DataError(f"{directory}: unknown tokenizer {meta.tokenizer[:80]!r} in meta.json")
    if tokenizer.vocab_size != meta.vocab_size:
        raise DataError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"meta.json says {meta.vocab_size}"
        )
    return tokenizer


def check_tokenizer(directory: Path) -> None:
    """Refuse (DataError) a data directory whose tokenizer cannot be loaded; does nothing without
    the package for it."""
    meta = read_meta(directory)
    if meta is not None and meta.tokenizer == "bpe" and find_spec("tokenizers") is not None:
        load_tokenizer(meta, directory)


def _require_tokenizers() -> None:
    if find_spec("tokenizers") is None:
        raise ConfigError("bpe needs the package tokenizers: pip install 'gradsync[tokenizers]'")
