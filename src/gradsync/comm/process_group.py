"""A communicator over a torch process group (gloo, nccl), held explicitly.

The group object is used directly, never through the module-level default: so several ranks may
run as threads of one process (tests), and nothing here depends on global state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator, Messages, Messenger, ReduceOp, Work
from gradsync.comm.values import check_same_call
from gradsync.comm.work import AllOf, CopyBack, Done
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

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    def backend_for(self, device: torch.device) -> str:
        """Name of the backend that moves tensors of `device`: gloo, nccl, ..."""
        return private.backend_of(self.group, device).name()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        self._check(f"all_reduce ({op})", tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._in_place(tensor, lambda there: self.group.allreduce([there], options))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        self._check(f"broadcast (from rank {src})", tensor)
        options = dist.BroadcastOptions()
        options.rootRank = src
        return self._in_place(tensor, lambda there: self.group.broadcast([there], options))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        self._check("all_gather", tensor)
        mine = self._readable(tensor)
        return self._in_place(output, lambda out: private.all_gather_flat(self.group, out, mine))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        self._check(f"reduce_scatter ({op})", tensor)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        return private.reduce_scatter_flat(self.group, output, self._readable(tensor), options)

    def barrier(self) -> None:
        """See `Communicator.barrier`; one all-reduce, float32 [1] on the CPU.

        Torch's own barrier picks a GPU by itself, and may pick the wrong one (pytorch #124714).
        """
        self.all_reduce(torch.zeros(1)).wait()

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """See `Messenger.exchange`. Empty tensors are not sent.

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

    def _post(self, sends: Messages, receives: Messages, tag: int) -> list[Work]:
        """Post receives, then sends: an expected message goes straight into its tensor."""
        works = [self.group.recv([tensor], peer, tag) for tensor, peer in receives]
        return works + [self.group.send([tensor], peer, tag) for tensor, peer in sends]

    def _check(self, what: str, tensor: Tensor) -> None:
        if self.checked:
            check_same_call(self.unchecked, what, tensor)

    def _readable(self, tensor: Tensor) -> Tensor:
        """`tensor`, or a copy where the group cannot read it.

        Small CPU values travel over a GPU when the process group has NCCL alone. Conjugation and
        negation are carried out: torch keeps them as a flag beside the memory, backends read the
        memory, and ranks may differ in the flag.
        """
        if tensor.device.type == "cpu" and "cpu" not in private.device_types(self.group):
            tensor = tensor.to(torch.device("cuda", torch.cuda.current_device()))
        return tensor.resolve_conj().resolve_neg()

    def _in_place(self, tensor: Tensor, run: Callable[[Tensor], Work]) -> Work:
        """`run(tensor)`, through a copy where needed."""
        there = self._readable(tensor)
        return run(there) if there is tensor else CopyBack(run(there), there, tensor)


class Channel:
    """A `Messenger` over `parent` whose messages match only those with its number (`draw_channel`).

    Two models that are synchronised at once send from two threads; without channels a message of
    one could match a receive of the other.
    """

    def __init__(self, parent: Messenger, number: int) -> None:
        self._parent = parent
        self._number = number
        self.rank = parent.rank
        self.world_size = parent.world_size

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """See `Messenger.exchange`."""
        return self._parent.exchange(sends, receives, self._number + channel)


def draw_channel(comm: Communicator) -> int:
    """Draw a number that no other channel has, equal on all ranks: rank 0 draws 30 random bits.

    One broadcast, int64 [1], on the CPU. Drawn, not counted: a counter would be global state.
    """
    number = torch.tensor([secrets.randbits(30)])
    comm.broadcast(number).wait()
    return int(number)
