"""`bench simulation`: what it measures, and what it makes of samples; no ranks here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gradsync.bench.plan import SyncSettings
from gradsync.bench.scaling import parse_world_sizes
from gradsync.bench.simulation import (
    EXPERIMENT,
    Prediction,
    SimulationPlan,
    collectives_settings,
    fits_from,
    predictions_of,
    print_report,
    simulation_plan,
)
from gradsync.cli.experiment import run_experiment
from gradsync.errors import ConfigError
from support.planned_machines import line

STRATEGIES = "invariant,torch_ddp"
FITS = [
    line("reduce_scatter", "shared", 0.004),
    line("all_reduce", "shared", 0.001),
    line("all_reduce", "backend", 0.010),
    line("copy", "copy", 0.002),
]
MACHINE = {"cpu": "c", "cores": 2, "load_at_start": 0.1, "torch": "2", "date": "2026-01-02"}
ENVIRONMENT = {**MACHINE, "threads_per_rank": 1, "backend": "gloo", "accelerator": None}


def planned(rounds: int = 3, **changes: Any) -> SimulationPlan:
    about = {"strategies": STRATEGIES, "sizes": (1, 2, 4), "batch_size": 1} | changes
    settings = SyncSettings(model_size="tiny", num_steps=2, rounds=rounds, device="cpu")
    return simulation_plan(settings, **about)


def result(simulation: SimulationPlan, size: int, seconds: dict[str, tuple[float, float]]) -> Any:
    """Every step of every rank takes (compute, whole), by strategy."""
    rounds, suffix = range(simulation.plan.settings.rounds), f", {size} rank{'s' * (size > 1)}"
    return {
        "environment": ENVIRONMENT,
        "contestants": {
            name + suffix: [
                {"compute_s": [[c, c] for _ in rounds], "step_s": [[s, s] for _ in rounds]}
                for _ in range(size)
            ]
            for name, (c, s) in seconds.items()
        },
    }


def samples(simulation: SimulationPlan) -> list[Any]:
    return [
        result(simulation, 1, {"none": (0.1, 0.12), "invariant": (0.101, 0.125)}),
        result(
            simulation,
            2,
            {"none": (0.2, 0.24), "invariant": (0.2, 0.237), "torch_ddp": (0.2, 0.3)},
        ),
        result(
            simulation,
            4,
            {"none": (0.4, 0.48), "invariant": (0.4, 0.447), "torch_ddp": (0.4, 0.6)},
        ),
    ]


def test_everything_takes_turns() -> None:
    simulation = planned()
    labels = [(entry.label, entry.worker_set) for entry in simulation.plan.entries]
    assert labels == [
        *(("none, 1 rank", 0), ("invariant, 1 rank", 0)),
        *(("none, 2 ranks", 1), ("invariant, 2 ranks", 1), ("torch_ddp, 2 ranks", 1)),
        *(("none, 4 ranks", 2), ("invariant, 4 ranks", 2), ("torch_ddp, 4 ranks", 2)),
    ]
    assert all(entry.contestant.keep_memory for entry in simulation.plan.entries)
    assert parse_world_sizes("4, 2") == simulation.plan.world_sizes == (1, 2, 4)
    gradients = simulation.plan.settings.config.num_params() * 4
    collectives = collectives_settings(simulation, 0.2)
    assert collectives.algorithms == ("backend", "shared", "shared_copies")
    assert collectives.sizes == (2**14, 2**17, 2**20, gradients)


def test_own_algorithms_are_measured_where_they_are_used() -> None:
    settings = collectives_settings(planned(strategies="ring,bucketed"), 0.2)
    assert settings.algorithms == ("backend", "shared", "shared_copies", "ring")


def test_predictions_by_hand() -> None:
    """Two ranks of `invariant`: 0.2 of leaf, half of 0.04 of update, what it costs alone (0.005)
    twice as slowly, a reduce_scatter and three meetings. Jitter there is none."""
    simulation = planned()
    found = predictions_of(simulation, samples(simulation), {2: FITS, 4: FITS}, cores=2)
    by_name = {(each.strategy, each.world_size): each for each in found}
    assert list(by_name) == [
        *(("invariant", 2), ("torch_ddp", 2), ("invariant", 4), ("torch_ddp", 4)),
    ]
    two = by_name["invariant", 2]
    assert two.predicted_ms.median == pytest.approx(200 + 20 + 10 + 4 + 3)
    assert two.measured_ms.median == pytest.approx(237)
    assert two.error.median == pytest.approx(0, abs=1e-9)
    assert two.within
    assert (two.compute_ms, two.update_ms) == pytest.approx((200, 20))
    assert two.communication_ms == pytest.approx(17)
    # From one rank: 100 of leaf, half of 20, 5, and the same collectives.
    assert two.error_from_one == pytest.approx(122 / 237 - 1)
    ddp = by_name["torch_ddp", 2]  # 7.3 MB: two buckets, two copies
    assert ddp.predicted_ms.median == pytest.approx(240 + 2 * 10 + 2 * 2)
    four = by_name["invariant", 4]
    assert four.predicted_ms.median == pytest.approx(400 + 20 + 20 + 4 + 3)
    assert four.error_from_one == pytest.approx((200 + 10 + 10 + 4 + 3) / 447 - 1)


def test_a_prediction_does_not_see_what_it_predicts() -> None:
    simulation = planned()
    measured = samples(simulation)
    before = predictions_of(simulation, measured, {2: FITS, 4: FITS}, cores=2)
    for size in (2, 4):
        for rank in measured[size // 2]["contestants"][f"invariant, {size} ranks"]:
            rank["step_s"] = [[9.0, 9.0] for _ in rank["step_s"]]
            rank["compute_s"] = [[9.0, 9.0] for _ in rank["compute_s"]]
    after = predictions_of(simulation, measured, {2: FITS, 4: FITS}, cores=2)
    assert [p.predicted_ms for p in before] == [p.predicted_ms for p in after]
    assert not after[0].within


def test_the_slowest_rank_counts_only_where_each_has_a_core() -> None:
    simulation = planned(strategies="invariant")
    measured = samples(simulation)
    for size in (2, 4):
        for rank in measured[size // 2]["contestants"][f"none, {size} ranks"]:
            base = 0.1 * size
            rank["compute_s"] = [[0.5 * base, 1.5 * base] for _ in rank["compute_s"]]
    two, four = predictions_of(simulation, measured, {2: FITS, 4: FITS}, cores=2)
    # The greater of two draws from (0.5, 1.5) is 1.25 in the mean.
    assert two.predicted_ms.median == pytest.approx(37 + 200 * 1.25, rel=0.05)
    assert four.predicted_ms.median == pytest.approx(447)


def test_the_copy_has_a_line_too() -> None:
    def sample(algorithm: str, size: int, seconds: float) -> dict[str, Any]:
        about = {"operation": "all_reduce", "algorithm": algorithm, "size_bytes": size}
        return {**about, "count": size // 4, "rounds_s": [[seconds, seconds]]}

    entries = [
        sample(name, size, cost + rate * size)
        for size in (1000, 100_000)
        for name, cost, rate in (("backend", 1e-3, 1e-9), ("copy", 1e-6, 1e-10))
    ]
    document = {"environment": {"world_size": 2}, "samples": entries}
    reduce, copy = fits_from(document)
    assert (reduce.operation, reduce.algorithm) == ("all_reduce", "backend")
    assert (copy.operation, copy.algorithm) == ("copy", "copy")
    assert (copy.alpha_s, copy.beta_s_per_byte) == pytest.approx((1e-6, 1e-10))


def test_for_readers() -> None:
    simulation = planned()
    found = predictions_of(simulation, samples(simulation), {2: FITS, 4: FITS}, cores=2)
    stream = io.StringIO()
    print_report(simulation, found, ENVIRONMENT, stream)
    text = stream.getvalue()
    assert "237.0 (237.0-237.0)" in text
    assert "+0.0% (+0.0% to +0.0%)" in text
    document = json.loads(json.dumps([each.as_json() for each in found], allow_nan=False))
    assert document[0]["within_limit"] is True
    assert set(document[0]) == {*Prediction.__dataclass_fields__, "within_limit"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "accelerate"], "nobody predicts accelerate"),
        (["--strategies", "torch_ddp:backend=shm"], "predicted without options only"),
        (["--strategies", "none"], "name at least one to predict"),
        (["--strategies", "invarant"], "perhaps you meant 'invariant'"),
        (["--world-sizes", "1"], "name a number above 1"),
        (["--model-size", "huge"], "unknown model preset 'huge'"),
        (["--batch-size", "3", "--leaves-per-rank", "2"], "does not divide into 2 leaves"),
        (["--leaves-per-rank", "0"], "--leaves-per-rank must be at least 1"),
        (["--seconds-per-point", "-1"], "--seconds-per-point -1.0: must be"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--out", "/dev/null/x"], "is no folder"),
    ],
)
def test_refusals(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_experiment(EXPERIMENT, words)
    assert said in str(caught.value)


def test_a_dry_run_says_what_would_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--world-sizes", "2", "--strategies", "bucketed"]
    assert run_experiment(EXPERIMENT, words) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["contestant"]["label"] for entry in document["entries"]] == [
        *("none, 1 rank", "bucketed, 1 rank", "none, 2 ranks", "bucketed, 2 ranks"),
    ]
    assert not list(Path().glob("record.json"))
