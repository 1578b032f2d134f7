"""Configuration from files and the command line: defaults < preset or file < flags.

A file becomes flags in front of the user's own, so there is one validation path: a typo in a file
gets the same "did you mean" as one on the command line, and YAML's `3e-4`-is-a-string trap is gone.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigError
from gradsync.runtime.text_file import PRIVATE, replace_text
from gradsync.train.config import SyncConfig, TrainConfig
from gradsync.train.recipes import recipe

_SUFFIXES = (".yaml", ".yml", ".toml")
# Where None is a third value, a switch takes True or False as a word.
_OPTIONAL = frozenset(f.name for f in fields(SyncConfig) if f.default is None)


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """Configuration from `[PRESET|FILE] [--flag value …]`.

    Raises:
        ConfigError: unknown preset, unreadable file.
        SystemExit: 2 for a bad flag (the message names the nearest), 0 for `--help`.
    """
    arguments = list(argv)
    if not arguments or arguments[0].startswith("-"):
        return _parse(recipe("tiny"), arguments)
    first = arguments.pop(0)
    if not first.endswith(_SUFFIXES):
        if Path(first).is_file():
            raise ConfigError(f"{first}: a configuration file ends in {', '.join(_SUFFIXES)}")
        return _parse(recipe(first), arguments)
    values = read_file(Path(first))
    start = recipe(str(values.pop("preset", "tiny")))
    try:
        start = _parse(start, to_flags(values))
    except SystemExit:
        fail_on_stderr(f"that was in the configuration file {first}")
        raise
    return _parse(start, arguments)


def _parse(start: TrainConfig, arguments: list[str]) -> TrainConfig:
    import tyro

    return tyro.cli(
        TrainConfig,
        prog="gradsync train [PRESET|FILE]",
        description=(
            "Train a GPT; flags override the preset or file. Two more flags: --dry-run shows the "
            "resolved configuration and the batch plan, --json prints one document on stdout. "
            "--gpus-per-node G --nodes N (or --ddp --gpus-per-node G) start that many ranks. "
            "--elastic (or --elastic_gpu) chooses ranks, strategy, dtype and micro-batch by what "
            "the machine has; what is given stays."
        ),
        default=start,
        args=arguments,
    )


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or TOML file.

    Raises:
        ConfigError: missing, unreadable, or no mapping.
    """
    import yaml

    try:
        text = path.read_text()
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path} is not UTF-8 text") from error
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"configuration {path} does not parse: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"configuration {path} must hold keys and values; got {type(values).__name__}"
        )
    return values


def to_flags(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`{"optim": {"lr": 3e-4}, "tf32": False}` as `["--optim.lr", "0.0003", "--no-tf32"]`."""
    flags: list[str] = []
    for key, value in values.items():
        name = prefix + str(key).replace("_", "-")
        if isinstance(value, Mapping):
            flags += to_flags(value, f"{name}.")
        elif isinstance(value, bool) and key not in _OPTIONAL:
            head, _, tail = name.rpartition(".")
            negated = f"{head}.no-{tail}" if head else f"no-{tail}"
            flags.append(f"--{name if value else negated}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as YAML; `gradsync train PATH` reads it back.

    How many ranks were started is not part of it: the run may go on with another number.
    """
    import yaml

    values = asdict(replace(config, nproc_per_node=None))
    replace_text(path, yaml.safe_dump(values, sort_keys=False), mode=PRIVATE)


def fail_on_stderr(message: str) -> None:
    """Print one error line."""
    print(f"gradsync: error: {message}", file=sys.stderr)
