"""Several ranks over NCCL on one GPU, and what they must have in common: `make test-gpu`.

NCCL takes two ranks of one host and GPU for a mistake, but it knows hosts by NCCL_HOSTID: so each
rank says that it is on a host of its own, and messages go through sockets. That is slow, and shows
neither NVLink nor a second device; but groups, streams, order and failures are NCCL's own.

    python tests/gpu/run.py                          # skips, in one line, without a GPU
    python tests/gpu/run.py --device cpu             # the same programs over Gloo

A row of the table is a program of ranks.py with a number of ranks. The exit code is 1 if one of
them failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = Path(__file__).with_name("ranks.py")
NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_RAS_ENABLE": "0",
}
PLAN: list[tuple[int, int, list[str]]] = [
    (2, 2, ["plain", "exchanges", "own_loop", "closes"]),
    (1, 1, ["one_hash", "strategies"]),
    (2, 2, ["one_hash", "strategies", "shaken"]),
    (3, 3, ["one_hash"]),
    (3, 3, ["survives"]),
    (4, 4, ["one_hash", "some_ranks"]),
    (4, 2, ["one_hash"]),
]
"""Ranks, ranks of a host, checks in their order."""
FAULTS = ("exception", "killed", "host stands", "device stands")
LIMIT_S = 600.0


@dataclass
class Row:
    """A line of the table."""

    check: str
    ranks: str
    held: bool | None
    seconds: float = 0.0
    found: str = ""


@dataclass
class Job:
    """Ranks that have ended: their exit codes and what they printed."""

    codes: list[int | None]
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0


def free_port() -> int:
    """A port that is free now, below those that the system gives to outgoing connections: one of
    these may be taken before a rank binds it."""
    for port in range(20_000 + os.getpid() % 8_000, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


def run_ranks(world_size: int, a_host: int, words: list[str], device: str, limit_s: float) -> Job:
    """Start ranks as torchrun would, wait for all, end those that are late."""
    port, began = free_port(), time.monotonic()
    folder = tempfile.TemporaryDirectory()
    outputs = [Path(folder.name, str(rank)) for rank in range(world_size)]
    ranks = []
    for rank in range(world_size):
        place = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": rank % a_host,
            "LOCAL_WORLD_SIZE": a_host,
            "GROUP_RANK": rank // a_host,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NCCL_HOSTID": f"gs-{rank}",
            "GPU_CHECKS_DEVICE": device,
        }
        env = os.environ | NCCL | {name: str(value) for name, value in place.items()}
        argv = [sys.executable, str(RANKS), *words]
        with outputs[rank].open("w") as output:
            ranks.append(subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT))
    for process in ranks:
        try:
            process.wait(max(0.1, began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    seconds, codes = time.monotonic() - began, [process.wait() for process in ranks]
    with folder:
        return Job(codes, [path.read_text(errors="replace") for path in outputs], seconds)


def rows_of(job: Job, checks: list[str], ranks: str) -> list[Row]:
    """A row for each check: what rank 0 said, or that it did not come to it."""
    said: dict[str, Any] = {}
    for line in job.said[0].splitlines():
        if line.startswith('{"check"'):
            told = json.loads(line)
            said[told["check"]] = told
    rows = []
    for check in checks:
        told = said.get(check)
        if told is None:
            lines = [line for text in job.said for line in text.splitlines() if "Error" in line]
            last = lines[-1][:200] if lines else ""
            rows.append(Row(check, ranks, False, job.seconds, f"exit {job.codes}: {last}"))
            break  # those after it did not run
        found = ", ".join(f"{name} {value}" for name, value in told["found"].items())
        rows.append(Row(check, ranks, True, told["seconds"], found))
    return rows


def equal_hashes(rows: list[Row]) -> Row:
    """Whether all numbers of ranks ended with one hash of each strategy."""
    hashes: dict[str, set[str]] = {}
    for row in rows:
        if row.check in ("one_hash", "shaken", "survives") and row.held:
            for each in row.found.split(", "):
                name, _, value = each.rpartition(" ")
                if name.endswith(("invariant", "zero1")):
                    hashes.setdefault("any", set()).add(value)
    found = sorted(hashes.get("any", set()))
    return Row("one hash for all", "1 .. 4", len(found) == 1, 0.0, " ".join(found))


def failure(how: str, folder: Path, device: str) -> Row:
    """Two ranks of which one fails: both must end, in time, and rank 0 must say who it was."""
    if how == "device stands" and device == "cpu":
        return Row(how, "2", None, found="needs a GPU")
    (place := folder / how).mkdir()
    on_device = how == "device stands"  # nobody can be named, and ranks end at ranks.py's own limit
    job = run_ranks(2, 2, [str(place), "fails"], device, 140.0 if on_device else 60.0)
    first = job.said[0]
    held = 0 not in job.codes and -9 not in job.codes[:1] and "AssertionError" not in first
    named = re.compile(r"\brank(\(s\))? 1\b")
    lines = [line for line in first.strip().splitlines() if named.search(line)]
    held = held and (on_device or bool(lines))
    return Row(how, "2", held, job.seconds, f"exit {job.codes}: {[first, *lines][-1][:200]}")


def run_all(device: str, plan: list[tuple[int, int, list[str]]], faults: list[str]) -> list[Row]:
    """All rows, printed as they come."""
    rows: list[Row] = []
    ends = time.monotonic() + LIMIT_S

    def add(*new: Row) -> None:
        for row in new:
            rows.append(row)
            word = {True: "held", False: "FAILED", None: "not run"}[row.held]
            print(
                f"{word:8}{row.check:18}{row.ranks:>7} {row.seconds:6.1f} s  {row.found}",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        for world_size, a_host, checks in plan:
            ranks = str(world_size) if a_host == world_size else f"{world_size // a_host}x{a_host}"
            left = ends - time.monotonic()
            if left < 20:
                add(*(Row(check, ranks, None, found="no time left") for check in checks))
                continue
            job = run_ranks(world_size, a_host, [folder, *checks], device, left)
            add(*rows_of(job, checks, ranks))
            if not rows[-1].held:
                print(f"\n--- rank 0 of {ranks}\n{job.said[0][-4000:]}\n", flush=True)
            if rows[-1].check == "plain" and not rows[-1].held:
                return rows  # nothing else can work
        if any(row.check == "one_hash" for row in rows):
            add(equal_hashes(rows))
        for how in faults:
            add(failure(how, Path(folder), device))
    return rows


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--short", action="store_true", help="one and two ranks, two faults")
    asked = parser.parse_args()
    if asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("no GPU here: nothing was run (--device cpu runs the same programs over Gloo)")
            return 0
        card, nccl = torch.cuda.get_device_name(0), ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    short = [entry for entry in PLAN if entry[0] <= 2]
    plan, faults = (short, list(FAULTS[:2])) if asked.short else (PLAN, list(FAULTS))
    rows = run_all(asked.device, plan, faults)
    failed = sum(row.held is False for row in rows)
    print(f"{len(rows)} rows, {failed} failed, {sum(row.held is None for row in rows)} not run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
