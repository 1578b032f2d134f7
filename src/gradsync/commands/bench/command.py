"""`gradsync bench NAME`: run a benchmark, an experiment in `gradsync.commands.bench.NAME`."""

from __future__ import annotations

from importlib import import_module

from gradsync.commands.bench.experiment import run_experiment
from gradsync.core.files import check_name

BENCHMARKS = {
    "sync": "training steps of every strategy, beside DDP, Accelerate, Fabric and no communication",
    "collectives": "all-reduce and its kin by every algorithm, beside the memory's own bandwidth",
    "scaling": "strong and weak scaling from one rank on, with a verdict",
}

_HELP = """\
usage: gradsync bench NAME [options]

Measure what synchronisation costs on this machine.

benchmarks:
{benchmarks}

`gradsync bench NAME --help` says more.
"""


def run(argv: list[str]) -> int:
    """Run `gradsync bench ARGV`; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, BENCHMARKS))
        lines = [f"  {name:<{width}}  {summary}" for name, summary in BENCHMARKS.items()]
        print(_HELP.format(benchmarks="\n".join(lines)), end="")
        return 0 if argv else 2
    name, *rest = argv
    check_name("benchmark", name, BENCHMARKS)
    return run_experiment(import_module(f"gradsync.commands.bench.{name}").EXPERIMENT, rest)
