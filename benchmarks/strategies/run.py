"""How long a training step takes under each strategy, and what it sends.

    python benchmarks/strategies/run.py --world-size 2 --out benchmarks/strategies/DATE-cpu-2-cores
    python tools/benchmark_table.py --record benchmarks/strategies/DATE-cpu-2-cores/record.json

The first line measures, about four minutes on two quiet cores; the second renders the table in
docs/guide/strategies.md. Without `--world-size` it measures with the ranks that a launcher started
(torchrun, mpirun, srun). Ranks are processes of one thread each, on the CPU, over Gloo.

`record.json` has every sample. Linux only: bytes are the kernel's count.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NUMBERS = {
    "rounds": (7, "turns of each contestant"),
    "steps": (8, "optimizer steps of a turn"),
    "width": (192, "of the model"),
    "depth": (4, "layers"),
    "sequences": (2, "of a leaf"),
    "tokens": (256, "of a sequence"),
    "bucket_mb": (1.0, "size of buckets, MiB"),
}
"""Fields of `Settings`: default and meaning."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world-size", type=int, help="start so many ranks on this host")
    parser.add_argument("--out", type=Path, help="folder for record.json")
    parser.add_argument("--only", nargs="+", default=[], help="strategies; default: all")
    for name, (default, meaning) in NUMBERS.items():
        parser.add_argument(
            f"--{_flag(name)}", type=type(default), default=default, help=f"{meaning} ({default})"
        )
    return parser.parse_args(argv)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def launch(argv: list[str], world_size: int) -> int:
    """Start this file as `world_size` ranks; returns the exit code."""
    from gradsync.commands.launch.local import launch_ranks
    from gradsync.runtime import environ

    path = ":".join(filter(None, (str(HERE), environ.get("PYTHONPATH"))))
    with environ.exported({"PYTHONPATH": path}):
        return launch_ranks(argv, world_size, log_dir=None, module="run").code


def command(arguments: argparse.Namespace, world_size: int) -> str:
    """The command for the same measurement; --out left out, since it names a folder."""
    words = ["python benchmarks/strategies/run.py", f"--world-size {world_size}"]
    for name in NUMBERS:
        words.append(f"--{_flag(name)} {getattr(arguments, name)}")
    if arguments.only:
        words.append("--only " + " ".join(arguments.only))
    return " ".join(words)


def record_of(arguments: argparse.Namespace, world: Any) -> dict[str, Any]:
    """One rank's part; the whole record, the same on all ranks."""
    from contestants import Settings
    from measure import measure

    from gradsync.commands.bench.experiment import environment

    settings = Settings(
        only=tuple(arguments.only), **{name: getattr(arguments, name) for name in NUMBERS}
    )
    return {
        "environment": environment(world_size=world.world_size, threads=1),
        "command": command(arguments, world.world_size),
        "world_size": world.world_size,
        "settings": settings.as_json(),
        **measure(settings, world),
    }


def show(record: dict[str, Any], folder: Path | None) -> None:
    """Print the table; write the record."""
    sys.path.append(str(HERE.parents[1] / "tools"))
    from benchmark_table import table

    print(table(record))
    if folder is not None:
        from gradsync.commands.bench.experiment import write_record

        made = dict(record)
        head = {name: made.pop(name) for name in ("environment", "command")}
        print(f"\nwrote {write_record(folder, name='strategies', **head, data=made)}")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    starting = argparse.ArgumentParser(add_help=False)
    starting.add_argument("--world-size", type=int)
    asked, rest = starting.parse_known_args(argv)
    arguments = parse(argv)
    if asked.world_size is not None:
        return launch(rest, asked.world_size)
    import gradsync as gs

    with gs.init(device="cpu", threads=1) as world:
        record = record_of(arguments, world)
        if world.is_main:
            show(record, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
