"""`gradsync --print-completion SHELL`: a script that completes commands, flags, choices and files.

shtab writes it from a parser that is made here of every command's options, and parses nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro import conf

from gradsync.cli.bench import BENCHMARKS
from gradsync.errors import ConfigError
from gradsync.models.config import PRESETS
from gradsync.runtime.arguments import PAIRED
from gradsync.sync.registry import STRATEGIES
from gradsync.train.config import AUTO, TrainConfig

SHELLS = ("bash", "zsh", "tcsh")
PROGRAMS = ("drill", "launch", "submit")
"""Commands that take another command line after `--`."""
_OF_TRAIN = {
    "store_true": ("dry-run", "json", "elastic", "ddp"),
    "store": ("nodes", "gpus-per-node"),
}
"""Flags that are no fields, by what is done with them."""


def completion(shell: str, commands: Mapping[str, str]) -> str:
    """The script for `shell`; `commands` are all commands with their summaries.

    Raises:
        ConfigError: a shell that shtab does not know, or no shtab.
    """
    if shell not in SHELLS:
        raise ConfigError(f"--print-completion: got {shell!r}, expected {', '.join(SHELLS)}")
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "--print-completion needs the package shtab: pip install 'gradsync[completion]'"
        ) from None
    script = shtab.complete(make_parser(commands), shell)
    # Any number of files: shtab's zsh completes one, its tcsh as many as it has rules for.
    return script.replace('"(*)::', '"*:').replace("'p/*/()/'", "'p/*/f/'")


def make_parser(commands: Mapping[str, str]) -> ArgumentParser:
    """Every command with its flags."""
    top = ArgumentParser("gradsync")
    top.add_argument("-V", "--version", action="store_true")
    top.add_argument("--print-completion", choices=SHELLS)
    under = top.add_subparsers()
    for name, summary in commands.items():
        parser = under.add_parser(name, help=summary)
        if name == "bench":
            below = parser.add_subparsers()
            for each, what in BENCHMARKS.items():
                options = import_module(f"gradsync.bench.{each}").EXPERIMENT.options
                _add(below.add_parser(each, help=what), options, paired=True)
        elif name == "train":
            _value(parser, "preset", choices=PRESETS, nargs="?")
            _add(parser, TrainConfig, paired=True)
            for action, flags in _OF_TRAIN.items():
                for flag in flags:
                    parser.add_argument(f"--{flag}", action=action)
        else:
            options = getattr(import_module(f"gradsync.cli.{name}"), f"{name.title()}Options")
            _add(parser, options, paired=name in PAIRED)
        if name in PROGRAMS:
            _value(parser, "program", nargs="*")
    return top


def _add(parser: ArgumentParser, options: Any, *, paired: bool, prefix: str = "") -> None:
    """The flags that tyro makes of the dataclass `options`."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        kind = get_args(hint)[0] if marks else hint
        if conf.Suppress in marks:
            continue
        given = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name)
        name = given.replace("_", "-")
        choices = [
            str(choice)
            for one in (get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind])
            for choice in (get_args(one) if get_origin(one) is Literal else ())
        ]
        if is_dataclass(kind):
            _add(parser, kind, paired=paired, prefix=f"{name}.")
        elif conf.Positional in marks:
            _value(parser, name, choices=PRESETS if name == "model" else (), nargs="*")
        elif kind is bool:
            for flag in (name, f"no-{name}")[: 1 + paired]:
                parser.add_argument(f"--{prefix}{flag}", action="store_true")
        elif kind in (str, Path):
            choices = [*STRATEGIES, AUTO] if name == "sync" else []
            _value(parser, f"--{prefix}{name}", choices=choices)
        else:
            parser.add_argument(f"--{prefix}{name}", choices=choices or None)


def _value(parser: ArgumentParser, name: str, *, choices: Any = (), **how: Any) -> None:
    """An argument with a value: one of `choices` where there are some, else perhaps a file."""
    from shtab import FILE

    action = parser.add_argument(name, choices=tuple(choices) or None, **how)
    if not choices:
        action.complete = FILE  # pyrefly: ignore[missing-attribute]
