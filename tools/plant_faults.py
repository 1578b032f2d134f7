"""Plant faults drawn from a seed, one drill each, and write what followed into a record.

    python tools/plant_faults.py FOLDER [--count 60] [--seed 0] [--kinds kill,stop] [--ranks 2,3,4]

Kinds come in turn; rank, step, moment, number of ranks, and whether ranks share memory or send
messages are drawn. The run is a GPT of 40 thousand parameters, 8 steps; one that a fault ended goes
on on one rank, to the bits of all. Prints a line for each fault, then a table;
`FOLDER/record.json` has every verdict. Exit code 1 when a promise broke.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from gradsync.commands.bench.experiment import environment, write_record
from gradsync.commands.cli.drill import Verdict, drill
from gradsync.commands.train.faults import FAULTS, FaultPlan

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
sys.path.append(TESTS)
from support import more_faults  # noqa: E402

FLAGS = (
    *("tiny", "--steps=8", "--dtype=fp32", "--device=cpu", "--eval.every=0"),
    *("--model.n-layer=1", "--model.n-embd=48", "--model.block-size=16", "--eval.max-tokens=64"),
    *("--tokens-per-update=128", "--micro-batch-size=1"),
)
QUICK = ("--timeout-s=6",)
"""For faults whose rank is to be named within five seconds."""
PATHS = {"shared memory": (), "messages": ("--sync-options", "collective=backend")}


def draw(count: int, seed: int, kinds: list[str], ranks: list[int]) -> Iterator[tuple[Any, ...]]:
    """(plan, number of ranks, path) of each fault."""
    random = Random(seed)
    for number in range(count):
        kind, world_size = kinds[number % len(kinds)], random.choice(ranks)
        phase = random.choice(FAULTS[kind].phases)
        rank = 0 if phase == "save" else random.randrange(world_size)
        plan = FaultPlan(kind=kind, rank=rank, step=random.randint(2, 5), phase=phase)
        yield plan, world_size, random.choice(list(PATHS))


def told(verdict: Verdict, path: str) -> str:
    """A verdict in a line."""
    plan = verdict.plan
    return (
        f"{plan.kind:17}{plan.moment:9}rank {plan.rank} of {verdict.world_size}, step {plan.step}, "
        f"{path:14} named {verdict.named_s:5.2f} s, ended {verdict.ended_s:5.2f} s, code "
        f"{verdict.exit_code:3}  {'; '.join(verdict.broken) or 'as promised'}"
    )


def table(faults: Sequence[dict[str, Any]]) -> str:
    """By kind: how many, how many as promised, the times, from the `faults` of records."""
    rows = ["| fault | planted | as promised | named after, s | ended after, s |"]
    rows.append("|---" * 5 + "|")
    for kind in FAULTS:
        some = [each for each in faults if each["plan"]["kind"] == kind]
        if some:
            named = _range([each["named_s"] for each in some if each["named_right"]])
            ended = _range([each["ended_s"] for each in some])
            kept = sum(not each["broken"] for each in some)
            rows.append(f"| `{kind}` | {len(some)} | {kept} | {named} | {ended} |")
    return "\n".join(rows)


def _range(seconds: list[float]) -> str:
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-"


def main() -> int:
    """Plant them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(FAULTS))
    parser.add_argument("--ranks", default="2,3,4")
    given = parser.parse_args()
    kinds, ranks = given.kinds.split(","), [int(each) for each in given.ranks.split(",")]
    facts = environment(world_size=max(ranks), threads=1)
    command = shlex.join(["python", "tools/plant_faults.py", "FOLDER", *sys.argv[2:]])
    faults, expect, written = [], "", given.folder
    os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    for plan, world_size, path in draw(given.count, given.seed, kinds, ranks):
        quick = QUICK if FAULTS[plan.kind].within_s <= 5 else ()
        flags = [*FLAGS, *quick, f"--nproc-per-node={world_size}"]
        flags += [*more_faults.FLAGS.get(plan.kind, ()), *PATHS[path]]
        verdict = drill(plan, flags, expect=expect, resume_on=1, module=more_faults.__name__)
        expect = verdict.weights  # the default, `invariant`, has one on all of these
        print(told(verdict, path), flush=True)
        faults.append({**asdict(verdict), "path": path})
        data = {"faults": faults}  # after each, so that an end before the last loses none
        written = write_record(
            given.folder, name="faults", command=command, environment=facts, data=data
        )
    print(table(faults))
    print(f"wrote {written}", file=sys.stderr)
    return int(any(each["broken"] for each in faults))


if __name__ == "__main__":
    raise SystemExit(main())
