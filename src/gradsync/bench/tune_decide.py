"""When a candidate takes the place of what was there: the rule, on plain numbers.

[Note: What counts as faster]
Steps are compared within rounds: a candidate's time over that of one copy of the default in the
same round, the two copies in turn. (Their mean would not do: noise that only ever slows down makes
a mean of two larger than the typical one, and the default slower than itself.) A candidate is
faster if

1. the bootstrap's 95 % interval of the median of these ratios lies below 1. A stage has several
   candidates, and the luckiest of k is lucky more often: each gets the level 1 - 0.05/k, so that
   the 95 % hold for the stage;
2. it gains more than the default's two copies differ from each other. They are the same program,
   and differ all the same: where their memory lies stays from round to round.

The percentile interval of n values that all lie on one side of 1 excludes 1 whatever the level; by
chance that happens once in 2**(n-1) times, on either side. So fewer rounds than `fewest_rounds` are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from gradsync.bench.statistics import ratios

_DOUBT = 0.05
"""How often noise may win a stage, on both sides together."""
_RESAMPLES = 4000
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A candidate beside the default; a ratio is its time over the default's."""

    label: str
    ratio: float
    """Median over rounds."""
    low: float
    """The interval's ends."""
    high: float
    faster: bool
    """See [Note: What counts as faster]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a stage came to."""

    winner: str
    """Label of the fastest candidate, or of the default."""
    noise: float
    """By how much the default's second copy differs from the first, as a fraction."""
    judged: tuple[Judged, ...]
    """Every candidate but the default, in order."""
    words: str
    """In one line."""


def decide(
    default: Sequence[float],
    again: Sequence[float],
    candidates: Mapping[str, Sequence[float]],
    *,
    name: str,
) -> Decision:
    """Whom to take.

    Args:
        default: its step time in each round, seconds.
        again: the same of its second copy.
        candidates: the same of each candidate, by label; at least one.
        name: the default's label.

    Raises:
        ValueError: not the same number of rounds.
    """
    copies = [pair[n % 2] for n, pair in enumerate(zip(default, again, strict=True))]
    noise = abs(median(ratios(again, default)) - 1)
    judged = []
    for label, seconds in candidates.items():
        beside = ratios(seconds, copies)
        ratio = median(beside)
        low, high = interval(beside, doubt=_DOUBT / len(candidates))
        faster = high < 1 and ratio < 1 - noise
        judged.append(Judged(label=label, ratio=ratio, low=low, high=high, faster=faster))
    best = min(judged, key=lambda each: (not each.faster, each.ratio))
    return Decision(
        winner=best.label if best.faster else name,
        noise=noise,
        judged=tuple(judged),
        words=_words(best, name, noise),
    )


def interval(values: Sequence[float], *, doubt: float) -> tuple[float, float]:
    """Confidence interval of the median, by the bootstrap over rounds (Efron 1979).

    The same values give the same interval.

    Args:
        values: one per round.
        doubt: 0.05 for 95 %.
    """
    drawn = np.random.default_rng(_SEED)
    places = drawn.integers(0, len(values), (_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[places], axis=1)
    low, high = np.quantile(medians, [doubt / 2, 1 - doubt / 2])
    return float(low), float(high)


def fewest_rounds(candidates: int) -> int:
    """How many rounds it takes; see [Note: What counts as faster]."""
    return 1 + math.ceil(math.log2(candidates / _DOUBT))


def _words(best: Judged, name: str, noise: float) -> str:
    gain, least, most = (100 * (1 - ratio) for ratio in (best.ratio, best.high, best.low))
    between = f"95 % interval {least:.1f} to {most:.1f} %, two copies differ by {100 * noise:.1f} %"
    if best.faster:
        return f"{best.label} takes {gain:.1f} % less time than {name} ({between})"
    if best.ratio >= 1:
        return f"nothing is faster than {name}, which stays"
    return (
        f"no measurable difference: {best.label} takes {gain:.1f} % less time than {name} "
        f"({between}); {name} stays"
    )
