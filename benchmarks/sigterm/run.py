"""SIGTERM to every process of a run at once, as a scheduler sends it, with loader workers.

    python benchmarks/sigterm/run.py [--trials 20] --out FOLDER

Each trial must end with exit code 75, a checkpoint that loads, and no process left, within 10 s.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gradsync.checkpoint.store import CheckpointStore
from gradsync.commands.bench.experiment import environment, write_record

PROGRAM = Path(__file__).with_name("program.py")
METHODS = ("fork", "spawn", "forkserver")


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [trial(seed) for seed in range(options.trials)]
    good = sum(row["exit_code"] == 75 and row["saved"] and not row["left"] for row in rows)
    slowest = max(row["seconds"] for row in rows)
    found = {"good": good, "of": len(rows), "slowest_s": slowest, "trials": rows}
    print(json.dumps({name: found[name] for name in ("good", "of", "slowest_s")}))
    if options.out:
        write_record(
            options.out,
            name="sigterm",
            command="python benchmarks/sigterm/run.py",
            environment=environment(world_size=2, threads=1),
            data=found,
        )


def trial(seed: int) -> dict[str, Any]:
    """One run, and a SIGTERM to all its processes at a random moment."""
    draw, method = random.Random(seed), METHODS[seed % len(METHODS)]
    with tempfile.TemporaryDirectory(prefix="sigterm-") as name:
        folder = Path(name)
        launch = [sys.executable, "-m", "gradsync", "launch", "--nproc-per-node", "2", "--"]
        with (folder / "said").open("w") as said:
            words = [*launch, str(PROGRAM), name, method]
            run = psutil.Popen(words, stdout=subprocess.DEVNULL, stderr=said)
            until = time.monotonic() + 60
            while not (folder / "trains").exists() and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(draw.random())
            everyone = [run, *run.children(recursive=True)]
            began = time.monotonic()
            for each in draw.sample(everyone, len(everyone)):
                with suppress(psutil.Error):
                    each.send_signal(signal.SIGTERM)
            code = run.wait(60)
        seconds = round(time.monotonic() - began, 2)
        _, left = psutil.wait_procs(everyone, timeout=2)
        newest, problems = CheckpointStore(folder / "checkpoints").latest()
        row = {
            "method": method,
            "processes": len(everyone),
            "exit_code": code,
            "saved": newest is not None and not problems,
            "left": len(left),
            "seconds": seconds,
        }
        if code != 75:
            print((folder / "said").read_text()[-1000:], file=sys.stderr)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
