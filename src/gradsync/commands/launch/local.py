"""Start N ranks on this host, without torchrun: `gradsync train … --nproc-per-node N`.

`launch_ranks` runs torch's elastic agent with additional handling of signals, exit codes and
silent nodes.

[Note: how the agent stops]
torch's handlers raise an exception wherever the signal hits, even between two process starts. They
signal a worker's whole process group, which kills its data loaders while it still has to save. Here
a handler only records the signal. The monitor loop, which runs ten times a second, forwards it to
each rank once, waits for all to end, and only then kills the rest. A later signal is forwarded at
once, so that a second Ctrl-C ends the ranks immediately.
A rank that ends with code 75 has agreed with the others to stop. The agent waits for these, too; it
does not send them the SIGTERM that follows a failure.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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

from gradsync.commands.launch.agent_rendezvous import AgentRendezvous, Nodes
from gradsync.commands.launch.requeue import STOPPED
from gradsync.core.torch_private import (
    forbid_restarts,
    kill_ranks,
    log_files,
    rank_processes,
    start_again,
)
from gradsync.errors import ConfigError, LatePeerError
from gradsync.runtime import environ
from gradsync.runtime.network import interface_towards
from gradsync.runtime.peers import process_state
from gradsync.runtime.rejoin import REJOIN, joined_key
from gradsync.runtime.signals import LAUNCHED
from gradsync.runtime.store import TOKEN, wait_until

GRACE_S = 60.0
"""How long ranks may take to save and end after a signal, seconds."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that the launcher forwards to its ranks."""

LAST_WORDS_S = 6.0
"""How long ranks may take to notice and report another rank's failure, seconds: the failure watch
ends a stuck rank after five."""

END_S = 10.0
"""How long ranks may take to end when there is nothing left to wait for, seconds."""

_TORCH_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


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
    on_loss: str = "end",
    rejoin: int = 0,
    module: str = "gradsync",
    nodes: Nodes | None = None,
) -> LaunchOutcome:
    """Run `python -m MODULE ARGV` as ranks on this host and wait for them.

    The ranks are children of torch's elastic agent and see torchrun's variables. Rank 0 keeps the
    terminal; the other ranks keep its standard error. SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1
    are forwarded to each rank once (SIGHUP not if this process ignores it, nohup); ranks then have
    `GRACE_S` seconds to end.

    Args:
        log_dir: folder for the standard output of ranks above 0; None drops it.
        max_restarts: how often to start all ranks again after a failure.
        on_loss: "shrink" leaves the others alone when a signal ends a rank, see `gs.init`.
        rejoin: how often to start such a rank again, so that it joins the others.
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
    meeting = AgentRendezvous(nodes)
    command = ["-u", "-m", "gradsync.commands.launch.worker", str(os.getpid()), module, *argv]
    spec = WorkerSpec(
        role=LAUNCHED,
        local_world_size=nproc_per_node,
        entrypoint=sys.executable,
        # The agent substitutes ${…} in arguments and turns a doubled dollar sign into one.
        args=tuple(word.replace("$", "$$") for word in command),
        rdzv_handler=meeting,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    shrinks = on_loss == "shrink"
    logs = RankLogs(log_dir, all_speak=shrinks)
    agent = LocalAgent(spec, logs, meeting, shrinks=shrinks, rejoin=rejoin)
    meeting.stopped = lambda: bool(agent.received)
    # No names: the agent must not install its handlers. torch's profiler writes two lines to
    # standard error at the start and end of a trace; torch's warnings about sockets repeat our
    # one-line errors, with stacks.
    quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    variables = {_TORCH_SIGNALS: "", **{name: environ.get(name, quiet[name]) for name in quiet}}
    if nodes is None:  # otherwise the user must set the same token on all nodes
        variables[TOKEN] = secrets.token_hex(32)
    elif nodes.count == 1:  # ranks of one host would use its loopback
        own = environ.get("GLOO_SOCKET_IFNAME") or interface_towards(nodes.address)
        variables["GLOO_SOCKET_IFNAME"] = own
    if not environ.get("LOGLEVEL"):  # ranks report their errors
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    with ExitStack() as stack:
        stack.callback(agent.release)
        stack.enter_context(environ.exported(variables))
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


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # a closed terminal must not end the run
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _signals_to(agent: LocalAgent) -> Generator[None]:
    """Forward signals to `agent`, except a SIGHUP that this process was started to ignore (nohup);
    works only in the main thread. Background jobs of a script ignore interrupts, but these are
    forwarded even then."""
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


# -- torch's agent ------------------------------------------------------------------------------


class RankLogs(LogsSpecs):
    """Destination of each rank's output: rank 0 keeps the terminal, the others only its stderr.

    Only rank 0 may write to standard output, since a program may parse it. With `all_speak` every
    rank may: each could become rank 0.
    """

    def __init__(self, log_dir: Path | None, *, all_speak: bool = False) -> None:
        super().__init__()
        self.log_dir, self._all_speak = log_dir, all_speak

    @property
    def root_log_dir(self) -> str:
        """The folder, as text."""
        return str(self.log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations by local rank, "" for the launcher's own stream."""
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
            # Workers must not inherit the agent's value.
            env[_TORCH_SIGNALS] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        return LogsDest(
            stdouts={rank: self._stdout(rank, env) for rank, env in envs.items()},
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )

    def _stdout(self, rank: int, env: dict[str, str]) -> str:
        if rank == 0 or self._all_speak:
            return ""
        if self.log_dir is None:
            return os.devnull
        self.log_dir.mkdir(parents=True, exist_ok=True)
        restarts = env["TORCHELASTIC_RESTART_COUNT"]
        again = "" if restarts == "0" else f".restart{restarts}"
        return str(self.log_dir / f"rank_{rank:05d}.stdout{again}.log")


class LocalAgent(LocalElasticAgent):
    """Starts, watches and stops the ranks of one host; see [Note: how the agent stops]."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RankLogs,
        meeting: AgentRendezvous,
        *,
        shrinks: bool = False,
        rejoin: int = 0,
    ) -> None:
        super().__init__(spec, logs)
        self._meeting, self._shrinks, self._rejoins_left = meeting, shrinks, rejoin
        self._lost: set[int] = set()  # local ranks that the others have gone on without
        self._again: dict[int, str] = {}  # those started again, and how often they were
        self._lost_code = 0  # theirs, from how the others ended
        self._alone_since_s: float | None = None  # since when no local rank is in the group
        self._stopped_since_s = math.inf  # since when all that have not ended are stopped
        self.received: list[signal.Signals] = []
        self.failures: list[int] = []  # codes of ranks that ended by themselves, in order
        self.killed: dict[int, int] = {}
        self._pending: list[signal.Signals] = []
        self._passes_on = False

    def exit_codes(self) -> list[int | None]:
        """Exit code of each local rank, negative for a signal; None while it runs. A rank that the
        others have gone on without counts as they do."""
        codes = [handler.proc.poll() for handler in rank_processes(self)]
        lost, code_of_lost = self._lost, self._lost_code
        return [code_of_lost if number in lost else code for number, code in enumerate(codes)]

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler; see [Note: how the agent stops]."""
        received = signal.Signals(number)
        self.received.append(received)
        if self._passes_on:
            self._send(received)
        else:
            self._pending.append(received)

    def release(self) -> None:
        """Close the store and the ranks' log files."""
        self._meeting.say_ended(STOPPED if STOPPED in self.exit_codes() else 1)
        self._meeting.shutdown()
        self._close_streams()

    def _exit_barrier(self) -> None:
        """Torch's barrier would wait for a failed node, and ignore signals."""
        self._meeting.say_ended(0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failures, self.killed, self._lost, self._again = [], {}, set(), {}
        workers = worker_group.workers
        ranks = range(workers[0].global_rank, workers[-1].global_rank + 1)
        if late := self._meeting.begin(workers[0].world_size, ranks):
            host, first = late
            worker_group.group_rank, worker_group.group_world_size = host, host + 1
            for number, worker in enumerate(workers):
                worker.global_rank, worker.world_size = first + number, first + len(workers)
                self._again[number] = "1"
            _say(f"gradsync: the run has begun: rank(s) {first} on join it at its next checkpoint")
        self._close_streams()
        with environ.exported({REJOIN: "1"} if late else {}):
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes_that_count()
        failures = [code for code in codes if code]
        if self.received or STOPPED in failures:
            return self._stop()
        if failures:
            self.killed = {
                worker.global_rank: -code
                for worker, code in zip(worker_group.workers, codes, strict=True)
                if code is not None and code < 0
            }
            for rank, number in self.killed.items():
                _say(f"gradsync: error: {obituary(rank, number)}")
            if self._shrinks and not self.killed:
                _say(f"gradsync: the run ends: a rank has ended with exit code {failures[0]}")
            self._let_others_speak()
            self.failures = failures + [code for code in self.exit_codes() if code]
            self._end_others()
            if any(code in (2, 130) for code in failures):  # usage errors, interrupted
                forbid_restarts(self)
        elif None in codes:
            return RunResult(state=WorkerState.HEALTHY)
        elif self._lost:  # torch would report the lost ranks
            return self._succeeded()
        return super()._monitor_workers(worker_group)

    def _succeeded(self) -> RunResult:
        ranks = [worker.global_rank for worker in self.get_worker_group().workers]
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _codes_that_count(self) -> list[int | None]:
        """Exit codes without those of ranks that a signal has ended, unless we sent it or no other
        rank goes on or has ended well; such ranks are started again. None while only ranks of other
        hosts go on."""
        codes = self.exit_codes()
        begun = self._shrinks and self._meeting.has_begun()
        if not (begun or self._again):  # the latter: of a host that comes late
            return codes
        self._end_stopped()
        lost = {number for number, code in enumerate(codes) if self._is_lost(number, code)}
        outside = {number for number in self._again if not self._has_joined(number)}
        gone = lost | self._lost | outside
        others = [code for number, code in enumerate(codes) if number not in gone]
        inside = any(code in (None, 0, STOPPED) for code in others)
        self._alone_since_s = None if inside else self._alone_since_s or time.monotonic()
        left_out = None in codes and self._meeting.is_left_out(inside=inside)
        if self._alone_since_s is not None:
            waited_s = time.monotonic() - self._alone_since_s
            coming = [joined_key(self._rank(n), self._again[n]) for n in outside]
            ends = 1 if others else self._meeting.how_others_end(waited_s, coming)
            if ends in (0, STOPPED):
                self._lost |= lost
                self._lost_code = ends
                return self.exit_codes()
            if ends == 1:
                if not any(codes):
                    self._lost.clear()  # no host has gone on without them
                codes = self.exit_codes()
                return [1 if n in outside and c is None else c for n, c in enumerate(codes)]
        elif left_out:  # ranks that a signal has stopped
            self._send(signal.SIGKILL)
        if self._meeting.stop_asked and not self.received:
            self.on_signal(signal.SIGTERM, None)
        for number in sorted(lost):
            code, rank = codes[number] or 0, self._rank(number)
            why = obituary(rank, -code) if code < 0 else f"rank {rank} failed before it joined"
            _say(f"gradsync: {why}; the others go on")
            self._lost.add(number)
            self._meeting.say_lost(rank_processes(self)[number].proc.pid)
            if self._rejoins_left and not self.received:
                self._rejoins_left -= 1
                count = int(self._again.get(number, "0")) + 1
                self._again[number] = str(count)
                start_again(self, number, environ.snapshot() | {REJOIN: str(count)})
                self._lost.remove(number)
        if not begun and len(self._lost) == len(codes):
            self._lost.clear()  # their own codes count
            return codes
        return [
            0 if inside and n in self._lost else None if n in lost | self._lost else code
            for n, code in enumerate(codes)
        ]

    def _end_stopped(self) -> None:
        """Kill ranks that stay stopped (SIGSTOP) when the others have ended, who would notice."""
        codes, now_s = {one.proc: one.proc.poll() for one in rank_processes(self)}, time.monotonic()
        left = [process.pid for process, code in codes.items() if code is None]
        ended = any(code in (0, STOPPED) for code in codes.values())
        stopped = ended and left and all("stopped" in process_state(pid) for pid in left)
        self._stopped_since_s = min(self._stopped_since_s, now_s) if stopped else math.inf
        if now_s - self._stopped_since_s > LAST_WORDS_S:
            self._send(signal.SIGKILL)

    def _is_lost(self, number: int, code: int | None) -> bool:
        if code in (None, 0, STOPPED) or number in self._lost:
            return False
        outside = number in self._again and not self._has_joined(number)
        return outside or (code < 0 and -code not in self.received)

    def _has_joined(self, number: int) -> bool:
        return self._meeting.has_joined(self._rank(number), self._again[number])

    def _rank(self, number: int) -> int:
        return self.get_worker_group().workers[number].global_rank

    def _let_others_speak(self) -> None:
        """Let the other ranks notice and name the failed rank, where torch would end them. A
        stopped rank (SIGSTOP) prints nothing."""

        def all_silent() -> bool:
            alive = [each.proc.pid for each in rank_processes(self) if each.proc.poll() is None]
            return bool(self.received) or all("stopped" in process_state(pid) for pid in alive)

        wait_until(all_silent, time.monotonic() + LAST_WORDS_S)

    def _end_others(self) -> None:
        """Ask the ranks to end and wait for it. torch, which kills the rest, would wait longer, and
        needlessly for a stopped rank (SIGSTOP)."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        wait_until(lambda: None not in self.exit_codes(), time.monotonic() + END_S)
        self._send(signal.SIGKILL)

    def _stop(self) -> RunResult:
        """Forward the received signals, wait for the ranks, kill the rest, end for good."""
        self._passes_on = True  # before the list is emptied, to lose or repeat no signal
        while self._pending:
            self._send(self._pending.pop(0))
        self._send(signal.SIGCONT)  # a stopped rank cannot act on a signal
        if self._alone_since_s is not None and self._meeting.has_begun():
            _say("gradsync: no rank is left on this host: the other hosts' launchers stop theirs")
            self._meeting.ask_others_to_stop()
        deadline = time.monotonic() + GRACE_S
        while None in (codes := self._codes_that_count()) and time.monotonic() < deadline:
            if LatePeerError.exit_code in codes:  # they have given up waiting for the rest
                deadline = min(deadline, time.monotonic() + END_S)
            time.sleep(0.02)
        if None in codes and self.received:
            self._lost_code = -self.received[0]
        kill_ranks(self)
        forbid_restarts(self)
        codes = self.exit_codes()
        if any(codes):
            return RunResult(state=WorkerState.FAILED)
        return self._succeeded()

    def _send(self, number: signal.Signals) -> None:
        for handler in rank_processes(self):
            handler.proc.send_signal(number)  # to the rank alone, and only while it runs

    def _close_streams(self) -> None:
        """Close the log files of ranks that have ended."""
        for process in rank_processes(self):
            for file in log_files(process):
                if file is not None:
                    file.close()
