"""The communicators of a layout: who shares what with whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsync.comm.base import Communicator
from gradsync.comm.groups import new_group
from gradsync.parallel.layout import Coordinates, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitGroups:
    """This rank's groups; members stand in the order of their index."""

    everyone: Communicator
    """All ranks."""
    data: Communicator
    """Ranks that hold the same part of the model, one of each replica."""
    model: Communicator
    """Ranks of one replica: stage by stage, in each shard by shard."""
    stages: Communicator
    """Ranks of one replica with the same shard index, stage by stage."""
    shards: Communicator
    """Ranks of one stage of one replica."""


def split_groups(layout: Layout, place: Coordinates, everyone: Communicator) -> SplitGroups:
    """Make them; every rank calls it at the same point, with its own `place`.

    Groups with equal members are one, a group of one needs no process group.
    """
    known: dict[tuple[int, ...], Communicator | None] = {}

    def mine(key: Callable[[Coordinates], Any]) -> Communicator:
        """The group of the ranks with the same `key` as this one; all ranks make all groups."""
        members: dict[Any, list[int]] = {}
        for rank in range(layout.world_size):
            members.setdefault(key(layout.coordinates(rank)), []).append(rank)
        for ranks in members.values():
            if tuple(ranks) not in known:
                known[tuple(ranks)] = new_group(ranks)
        found = known[tuple(members[key(place)])]
        assert found is not None, "this rank is a member"
        return found

    return SplitGroups(
        everyone=everyone,
        data=mine(lambda at: (at.stage, at.shard)),
        model=mine(lambda at: at.data),
        stages=mine(lambda at: (at.data, at.shard)),
        shards=mine(lambda at: (at.data, at.stage)),
    )
