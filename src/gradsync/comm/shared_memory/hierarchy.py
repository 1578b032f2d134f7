"""All-reduce over hosts whose ranks share memory: sum within each host, send between hosts.

2 hosts with 2 ranks, the tensor's shards a and b; `═` is memory, `~` the network:

    host 0   rank 0 ═╗ a of both ═► a ~~~ all-reduce with rank 2 ~~~ a ═► into all buffers ═► a b
             rank 1 ═╝ b of both ═► b ~~~ all-reduce with rank 3 ~~~ b ═► into all buffers ═► a b
    host 1   rank 2 ═╗ ...

The same as `hierarchical_all_reduce`, which uses messages alone. Within a host a byte moves at
memory speed; between hosts each rank sends 2(M-1)/M of a shard (M hosts).

[Note: One operation] From the time all ranks of the host have arrived until all are done, one rank
owns a shard in all ranks' buffers. So one operation sums, sends the messages, and writes the
result. No rank waits for a message of another shard.

[Note: Cuts] Tensors sent between hosts must be cut alike on all hosts, wherever they are in memory:
into equal shards, with the remainder sent like a short tensor.
"""

from __future__ import annotations

from torch import Tensor

from gradsync.comm.base import Communicator, Messenger, ReduceOp
from gradsync.comm.p2p_collectives import (
    P2PCommunicator,
    flat_view,
    ring_all_reduce,
    tree_all_reduce,
)
from gradsync.comm.process_group import Channel
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator, reduce_into
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.comm.values import all_gather_json
from gradsync.errors import LostPeerError

_SHORT_BYTES = 2**14
"""Up to this size one rank of each host sends all of it: shards would be too short for messages."""
_TREE_BYTES = 2**18
"""Up to this size, fewer messages between hosts are worth more bytes sent."""


def share_hosts(
    everyone: Communicator, intra: Messenger, channel: int = 0
) -> SharedMemoryCommunicator:
    """Make a communicator over each host's ranks through shared memory; all ranks call it.

    All hosts get one, or none does. The caller closes it.

    Args:
        everyone: communicator over the ranks of all hosts; two small all-gathers.
        intra: the ranks of this host; carries messages, in `channel`.
        channel: from `draw_channel`, when the communicator is for a second thread.

    Raises:
        SharedMemoryError: on all ranks, with the reason from the first host that failed.
    """
    shared, reason = None, ""
    try:
        messages = Channel(intra, channel)
        shared = share_memory(P2PCommunicator(messages, getattr(intra, "group", None)))
    except SharedMemoryError as error:
        reason = str(error)
    for rank, refusal in enumerate(all_gather_json(everyone, reason)):
        if refusal:
            if shared is not None:
                shared.close()
            raise SharedMemoryError(f"rank {rank}: {refusal}")
    assert shared is not None, "no rank refused"
    return shared


def all_reduce_over_hosts(
    host: SharedMemoryCommunicator,
    inter: Messenger,
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    equal_nodes: bool,
) -> None:
    """Combine `tensor` (contiguous, any shape and length) over all hosts, in place, blocking.

    Tensors (on the CPU) from `host.allocate` are combined in place; others go through small
    buffers, with the same bits. After an error `host`, from `share_hosts`, is closed. The other
    arguments are those of `hierarchical_all_reduce`.

    Raises:
        LostPeerError: a rank of this host is gone.
        RuntimeError: a rank of another host is gone.
    """
    flat = flat_view(tensor)
    # [Note: Cuts]
    long = flat.numel() - flat.numel() % host.world_size
    if not equal_nodes or long * flat.element_size() <= _SHORT_BYTES:
        long = 0
    try:
        if long:
            _in_shares(host, inter, flat[:long], op)
        if long < flat.numel():
            # Not by each rank itself: `inter` may order the hosts differently at other positions,
            # which gives other bits.
            _with_leader(host, inter, flat[long:], op)
    except LostPeerError as error:
        host.close()
        raise LostPeerError(f"{error} (counting the ranks of this host alone)") from None
    except RuntimeError:
        host.close()  # its other ranks would wait for this one
        raise


def _with_leader(
    host: SharedMemoryCommunicator, inter: Messenger, flat: Tensor, op: ReduceOp
) -> None:
    """Combine `flat`, which the first rank of each host sends."""
    host.all_reduce(flat, op).wait()  # this host, [numel], the tensor's dtype; overlaps nothing
    if host.rank == 0:
        _between(inter, flat, op)
    host.broadcast(flat).wait()  # this host, [numel], the tensor's dtype; overlaps nothing


def _in_shares(
    host: SharedMemoryCommunicator, inter: Messenger, flat: Tensor, op: ReduceOp
) -> None:
    """Combine equal shards, one per rank of the host."""
    size = flat.numel() // host.world_size
    mine = slice(host.rank * size, (host.rank + 1) * size)
    parts = host.parts_of(flat)
    own = flat[mine]
    if parts is None:
        host.reduce_scatter(own, flat, op).wait()  # this host, [numel] to [numel / n]; blocking
        _between(inter, own, op)
        host.all_gather(flat, own).wait()  # this host, [numel / n] to [numel]; blocking
        return
    operands = [part[mine] for part in parts]

    def share() -> None:  # [Note: One operation]
        reduce_into(own, operands, op)
        _between(inter, own, op)
        for rank, operand in enumerate(operands):
            if rank != host.rank:
                operand.copy_(own)

    host.run(share, f"all_reduce over hosts, {op}, [{flat.numel()}]", over=flat).wait()


def _between(inter: Messenger, share: Tensor, op: ReduceOp) -> None:
    """Combine one shard over all hosts, by messages: [n], between ranks at one position."""
    if share.numel() * share.element_size() <= _TREE_BYTES:
        tree_all_reduce(inter, share, op)
    else:
        ring_all_reduce(inter, share, op)
