"""The output of `gradsync plan` in the guides, made by running it.

    python tools/plan_output.py            writes every such block anew
    python tools/plan_output.py --check    exits with 1 when one is not what the command prints

A block is fenced text whose first line is `$ gradsync plan …`; its machine is a described one
(`--hardware`), so that it says the same everywhere.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from gradsync.commands.cli.plan import run

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/guide/planning.md",)
BLOCK = re.compile(r"```\n\$ gradsync plan ([^\n]*--hardware [^\n]*)\n.*?```", re.DOTALL)


def printed(arguments: Sequence[str]) -> str:
    """Standard output of the command, without blanks at the ends of lines."""
    stream = io.StringIO()
    with redirect_stdout(stream):
        run(list(arguments))
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def render(page: str, answer: Callable[[Sequence[str]], str] = printed) -> str:
    """`page` with every block as the command prints it now."""

    def made(found: re.Match[str]) -> str:
        return f"```\n$ gradsync plan {found[1]}\n{answer(shlex.split(found[1]))}\n```"

    return BLOCK.sub(made, page)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Render, or with --check only compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    old = []
    for name in PAGES:
        path = root / name
        page = path.read_text(encoding="utf-8")
        new = render(page)
        if new != page:
            old.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and old:
        print(f"not what gradsync plan prints: {', '.join(old)}; run tools/plan_output.py")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
