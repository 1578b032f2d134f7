"""Start N ranks on this host, without torchrun: `gradsync train … --nproc-per-node N`."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.commands.launch.request import STOPPED
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.store import TOKEN

if TYPE_CHECKING:
    from gradsync.commands.launch.agent import LocalAgent
    from gradsync.commands.launch.request import LaunchPlan

GRACE_S = 60.0
"""How long ranks may take to save and end after a signal, seconds."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (killed by hand, or out of memory)",
    # With messages, an innocent rank dies of the data that it receives.
    signal.SIGABRT: " (Gloo does it where ranks called different collectives: its words are above)",
}

# Codes with a specific meaning; every other failure returns 1.
_MEANINGFUL = (2, 124, 130)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """How a launch ended."""

    code: int
    """0 if all ranks succeeded. Otherwise the code of the rank that failed first if it is one of
    gradsync's (2, 75, 124, 130), else 1. After a signal: 75 if the ranks stopped cleanly, 128 +
    signal if it ended them."""
    received: signal.Signals | None
    """The first signal that the launcher received, regardless of its effect on the ranks."""
    killed: dict[int, int]  # ranks that a signal had ended when the first failure was seen


def launch_ranks(
    argv: list[str],
    nproc_per_node: int,
    *,
    log_dir: Path | None,
    max_restarts: int = 0,
    module: str = "gradsync",
    nodes: LaunchPlan | None = None,
) -> LaunchOutcome:
    """Run `python -m MODULE ARGV` as ranks on this host and wait for them.

    The ranks are children of torch's elastic agent and see torchrun's variables. Rank 0 keeps the
    terminal; the other ranks keep its standard error. SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1
    are forwarded to each rank once (SIGHUP not if this process ignores it, nohup); ranks then have
    `GRACE_S` seconds to end.

    Args:
        argv: arguments of the command, passed to each rank.
        nproc_per_node: number of ranks.
        log_dir: folder for the standard output of ranks above 0; None drops it.
        max_restarts: how often to start all ranks again after a failure.
        module: the module that a rank runs, or `worker.PROGRAM`: `argv` is a whole command line.
        nodes: this host is one of several.

    Raises:
        ConfigError: `nproc_per_node` or `max_restarts` is out of range.
        RendezvousError: another node is missing.
    """
    if nproc_per_node < 1:
        raise ConfigError(f"nproc_per_node must be at least 1, got {nproc_per_node}")
    if max_restarts < 0:
        raise ConfigError(f"max_restarts must be at least 0, got {max_restarts}")
    from gradsync.commands.launch.agent import build_agent

    agent = build_agent(
        ["-u", "-m", "gradsync.commands.launch.worker", str(os.getpid()), module, *argv],
        nproc_per_node,
        log_dir=log_dir,
        max_restarts=max_restarts,
        grace_s=GRACE_S,
        on_killed=_tell,
        nodes=nodes,
    )
    with ExitStack() as stack:
        stack.callback(agent.release)
        stack.enter_context(_quiet())
        # No names: the agent must not install its handlers. torch's profiler writes two lines to
        # standard error at the start and end of a trace.
        quiet = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "", "KINETO_LOG_LEVEL": "99"}
        if environ.get("KINETO_LOG_LEVEL"):
            del quiet["KINETO_LOG_LEVEL"]
        stack.enter_context(environ.exported(quiet))
        if nodes is None:  # otherwise the user must set the same token on all nodes
            stack.enter_context(environ.exported({TOKEN: secrets.token_hex(32)}))
        stack.enter_context(_signals_to(agent))
        agent.run()
        codes = agent.exit_codes()
        received = agent.received[0] if agent.received else None
        if received is not None:
            code = after_signal(codes, received)
        else:
            code = after_failure(agent.failures or codes)
        return LaunchOutcome(code=code, received=received, killed=dict(agent.killed))


def obituary(rank: int, number: int) -> str:
    """A line about a rank that a signal ended; real-time signals have no name."""
    names = {each.value: each.name for each in signal.Signals}
    named = names.get(number, f"signal {number}")
    return f"rank {rank} was ended by {named}{_HINTS.get(number, '')}"


def _tell(rank: int, number: int) -> None:
    """Print what a rank cannot print itself; a closed terminal must not end the run."""
    with suppress(OSError, ValueError):
        print(f"gradsync: error: {obituary(rank, number)}", file=sys.stderr, flush=True)


@contextmanager
def _signals_to(agent: LocalAgent) -> Generator[None]:
    """Forward signals to `agent`, except a SIGHUP that this process was started to ignore (nohup);
    works only in the main thread. Background jobs of a script ignore interrupts, but these are
    forwarded even then."""
    from gradsync.commands.launch.agent import FORWARDED

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, agent.on_signal)
        for number in FORWARDED
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress the agent's log, unless `LOGLEVEL` is set: ranks report their errors."""
    if environ.get("LOGLEVEL"):
        yield
        return
    logger = logging.getLogger("torch.distributed.elastic")
    before, silent = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)


def after_failure(codes: Sequence[int | None]) -> int:
    """The launcher's exit code, from the `codes` of the ranks that ended first, or of all.

    0 if none failed. A rank that stopped because of another one's failure ends with 1, so a more
    specific code counts; 75 counts only if no rank failed otherwise.
    """
    failures = [code for code in codes if code]
    if all(code == STOPPED for code in failures):
        return STOPPED if failures else 0
    return next((code for code in failures if code in _MEANINGFUL), 1)


def after_signal(codes: Sequence[int | None], received: signal.Signals) -> int:
    """The launcher's exit code after it got `received` and the ranks ended with `codes`.

    75 if all stopped cleanly, 128 + signal if the signal itself ended a rank.
    """
    return 128 + received if -received in codes else after_failure(codes)
