"""Some ranks of a communicator, without a process group of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.comm.base import Messenger, Work

if TYPE_CHECKING:
    from torch import Tensor


class Subset:
    """A `Messenger` between some ranks of `parent`: member i is `ranks[i]` there.

    Costs nothing to make, is made on its members only, and shares the parent's connections. Subsets
    that have two ranks in common must be used in the same order on both.

    Args:
        parent: carries the messages; this rank is one of `ranks`.
        ranks: members, as ranks of `parent`; the same list on all of them.
    """

    def __init__(self, parent: Messenger, ranks: Sequence[int]) -> None:
        self._parent = parent
        self._ranks = tuple(ranks)
        self.rank = self._ranks.index(parent.rank)
        self.world_size = len(self._ranks)

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Messenger.exchange`."""
        return self._parent.exchange(
            [(tensor, self._ranks[peer]) for tensor, peer in sends],
            [(tensor, self._ranks[peer]) for tensor, peer in receives],
            channel,
        )
