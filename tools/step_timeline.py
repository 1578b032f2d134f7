"""When the parts of a training step between two hosts run: a picture for docs/guide.

    python tools/step_timeline.py            measure (root; half a minute), write record and picture
    python tools/step_timeline.py --draw     draw the record anew

Two ranks train `mini` in network namespaces at 1 Gbit/s, as `gradsync bench network` does. What one
of them does is noted around the functions that do it, in its fourth and fifth step: forward,
backward and update on the thread that computes, each bucket's halves on the one that sends.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "network" / "timeline.json"
PICTURE = ROOT / "docs" / "guide" / "timeline.svg"
RATE_MBIT, RANKS, TOKENS, STEPS, FIRST = 1000, 2, 512, 6, 3
COLORS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "agree, norm": "#7f7f7f",
    "update": "#fdae6b",
    "in": "#74c476",
    "out": "#238b45",
}
WORDS = {
    "in": "a bucket's slices to their owners, who add",
    "out": "the bucket's sum to all ranks",
    "update": "weights, when first used",
}


class Notes:
    """Spans of time: (lane, what, bucket or -1, first and last second)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int, float, float]] = []

    @contextmanager
    def span(self, lane: str, what: str, bucket: int = -1) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spans.append((lane, what, bucket, began, time.perf_counter()))

    def around(self, owner: Any, name: str, lane: str, what: str, number: Any) -> None:
        """Note every call of a method; `number` finds its bucket among the arguments."""
        plain: Callable[..., Any] = getattr(owner, name)

        def noted(this: Any, *given: Any) -> Any:
            with self.span(lane, what, number(this, *given)):
                return plain(this, *given)

        setattr(owner, name, noted)


def rank() -> None:
    """Train as one rank, and write the spans of two steps to standard output."""
    import torch
    from torch.nn import functional as F

    import gradsync as gs
    from gradsync.models.config import PRESETS
    from gradsync.models.gpt import GPT
    from gradsync.sync.late_update import LateReplicas
    from gradsync.sync.tree_exchange import TreeExchange

    notes, steps = Notes(), []
    buckets: dict[int, int] = {}
    notes.around(TreeExchange, "_reduce", "cable", "in", lambda _, b: buckets[b[0].data_ptr()])
    notes.around(TreeExchange, "_gather", "cable", "out", lambda _, b: buckets[b.data_ptr()])
    notes.around(LateReplicas, "_update_bucket", "compute", "update", lambda _, number: number)
    with gs.init(threads=1) as world:
        torch.manual_seed(0)
        model = GPT(PRESETS["mini"])
        sync = gs.replicate(model, world, collective="backend", overlap_publish=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, 8000, (1, TOKENS))
        for _ in range(STEPS):
            buckets |= {b.flat(0).data_ptr(): n for n, b in enumerate(sync.reducer.buckets)}
            began = time.perf_counter()
            with notes.span("compute", "forward"), torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens).flatten(0, 1).float()
                loss = F.cross_entropy(logits, tokens.flatten(), reduction="sum")
            with notes.span("compute", "backward"), sync.micro_step(last=True, index=world.rank):
                sync.backward(loss, weight=TOKENS)
            with notes.span("compute", "agree, norm"):
                sync.step(optimizer, clip_norm=1.0)
            steps.append((began, time.perf_counter()))
        sync.wait()
    (first, _), (_, last) = steps[FIRST], steps[FIRST + 1]
    chosen = [span for span in notes.spans if span[4] > first and span[3] < last]
    said = {
        "spans": [(*span[:3], span[3] - first, span[4] - first) for span in chosen],
        "steps_s": [ended - began for began, ended in steps[FIRST : FIRST + 2]],
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(json.dumps(said))


def measure() -> None:
    """Train between two namespaces, and write the record."""
    from gradsync.bench.network import namespaces

    with namespaces(RANKS, RATE_MBIT) as hosts, tempfile.TemporaryFile("w+") as out:
        shared = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "10.83.0.1"}
        shared |= {"MASTER_PORT": 29_400, "GRADSYNC_TOKEN": secrets.token_hex(32)}
        started = []
        for number in range(RANKS):
            own = shared | {"RANK": number, "LOCAL_RANK": 0, "GROUP_RANK": number}
            argv = ["ip", "netns", "exec", hosts[number], sys.executable, __file__, "--rank"]
            variables = os.environ | {name: str(value) for name, value in own.items()}
            where = None if number else out
            started.append(subprocess.Popen(argv, env=variables, stdout=where))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        out.seek(0)
        found = json.loads(out.read())
    found |= {"date": time.strftime("%Y-%m-%d"), "rate_mbit": RATE_MBIT, "ranks": RANKS}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def draw() -> None:
    """Draw the record."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = json.loads(RECORD.read_text())
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes: Any = figure.subplots()
    rows = {"compute": 1, "cable": 0}
    end = sum(found["steps_s"])
    order = ("forward", "backward", "agree, norm", "in", "out", "update")
    for lane, what, number, *times in sorted(found["spans"], key=lambda s: order.index(s[1])):
        a, b = max(times[0], 0.0), min(times[1], end)
        row, high = rows[lane], 0.34 if what == "update" else 0.62
        axes.barh(row, b - a, left=a, height=high, color=COLORS[what], edgecolor="white", lw=0.6)
        if number >= 0 and b - a > 0.012 * end:
            axes.text((a + b) / 2, row, str(number + 1), ha="center", va="center", fontsize=8)
    axes.axvline(found["steps_s"][0], color="#444", lw=1, ls=(0, (4, 3)))
    axes.text(found["steps_s"][0], 1.42, " next step", fontsize=9, color="#444")
    axes.set_yticks(list(rows.values()), list(rows), fontsize=10)
    axes.set_xlabel("seconds; numbers: buckets, in the order of backward")
    axes.set_xlim(0, end)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    patches = [
        Patch(color=COLORS[what], label=f"{what}: {WORDS[what]}" if what in WORDS else what)
        for what in COLORS
    ]
    figure.legend(handles=patches, loc="outside upper left", ncols=3, frameon=False, fontsize=8.5)
    said = f"mini, {RANKS} hosts, {found['rate_mbit']} Mbit/s, {TOKENS} tokens a rank and step; "
    said += f"rank 0. CPU, {found['cores']} cores, torch {found['torch']}, {found['date']}"
    figure.supxlabel(said, x=0.01, ha="left", fontsize=7.5, color="#666")
    figure.savefig(PICTURE, facecolor="white", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw the record anew")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank()
        return
    if not args.draw:
        measure()
    draw()


if __name__ == "__main__":
    main()
