"""Whether the same leaf gives the same result again, and on every rank: else nothing can."""

from __future__ import annotations

import math
from typing import Any

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.verify.finding import Cause, Finding, Kind
from gradsync.verify.randomness import kept_randomness
from gradsync.verify.reference import LeafResult, Reference
from gradsync.verify.runner import Task
from gradsync.verify.saved import Saved

_SAME = 1e-6
"""Of a repetition on one rank, relative: the same program on the same machine."""
_ALIKE = 1e-3
"""Between ranks, whose machines may round otherwise."""

Forward = tuple[Cause, Finding]


def check_forward(
    task: Task, comm: Communicator, number: int, saved: Saved | None = None
) -> Forward | None:
    """Run a leaf of step `number` twice on every rank; all ranks call it.

    Returns:
        the same on all ranks: None when the results agree.
    """
    with kept_randomness():
        plain = _twice(task, comm, number, saved, all_generators=False)
        again = plain if _agree(*plain) else _twice(task, comm, number, saved, all_generators=True)
    document = {
        "repeats": _agree(*plain),
        "seeded": _agree(*again),
        "numbers": _numbers(plain[0]),
    }
    return _compare(number, all_gather_json(comm, document))


def _twice(
    task: Task, comm: Communicator, number: int, saved: Saved | None, *, all_generators: bool
) -> tuple[LeafResult, LeafResult]:
    """The leaf with most targets, on a fresh model that keeps whatever it keeps in between."""
    reference = Reference(task, comm.world_size, saved)
    leaf = max(reference.leaves[number], key=lambda leaf: leaf.num_targets)
    buffers = reference.buffers()
    first = reference.leaf_result(leaf, buffers, all_generators=all_generators)
    return first, reference.leaf_result(leaf, buffers, all_generators=all_generators)


def _agree(first: LeafResult, second: LeafResult) -> bool:
    if first.gradient.keys() != second.gradient.keys():
        return False
    size = math.hypot(*(float(g.double().norm()) for g in first.gradient.values()))
    apart = math.hypot(
        *(
            float((g.double() - second.gradient[n].double()).norm())
            for n, g in first.gradient.items()
        )
    )
    same_loss = math.isclose(first.loss_sum, second.loss_sum, rel_tol=_SAME)
    return same_loss and apart <= _SAME * size


def _numbers(result: LeafResult) -> list[float]:
    """What ranks compare: the loss, and the length of every gradient."""
    return [result.loss_sum, *(float(g.double().norm()) for g in result.gradient.values())]


def _alike(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b) or not math.isclose(a[0], b[0], rel_tol=_ALIKE):
        return False
    small = _ALIKE * math.hypot(*a[1:])
    return all(math.isclose(x, y, abs_tol=small) for x, y in zip(a[1:], b[1:], strict=True))


def _compare(number: int, documents: list[dict[str, Any]]) -> Forward | None:
    unsteady = [rank for rank, each in enumerate(documents) if not each["repeats"]]
    if unsteady:
        cause = Cause.RANDOM if all(each["seeded"] for each in documents) else Cause.UNKNOWN
        return cause, _finding(number, unsteady, len(documents), _WHY[cause])
    first = documents[0]["numbers"]
    others = [rank for rank, each in enumerate(documents) if not _alike(first, each["numbers"])]
    if others:
        detail = "the same leaf gives something else on another rank: it depends on the rank"
        return Cause.UNKNOWN, _finding(number, others, len(documents), detail)
    return None


_AGAIN = "the same leaf gives something else when it is run again"
_WHY = {
    Cause.RANDOM: f"{_AGAIN}, unless numpy's or Python's random generator is seeded before it",
    Cause.UNKNOWN: f"{_AGAIN}, with all generators seeded: something is kept between forwards",
}


def _finding(number: int, ranks: list[int], world_size: int, detail: str) -> Finding:
    where = () if len(ranks) == world_size else tuple(ranks)
    return Finding(kind=Kind.FORWARD, step=number, ranks=where, detail=detail)
