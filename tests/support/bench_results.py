"""Results as ranks of a benchmark return them."""

from __future__ import annotations

from typing import Any

GB = 10**9
ENVIRONMENT: dict[str, Any] = {
    **{"cpu": "a [bold] cpu", "cores": 2, "load_at_start": 0.5, "torch": "2", "date": "2026-01-02"},
    **{"world_size": 2, "threads_per_rank": 1, "backend": "gloo", "accelerator": None},
}


def collective(
    algorithm: str, *medians: float, size: int = 1000, operation: str = "all_reduce"
) -> dict[str, Any]:
    """Samples with these medians, round by round."""
    return {
        "operation": operation,
        "algorithm": algorithm,
        "size_bytes": size,
        "count": size // 4,
        "rounds_s": [[median, median, 10 * median] for median in medians],
    }


COLLECTIVES: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "num_nodes": 1,
    "one_memory": True,
    "samples": [
        collective(name, seconds * size, size=size)
        for size in (1000, 4096)
        for name, seconds in (("ring", 2e-9), ("copy", 1e-9))
    ],
    "skipped": ["shared: not here"],
    "wrong": [],
}
"""Two sizes by one algorithm."""
