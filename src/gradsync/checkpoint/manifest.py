"""The manifest: expected contents of a checkpoint, to detect damage. No torch here.

    manifest.json   {"manifest": {format_version, step, sequence, created, files, aliases,
                                  fingerprint[, places]}, "sha256": …}

The outer hash covers the manifest's canonical text, and the file must be exactly that text. So no
bit of it, not even a blank, can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradsync.core.files import FileRecord, one_line, open_regular, parse_json, read_bytes
from gradsync.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
TENSORS_SUFFIX = ".safetensors"
FORMAT_VERSION = 1
_LARGEST_BYTES = 1 << 28

Fingerprint = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One checkpoint's contents."""

    step: int
    """Number of optimizer steps done."""
    sequence: int
    """Position in the order of saves; the highest is the latest, regardless of its step."""
    created: str
    """Time of writing, ISO 8601, UTC."""
    files: dict[str, FileRecord]
    """Size and hash of each file."""
    aliases: dict[str, dict[str, str]]
    """For each file of tensors: names that are the same tensor as another name (tied weights)."""
    fingerprint: Fingerprint
    """Settings that the numbers depend on (torch, threads, dtype, micro-batch, data set …)."""
    places: dict[str, Any] = field(default_factory=dict)
    """For each file that holds pieces of tensors: the place of each in its whole tensor, see
    `pieces.py`. Empty, and not written, if all tensors are whole."""
    val_loss: float | None = None
    """Validation loss of these weights; None, and not written, if it was not measured."""

    def to_bytes(self) -> bytes:
        """The text of `manifest.json`."""
        body = {"format_version": FORMAT_VERSION, **asdict(self)}
        if not self.places:
            del body["places"]
        if self.val_loss is None:
            del body["val_loss"]
        return seal(body)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint directory; CheckpointError if it is missing,
        unreadable, changed, or of a newer format."""
        path = directory / MANIFEST_NAME
        try:
            return cls._parse(read_bytes(path, _LARGEST_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged ({one_line(error)})") from error

    @classmethod
    def _parse(cls, text: bytes) -> Manifest:
        outer = parse_json(text)
        if not isinstance(outer, dict) or not isinstance(outer.get("manifest"), dict):
            raise ValueError("not a manifest")
        body = outer["manifest"]
        if seal(body) != text:
            raise ValueError("its own SHA-256 does not fit its content")
        version = body.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this gradsync reads {FORMAT_VERSION}")
        try:
            files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
            return cls(files=files, **body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the entries of a manifest: {error}") from None

    def verify(self, directory: Path, *, contents: bool = True) -> None:
        """Check every file's size and, with `contents`, its hash; CheckpointError names the first
        file that differs, with the value found and expected."""
        for name, record in self.files.items():
            path = directory / name
            try:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size != record.size:
                        raise CheckpointError(f"{path}: {size} bytes, expected {record.size}")
                    digest = record.sha256
                    if contents:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing, expected {record.size} bytes") from None
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
            if digest != record.sha256:
                raise CheckpointError(f"{path}: SHA-256 is {digest}, expected {record.sha256}")


def check_json(value: object, path: str) -> None:
    """CheckpointError for a value that JSON would change (a tuple, a key that is a number) or
    cannot hold, named by its `path`."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{path}: key {key!r} is not text, JSON cannot keep it")
            check_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{path}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(
            f"{path}: {type(value).__name__} cannot be kept in JSON; expected a dict, list, str, "
            "int, float, bool or None"
        )


def seal(body: Mapping[str, Any]) -> bytes:
    """The text of a manifest file: its canonical content and the SHA-256 of that."""
    text = json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"
    inner = text[:-1].replace(b"\n", b"\n ")  # one level deeper
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{\n "manifest": ' + inner + b',\n "sha256": "' + digest + b'"\n}\n'
