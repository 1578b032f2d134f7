"""A communicator over a torch process group (gloo, nccl), and the `Work`s that operations return:
finished ones, several as one, and those of a background thread.

The group object is used directly, never the module-level default. So several ranks can run as
threads of one process (tests), and nothing here depends on global state.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator, Messages, Messenger, ReduceOp, Work
from gradsync.comm.values import check_same_call
from gradsync.core import torch_private as private
from gradsync.errors import ConfigError, LostPeerError, RunError
from gradsync.runtime.gloo_group import SendingThread, wait_until_workers_sleep

if TYPE_CHECKING:
    from torch import Tensor

# One tag for all messages of a channel: backends keep the order of messages with one tag between
# two ranks. Not 0, the default tag of `dist.send`, which the user may call on the same group.
_TAG = 0x6773

_LOOK = timedelta(seconds=0.5)

_OPS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Done:
    """The `Work` of something that has already happened."""

    def wait(self) -> None:
        """Return at once."""


class AllOf(NamedTuple):
    """Several works as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        """Wait for each of them, in order."""
        for work in self.works:
            work.wait()


class Interruptible(NamedTuple):
    """A collective's `Work` whose `wait` ends when a rank is `lost`: gloo does not always wake a
    waiting thread whose connections have ended. The collective stays with gloo."""

    work: Any
    lost: Callable[[], bool]

    def wait(self) -> None:
        """See `Work.wait`; LostPeerError if a rank is lost."""
        while True:
            try:
                self.work.wait(_LOOK)
            except RuntimeError as error:
                if self.work.is_completed():
                    raise
                if self.lost():
                    raise LostPeerError("a rank is lost, and gloo's wait did not end") from error
            else:
                return


@dataclass(eq=False, slots=True)
class Then:
    """A `Work` with a function to call once it is done."""

    work: Work
    _finish: Callable[[], object] | None

    def wait(self) -> None:
        """See `Work.wait`; finishes once."""
        self.work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Background:
    """One worker thread that runs submitted functions in order while the main thread goes on.

        main    submit(a) ── submit(b) ── backward goes on ──── a.wait() ── b.wait()
        worker      └─ a ────────┴─ b ───────────────────┘

    The functions talk to other ranks only by `exchange`: two threads would issue collectives in
    different orders on different ranks. On NCCL even messages queue behind the group's collectives:
    give the worker a communicator over a separate group.

    The first `submit` starts the thread. It never keeps the process alive. It ends when its owner
    is garbage-collected, or at `close`. After a failure it runs nothing more: every later
    submission fails with that error.

    Args:
        device: where the submitted work computes. On CUDA the worker has a separate stream, which
            starts after everything queued on the submitting stream so far, and `wait` makes the
            waiting stream wait for it. Keep the tensors alive until then.
        lost: whether ranks are lost that the functions talk to; None never asks.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, lost: Callable[[], bool] | None = None
    ) -> None:
        device, self._lost = torch.device(device), lost
        # High priority: a sum that queues behind a layer's kernels is late.
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._worker = _Worker(stream)
        self._thread: SendingThread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, fn: Callable[[], None]) -> Work:
        """Run `fn()` on the worker after everything submitted before. The `wait` of the result
        raises the error of `fn`, or that of an earlier submission."""
        job = _Job(fn, self._worker.stream)
        with self._lock:
            if self._closed:
                raise RunError("this background worker is closed")
            if self._thread is None:
                worker = self._worker
                # The thread holds only `_worker`: collecting this object ends the thread.
                self._thread = SendingThread(worker.run, worker.mark, "gradsync-background")
                weakref.finalize(self, worker.jobs.put, None)
                weakref.finalize(self._thread, _end, worker.jobs, weakref.ref(self._thread))
                self._thread.start()
            self._worker.put(job)
        return job

    def close(self) -> None:
        """Finish the submitted functions and end the thread; may be called again."""
        with self._lock:
            self._closed = True
        if self._thread is None:
            return
        self._worker.jobs.put(None)
        self._thread.join(None if self._lost is None else _LOOK.total_seconds())
        while self._thread.is_alive() and not self._thread.left:
            self._thread.join(_LOOK.total_seconds())
            # Gloo does not always wake a thread that waits for a message of a lost rank.
            self._thread.left = self._lost is not None and self._lost()


class _Job:
    """One submission, and its `Work`."""

    def __init__(self, fn: Callable[[], None], stream: Any) -> None:
        self._fn: Callable[[], None] | None = fn
        self._stream = stream
        self._num_threads = torch.get_num_threads()
        self._ready: Any = None
        if stream is not None:
            self._ready = torch.cuda.current_stream(stream.device).record_event()
        self.over = threading.Event()
        self._error: BaseException | None = None
        self._done: Any = None

    def run(self) -> BaseException | None:
        """Run the function on the worker; returns the exception it raised, if any."""
        assert self._fn is not None, "a job runs once"
        # The bits of a sum over many elements depend on the number of intra-op threads, and
        # `torch.set_num_threads` affects only the thread that calls it.
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
        """Wake the waiting threads."""
        self._fn = None  # frees its tensors before this work or the next one
        self._error = error
        self.over.set()

    def wait(self) -> None:
        self.over.wait()
        if self._error is not None:
            raise self._error
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)


class _Worker:
    """State that the worker thread holds: the jobs, without a reference to their owner."""

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

    def mark(self) -> threading.Event:
        """An event that is set when all jobs queued so far are done."""
        job = _Job(lambda: None, None)
        self.put(job)
        return job.over

    def run(self) -> None:
        """Run jobs until None comes or one fails. The thread must not keep the error: its traceback
        references everything the job held, perhaps the owner, whose collection ends the thread."""
        if self.stream is not None:  # else torch opens a context on GPU 0 here
            torch.cuda.set_device(self.stream.device)
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


_LAST_S = 5.0
"""Longest time that program exit waits to send messages that other ranks may need."""


def _end(jobs: SimpleQueue[_Job | None], thread: weakref.ref[threading.Thread]) -> None:
    """End a thread that is alive at program exit: it must not be unwound within torch."""
    alive = thread()
    if alive is not None and not getattr(alive, "left", False):
        jobs.put(None)
        alive.join(_LAST_S)


class ProcessGroupCommunicator:
    """Collectives of one torch process group.

    Args:
        group: a `torch.distributed.ProcessGroup` or a backend such as `ProcessGroupGloo`.
        checked: before each collective, compare the call over ranks (`check_same_call`), for calls
            by the user. Gradient synchronisation compares models once, at the start.
        on_cpu: the same ranks' group for CPU tensors, if `group` takes none (NCCL alone). None
            copies them to the GPU and back, behind all its queued work.
        made: groups to destroy at `close`, which nothing else uses.
        spare: unused groups of the same ranks, for a thread (`for_background`).
        lost: whether a rank is lost, so that waits for collectives end; None never asks.
    """

    def __init__(
        self,
        group: Any,
        *,
        checked: bool = False,
        on_cpu: Any = None,
        made: Sequence[Any] = (),
        spare: list[Any] | None = None,
        lost: Callable[[], bool] | None = None,
    ) -> None:
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.checked = checked
        self.spare = [] if spare is None else spare
        self._on_cpu, self._made, self.lost = on_cpu, made, lost

    @property
    def unchecked(self) -> ProcessGroupCommunicator:
        """A communicator over the same ranks that does not compare calls."""
        if not self.checked:
            return self
        more = {"on_cpu": self._on_cpu, "spare": self.spare, "lost": self.lost}
        return ProcessGroupCommunicator(self.group, **more)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        self._check(f"all_reduce ({op})", tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._in_place(tensor, lambda there, group: group.allreduce([there], options))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        self._check(f"broadcast (from rank {src})", tensor)
        options = dist.BroadcastOptions()
        options.rootRank = src
        return self._in_place(tensor, lambda there, group: group.broadcast([there], options))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        self._check("all_gather", tensor)
        mine = self._readable(tensor)
        return self._in_place(output, lambda out, group: private.all_gather_flat(group)(out, mine))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        self._check(f"reduce_scatter ({op})", tensor)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        group = self._group_for(tensor)
        return private.reduce_scatter_flat(group)(output, self._readable(tensor), options)

    def barrier(self) -> None:
        """See `Communicator.barrier`; one all-reduce, float32 [1] on the CPU.

        Torch's own barrier picks a GPU by itself, and may pick the wrong one (pytorch #124714).
        """
        self.all_reduce(torch.zeros(1)).wait()

    def close(self) -> None:
        """Destroy the groups made for this communicator, unless the session already has."""
        for group in {*self._made}.intersection(private.process_groups()):
            wait_until_workers_sleep()
            dist.destroy_process_group(group)

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """See `Messenger.exchange`. Empty tensors are not sent.

        On a backend that supports it (NCCL) the batch is one coalesced operation, as in
        `torch.distributed.batch_isend_irecv`. Sends issued one by one would wait for receives that
        their peer has not launched yet.
        """
        peers = [peer for _, peer in (*sends, *receives)]
        assert self.rank not in peers, "a message to oneself"
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        if not sends and not receives:
            return Done()
        refuse_detail("it counts messages as collectives, of which all ranks need equal numbers")
        device = (sends or receives)[0][0].device
        if device.type != "cpu" and private.backend_of(self.group, device).supports_coalescing:
            return private.coalesced(self.group, device, lambda: self._post(sends, receives, _TAG))
        return AllOf(self._post(sends, receives, _TAG + channel))

    def _post(self, sends: Messages, receives: Messages, tag: int) -> list[Work]:
        """Post receives, then sends: an expected message goes straight into its tensor."""
        group = self._group_for((sends or receives)[0][0])
        works = [group.recv([tensor], peer, tag) for tensor, peer in receives]
        return works + [group.send([tensor], peer, tag) for tensor, peer in sends]

    def _check(self, what: str, tensor: Tensor) -> None:
        if self.checked:
            check_same_call(self.unchecked, what, tensor)

    def _group_for(self, tensor: Tensor) -> Any:
        return self.group if self._on_cpu is None or tensor.is_cuda else self._on_cpu

    def _readable(self, tensor: Tensor) -> Tensor:
        """`tensor`, or a copy where the group cannot read it: on the GPU when the ranks have NCCL
        alone, and without lazy conjugation or negation, since backends read only the memory."""
        takes = private.device_types(self._group_for(tensor))
        if tensor.device.type == "cpu" and "cpu" not in takes:
            tensor = tensor.to(torch.device("cuda", torch.cuda.current_device()))
        return tensor.resolve_conj().resolve_neg()

    def _in_place(self, tensor: Tensor, run: Callable[[Tensor, Any], Work]) -> Work:
        """`run(tensor, group)`, through a copy where needed."""
        there, group = self._readable(tensor), self._group_for(tensor)
        work = run(there, group)
        if self.lost is not None and not there.is_cuda:  # NCCL's waits only queue, or abort
            work = Interruptible(work, self.lost)
        return work if there is tensor else Then(work, partial(tensor.copy_, there))


def refuse_detail(why: str) -> None:
    """Raise ConfigError if TORCH_DISTRIBUTED_DEBUG=DETAIL wraps process groups."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise ConfigError(f"TORCH_DISTRIBUTED_DEBUG=DETAIL: {why}; take INFO, or strategy='naive'")


class Subset:
    """A `Messenger` between some ranks of `parent`: member i is `ranks[i]` there; None for all.

    Free to create; only its members create it. It shares the parent's connections. Subsets that
    have two ranks in common must be used in the same order on both, or with another `channel`
    (`draw_channel`): a message of one model's thread could match a receive of another's.
    """

    def __init__(
        self, parent: Messenger, ranks: Sequence[int] | None = None, channel: int = 0
    ) -> None:
        self._parent, self._channel = parent, channel
        self.lost: Callable[[], bool] | None = getattr(parent, "lost", None)
        self._ranks = tuple(range(parent.world_size) if ranks is None else ranks)
        self.rank = self._ranks.index(parent.rank)
        self.world_size = len(self._ranks)

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """See `Messenger.exchange`."""
        theirs = [(tensor, self._ranks[peer]) for tensor, peer in sends]
        ours = [(tensor, self._ranks[peer]) for tensor, peer in receives]
        return self._parent.exchange(theirs, ours, self._channel + channel)


def draw_channel(comm: Communicator) -> int:
    """Draw a channel number that is unique and equal on all ranks: rank 0 draws 30 random bits.

    One broadcast, int64 [1], on the CPU. Random, because a counter would be global state.
    """
    number = torch.tensor([secrets.randbits(30)])
    comm.broadcast(number).wait()
    return int(number)
