"""A command's options from its arguments. tyro reads them; what is wrong is one line of ours."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime import environ
from gradsync.runtime.bounds import check_numbers

PAIRED = ("train", "sample", "verify", "bench", "tune", "plan")
"""Commands of which each switch has its opposite, `--no-NAME`."""

T = TypeVar("T")

_LONGEST = 600
_WORDS = (
    (r"invalid literal for int\(\) with base 10: ", "expected a whole number; got "),
    (r"could not convert string to float: ", "expected a number; got "),
    (r"no type matching .* could be instantiated from \[(.*?)\]\. .*", r"it cannot be \1"),
    (r"Missing value for argument '(.*)'\. Expected .*", r"\1 needs a value"),
    (
        r"invalid choice ('.*') for argument '(.*)'\. Expected one of \((.*?),?\)\.",
        r"\2 must be one of \3; got \1",
    ),
    (r"Unrecognized options: ", "unknown options: "),
)
"""Python's and tyro's words, and ours."""
_NONE = re.compile(r"\(default:((?:[\s│]|\x1b\[[0-9;]*m)+)None\)")
_ELSEWHERE = (  # flags of `gradsync train`, and other trainers' names of them
    ("--tokens-per-update (tokens of all ranks, not samples)", "--(global-|train-)?batch-size"),
    ("--micro-batch-size and --tokens-per-update", "--(per-device-.*|grad(ient)?-accum.*)"),
    ("--nproc-per-node", r"-np?\d*(=.*)?|--(num-(gpus|processes)|gpus|devices|world-size)"),
    ("--steps (of the optimizer)", "--(max-(steps|iters)|num-steps|.*epochs)"),
    ("--optim.lr", r"--(optim\.)?learning-rate"),
    ("--dtype", "--(precision|fp16|bf16|amp)"),
    ("--sync", "--strategy"),
    ("--out", "--out(put)?-dir"),
    ("a preset or a file as the first word: gradsync train tiny", "--(model|preset|config)(=.*)?"),
)
_NEAR = ("Perhaps you meant", "Arguments similar")


def parse(
    options: type[T], argv: Sequence[str], command: str, *, takes: str = "", **more: Any
) -> T:
    """The dataclass `options` as `argv` has it; the last of several equal flags counts.

    Args:
        command: as typed, such as "bench sync".
        takes: words behind the command in its usage line.
        more: for `tyro.cli`.

    Raises:
        ConfigError: a bad flag (the message names the nearest), or a value that cannot be used.
        SystemExit: 0 for `--help`.
    """
    pairs = command.partition(" ")[0] in PAIRED
    # Wide, so that no word of an error is cut in two.
    asks_help = {"-h", "--help"} & set(argv)
    said, shown = io.StringIO(), _Captured()
    try:
        with (
            environ.exported({} if asks_help else {"COLUMNS": "10000"}),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(shown),
        ):
            parsed = tyro.cli(
                options,
                args=argv,
                prog=f"gradsync {command}{takes}",
                config=() if pairs else (tyro.conf.FlagCreatePairsOff,),
                **more,
            )
    except SystemExit as stop:
        if not stop.code:
            print(_without_none(shown.getvalue()), end="")
            raise
        refusal = _refusal(stop, said.getvalue(), command)
        unknown = re.match(r"unknown options: (--[\w.-]+)=.*\(", str(refusal))
        if unknown and "perhaps" not in str(refusal):  # tyro seeks names like all of NAME=VALUE
            return parse(options, [unknown[1]], command, takes=takes, **more)
        raise refusal from None
    sys.stderr.write(said.getvalue())
    check_numbers(parsed, lambda name: f"--{name.replace('_', '-')}")
    return parsed


class _Captured(io.StringIO):
    """Captured output; tyro draws for the kind of standard output that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self._real = sys.stdout

    @property
    def encoding(self) -> str:  # pyrefly: ignore[bad-override]
        """That of the real one."""
        return self._real.encoding

    def isatty(self) -> bool:
        """Whether the real one is a terminal."""
        return self._real.isatty()


def _without_none(text: str) -> str:
    """Help without "(default: None)": the words of those flags say what they take then."""
    blank = _NONE.sub(lambda found: "\0" * 9 + found[1] + "\0" * 5, text)
    rows = [
        row for row in blank.splitlines(keepends=True) if row.strip("│ \n\0") or "\0" not in row
    ]
    return "".join(rows).replace("\0", " ")


def _refusal(stop: SystemExit, box: str, command: str) -> GradsyncError:
    """The error behind `stop`: one of ours as it was raised, else the words in tyro's box."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, GradsyncError):
            return error
        error = error.__cause__ or error.__context__
    # A title, what is wrong, then parts between rules: flags that are meant, where to find help.
    parts: list[list[str]] = [[]]
    for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        text = row[2:].rstrip(" │")
        if text.strip("─-╯ "):
            parts[-1].append(text)
        elif text and parts[-1]:
            parts.append([])
    wrong, *others = parts
    text = " ".join(" ".join(wrong).split()).removeprefix("Error parsing ")
    text = text or " ".join(box.split())
    if text.startswith("Missing from"):
        text = f"{', '.join(_entries(wrong))} is missing"
    for theirs, ours in _WORDS:
        text = re.sub(theirs, ours, text)
    hints = (part for part in others if part and part[0].startswith(_NEAR))
    near = [flag.partition(" ")[0] for part in hints for flag in _entries(part) if flag[:2] == "--"]
    unknown = text.startswith("unknown options: ")
    words = text.partition(": ")[2].split(", ")
    flags = [word for word in words if re.match("--?[A-Za-z]", word)]
    typed = [*flags, *words][0]
    if unknown and flags:  # without their values
        text = f"unknown options: {', '.join(flags)}"
    elif unknown:
        text = f"unexpected argument: {' '.join(words)}"
        near = ["--prompt"] if command == "sample" else near
    near.sort(key=lambda flag: not flag.startswith(typed))
    if command == "train" and unknown:
        dashed = typed.replace("_", "-")
        near = [flag for flag, other in _ELSEWHERE if re.fullmatch(other, dashed)] or near
    hint = f"; perhaps you meant {near[0]}" if near else ""
    return ConfigError(f"{text[:_LONGEST]}{hint} (gradsync {command} --help lists the options)")


def _entries(rows: Sequence[str]) -> list[str]:
    """The arguments in a part of the box; their descriptions are indented further."""
    return [row.strip() for row in rows if re.match(r" {4}\S", row)]
