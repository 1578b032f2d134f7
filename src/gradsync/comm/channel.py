"""Messages kept apart from those of other channels between the same ranks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator, Messenger, Work

if TYPE_CHECKING:
    from torch import Tensor


class Channel:
    """A `Messenger` over `parent` whose messages match only those of the same channel number.

    Two models that are synchronised at once send from two threads; without channels a message of
    one could match a receive of the other.

    Args:
        parent: carries the messages.
        number: the same on all ranks, from `draw_channel`.
    """

    def __init__(self, parent: Messenger, number: int) -> None:
        self._parent = parent
        self._number = number
        self.rank = parent.rank
        self.world_size = parent.world_size

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Messenger.exchange`."""
        return self._parent.exchange(sends, receives, self._number + channel)


def draw_channel(comm: Communicator) -> int:
    """Draw a number that no other channel has, equal on all ranks: rank 0 draws 30 random bits.

    One broadcast, int64 [1], on the CPU. Drawn, not counted: a counter would be global state.
    """
    number = torch.tensor([secrets.randbits(30)])
    comm.broadcast(number).wait()
    return int(number)
