"""Put a benchmark's record into docs/guide/strategies.md.

    python tools/benchmark_table.py                        render the record that the page names
    python tools/benchmark_table.py --record RECORD.json   take this one from now on
    python tools/benchmark_table.py --check                exit 1 when the page is not up to date

The table stands between `<!-- benchmark: RECORD.json -->` (a path from the repository's root) and
`<!-- benchmark: end -->`. Everything in it comes from the record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from gradsync.commands.bench.sync_plan import turns

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "strategies.md"
SECTION = re.compile(r"<!-- benchmark: (\S+\.json) -->\n.*?<!-- benchmark: end -->", re.DOTALL)
ALONE = "none"
COLUMNS = (
    *("strategy", "step, ms", "to `none`", "exposed, ms"),
    *("sent, S", "operations", "held, S"),
)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One contestant's figures, as text."""

    name: str
    options: str
    """`key=value`, those that differ from the defaults."""
    step_ms: str
    ratio: str
    """To `none`."""
    exposed_ms: str
    sent: str
    """In units of S, as `held`."""
    operations: str
    held: str

    def in_table(self) -> str:
        """A line of the table."""
        name = f"`{self.name}`" + (f" ({self.options})" if self.options else "")
        cells = (name, self.step_ms, self.ratio, self.exposed_ms)
        return _cells(*cells, self.sent, self.operations, self.held)


def rows(record: dict[str, Any]) -> dict[str, Row]:
    """Every contestant, in the record's order."""
    ideal = turns(record["contestants"][ALONE]["step_s"])
    return {
        name: _row(name, found, ideal, record["gradient_bytes"])
        for name, found in record["contestants"].items()
    }


def _row(name: str, found: dict[str, Any], ideal: list[float], size: int) -> Row:
    own = turns(found["step_s"])
    steps = sum(len(steps_of_round) for steps_of_round in found["step_s"][0])
    ratios = [mine / best for mine, best in zip(own, ideal, strict=True)]
    return Row(
        name=name,
        options=", ".join(f"{key}={value}" for key, value in found["options"].items()),
        step_ms=_spread([1000 * seconds for seconds in own], 1),
        ratio="1" if name == ALONE else _spread(ratios, 2),
        exposed_ms=f"{1000 * median(turns(found['exposed_s'])):.1f}",
        sent=f"{mean(found['sent_bytes']) / steps / size:.2f}",
        operations=f"{mean(found['operations']) / steps:.3g}",
        held=f"{mean(found['held_bytes']) / size:.2f}",
    )


def _spread(values: list[float], digits: int) -> str:
    """`median (first quartile-third quartile)`; a single value is alone."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(record: dict[str, Any]) -> str:
    """The whole section: the rows, what the columns mean, where it was measured."""
    lines = [_cells(*COLUMNS), "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += [row.in_table() for row in rows(record).values()]
    return "\n".join([*lines, "", LEGEND, "", _where(record)])


def _cells(*words: str) -> str:
    return f"| {' | '.join(words)} |"


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


def render(page: str, root: Path, path: str | None = None) -> str:
    """`page` with its table made anew.

    Args:
        page: the text of the guide.
        root: what the path in the comment starts from.
        path: of another record, from `root`; None keeps the one that the page names.

    Raises:
        ValueError: the page does not have exactly one section.
    """
    found = SECTION.findall(page)
    if len(found) != 1:
        raise ValueError(f"the page must have one benchmark section, it has {len(found)}")
    path = path or found[0]
    record = json.loads((root / path).read_text(encoding="utf-8"))
    section = f"<!-- benchmark: {path} -->\n\n{table(record)}\n\n<!-- benchmark: end -->"
    return SECTION.sub(lambda _: section, page)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, help="another record for the page")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when out of date")
    arguments = parser.parse_args(argv)
    path = arguments.record and arguments.record.resolve().relative_to(ROOT).as_posix()
    before = PAGE.read_text(encoding="utf-8")
    after = render(before, ROOT, path)
    if arguments.check and before != after:
        print(f"{PAGE.name} is out of date: run python tools/benchmark_table.py")
        return 1
    if not arguments.check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
