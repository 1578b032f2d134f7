"""Runs an `Experiment`: options, plan, ranks, and all outputs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.commands.bench.experiment import (
    Experiment,
    Findings,
    command_of,
    write_record,
)
from gradsync.commands.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.core.files import check_place, write_result
from gradsync.runtime import environ
from gradsync.runtime.arguments import parse
from gradsync.runtime.resolve import resolve

if TYPE_CHECKING:
    from gradsync.world import World


class _RanksEndedError(Exception):
    """The ranks ended without a result for this process, which may exit with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_experiment(experiment: Experiment, argv: list[str]) -> int:
    """Run the command.

    Returns:
        0 if all was measured (or `Findings.code`), the ranks' code if they failed; 128 + signal
            after one.

    Raises:
        ConfigError: a measurement that is not possible, an output that cannot be written.
        RunError: ranks could not start, results could not be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), partial(_measure, experiment))
    options = parse(experiment.options, argv, " ".join(experiment.command))
    world = resolve(environ.snapshot()).world
    variants = experiment.variants(options, world)
    if world.is_main:
        check_places(options)
    if getattr(options, "dry_run", False):
        if world.is_main:
            print(json.dumps(experiment.dry(variants), indent=1))
        return 0
    return until_stopped(world, lambda: _work(experiment, options, variants, world))


def _work(experiment: Experiment, options: Any, variants: Any, world: World) -> int:
    def ask(work: Any, ranks: int) -> dict[str, Any]:
        measure = partial(_measure, experiment)
        outcome = measure_on_ranks(
            experiment.command, asdict(work), measure, world=world, world_size=ranks
        )
        if outcome.result is None:  # nothing to print here, or the ranks have printed the error
            raise _RanksEndedError(outcome.code)
        return outcome.result

    try:
        collected = experiment.collect(options, variants, world, ask)
    except _RanksEndedError as ended:
        return ended.code
    found = experiment.metrics(options, variants, collected, world)
    command = found.command or command_of(options, experiment.command)
    _deliver(options, experiment.command[-1], command, found)
    return found.code


def _measure(experiment: Experiment, work: dict[str, Any]) -> dict[str, Any]:
    module, _, function = experiment.measure.partition(":")
    return getattr(import_module(module), function)(work)


def check_places(options: Any) -> None:
    """Refuse an output that cannot be written, before the measurement.

    Raises:
        ConfigError: names the option.
    """
    if out := getattr(options, "out", ""):
        check_place("--out", Path(out), folder=True)
    if csv := getattr(options, "csv", ""):
        check_place("--csv", Path(csv))


def _deliver(options: Any, name: str, command: str, found: Findings) -> None:
    """Write the results to every requested output."""
    human = sys.stderr if options.as_json else sys.stdout
    found.show(human)
    if options.as_json:
        head = {"environment": found.environment, "command": command}
        print(json.dumps({**head, **found.data}, indent=1, allow_nan=False), flush=True)
    if found.csv and options.csv:
        write_result(Path(options.csv), found.csv())
    if options.out:
        samples = {} if found.samples is None else {"samples": found.samples}
        path = write_record(
            Path(options.out),
            name=name,
            command=command,
            environment=found.environment,
            data={**found.data, **samples},
        )
        print(f"wrote {path}", file=human)
    if found.keep:
        print(found.keep(), file=human)
