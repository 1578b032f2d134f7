"""The same faults under torchrun with torch's DDP, and under gradsync: who is named, and when.

    python tools/fault_scoreboard.py            run them (about ten minutes), write record and table
    python tools/fault_scoreboard.py --check    exit 1 when the page's table is not the record's

Three ranks train a small model on this machine; something happens on rank 1 in step 3. Both sides
get the same `timeout`, so that an end can be seen. The record lies in benchmarks/scoreboard, the
table in docs/guide/when-it-hangs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "scoreboard" / "record.json"
PAGE = ROOT / "docs" / "guide" / "when-it-hangs.md"
SECTION = re.compile(r"<!-- scoreboard -->\n.*?<!-- scoreboard: end -->", re.DOTALL)
SIDES = {"torch": "torchrun + DDP", "launch": "gradsync launch", "torchrun": "torchrun + gradsync"}
TIMEOUT_S, LIMIT_S = 20, 45
RANKS = 3
NAMED = re.compile(r"\brank(?:\(s\))? *[:=]? *1\b", re.IGNORECASE)
"""A line that names rank 1, as torchrun's summary and the prefix of a traceback do."""
KINDS = {
    "kill": "`kill -9`",
    "raise": "an exception",
    "leave": "`sys.exit(0)`",
    "stop": "SIGSTOP",
    "busy": "spins in Python",
    "lock": "holds Python's lock",
    "skip": "skips a collective",
    "extra": "makes one more",
    "shape": "another shape",
    "dtype": "another dtype",
    "swap": "two tensors swapped",
    "nan": "nan in its gradient",
    "weights": "its weights change",
}

PROGRAM = """
import os, re, signal, sys, time
import torch
from torch import nn

KIND, SIDE, FOLDER, TIMEOUT_S = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])


def read_batch(step, rank):
    if (rank, step) == (1, 3):
        open(os.path.join(FOLDER, "at"), "w").write(str(time.monotonic()))
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if KIND == "raise":
            raise ValueError("a broken file")
        if KIND == "leave":
            sys.exit(0)
        if KIND == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while KIND == "busy":
            pass
        if KIND == "lock":
            re.match(r"(a+)+$", "a" * 40 + "b")
    return torch.ones(4, 16)


def train(rank, model, all_reduce):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        x, odd = read_batch(step, rank), (rank, step) == (1, 3)
        if odd and KIND == "weights":
            next(model.parameters()).data.add_(1.0)
        loss = model(x).square().mean()
        if odd and KIND == "nan":
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if odd and KIND == "skip":
            continue
        a, b = torch.ones(4) * rank, torch.ones(4) * 10
        if odd and KIND == "swap":
            a, b = b, a
        if odd and KIND == "shape":
            a = torch.ones(6)
        if odd and KIND == "dtype":
            a = torch.ones(4, dtype=torch.int32)
        names = "ba" if odd and KIND == "swap" else "ab"
        all_reduce(a, names[0])
        all_reduce(b, names[1])
        if odd and KIND == "extra":
            all_reduce(b, "b")


model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
if SIDE == "torch":
    from datetime import timedelta
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    model = nn.parallel.DistributedDataParallel(model)
    train(dist.get_rank(), model, lambda x, _: dist.all_reduce(x))
    dist.destroy_process_group()
else:
    import gradsync as gs

    with gs.init(device="cpu", timeout_s=TIMEOUT_S, threads=1) as world:
        sync = gs.replicate(model, world)
        train(world.rank, model, lambda x, name: gs.all_reduce(x, name=name, world=world))
"""


def run(kind: str, side: str) -> dict[str, Any]:
    """One fault: seconds until rank 1 is named and until all have ended, and what is left."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        ranks = f"--nproc-per-node={RANKS}"
        start = ["torch.distributed.run", "--standalone", ranks]
        if side == "launch":
            start = ["gradsync", "launch", ranks, "--"]
        command = [sys.executable, "-m", *start, str(program), kind, side, folder, str(TIMEOUT_S)]
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines: list[tuple[float, str]] = []
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        began, code, rest = time.monotonic(), None, ""
        while code is None and time.monotonic() - began < LIMIT_S:
            time.sleep(0.02)
            code = child.poll()
            rest += (child.stdout.read() or b"").decode(errors="replace")
            *whole, rest = rest.split("\n")
            lines += [(time.monotonic(), line) for line in whole]
        ended = time.monotonic()
        left = [p for p in psutil.process_iter(["cmdline"]) if folder in (p.info["cmdline"] or [])]
        for process in {*left, *([psutil.Process(child.pid)] if code is None else [])}:
            process.send_signal(signal.SIGKILL)
        child.wait()
        mark = Path(folder) / "at"
        at = float(mark.read_text()) if mark.exists() else began
    seen = [(when - at, line) for when, line in lines if when >= at]
    named = next(((when, line) for when, line in seen if NAMED.search(line)), None)
    return {
        "kind": kind,
        "side": side,
        "named_s": None if named is None else round(named[0], 1),
        "line": "" if named is None else named[1][:300],
        "place": any("train.py:" in line and NAMED.search(line) for _, line in seen),
        "ended_s": None if code is None else round(ended - at, 1),
        "exit_code": code,
        "left": len(left) if code is not None else 0,
    }


def cell(found: dict[str, Any]) -> str:
    """The table's text about one run."""
    if found["exit_code"] == 0:
        end = "ends as if nothing were"
    elif found["ended_s"] is None:
        end = f"still there after {LIMIT_S} s"
    else:
        end = f"ends after {found['ended_s']:.0f} s with {found['exit_code']}"
    place = ", with its line" if found["place"] else ""
    said = "" if found["named_s"] is None else f"rank 1 named after {found['named_s']:.0f} s{place}"
    left = f"; {found['left']} processes left" if found["left"] else ""
    return f"{said or 'no rank named'}; {end}{left}"


def table(record: dict[str, Any]) -> str:
    """The page's section."""
    found = {(each["kind"], each["side"]): each for each in record["runs"]}
    rows = ["| on rank 1 | " + " | ".join(SIDES.values()) + " |", "|---" * (len(SIDES) + 1) + "|"]
    for kind, name in KINDS.items():
        rows.append(f"| {name} | " + " | ".join(cell(found[kind, side]) for side in SIDES) + " |")
    about = (
        f"Three ranks, step 3, time limit of a collective {TIMEOUT_S} s on both sides (torch's "
        "own default is 30 minutes; torchrun's summary counts as naming, though it may list others "
        f"too); {record['machine']}, torch {record['torch']}, "
        f"{record['date']}. Seconds count from the fault."
    )
    return "\n".join(["<!-- scoreboard -->", about, "", *rows, "<!-- scoreboard: end -->"])


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=[])
    options = parser.parse_args()
    page = PAGE.read_text("utf-8")
    if options.check:
        wanted = table(json.loads(RECORD.read_text("utf-8")))
        return int(wanted not in page)
    runs = []
    for kind in options.only or KINDS:
        for side in SIDES:
            runs.append(run(kind, side))
            print(f"{kind:8} {side:9} {cell(runs[-1])}\n    {runs[-1]['line'][:160]}", flush=True)
    if not options.only:
        import torch

        record = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "runs": runs,
        }
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(SECTION.sub(lambda _: table(record), page))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
