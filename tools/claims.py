"""The page of published claims, made from its data: docs/guide/claims.md from docs/claims.toml.

    python tools/claims.py            writes the page
    python tools/claims.py --check    exits with 1 when the page is not what the data give

The test of the page runs each command that has no `skip`, and looks for the lines of `prints`; a
command with a `page` has them there.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = "docs/claims.toml"
PAGE = "docs/guide/claims.md"
VERDICTS = ("reproduced", "corrected", "needs a GPU")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def load(root: Path = ROOT) -> dict[str, Any]:
    """The data; ValueError for an unknown verdict or document, or a figure that was not printed."""
    data = tomllib.loads((root / DATA).read_text(encoding="utf-8"))
    for show in data["show"]:
        printed = "\n".join(run["prints"] for run in show["run"])
        for run in show["run"]:
            if "page" in run and missing(run["prints"], (root / run["page"]).read_text("utf-8")):
                raise ValueError(f"{run['command']}: {run['page']} has other lines now")
        for claim in show["claim"]:
            if claim["verdict"] not in VERDICTS:
                raise ValueError(f"{claim['says']}: the verdict is one of {', '.join(VERDICTS)}")
            if unknown := set(claim["in"]) - set(data["document"]):
                raise ValueError(f"{claim['says']}: unknown document {', '.join(unknown)}")
            if claim["figure"] not in printed:
                raise ValueError(f"{claim['says']}: no command printed {claim['figure']!r}")
    return data


def missing(prints: str, output: str, tolerance: float = 0.0) -> list[str]:
    """Lines of `prints` that are not in `output`.

    Lines are the same when their words are, blanks aside, and each number is within `tolerance`
    (a part of it) of the other line's. A line of `prints` that ends in … is the beginning of one.
    """
    lines = [_parts(line) for line in output.splitlines()]
    return [
        line
        for line in prints.splitlines()
        if not any(_alike(_parts(line), other, tolerance) for other in lines)
    ]


def _parts(line: str) -> tuple[str, list[float]]:
    words = " ".join(NUMBER.sub("#", line).split())
    return words, [float(found.replace(",", "")) for found in NUMBER.findall(line)]


def _alike(one: tuple[str, list[float]], other: tuple[str, list[float]], tolerance: float) -> bool:
    words, begins = one[0].removesuffix("…"), one[0].endswith("…")
    same = other[0].startswith(words) if begins else other[0] == words
    pairs = zip(one[1], other[1], strict=False)
    return same and all(abs(a - b) <= tolerance * abs(a) for a, b in pairs)


def render(data: Mapping[str, Any]) -> str:
    """The page."""
    claims = [claim for show in data["show"] for claim in show["claim"]]
    count = Counter(claim["verdict"] for claim in claims)
    verdicts = ", ".join(f"{verdict} {count[verdict]}" for verdict in VERDICTS)
    lines = ["# Published claims, tried", "", data["intro"].strip(), ""]
    lines += _table(("document", "about"), data["document"].items())
    lines += ["", f"{len(claims)} claims: {verdicts}.", "", data["verdicts"].strip()]
    lines += ["", f"Run on {data['here']}, unless a section says otherwise. {data['ci'].strip()}"]
    for show in data["show"]:
        lines += ["", f"## {show['heading']}", ""]
        for caption, runs in groupby(show["run"], _caption):
            blocks = [f"$ {run['command']}\n{run['prints'].strip(chr(10))}" for run in runs]
            lines += ["```", *"\n\n".join(blocks).splitlines(), "```", ""]
            lines += [f"{caption[0] and caption[0] + '. '}{caption[1]}.", ""]
        rows = (
            (
                claim["says"],
                ", ".join(claim["in"]),
                claim["verdict"],
                f"`{claim['figure']}`",
                claim["why"],
            )
            for claim in show["claim"]
        )
        lines += _table(("claim", "document", "verdict", "figure here", "why"), rows)
    lines += ["", "## Words of the documents", ""]
    lines += _table(("word", "here"), data["word"].items())
    return "\n".join(lines) + "\n"


def _caption(run: Mapping[str, Any]) -> tuple[str, str]:
    """Where and when it ran, "" for where and when most did; and what CI does with it."""
    here = run.get("here", "")
    if "skip" in run:
        return here, f"Not run by CI: {run['skip']}"
    return here, f"CI: to {run['tolerance']:.0%}" if "tolerance" in run else "CI: exact"


def _table(head: Sequence[str], rows: Any) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Render, or with --check only compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    try:
        page, path = render(load(root)), root / PAGE
    except ValueError as error:
        parser.error(str(error))
    old = not path.exists() or path.read_text(encoding="utf-8") != page
    if old and check:
        print(f"{PAGE} is not what {DATA} gives; run tools/claims.py")
    elif old:
        path.write_text(page, encoding="utf-8")
    return int(check and old)


if __name__ == "__main__":
    sys.exit(main())
