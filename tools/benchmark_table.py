"""Render a benchmark's record as the table of docs/guide/strategies.md.

    python tools/benchmark_table.py                        render the record that the page names
    python tools/benchmark_table.py --record RECORD.json   take this one from now on
    python tools/benchmark_table.py --check                exit 1 when the page is not up to date

The table stands between `<!-- benchmark: RECORD.json -->` (a path from the repository's root) and
`<!-- end of benchmark -->`. Everything in it comes from the record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "strategies.md"
SECTION = re.compile(r"<!-- benchmark: (\S+) -->\n.*?<!-- end of benchmark -->", re.DOTALL)
ALONE = "none"
LEGEND = (
    "`none` is plain torch without any communication. *step*: mean over the steps of a turn, on "
    "the slowest rank; median and quartiles over rounds, which interleave all strategies. *to "
    "`none`*: the same, divided by `none` of the same round. *exposed*: communication that nothing "
    "hid, by the strategy's own stopwatch (`StepResult.exposed`; that of `fsdp` does not see the "
    "gathers in forward and backward). *sent*: by one rank in one step, counted by the kernel, in "
    "units of S. *operations*: calls of one rank in one step; a batch of messages counts as one, "
    "and the step's small message is one. *held*: weights, gradients, optimizer state and buckets "
    "at the end of backward, in units of S; temporaries of messages that have arrived are not in "
    "it."
)
COLUMNS = (
    "strategy",
    "step, ms",
    "to `none`",
    "exposed, ms",
    "sent, S",
    "operations",
    "held, S",
)


def table(record: dict[str, Any]) -> str:
    """The whole section: where it was measured, the rows, what the columns mean."""
    contestants: dict[str, Any] = record["contestants"]
    size = record["gradient_bytes"]
    ideal = turns(contestants[ALONE]["step_s"])
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
    ]
    for name, found in contestants.items():
        own = turns(found["step_s"])
        steps = sum(len(round_) for round_ in found["step_s"][0])
        cells = (
            _name(name, found["options"]),
            _spread([1000 * seconds for seconds in own], 1),
            "1" if name == ALONE else _spread([a / b for a, b in zip(own, ideal, strict=True)], 2),
            f"{1000 * median(turns(found['exposed_s'])):.1f}",
            f"{mean(found['sent_bytes']) / steps / size:.2f}",
            f"{mean(found['operations']) / steps:.3g}",
            f"{mean(found['held_bytes']) / size:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", LEGEND])


def turns(by_rank: list[list[list[float]]]) -> list[float]:
    """For each round the mean over its steps of the slowest rank's value.

    Args:
        by_rank: [rank][round][step].
    """
    rounds = zip(*by_rank, strict=True)
    return [mean(max(step) for step in zip(*ranks, strict=True)) for ranks in rounds]


def _spread(values: list[float], digits: int) -> str:
    """`median (first quartile-third quartile)`; a single value is alone."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _name(name: str, options: dict[str, Any]) -> str:
    said = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"`{name}`" + (f" ({said})" if said else "")


def _where(record: dict[str, Any]) -> str:
    machine, settings = record["environment"], record["settings"]
    parts = (
        f"{machine['date']}, {machine['cpu']}",
        f"{machine['cores']} cores (load {machine['load_at_start']} at the start)",
        f"torch {machine['torch']}",
        f"{record['world_size']} ranks of {machine['threads_per_rank']} thread over "
        f"{machine['backend']}; GPT {settings['width']}x{settings['depth']}",
        f"S = {record['gradient_bytes'] / 2**20:.1f} MiB of fp32 gradients",
        "AdamW",
        f"one leaf of {settings['sequences']} x {settings['tokens']} tokens per rank and step",
        f"buckets of {settings['bucket_mb']:g} MiB",
        f"{settings['rounds']} rounds of {settings['steps']} steps",
    )
    return f"{', '.join(parts)}:\n\n    {record['command']}"


def render(page: str, root: Path, record: str | None = None) -> str:
    """`page` with its section made anew.

    Args:
        page: the text of the guide.
        root: what the path in the marker starts from.
        record: path from `root` of another record; None keeps the one that the page names.

    Raises:
        ValueError: the page does not have exactly one section.
    """
    found = SECTION.findall(page)
    if len(found) != 1:
        raise ValueError(f"the page must have one benchmark section, it has {len(found)}")
    path = record or found[0]
    text = table(json.loads((root / path).read_text(encoding="utf-8")))
    section = f"<!-- benchmark: {path} -->\n\n{text}\n\n<!-- end of benchmark -->"
    return SECTION.sub(lambda _: section, page)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, help="another record for the page")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when out of date")
    arguments = parser.parse_args(argv)
    record = arguments.record and arguments.record.resolve().relative_to(ROOT).as_posix()
    before = PAGE.read_text(encoding="utf-8")
    after = render(before, ROOT, record)
    if arguments.check and before != after:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/benchmark_table.py")
        return 1
    if not arguments.check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
