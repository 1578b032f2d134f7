"""Rows as CSV: eight columns that other benchmarks have, then ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from gradsync.bench.sync_plan import Plan
from gradsync.bench.sync_result import Row

COMMON = (
    *("model_size", "d_model", "num_layers", "total_time_ms", "compute_time_ms", "comm_time_ms"),
    *("comm_fraction", "num_comm_ops"),
)
OURS = (
    *("contestant", "keep_memory", "world_size", "batch_size", "context_length", "leaves_per_rank"),
    *("dtype", "total_low_ms", "total_high_ms", "exposed_time_ms", "exposed_fraction"),
    *("ratio_to_none", "ratio_low", "ratio_high", "comm_bytes", "tokens_per_s", "memory_mb"),
)


def csv_text(plan: Plan, rows: Sequence[Row]) -> str:
    """A header and a line for each row; what could not be measured is empty.

    `total_time_ms` is the median, `total_low_ms` and `total_high_ms` are quartiles.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, (*COMMON, *OURS), lineterminator="\n")
    writer.writeheader()
    for entry, row in zip(plan.entries, rows, strict=True):
        writer.writerow(
            {
                "world_size": plan.sets[entry.worker_set].world_size,
                "batch_size": entry.batch_size,
                **_settings(plan),
                **_measured(row),
            }
        )
    return text.getvalue()


def _settings(plan: Plan) -> dict[str, Any]:
    settings = plan.settings
    return {
        "model_size": settings.model_size,
        "d_model": settings.config.n_embd,
        "num_layers": settings.config.n_layer,
        "context_length": settings.tokens,
        "leaves_per_rank": settings.leaves_per_rank,
        "dtype": settings.dtype,
    }


def _measured(row: Row) -> dict[str, Any]:
    memory = row.memory_bytes
    return {
        "total_time_ms": _digits(row.total_ms.median),
        "compute_time_ms": _digits(row.compute_ms),
        "comm_time_ms": _digits(row.comm_ms),
        "comm_fraction": _digits(row.comm_fraction),
        "num_comm_ops": _digits(row.num_comm_ops),
        "contestant": row.contestant,
        "keep_memory": "true" if row.keep_memory else "false",
        "total_low_ms": _digits(row.total_ms.low),
        "total_high_ms": _digits(row.total_ms.high),
        "exposed_time_ms": _digits(row.exposed_ms),
        "exposed_fraction": _digits(row.exposed_fraction),
        "ratio_to_none": _digits(row.ratio.median),
        "ratio_low": _digits(row.ratio.low),
        "ratio_high": _digits(row.ratio.high),
        "comm_bytes": round(row.comm_bytes),
        "tokens_per_s": _digits(row.tokens_per_s),
        "memory_mb": "" if memory is None else round(memory / 2**20),
    }


def _digits(value: float | None) -> str:
    """Five that count, without an exponent where it can be."""
    return "" if value is None else f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
