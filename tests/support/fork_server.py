"""Python processes forked from one that has torch loaded: a start takes milliseconds, not seconds.

The server has imported what a rank imports and has computed nothing, so it has no threads and
forking it is safe. Not for tests of how a process starts: what it imports, and what is read from
its environment while that happens.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from gradsync.errors import RendezvousError
from gradsync.runtime.store import host_store, join_store
from support import processes
from support.launchers import (
    ABORT_GRACE_S,
    SURVIVOR_GRACE_S,
    Finished,
    Variables,
    clean_environment,
)

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    # The first optimizer imports torch._dynamo; the rest comes with the first training step.
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "gradsync.commands.cli.main",
        "gradsync.commands.train.run",
        "pytest",
    ]
)

WITH_RANKS = {"TEST_FORKS_RANKS": "1"}
"""For a process that launches ranks: it forks them. Not for tests of how ranks start."""

_PORTS_A_WORKER = 2_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10
_FIRST_PORT = 10_000 + _PORTS_A_WORKER * _WORKER
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + _PORTS_A_WORKER))


class Forked:
    """`python ARGV` in a forked process; what it prints goes to files in a folder of its own.

    Use it in a `with` statement, which ends the process and its descendants.
    """

    def __init__(
        self, argv: Sequence[object], env: Variables, *, cwd: Path | None = None, stdout: str = ""
    ) -> None:
        """Start it.

        Args:
            argv: a script or `-m MODULE`, and arguments.
            env: the whole environment.
            cwd: the working folder; default: ours.
            stdout: a file or a terminal, instead of the file that `finished` reads.
        """
        self.argv = tuple(map(str, argv))
        self._folder = tempfile.TemporaryDirectory(prefix="gs-forked-")
        self._mark = f"TEST_RUN_MARK={self._folder.name}"
        out, err = (str(Path(self._folder.name, name)) for name in ("out", "err"))
        name, _, value = self._mark.partition("=")
        words = (self.argv, {**env, name: value}, str(cwd or Path.cwd()), stdout or out, err)
        self.process: BaseProcess = CONTEXT.Process(target=_become, args=words)
        self.process.start()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it forked has no mark
        self.process.kill()
        processes.end_all(self._mark)
        self.process.join()
        self.process.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self.process.pid or 0

    def send_signal(self, number: int) -> None:
        """Signal the process, not its descendants."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, as `subprocess` has it; None when it goes on after that time."""
        self.process.join(timeout_s)
        return self.process.exitcode

    def abort(self) -> None:
        """Make it print the stacks of its threads and end."""
        self.send_signal(signal.SIGABRT)
        self.wait(ABORT_GRACE_S)

    def left(self) -> list[str]:
        """Descendants that outlive it, after a moment."""
        survivors = processes.wait_until_gone(self._mark, SURVIVOR_GRACE_S)
        return [processes.describe(pid) for pid in survivors]

    def finished(self) -> Finished:
        """Its exit code, -1 while it runs, and its output so far."""
        code = self.process.exitcode
        texts = (Path(self._folder.name, name) for name in ("out", "err"))
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in texts)
        return Finished(self.argv, -1 if code is None else code, out, err)


def run_forked(
    argv: Sequence[object],
    variables: Sequence[Variables] = ({},),
    *,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
) -> list[Finished]:
    """Run `python ARGV` once for each of `variables`, all at once, and wait for all.

    Args:
        argv: a script or `-m MODULE`, and arguments.
        variables: of the environment, beside `clean_environment()`; one mapping a process.
        cwd: the working folder.
        timeout_s: after which they are aborted and the test fails with what they printed.
    """
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(Forked(argv, clean_environment(extra), cwd=cwd))
            for extra in variables
        ]
        deadline = time.monotonic() + timeout_s
        late = [run for run in runs if run.wait(max(0.0, deadline - time.monotonic())) is None]
        for run in late:
            run.abort()
        left = [] if late else [each for run in runs for each in run.left()]
        done = [run.finished() for run in runs]
    said = "\n".join(each.describe() for each in done)
    if late:
        pytest.fail(f"not done after {timeout_s} s\n{said}", pytrace=False)
    if left:
        pytest.fail(f"outlived the process: {left}\n{said}", pytrace=False)
    return done


def torch_ranks(world_size: int) -> list[dict[str, str]]:
    """Variables by which ranks of this host meet, as torchrun sets them."""
    port = free_port()
    return [rank_variables(rank, world_size, port) for rank in range(world_size)]


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Variables as a person types them to start each rank in a terminal."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A loopback port that was free a moment ago, another one at each call.

    It lies below the range from which the system takes the ports of outgoing connections: the
    tests of other workers open hundreds of those before a rank binds it.
    """
    for port in itertools.islice(_PORTS, _PORTS_A_WORKER):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class _ForkedRank(subprocess.Popen[bytes]):
    """What torch's agent takes for a fresh interpreter is a fork of the agent's process."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **streams: Any) -> None:
        words = tuple(args[2:])  # without the interpreter and its -u
        if "--" in words[:4]:  # the worker would replace itself by another interpreter
            words = words[words.index("--") + 2 :]
        self._words = (words, env)
        self._streams = (streams["stdout"], streams["stderr"])
        super().__init__(args, env=env, **streams)

    def _execute_child(self, *_: object) -> None:
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        for number, file in enumerate(self._streams, 1):
            if file is not None:
                os.dup2(file.fileno(), number)
        os.closerange(3, 10_000)  # the launcher's store too
        resource_tracker._resource_tracker._fd = None
        for each in weakref.finalize._registry:  # the launcher's folders are not the rank's
            each.atexit = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 1
        try:
            _become(*self._words, os.getcwd())
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _host_store_elsewhere(address: str, port: int, *, one_host: bool) -> Any:
    """A store in a process of its own, which ends with this one: a store has a thread, and a rank
    forked while that thread looks up a name would inherit a lock of the C library for good."""
    said, say = os.pipe()
    lives, life = os.pipe()
    if not os.fork():
        os.close(life)
        with os.fdopen(say, "w") as file:
            try:
                store = host_store(address, port, one_host=one_host)
                file.write(str(store.port))
            except RendezvousError as error:
                file.write(str(error))
        os.read(lives, 1)
        os._exit(0)
    os.close(say)
    os.close(lives)
    with os.fdopen(said) as file:
        answer = file.read()
    if not answer.isdigit():
        raise RendezvousError(answer)
    return join_store(address, int(answer), rank=0, deadline_s=time.monotonic() + 10)


def _become(
    argv: tuple[str, ...], env: dict[str, str], cwd: str, out: str = "", err: str = ""
) -> None:
    """In the new process: what the interpreter does with its command line."""
    if WITH_RANKS.items() <= env.items():
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        from gradsync.commands.launch import agent_rendezvous

        subprocess_handler.Popen = _ForkedRank
        agent_rendezvous.host_store = _host_store_elsewhere
    gc.freeze()  # nothing of torch's is worth looking at in a collection
    os.setsid()
    for number, path in ((1, out), (2, err)):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    faulthandler.enable()
    if "OMP_NUM_THREADS" in env:  # read when torch was loaded
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.path[0:0] = [cwd if argv[0] == "-m" else str(Path(argv[0]).parent)]
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
