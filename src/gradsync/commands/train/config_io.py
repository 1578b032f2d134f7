"""Configuration from files and the command line: defaults < preset or file < flags.

Each value of a file is checked against the fields of `TrainConfig`; an error names the file, the
line and the key. Text becomes a number if the field is a number: YAML reads `3e-4` as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from shlex import quote
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Fixed

from gradsync.commands.models.config import PRESETS
from gradsync.commands.train.config import SyncConfig, TrainConfig, recipe
from gradsync.core.document import Document, brief, read_document
from gradsync.core.files import PRIVATE, replace_text
from gradsync.errors import ConfigError
from gradsync.runtime.arguments import parse

_KIND = "configuration"
_SUFFIXES = (".yaml", ".yml", ".toml")
_SYNC_OPTIONS = "--sync-options"


_OTHERS = {
    "ddp_enabled": "leave it out; --nproc-per-node or a launcher says how many ranks there are",
    "ddp_backend": "backend: gloo, nccl, … (left out: chosen by the device)",
    "ddp_find_unused_parameters": "leave it out; unused parameters are found in every step",
}
"""Keys in other projects' files, and what to use here."""


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """Configuration from `[PRESET|FILE] [--flag value …]`."""
    arguments = list(argv)
    start = recipe("tiny")
    if arguments and not arguments[0].startswith("-"):
        first = arguments.pop(0)
        if first.endswith(_SUFFIXES):
            start = _config_of(read_document(Path(first), _KIND))
        elif Path(first).is_file():
            raise ConfigError(f"{first}: a configuration file ends in {', '.join(_SUFFIXES)}")
        elif first not in PRESETS and (known := Path(first) / "config.yaml").is_file():
            raise ConfigError(
                f"{first} is a run: `gradsync train {quote(str(known))} --resume auto --out "
                f"{quote(first)}` goes on with it, with --steps N beyond its last step"
            )
        else:
            start = recipe(first)
    _refuse_file_only(arguments)
    # A switch that is on has no flag that turns it on: typed again, it changes nothing.
    on = {_switch(name, attrgetter(name)(start)) for name, hint in HINTS.items() if hint is bool}
    parsed = parse(
        TrainConfig,
        _joined([word for word in arguments if word not in on]),
        "train",
        takes=" [PRESET|FILE]",
        description=(
            "Train a GPT; flags override the preset or file. Presets: "
            f"{', '.join(PRESETS)}; tiny is the default. Two more flags: --dry-run shows the "
            "resolved configuration and the batch plan, --json prints one document on stdout. "
            "--gpus-per-node G --nodes N (or --ddp --gpus-per-node G) start that many ranks. "
            "--elastic (or --elastic_gpu) chooses ranks, strategy, dtype and micro-batch by what "
            "the machine has; what is given stays."
        ),
        default=start,
    )
    options = start.sync_options.given() | parsed.sync_options.given()
    return replace(parsed, sync_options=SyncConfig(**options))


def _refuse_file_only(arguments: Sequence[str]) -> None:
    for word in arguments:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_").replace(".no_", ".")
        if word.startswith("--") and name in _FILE_ONLY:
            raise ConfigError(
                f"{name} is no flag: set it in a file (`gradsync train FILE.yaml`; "
                "--dry-run prints one)"
            )


def _joined(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the words of all `--sync-options` in one, since the last flag counts."""
    others, words, inside = [], [], False
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == _SYNC_OPTIONS:
            inside = True
            words += [value] if value else []
        elif inside and not argument.startswith("-"):
            words.append(argument)
        else:
            inside = False
            others.append(argument)
    return [*others, _SYNC_OPTIONS, *words] if words else others


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or TOML file."""
    return _mapping(read_document(path, _KIND))


def _mapping(document: Document) -> dict[str, Any]:
    if not isinstance(document.values, dict):
        raise ConfigError(
            f"{document.where} must hold keys and values; got {type(document.values).__name__}"
        )
    return document.values


def _config_of(document: Document) -> TrainConfig:
    """The configuration in a file; keys may contain dashes or dots."""
    given: dict[str, tuple[str, Any]] = {}
    for way, name, value in _leaves(_mapping(document), document, HINTS):
        if name in given:
            raise ConfigError(
                f"{document.at(way)}: {way} is given twice, as {given[name][0]} before"
            )
        given[name] = (way, typed(value, HINTS[name], f"{document.at(way)}: {way}"))
    way, preset = given.pop("preset", ("preset", "tiny"))
    try:
        start = recipe(preset)
    except ConfigError as error:
        raise ConfigError(f"{document.at(way)}: {error}") from None
    values = {name: value for name, (_, value) in given.items()}
    try:
        return _with_values(start, values)
    except ConfigError as error:
        alone = [way for name, (way, value) in given.items() if _refused(start, name, value, error)]
        place = document.at(alone[0]) if alone else document.where
        raise ConfigError(f"{place}: {error}") from None


def _refused(start: TrainConfig, name: str, value: Any, why: ConfigError) -> bool:
    """True if this value alone raises the same error."""
    try:
        _with_values(start, {name: value})
    except ConfigError as error:
        return str(error) == str(why)
    return False


def _with_values(start: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """`start` with the fields in `values`, by dotted name, replaced."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, _, field = name.rpartition(".")
        parts.setdefault(part, {})[field] = value
    changes = parts.pop("", {})
    for part, inner in parts.items():
        changes[part] = replace(getattr(start, part), **inner)
    return replace(start, **changes)


def _leaves(
    values: Mapping[Any, Any], document: Document, known: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Each value of the file that is not a section: its path, the field's name, and the value.

    An empty section counts as left out.
    """
    for key, value in values.items():
        way = f"{prefix}{key}"
        name = way.replace("-", "_")
        below = [each for each in known if each.startswith(f"{name}.")]
        if name not in known and not below:
            if value is None and name.startswith("sync_options."):
                continue  # an option of an older version, unset in its run's file
            near = get_close_matches(name, known, n=1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            hint = f": {_OTHERS[name]}" if name in _OTHERS else hint
            raise ConfigError(f"{document.at(way)}: unknown key {way[:80]!r}{hint}")
        if not below:
            yield way, name, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, document, known, f"{way}.")
        elif value is not None:
            keys = ", ".join(each.removeprefix(f"{name}.") for each in below)
            raise ConfigError(
                f"{document.at(way)}: {way}: got {brief(value)}, expected keys and values ({keys})"
            )


def typed(value: Any, hint: Any, where: str) -> Any:
    """Convert a file's value to the type `hint`: int, float, bool, str, words, or a union.

    Raises:
        ConfigError: the value has another type. YAML may have read the user's text as something
            else (no, 007).
    """
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}: a zero byte in {brief(value)}")
    several = get_origin(hint) in (Union, UnionType)
    for one in get_args(hint) if several else (hint,):
        if one in (NoneType, bool, str) and type(value) is one:
            return value
        if get_origin(one) is Literal and value in get_args(one):
            return value
        if one in (int, float) and type(value) in (int, str, one):
            with suppress(ValueError):  # 5,000 digits in a text raise one, too
                return one(value)
    words = " | ".join(_words(one) for one in (get_args(hint) if several else (hint,)))
    quotes = " in quotes" if hint is str and not isinstance(value, dict | list) else ""
    raise ConfigError(f"{where}: got {brief(value)}, expected {words}{quotes}")


def _words(hint: Any) -> str:
    """A type's name in an error."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    names = {NoneType: "null", bool: "true | false", int: "a whole number", float: "a number"}
    return names.get(hint, "text")


def _hints(part: type, prefix: str = "", *, marked: bool = False) -> dict[str, Any]:
    """The type of every field but sections, by dotted name; `marked`: with tyro's marks."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(part, include_extras=marked).items():
        way = f"{prefix}{name}"
        found |= _hints(hint, f"{way}.", marked=marked) if is_dataclass(hint) else {way: hint}
    return found


HINTS = _hints(TrainConfig)
"""The type of each setting."""
_FIXED = get_args(Fixed[int])[1]
_FILE_ONLY = {name for name, t in _hints(TrainConfig, marked=True).items() if _FIXED in get_args(t)}


def to_flags(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`{"optim": {"lr": 3e-4}, "tf32": False}` as `["--optim.lr", "0.0003", "--no-tf32"]`."""
    flags: list[str] = []
    for key, value in values.items():
        name = prefix + str(key).replace("_", "-")
        if name == "sync-options":
            given = [f"{option}={each}" for option, each in value.items() if each is not None]
            flags += [_SYNC_OPTIONS, *given] if given else []
        elif isinstance(value, Mapping):
            flags += to_flags(value, f"{name}.")
        elif isinstance(value, bool):
            flags.append(_switch(name, value))
        else:
            flags += [f"--{name}", str(value)]
    return flags


def _switch(name: str, value: bool) -> str:
    """The flag that sets the boolean `name` to `value`."""
    head, dot, tail = name.replace("_", "-").rpartition(".")
    return f"--{head}{dot}{tail if value else f'no-{tail}'}"


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as YAML; `gradsync train PATH` reads it back.

    The number of ranks is not part of it: the run may continue on another number.
    """
    import yaml

    values = asdict(replace(config, nproc_per_node=None))
    replace_text(path, yaml.safe_dump(values, sort_keys=False), mode=PRIVATE)
