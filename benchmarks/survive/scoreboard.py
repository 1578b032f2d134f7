"""What happens when `kill -9` ends a rank in the middle of training, under gradsync and others.

    python benchmarks/survive/scoreboard.py --out benchmarks/survive/scoreboard
    python benchmarks/survive/scoreboard.py --table     the record as a table, into the guide

Each contestant trains contestant.py on three ranks, once undisturbed and then with rank 1 killed in
the middle of a step; trials of the contestants take turns. torchft takes part if it can be
imported, as its README has it: a lighthouse, and a torchrun for each replica group of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

import psutil

from gradsync.commands.bench.experiment import environment, write_record

HERE = Path(__file__).resolve().parent
RECORD = HERE / "scoreboard" / "record.json"
PAGE = HERE.parents[1] / "docs" / "guide" / "resuming.md"
SECTION = re.compile(r"<!-- survive -->\n.*?<!-- survive: end -->", re.DOTALL)
PROGRAM = HERE / "contestant.py"
RANKS, STEPS, KILL_AT, TRIALS, LIMIT_S = 3, 160, 25, 5, 60
MICRO_BATCHES, ROWS = 12, 4  # of a step, as in the program
NAMED = re.compile(r"rank(?:\(s\))?['\"]? *[:=]? *\[?1\b|train_ddp_1\b", re.IGNORECASE)
"""A line that names rank 1, as torchrun's `local_rank: 1` does; or its replica group."""
MEMBERS = re.compile(r"quorum", re.IGNORECASE)
"""A line of torchft that lists the groups that take part."""
FOLDERS = re.compile(r"(?<![\w./:-])/(?:[\w.-]+/)+")
"""Of a path in a line: they are this machine's."""


class Contestant(NamedTuple):
    """How ranks are started, and what the program does."""

    title: str
    side: str
    command: list[str]
    on_loss: str = "end"
    env: Mapping[str, str] = {}


TORCHRUN = ["torch.distributed.run", "--standalone", "--max-restarts=3"]
DDP = [*TORCHRUN, f"--nproc-per-node={RANKS}"]
LAUNCH = ["gradsync", "launch", "--nproc-per-node", str(RANKS)]
SHRINK = [*LAUNCH, "--on-loss", "shrink"]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
CONTESTANTS = {
    "torchrun": Contestant("torchrun, DDP", "ddp", DDP),
    # A store that outlives the restart has the addresses of the ranks that are gone.
    "torchrun-own-store": Contestant("torchrun¹, DDP", "ddp", DDP, env=OWN_STORE),
    "torchft": Contestant("torchft", "torchft", [*TORCHRUN, "--nproc-per-node=1"]),
    "restart": Contestant("`--max-restarts`", "gradsync", [*LAUNCH, "--max-restarts", "3", "--"]),
    "shrink": Contestant("`--on-loss shrink`", "gradsync", [*SHRINK, "--"], "shrink"),
    "rejoin": Contestant("`--rejoin`", "gradsync", [*SHRINK, "--rejoin", "3", "--"], "shrink"),
}


def main() -> None:
    """Measure and keep a record, or print it as a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="nothing is measured")
    options = parser.parse_args()
    if options.table:
        text = table(json.loads(RECORD.read_text("utf-8")))
        print(text)
        section = f"<!-- survive -->\n{text}\n<!-- survive: end -->"
        PAGE.write_text(SECTION.sub(section, PAGE.read_text("utf-8")), "utf-8")
        return
    about = environment(world_size=RANKS, threads=1)
    data = measure()
    if options.out:
        parts = {"name": "survive scoreboard", "environment": about, "data": data}
        command = "python benchmarks/survive/scoreboard.py"
        write_record(options.out, command=command, **parts)


def measure() -> dict[str, Any]:
    """Of each contestant, the undisturbed run, the trials, and a summary of them."""
    rows: dict[str, Any] = {}
    installed = metadata.packages_distributions().get("torchft", [])  # stable or nightly
    for name, (_, side, command, _, env) in CONTESTANTS.items():
        if side != "torchft" or installed:
            words = [*(f"{key}={value}" for key, value in env.items()), "python", "-m", *command]
            rows[name] = {"command": shlex.join(words), "trials": []}
            rows[name]["undisturbed"] = run(name, -1)
            print(name, "undisturbed", json.dumps(rows[name]["undisturbed"]), flush=True)
    for _ in range(TRIALS):
        for name, row in rows.items():
            row["trials"].append(run(name, KILL_AT))
            print(name, json.dumps(row["trials"][-1]), flush=True)
    for row in rows.values():
        hashes = row["undisturbed"]["sha256"]
        for trial in row["trials"]:
            trial["same_weights"] = len(hashes) == 1 and trial["sha256"] == hashes
        row["summary"] = summary(row["trials"])
    return {
        "program": {"steps": STEPS, "killed_at": KILL_AT, "save_every": 10, "limit_s": LIMIT_S},
        "torchft": {package: metadata.version(package) for package in installed},
        "contestants": rows,
    }


# -- one run --------------------------------------------------------------------------------------


def run(name: str, kill_at: int) -> dict[str, Any]:
    """Train once; what came of it."""
    _, side, command, on_loss, variables = CONTESTANTS[name]
    said: list[tuple[float, str]] = []
    threads = []

    def follow(stream: IO[str], own: bool) -> None:
        """Keep its lines, with the time at which they came."""
        for line in stream:
            if not own:  # a group that is back says its name in every line
                said.append((time.monotonic(), FOLDERS.sub("", line.rstrip())))

    with tempfile.TemporaryDirectory(prefix="scoreboard-") as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | variables

        def start(words: list[str], side: str, **more: str) -> subprocess.Popen[str]:
            given = [PROGRAM, side, folder, STEPS, on_loss, kill_at]
            line = [sys.executable, *words, *map(str, given)]
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
            child = subprocess.Popen(line, **pipe, env=env | more)
            own = more.get("REPLICA_GROUP_ID") == "1"
            threads.append(threading.Thread(target=follow, args=(child.stdout, own), daemon=True))
            threads[-1].start()
            return child

        if side == "torchft":
            with socket.create_server(("", 0)) as free:
                port = free.getsockname()[1]
            more = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "NUM_REPLICA_GROUPS": "3"}
            lighthouse = start([], "lighthouse", **more)
            groups = [{"REPLICA_GROUP_ID": str(group), **more} for group in range(RANKS)]
            codes = wait([start(["-m", *command], side, **each) for each in groups], folder)
            lighthouse.wait()
        else:
            codes = wait([start(["-m", *command], side)], folder)
        diary = [json.loads(x) for p in Path(folder).glob("*.jsonl") for x in p.open()]
    for thread in threads:
        thread.join(5)
    said.sort()
    found = {"exit_code": next((code for code in codes if code != 0), 0)}
    found["sha256"] = sorted({x["sha256"] for x in diary if x["kind"] == "ends"})
    found |= judge(sorted(diary, key=lambda x: x["at"]), said)
    if found["exit_code"] != 0:
        found["last_lines"] = [line[:300] for _, line in said[-15:]]
    return found


def wait(children: Sequence[subprocess.Popen[str]], folder: str) -> list[int | None]:
    """Exit codes, None after the limit; then ends what is left."""
    until, codes = time.monotonic() + LIMIT_S, []
    for child in children:
        try:
            codes.append(child.wait(max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in psutil.process_iter(["cmdline"]):
        if folder in (process.info["cmdline"] or []):
            process.send_signal(signal.SIGKILL)
    for child in children:
        child.wait()
    return codes


def judge(diary: list[dict[str, Any]], said: list[tuple[float, str]]) -> dict[str, Any]:
    """Times since the kill, in seconds, or None for never; and the samples that count."""
    commits = [x for x in diary if x["kind"] == "committed"]
    death = next((x for x in diary if x["kind"] == "dies"), None)
    ends = [x["at"] for x in diary if x["kind"] == "ends"]
    lost, repeated = count_samples(commits) if ends else (None, None)
    found: dict[str, Any] = {"samples_lost": lost, "samples_repeated": repeated}
    if death is None:
        times = [x["at"] for x in commits if x["rank"] == 0]
        paces = [round(b - a, 4) for a, b in pairwise(times)]
        return found | {"steps": len(times), "step_s": median(paces) if paces else None}

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - death["at"], 3)

    after = [x for x in commits if x["at"] > death["at"]]
    # Another rank may still write down the step before.
    after = [x for x in after if x["step"] >= death["step"] or x["start"] > death["start"]]
    naming = [(t, x) for t, x in said if NAMED.search(x) and not MEMBERS.search(x)]
    named = next(((t, x) for t, x in naming if t > death["at"]), (None, ""))
    first = after[0] if after else None
    again = next((x["at"] for x in after if x["step"] >= death["step"]), None)
    return found | {
        "named_s": since(named[0]),
        "named_by": named[1][:300],
        "next_step_s": since(first and first["at"]),
        "went_on_from": first and first["step"],
        "steps_lost": first and death["step"] - first["step"],
        "killed_step_done_s": since(again),
        "all_ranks_s": since(next((x["at"] for x in after if x["ranks"] == RANKS), None)),
        "end_s": since(max(ends, default=None)),
    }


def count_samples(commits: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Samples that the final weights lack, and have twice; of each step its last start counts."""
    lost = repeated = 0
    for step in range(STEPS):
        mine = [x for x in commits if x["step"] == step]
        last = max((x["start"] for x in mine), default=0)
        dealt = [index for x in mine if x["start"] == last for index in x["indices"]]
        lost += len(set(range(MICRO_BATCHES)) - set(dealt))
        repeated += len(dealt) - len(set(dealt))
    return lost * ROWS, repeated * ROWS


# -- the table ------------------------------------------------------------------------------------


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and range of the times, how often there was none, and how often the rest came."""
    found: dict[str, Any] = {"of": len(trials)}
    for key in ("named_s", "next_step_s", "killed_step_done_s", "all_ranks_s", "steps_lost"):
        values = [trial[key] for trial in trials if trial[key] is not None]
        found[key] = {"never": len(trials) - len(values)}
        if values:
            found[key] |= {"low": min(values), "high": max(values), "median": median(values)}
    found["same_weights"] = sum(trial["same_weights"] for trial in trials)
    for key in ("samples_lost", "samples_repeated"):
        found[key] = sorted({trial[key] for trial in trials if trial[key] is not None})
    return found | {"exit_codes": [trial["exit_code"] for trial in trials]}


def cell(found: dict[str, Any], digits: int) -> str:
    """`median (lowest-highest)`, the median alone where all are the same, or `never`."""
    if "median" not in found:
        return "never"
    middle, low, high = (f"{found[key]:.{digits}f}" for key in ("median", "low", "high"))
    text = middle if low == high else f"{middle} ({low}-{high})"
    return text + (f"; {found['never']}x never" if found["never"] else "")


def table(record: dict[str, Any]) -> str:
    """The record for the guide."""
    about = record["environment"]
    head = ["", "named", "next step", "steps lost", "all ranks", "same bits", "exit code"]
    rows = [head, ["---"] * len(head)]
    for name, row in record["contestants"].items():
        found = row["summary"]
        keys = {"named_s": 2, "next_step_s": 1, "steps_lost": 0, "all_ranks_s": 1}
        times = [cell(found[key], digits) for key, digits in keys.items()]
        codes = {"hangs" if code is None else str(code) for code in found["exit_codes"]}
        bits = f"{found['same_weights']}/{found['of']}"
        rows.append([CONTESTANTS[name].title, *times, bits, ", ".join(sorted(codes))])
    first = f"Seconds from `kill -9` of rank 1 of 3 ({about['cpu']}, torch {about['torch']}):"
    versions = "".join(f"; {name} {said}" for name, said in record["torchft"].items())
    last = f"¹ `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`{versions}"
    return "\n".join([first, "", *(f"| {' | '.join(row)} |" for row in rows), "", last])


if __name__ == "__main__":
    main()
