"""A queue that runs operations one at a time, in order of issue, on the user's or a helper thread.

    user's thread   issue a ── issue b ──────── a.wait() ───── b.wait()
    helper                        └─ a ─────────────┘ └─ b ────────┘

An operation runs on whichever thread comes first: the one that waits for it, or a helper. The
helper serves the peers: they need this rank's part of an operation even while this rank is busy
with a message, or waits in another group, as with any backend. Programs that never ask for
`async_op=True` have no helper.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import outside_graphs
from gradsync.errors import GradsyncError, RunError

Action = Callable[[SharedMemoryCommunicator], object]
"""Runs one operation and returns when it is done."""


@outside_graphs
class LaneOperation(dist.Work):
    """One collective, as torch's `Work`; made by `Lane.issue`, whose arguments it keeps."""

    def __init__(self, line: Line, act: Action, result: list[Any], timeout_s: float | None) -> None:
        super().__init__()
        self._line: Line | None = line
        self._act: Action | None = act
        self._result = result
        self._error: BaseException | None = None
        self.timeout_s = timeout_s
        self.over = False
        self._under_way = threading.Lock()  # held until it is over
        self._under_way.acquire()

    def carry_out(self, shared: SharedMemoryCommunicator) -> None:
        """Run the operation; called by `Line`."""
        assert self._act is not None, "an operation runs once"
        try:
            # Also for tensors made in inference mode, which is a setting of each thread.
            with torch.inference_mode():
                self._act(shared)
        except BaseException as error:  # raised again in the thread that waits
            self._error = _without_frames(error)
        self._end()

    def fail(self, error: BaseException) -> None:
        """End the operation with `error`; called by `Line`."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.over = True
        # A work that the caller keeps, or an error, must not keep the group's connections alive.
        self._act = self._line = None
        self._under_way.release()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result is there, or for `timeout`, if it is not 0; may be repeated.

        Raises:
            LostPeerError: a peer ended, left, or did not come in the time set at the issue.
            RunError: peers are doing something else, or it goes on after `timeout`.
        """
        seconds = timeout.total_seconds()
        if (line := self._line) is not None:
            if seconds <= 0 or line.ended:
                line.drive(self)
            elif self._under_way.acquire(timeout=seconds):  # the helper carries it out
                self._under_way.release()
            else:
                raise RunError(
                    f"a shared-memory operation is not over after {seconds:g} s; it goes on"
                )
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future: callbacks chained to it run immediately, on this thread.

        So collectives inside of `then` (PowerSGD has some) come in one order on all ranks.

        Raises:
            RunError: as `wait`.
        """
        self.wait()
        future = torch.futures.Future[Any]()
        future.set_result(self._result)
        return future

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        return self.over

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self.over and self._error is None

    def exception(self) -> BaseException | None:
        """The error that `wait` would raise, once the operation has ended."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors with the result."""
        return self._result


def _without_frames(error: BaseException) -> BaseException:
    """`error` without traceback if it is gradsync's: frames would keep the group alive."""
    return error.with_traceback(None) if isinstance(error, GradsyncError) else error


class Line:
    """Operations in order of issue; shared by the waiting threads and the helper. See `Lane`."""

    def __init__(self, shared: SharedMemoryCommunicator, timeout: Callable[[], timedelta]) -> None:
        self.waiting: deque[LaneOperation] = deque()
        self.calls = queue.SimpleQueue[None]()
        """One item per wake-up of the helper."""
        self._shared: SharedMemoryCommunicator | None = shared
        self._timeout = timeout
        # Held by the thread that runs operations; its signal handlers may acquire it again.
        self._turn = threading.RLock()
        self._busy = self._aborted = self._shall_close = False
        self.ended = False
        """True when no helper runs any more."""

    def drive(self, operation: LaneOperation) -> None:
        """Run the queue up to `operation`, on the thread that waits for it."""
        while not operation.over:
            with self._turn:
                if self._busy:
                    raise RunError(
                        "a signal handler waits for a collective (backend shm) in the middle of "
                        "another one; let it set a flag that the program looks at"
                    )
                if not operation.over:
                    self._carry_out_first()

    def help(self) -> None:
        """Body of the helper thread."""
        while self.calls.get() is None and not self.ended:
            with self._turn:
                self._carry_out_first()

    def _carry_out_first(self) -> None:
        self._busy = True
        try:
            if self.waiting:
                self._carry_out(self.waiting.popleft())
        finally:
            self._busy = False
        if self._shall_close:
            self.close()

    def _carry_out(self, operation: LaneOperation) -> None:
        if (shared := self._shared) is not None:
            own_s = operation.timeout_s
            shared.timeout_s = self._timeout().total_seconds() if own_s is None else own_s
        if self._aborted or shared is None:  # checked last: `abort` overwrites the line above
            operation.fail(RunError("this process group (backend shm) was aborted"))
        else:
            operation.carry_out(shared)

    def abort(self) -> None:
        """Make the operation in progress, and all that wait, fail."""
        self._aborted = True
        if (shared := self._shared) is not None:
            shared.timeout_s = 0.0

    def close(self) -> bool:
        """Finish the queue, release the memory, tell the peers; returns whether that is done: an
        operation that a signal handler of its thread interrupts fails first, when that returns."""
        with self._turn:
            if self._busy:
                self._shall_close = True
                self.abort()
                return False
            self._shall_close = False
            while self.waiting:
                self._carry_out_first()
            if self._shared is not None:
                self._shared.close()
                self._shared = None
        self.end_helper()
        return True

    def end_helper(self) -> None:
        """Let the helper thread end."""
        self.ended = True
        self.calls.put(None)


class Lane:
    """A `Line`, and the means to put operations into it.

    Args:
        shared: used by one thread at a time.
        timeout: asked before each operation: the group's longest wait for a peer.
    """

    def __init__(self, shared: SharedMemoryCommunicator, timeout: Callable[[], timedelta]) -> None:
        self._line = Line(shared, timeout)
        self._helper: threading.Thread | None = None
        self._closed = False
        self._issuing = threading.RLock()  # a signal handler may come in between
        self.num_issued = 0
        """Number of operations so far."""

    def issue(
        self, act: Action, result: list[Any], *, timeout_s: float | None, at_once: bool
    ) -> LaneOperation:
        """Queue an operation.

        Args:
            act: runs the operation.
            result: the tensors with the result.
            timeout_s: longest wait for a peer, in seconds; None: the group's.
            at_once: whether to run it before returning.

        Raises:
            RunError: the group was destroyed, or as `LaneOperation.wait` if `at_once`.
        """
        operation = LaneOperation(self._line, act, result, timeout_s)
        with self._issuing:
            if self._closed:
                raise RunError("this process group (backend shm) was destroyed")
            self._line.waiting.append(operation)
            self.num_issued += 1
            if not at_once:
                self._call_helper()
        if at_once:
            operation.wait()
        return operation

    def _call_helper(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(
                target=self._line.help, name="gradsync-shm", daemon=True
            )
            # The thread refers to the line only: it ends when the group is no longer referenced.
            weakref.finalize(self, self._line.end_helper)
            self._helper.start()
        self._line.calls.put(None)

    def close(self) -> None:
        """Finish the issued operations, end the helper, tell the peers; harmless when repeated."""
        with self._issuing:
            self._closed = True
        done = self._line.close()
        if done and self._helper is not None:
            self._helper.join()

    def abort(self) -> None:
        """Make the issued operations fail, from any thread, then close."""
        self._line.abort()
        self.close()
