"""Convert text to token files: `train.bin`, `val.bin` (nanoGPT's layout) and `meta.json`; build the
embedded corpus once from the source code of Python's standard library: real text, everywhere.

Documents are read twice: once to hash them (the content decides the split), once to write their
tokens. Memory stays at a few MiB and eight bytes per document.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import logging
import os
import platform
import shutil
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradsync.commands.prepare.tokenizer import FILE_NAME as TOKENIZER_FILE
from gradsync.commands.prepare.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from gradsync.core.files import Filesystem, StagedDirectory, counted
from gradsync.data.meta import DTYPES, META_FILE, FileMeta, Meta, file_sha256, read_meta
from gradsync.errors import ConfigError, DataError, RunError
from gradsync.runtime import environ

log = logging.getLogger("gradsync")

DEFAULT_BPE_VOCAB_SIZE = 4096
HUGGING_FACE = "hf:"
"""Prefix of the name of a data set that the package `datasets` reads."""
_JSON_LINES = ".jsonl"
_BLOCK_BYTES = 1 << 22
_PROBE_BYTES = 1 << 13
_GROUP_BYTES = 1 << 22
_PIECE_BYTES = 256
"""Approximate overhead of a piece, bytes; keeps groups of tiny documents small."""
_LARGEST_UINT16_VOCAB = 65_535
_FEWEST_DOCUMENTS = 20
"""With fewer, whole documents are too coarse: the tail of the tokens is held out instead."""
_CORPUS_LAYOUT = 1
"""Increased when preparation changes, so that an old cache is not used as a new one."""
_NO_CORPUS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def prepare(
    paths: Sequence[Path | str],
    out: Path | str,
    *,
    tokenizer: Literal["byte", "bpe"] = "byte",
    vocab_size: int | None = None,
    val_fraction: float = 0.05,
    text_key: str = "text",
    overwrite: bool = False,
    source: str | None = None,
) -> Meta:
    """Turn files, folders and JSON lines into a data directory that `open_dataset` reads.

    `<|endoftext|>` follows each document. With 20 documents or more, whole documents are held out
    for validation, chosen by content; with fewer, the last tokens are. The directory appears whole
    or not at all.

    Args:
        paths: files, folders (read recursively), `.jsonl` files.
        out: the directory to create.
        tokenizer: "byte" (257 tokens), or "bpe", trained on this text.
        vocab_size: size of the bpe vocabulary; None is 4096.
        val_fraction: share to hold out, 0 <= val_fraction < 1; 0 writes no `val.bin`.
        text_key: key of the text in JSON lines.
        overwrite: replace `out` if it is a data directory.
        source: origin of the text, in words, for `meta.json`.

    Raises:
        ConfigError: an option is invalid, or there is no path.
        DataError: the input is missing, empty or malformed, or `out` is taken.
        RunError: reading or writing fails midway, such as on a full disk.
    """
    if not paths:
        raise ConfigError("name at least one file or folder to prepare")
    if tokenizer == "byte" and vocab_size is not None:
        raise ConfigError(f"the byte tokenizer has 257 tokens, vocab_size={vocab_size} is for bpe")
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction must be at least 0 and below 1; got {val_fraction}")
    target = Path(os.path.abspath(out))
    _check_target(target, overwrite=overwrite)
    documents = Documents(paths, text_key=text_key, exclude=target)
    try:
        hashes, text_bytes, num_broken = _scan(documents)
        if not text_bytes:
            raise DataError(f"no text in {', '.join(map(str, paths))}")
        encoder: Tokenizer = ByteTokenizer()
        if tokenizer == "bpe":
            chunks = (chunk for document in documents for chunk in document)
            size = DEFAULT_BPE_VOCAB_SIZE if vocab_size is None else vocab_size
            encoder = BpeTokenizer.train(chunks, size)
        target.parent.mkdir(parents=True, exist_ok=True)
        fs = Filesystem()
        fs.dir_mode = 0o777  # permissions as the umask allows
        with StagedDirectory(fs, target.parent, target.name) as staged:
            written = _write(staged.path, documents, hashes, encoder, val_fraction)
            meta = Meta(
                **written,
                text_bytes=text_bytes,
                skipped_files=documents.skipped_files,
                source=source or f"{len(documents.files)} files",
            )
            text = json.dumps(asdict(meta), indent=2) + "\n"
            (staged.path / META_FILE).write_text(text, encoding="utf-8")
            for path in staged.path.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            staged.seal()
            _check_target(target, overwrite=overwrite)  # another process may have made it
            staged.commit(target, replace=overwrite)
    except OSError as error:
        raise RunError(f"preparing {target} failed: {error}") from error
    _warn_of_other_share(meta, val_fraction)
    if num_broken and tokenizer == "bpe":
        some = counted(num_broken, "document")
        log.warning("bytes in %s are not UTF-8: each became U+FFFD", some)
    return meta


def _warn_of_other_share(meta: Meta, val_fraction: float) -> None:
    share = meta.tokens.get("val", 0) / sum(meta.tokens.values())
    if meta.split_by == "documents" and abs(share - val_fraction) > val_fraction / 2:
        log.warning(
            "%.2g %% of the tokens are held out for validation, not %.2g %%: whole documents are, "
            "and equal ones together",
            *(100 * share, 100 * val_fraction),
        )


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse a non-empty `out`, unless it is a data directory and may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / META_FILE).is_file():
        raise DataError(f"{out} exists and is no data directory; choose another --out")
    if not overwrite:
        raise DataError(f"{out} already holds prepared data; --overwrite replaces it")


def _scan(documents: Documents) -> tuple[np.ndarray, int, int]:
    """A content hash for each document, uint64; the bytes of text; documents that are not UTF-8."""
    hashes, text_bytes, num_broken = array("Q"), 0, 0
    for document in documents:
        digest, is_text = hashlib.sha256(), True
        for chunk in document:
            digest.update(chunk)
            text_bytes += len(chunk)
            is_text = is_text and _is_utf8(chunk)
        hashes.append(int.from_bytes(digest.digest()[:8], "big"))
        num_broken += not is_text
    return np.array(hashes, dtype=np.uint64), text_bytes, num_broken


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def choose_validation(hashes: np.ndarray, val_fraction: float) -> np.ndarray | None:
    """Mark the documents with the smallest content hashes, `val_fraction` of them and at least one.

    The choice does not depend on the order of the documents. Equal documents go the same way, so
    none is in both splits; copies beyond the requested share stay in training, unless there are no
    others. None if documents cannot be split (too few, or all the same).
    """
    texts, places, copies = np.unique(hashes, return_inverse=True, return_counts=True)
    if len(hashes) < _FEWEST_DOCUMENTS or len(texts) < 2:
        return None
    left = max(1, round(len(hashes) * val_fraction))
    chosen = np.zeros(len(texts), dtype=bool)
    for index, count in enumerate(copies.tolist()):
        chosen[index] = count <= left
        left -= count * chosen[index]
        if not left:
            break
    if not chosen.any():
        chosen[copies.argmin()] = True
    return None if chosen.all() else chosen[places]


def _write(
    folder: Path,
    documents: Documents,
    hashes: np.ndarray,
    tokenizer: Tokenizer,
    val_fraction: float,
) -> dict[str, Any]:
    """Write all files but `meta.json`, and return its contents about them."""
    dtype = "uint16" if tokenizer.vocab_size <= _LARGEST_UINT16_VOCAB else "uint32"
    held_out = choose_validation(hashes, val_fraction) if val_fraction else None
    split_by = "none" if not val_fraction else "tail" if held_out is None else "documents"
    if held_out is None:
        held_out = np.zeros(len(hashes), dtype=bool)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    end_of_text = np.array([tokenizer.end_of_text_id])
    train, val = folder / "train.bin", folder / "val.bin"
    with train.open("wb") as train_file, val.open("wb") as val_file:
        for group in _groups(documents, held_out):
            encoded = iter(tokenizer.encode_batch([text for text, _ in group if text is not None]))
            tokens = [end_of_text if text is None else next(encoded) for text, _ in group]
            counts += np.bincount(np.concatenate(tokens), minlength=len(counts))
            for (_, is_held_out), ids in zip(group, tokens, strict=True):
                file = val_file if is_held_out else train_file
                file.write(ids.astype(DTYPES[dtype]).tobytes())
    if split_by == "tail":
        _move_tail(train, val, val_fraction, DTYPES[dtype].itemsize)
    elif split_by == "none":
        val.unlink()
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(folder / TOKENIZER_FILE)
    files = {
        path.name: FileMeta(num_bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(folder.iterdir())
    }
    tokens_of = {
        path.stem: files[path.name].num_bytes // DTYPES[dtype].itemsize
        for path in (train, val)
        if path.name in files
    }
    return {
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "documents": len(hashes),
        "tokens": tokens_of,
        "split_by": split_by,
        "unigram_entropy_nats": entropy_nats(counts),
        "files": files,
    }


def entropy_nats(counts: np.ndarray) -> float:
    """Shannon entropy, in nats, of the frequencies that `counts` gives; zeros add nothing."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _groups(
    documents: Documents, held_out: np.ndarray
) -> Iterator[list[tuple[bytes | None, bool]]]:
    """Parts of documents in order, each with whether it is held out; None marks the end of a
    document. Yields a few MiB at a time, so that a tokenizer can use all cores."""
    group: list[tuple[bytes | None, bool]] = []
    num_bytes = 0
    for document, is_held_out in itertools.zip_longest(documents, held_out):
        if document is None or is_held_out is None:
            raise DataError("the input changed while it was read; prepare it again")
        for chunk in itertools.chain(document, [None]):
            group.append((chunk, bool(is_held_out)))
            num_bytes += len(chunk or b"") + _PIECE_BYTES
            if num_bytes >= _GROUP_BYTES:
                yield group
                group, num_bytes = [], 0
    if group:
        yield group


def _move_tail(train: Path, val: Path, fraction: float, itemsize: int) -> None:
    """Move the last tokens (one at least, but never all) from the end of `train` to `val`."""
    num_tokens = train.stat().st_size // itemsize
    count = min(max(1, round(num_tokens * fraction)), num_tokens - 1)
    keep = (num_tokens - count) * itemsize
    with train.open("rb") as source, val.open("wb") as target:
        source.seek(keep)
        shutil.copyfileobj(source, target, _GROUP_BYTES)
    os.truncate(train, keep)


def default_corpus() -> Path:
    """The data directory of the embedded corpus; prepared on the first call, then kept.

    Several processes may call this at once: each prepares in a separate folder, the first one's is
    kept, and all of them return it. DataError if Python's sources are not on this machine, RunError
    if the cache cannot be written.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = _sources(folder)
    if not files:
        raise DataError(
            f"{folder} holds no Python sources to learn from; give a data directory with --data"
        )
    digest = hashlib.sha256(str(_CORPUS_LAYOUT).encode())
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
    version = platform.python_version()
    out = environ.cache_dir() / f"stdlib-{version}-{digest.hexdigest()[:10]}"
    if read_meta(out) is None:
        try:
            prepare(files, out, source=f"standard library of Python {version}")
        except (DataError, RunError) as error:
            if read_meta(out) is None:  # else another process was faster: use its folder
                raise RunError(f"{error}; GRADSYNC_CACHE can name another cache") from error
    return out


def _sources(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NO_CORPUS)
        found += [Path(parent) / name for name in sorted(names) if name.endswith(".py")]
    return found


# -- sources of text -------------------------------------------------------------------------------


def is_stream(data: str) -> bool:
    """Whether `data` names text to stream: `hf:…`, a `.jsonl` file, a pattern (`*`, `?`, `[`), or a
    folder that holds `.jsonl` files and no `train.bin`."""
    if data.startswith(HUGGING_FACE) or data.endswith(_JSON_LINES):
        return True
    folder = Path(data)
    if not data or (folder / "train.bin").exists():
        return False
    return any(folder.glob(f"*{_JSON_LINES}")) if folder.is_dir() else glob.has_magic(data)


def json_lines(data: str) -> list[Path]:
    """The `.jsonl` files that a file name, a pattern or a folder matches, sorted; DataError if
    there are none, or if other files match."""
    path = Path(data)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = sorted(path.glob(f"*{_JSON_LINES}"))
    else:
        paths = sorted(map(Path, glob.glob(data, recursive=True)))
    if not paths:
        raise DataError(f"no file is called {data}")
    for path in paths:
        if path.suffix != _JSON_LINES or not path.is_file():
            raise DataError(f"{path} is no {_JSON_LINES} file; `gradsync prepare` takes any text")
    return paths


class Documents:
    """All documents under `paths`, in a fixed order, each as pieces; may be iterated more than
    once. Pieces are a few MiB, so that a large file is never in memory as a whole.

    A `.jsonl` file holds one document per line, under `text_key`; any other file is one document.
    Folders are read recursively except `exclude`, sorted by name; hidden and binary files in them
    are skipped and counted. Empty texts are left out.

    DataError if a path does not exist or cannot be read, or if a file in `paths` is binary; while
    iterating, for an invalid line (it names `file:line`).
    """

    def __init__(
        self, paths: Sequence[Path | str], *, text_key: str = "text", exclude: Path | None = None
    ) -> None:
        self.text_key = text_key
        self.skipped_files = 0
        """Hidden and binary files found in folders; a hidden folder counts as one."""
        self._exclude = exclude.resolve() if exclude else None
        self.files: list[Path] = []
        for path in map(Path, paths):
            if path.is_dir():
                self.files += self._walk(path)
            elif not path.exists():
                raise DataError(f"{path} does not exist")
            elif not path.is_file() or _is_binary(path):
                raise DataError(f"{path} is no text file; gradsync prepare reads text and .jsonl")
            else:
                self.files.append(path)

    def _walk(self, folder: Path) -> Iterator[Path]:
        def unreadable(error: OSError) -> None:
            raise DataError(f"{error.filename}: {error.strerror}") from error

        for parent, folders, names in os.walk(folder, onerror=unreadable):
            seen = [name for name in sorted(folders) if not name.startswith(".")]
            self.skipped_files += len(folders) - len(seen)
            folders[:] = [n for n in seen if (Path(parent) / n).resolve() != self._exclude]
            for name in sorted(names):
                path = Path(parent) / name
                if name.startswith(".") or not path.is_file() or _is_binary(path):
                    self.skipped_files += 1
                else:
                    yield path

    def __iter__(self) -> Iterator[Iterable[bytes]]:
        for path in self.files:
            if path.suffix == _JSON_LINES:
                yield from self._json_lines(path)
            elif path.stat().st_size:
                yield _pieces(path)

    def _json_lines(self, path: Path) -> Iterator[Iterable[bytes]]:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line, parse_int=float)  # only text is used
                except ValueError as error:
                    raise DataError(f"{path}:{number}: no JSON: {error}") from error
                text = row.get(self.text_key) if isinstance(row, dict) else None
                if not isinstance(text, str):
                    keys = ", ".join(map(repr, row)) if isinstance(row, dict) else "none"
                    raise DataError(
                        f"{path}:{number}: needs an object with a string under {self.text_key!r}; "
                        f"its keys are {keys[:200]}; another key is named with --text-key"
                    )
                if text:
                    # A lone surrogate is legal in JSON and nowhere else.
                    yield [text.encode(errors="replace")]


def _is_binary(path: Path) -> bool:
    """Whether there is a NUL byte near the start, as git checks."""
    try:
        with path.open("rb") as stream:
            return b"\0" in stream.read(_PROBE_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file in order; pieces end at a line end if there is one."""
    rest = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            block = rest + block
            cut = _cut_point(block)
            yield block[:cut]
            rest = block[cut:]
    if rest:
        yield rest


def _cut_point(block: bytes) -> int:
    """The place after the last line end, else before the last UTF-8 character, which may be cut."""
    cut = block.rfind(b"\n") + 1
    if cut:
        return cut
    cut = len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut if cut > 0 else len(block)
