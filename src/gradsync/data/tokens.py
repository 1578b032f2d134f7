"""Token files in nanoGPT's layout: one long row of token ids and nothing else, memory-mapped."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.data import Dataset

from gradsync.core.files import check_name, open_regular
from gradsync.data.batch_plan import require_at_least
from gradsync.data.meta import DTYPES, file_sha256, read_meta
from gradsync.errors import DataError

_LARGEST_HASHED_BYTES = 1 << 30
_LOOKED_AT = 1 << 16
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1 << 16


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples of `seq_len` tokens from a `.bin` file, each with the next tokens as its targets.

    Sample i is `tokens[i*T : i*T + T + 1]`, so neighbours share one token and every token but the
    first is a target exactly once. The rest after the last full sample is dropped.

    Args:
        path: the `.bin` file: little-endian token ids, no header. DataError if it is missing,
            empty, cut off or too short for one sample.
        seq_len: T, tokens in a sample.
        dtype: "uint16" or "uint32"; None takes it from `meta.json` in the same folder, else
            "uint16" (as nanoGPT writes).
        vocab_size: every token must be below it; None takes it from `meta.json`, else does not
            check.
        content: name of the content for the fingerprint (its SHA-256); None samples the file.
    """

    def __init__(
        self,
        path: Path | str,
        seq_len: int,
        *,
        dtype: str | None = None,
        vocab_size: int | None = None,
        content: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.seq_len = seq_len
        meta = read_meta(self.path.parent) if dtype is None else None
        self.dtype = dtype or (meta.dtype if meta else "uint16")
        self.vocab_size = vocab_size or (meta.vocab_size if meta else None)
        self.num_tokens = _count_tokens(self.path, self.dtype, seq_len)
        if meta is None and (dtype is None or self.dtype == "uint32"):  # if not given
            self._refuse_wider()
        content = content or sample_content(self.path)
        text = f"{content} {self.dtype} {seq_len}"
        self.fingerprint: str = hashlib.sha256(text.encode()).hexdigest()[:16]
        """Identifies content, token type and sample length: equal for equal files opened alike."""

    def _refuse_wider(self) -> None:
        """Refuse apparent tokens of a wider type, or a type too small for the vocabulary."""
        some = np.memmap(self.path, DTYPES[self.dtype], mode="r")[:_LOOKED_AT]
        low, high = some[::2], some[1::2]
        what = f"every second token is below 4, as where wider ones are read as {self.dtype}"
        if (self.vocab_size or 0) > 1 << 8 * some.itemsize:
            what = f"a vocabulary of {self.vocab_size:,} does not fit into {self.dtype}"
        elif len(high) < 16 or not high.max() < 4 <= low.max():  # halves of tokens below 2**18
            return
        raise DataError(
            f"{self.path}: {what}, and no meta.json beside it names the type. Set token_dtype "
            "(YAML; TokenDataset(dtype=...)) to uint32, or to uint16 if that is right"
        )

    @cached_property
    def _windows(self) -> np.ndarray:
        """The file as overlapping rows, shape [len, T+1], with stride T; no copy."""
        tokens = np.memmap(self.path, dtype=DTYPES[self.dtype], mode="r", shape=(self.num_tokens,))
        return sliding_window_view(tokens, self.seq_len + 1)[:: self.seq_len]

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one sample, int64, shape [T] each."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs_BT, targets_BT = self.read_batch(np.array([index]))
        return inputs_BT[0], targets_BT[0]

    def read_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of several samples, int64, shape [B, T] each.

        A token not below `vocab_size` is a DataError: on a GPU the embedding would only raise an
        asynchronous assertion.
        """
        rows = self._windows[indices]
        if self.vocab_size is not None and rows.size and int(rows.max()) >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0]
            position = int(indices[row]) * self.seq_len + int(column)
            raise DataError(
                f"{self.path}: token {int(rows[row, column])} at position {position} is outside "
                f"the vocabulary of {self.vocab_size}; wrong dtype ({self.dtype}) or wrong "
                "vocabulary?"
            )
        inputs_BT = torch.from_numpy(rows[:, :-1].astype(np.int64))
        return inputs_BT, torch.from_numpy(rows[:, 1:].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """A memory map would be pickled as a copy of the file; workers open their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_windows"}


def open_dataset(directory: Path | str, split: str, seq_len: int, **otherwise: Any) -> TokenDataset:
    """Open one split ("train" or "val") of a data directory, checked against its `meta.json`.

    nanoGPT's own directories, without `meta.json`, are opened with `otherwise` (`dtype`, or uint16;
    `vocab_size`, or any; their `meta.pkl` is never loaded: unpickling runs code). Anything that is
    missing or differs from `meta.json` is a DataError; the SHA-256 is compared for files up to 1
    GiB, the size always.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"data directory {directory} does not exist; make it with gradsync prepare")
    meta = read_meta(directory)
    path = directory / f"{split}.bin"
    if meta is None:
        return TokenDataset(path, seq_len, **otherwise)
    if split not in meta.tokens:
        raise DataError(f"{directory} was prepared without a {split!r} split")
    file, num_bytes = meta.files[path.name], _size_of(path)
    is_small = num_bytes <= _LARGEST_HASHED_BYTES
    if num_bytes != file.num_bytes or (is_small and file_sha256(path) != file.sha256):
        raise DataError(
            f"{path} is not the file that meta.json describes: damaged or replaced; prepare the "
            "data again"
        )
    return TokenDataset(
        path, seq_len, dtype=meta.dtype, vocab_size=meta.vocab_size, content=file.sha256
    )


def _size_of(path: Path) -> int:
    """Size in bytes; opens the file, so that an unreadable one fails here."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _count_tokens(path: Path, dtype: str, seq_len: int) -> int:
    require_at_least(1, seq_len=seq_len)
    check_name("dtype", dtype, DTYPES)
    num_tokens, rest = divmod(_size_of(path), DTYPES[dtype].itemsize)
    if rest:
        raise DataError(f"{path} is cut off: no whole number of {dtype} tokens")
    if num_tokens < seq_len + 1:
        raise DataError(
            f"{path}: {num_tokens} tokens are too few for seq_len={seq_len}, "
            f"which needs at least {seq_len + 1}: prepare more text, or take a shorter seq_len"
        )
    return num_tokens


def sample_content(path: Path) -> str:
    """A quick name for a file, without hashing all of it: its size and evenly spread blocks."""
    num_bytes = _size_of(path)
    digest = hashlib.sha256(str(num_bytes).encode())
    last = max(num_bytes - _BLOCK_BYTES, 0)
    with path.open("rb") as stream:
        for index in range(_SAMPLED_BLOCKS):
            stream.seek(last * index // (_SAMPLED_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()
