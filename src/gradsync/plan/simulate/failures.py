"""The cost of failures: how often to save, and which part of the time is useful work; pure.

M mean time between failures of the whole job (that of a device over their number), d seconds to
save, R seconds to begin again, t seconds of work between two saves. Failures come at any moment,
also while saving and while beginning again, independently of each other (exponential times).

    Young 1974, "A first order approximation to the optimum checkpoint interval":
        t = sqrt(2 d M)
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps":
        t = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d     for d < 2 M, else M
        useful part = t / (M e^(R/M) (e^((t+d)/M) - 1))
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from gradsync.errors import ConfigError

_LLAMA_MTBF_S = 16_384 * 54 * 86_400 / 419
"""Per GPU: 419 unexpected interruptions of 16,384 H100 in 54 days (arXiv 2407.21783, section
3.3.4)."""
_SEGMENTS = 2_000
_HOPELESS = 500.0
"""Interval over time between failures from which on no work gets done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often devices fail and what that costs.

    Raises:
        ConfigError: a time that is not above 0, a restart below 0.
    """

    device_mtbf_s: float = _LLAMA_MTBF_S
    """Mean time between failures of one device, seconds."""
    checkpoint_s: float = 60.0
    """Time of a save, during which training stands still, seconds. An assumption."""
    restart_s: float = 300.0
    """From a failure until training goes on: noticing, starting, loading. An assumption."""

    def __post_init__(self) -> None:
        for name, least in (("device_mtbf_s", 0.0), ("checkpoint_s", 0.0)):
            if not getattr(self, name) > least:
                raise ConfigError(f"failures: {name} must be above 0; got {getattr(self, name)}")
        if not self.restart_s >= 0:
            raise ConfigError(f"failures: restart_s must not be negative; got {self.restart_s}")

    def mtbf_s(self, ranks: int) -> float:
        """Mean time between failures of a job on so many devices, any of which ends it."""
        return self.device_mtbf_s / ranks


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves, first order (Young 1974)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The same, higher order (Daly 2006, equation 37)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2 * mtbf_s)
    series = 1 + math.sqrt(part) / 3 + part / 9
    return young_interval_s(checkpoint_s, mtbf_s) * series - checkpoint_s


def goodput(interval_s: float, failures: Failures, ranks: int) -> float:
    """The useful part of the time, 0 to 1, by closed form (Daly 2006, equation 20).

    Args:
        interval_s: work between two saves.
        failures: what they cost.
        ranks: devices of the job.
    """
    mtbf = failures.mtbf_s(ranks)
    whole = (interval_s + failures.checkpoint_s) / mtbf
    if whole + failures.restart_s / mtbf > _HOPELESS:
        return 0.0
    return interval_s / (mtbf * math.exp(failures.restart_s / mtbf) * math.expm1(whole))


def simulated_goodput(
    interval_s: float,
    failures: Failures,
    ranks: int,
    *,
    seed: int = 0,
    segments: int = _SEGMENTS,
) -> float:
    """The same by playing: work and a save, thrown away and begun again whenever something fails.

    Args:
        interval_s, failures, ranks: as for `goodput`.
        seed: of the failures.
        segments: how many saves to reach; the result is as exact as one over its square root.
    """
    mtbf = failures.mtbf_s(ranks)
    whole = interval_s + failures.checkpoint_s
    if (whole + failures.restart_s) / mtbf > math.log(segments):
        return 0.0  # hardly one segment in so many attempts gets through
    rng = random.Random(seed)
    passed, done = 0.0, 0
    while done < segments:
        until = rng.expovariate(1 / mtbf)
        if until >= whole:
            passed, done = passed + whole, done + 1
            continue
        passed += until
        while (until := rng.expovariate(1 / mtbf)) < failures.restart_s:
            passed += until  # failed again while beginning
        passed += failures.restart_s
    return done * interval_s / passed
