"""Leak check of what a test may not leave behind: a snapshot before it, a comparison after it.

Watched: environment, Python threads, child processes, listening sockets, the default process group,
torch's global switches, files in the working folder, entries in /dev/shm and network namespaces.
Random number state is not watched. torch is looked at only when something else has imported it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from support import namespaces, processes, sockets

SETTLE_S = 1.0
"""How long something that is ending by itself may take."""
IGNORED_VARIABLES = (
    *("PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # scikit-learn, when it is imported
)
"""Set by pytest, and by torch when its compiler is first imported."""
KNOWN_THREADS = ("TMonitor", "fsspecIO")
"""Helper threads, by class or name, that a library (tqdm, fsspec) starts once and keeps."""
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Snapshot:
    """The watched state at one moment."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    listening: frozenset[str]
    folder: str
    files: frozenset[str]
    torch_state: dict[str, object] | None


def snapshot() -> Snapshot:
    """Look around; takes well under a millisecond."""
    return Snapshot(
        environment=_environment(),
        threads=frozenset(threading.enumerate()),
        children=frozenset(processes.children()),
        listening=sockets.listening(),
        folder=os.getcwd(),
        files=_files(),
        torch_state=_torch_state(),
    )


def leaks_since(before: Snapshot, settle_s: float = SETTLE_S) -> list[str]:
    """One line for each thing left behind since `before`; empty when all is as it was."""
    found = list(_compare(before, snapshot()))
    deadline = time.monotonic() + settle_s
    while found and time.monotonic() < deadline:
        gc.collect()  # groups and sockets held only by a reference cycle are garbage, not a leak
        time.sleep(0.02)
        found = list(_compare(before, snapshot()))
    return found


def restore(before: Snapshot) -> None:
    """Put environment and working folder back, so that one leak does not fail all later tests."""
    os.chdir(before.folder)
    for name in _environment().keys() - before.environment.keys():
        del os.environ[name]
    os.environ.update(before.environment)


def _compare(before: Snapshot, now: Snapshot) -> Iterator[str]:
    for name in sorted(before.environment.keys() | now.environment.keys()):
        old, new = before.environment.get(name), now.environment.get(name)
        if old != new:
            yield f"environment variable {name}: {old!r} became {new!r}"
    yield from _compare_torch(before.torch_state, now.torch_state)
    for thread in now.threads - before.threads:
        if type(thread).__name__ in KNOWN_THREADS or thread.name in KNOWN_THREADS:
            continue
        yield f"thread {thread.name!r} (daemon={thread.daemon})"
    helpers = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    for pid in now.children - before.children - helpers:
        yield f"child process {processes.describe(pid)}"
    for address in now.listening - before.listening:
        yield f"listening socket {address}"
    if now.folder != before.folder:
        yield f"working folder {before.folder} became {now.folder}"
        return
    for path in sorted(now.files - before.files):
        if not _in_use_elsewhere(path):
            yield f"file {path}"


def _compare_torch(old: dict[str, object] | None, new: dict[str, object] | None) -> Iterator[str]:
    if new and new["default process group"]:
        yield "default process group left initialised"
    if old is None or new is None:
        return  # torch came with this test: nothing to compare with
    for name in old.keys() & new.keys() - {"default process group"}:
        if old[name] != new[name]:
            yield f"torch {name}: {old[name]} became {new[name]}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def _torch_state() -> dict[str, object] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return None
    dist = sys.modules.get("torch.distributed")
    return {
        "default process group": bool(dist and dist.is_available() and dist.is_initialized()),
        "intra-op threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def _files() -> frozenset[str]:
    """Entries of the working folder (names with a dot are tools' caches), of shared memory, and
    network namespaces."""
    here = (f"{os.getcwd()}/{name}" for name in os.listdir(".") if not name.startswith("."))
    try:
        shared = [f"{SHARED_MEMORY}/{name}" for name in os.listdir(SHARED_MEMORY)]
    except FileNotFoundError:  # not Linux
        shared = []
    return frozenset((*here, *shared, *namespaces.ours()))


def _in_use_elsewhere(path: str) -> bool:
    """True for shared memory of a process that is no descendant of ours (another worker's test)."""
    if not path.startswith(SHARED_MEMORY):
        return False
    try:
        # By number: the maker of a semaphore has mapped it under another name (sem_open links it).
        inode = str(os.stat(path).st_ino)
    except FileNotFoundError:
        return True  # its owner removed it meanwhile
    session = os.getsid(0)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) == session:
                continue
            for line in (entry / "maps").read_text().splitlines():
                if SHARED_MEMORY in line and line.split()[4] == inode:
                    return True
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return False
