"""YAML, TOML and JSON that people write, read within bounds: plain values, and the keys' lines.

What is refused, each time with the file and, where the format tells it, the line: what is no
regular file or larger than `LARGEST_BYTES`, no UTF-8, nested too deep, a key given twice, a number
that no field could take, a value that contains itself or unfolds into too many others.
"""

from __future__ import annotations

import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from gradsync.core.files import one_line, parse_json, read_bytes
from gradsync.errors import ConfigError

LARGEST_BYTES = 2**17
"""Longest file that is read; the parsers take seconds for more."""
_MOST_VALUES = 2**17
_MOST_KEYS = 1_000
"""Keys of one mapping, so that merging mappings into each other (`<<`) stays short too."""
_DEEPEST = 20
_MOST_BITS = 1_000
"""Digits of a whole number: more would not fit into a float."""
_MOST_DOTS = 1_000
"""In a line of TOML, whose parser takes time with the square of a key's parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Contents of a file, with line numbers."""

    where: str
    """Kind of file, and its path: `configuration a.yaml`."""
    values: Any
    """None, bool, int, float, str, datetime (TOML only), and lists and dicts of them."""
    lines: Mapping[str, int]
    """Line of each key by its way, such as `optim.lr`, from 1 on; empty where the format does not
    tell (TOML, JSON)."""

    def at(self, key: str) -> str:
        """The place of `key`, which begins an error: `configuration a.yaml:3`."""
        return f"{self.where}:{self.lines[key]}" if key in self.lines else self.where


def read_document(path: Path, kind: str) -> Document:
    """The content of `path`: TOML or JSON if its name ends so, else YAML.

    Raises:
        ConfigError: anything that the head of this module names; one line, which begins with the
            file's `kind`, such as "configuration", and path.
    """
    where = f"{kind} {path}"
    try:
        raw = read_bytes(path, LARGEST_BYTES)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text") from error
    lines: dict[str, int] = {}
    try:
        if path.suffix == ".toml":
            values = _read_toml(text)
            _check(values)
        elif path.suffix == ".json":
            values = parse_json(text.encode())
            _check(values)
        else:
            values, lines = _read_yaml(text)
    except RecursionError as error:
        raise ConfigError(f"{where} does not parse: nested too deep") from error
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        said = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{where}:{line} does not parse: {one_line(said)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{where}:{line} does not parse: {chr(error.character)!r} is not allowed"
        ) from error
    except ValueError as error:  # TOML's and JSON's errors, and those of `_check`
        raise ConfigError(f"{where} does not parse: {one_line(error)}") from error
    return Document(where=where, values=values, lines=lines)


def brief(value: Any) -> str:
    """`value` for an error line, which a whole document would burst."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlevel = 2
    return short.repr(value)


class _Loader(yaml.SafeLoader):
    """Plain values only, every key once, every error with its line."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > _DEEPEST:
            _refuse(f"nested deeper than {_DEEPEST} levels", self.peek_event())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    _refuse(f"{key.value[:80]!r} is there already, in line {lines[key.value]}", key)
                lines[key.value] = key.start_mark.line + 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_KEYS:
            _refuse(f"more than {_MOST_KEYS} keys in one mapping", node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, OverflowError) as error:
            why = str(error).partition(";")[0]
            _refuse(f"{brief(node.value)} is no {node.tag.rpartition(':')[2]} ({why})", node)

    def construct_undefined(self, node: Any) -> NoReturn:
        tag = node.tag.replace(_TAG, "!!")
        _refuse(f"{tag}: only text, numbers, true, false, null, lists and mappings are read", node)


# A date is the words it is written in: no field takes one, and not every one is in the calendar.
_TAG = "tag:yaml.org,2002:"
_PLAIN = {_TAG + name for name in ("bool", "float", "int", "merge", "null")}
_KNOWN = _PLAIN | {_TAG + name for name in ("map", "seq", "str")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag in _PLAIN]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    **{tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag in _KNOWN},
    None: _Loader.construct_undefined,
}


def _refuse(problem: str, place: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _read_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """The values, and the line of each key."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()
    _check(values)
    return values, dict(_key_lines(node, ""))


def _key_lines(node: yaml.Node | None, way: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{way}{key.value}", key.start_mark.line + 1
            yield from _key_lines(value, f"{way}{key.value}.")


def _read_toml(text: str) -> dict[str, Any]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"more than {_MOST_DOTS} dots (at line {number})")
    return tomllib.loads(text)


def _check(values: Any) -> None:
    """Refuse what is small in the file and large, or endless, for a walk over it."""
    left = [(values, 0)]
    number = 0
    while left:
        value, depth = left.pop()
        number += 1
        if number > _MOST_VALUES:
            raise ValueError(f"its aliases unfold into more than {_MOST_VALUES} values")
        if depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST} levels, or a value contains itself")
        if isinstance(value, dict):
            left += ((each, depth + 1) for each in (*value, *value.values()))
        elif isinstance(value, list):
            left += ((each, depth + 1) for each in value)
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ValueError(f"a whole number of {value.bit_length()} bits")
        elif isinstance(value, str):
            value.encode()  # half of a surrogate pair, "\\ud800", could not be printed
