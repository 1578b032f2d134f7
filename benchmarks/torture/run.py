"""Checkpoints under power cuts, damaged bytes, failing and full devices, and processes that die.

    python benchmarks/torture/run.py [--states 10000] [--flips 2000] [--cuts 500] --out FOLDER

What must hold each time: a checkpoint that is found is whole, and is the last one whose save had
returned, or the one being saved; damage is refused by name, never loaded. Power cuts are replayed
on a model of a disk (tests/unit/checkpoint/test_checkpoint_crash.py): unsynced bytes and names may
be lost, reordered or torn, synced ones may not.
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "unit" / "checkpoint")]

import test_checkpoint_crash as crash  # noqa: E402

from gradsync.checkpoint.store import CheckpointStore  # noqa: E402
from gradsync.commands.bench.experiment import environment, write_record  # noqa: E402
from gradsync.errors import CheckpointError  # noqa: E402

BATCH = 500  # disks kept at a time


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--flips", type=int, default=2_000)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        folder = Path(name)
        log, returned = record(folder / "recorded")
        weaker, fewer = without_syncs(log, returned)
        found = {
            "operations of four saves": len(log),
            "power cuts": power_cuts(log, returned, options.states, folder),
            "power cuts without fsync": power_cuts(weaker, fewer, options.states // 10, folder),
            "deaths": failures(len(log), crash.Death(), folder),
            "EIO": failures(len(log), OSError(errno.EIO, "I/O error"), folder),
            "ENOSPC": failures(len(log), OSError(errno.ENOSPC, "no space left"), folder),
            "bit flips": damage(options.flips, flip, folder),
            "truncations": damage(options.cuts, truncate, folder),
        }
    print(json.dumps(found, indent=2))
    if options.out:
        write_record(
            options.out,
            name="torture",
            command="python benchmarks/torture/run.py",
            environment=environment(world_size=1, threads=1),
            data=found,
        )


def record(folder: Path) -> tuple[list[Any], dict[int, int]]:
    """The operations of a few saves, and how many were done when each save returned."""
    fs = crash.Recording(folder)
    folder.mkdir()
    returned = {tag: len(fs.log) for tag in crash.run_saves(folder / "run" / "checkpoints", fs)}
    return fs.log, returned


def without_syncs(log: list[Any], returned: dict[int, int]) -> tuple[list[Any], dict[int, int]]:
    """The same by a program that never syncs a file: the search must find it wrong."""
    kept = [operation != "sync_file" for operation, *_ in log]
    fewer = {tag: sum(kept[:count]) for tag, count in returned.items()}
    return [entry for entry, keep in zip(log, kept, strict=True) if keep], fewer


def power_cuts(
    log: list[Any], returned: dict[int, int], states: int, folder: Path
) -> dict[str, int]:
    """What is found on `states` disks: the last one saved, the one being saved, or a wrong one."""
    found: Counter[str] = Counter()
    for seed in range(0, states, BATCH):
        where = folder / "disks"
        where.mkdir()
        for _, promised, tag in crash.power_cuts(
            log, returned, min(BATCH, states - seed), where, seed
        ):
            kinds = {promised: "the last one", promised + 1: "the one being saved"}
            found[kinds.get(tag, "a wrong one")] += 1
        shutil.rmtree(where)
    return dict(found)


def failures(operations: int, error: BaseException, folder: Path) -> dict[str, int]:
    """One run of saves for each operation, which fails: what is found afterwards."""
    found: Counter[str] = Counter()
    for at in range(1, operations + 1):
        where = folder / "failing" / "checkpoints"
        kind = type(error) if isinstance(error, crash.Death) else error
        fs, last, said = crash.Failing(at, kind), 0, True
        try:
            for tag in crash.run_saves(where, fs):
                last = tag
            said = fs.last in ("remove", "rename")  # tidying up: a warning
        except (CheckpointError, crash.Death):
            pass
        tag = crash.latest_tag(where)
        kinds = {last: "the last one", last + 1: "the one being saved"}
        found[kinds.get(tag, "a wrong one") if said else "silence"] += 1
        shutil.rmtree(where.parent, ignore_errors=True)
    return dict(found)


def damage(count: int, harm: Any, folder: Path) -> dict[str, int]:
    """Damage one file of the newer of two checkpoints: the older one must be taken, with a word."""
    found: Counter[str] = Counter()
    draw = random.Random(0)
    where = folder / "damaged"
    store = CheckpointStore(where, keep_last=2)
    for step in (1, 2):
        store.save(crash.snapshot(step, step))
    files = sorted(path for path in (where / "step-00000002").iterdir())
    for _ in range(count):
        path = draw.choice(files)
        before = path.read_bytes()
        path.write_bytes(harm(before, draw))
        info, problems = store.latest()
        named = any(path.name in problem or "manifest" in problem for problem in problems)
        if info is not None and info.manifest.step == 1 and problems:
            found["the one before, and said" if named else "the one before"] += 1
        else:
            found["a wrong one" if info else "none"] += 1
        path.write_bytes(before)
    shutil.rmtree(where)
    return dict(found)


def flip(content: bytes, draw: random.Random) -> bytes:
    """One bit."""
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(content: bytes, draw: random.Random) -> bytes:
    """A first part."""
    return content[: draw.randrange(len(content))]


if __name__ == "__main__":
    main()
