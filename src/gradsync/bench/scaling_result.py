"""From samples to efficiencies, with an interval and a verdict. No torch here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from gradsync.bench.scaling_plan import ScalingPlan
from gradsync.bench.statistics import Spread, percentile, spread
from gradsync.bench.sync_result import turns

Verdict = Literal["yes", "no", "cannot tell"]

_RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One world size in one mode."""

    mode: str
    world_size: int
    batch_size: int
    """Sequences of a rank and step."""
    step_ms: Spread
    """On the slowest rank, over rounds."""
    tokens_per_s: float
    """Of all ranks."""
    speedup: float
    """In tokens per second, over one rank."""
    efficiency: float
    """Speed-up per rank: 1 is perfect."""
    low: float
    """95 % confidence interval of the efficiency."""
    high: float
    verdict: Verdict
    """Whether the efficiency reaches the threshold; "cannot tell" if that is in the interval."""

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def points_of(
    scaling: ScalingPlan, results: Sequence[Mapping[str, Any]], threshold: float
) -> list[Point]:
    """One point per mode and world size.

    Args:
        scaling: what was measured.
        results: of each world size, what `Runner.run` returned.
        threshold: efficiency to reach.
    """
    found = []
    for mode in scaling.modes:
        baseline = _steps(scaling, results, mode, 1)
        for size in scaling.world_sizes:
            steps = _steps(scaling, results, mode, size)
            # Weak: W times the work in the same time. Strong: the same work in a W-th of the time.
            ranks = 1 if mode == "weak" else size
            rounds = [one / (ranks * many) for one, many in zip(baseline, steps, strict=True)]
            low, high = interval(rounds)
            tokens = size * scaling.batch_of(mode, size) * scaling.plan.settings.tokens
            step_ms = spread([1000 * seconds for seconds in steps])
            found.append(
                Point(
                    mode=mode,
                    world_size=size,
                    batch_size=scaling.batch_of(mode, size),
                    step_ms=step_ms,
                    tokens_per_s=tokens / step_ms.median * 1000,
                    speedup=size * median(rounds),
                    efficiency=median(rounds),
                    low=low,
                    high=high,
                    verdict=judge(low, high, threshold),
                )
            )
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, by the bootstrap over rounds (Efron 1979).

    The same values give the same interval.
    """
    drawn = random.Random(_SEED)
    medians = [median(drawn.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    return percentile(medians, 2.5), percentile(medians, 97.5)


def judge(low: float, high: float, threshold: float) -> Verdict:
    """Where the threshold lies beside the interval."""
    if low >= threshold:
        return "yes"
    return "no" if high < threshold else "cannot tell"


def _steps(
    scaling: ScalingPlan, results: Sequence[Mapping[str, Any]], mode: str, size: int
) -> list[float]:
    entry = scaling.entry(mode, size)
    ranks = results[entry.worker_set]["contestants"][entry.label]
    return turns([rank["step_s"] for rank in ranks])
