"""One page per rank that all ranks see: the rank's progress, and a few numbers.

[Note: Order of writes] A rank writes data, then its flag; a peer reads the flag, then the data.
Neither a lock nor a fence is needed in between, because x86-64 shows one core's writes to others in
their order, and reads are not reordered among themselves. Other processors may reorder both:
`share_memory` refuses them (`unavailable.py`). A flag is an aligned 8-byte word with one writer.

[Note: Ring of signatures] The signature of a rank's operation in turn n stays in slot
n % NUM_SIGNATURES of its page until the rank arrives at turn n + NUM_SIGNATURES. Peers read the
slot before they finish turn n; so if ranks arrive only after all have finished the turn
NUM_SIGNATURES earlier, nothing unread is overwritten, and every turn is compared, however far a
rank runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

PAGE_BYTES = 4096

# In words of 8 bytes; words polled by different ranks lie on separate cache lines (8 words).
_ARRIVED, _DONE, _CLOSED = 0, 8, 16
_NOTES, _NUM_NOTES = 24, 8  # twice
_SIGNATURES = 40
NUM_SIGNATURES = 256
"""Turns that a rank may have arrived at while a peer has not finished the first of them."""

_MASK = (1 << 63) - 1


class Flags:
    """The pages of all ranks.

    Args:
        rank: this rank; it writes only into its own page.
        pages: one per rank, uint8 [PAGE_BYTES].
    """

    def __init__(self, rank: int, pages: Sequence[Tensor]) -> None:
        self._words = [page.numpy().data.cast("B").cast("q") for page in pages]
        self._mine = self._words[rank]
        self._notes = _NOTES
        self._others = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]

    def arrive(self, turn: int, signature: int) -> None:
        """Announce that data for `turn` are ready; `signature` identifies the operation.

        Call it once all have finished turn `turn - NUM_SIGNATURES`: [Note: Ring of signatures].
        """
        self._mine[_SIGNATURES + turn % NUM_SIGNATURES] = signature & _MASK
        self._mine[_ARRIVED] = turn

    def finish(self, turn: int) -> None:
        """Announce that this rank has done its share of `turn`."""
        self._mine[_DONE] = turn

    def leave(self) -> None:
        """Announce that this rank takes part in nothing any more."""
        self._mine[_CLOSED] = 1

    def all_arrived(self, turn: int) -> bool:
        """Whether every peer's data for `turn` are ready."""
        return all(words[_ARRIVED] >= turn for _, words in self._others)

    def all_finished(self, turn: int) -> bool:
        """Whether every peer has done its share of `turn`."""
        return all(words[_DONE] >= turn for _, words in self._others)

    def not_arrived(self, turn: int) -> list[int]:
        """Peers whose data for `turn` are not ready."""
        return [peer for peer, words in self._others if words[_ARRIVED] < turn]

    def not_finished(self, turn: int) -> list[int]:
        """Peers that have not done their share of `turn`."""
        return [peer for peer, words in self._others if words[_DONE] < turn]

    def left(self, peers: Sequence[int]) -> list[int]:
        """The ranks among `peers` that have left."""
        return [peer for peer in peers if self._words[peer][_CLOSED]]

    def strangers(self, turn: int, signature: int) -> list[int]:
        """Peers with another operation in `turn`; valid once all have arrived."""
        slot = _SIGNATURES + turn % NUM_SIGNATURES
        return [peer for peer, words in self._others if words[slot] != signature & _MASK]

    def note(self, values: Sequence[int]) -> None:
        """Publish up to 8 numbers for the peers, which may read them after the next `arrive`.

        Two places are used alternately: a peer may still read the last numbers.
        """
        assert len(values) <= _NUM_NOTES
        self._notes = 2 * _NOTES + _NUM_NOTES - self._notes
        for place, value in enumerate(values):
            self._mine[self._notes + place] = value

    def notes(self, count: int) -> list[list[int]]:
        """The first `count` numbers published by every rank."""
        return [[words[self._notes + place] for place in range(count)] for words in self._words]
