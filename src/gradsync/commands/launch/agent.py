"""torch's elastic agent with additional handling of signals, exit codes and silent nodes.

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

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from gradsync.commands.launch.request import STOPPED, LaunchPlan, may_restart
from gradsync.core.torch_private import close_streams, end_ranks, forbid_restarts, rank_processes
from gradsync.errors import LatePeerError, RendezvousError
from gradsync.runtime import environ
from gradsync.runtime.peers import process_state
from gradsync.runtime.signals import LAUNCHED
from gradsync.runtime.store import SignedStore, host_store, join_store, token_of, wait_until

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
)
"""Signals that the launcher forwards to its ranks."""

LAST_WORDS_S = 6.0
"""How long ranks may take to notice and report another rank's failure, seconds: the failure watch
ends a stuck rank after five."""

END_S = 10.0
"""How long ranks may take to end when there is nothing left to wait for, seconds."""

_TORCH_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_LOOPBACK = "127.0.0.1"
_KNOCK_S = 1.0
_WAIT_S = 300.0  # for the other nodes, at the start
_OTHERS_END_S = {False: 5.0, True: 300.0}  # to tell the others, and to wait for them, as torch does


class RankLogs(LogsSpecs):
    """Destination of each rank's output: rank 0 keeps the terminal, the others only its stderr.

    Only rank 0 may write to standard output, since a program may parse it.

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
            # Workers must not inherit the agent's value.
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
        on_killed: called immediately with each rank that a signal ended before any other rank
                failed, and with the signal.
    """

    def __init__(
        self,
        *args: Any,
        grace_s: float,
        on_killed: Callable[[int, int], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._grace_s, self._on_killed = grace_s, on_killed
        self.received: list[signal.Signals] = []
        self.failures: list[int] = []  # codes of ranks that ended by themselves, in order
        self.killed: dict[int, int] = {}
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
        """Close the store and the ranks' log files."""
        self._meeting().say_ended()
        self._meeting().shutdown()
        self._close_streams()

    def _meeting(self) -> AgentRendezvous:
        handler = self.get_worker_group().spec.rdzv_handler
        assert isinstance(handler, AgentRendezvous)
        return handler

    def _exit_barrier(self) -> None:
        """Torch's barrier would wait for a failed node, and ignore signals."""
        self._meeting().say_ended(wait=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failures, self.killed = [], {}
        self._close_streams()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self.exit_codes()
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
                self._on_killed(rank, number)
            self._let_others_speak()
            self.failures = failures + [code for code in self.exit_codes() if code]
            self._end_others()
            if not may_restart(failures):
                forbid_restarts(self)
        elif None in codes:
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _let_others_speak(self) -> None:
        """Let the other ranks notice and name the failed rank, where torch would end them. A
        stopped rank (SIGSTOP) prints nothing."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self._speak() and not self.received and time.monotonic() < deadline:
            time.sleep(0.02)

    def _speak(self) -> bool:
        alive = [each.proc.pid for each in rank_processes(self) if each.proc.poll() is None]
        return not all("stopped" in process_state(pid) for pid in alive)

    def _end_others(self) -> None:
        """Ask the ranks to end and wait for it. torch, which kills the rest, would wait longer, and
        needlessly for a stopped rank (SIGSTOP)."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        deadline = time.monotonic() + END_S
        while None in self.exit_codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._send(signal.SIGKILL)

    def _stop(self) -> RunResult:
        """Forward the received signals, wait for the ranks, kill the rest, end for good."""
        self._passes_on = True  # before the list is emptied, to lose or repeat no signal
        while self._pending:
            self._send(self._pending.pop(0))
        self._send(signal.SIGCONT)  # a stopped rank cannot act on a signal
        deadline = time.monotonic() + self._grace_s
        while None in (codes := self.exit_codes()) and time.monotonic() < deadline:
            if LatePeerError.exit_code in codes:  # they have given up waiting for the rest
                deadline = min(deadline, time.monotonic() + END_S)
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
        """Close the log files of ranks that have ended."""
        for process in rank_processes(self):
            close_streams(process)


class AgentRendezvous(RendezvousHandler):
    """Rendezvous of agents, and then of their ranks: a store that the agent of node 0 serves.

    torch's static rendezvous needs a port chosen beforehand and listens on all interfaces. It does
    not say which node is missing, and cannot be interrupted.

    Args:
        plan: with a node rank and a coordinator; None for one host, whose socket then listens on
                the loopback only.
        token: authenticates the nodes to each other, b"" for none.
    """

    def __init__(self, plan: LaunchPlan | None, token: bytes = b"") -> None:
        self._plan, self._token = plan, token
        # All nodes need the same id; the port distinguishes runs.
        self._run_id = uuid.uuid4().hex if plan is None else "gradsync-launch"
        self._store: Any = None
        self.stopped: Callable[[], bool] = lambda: False
        """True after a stop request: the agent then waits for no node."""

    @property
    def use_agent_store(self) -> bool:
        """True: the store lives as long as the agent, and ranks connect to it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Rendezvous of the next generation's ranks; waits for all nodes."""
        if self._plan is None:
            if self._store is None:
                self._store = host_store(_LOOPBACK, 0, one_host=True)
            where = RendezvousStoreInfo(_LOOPBACK, self._store.port)
            return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)
        plan, node = self._plan, _node_of(self._plan)
        deadline_s = time.monotonic() + _WAIT_S
        if self._store is None:
            self._store = self._open(plan, deadline_s)
        store = PrefixStore(self._run_id, self._store)
        try:
            records = SignedStore(store, self._token, "nodes")
            self._wait_for_nodes(plan, records, deadline_s)
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise RendezvousError(
                f"node {node}: node 0, which serves the store, went away while the nodes met"
            ) from error
        where = RendezvousStoreInfo(plan.master_addr, plan.master_port)
        return RendezvousInfo(store, node, plan.nnodes, where)

    def _open(self, plan: LaunchPlan, deadline_s: float) -> Any:
        node = _node_of(plan)
        if node == 0:
            return host_store(plan.master_addr, plan.master_port, one_host=False)
        while True:  # in short tries, to notice signals in between
            slice_s = min(deadline_s, time.monotonic() + _KNOCK_S)
            try:
                return join_store(plan.master_addr, plan.master_port, rank=node, deadline_s=slice_s)
            except RendezvousError:
                if self.stopped() or time.monotonic() >= deadline_s:
                    raise self._vain(plan, "node 0 does not answer") from None

    def _wait_for_nodes(self, plan: LaunchPlan, store: SignedStore, deadline_s: float) -> None:
        keys = [f"here/{node}" for node in range(plan.nnodes)]

        def all_here() -> bool:
            store.claim(keys[_node_of(plan)], str(plan.nnodes))
            return bool(store.get_all(keys)) or self.stopped()

        wait_until(all_here, deadline_s)
        found = [store.get(key) for key in keys]
        missing = [node for node, said in enumerate(found) if said is None]
        if missing:
            names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            raise self._vain(plan, f"node(s) {names} did not come")
        told = {int(said or 0) for said in found}
        if told != {plan.nnodes}:
            raise RendezvousError(
                f"the nodes were started with different --nnodes: {sorted(told)}; start all again"
            )

    def _vain(self, plan: LaunchPlan, problem: str) -> RendezvousError:
        if self.stopped():
            return RendezvousError(f"stopped while waiting: {problem}")
        return RendezvousError(
            f"node {plan.node_rank} of {plan.nnodes} waited {_WAIT_S:.0f} s at "
            f"{plan.master_addr}:{plan.master_port}, but {problem}. Is each node's line running, "
            "do all lines say the same --master-addr and --master-port, and is that port open "
            "between the nodes?"
        )

    def say_ended(self, *, wait: bool = False) -> None:
        """Tell the other nodes that this one's ranks have ended. With `wait`, also wait for theirs,
        which may need the store of node 0, until a signal comes."""
        if self._plan is None or self._store is None:
            return
        records = SignedStore(PrefixStore(self._run_id, self._store), self._token, "nodes")
        keys = [f"ended/{node}" for node in range(self._plan.nnodes)]
        own, deadline_s = keys[_node_of(self._plan)], time.monotonic() + _OTHERS_END_S[wait]

        def tell() -> None:
            with suppress(RuntimeError):  # node 0 is unreachable
                records.claim(own, "1")
                wait_until(lambda: not wait or bool(records.get_all(keys)), deadline_s)

        # The store waits indefinitely if node 0 is silent.
        thread = threading.Thread(target=tell, name="gradsync-ended", daemon=True)
        thread.start()
        wait_until(lambda: not thread.is_alive() or (wait and self.stopped()), deadline_s)

    def shutdown(self) -> bool:
        """Drop the store, whose socket closes with it, and the agent, which also holds it."""
        self._store = None
        self.stopped = lambda: False
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "gradsync"

    def get_run_id(self) -> str:
        """Name of this run."""
        return self._run_id

    def is_closed(self) -> bool:
        """False: another generation is always possible."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other node can join."""

    def num_nodes_waiting(self) -> int:
        """0: the nodes are fixed."""
        return 0


def _node_of(plan: LaunchPlan) -> int:
    assert plan.node_rank is not None
    return plan.node_rank


def build_agent(
    arguments: list[str],
    nproc_per_node: int,
    *,
    log_dir: Path | None,
    max_restarts: int,
    grace_s: float,
    on_killed: Callable[[int, int], None],
    nodes: LaunchPlan | None = None,
) -> LocalAgent:
    """An agent that will start `nproc_per_node` times `python ARGUMENTS` on this host.

    `arguments` reach the Python interpreter unchanged; for the others see `local.launch_ranks`.
    """
    handler = AgentRendezvous(nodes, token_of(environ.snapshot()))
    spec = WorkerSpec(
        role=LAUNCHED,
        local_world_size=nproc_per_node,
        entrypoint=sys.executable,
        # The agent substitutes ${…} in arguments and turns a doubled dollar sign into one.
        args=tuple(argument.replace("$", "$$") for argument in arguments),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    agent = LocalAgent(spec, RankLogs(log_dir), grace_s=grace_s, on_killed=on_killed)
    handler.stopped = lambda: bool(agent.received)
    return agent
