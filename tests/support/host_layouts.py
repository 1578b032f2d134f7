"""On which host each rank sits, in tests of two levels; the ranks really share one."""

from __future__ import annotations

from gradsync.comm.groups import RankPlacement

LAYOUTS = {
    "one rank a node": [0, 1, 2],
    "one node": [0, 0, 0],
    "2 x 2": [0, 0, 1, 1],
    "2 x 2, dealt round": [0, 1, 0, 1],
    "2 x 3": [0, 0, 0, 1, 1, 1],
    "3 x 2, mixed": [2, 0, 1, 1, 2, 0],
    "4 x 2": [0, 0, 1, 1, 2, 2, 3, 3],
    "3 + 1": [0, 0, 0, 1],
    "1 + 3 + 2": [0, 1, 1, 1, 2, 2],
}
"""Name -> node of each rank."""


def placement(nodes: list[int]) -> RankPlacement:
    return RankPlacement(tuple(nodes))
