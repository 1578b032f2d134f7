"""The cost of an operation as two numbers: `seconds = alpha + beta * bytes`; no torch.

Alpha is what even an empty message costs, 1 / beta the bandwidth that long ones approach (Hockney
1994, "The communication challenge for MPP"). Times span five decades, so errors are relative, and
half the time is as wrong as twice: with p the predicted and t the measured time, an error is

    e = (p - t) / sqrt(p t)                       which for small ones is p / t - 1

The line is that of least squares under weights that are made anew from the last line's errors,
until it stays: Huber's (1964, "Robust estimation of a location parameter"), so that a few sizes
that fit no line, where a cache ends, say, or which something else on the machine disturbed, do not
bend it much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradsync.core.files import cache_entry, read_entry, write_entry
from gradsync.runtime import environ

_ITERATIONS = 200
_SMALL_ERROR = 0.1
"""Up to here errors count squared, beyond that in proportion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The line through one algorithm's times."""

    operation: str
    """Such as all_reduce."""
    algorithm: str
    """Such as ring."""
    alpha_s: float
    """Seconds; at least 0."""
    beta_s_per_byte: float
    """Seconds per byte of the whole tensor (see `bench.collectives`); at least 0."""
    residual: float
    """Median of |predicted / measured - 1|: 0.1 means that half of the sizes lie within 10 %."""
    worst: float
    """Largest factor between predicted and measured, whichever is more; at least 1."""
    num_sizes: int
    """How many sizes it goes through."""

    def seconds(self, num_bytes: float) -> float:
        """Predicted time for a tensor of `num_bytes`."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of its fields."""
        return asdict(self)


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Alpha (seconds) and beta (seconds per byte) of the line through some times.

    Args:
        sizes: bytes; at least two different ones.
        times: seconds, each above 0, one per size.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not above 0.
    """
    if len(set(sizes)) < 2 or min(times) <= 0:
        raise ValueError(f"no line through sizes {list(sizes)} and times {list(times)}")
    # Rows are divided by the time, so that the right side is 1.
    rows = [(1 / time, size / time) for size, time in zip(sizes, times, strict=True)]
    ratios = [1.0] * len(rows)  # predicted / measured
    alpha = beta = 0.0
    for _ in range(_ITERATIONS):
        alpha, beta = _least_squares(rows, [_weight(ratio) for ratio in ratios])
        # The mean of old and new: the plain new ones can swing between two lines for ever.
        ratios = [
            (ratio + alpha * x + beta * y) / 2 for ratio, (x, y) in zip(ratios, rows, strict=True)
        ]
    return alpha, beta


def quality(
    alpha_s: float, beta_s_per_byte: float, sizes: Sequence[float], times: Sequence[float]
) -> tuple[float, float]:
    """`Fit.residual` and `Fit.worst` of a line."""
    found = [
        (alpha_s + beta_s_per_byte * size) / time for size, time in zip(sizes, times, strict=True)
    ]
    residual = median(abs(ratio - 1) for ratio in found)
    return residual, max(max(ratio, 1 / ratio) for ratio in found)


def _weight(ratio: float) -> float:
    """Weight of (ratio - 1)**2, so that it counts as e**2, and a large one as |e|."""
    error = abs(ratio - 1) / ratio**0.5
    return min(1.0, _SMALL_ERROR / max(error, _SMALL_ERROR)) / ratio


def _least_squares(
    rows: Sequence[tuple[float, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Alpha and beta, both at least 0, with the least weighted sum of squared relative errors."""
    weighted = list(zip(rows, weights, strict=True))
    xx = sum(w * x * x for (x, _), w in weighted)
    xy = sum(w * x * y for (x, y), w in weighted)
    yy = sum(w * y * y for (_, y), w in weighted)
    x1 = sum(w * x for (x, _), w in weighted)
    y1 = sum(w * y for (_, y), w in weighted)
    determinant = xx * yy - xy * xy
    alpha = (x1 * yy - y1 * xy) / determinant
    beta = (y1 * xx - x1 * xy) / determinant
    # One of them below 0: the best allowed line lies on that border.
    if alpha < 0:
        return 0.0, y1 / yy
    if beta < 0:
        return x1 / xx, 0.0
    return alpha, beta


_KEY = (
    *("cpu", "cores", "accelerator", "backend", "world_size", "threads_per_rank", "torch"),
    *("num_nodes", "dtype"),
)
"""The parts of the environment and the benchmark's settings that a cost depends on."""


def fits_path(environment: Mapping[str, Any]) -> Path:
    """Where the fits of this machine are kept.

    Args:
        environment: of `environment.environment`, and `num_nodes` and `dtype`.
    """
    key = json.dumps({name: environment[name] for name in _KEY})
    return cache_entry(environ.cache_dir() / "alpha-beta", key)


def save_fits(environment: Mapping[str, Any], fits: Sequence[Fit]) -> Path:
    """Keep `fits`; those of operations and algorithms that were not measured now stay as they are.

    Raises:
        RunError: the cache cannot be written.
    """
    known = {(fit.operation, fit.algorithm): fit for fit in [*load_fits(environment), *fits]}
    document = {
        "environment": {name: environment[name] for name in ("date", *_KEY)},
        "fits": [fit.to_json() for fit in known.values()],
    }
    return write_entry(fits_path(environment), document)


def load_fits(environment: Mapping[str, Any]) -> list[Fit]:
    """The lines that `save_fits` kept for such an environment; none when it never ran."""
    found = read_entry(fits_path(environment), lambda value: [Fit(**fit) for fit in value["fits"]])
    return found or []
