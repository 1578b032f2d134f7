"""The tables of `gradsync bench` in docs/, out of records under benchmarks/.

    python tools/bench_tables.py            renders every table anew
    python tools/bench_tables.py --check    exits with 1 when one is not what its record says

A table stands between `<!-- bench: RECORD.json -->` (a path from the repository's root) and
`<!-- bench: end -->`. What kind it is the record knows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gradsync.commands.bench.sync import title
from gradsync.commands.bench.sync_plan import SyncSettings

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/figures.md", "docs/guide/strategies.md", "docs/guide/between-hosts.md")
TABLE = re.compile(r"<!-- bench: (\S+\.json) -->\n.*?<!-- bench: end -->", re.DOTALL)
KIB, MIB = 2**10, 2**20


def render(page: str, read: Any = None) -> str:
    """`page` with every table as its record has it.

    Args:
        page: Markdown.
        read: path from the root -> the record's text; None reads files.
    """
    read = read or (lambda path: (ROOT / path).read_text(encoding="utf-8"))

    def made(found: re.Match[str]) -> str:
        record = json.loads(read(found[1]))
        table = _TABLES[record["benchmark"]]
        return f"<!-- bench: {found[1]} -->\n{table(record)}\n<!-- bench: end -->"

    return TABLE.sub(made, page)


def sync_table(record: Mapping[str, Any]) -> str:
    """A line per contestant, and what was measured."""
    ddp = {row["contestant"]: row["tokens_per_s"] for row in record["rows"]}.get("torch_ddp")
    head = ["", "step, ms", "to `none`", "exposed, ms", "tokens/s", "memory kept", "of `torch_ddp`"]
    table = [head, ["---", *["---:"] * 4, ":---:", "---:"]]
    for row in record["rows"]:
        digits = 0 if row["total_ms"]["median"] >= 500 else 1
        cells = [
            f"`{row['contestant']}`",
            _spread(row["total_ms"], digits),
            _spread(row["ratio"], 3),
            f"{row['exposed_ms']:,.{digits}f}",
            f"{row['tokens_per_s']:,.0f}",
            "yes" if row.get("keep_memory", True) else "no",
        ]
        table.append([*cells, f"{row['tokens_per_s'] / ddp:.2f}"] if ddp else cells)
    lines = [_row(cells[: len(table[-1])]) for cells in table]
    # Records of before micro-batches had this name.
    settings, plan = record["plan"]["settings"], record["plan"]
    settings.setdefault("micro_batches_per_rank", settings.pop("leaves_per_rank", 1))
    first = plan.get("entries", plan.get("contestants"))[0]
    world_size = record["environment"]["world_size"]
    what = title(msgspec.convert(settings, SyncSettings), world_size, first["batch_size"])
    said = f"`{_command(record)}`: {what}; medians (quartiles)."
    return "\n".join([*lines, "", f"{said} {_machine(record)}"])


def collectives_table(record: Mapping[str, Any]) -> str:
    """All-reduce: a line per size, a column per algorithm."""
    rows = [row for row in record["rows"] if row["operation"] == "all_reduce"]
    names = list(dict.fromkeys(row["algorithm"] for row in rows if row["algorithm"] != "copy"))
    found = {(row["algorithm"], row["size_bytes"]): row for row in rows}
    lines = [
        _row(["all_reduce", *(f"`{name}`" for name in names), "`shared` of the limit"]),
        _row(["---:"] * (len(names) + 2)),
    ]
    for size in sorted({row["size_bytes"] for row in rows}):
        times = [_time(found.get((name, size))) for name in names]
        limit = (found.get(("shared", size)) or {}).get("of_limit")
        lines.append(_row([_size(size), *times, f"{limit['median']:.0%}" if limit else ""]))
    return "\n".join([*lines, "", f"`{record['command']}`: medians. {_machine(record)}"])


def network_table(record: Mapping[str, Any]) -> str:
    """A line per contestant, a column per rate."""
    rates = [str(rate) for rate in record["plan"]["rates"]]
    found = {(str(row["rate_mbit"]), row["contestant"]): row for row in record["rows"]}
    names = dict.fromkeys(row["contestant"] for row in record["rows"])
    lines = [
        _row(["step to no communication", *(f"{rate} Mbit/s" for rate in rates), "sent, MB"]),
        _row(["---", *["---:"] * (len(rates) + 1)]),
    ]
    for name in names:
        if name != "none":
            ratios = [_spread(found[rate, name]["ratio"], 2) for rate in rates]
            sent = f"{found[rates[0], name]['sent_mb']:,.1f}"
            lines.append(_row([f"`{name}`", *ratios, sent]))
    floors = [f"{record['floors'][rate]:.2f}" for rate in rates]
    lines.append(_row(["floor: max(compute, fp32 bytes / rate)", *floors, ""]))
    said = f"`{_command(record)}`: medians (quartiles) over rounds."
    return "\n".join([*lines, "", f"{said} {_machine(record)}"])


def _command(record: Mapping[str, Any]) -> str:
    """The command by its present names."""
    command = record["command"].replace("gradsync bench network", "python benchmarks/network.py")
    return command.replace("--leaves-per-rank", "--micro-batches-per-rank")


def _machine(record: Mapping[str, Any]) -> str:
    found = record["environment"]
    tcp = f", TCP {found['tcp_congestion']}" if "tcp_congestion" in found else ""
    machine = f"CPU, {found['cores']} cores ({found['cpu']}), torch {found['torch']}"
    return f"{machine}{tcp}, {found['date']}."


def _spread(values: Mapping[str, float], digits: int) -> str:
    median, low, high = (f"{values[name]:,.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def _time(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    seconds = row["p50_s"]
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.0f} µs"


def _size(num_bytes: int) -> str:
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.4g} MiB"
    return f"{num_bytes / KIB:.4g} KiB" if num_bytes >= KIB else f"{num_bytes} B"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_TABLES = {"sync": sync_table, "collectives": collectives_table, "network": network_table}


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Render, or with --check only compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    old = []
    for name in PAGES:
        path = root / name
        page = path.read_text(encoding="utf-8")
        new = render(page, lambda file: (root / file).read_text(encoding="utf-8"))
        if new != page:
            old.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and old:
        print(f"not what the records say: {', '.join(old)}; run tools/bench_tables.py")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
