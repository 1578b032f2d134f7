"""A measured profile, and the cache in front of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync.commands.plan import choice, profile
from gradsync.commands.plan.choice import Costs
from gradsync.commands.plan.machine import DEFAULT_LINK, cpu_link
from gradsync.commands.plan.profile import probe_profile
from gradsync.runtime.machine import choose_threads
from support.bench_results import COLLECTIVES, collective
from support.planned_machines import hardware, work

LEAF = work(1, dtype="fp32", kind="cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "keep_freed_memory", lambda: True)  # it could not be taken back
    return tmp_path


def test_a_measured_leaf(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the threads of a rank, which are put back."""
    pinned = []

    def pin(count: int) -> int:
        pinned.append(count)
        return 77

    monkeypatch.setattr(profile, "pin_threads", pin)
    monkeypatch.setattr(profile, "choose_threads", lambda ranks: 10 * ranks)
    found = probe_profile(LEAF, 3)
    assert pinned == [30, 77]
    assert min(found.forward_s, found.backward_s, found.update_s) > 0


def test_it_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = hardware(2, kind="cpu")
    monkeypatch.setattr(choice, "room_bytes", lambda *_: 2**40)
    monkeypatch.setattr(choice, "busy", lambda *_: False)

    def measured(leaves: int = 1, size: int = 2) -> object:
        costs = Costs()
        assert costs.measure(work(leaves, dtype="fp32", kind="cpu", micro_batch_size=size), cpu)
        assert costs.measured is not None
        return costs.measured[0]

    first = measured()
    (kept,) = (cache / "profiles").iterdir()
    monkeypatch.setattr(choice, "probe_profile", None)  # nothing more may be measured
    assert measured(leaves=7) == first
    with pytest.raises(TypeError):
        measured(size=1)
    document = json.loads(kept.read_text())
    for damaged in (
        {},
        {"forward_s": 1},
        document | {"forward_s": "x"},
        document | {"conditions": 1},
    ):
        kept.write_text(json.dumps(damaged))
        with pytest.raises(TypeError):
            measured()


def test_a_cache_that_cannot_be_written_does_no_harm(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "profiles").write_text("a file")
    monkeypatch.setattr(choice, "room_bytes", lambda *_: 2**40)
    assert Costs().measure(LEAF, hardware(1, kind="cpu"))


def test_saved_lines_of_this_machine(cache: Path) -> None:
    """The key is that of `bench collectives --save`."""
    from gradsync.commands.bench.collectives import CollectivesOptions, findings_of
    from gradsync.commands.bench.experiment import environment

    assert cpu_link(2) == DEFAULT_LINK
    here = environment(world_size=2, threads=choose_threads(2)) | {"backend": "gloo"}
    samples = [collective("ring", 1 + size * 1e-9, size=size) for size in (4, 10**9)]
    samples += [collective("copy", 1.0, size=size) for size in (4, 10**9)]
    result = COLLECTIVES | {"environment": here, "samples": samples}
    keep = findings_of(CollectivesOptions(), result).keep
    assert keep is not None
    assert str(cache) in keep()
    link = cpu_link(2)
    assert link.alpha_s == pytest.approx(0.5)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.source.startswith("all_reduce (ring) of 2 ranks, measured")
