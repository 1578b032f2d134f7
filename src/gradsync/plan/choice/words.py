"""Why a candidate was taken, or was not; pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.plan.choice.candidate import Candidate
from gradsync.sync.registry import STRATEGIES

_PROMISE = {
    "bitwise": "one rank's bits on any number of ranks",
    "rounding": "one rank's numbers but for the order of sums",
    "lossy": "lossy",
}
_EQUAL = 0.01
"""Times that differ by less are called equal."""
_FACTOR = 1.95
"""From here on a factor says more than percents."""


def gb(num_bytes: float) -> str:
    """Gigabytes of 10**9 bytes, as data sheets count them."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def percent(share: float) -> str:
    """Whole percents, with one digit below 1 %."""
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def short_words(needed: int, room: int) -> str:
    """The memory that is missing."""
    return f"needs {gb(needed)} of {gb(room)}: {gb(needed - room)} short"


def remark(candidate: Candidate, pick: Candidate, error: float) -> str:
    """Why `candidate` was not taken; empty where it cannot run."""
    if not candidate.runs:
        return ""
    name = str(pick.split)
    ratio = candidate.seconds / pick.seconds
    if ratio >= _FACTOR:
        return f"takes {ratio:.1f} times as long as {name}"
    if ratio > 1 + error:
        return f"slower than {name} by {percent(ratio - 1)}"
    if abs(ratio - 1) < _EQUAL:
        by = "as fast"
    elif ratio > 1:
        by = f"slower by {percent(ratio - 1)}"
    else:
        by = f"faster by {percent(1 - ratio)}, within the model's error"
    return f"{by}; {_lacks(candidate, pick)}"


def _lacks(candidate: Candidate, pick: Candidate) -> str:
    """An advantage of the pick that `candidate` has not."""
    if candidate.promise != pick.promise:
        return f"{candidate.promise} only"
    parts = pick.split.layout.model_ranks
    if candidate.split.layout.model_ranks > parts:
        return "divides the model without need" if parts == 1 else "divides the model further"
    if candidate.work.activation_checkpointing and not pick.work.activation_checkpointing:
        return "recomputes without need"
    return "not as simple"


def pick_words(
    pick: Candidate, rows: Sequence[Candidate], judged: Sequence[Candidate], error: float
) -> str:
    """Why `pick` was taken: what forbids simpler ones, and who is next.

    Args:
        pick: one of `rows`.
        rows: the best of each split.
        judged: all of them.
        error: times that differ by less count as equal.
    """
    fitting = [each for each in rows if each.runs and each.split != pick.split]
    rival = min(fitting, key=lambda each: each.seconds, default=None)
    parts = [*_forced(pick, judged), _beside(pick, rival, error)]
    if rival is None or rival.promise != "bitwise":
        parts += _no_bits(pick, judged)
    if pick.split.world_size > 1:
        parts.append(f"it gives {_PROMISE[pick.promise]}")
    return "; ".join(parts)


def _forced(pick: Candidate, judged: Sequence[Candidate]) -> list[str]:
    """Why a replica per device with everything kept, and the usual micro-batch (which is the first
    to be judged), were not possible, where they were not."""
    plain = [
        each
        for each in judged
        if each.split.layout.model_ranks == 1
        and each.split.world_size == pick.split.world_size
        and each.memory is not None
        and STRATEGIES[each.split.strategy].recipe is not None
    ]
    parts = []
    if pick.split.layout.model_ranks > 1 and plain and all(each.obstacle for each in plain):
        least = min(plain, key=lambda each: each.short_bytes)
        parts.append(f"no replica fits on one device (at best {least.obstacle})")
    own = [each for each in judged if each.split == pick.split]
    if pick.work.activation_checkpointing:
        kept = [each for each in own if not each.work.activation_checkpointing]
        if kept and all(each.obstacle for each in kept):
            parts.append("activations must be recomputed to fit")
    usual = next((each for each in own if _recomputes_like(each, pick)), pick)
    size, wanted = pick.work.micro_batch_size, usual.work.micro_batch_size
    if size != wanted and usual.obstacle:
        parts.append(f"micro-batch {size}, as with {wanted} a rank {usual.obstacle}")
    return parts


def _recomputes_like(each: Candidate, pick: Candidate) -> bool:
    return each.work.activation_checkpointing == pick.work.activation_checkpointing


def _no_bits(pick: Candidate, judged: Sequence[Candidate]) -> list[str]:
    """Why no candidate with one rank's bits was taken."""
    bitwise = [
        each
        for each in judged
        if each.promise == "bitwise"
        and each.split.world_size == pick.split.world_size
        and each.memory is not None
    ]
    if pick.promise == "bitwise" or not bitwise:
        return []
    fitting = [each for each in bitwise if each.runs]
    if fitting:
        best = min(fitting, key=lambda each: each.seconds)
        ratio = best.seconds / pick.seconds
        longer = (
            f"{ratio:.1f} times as long" if ratio >= _FACTOR else f"{percent(ratio - 1)} longer"
        )
        return [f"{best.split}, with one rank's bits, takes {longer}"]
    least = min(bitwise, key=lambda each: each.short_bytes)
    return [f"{least.split}, with one rank's bits, at best {least.obstacle}"]


def _beside(pick: Candidate, rival: Candidate | None, error: float) -> str:
    """How it stands to the fastest of the others."""
    if rival is None:
        return "the only one that fits"
    ratio = rival.seconds / pick.seconds
    if ratio > 1 + error:
        return f"the fastest by {percent(1 - 1 / ratio)} (next: {rival.split})"
    if ratio > 1 - _EQUAL:
        return f"nothing is faster (next: {rival.split})"
    return (
        f"{rival.split} is predicted to take {percent(1 - ratio)} less, within the model's "
        f"error of {error:.0%}"
    )
