"""Destroy a gloo process group without hanging.

[Note: Destroying a gloo group]
Torch's `ProcessGroupGloo` joins its worker threads in its destructor while it holds the GIL (seen
in 2.13). A worker that has just finished an operation needs the GIL to release the tensor: if it
was scheduled late, both deadlock. So before the last reference is dropped, we wait, without the
GIL, until all workers sleep and none wakes up in between. A forked child has no workers, but would
wait for them at exit: there the last reference is never dropped.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

_WORKER_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
# A thread that waits for the GIL wakes up every 5 ms; an idle one does not.
_SAMPLE_S = 0.012
_ENDED_S = 0.05
_LEAVE_S = 0.5


class SendingThread(threading.Thread):
    """A daemon thread that sends through a process group.

    Args:
        run: the thread's function.
        mark: called on another thread; the event is set once everything queued before is sent.
    """

    def __init__(
        self, run: Callable[[], None], mark: Callable[[], threading.Event], name: str
    ) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.mark = mark
        self.left = False
        """Whether it waits for a lost rank, and was left behind."""


def run_or_leave(call: Callable[[], None], leaves: Callable[[], bool]) -> bool:
    """Run `call` on a thread, and raise what it raises; False if `leaves` became true meanwhile,
    and it waits on: the thread is left behind."""
    import torch

    outcome: list[BaseException | None] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:  # each thread begins on GPU 0
                torch.cuda.set_device(device)
            call()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="gradsync-group", daemon=True)
    thread.start()
    while thread.is_alive() and not leaves():
        thread.join(_SAMPLE_S)
    thread.join(_LEAVE_S)  # it may be nearly done, or end as its connections do
    if outcome and outcome[0] is not None:
        raise outcome[0]
    return bool(outcome)


def keep_forever(kept: object) -> None:
    """Never drop the last reference to `kept`, not even at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def finish_sending() -> None:
    """Return when no thread of this process has anything left to send: other ranks may still need
    it after this one leaves."""
    for thread in threading.enumerate():
        if isinstance(thread, SendingThread) and not thread.left:
            sent = thread.mark()
            while thread.is_alive() and not sent.wait(_ENDED_S):
                pass


def wait_until_workers_sleep(timeout_s: float = 2.0) -> bool:
    """True once every gloo worker thread of this process sleeps, False after `timeout_s`.

    If the system does not show its threads, wait a moment instead.
    """
    if not _TASKS.is_dir():
        time.sleep(4 * _SAMPLE_S)
        return True
    deadline_s = time.monotonic() + timeout_s
    before = _workers()
    while time.monotonic() < deadline_s:
        time.sleep(_SAMPLE_S)
        now = _workers()
        if now == before and all("State:\tS" in status for status in now.values()):
            return True
        before = now
    return False


def _workers() -> dict[str, str]:
    """Thread id -> state and number of sleeps, for each gloo worker."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() == _WORKER_NAME:
                lines = (task / "status").read_text().splitlines()
                kept = (line for line in lines if line.startswith(("State", "voluntary_ctxt")))
                found[task.name] = "\n".join(kept)
        except OSError:
            continue  # it ended while we looked
    return found
