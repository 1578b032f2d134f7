"""Runs commands as several ranks: a launcher's, or N started on this host."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradsync.errors import RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

if TYPE_CHECKING:
    from gradsync.commands.launch.local import LaunchOutcome
    from gradsync.world import World

WORKER = "--worker"
"""First argument of a command that must run as one rank; the second is its work folder."""

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORK, _RESULT = "work.json", "result.json"


class Stopped(KeyboardInterrupt):
    """A signal ended the command, or one of its launches."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped`, so that nothing is left over. While ranks run
    here, the launcher handles the signals instead."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._held = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal)
                for number in _HANDLED
                if signal.getsignal(number) is not signal.SIG_IGN  # nohup
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]

    def hold(self) -> None:
        """From now on only record signals: the command is ending anyway."""
        self._held = True

    def check(self) -> None:
        """Raise `Stopped` again: the first one may have been lost, for example in a callback of the
        garbage collector."""
        if self.received is not None:
            raise Stopped(self.received)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if not self._held:
            raise Stopped(self.received)


def until_stopped(world: World, body: Callable[[], int]) -> int:
    """`body()`, or 128 + signal with one line if a signal ended it; SIGINT is raised again."""
    try:
        return body()
    except Stopped as stopped:
        if stopped.number is signal.SIGINT:
            raise
        if world.is_main:
            print(f"gradsync: error: ended by {stopped}", file=sys.stderr, flush=True)
        return 128 + stopped.number


def start_ranks(
    argv: list[str], world_size: int, signals: Signals, module: str = "gradsync", **options: Any
) -> LaunchOutcome:
    """Run `python -m MODULE ARGV` as ranks on this host and wait for them; `options` are those of
    `launch_ranks`.

    Raises:
        Stopped: a signal came, before or during the run.
    """
    from gradsync.commands.launch import local

    signals.check()
    ended = local.launch_ranks(argv, world_size, log_dir=None, module=module, **options)
    if ended.received is not None:
        raise Stopped(ended.received)
    return ended


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksOutcome:
    """How a measurement on several ranks ended."""

    code: int  # 0, or the exit code of the ranks, which have printed why
    result: dict[str, Any] | None = None
    """Measurements of rank 0; None above rank 0, and after a failure."""


Measure = Callable[[dict[str, Any]], dict[str, Any]]
"""From settings to result, both in JSON types; every rank calls it, rank 0's result counts."""


def measure_on_ranks(
    command: Sequence[str],
    settings: Mapping[str, Any],
    measure: Measure,
    *,
    world: World,
    world_size: int,
) -> RanksOutcome:
    """`measure(settings)` on all ranks: a launcher's, if this process is one of them, else on
    `world_size` ranks started here as `gradsync COMMAND --worker FOLDER` (see `be_rank`).

    Args:
        command: names of command and sub-command, such as `["bench", "sync"]`.
        settings: JSON-serialisable values.
        measure: opens its own session.
        world: from the launcher.

    Raises:
        Stopped: a signal ended it.
        RunError: the ranks succeeded without a result.
    """
    with Signals() as signals:
        if world.is_distributed:
            result = measure(dict(settings))
            return RanksOutcome(code=0, result=result if world.is_main else None)
        prefix = "-".join(("gradsync", *command, ""))
        with TemporaryDirectory(prefix=prefix) as name:
            folder = Path(name)
            try:
                (folder / _WORK).write_text(json.dumps(dict(settings)))
                ended = start_ranks([*command, WORKER, str(folder)], world_size, signals)
                if ended.code:
                    return RanksOutcome(code=ended.code)
                try:
                    return RanksOutcome(code=0, result=json.loads((folder / _RESULT).read_text()))
                except FileNotFoundError:
                    raise RunError("the ranks ended without a result") from None
            finally:
                signals.hold()


def be_rank(folder: Path, measure: Measure) -> int:
    """One rank that `measure_on_ranks` started; returns its exit code."""
    result = measure(json.loads((folder / _WORK).read_text()))
    if resolve(environ.snapshot()).world.is_main:
        (folder / _RESULT).write_text(json.dumps(result, allow_nan=False))
    return 0
