"""Runs commands as several ranks: a launcher's, or N started on this host."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradsync.errors import RunError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

if TYPE_CHECKING:
    from gradsync.launch.local import LaunchOutcome
    from gradsync.world import World

WORKER = "--worker"
"""First argument of a command that must run as one rank; the second is its work folder."""

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORK, _RESULT = "work.json", "result.json"
_IN_USE = ".gradsync-in-use"
"""In each `work_folder`; locked until its command ends in any way."""


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
    argv: list[str], world_size: int, signals: Signals, module: str = "gradsync"
) -> LaunchOutcome:
    """Run `python -m MODULE ARGV` as ranks on this host and wait for them; see `launch.local`.

    Raises:
        Stopped: a signal came, before or during the run.
    """
    from gradsync.launch import local

    signals.check()
    ended = local.launch_ranks(argv, world_size, log_dir=None, module=module)
    if ended.received is not None:
        raise Stopped(ended.received)
    return ended


@contextmanager
def work_folder(prefix: str) -> Generator[Path]:
    """A temporary folder for one command; first removes folders that killed commands left.

    Args:
        prefix: of its name, such as `gradsync-verify-`.
    """
    for mark in Path(tempfile.gettempdir()).glob(f"gradsync-*/{_IN_USE}"):
        with suppress(OSError):
            _remove_if_left(mark)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        mark = Path(name, _IN_USE)
        with mark.with_suffix(".new").open("w") as file:
            with suppress(OSError):  # a file system without locks: the folder stays if killed
                fcntl.flock(file, fcntl.LOCK_EX)
                Path(file.name).rename(mark)  # other commands see the file only when it is locked
            yield Path(name)


def _remove_if_left(mark: Path) -> None:
    """Remove the folder of `mark` if it is this user's and its command has ended."""
    folder = mark.parent
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    with mark.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


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
        # Torch's warnings about its sockets repeat our one-line errors, with stacks.
        quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        prefix = "-".join(("gradsync", *command, ""))
        with environ.exported(quiet), work_folder(prefix) as folder:
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
