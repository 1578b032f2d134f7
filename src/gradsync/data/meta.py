"""`meta.json`: the description of a prepared data directory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradsync.core.files import one_line, parse_json, read_bytes
from gradsync.errors import DataError

META_FILE = "meta.json"
FORMAT_VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""The token types of a `.bin` file, little-endian on every machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileMeta:
    """One file of the directory: its size, and the SHA-256 of its content, hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """The description of a prepared data set; DataError when its fields contradict each other."""

    dtype: str
    """Type of one token in the `.bin` files: "uint16" or "uint32"."""
    vocab_size: int
    """Number of distinct token ids; every token is below it."""
    tokenizer: str
    """"byte" or "bpe" (with a `tokenizer.json` in the directory)."""
    documents: int
    """Documents read, over all splits."""
    text_bytes: int
    """Bytes of text read, over all splits; for bits per byte."""
    tokens: Mapping[str, int]
    """Tokens of each split ("train", "val")."""
    split_by: str
    """"documents" (whole documents, chosen by content), "tail" (the last tokens) or "none"."""
    unigram_entropy_nats: float
    """Entropy of the token frequencies over all splits: the loss of a unigram model."""
    skipped_files: int
    """Hidden files, hidden folders and binary files skipped in folders."""
    source: str
    """Origin of the text, in words."""
    files: Mapping[str, FileMeta]
    """Size and checksum of each other file."""
    format_version: int = FORMAT_VERSION
    """Version of this layout."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DataError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if not 1 <= self.vocab_size <= np.iinfo(DTYPES[self.dtype]).max + 1:
            raise DataError(f"{self.vocab_size} tokens do not fit into {self.dtype}")
        for split, num_tokens in self.tokens.items():
            file = self.files.get(f"{split}.bin")
            if file is None or file.num_bytes != num_tokens * DTYPES[self.dtype].itemsize:
                raise DataError(f"files has no {split}.bin of {num_tokens} tokens of {self.dtype}")

    @property
    def tokenizer_identity(self) -> str:
        """Equal for two data sets only if their tokens mean the same."""
        file = self.files.get("tokenizer.json")
        return f"{self.tokenizer} {self.vocab_size} {file.sha256 if file else ''}".strip()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_meta(directory: Path) -> Meta | None:
    """The directory's `meta.json`, or None without one (as in nanoGPT's own directories); DataError
    if this version cannot read it."""
    path = directory / META_FILE
    try:
        raw = parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: format_version is {one_line(version)}, this gradsync reads {FORMAT_VERSION}; "
            "prepare the data again"
        )
    try:
        files = {name: FileMeta(**entry) for name, entry in raw["files"].items()}
        return Meta(**raw | {"files": files})
    except (DataError, AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {one_line(error)}") from error
