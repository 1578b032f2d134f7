"""A simulation for readers: table, what is behind it, crossover points; plain text, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.hardware.description import Link
from gradsync.hardware.simulate.simulation import Simulation

_HOUR = 3600.0


def report_text(found: Simulation) -> str:
    """Efficiency of every split on every number of ranks, then the rest; several lines."""
    sizes = [str(size) for size in found.world_sizes]
    rows = [["efficiency", *(f"{size} ranks" for size in sizes)]]
    for name in found.names:
        points = [found.point(name, size) for size in found.world_sizes]
        rows.append([name, *("" if p is None else f"{p.efficiency:.1%}" for p in points)])
    first = [found.point(found.names[0], size) for size in found.world_sizes]
    rows.append(["useful with failures", *("" if p is None else f"{p.goodput:.1%}" for p in first)])
    rows.append(
        ["saving every", *("" if p is None else _span(p.checkpoint_interval_s) for p in first)]
    )
    return "\n".join(
        [*_table(rows), "", *(f"- {line}" for line in found.crossovers), *notes(found)]
    )


def notes(found: Simulation) -> list[str]:
    """What the figures rest on, a line each."""
    host, failures = found.host, found.failures
    lines = [
        f"{len(host.devices)} x {host.devices[0].name} a host, {_link(host.link)}",
        "efficiency: tokens per second and rank over one rank alone; each replica keeps its leaves",
        f"failures: a device every {failures.device_mtbf_s / _HOUR:,.0f} h, "
        f"{failures.checkpoint_s:g} s to save, {failures.restart_s:g} s to begin again; saving as "
        "often as Daly 2006 says",
    ]
    if found.network is not None:
        lines.insert(1, f"between hosts {_link(found.network)}")
    return lines


def _link(link: Link) -> str:
    port = " a host" if link.per_host else " a rank"
    return f"{link.name}: {link.bytes_per_s / 1e9:.3g} GB/s{port}, {link.alpha_s * 1e6:.3g} us"


def _span(seconds: float) -> str:
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
