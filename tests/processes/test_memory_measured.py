"""The memory model against the largest size of ranks that train, at two sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gradsync.bench.memory import MemoryCase, MemoryRun
from gradsync.cli.ranks import WORKER
from gradsync.plan.memory import CPU_PROCESS
from support.fork_server import run_forked, torch_ranks

STRATEGIES = ("ddp", "invariant", "zero1", "zero2", "fsdp")
# A processor without bf16 multiplies it sixty times slower: few tokens, or fp32.
SIZES: tuple[dict[str, Any], ...] = (
    {"shape": "long", "tokens": 256, "dtype": "fp32"},
    {"shape": "wide", "tokens": 8},
)
CASES = [
    *(MemoryCase(strategy=name, **size) for size in SIZES for name in STRATEGIES),
    MemoryCase(strategy="zero1", checkpointing=True, **SIZES[0]),
]


def peak(case: MemoryCase, folder: Path) -> int:
    """Bytes of the larger of two ranks, forked for it from a process that has computed nothing: a
    heap as fresh as after a start, without the seconds that a start takes."""
    run = MemoryRun(case=case, device="cpu", steps=2)
    (folder / "work.json").write_text(json.dumps(asdict(run)))
    for rank in run_forked(["-m", "gradsync", "bench", "memory", WORKER, folder], torch_ranks(2)):
        rank.ok()
    return max(json.loads((folder / "result.json").read_text())["peak_bytes"])


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of a process that trains nothing."""
    return peak(MemoryCase(shape="nothing", strategy="ddp"), tmp_path_factory.mktemp("nothing"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shape}, {case}")
def test_a_rank_takes_what_the_formulas_say(case: MemoryCase, nothing: int, tmp_path: Path) -> None:
    need = case.need(2, "cpu")

    def agrees() -> bool:
        found.append(CPU_PROCESS + peak(case, tmp_path) - nothing)
        return need.total == pytest.approx(found[-1], rel=0.1)

    found: list[float] = []
    # FSDP gathers ahead as its threads happen to run: one run in ten peaks 12 % higher, more on a
    # busy machine. So three of five are to agree; no more are made than that takes.
    tries = 5 if case.strategy == "fsdp" else 1
    agreed = 0
    while len(found) < tries and agreed <= tries // 2:
        agreed += agrees()
    assert agreed > tries // 2, (found, need)
