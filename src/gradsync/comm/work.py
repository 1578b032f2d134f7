"""Operations in progress: finished ones, several as one, and those of a background thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Work
from gradsync.errors import RunError


class Done:
    """The `Work` of something that has already happened."""

    def wait(self) -> None:
        """Return at once."""


class AllOf:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each of them, in order."""
        for work in self._works:
            work.wait()


class CopyBack:
    """A work on `there`, a copy of `home`; `wait` copies the result back."""

    def __init__(self, work: Work, there: Tensor, home: Tensor) -> None:
        self._work, self._there, self._home = work, there, home

    def wait(self) -> None:
        """See `Work.wait`."""
        self._work.wait()
        self._home.copy_(self._there)


class Background:
    """One worker thread that runs submitted functions strictly in order, beside the main thread.

        main    submit(a) ── submit(b) ── backward goes on ──── a.wait() ── b.wait()
        worker      └─ a ────────┴─ b ───────────────────┘

    The functions talk to other ranks only by `exchange`, or through a shared-memory communicator
    reserved for this thread: two threads would issue collectives in different orders on different
    ranks. On NCCL even messages queue up with the collectives of the same group: give the worker a
    communicator over a separate group.

    The first `submit` starts the thread. It never keeps the process alive, and ends when its owner
    is garbage-collected, or at `close`. After a failure it runs nothing more: every later
    submission fails with that error.

    Args:
        device: where the submitted work computes. On CUDA the worker has a separate stream, which
            starts after everything given to the submitting stream so far, and `wait` makes the
            waiting stream wait for it. Hold on to the tensors until then.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker = _Worker(stream)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, fn: Callable[[], None]) -> Work:
        """Run `fn()` on the worker after everything submitted before.

        Returns:
            A `Work` whose `wait` raises the error of `fn`, or that of an earlier submission.

        Raises:
            RunError: after `close`.
        """
        job = _Job(fn, self._worker.stream)
        with self._lock:
            if self._closed:
                raise RunError("this background worker is closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._worker.run, name="gradsync-background", daemon=True
                )
                # The thread holds `_worker` only, so this object can die, and that ends the thread.
                weakref.finalize(self, self._worker.jobs.put, None)
                self._thread.start()
            self._worker.put(job)
        return job

    def close(self) -> None:
        """Finish the submitted functions and end the thread; harmless when called again."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._worker.jobs.put(None)
            self._thread.join()


class _Job:
    """One submission, and its `Work`."""

    def __init__(self, fn: Callable[[], None], stream: Any) -> None:
        self._fn: Callable[[], None] | None = fn
        self._stream = stream
        self._num_threads = torch.get_num_threads()
        self._ready: Any = None
        if stream is not None:
            self._ready = torch.cuda.current_stream(stream.device).record_event()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._done: Any = None

    def run(self) -> BaseException | None:
        """Run the function on the worker; returns the exception it raised, if any.

        With the submitting thread's number of intra-op threads, on which the bits of a sum over
        many elements depend: torch copies its setting into a new thread once, and a later
        `torch.set_num_threads` reaches only the thread that calls it.
        """
        assert self._fn is not None, "a job runs once"
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            if self._stream is None:
                self._fn()
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._ready)
                    self._fn()
                    self._done = self._stream.record_event()
        except BaseException as error:  # raised again in the thread that waits
            self.finish(error)
            return error
        self.finish(None)
        return None

    def finish(self, error: BaseException | None) -> None:
        """Let the waiting threads go on."""
        self._fn = None  # its tensors must not live as long as this work, or until the next one
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """See `Work.wait`."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)


class _Worker:
    """State that the worker thread holds: the jobs, and no reference to their owner."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def put(self, job: _Job) -> None:
        """Queue a job; after a failure it fails at once."""
        with self._lock:
            if self._error is None:
                self.jobs.put(job)
                return
        job.finish(self._error)

    def run(self) -> None:
        """Run jobs until None comes or one fails.

        The thread must not live on with the error, whose traceback holds everything the job held,
        and so perhaps the owner, whose end would end the thread.
        """
        while (job := self.jobs.get()) is not None:
            error = job.run()
            if error is not None:
                with self._lock:
                    self._error = error
                    while not self.jobs.empty():
                        waiting = self.jobs.get()
                        if waiting is not None:
                            waiting.finish(error)
                return
