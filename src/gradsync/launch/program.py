"""Command of each rank, read from the words after `--`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from gradsync.errors import ConfigError

RANK_COMMANDS = ("train", "verify", "bench", "tune", "doctor")
"""Commands of gradsync that make sense as one rank of many."""

_PYTHONS = ("python", "python3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command line, as words that no shell has touched."""

    words: tuple[str, ...]
    """After the interpreter when `by_python`, else the whole command line."""
    by_python: bool = True
    """Run by the Python that gradsync runs under; otherwise `words[0]` is a program."""

    @property
    def command(self) -> str:
        """`train` for `gradsync train …`, "" for what is not gradsync's own command."""
        own = self.by_python and self.words[:2] == ("-m", "gradsync") and len(self.words) > 2
        return self.words[2] if own else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of gradsync's own command."""
        return self.words[3:] if self.command else ()

    @property
    def name(self) -> str:
        """A short name: the command, module or script, without folders and endings."""
        if self.command:
            return self.command
        if not self.by_python:
            return self.words[0].rpartition("/")[2]
        if self.words[0] == "-m":
            return self.words[1]
        script = next((word for word in self.words if word.endswith(".py")), "python")
        return script.rpartition("/")[2].removesuffix(".py")

    def argv(self, python: str) -> tuple[str, ...]:
        """The whole command line, with `python` as the interpreter."""
        return (python, *self.words) if self.by_python else self.words


def parse_program(words: Sequence[str]) -> Program:
    """A program from what stands after `--`.

    Forms: `train ARGS` (any command of `RANK_COMMANDS`, with or without `gradsync` before it),
    `SCRIPT.py ARGS`, `-m MODULE ARGS`, `python …` (stands for the Python that gradsync runs under),
    or any other program, taken as it is.

    Raises:
        ConfigError: no words, or a command of gradsync that is not for ranks.
    """
    rest = tuple(words[1:] if words[:1] == ["gradsync"] else words)
    if not rest:
        raise ConfigError(
            "what is to run? Write it after --, for example: -- train mini, or -- my_script.py"
        )
    first = rest[0]
    if first in RANK_COMMANDS:
        return Program(words=("-m", "gradsync", *rest))
    if len(rest) < len(words):
        near = get_close_matches(first, RANK_COMMANDS, n=1)
        hint = f"; perhaps you meant {near[0]!r}" if near else ""
        raise ConfigError(
            f"gradsync {first} is no command for ranks{hint} (there are: "
            f"{', '.join(RANK_COMMANDS)})"
        )
    if first in _PYTHONS:
        if len(rest) == 1:
            raise ConfigError(f"{first} alone runs nothing; name a script or -m MODULE after it")
        return Program(words=rest[1:])
    if first == "-m":
        if len(rest) == 1:
            raise ConfigError("-m needs the name of a module after it")
        return Program(words=rest)
    if first.endswith(".py"):
        return Program(words=rest)
    return Program(words=rest, by_python=False)


def unknown_program(first: str) -> ConfigError:
    """The error for a program that is not found."""
    near = get_close_matches(first, RANK_COMMANDS, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    return ConfigError(
        f"{first!r} is neither a command of gradsync for ranks ({', '.join(RANK_COMMANDS)}), nor a "
        f"script that ends in .py, nor a program on the PATH{hint}"
    )
