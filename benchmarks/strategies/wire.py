"""What really left this process: bytes from the kernel, operations from the process groups.

Both are read from outside, so strategies of torch's own (DDP, FSDP2, PowerSGD) are counted exactly
as ours are, and no formula is needed.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator, Work
from gradsync.comm.recording import RecordingCommunicator

_BYTES_SENT = 200
"""Where `struct tcp_info` has `tcpi_bytes_sent` (linux/tcp.h, since Linux 4.19): data, headers of
TCP and IP not counted."""


def bytes_sent() -> int:
    """Bytes that this process has given to all its open TCP sockets so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile: listing the folder opens one itself
            continue
        with handle:
            is_tcp = handle.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and handle.type == socket.SOCK_STREAM:
                info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _BYTES_SENT + 8:
                    total += struct.unpack_from("=Q", info, _BYTES_SENT)[0]
    return total


def operations_issued() -> int:
    """Collectives, sends and receives that this process has given to all its process groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


class CountedCommunicator(RecordingCommunicator):
    """Also tells a batch of messages from its sends and receives, and shows the group inside."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.posted = 0
        """Sends and receives of all batches."""
        self.group = getattr(inner, "group", None)

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Communicator.exchange`."""
        with self._lock:
            self.posted += sum(tensor.numel() > 0 for tensor, _ in (*sends, *receives))
        return super().exchange(sends, receives, channel)

    @property
    def surplus(self) -> int:
        """What to take off `operations_issued` so that a batch of messages counts as one."""
        return self.posted - self.operations["exchange"]
