"""Configuration from files and the command line: defaults < preset or file < flags.

Each value of a file is checked against the fields of `TrainConfig`; an error names the file, the
line and the key. Text becomes a number if the field is a number: YAML reads `3e-4` as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from gradsync.commands.arguments import parse
from gradsync.commands.document import brief, read_document
from gradsync.commands.models.config import PRESETS
from gradsync.commands.train.config import AUTO, SyncConfig, TrainConfig, recipe
from gradsync.core.files import PRIVATE, perhaps, replace_text
from gradsync.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".toml")
_SYNC_OPTIONS = "--sync-options"
_OTHERS = {
    "ddp_enabled": "leave it out; --nproc-per-node or a launcher says how many ranks there are",
    "ddp_backend": "backend: gloo, nccl, … (left out: chosen by the device)",
    "ddp_find_unused_parameters": "leave it out; unused parameters are found in every step",
}
"""Keys in other projects' files, and what to use here."""


def _hints(part: type, prefix: str = "") -> dict[str, Any]:
    """The type of every field but sections, by dotted name."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(part).items():
        way = f"{prefix}{name}"
        found |= _hints(hint, f"{way}.") if is_dataclass(hint) else {way: hint}
    return found


HINTS = _hints(TrainConfig)
"""The type of each setting, by dotted name."""
_SECTIONS = {name.partition(".")[0] for name in HINTS if "." in name}


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """Configuration from `[PRESET|FILE] [--flag value …]`."""
    arguments = list(argv)
    start = recipe("tiny")
    if arguments and not arguments[0].startswith("-"):
        first = arguments.pop(0)
        start = read_config(Path(first)) if first.endswith(SUFFIXES) else recipe(first)
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
            "--elastic (or --elastic_gpu) chooses ranks, strategy, dtype and micro-batch by what "
            "the machine has; what is given stays."
        ),
        default=start,
    )
    options = start.sync_options.given() | parsed.sync_options.given()
    return replace(parsed, sync_options=SyncConfig(**options))


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


def read_config(path: Path, *, of_older_version: bool = False) -> TrainConfig:
    """The configuration in a YAML or TOML file; keys may contain dashes or dots. ConfigError for
    what no setting is; a run `of_older_version` may have keys that are gone."""
    document = read_document(path, "configuration")
    if not isinstance(document.values, dict):
        raise ConfigError(
            f"{document.where} must hold keys and values; got {type(document.values).__name__}"
        )
    values: dict[str, Any] = {}
    for way, value in flat(document.values):
        name, place = way.replace("-", "_"), document.at(way)
        if name not in HINTS:
            if of_older_version or (not value and name in _SECTIONS):
                continue
            hint = f": {_OTHERS[name]}" if name in _OTHERS else perhaps(name, HINTS)
            raise ConfigError(f"{place}: unknown key {way[:80]!r}{hint}")
        if name in values:
            raise ConfigError(f"{place}: {way} is given twice")
        try:
            values[name] = msgspec.convert(value, HINTS[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place}: {way}: got {brief(value)}: {error}") from None
    try:
        return _with_values(recipe(values.pop("preset", "tiny")), values)
    except ConfigError as error:
        raise ConfigError(f"{document.where}: {error}") from None


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is no section, with the path of its key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _with_values(start: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """`start` with the fields in `values`, by dotted name, replaced."""
    changes: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        (sections.setdefault(section, {}) if section else changes)[field] = value
    for section, inner in sections.items():
        changes[section] = replace(getattr(start, section), **inner)
    return replace(start, **changes)


def begun_config(config: TrainConfig) -> tuple[Path, TrainConfig] | None:
    """The configuration that the run to be resumed began with, every `auto` resolved, and its
    file; None for a new run.

    Choices that decide bits are made once, when a run begins: a resumed run keeps its dtype,
    strategy and micro-batch, whatever is found or measured since.
    """
    if config.resume == "none":
        return None
    if config.resume == "auto":
        begun = config.out and any((Path(config.out) / "checkpoints").glob("step-*"))
        places = [Path(config.out)] if begun else []
    else:  # a run, its checkpoints, or one of them
        path = Path(config.resume).resolve()
        places = [path, *path.parents[:2]] if path.is_dir() else []
    found = (place / "config.yaml" for place in places)
    file = next((path for path in found if path.is_file()), None)
    if file is None:
        return None
    begun = read_config(file, of_older_version=True)
    return None if AUTO in (begun.sync, begun.dtype) else (file, begun)  # none began: weights alone


def given_fields(flags: Sequence[str]) -> frozenset[str]:
    """Fields and sections of `TrainConfig` that the user set, by flag or in the file."""
    names = set()
    if flags and flags[0].endswith(SUFFIXES):
        names = {way for way, _ in flat(read_document(Path(flags[0]), "configuration").values)}
    words = (word[2:].partition("=")[0] for word in flags if word.startswith("--"))
    names |= {word.removeprefix("no-").removeprefix("no_") for word in words}
    return frozenset(name.replace("-", "_").partition(".")[0] for name in names)


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


def config_text(config: TrainConfig) -> str:
    """The configuration as YAML; `gradsync train FILE` reads it back."""
    import yaml

    return yaml.safe_dump(asdict(config), sort_keys=False)


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration without the number of ranks: the run may continue on
    another number."""
    replace_text(path, config_text(replace(config, nproc_per_node=None)), mode=PRIVATE)
