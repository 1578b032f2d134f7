"""torch's elastic agent with three manners it lacks: signals, exit codes and silence.

[Note: how the agent stops]
torch's handlers raise an exception wherever the signal hits, even between two process starts, and
signal the whole process group of a worker, killing its data loaders while it still wants to save.
Here a handler only notes the signal. The monitor loop, which runs ten times a second, passes it
on to each rank once, waits for all to end, and only then kills what is left. A signal that comes
after that goes straight through, so that a second Ctrl-C ends the ranks at once.
A rank that ends with code 75 has agreed with the others to stop: these are waited for, too, not
hit by the SIGTERM that a failure earns them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from gradsync.core.torch_private import close_streams, end_ranks, forbid_restarts, rank_processes
from gradsync.launch.exit_codes import STOPPED, may_restart
from gradsync.launch.loopback_rendezvous import LoopbackRendezvous
from gradsync.launch.nodes_rendezvous import NodesRendezvous
from gradsync.launch.plan import LaunchPlan
from gradsync.runtime.signals import LAUNCHED

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
)
"""Signals that the launcher passes on to its ranks."""

LAST_WORDS_S = 4.0
"""How long ranks may take to notice another one's failure and say so, seconds."""

_TORCH_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class RankLogs(LogsSpecs):
    """Where each rank's output goes: rank 0 keeps the terminal, the others keep its stderr.

    Only rank 0 may write to standard output, which can be a document for a program to read.

    Args:
        log_dir: folder for the other ranks' standard output; None drops it.
    """

    def __init__(self, log_dir: Path | None) -> None:
        super().__init__()
        self.log_dir = log_dir

    @property
    def root_log_dir(self) -> str:
        """The folder, as text."""
        return str(self.log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations by local rank, "" for the launcher's own stream."""
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
            # What the agent is told by this variable does not concern its workers.
            env[_TORCH_SIGNALS] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        return LogsDest(
            stdouts={rank: self._stdout(rank, env) for rank, env in envs.items()},
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )

    def _stdout(self, rank: int, env: dict[str, str]) -> str:
        if rank == 0:
            return ""
        if self.log_dir is None:
            return os.devnull
        self.log_dir.mkdir(parents=True, exist_ok=True)
        restarts = env["TORCHELASTIC_RESTART_COUNT"]
        again = "" if restarts == "0" else f".restart{restarts}"
        return str(self.log_dir / f"rank_{rank:05d}.stdout{again}.log")


class LocalAgent(LocalElasticAgent):
    """Starts, watches and stops the ranks of one host; see [Note: how the agent stops].

    Args (besides torch's):
        grace_s: how long ranks may take to save and end after a signal, seconds.
    """

    def __init__(self, *args: Any, grace_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grace_s = grace_s
        self.received: list[signal.Signals] = []
        self.first_failures: list[int] = []
        self.killed: dict[int, signal.Signals] = {}
        self._pending: list[signal.Signals] = []
        self._passes_on = False

    def exit_codes(self) -> list[int | None]:
        """Exit code of each local rank, negative for a signal; None while it runs."""
        return [handler.proc.poll() for handler in rank_processes(self)]

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler; see [Note: how the agent stops]."""
        received = signal.Signals(number)
        self.received.append(received)
        if self._passes_on:
            self._send(received)
        else:
            self._pending.append(received)

    def release(self) -> None:
        """Close what is still open: the store and the ranks' log files."""
        self.get_worker_group().spec.rdzv_handler.shutdown()
        self._close_streams()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.first_failures = []
        self._close_streams()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self.exit_codes()
        failures = [code for code in codes if code]
        if self.received or STOPPED in failures:
            return self._stop()
        if failures:
            self.first_failures = failures
            self.killed = {
                rank: signal.Signals(-code)
                for rank, code in enumerate(codes)
                if code is not None and code < 0
            }
            self._let_others_speak()
            if not may_restart(failures):
                forbid_restarts(self)
        elif None in codes:
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _let_others_speak(self) -> None:
        """The other ranks notice by themselves, and say which rank failed; torch would end them."""
        deadline = time.monotonic() + LAST_WORDS_S
        while None in self.exit_codes() and not self.received and time.monotonic() < deadline:
            time.sleep(0.02)

    def _stop(self) -> RunResult:
        """Pass on what was received, wait for the ranks, kill what is left, end for good."""
        self._passes_on = True  # before the list is emptied: nothing is lost or sent twice
        while self._pending:
            self._send(self._pending.pop(0))
        deadline = time.monotonic() + self._grace_s
        while None in self.exit_codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        end_ranks(self, signal.SIGKILL)
        forbid_restarts(self)
        codes = self.exit_codes()
        if any(codes):
            return RunResult(state=WorkerState.FAILED)
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(range(len(codes)))
        )

    def _send(self, number: signal.Signals) -> None:
        for handler in rank_processes(self):
            handler.proc.send_signal(number)  # to the rank alone, and only while it runs

    def _close_streams(self) -> None:
        """The log files of ranks that have ended."""
        for process in rank_processes(self):
            close_streams(process)


def build_agent(
    arguments: list[str],
    nproc_per_node: int,
    *,
    log_dir: Path | None,
    max_restarts: int,
    grace_s: float,
    nodes: LaunchPlan | None = None,
) -> LocalAgent:
    """An agent that will start `nproc_per_node` times `python ARGUMENTS` on this host.

    Args:
        arguments: for the Python interpreter; passed on as they are.
        log_dir: see `RankLogs`.
        max_restarts: how often all ranks are started again after a failure.
        grace_s: see `LocalAgent`.
        nodes: this host is one of several; None for all ranks on this host.
    """
    handler = LoopbackRendezvous() if nodes is None else NodesRendezvous(nodes)
    spec = WorkerSpec(
        role=LAUNCHED,
        local_world_size=nproc_per_node,
        entrypoint=sys.executable,
        # The agent substitutes ${…} in arguments; a doubled dollar sign comes out as one.
        args=tuple(argument.replace("$", "$$") for argument in arguments),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    agent = LocalAgent(spec, RankLogs(log_dir), grace_s=grace_s)
    if isinstance(handler, NodesRendezvous):
        handler.stopped = lambda: bool(agent.received)
    return agent
