"""Operations one at a time, in the order in which they were issued, whoever carries them out.

    user's thread   issue a ── issue b ──────── a.wait() ───── b.wait()
    helper                        └─ a ─────────────┘ └─ b ────────┘

An operation is carried out by whoever comes first: the thread that waits for it, or a helper
thread. The helper is there for the peers: they need this rank's part of an operation even while
this rank is busy with a message, or waits in another group, as with any backend. Programs that
never ask for `async_op=True` have no helper.
"""

from __future__ import annotations

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
from gradsync.errors import GradsyncError, RunError

Action = Callable[[SharedMemoryCommunicator], object]
"""Carries one operation out and returns when it is done."""


class Operation(dist.Work):
    """One collective, as torch's `Work`; made by `Lane.issue`.

    Args:
        line: where it stands.
        act: carries it out.
        result: the tensors with the result, as torch's `Work.result` and futures have them.
        timeout_s: longest wait for a peer, seconds; None: the group's.
    """

    def __init__(self, line: Line, act: Action, result: list[Any], timeout_s: float | None) -> None:
        super().__init__()
        self._line: Line | None = line
        self._act: Action | None = act
        self._result = result
        self._error: BaseException | None = None
        self.timeout_s = timeout_s
        self.over = False

    def carry_out(self, shared: SharedMemoryCommunicator) -> None:
        """For the line."""
        assert self._act is not None, "an operation runs once"
        try:
            # Also for tensors made in inference mode, which belongs to a thread.
            with torch.inference_mode():
                self._act(shared)
        except BaseException as error:  # raised again in whoever waits
            self._error = _without_frames(error)
        self._end()

    def fail(self, error: BaseException) -> None:
        """For the line: it is over, with `error`."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.over = True
        # A work that somebody keeps, or an error, must not keep the group's connections.
        self._act = self._line = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result is there.

        Args:
            timeout: longest wait for a peer; 0: as when it was issued.

        Raises:
            LostPeerError: a peer ended, left, or did not come in time.
            RunError: peers are doing something else.
        """
        self._finish(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def _finish(self, timeout_s: float) -> None:
        if (line := self._line) is not None:
            line.drive(self, timeout_s)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is complete: what is chained to it runs here and now.

        So collectives inside of `then` (PowerSGD has some) come in one order on all ranks.

        Raises:
            RunError: as `wait`.
        """
        self.wait()
        future = torch.futures.Future[Any]()
        future.set_result(self._result)
        return future

    def synchronize(self) -> None:
        """See `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, for better or worse."""
        return self.over

    def is_success(self) -> bool:
        """Whether the result is there."""
        return self.over and self._error is None

    def exception(self) -> BaseException | None:
        """What `wait` would raise, once it is over."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors with the result."""
        return self._result


def _without_frames(error: BaseException) -> BaseException:
    """Errors of ours say it all; their frames would keep the group alive."""
    return error.with_traceback(None) if isinstance(error, GradsyncError) else error


class Line:
    """Operations in the order of their issue; what waiting threads and the helper share.

    Args:
        shared: used by one thread at a time.
        timeout: asked before each operation: the group's longest wait for a peer.
    """

    def __init__(self, shared: SharedMemoryCommunicator, timeout: Callable[[], timedelta]) -> None:
        self.waiting: deque[Operation] = deque()
        self.calls = threading.Semaphore(0)
        """How often the helper shall look."""
        self._shared: SharedMemoryCommunicator | None = shared
        self._timeout = timeout
        self._turn = threading.Lock()  # held by the thread that carries an operation out
        self._aborted = self._ended = False

    def drive(self, operation: Operation, timeout_s: float = 0.0) -> None:
        """Carry out what is in the line up to `operation`, for the thread that waits for it."""
        if timeout_s > 0:
            operation.timeout_s = timeout_s
        while not operation.over:
            if not self._turn.acquire(timeout=timeout_s if timeout_s > 0 else -1):
                raise RunError(f"a shared-memory operation is not done after {timeout_s} s")
            try:
                if not operation.over:
                    self._carry_out_first()
            finally:
                self._turn.release()

    def help(self) -> None:
        """The helper thread."""
        while self.calls.acquire() and not self._ended:
            with self._turn:
                self._carry_out_first()

    def _carry_out_first(self) -> None:
        if not self.waiting:
            return
        operation, shared = self.waiting.popleft(), self._shared
        assert shared is not None, "closed lines are empty"
        own_s = operation.timeout_s
        shared.timeout_s = self._timeout().total_seconds() if own_s is None else own_s
        if self._aborted:  # looked at after the line above, which `abort` overwrites
            operation.fail(RunError("this process group (backend shm) was aborted"))
        else:
            operation.carry_out(shared)

    def abort(self) -> None:
        """Let the operation under way, and all that wait, fail."""
        self._aborted = True
        if (shared := self._shared) is not None:
            shared.timeout_s = 0.0

    def close(self) -> None:
        """Finish what is waiting, let go of the memory, tell the peers."""
        with self._turn:
            while self.waiting:
                self._carry_out_first()
            if self._shared is not None:
                self._shared.close()
                self._shared = None
        self.end_helper()

    def end_helper(self) -> None:
        """Let the helper thread end."""
        self._ended = True
        self.calls.release()


class Lane:
    """A line, and who puts operations into it.

    Args:
        shared: used by one thread at a time.
        timeout: asked before each operation: the group's longest wait for a peer.
    """

    def __init__(self, shared: SharedMemoryCommunicator, timeout: Callable[[], timedelta]) -> None:
        self._line = Line(shared, timeout)
        self._helper: threading.Thread | None = None
        self._closed = False
        self._issuing = threading.Lock()

    def issue(
        self, act: Action, result: list[Any], *, timeout_s: float | None, at_once: bool
    ) -> Operation:
        """Put an operation into the line; `at_once` carries it out before returning.

        Raises:
            RunError: the group was destroyed, or as `Operation.wait` if `at_once`.
        """
        operation = Operation(self._line, act, result, timeout_s)
        with self._issuing:
            if self._closed:
                raise RunError("this process group (backend shm) was destroyed")
            self._line.waiting.append(operation)
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
            # The thread holds the line only: a group that nobody holds any more ends it.
            weakref.finalize(self, self._line.end_helper)
            self._helper.start()
        self._line.calls.release()

    def close(self) -> None:
        """Finish what was issued, end the helper, tell the peers; harmless when repeated."""
        with self._issuing:
            self._closed = True
        self._line.close()
        if self._helper is not None:
            self._helper.join()

    def abort(self) -> None:
        """Fail what was issued, from any thread, then close."""
        self._line.abort()
        self.close()
