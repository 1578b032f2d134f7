"""The table of what `gradsync verify` found, in docs/figures.md, out of the command's own JSON.

    gradsync verify --thorough --json > verify.json
    python tools/verify_table.py verify.json [PAGE.md]            writes the table
    python tools/verify_table.py verify.json [PAGE.md] --check    exits with 1 if it is another

The table stands between two comments of the page; nothing else there is touched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gradsync.commands.verify.result import Result, largest, mark, short

BEGIN = "<!-- verify: begin (made by tools/verify_table.py) -->"
END = "<!-- verify: end -->"


def table(results: Sequence[Result]) -> str:
    """One row per strategy: how it came out at each world size, and its largest differences."""
    sizes = sorted({result.world_size for result in results})
    head = ["strategy", "promise", *(f"W = {size}" for size in sizes)]
    head += ["loss", "gradient", "weights", "of the bound"]
    lines = [_row(head), _row(["---"] * len(head))]
    for name in dict.fromkeys(result.strategy for result in results):
        rows = [result for result in results if result.strategy == name]
        marks = [mark([row for row in rows if row.world_size == size]) for size in sizes]
        drift = [short(largest(rows, part), 0) for part in ("loss", "gradient", "weight")]
        part = max(row.part_of_bound for row in rows)
        bound = f"{part:.0%}" if part else "no bound"
        lines.append(_row([f"`{name}`", rows[0].promise, *marks, *drift, bound]))
    return "\n".join(lines)


def _row(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def put(text: str, made: str, name: str) -> str:
    """`text` with `made` between the two comments."""
    for comment in (BEGIN, END):
        if comment not in text:
            raise SystemExit(f"{name} has no line {comment}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Write or check the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path)
    parser.add_argument("page", type=Path, nargs="?", default=Path("docs/figures.md"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    text = options.page.read_text()
    cells = json.loads(options.report.read_text())["cells"]
    wanted = put(text, table([Result(**cell) for cell in cells]), options.page.name)
    if not options.check:
        options.page.write_text(wanted)
        return 0
    if text != wanted:
        print(f"the table in {options.page} is not what {options.report} says", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
