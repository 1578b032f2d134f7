"""`gradsync demo`: what is promised, tried on this machine by the other commands, one by one.

train      one rank, then two: one hash of the weights?
drill      one of two ranks is killed: named, and resumed to that same hash?
verify     strategies beside one rank
bench      steps beside ranks that never communicate, and beside DDP
report     a page about both runs
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradsync.cli.ranks import Signals, until_stopped
from gradsync.core.files import read_object
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.arguments import parse
from gradsync.runtime.resolve import resolve

Document = Mapping[str, Any]

_TRAIN = ("tiny", "--device", "cpu", "--dtype", "fp32", "--sample-tokens", "0")
_SIZES = ("--steps", "60", "--tokens-per-update", "2048", "--optim.warmup-steps", "5")
_SIZES += ("--eval.every", "60", "--checkpoint.every", "20")
_QUICK = ("--steps", "6", "--tokens-per-update", "256", "--model.block-size", "64")
_QUICK += ("--eval.max-tokens", "1024", "--checkpoint.every", "2")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Try here what gradsync promises, on two cores in a few minutes: train a small GPT on one rank
    and on two, kill one of two ranks, hold strategies against one rank, time them, and write a page
    about it. Ends with what that proved. Ranks are on the CPU.

    Each command is printed before it runs. Exit code 1: something was not as promised.
    """

    out: str = ""
    """Folder to make, with the runs and all results; default: runs/demo-DATE-TIME."""
    quick: bool = False
    """Fewer steps and strategies: about a minute."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync demo ARGV`: 0 when all was as promised, else 1.

    Raises:
        ConfigError: the folder is there already; started by a launcher.
        RunError: a command failed.
    """
    options = parse(DemoOptions, argv, "demo")
    world = resolve(environ.snapshot()).world
    if world.is_distributed:
        raise ConfigError(f"{world.launcher} has started ranks: gradsync demo starts its own")
    out = Path(options.out or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; name a new folder")
    out.mkdir(parents=True)

    def carry_out() -> int:
        started = time.monotonic()
        with Signals(), environ.exported({"CUDA_VISIBLE_DEVICES": ""}):
            holds, lines = _carry_out(out, quick=options.quick)
        title = "as promised:" if holds else "NOT as promised:"
        print("\n".join(["", title, *lines, f"took       {time.monotonic() - started:.0f} s"]))
        return 0 if holds else 1

    return until_stopped(world, carry_out)


def _carry_out(out: Path, *, quick: bool) -> tuple[bool, list[str]]:
    """Run the commands; see `_summary`."""
    flags = (*_TRAIN, *(_QUICK if quick else _SIZES))
    runs = [str(out / "one-rank"), str(out / "two-ranks")]
    one = _ask(out / "one-rank.json", "train", *flags, "--out", runs[0])
    traced = ("--profile=4", "--nproc-per-node=2", "--out", runs[1])
    two = _ask(out / "two-ranks.json", "train", *flags, *traced)
    fault = ("--fault=kill", f"--step={3 if quick else 30}", "--expect", one["weights_sha256"])
    drill = _ask(out / "drill.json", "drill", *fault, after=("--", *flags))
    cells = ("--strategies=invariant,bucketed,zero1,ddp", "--models=mlp,gpt")
    cells = ("--strategies=invariant", "--models=mlp") if quick else cells
    verified = _ask(out / "verify.json", "verify", *cells, "--world-size=2", "--dtype=fp32")
    turns = ("--rounds=2", "--num-steps=2", "--num-warmup=1", "--context-length=64")
    bench = ("--model-size=tiny", "--strategies=invariant,torch_ddp", "--device=cpu")
    bench += turns if quick else ("--rounds=3",)
    timed = _ask(out / "bench.json", "bench", "sync", *bench)
    page = str(out / "report.html")
    if code := _run(["report", *runs, "--verify", str(out / "verify.json"), "--out", page]):
        raise RunError(f"gradsync report ended with exit code {code}; it has said why above")
    found = {"one": one, "two": two, "drill": drill, "verify": verified, "bench": timed}
    return _summary(found, page)


def _ask(file: Path, *words: str, after: Sequence[str] = ()) -> Document:
    """The JSON document that a command prints, which is kept in `file`."""
    with file.open("w", encoding="utf-8") as output:
        code = _run([*words, "--json", *after], output)
    document = read_object(file)
    if code > 1 or not document:
        raise RunError(f"gradsync {words[0]} ended with exit code {code}; it has said why above")
    return document


def _run(words: Sequence[str], output: IO[str] | None = None) -> int:
    """Exit code of a command, which is printed first."""
    print(f"\n$ gradsync {shlex.join(words)}", flush=True)
    child = subprocess.Popen([sys.executable, "-m", "gradsync", *words], stdout=output)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.terminate()  # it ends its ranks itself
        child.wait()
        raise


def _summary(found: Mapping[str, Document], page: str) -> tuple[bool, list[str]]:
    """Whether all is as promised, and a line for each thing tried; `found` by command."""
    one, two, kill, cells = (found[name] for name in ("one", "two", "drill", "verify"))
    same = one["weights_sha256"] == two["weights_sha256"]
    said = kill["line"].partition(";")[0].removeprefix("gradsync: error: ")
    resumed = "the same hash" if kill["same_weights"] else "ANOTHER hash"
    broken = "".join(f"; NOT as promised: {problem}" for problem in kill["broken"])
    passed = [cell for cell in cells["cells"] if cell["status"] == "passed"]
    names = ", ".join(dict.fromkeys(cell["strategy"] for cell in cells["cells"]))
    steps = [
        f"{row['contestant']} {row['total_ms']['median']:.1f} ms ({row['ratio']['median']:.2f})"
        for row in found["bench"]["rows"]
        if not row["contestant"].startswith("none")
    ]
    rows = {
        "weights": f"{'one hash' if same else 'NOT one hash'} on 1 and 2 ranks after "
        f"{one['steps']} steps: {one['weights_sha256'][:16]}… {two['weights_sha256'][:16]}…",
        "failure": f"a killed rank was named after {kill['named_s']} s ({said}); resumed from "
        f"step {kill['went_on_from']} to {resumed}{broken}",
        "strategies": f"{len(passed)} of {len(cells['cells'])} comparisons with one rank passed "
        f"({names})",
        "speed": f"a step on 2 ranks: {', '.join(steps)}; in brackets: times one that sends "
        "nothing (few and small steps: gradsync bench sync takes more)",
        "loss": f"{one['val_loss']:.2f} nats on validation text after {one['steps']} steps "
        f"({one['unigram_entropy']:.2f} by counting bytes)",
        "report": page,
    }
    holds = same and not kill["broken"] and cells["passed"]
    lines = [f"{name:<11}{text}" for name, text in rows.items()]
    return holds, [*lines[:3], "measured:", *lines[3:]]
