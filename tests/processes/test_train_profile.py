"""`gradsync train --profile`: a trace of each rank, and the same weights as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradsync.commands.report.charts import read_spans
from gradsync.commands.train.config import SyncConfig
from support.small_run import make_data, small_config, train_rank


def test_each_rank_writes_a_trace_in_which_buckets_have_names(pool: Any, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    hashes = []
    for name, step, late in (("0", 0, True), ("2", 2, True), ("at once", 3, "auto")):
        out, by_messages = tmp_path / name, SyncConfig(collective="backend", overlap_publish=late)
        config = small_config(out, data, profile=step, sync_options=by_messages, steps=4)
        first, second = pool.run(train_rank, 2, config)
        assert (first.exit_code, second.exit_code) == (0, 0), first.error
        hashes.append(first.summary["weights_sha256"])
    assert len(set(hashes)) == 1
    files = sorted(path.name for path in (tmp_path / "2/profile_trace/iteration_2").iterdir())
    assert files == ["rank0_trace.json", "rank1_trace.json"]
    assert not (tmp_path / "0" / "profile_trace").exists()
    spans = read_spans(tmp_path / "2")
    kinds = {rank: {span.kind for span in spans if span.rank == rank} for rank in (0, 1)}
    assert kinds[0] == kinds[1] == {"forward", "backward", "step", "in", "out", "update"}
    spans = read_spans(tmp_path / "at once")
    assert {span.kind for span in spans} == {"forward", "backward", "step", "sum"}
    last = max(span.end for span in spans if span.kind == "step")
    assert all(span.begin < last for span in spans), "what comes after the last step is none"


def test_ranks_that_share_memory_show_what_they_do_in_it(pool: Any, tmp_path: Path) -> None:
    shared, data = SyncConfig(collective="shared_memory"), make_data(tmp_path / "data")
    config = small_config(tmp_path / "run", data, profile=2, sync_options=shared, steps=4)
    assert [each.error for each in pool.run(train_rank, 2, config)] == ["", ""]
    spans = read_spans(tmp_path / "run")
    for rank in (0, 1):
        mine = sorted((s for s in spans if s.rank == rank), key=lambda s: s.begin)
        step, *parts = (
            next(s for s in mine if s.kind == kind) for kind in ("step", "sum", "update", "out")
        )
        times = [step.begin, *(time for part in parts for time in part[-2:]), step.end]
        assert times == sorted(times), "one after the other, in the step"
