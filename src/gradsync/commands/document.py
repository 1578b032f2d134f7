"""Read hand-written YAML, TOML and JSON: plain values, and the line of each key.

A file that cannot be read or parsed raises one ConfigError with its path and, if the parser gives
it, the line. A repeated key is refused: the parsers would silently keep the last one.
"""

from __future__ import annotations

import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradsync.core.files import one_line, parse_json, read_bytes
from gradsync.errors import ConfigError

LARGEST_BYTES = 2**17
"""Largest file that is read; the parsers take seconds for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Contents of a file, with line numbers."""

    where: str
    """Kind of file, and its path: `configuration a.yaml`."""
    values: Any
    """None, bool, int, float, str, datetime (TOML only), and lists and dicts of them."""
    lines: Mapping[str, int]
    """Line of each key by its path, such as `optim.lr`, from 1; empty for TOML and JSON."""

    def at(self, key: str) -> str:
        """The place of `key`, for the start of an error: `configuration a.yaml:3`."""
        return f"{self.where}:{self.lines[key]}" if key in self.lines else self.where


def read_document(path: Path, kind: str) -> Document:
    """The content of `path`: TOML or JSON by its suffix, else YAML.

    Raises:
        ConfigError: the file cannot be read or parsed; one line, which begins with the file's
            `kind`, such as "configuration", and path.
    """
    where = f"{kind} {path}"
    try:
        text = read_bytes(path, LARGEST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text") from error
    lines: dict[str, int] = {}
    try:
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix == ".json":
            values = parse_json(text.encode())
        else:
            loader = _Loader(text)
            node = loader.get_single_node()
            values = None if node is None else loader.construct_document(node)
            lines = dict(_key_lines(node, ""))
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        said = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{where}:{line} does not parse: {one_line(said)}") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} does not parse: {one_line(error)}") from error
    return Document(where=where, values=values, lines=lines)


def brief(value: Any) -> str:
    """`value` shortened for an error line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlevel = 2
    return short.repr(value)


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys; a date stays text."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    words = f"{key.value[:80]!r} is there already, in line {lines[key.value]}"
                    raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _key_lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{path}{key.value}", key.start_mark.line + 1
            yield from _key_lines(value, f"{path}{key.value}.")
