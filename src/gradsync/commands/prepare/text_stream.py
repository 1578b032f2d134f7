"""Text that is read, tokenised and packed during a run: JSON lines, or a Hugging Face data set
(extra `gradsync[data]`)."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsync.commands.prepare.prepare import HUGGING_FACE, Documents, json_lines
from gradsync.commands.prepare.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from gradsync.data.meta import read_meta
from gradsync.data.tokens import sample_content
from gradsync.errors import ConfigError, DataError, RunError

_FILE_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""File formats that `datasets` reads without a named data set."""

Sample = tuple[Tensor, Tensor]


class Texts(NamedTuple):
    """Documents in a fixed order.

    `read(n)` yields all documents from the n-th on, afresh at each call; empty ones count.
    `fingerprint` names the content, as far as known.
    """

    read: Callable[[int], Iterator[bytes]]
    fingerprint: str


def open_texts(data: str, text_key: str) -> Texts:
    """The documents that `data` names: `hf:NAME[:CONFIG]`, `hf:json:FILES` (or csv, parquet, arrow,
    text), or JSON lines with the text under `text_key`.

    ConfigError if the extra is missing. DataError if nothing is found or the field is missing;
    while reading, for an invalid line or row.
    """
    if data.startswith(HUGGING_FACE):
        return _hugging_face(data, text_key)
    paths = json_lines(data)
    documents = Documents(paths, text_key=text_key)
    content = hashlib.sha256("".join(map(sample_content, paths)).encode()).hexdigest()[:16]

    def read(start: int) -> Iterator[bytes]:
        try:
            for document in islice(documents, start, None):
                yield b"".join(document)
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}") from error

    return Texts(read, f"{len(paths)} files {content}")


def _hugging_face(data: str, text_key: str) -> Texts:
    if find_spec("datasets") is None:
        raise ConfigError(f"{data} needs the package datasets: pip install 'gradsync[data]'")
    import datasets

    # Errors also come as exceptions; report them once.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    name, _, rest = data.removeprefix(HUGGING_FACE).partition(":")
    options = {"data_files": rest} if name in _FILE_FORMATS else {"name": rest or None}
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True, **options)
        columns = rows.column_names or list(next(iter(rows), {}))
    except Exception as error:  # each format has its own class
        reason = str(error).strip().partition("\n")[0] or "no such files, or nothing in them"
        raise DataError(f"{data} cannot be opened: {reason}") from error
    if columns and text_key not in columns:
        raise DataError(
            f"{data} has no field {text_key!r}; its fields are {', '.join(map(repr, columns))}; "
            "another one is named with --text-key"
        )

    def read(start: int) -> Iterator[bytes]:
        for number, row in enumerate(rows.skip(start), start=start):
            text = row.get(text_key)
            if not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"{data}: row {number}: {text_key!r} is a {kind} and no text")
            yield text.encode(errors="replace")

    return Texts(read, data)


class TextStream:
    """Packed sequences: sample i of a pass is `tokens[i*T : i*T + T + 1]` of its documents, each
    followed by the end-of-text token, as `gradsync prepare` writes them.

    Iterating yields inputs and targets, int64, shape [T] each. A rest at the end of a pass that is
    too short for a sequence is dropped.

    A pass begins with document `first_document`; `name` identifies content, tokens and sequences.
    """

    def __init__(
        self, texts: Texts, tokenizer: Tokenizer, seq_len: int, name: str, first_document: int
    ) -> None:
        self.fingerprint = f"{name} from document {first_document}"
        self._texts, self._tokenizer, self._seq_len = texts, tokenizer, seq_len
        self._start = self._at = {"document": first_document, "token": 0}

    def __iter__(self) -> Iterator[Sample]:
        document, token = self._start["document"], self._start["token"]
        lengths: deque[int] = deque()  # of documents, from the next sample's first
        row = np.empty(0, dtype=np.uint32)  # their tokens, from the next sample's first
        skip = token
        for text in self._texts.read(document):
            tokens = self._encode(text)
            lengths.append(len(tokens))
            row, skip = np.concatenate([row, tokens[skip:]]), 0
            while len(row) > self._seq_len:
                sample = torch.from_numpy(row[: self._seq_len + 1].astype(np.int64))
                row, token = row[self._seq_len :], token + self._seq_len
                while token >= lengths[0]:
                    token -= lengths.popleft()
                    document += 1
                self._at = {"document": document, "token": token}
                yield sample[:-1], sample[1:]

    def _encode(self, text: bytes) -> np.ndarray:
        if not text:
            return np.empty(0, dtype=np.uint32)
        return np.append(self._tokenizer.encode(text), np.uint32(self._tokenizer.end_of_text_id))

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: all passes are alike, and this tells `StreamLoader` so."""

    def state_dict(self) -> dict[str, int]:
        """Start of the next sample: document number, and token number in it."""
        return dict(self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration there."""
        self._start = self._at = {name: int(state[name]) for name in ("document", "token")}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedText:
    """A stream for a run: `val` has the sequences of the first documents, `train` all others;
    `identity` names the tokenizer, like `Meta.tokenizer_identity`."""

    train: TextStream
    val: list[Sample]
    tokenizer: Tokenizer
    identity: str


def open_streamed_text(
    data: str, *, text_key: str, tokenizer: str, seq_len: int, val_sequences: int
) -> StreamedText:
    """Open a stream (see `open_texts`), and hold out its first documents, whole, for
    `val_sequences` sequences of validation.

    `tokenizer` is a prepared data directory, or "" for bytes. DataError as from `open_texts`, or if
    the text is too short for validation and one more sequence.
    """
    encoder, identity = stream_tokenizer(tokenizer)
    texts = open_texts(data, text_key)
    name = f"{texts.fingerprint}, {text_key!r} by {identity} in {seq_len}"

    stream = partial(TextStream, texts, encoder, seq_len, name)
    held_out = stream(0)
    val = list(islice(held_out, val_sequences))
    first = held_out.state_dict()["document"] + 1
    if len(val) < val_sequences or next(iter(stream(first)), None) is None:
        raise DataError(
            f"{data} has too little text: validation takes the first {val_sequences} sequences of "
            f"{seq_len} tokens (--eval.max-tokens), and training needs one more; "
            + (f"there are {len(val)}" if val else "there is none")
        )
    return StreamedText(train=stream(first), val=val, tokenizer=encoder, identity=identity)


def stream_tokenizer(directory: str) -> tuple[Tokenizer, str]:
    """The tokenizer of a prepared data directory, or of bytes for "", and its identity."""
    if not directory:
        return ByteTokenizer(), f"{ByteTokenizer.name} {ByteTokenizer.vocab_size}"
    meta = read_meta(Path(directory))
    if meta is None:
        raise DataError(f"--tokenizer {directory} has no meta.json; make one with gradsync prepare")
    return load_tokenizer(meta, directory), meta.tokenizer_identity
