"""Commands and flags of users are on a list, and none goes from it unseen."""

from __future__ import annotations

import json

from compare_commands import LIST, commands_today, differences, read_help

HELP = """\
usage: gradsync bake [CAKE] [-h] [OPTIONS]

Bakes. Two more flags: --dry-run shows the recipe, --json prints it.

╭─ positional arguments ────────────────────────────╮
│ CAKE                Which one. (required)         │
╰───────────────────────────────────────────────────╯
╭─ options ─────────────────────────────────────────╮
│ -h, --help          show this help                │
│ --heat {None,low,high}                            │
│                     As said in --recipe.          │
│                     (default: low)                │
│ --sugar, --no-sugar                               │
│                     Sweet. (default: True)        │
│ --name {None}|STR   Its name. (default: None)     │
╰───────────────────────────────────────────────────╯
╭─ oven options ────────────────────────────────────╮
│ Where it is baked.                                │
│ ───────────────────────────────────────────────── │
│ --oven.fan-s FLOAT  Seconds. (required)           │
╰───────────────────────────────────────────────────╯
"""
READ = {
    "usage": "usage: gradsync bake [CAKE] [-h] [OPTIONS]",
    "--dry-run": "",
    "--json": "",
    "-h": "",
    "--help": "",
    "--heat": "{low,high} (default: low)",
    "--sugar": "(default: True)",
    "--no-sugar": "(default: True)",
    "--name": "STR",
    "--oven.fan-s": "FLOAT (required)",
}


def test_no_command_or_flag_is_lost() -> None:
    """`python tools/compare_commands.py --write` takes in what was added or changed on purpose."""
    stored = json.loads(LIST.read_text("utf-8"))["commands"]
    assert differences(stored, commands_today()) == []


def test_a_help_text_is_read() -> None:
    assert read_help(HELP) == READ


def test_sub_commands_are_no_flags() -> None:
    text = "usage: gradsync [options]\n\ncommands:\n  tune  what --sync auto takes\n\n--help\n"
    assert read_help(text) == {"usage": "usage: gradsync [options]", "--help": ""}


def test_differences_are_named() -> None:
    stored = {"a": {"--x": "INT", "--y": "{1,2}"}, "b": {}}
    today = {"a": {"--y": "STR", "--z": ""}, "c": {}}
    assert differences({"a": {"--y": "{2,1}"}}, {"a": {"--y": "{1,2}"}}) == []
    assert differences(stored, today) == [
        ("missing", "a --x"),
        ("changed", "a --y: '{1,2}' is 'STR' now"),
        ("new", "a --z"),
        ("missing", "b"),
        ("new", "c"),
    ]
