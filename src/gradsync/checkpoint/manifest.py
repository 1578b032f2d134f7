"""What a checkpoint must contain: the manifest that makes damage visible. No torch here.

    manifest.json   {"manifest": {format_version, step, sequence, created, files, aliases,
                                  fingerprint[, places]}, "sha256": …}

The outer hash covers the manifest's canonical text, and the file must be exactly that text: no bit
of it can change unseen, not even a blank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradsync.checkpoint.atomic import FileRecord
from gradsync.errors import CheckpointError, ConfigError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_CHUNK_BYTES = 1 << 22
# Names stay inside the directory: no separator, no leading dot.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

Fingerprint = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One checkpoint's contents."""

    step: int
    """Optimizer steps done."""
    sequence: int
    """Its place in the order of saves; the highest is the latest, whatever its step."""
    created: str
    """When it was written, ISO 8601, UTC."""
    files: dict[str, FileRecord]
    """Each file's size and hash."""
    aliases: dict[str, dict[str, str]]
    """For each file of tensors: names that are the same tensor as another name (tied weights)."""
    fingerprint: Fingerprint
    """What the numbers depend on (torch, threads, dtype, leaf shape, data set …)."""
    places: dict[str, Any] = field(default_factory=dict)
    """For each file that holds pieces of tensors: where each lies in its whole tensor, see
    `pieces.py`. Empty, and not written, where all tensors are whole."""

    def to_bytes(self) -> bytes:
        """The text of `manifest.json`."""
        body = {"format_version": FORMAT_VERSION, **asdict(self)}
        if not self.places:
            del body["places"]
        return _canonical({"manifest": body, "sha256": _digest(body)})

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a checkpoint directory.

        Raises:
            CheckpointError: missing, unreadable, changed, or of a newer format.
        """
        path = directory / MANIFEST_NAME
        try:
            return cls._parse(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error

    @classmethod
    def _parse(cls, text: bytes) -> Manifest:
        outer = json.loads(text)
        if not isinstance(outer, dict) or not isinstance(outer.get("manifest"), dict):
            raise ValueError("not a manifest")
        body = outer["manifest"]
        if outer.get("sha256") != _digest(body) or _canonical(outer) != text:
            raise ValueError(f"its own SHA-256 is {_digest(body)}, expected {outer.get('sha256')}")
        version = body.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this gradsync reads {FORMAT_VERSION}")
        files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
        for name in files:
            check_file_name(name)
        manifest = cls(files=files, **body)
        if type(manifest.step) is not int or type(manifest.sequence) is not int:
            raise TypeError("step and sequence must be integers")
        return manifest

    def verify(self, directory: Path, *, contents: bool = True) -> None:
        """Check every file's size and, with `contents`, its hash.

        Raises:
            CheckpointError: naming the first file that differs, what was got and expected.
        """
        for name, record in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                if size != record.size:
                    raise CheckpointError(f"{path}: {size} bytes, expected {record.size}")
                digest = _file_digest(path) if contents else record.sha256
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing, expected {record.size} bytes") from None
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
            if digest != record.sha256:
                raise CheckpointError(f"{path}: SHA-256 is {digest}, expected {record.sha256}")


def check_file_name(name: str) -> str:
    """`name`, if it is a plain file name; `ConfigError` otherwise."""
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(f"file name {name!r}: expected letters, digits, '_', '.' and '-' only")
    return name


def json_bytes(value: object, what: str) -> bytes:
    """`value` as JSON text that reads back equal.

    Args:
        value: dicts with text keys, lists, text, numbers, booleans, None.
        what: how errors call it.

    Raises:
        CheckpointError: something that JSON would turn into another thing (a tuple, a key that is a
            number) or cannot hold, named by its path.
    """
    _check_json(value, what)
    return json.dumps(value, indent=1).encode()


def _check_json(value: object, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{path}: key {key!r} is not text, JSON cannot keep it")
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(
            f"{path}: {type(value).__name__} cannot be kept in JSON; expected a dict, list, str, "
            "int, float, bool or None"
        )


def _canonical(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
