"""Every command and flag of `gradsync`, held against the list of those that users know.

    python tools/compare_commands.py             compare `--help` today with tools/commands.json
    python tools/compare_commands.py --write     make today's commands the list

A flag is compared with what it takes and its default. Prints what is missing, changed or new; exit
code 1 when something on the list is missing or changed. What was removed on purpose stands under
"removed" in the list, as `"gradsync COMMAND --flag": "reason"`; it is printed, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import redirect_stdout, suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import patch

LIST = Path(__file__).with_name("commands.json")
Command = dict[str, str]
"""Values of each flag, and its default; "usage" is the first line."""

_SUB_COMMAND = re.compile(r"^  ([a-z][a-z-]*)  +\S.*$", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
_DEFAULT = re.compile(r"\((?:default: [^()]*|required)\)$")
_NO_DEFAULT = ("(default: )", "(default: None)", "(default: '')")
_COLUMNS = "125"  # with more of them boxes stand side by side


def commands_today() -> dict[str, Command]:
    """Every command by its whole name, from the help that it prints."""
    found, waiting = {}, [[]]
    while waiting:
        words = waiting.pop()
        text = help_of(words)
        found[" ".join(["gradsync", *words])] = read_help(text)
        if re.search(r"^(commands|benchmarks):$", text, re.MULTILINE):
            waiting += [[*words, name] for name in _SUB_COMMAND.findall(text)]
    return dict(sorted(found.items()))


def help_of(words: list[str]) -> str:
    """Output of `gradsync WORDS --help`."""
    from gradsync.commands.cli.main import main

    said = TextIOWrapper(BytesIO(), "utf-8")  # without an encoding tyro draws other boxes
    with redirect_stdout(said), suppress(SystemExit), patch.dict(os.environ, COLUMNS=_COLUMNS):
        main([*words, "--help"])
    said.seek(0)
    return said.read()


def read_help(text: str) -> Command:
    """The flags in a help text: those in its lists, and those that stand in the words above."""
    plain = re.split(r"^examples?:$", text, maxsplit=1, flags=re.MULTILINE)[0]
    usage, _, words = plain.partition("╭─")[0].partition("\n")
    found = {"usage": usage} | dict.fromkeys(_FLAG.findall(_SUB_COMMAND.sub("", words)), "")
    rows = "\n".join(re.findall("^│ (.*?) *│$", plain, re.MULTILINE))
    for entry in re.findall(r"^(--?[a-z].*(?:\n .*)*)", rows, re.MULTILINE):
        takes, _, said = re.sub(" {2,}", "\n", entry, count=1).partition("\n")
        takes = re.sub(r"\{None\}\||(?<=\{)None,", "", takes)
        default = _DEFAULT.search(" ".join(said.split()))
        shown = default[0] if default and default[0] not in _NO_DEFAULT else ""
        value = re.sub(r"(?<!\S)-[\w.-]+(, )?", "", takes).strip()
        for name in re.findall(r"(?<!\S)-[\w.-]+", takes):
            found[name] = " ".join(filter(None, (value, shown)))
    return found


def differences(stored: dict[str, Command], today: dict[str, Command]) -> list[tuple[str, str]]:
    """("missing", "changed" or "new", and of what), in order of commands."""
    found = []
    for command in sorted(stored.keys() | today.keys()):
        before, now = stored.get(command), today.get(command)
        if before is None or now is None:
            found.append(("new" if before is None else "missing", command))
            continue
        for flag in [*before, *(flag for flag in now if flag not in before)]:
            name = f"{command} {flag}"
            if flag not in now:
                found.append(("missing", name))
            elif flag not in before:
                found.append(("new", name))
            elif _choices_sorted(before[flag]) != _choices_sorted(now[flag]):
                found.append(("changed", f"{name}: {before[flag]!r} is {now[flag]!r} now"))
    return found


def _choices_sorted(text: str) -> str:
    """Python keeps one `Literal` for equal choices: their order is that of the first import."""
    return re.sub(r"\{([^}]+)\}", lambda found: str(sorted(found[1].split(","))), text)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    stored: dict[str, Any] = json.loads(LIST.read_text("utf-8")) if LIST.exists() else {}
    removed, today = stored.get("removed", {}), commands_today()
    if write:
        content = {"commands": today, "removed": removed}
        LIST.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return 0
    code = 0
    for kind, what in differences(stored.get("commands", {}), today):
        reason = removed.get(what, "") if kind == "missing" else ""
        print(f"{'removed' if reason else kind:<8} {what}{': ' * bool(reason)}{reason}")
        code |= kind != "new" and not reason
    flags = sum(len(flags) - 1 for flags in today.values())
    print(f"{len(today)} commands, {flags} flags")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
