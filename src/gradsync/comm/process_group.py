"""A communicator over a torch process group (gloo, nccl), held explicitly.

The group object is used directly, never through the module-level default: so several ranks may
run as threads of one process (tests), and nothing here depends on global state. Calling the group's
own methods also avoids names that torch renames between releases
(`all_gather_into_tensor` became `all_gather_single` in 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.comm.base import AllOf, Done, ReduceOp, Work
from gradsync.comm.same_call import check_same_call
from gradsync.core import torch_private as private

if TYPE_CHECKING:
    from torch import Tensor

# One tag for all messages of a channel: backends keep the order of messages between two ranks with
# one tag. Not 0, the default tag of the user's `dist.send` in the same group.
_TAG = 0x6773

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class ProcessGroupCommunicator:
    """Collectives of one torch process group.

    Args:
        group: a `torch.distributed.ProcessGroup` or a backend such as `ProcessGroupGloo`.
        checked: before each collective, compare the call over ranks (`check_same_call`); for calls
            by the user. Gradient synchronisation compares models once, at the start.
    """

    def __init__(self, group: Any, *, checked: bool = False) -> None:
        self.group = group
        self.checked = checked

    @property
    def unchecked(self) -> ProcessGroupCommunicator:
        """A communicator over the same ranks that does not compare calls."""
        return ProcessGroupCommunicator(self.group) if self.checked else self

    def _check(self, what: str, tensor: Tensor) -> None:
        if self.checked:
            check_same_call(self.unchecked, what, tensor)

    def _needs_stage(self, tensor: Tensor) -> bool:
        """Whether the group cannot take this tensor: a CPU one in a group that has NCCL only."""
        return tensor.device.type == "cpu" and "cpu" not in private.device_types(self.group)

    @property
    def _stage(self) -> torch.device:
        """Device through which such tensors travel instead."""
        return torch.device("cuda", torch.cuda.current_device())

    def _plain(self, tensor: Tensor) -> Tensor:
        """A tensor that the group can read: `tensor` itself, or a copy.

        On the GPU where needed: small CPU values travel too when the process group was initialised
        for GPUs alone. Conjugation and negation are carried out: torch keeps them as a flag beside
        the memory, backends read the memory, and ranks may differ in the flag.
        """
        there = tensor.to(self._stage) if self._needs_stage(tensor) else tensor
        return there.resolve_conj().resolve_neg()

    def _staged(self, tensor: Tensor, run: Callable[[Tensor], Work]) -> Work:
        """`run(tensor)`, through a copy where needed."""
        there = self._plain(tensor)
        return run(there) if there is tensor else CopyBack(run(there), there, tensor)

    def backend_for(self, device: torch.device) -> str:
        """Name of the backend that moves tensors of `device`: gloo, nccl, ..."""
        return private.backend_of(self.group, device).name()

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        self._check(f"all_reduce ({op})", tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._staged(tensor, lambda there: self.group.allreduce([there], options))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        self._check(f"broadcast (from rank {src})", tensor)
        options = dist.BroadcastOptions()
        options.rootRank = src
        return self._staged(tensor, lambda there: self.group.broadcast([there], options))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        self._check("all_gather", tensor)
        there = self._plain(tensor)
        return self._staged(output, lambda whole: private.all_gather_flat(self.group, whole, there))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        self._check(f"reduce_scatter ({op})", tensor)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        return private.reduce_scatter_flat(self.group, output, self._plain(tensor), options)

    def barrier(self) -> None:
        """See `Communicator.barrier`; one all-reduce, float32 [1] on the CPU.

        Torch's own barrier picks a GPU by itself, and may pick the wrong one (pytorch #124714).
        """
        self.all_reduce(torch.zeros(1)).wait()

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Communicator.exchange`. Empty tensors are not sent.

        On a backend that supports it (NCCL) the batch is one coalesced operation, as in
        `torch.distributed.batch_isend_irecv`: issued one by one, sends would wait for receives that
        their peer has not launched yet.
        """
        peers = [peer for _, peer in (*sends, *receives)]
        assert self.rank not in peers, "a message to oneself"
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        if not sends and not receives:
            return Done()
        device = (sends or receives)[0][0].device
        if device.type != "cpu" and private.backend_of(self.group, device).supports_coalescing:
            return private.coalesced(self.group, device, lambda: self._post(sends, receives, _TAG))
        return AllOf(self._post(sends, receives, _TAG + channel))

    def _post(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        tag: int,
    ) -> list[Work]:
        """Post receives, then sends: an expected message goes straight into its tensor."""
        works = [self.group.recv([tensor], peer, tag) for tensor, peer in receives]
        return works + [self.group.send([tensor], peer, tag) for tensor, peer in sends]


class CopyBack:
    """A work on `there`, a copy of `home`; `wait` copies the result back."""

    def __init__(self, work: Work, there: Tensor, home: Tensor) -> None:
        self._work, self._there, self._home = work, there, home

    def wait(self) -> None:
        """See `Work.wait`."""
        self._work.wait()
        self._home.copy_(self._there)
