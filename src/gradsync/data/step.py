"""One global batch, as one rank sees it."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync.data.leaf import Leaf


class Step:
    """One optimizer step's data; iterating gives this rank's leaves in order, once.

    Leaves are read as they are asked for. `len(step)` is this rank's number of leaves, which is 0
    for some ranks when the step has fewer leaves than there are ranks.
    """

    def __init__(
        self, leaves: Iterator[Leaf], *, number: int, num_leaves: int, num_local_leaves: int
    ) -> None:
        self._leaves = leaves
        self._taken = False
        self.number = number
        """Number of the step in the stream, from 0."""
        self.num_leaves = num_leaves
        """Leaves of the step over all ranks."""
        self._num_local_leaves = num_local_leaves

    def __len__(self) -> int:
        return self._num_local_leaves

    def __iter__(self) -> Iterator[Leaf]:
        if self._taken:
            raise RuntimeError(
                f"the leaves of step {self.number} can be read once, before the next step begins"
            )
        self._taken = True
        return self._leaves

    def drain(self) -> None:
        """Read what is left of the step, so that the next one starts in the right place."""
        self._taken = True
        for _ in self._leaves:
            pass
