"""The output of `gradsync plan`: hardware, candidates, the pick, commands to type; no torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradsync.commands.plan.choice import MARGIN, Candidate, Costs, Recommendation
from gradsync.commands.plan.description import Hardware, Host, Link, gb, runs
from gradsync.commands.plan.profile import UTILISATION
from gradsync.commands.plan.workload import Workload, sizes_text

_WIDE = 240  # Columns without a terminal: a table in a file must not be cut
_MOST_ROWS = 24
_WORDS = ("strategy", "parallel", "taken, or why not")
_HEADS = ("strategy", "parallel", "micro-batch", "GB a rank", "step", "tokens/s", "efficiency")
_TIME = "24:00:00"  # Time limit of a turn; a job is requeued until it is done


def section(name: str, lines: Sequence[str]) -> str:
    """Lines, with their name in front of the first."""
    return "\n".join(f"{name if not n else '':<9} {line}" for n, line in enumerate(lines))


def duration(seconds: float) -> str:
    """In a suitable unit."""
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:,.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.3g} µs"


def hardware_lines(hardware: Hardware) -> list[str]:
    """Equal hosts on one line, then their network, then the assumptions."""
    lines = []
    for host, count in runs(hardware.hosts):
        several = "" if count == 1 else f"{count} hosts of "
        between = f"; {link_text(host.link)}" if len(host.devices) > 1 else ""
        lines.append(f"{several}{_devices_text(host)}{between}")
    if len(hardware.hosts) > 1 and hardware.network is not None:
        lines.append(f"between hosts: {link_text(hardware.network)}")
    return [*lines, *hardware.notes]


def _devices_text(host: Host) -> str:
    if host.devices[0].kind == "cpu":
        device, ranks = host.devices[0], len(host.devices)
        share = f"{ranks} ranks with {gb(device.usable_bytes)} each"
        return f"{host.cores} cores ({device.name}), {share if ranks > 1 else '1 rank'}"
    return " + ".join(
        f"{count} x {device.name} ({gb(device.usable_bytes)})"
        for device, count in runs(host.devices)
    )


def link_text(link: Link) -> str:
    """Its name and figures."""
    return f"{link.name} ({link.bytes_per_s / 1e9:,.4g} GB/s, {link.alpha_s * 1e6:,.3g} µs)"


def work_line(name: str, work: Workload) -> str:
    """The model and its batch."""
    millions = work.model.num_params() / 1e6
    size = f"{millions:.1f} M" if millions < 1e3 else f"{millions / 1e3:.2f} B"
    return (
        f"GPT {name} ({size} parameters, vocabulary "
        f"{work.model.vocab_size:,}), {work.dtype}, {work.step_tokens:,} tokens per update in "
        f"sequences of {work.seq_len:,}"
    )


def figure_lines(costs: Costs, hardware: Hardware) -> list[str]:
    """Sources of the figures."""
    sources = dict.fromkeys(device.source for device in hardware.devices if device.source)
    peak = f" ({'; '.join(sources)})" if sources else ""
    computing = f"estimated, {UTILISATION:.1%} of the peak{peak}"
    if costs.measured is not None:
        profile, leaf = costs.measured
        computing = (
            f"measured here, forward {duration(profile.forward_s)}, backward "
            f"{duration(profile.backward_s)} of {leaf.micro_batch_size} x {leaf.seq_len} "
            f"tokens, update {duration(profile.update_s)}; other micro-batches in proportion"
        )
    lines = ["memory: closed formulas", f"computing: {computing}"]
    if costs.load is not None:
        lines.append(
            f"the machine was busy with other work (load {costs.load:.1f}): too slow, and not "
            "kept; ask again when it is quiet"
        )
    links = [host.link for host in hardware.hosts if len(host.devices) > 1]
    if hardware.network is not None and len(hardware.hosts) > 1:
        links.append(hardware.network)
    return lines + [
        f"messages: {link.name}, {link.source or 'as given'}" for link in dict.fromkeys(links)
    ]


def console_of(stream: IO[str]) -> Console:
    """Prints tables of plain text, as wide as the terminal."""
    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def print_table(choice: Recommendation, stream: IO[str]) -> None:
    """A row per split: its best micro-batch and the verdict. On a narrow terminal a row takes
    several lines."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for head in (*_HEADS, _WORDS[-1]):
        justify = "left" if head in _WORDS else "right"
        table.add_column(head, justify=justify, no_wrap=head == "parallel", overflow="fold")
    rows = choice.rows()
    for row in rows[:_MOST_ROWS]:
        taken = row is choice.pick
        table.add_row(*_cells(row, taken), style="bold" * taken)
    console = console_of(stream)
    console.print(table)
    if (more := len(rows) - _MOST_ROWS) > 0:
        console.print(f"... and {more} more; --json has all", style="dim")


def _cells(row: Candidate, taken: bool) -> list[str]:
    """Cells under `_HEADS`, and the verdict."""
    work, time, memory, missing = row.work, row.time, "", row.obstacle
    if row.memory is not None:
        memory = f"{row.memory.total / 1e9:,.1f} of {row.room_bytes / 1e9:,.1f}"
        missing = f"{gb(row.short_bytes)} short"
    cells = [
        row.split.strategy,
        row.split.sizes or "one rank",
        f"{work.micro_batch_size}" + " recomputed" * work.activation_checkpointing,
        memory,
    ]
    if time is None:
        return [*cells, "", "", "", missing]
    cells += [duration(time.total_s), f"{time.tokens_per_s:,.0f}", f"{time.efficiency:.0%}"]
    return [*cells, "taken" if taken else row.remark]


def interval_line(step_s: float, save_s: float, mtbf_s: float) -> str:
    """How often to save: sqrt(2 x save_s x mtbf_s) seconds apart (Young 1974, doi
    10.1145/361147.361115), and what saving and repeated steps cost then."""
    steps = max(1, round(math.sqrt(2 * save_s * mtbf_s) / step_s))
    lost = save_s / (steps * step_s) + steps * step_s / (2 * mtbf_s)
    return (
        f"--checkpoint.every {steps}: every {duration(steps * step_s)}, if a checkpoint stops "
        f"training for {duration(save_s)} and a fault comes every {mtbf_s / 3600:,.4g} h; saving "
        f"and repeated steps cost {lost:.2%} of the time"
    )


def pick_sections(pick: Candidate, commands: Sequence[tuple[str, str]]) -> list[str]:
    """The pick: the reason, its memory and time part by part, the commands."""
    assert pick.memory is not None
    assert pick.time is not None
    work, time = pick.work, pick.time
    parts = {
        "computing": time.compute_s,
        "exposed communication": time.exposed_comm_s,
        "pipeline idle": time.bubble_s,
        "update": time.update_s,
    }
    shown = ", ".join(f"{name} {duration(s)}" for name, s in parts.items() if s > 0)
    sizes = [(getattr(pick.memory, f.name), f.name) for f in fields(pick.memory)]
    listed = ", ".join(f"{name} {gb(size)}" for size, name in sorted(sizes, reverse=True) if size)
    memory = f"{gb(pick.memory.total)} a rank: {listed}; a {MARGIN:.0%} margin stays free"
    recomputes = ", activations recomputed" if work.activation_checkpointing else ""
    taken = (
        f"{pick.split}: {work.num_leaves:,} micro-batches of {work.micro_batch_size} x "
        f"{work.seq_len:,} tokens{recomputes}"
    )
    return [
        section("taken", [taken, *pick.remark.split("; ")]),
        section("memory", [memory]),
        section("step", [f"{duration(time.total_s)}: {shown}"]),
        section("run", [f"{where:<13}{line}" if where else line for where, line in commands]),
    ]


def commands(
    pick: Candidate, hardware: Hardware, model: str, extra: Sequence[str]
) -> list[tuple[str, str]]:
    """Commands, each with the place to type it: a single host needs one command, several need a
    launcher; `extra` holds more flags of `gradsync train MODEL`."""
    split, work = pick.split, pick.work
    flags = ["--sync", split.strategy]
    if split.layout.model_ranks > 1:
        flags += ["--parallel", sizes_text(split.layout)]
    flags += ["--micro-batch-size", str(work.micro_batch_size)]
    if work.activation_checkpointing:
        flags.append("--activation-checkpointing")
    train = shlex.join(["train", model, *flags, *extra])
    used = hardware.with_devices(split.world_size)
    nodes, ranks = len(used.hosts), len(used.hosts[0].devices)
    if nodes == 1:
        nproc = f" --nproc-per-node {ranks}" if ranks > 1 else ""
        return [("", f"gradsync {train}{nproc}")]
    per_node = "--gpus-per-node" if used.devices[0].kind == "cuda" else "--ntasks-per-node"
    by_hand = f"gradsync launch --nnodes {nodes} --nproc-per-node {ranks} -- {train}"
    slurm = f"gradsync submit --nodes {nodes} {per_node} {ranks} --time {_TIME} -- {train}"
    return [("by hand", by_hand), ("under Slurm", slurm)]


def efficiency_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """A line per simulated split, a column per number of ranks."""
    sizes = sorted({point["world_size"] for point in points})
    found = {(each["name"], each["world_size"]): f"{each['efficiency']:.1%}" for each in points}
    table = Table("efficiency", box=None, pad_edge=False, header_style="")
    for size in sizes:
        table.add_column(f"{size} ranks", justify="right")
    for name in dict.fromkeys(point["name"] for point in points):
        table.add_row(name, *(found.get((name, size), "") for size in sizes))
    return table
