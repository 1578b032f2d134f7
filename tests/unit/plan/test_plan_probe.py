"""A measured profile: every gradient's moment, and the cache in front of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.commands.plan import probe
from gradsync.commands.plan.collectives import fits_path
from gradsync.commands.plan.machine import DEFAULT_LINK, cpu_link
from gradsync.commands.plan.probe import probe_profile
from gradsync.commands.plan.profile import known_profile, profile_conditions
from gradsync.runtime.machine import choose_threads
from support.planned_machines import MODEL, work

LEAF = work(1, dtype="fp32", kind="cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "keep_freed_memory", lambda: True)  # it could not be taken back
    return tmp_path


def test_a_measured_leaf(cache: Path) -> None:
    found = probe_profile(LEAF, repeats=4)
    assert found.measured
    assert min(found.forward_s, found.backward_s, found.update_s) > 0
    assert sum(bucket.num_bytes for bucket in found.buckets) == 4 * MODEL.num_params()
    times = [bucket.ready_s for bucket in found.buckets]
    assert len(times) == 2 + 9 * MODEL.n_layer
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] <= found.backward_s
    assert found.buckets[-1].num_bytes == 4 * MODEL.vocab_size * MODEL.n_embd  # the embedding


def test_threads_are_those_of_a_rank_and_put_back(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = []

    def pin(count: int) -> int:
        pinned.append(count)
        return 77

    monkeypatch.setattr(probe, "pin_threads", pin)
    monkeypatch.setattr(probe, "choose_threads", lambda ranks: 10 * ranks)
    probe_profile(LEAF, repeats=3, ranks_per_host=3)
    assert pinned == [30, 77]


def test_it_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe_profile(LEAF, repeats=3)
    (kept,) = (cache / "profiles").iterdir()
    monkeypatch.setattr(probe, "_measure", None)
    assert probe_profile(replace(LEAF, num_leaves=7), repeats=3) == first
    with pytest.raises(TypeError):
        probe_profile(replace(LEAF, micro_batch_size=1), repeats=3)
    with pytest.raises(TypeError):
        probe_profile(LEAF, repeats=3, cached=False)
    for damaged in ("", "{}", json.dumps({"forward_s": 1})):
        kept.write_text(damaged)
        with pytest.raises(TypeError):
            probe_profile(LEAF, repeats=3)


def test_a_cache_that_cannot_be_written_does_no_harm(cache: Path) -> None:
    (cache / "profiles").write_text("a file")
    assert probe_profile(LEAF, repeats=3).measured
    assert known_profile(profile_conditions(LEAF, device="cpu", threads=1)) is None


@pytest.mark.parametrize("build", ["", "+cu130"])
def test_saved_lines_of_this_machine(cache: Path, build: str) -> None:
    """The key is that of `bench collectives --save`, also where torch's metadata name no build."""
    from gradsync.commands.bench.experiment import environment
    from gradsync.commands.plan.collectives import save_fits
    from support.planned_machines import line

    assert cpu_link(2) == (DEFAULT_LINK, "")
    here = environment(world_size=2, threads=choose_threads(2))
    here |= {"backend": "gloo", "accelerator": None, "num_nodes": 1, "dtype": "fp32"}
    here["torch"] = here["torch"].partition("+")[0] + build
    save_fits(here, [line("all_reduce", "ring", 1.0, 1e-9)])
    link, trouble = cpu_link(2)
    assert (link.alpha_s, trouble) == (0.5, "")
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.source.startswith("all_reduce (ring) of 2 ranks, measured")
    assert fits_path(here).is_relative_to(cache)
