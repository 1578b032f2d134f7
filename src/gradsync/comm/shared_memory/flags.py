"""One page per rank that all ranks see: how far it has come, and a few numbers.

[Note: Order of writes] A rank writes data, then its flag; a peer reads the flag, then data. No lock
and no fence stands between, because x86-64 shows one core's writes to others in their order, and
reads are not reordered among themselves. Other processors may do both: there `share_memory` refuses
(`unavailable.py`). A flag is an aligned 8-byte word, written by one rank only.

[Note: Ring of signatures] What a rank does in turn n stands in slot n % NUM_SIGNATURES of its page,
until it arrives at turn n + NUM_SIGNATURES. Peers read the slot before they finish turn n; so who
arrives only once all have finished the turn that is NUM_SIGNATURES earlier overwrites nothing that
is still to be read, and every turn is compared, however far ahead a rank submits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

PAGE_BYTES = 4096

# In words of 8 bytes; what different ranks poll lies on cache lines of its own (8 words).
_ARRIVED, _DONE, _CLOSED = 0, 8, 16
_NOTES, _NUM_NOTES = 24, 8  # twice
_SIGNATURES = 40
NUM_SIGNATURES = 256
"""Turns that a rank may have arrived at while a peer has not finished the first of them."""

_MASK = (1 << 63) - 1


class Flags:
    """The pages of all ranks.

    Args:
        rank: this one; it writes only into its own page.
        pages: of each rank, uint8 [PAGE_BYTES].
    """

    def __init__(self, rank: int, pages: Sequence[Tensor]) -> None:
        self._words = [page.numpy().data.cast("B").cast("q") for page in pages]
        self._mine = self._words[rank]
        self._notes = _NOTES
        self._others = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]

    def arrive(self, turn: int, signature: int) -> None:
        """This rank's data for `turn` are ready; `signature` says what it is about to do.

        All have finished turn `turn - NUM_SIGNATURES`: see [Note: Ring of signatures].
        """
        self._mine[_SIGNATURES + turn % NUM_SIGNATURES] = signature & _MASK
        self._mine[_ARRIVED] = turn

    def finish(self, turn: int) -> None:
        """This rank has done its share of `turn`."""
        self._mine[_DONE] = turn

    def leave(self) -> None:
        """This rank takes part in nothing any more."""
        self._mine[_CLOSED] = 1

    def all_arrived(self, turn: int) -> bool:
        """Whether every peer's data for `turn` are ready."""
        return all(words[_ARRIVED] >= turn for _, words in self._others)

    def all_finished(self, turn: int) -> bool:
        """Whether every peer has done its share of `turn`."""
        return all(words[_DONE] >= turn for _, words in self._others)

    def not_arrived(self, turn: int) -> list[int]:
        """Peers that have not."""
        return [peer for peer, words in self._others if words[_ARRIVED] < turn]

    def not_finished(self, turn: int) -> list[int]:
        """Peers that have not."""
        return [peer for peer, words in self._others if words[_DONE] < turn]

    def left(self, peers: Sequence[int]) -> list[int]:
        """Those of `peers` that have left."""
        return [peer for peer in peers if self._words[peer][_CLOSED]]

    def strangers(self, turn: int, signature: int) -> list[int]:
        """Peers that are about to do something else in `turn`; ask when all have arrived."""
        slot = _SIGNATURES + turn % NUM_SIGNATURES
        return [peer for peer, words in self._others if words[slot] != signature & _MASK]

    def note(self, values: Sequence[int]) -> None:
        """Leave up to 8 numbers for the peers; they may read them after the next `arrive`.

        In two places in turn: a peer may still read the last ones.
        """
        assert len(values) <= _NUM_NOTES
        self._notes = 2 * _NOTES + _NUM_NOTES - self._notes
        for place, value in enumerate(values):
            self._mine[self._notes + place] = value

    def notes(self, count: int) -> list[list[int]]:
        """The first `count` numbers of every rank."""
        return [[words[self._notes + place] for place in range(count)] for words in self._words]
