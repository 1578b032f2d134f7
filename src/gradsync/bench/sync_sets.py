"""Several sets of ranks out of one start, and the baton that they pass on.

One launcher starts all ranks and watches them: a signal or a failure ends every one. Ranks
0..N-1 become the first set, the next ones the second, each with the environment that a launcher of
that set alone would have given it. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

_PATIENCE = timedelta(days=7)
"""Longest sleep: the other sets work as long as they need. A dead one ends all by the launcher."""
_FIRST_GENERATION = 1000
_DONE = "done"


def my_set(env: Mapping[str, str], sizes: Sequence[int]) -> tuple[int, dict[str, str]]:
    """Which set this rank is in, and the variables that say so.

    Args:
        env: as the launcher of all ranks made it (torchrun's variables).
        sizes: numbers of ranks, set by set.
    """
    rank = int(env["RANK"])
    index = 0
    while rank >= sizes[index]:
        rank -= sizes[index]
        index += 1
    size = str(sizes[index])
    return index, {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        # The rendezvous store is one for all: keys begin with the restart count.
        "TORCHELASTIC_RESTART_COUNT": str(_FIRST_GENERATION + index),
    }


class Baton:
    """Lets one set work at a time; the others sleep in a read from a socket.

    Args:
        store: a `torch.distributed.Store` that all sets share; None when there is one set.
        mine: this rank's set.
        owners: for each piece of work, in order, the set that does it.
    """

    def __init__(self, store: Any, mine: int, owners: Sequence[int]) -> None:
        self._store = store
        self._mine = mine
        self._owners = owners

    def take(self, place: int) -> bool:
        """Wait until the work at `place`, this set's, may begin; False: another set gave up."""
        if self._store is None or place == 0 or self._owners[place - 1] == self._mine:
            return True
        key = _key(place - 1)
        self._store.wait([key], _PATIENCE)
        return self._store.get(key) == _DONE.encode()

    def hand_on(self, place: int) -> None:
        """The work at `place` is done; one rank says so, once all of its set have come so far."""
        more = place + 1 < len(self._owners)
        if self._store is not None and more and self._owners[place + 1] != self._mine:
            self._store.set(_key(place), _DONE)

    def give_up(self, place: int) -> None:
        """Nothing shall follow, from `place` on; one rank says so, to whoever waits."""
        if self._store is None:
            return
        for later in range(place, len(self._owners)):
            if self._owners[later] == self._mine:
                self._store.set(_key(later), "gave up")


def _key(place: int) -> str:
    return f"bench/turn/{place}"
