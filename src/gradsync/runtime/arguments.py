"""A command's options from its arguments. tyro reads them; an error is one line."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import Any, TypeVar

import tyro

from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime import environ
from gradsync.runtime.bounds import check_numbers

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
"""Python's and tyro's wording, and ours."""
_NO_DEFAULT = r" *\(default:(?: None| \'\'| True| False| )\)"
_WIDEST = 100
_ONE_COLUMN = "129"  # tyro puts boxes of long help side by side, of 65 characters and more each
_ELSEWHERE = (  # flags of `gradsync train`, and their names in other trainers
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
    """Parse `argv` into the dataclass `options`; the last of several equal flags counts.

    Args:
        command: the command as typed, such as "bench sync".
        takes: words after the command in its usage line.
        more: passed to `tyro.cli`.

    Raises:
        ConfigError: an unknown flag (the message names the nearest), or an invalid value.
        SystemExit: 0 for `--help`.
    """
    asks = not {"-h", "--help"}.isdisjoint(argv)
    columns = min(get_terminal_size().columns, _WIDEST)
    said, shown = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")
    try:
        with (
            environ.exported(
                {"COLUMNS": _ONE_COLUMN if asks else "10000"}
            ),  # no line is cut in two
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(shown),
        ):
            parsed = tyro.cli(
                options,
                args=argv,
                prog=f"gradsync {command}{takes}",
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed),
                **more,
            )
    except SystemExit as stop:
        if not stop.code:
            shown.seek(0)
            print(_page(shown.read(), columns), end="")
            raise
        refusal = _refusal(stop, said.getvalue(), command)
        unknown = re.match(r"unknown options: (--[\w.-]+)=.*\(", str(refusal))
        if unknown and "perhaps" not in str(refusal):  # tyro seeks names like all of NAME=VALUE
            return parse(options, [unknown[1]], command, takes=takes, **more)
        raise refusal from None
    sys.stderr.write(said.getvalue())
    check_numbers(parsed, lambda name: f"--{name.replace('_', '-')}")
    return parsed


def _page(text: str, columns: int) -> str:
    """tyro's help without boxes, empty defaults, and the line ends of docstrings."""
    rows: list[str] = []
    words: list[str] = []
    fill = TextWrapper(columns, break_on_hyphens=False)

    def put(*row: str, indent: int = 0) -> None:
        rows.extend(fill.wrap(re.sub(_NO_DEFAULT, "", " ".join(filter(None, words)))))
        rows.extend(row)
        words.clear()
        fill.initial_indent = fill.subsequent_indent = " " * indent

    for row in map(str.rstrip, text.splitlines()):
        if title := re.match("╭─ (.*?) ─+╮$", row):
            put(f"{title[1].replace('options options', 'options')}:", indent=2)
        elif (boxed := re.match("│ (.*?) *│$", row)) is None:
            if row.startswith("usage: "):
                put(row)
            elif not row or row[0] == "╰":
                put("")
            else:
                words.append(row)
        elif boxed[1].startswith(" "):
            words.append(boxed[1].strip())
        elif entry := re.match(r"(-\S.*?|\[?[A-Z]{3,}(?: …)?\]?)(?: {2,}(.*))?$", boxed[1]):
            put("  " + re.sub(r"\{None\}\||(?<=\{)None,", "", entry[1]).rstrip(), indent=6)
            words.append(entry[2] or "")
        elif boxed[1].strip("─"):
            words.append(boxed[1])
    put()
    return re.sub("\n{3,}", "\n\n", "\n".join(rows)).rstrip() + "\n"


def _refusal(stop: SystemExit, box: str, command: str) -> GradsyncError:
    """The cause of `stop`: our own error as raised, else the text in tyro's box."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, GradsyncError):
            return error
        error = error.__cause__ or error.__context__
    # A title, the error, then parts between rules: similar flags, where to find help.
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
