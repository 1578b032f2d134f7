"""One way through every measurement: ask, plan, measure on ranks, tell.

experiment = Experiment(variants, collect, metrics, ...)

variants   from the command's options: what to measure, or why not
collect    measures it, on ranks of a launcher or on new ones
metrics    what came out, for people, as JSON, CSV, picture and record
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradsync.bench.plot import check_plot
from gradsync.bench.record import check_folder, write_record
from gradsync.cli.arguments import parse
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.core.files import write_text
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

if TYPE_CHECKING:
    from gradsync.world import World

_PLACES = ("csv", "plot", "out", "save", "as_json", "dry_run")
"""Options that do not change what is measured."""


Ask = Callable[..., dict[str, Any]]
"""`ask(work, ranks, of=None)`: what rank 0 measured of `work`, a dataclass, on a launcher's ranks
or on `ranks` new ones; `of` is another experiment, whose measurement it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Results, for every place that it may go to."""

    environment: Mapping[str, Any]
    """See `record.environment`."""
    command: str
    """The command line for the same measurement."""
    data: Mapping[str, Any]
    """For `--json` and the record."""
    show: Callable[[IO[str]], None]
    """Prints it for people."""
    samples: Any = None
    """For the record alone."""
    csv: Callable[[], str] | None = None
    draw: Callable[[Path], None] | None = None
    keep: Callable[[], str] | None = None
    """Keeps what other commands use, last, and says where."""
    code: int = 0
    """The exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A command that measures."""

    command: tuple[str, ...]
    """As typed."""
    options: type
    """Its flags: a dataclass."""
    measure: str
    """`module:function`: a rank's part, from JSON to JSON; imported by ranks only."""
    variants: Callable[[Any, World], Any]
    """From options and world: what to measure. Raises `ConfigError`."""
    collect: Callable[[Any, Any, World, Ask], Any]
    """From options, variants and world: what ranks measured, on rank 0."""
    metrics: Callable[[Any, Any, Any, World], Findings]
    """From options, variants, what was collected, and world."""
    dry: Callable[[Any], Any] = asdict
    """Document that `--dry-run` prints of the variants, as JSON has it."""

    def run(self, argv: list[str]) -> int:
        """Carry out the command.

        Returns:
            0 when all was measured (or `Findings.code`), the ranks' code when they failed;
            128 + signal after one.

        Raises:
            ConfigError: something that cannot be measured, a place that cannot be written.
            RunError: ranks could not begin, results could not be written.
        """
        if argv[:1] == [WORKER]:
            return be_rank(Path(argv[1]), self._measure)
        options = parse(self.options, argv, " ".join(self.command))
        world = resolve(environ.snapshot()).world
        variants = self.variants(options, world)
        if world.is_main:
            check_places(options)
        if getattr(options, "dry_run", False):
            if world.is_main:
                print(json.dumps(self.dry(variants), indent=1))
            return 0
        return until_stopped(world, lambda: self._work(options, variants, world))

    def _work(self, options: Any, variants: Any, world: World) -> int:
        try:
            collected = self.collect(options, variants, world, partial(self._ask, world))
        except _RanksEndedError as ended:
            return ended.code
        found = self.metrics(options, variants, collected, world)
        _deliver(options, self.command[-1], found)
        return found.code

    def _ask(
        self, world: World, work: Any, ranks: int, *, of: Experiment | None = None
    ) -> dict[str, Any]:
        """See `Ask`.

        Raises:
            _RanksEndedError: this rank has nothing to say, or the ranks have said what was wrong.
        """
        other = of or self
        outcome = measure_on_ranks(
            other.command, asdict(work), other._measure, world=world, world_size=ranks
        )
        if outcome.result is None:
            raise _RanksEndedError(outcome.code)
        return outcome.result

    def _measure(self, work: dict[str, Any]) -> dict[str, Any]:
        module, _, function = self.measure.partition(":")
        return getattr(import_module(module), function)(work)


class _RanksEndedError(Exception):
    """Without a result for this process."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def command_of(options: Any, command: Sequence[str]) -> str:
    """The command line for the same measurement, without the places for its results."""
    words = ["gradsync", *command]
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name in _PLACES or value == entry.default:
            continue
        flag = flag_of(entry.name)
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def flag_of(name: str) -> str:
    """An option as users type it."""
    return "--" + name.replace("_", "-")


def check_places(options: Any) -> None:
    """Long before there is something to write.

    Raises:
        ConfigError: a place that cannot be written.
    """
    if out := getattr(options, "out", ""):
        check_folder("--out", Path(out))
    if plot := getattr(options, "plot", ""):
        check_plot(Path(plot))
    if csv := getattr(options, "csv", ""):
        path = Path(csv)
        if path.is_dir():
            raise ConfigError(f"--csv {path}: is a folder; name a file")
        if not path.parent.is_dir():
            raise ConfigError(f"--csv {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--csv {path}: may not be written")


def _deliver(options: Any, name: str, found: Findings) -> None:
    """To every place that was asked for."""
    human = sys.stderr if options.as_json else sys.stdout
    found.show(human)
    if options.as_json:
        head = {"environment": found.environment, "command": found.command}
        print(json.dumps({**head, **found.data}, indent=1, allow_nan=False), flush=True)
    if found.csv and options.csv:
        try:
            write_text(Path(options.csv), found.csv())
        except OSError as error:
            raise RunError(f"--csv {options.csv}: {error.strerror}") from error
    if found.draw and options.plot:
        found.draw(Path(options.plot))
    if options.out:
        samples = {} if found.samples is None else {"samples": found.samples}
        path = write_record(
            Path(options.out),
            name=name,
            command=found.command,
            environment=found.environment,
            data={**found.data, **samples},
        )
        print(f"wrote {path}", file=human)
    if found.keep:
        print(found.keep(), file=human)
