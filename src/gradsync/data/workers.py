"""Worker processes that read ahead for a loader: torch's, except for stop signals and their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

from gradsync.runtime.signals import HANDLED

_HELD = HANDLED if hasattr(signal, "sigwaitinfo") else ()


def start_method(asked: Any) -> Any:
    """DataLoader's `multiprocessing_context` for `asked`. A fork server would also get a stop
    signal, end, and take its workers along; spawn does the same without a server."""
    # The first method is the system's default, which the user may still change.
    default = multiprocessing.get_start_method(allow_none=True)
    method = asked or default or multiprocessing.get_all_start_methods()[0]
    name = getattr(method, "get_start_method", lambda: method)()
    return "spawn" if name == "forkserver" else asked


def begin_reading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers, with stop signals blocked from their start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        if getattr(loader.multiprocessing_context, "get_start_method", str)() == "spawn":
            resource_tracker.ensure_running()  # its start unblocks some of them
            signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(then: Callable[[int], None] | None, number: int) -> None:
    """Ignore stop signals in a worker: the rank still needs batches to finish its step."""
    if _HELD:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        threading.Thread(target=_end_when_told, daemon=True).start()
    if then is not None:
        then(number)


def _end_when_told() -> None:
    rank = multiprocessing.parent_process()
    while told := signal.sigwaitinfo(_HELD):
        if told.si_signo == signal.SIGTERM and rank is not None and told.si_pid == rank.pid:
            os._exit(0)
