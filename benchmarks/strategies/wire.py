"""A communicator that also tells a batch of messages from its sends and receives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from gradsync.comm.base import Communicator, Work

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.recording import RecordingCommunicator


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
        """The number to take off `operations_issued` so that a batch of messages counts as one."""
        return self.posted - self.operations["exchange"]
