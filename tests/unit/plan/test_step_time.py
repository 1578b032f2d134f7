"""Steps by closed formula, against sums made by hand."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest

from gradsync.commands.models.config import preset
from gradsync.commands.plan.description import Device, Hardware
from gradsync.commands.plan.profile import (
    UPDATE_BYTES,
    UTILISATION,
    estimate_profile,
    leaf_operations,
    scaled_profile,
)
from gradsync.commands.plan.report import console_of, efficiency_table
from gradsync.commands.plan.step_costs import (
    GroupPlace,
    all_reduce_s,
    half_s,
    predict_step,
    simulate,
)
from gradsync.commands.plan.workload import Split, Workload, traffic_of
from gradsync.errors import ConfigError
from gradsync.sync.registry import STRATEGIES
from support.planned_machines import FAR, MODEL, NEAR, hardware, profile, split, work

TOTAL = MODEL.num_params() * 4
SMALL = 64
"""Bytes of the message at a step's end."""


def test_an_estimate_is_arithmetic() -> None:
    device = Device(kind="cuda", name="d", memory_bytes=1, peak_flops=1e9, memory_bytes_per_s=1e6)
    found = estimate_profile(work(1), device)
    leaf_s = MODEL.flops_per_token(8) * 16 / (UTILISATION * 1e9)
    assert found.leaf_s == pytest.approx(leaf_s)
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    assert found.update_s == pytest.approx(UPDATE_BYTES * MODEL.num_params() / 1e6)
    assert estimate_profile(work(1, dtype="fp32"), device).leaf_s == pytest.approx(2 * leaf_s)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_measured_leaf_is_scaled_by_operations(recomputed: bool) -> None:
    """An estimate is proportional to operations: scaling one gives the other."""
    device = Device(kind="cuda", name="d", memory_bytes=1, peak_flops=1e15)
    small = Workload(model=preset("small"), micro_batch_size=1, seq_len=128, num_leaves=8)
    wanted = replace(small, micro_batch_size=4, seq_len=1024, activation_checkpointing=recomputed)
    assert leaf_operations(wanted) > 32 * leaf_operations(small)
    found = scaled_profile(estimate_profile(small, device), small, wanted)
    expected = estimate_profile(wanted, device)
    assert found.forward_s == pytest.approx(expected.forward_s)
    assert found.backward_s == pytest.approx(expected.backward_s)
    assert found.update_s == expected.update_s


def test_one_rank() -> None:
    found = predict_step(work(3), split("invariant"), hardware(1), profile())
    assert found.total_s == pytest.approx(3 * 0.3 + 0.03)
    assert (found.exposed_comm_s, found.bubble_s) == (0, 0)
    assert found.efficiency == pytest.approx(1)
    assert found.tokens_per_s == pytest.approx(48 / 0.93)


def test_buckets_hide_behind_backward() -> None:
    """One bucket, which is ready at backward's end: nothing hides it. Of many, the last."""
    place = GroupPlace(ranks=4, per_host=8, link=NEAR)
    one = all_reduce_s(place, TOTAL, "ring") + all_reduce_s(place, SMALL, "ring")
    found = predict_step(work(4), split("ring", dp=4), hardware(4), profile())
    assert found.exposed_comm_s == pytest.approx(one)
    large = work(4, model=preset("small"), seq_len=8)
    slow = replace(profile(), backward_s=1e6)
    found = predict_step(large, split("ring", dp=4), hardware(4), slow)
    # The embedding's, which is ready last.
    last = all_reduce_s(place, 4 * large.model.vocab_size * large.model.n_embd, "ring")
    assert found.exposed_comm_s == pytest.approx(last, rel=0.1)


def test_sharded_strategies() -> None:
    place = GroupPlace(ranks=4, per_host=8, link=NEAR)
    gather = half_s(place, TOTAL)
    zero2 = predict_step(work(4), split("zero2", dp=4), hardware(4), profile())
    assert zero2.update_s == pytest.approx(0.03 / 4)
    assert zero2.exposed_comm_s == pytest.approx(2 * gather + all_reduce_s(place, SMALL, "best"))
    zero1 = predict_step(work(4), split("zero1", dp=4), hardware(4), profile())
    tree = all_reduce_s(place, TOTAL, "tree") + all_reduce_s(place, SMALL, "tree")
    assert zero1.exposed_comm_s == pytest.approx(tree)
    once, twice = (
        predict_step(work(leaves), split("fsdp", dp=4), hardware(4), profile()).exposed_comm_s
        for leaves in (4, 8)
    )
    # Another leaf gathers each block twice: it waits for the first, and for what computing of 0.1
    # and 0.2 s does not hide.
    blocks = (1 + MODEL.n_layer) * 3 * NEAR.alpha_s + 3 / 4 * TOTAL / NEAR.bytes_per_s
    assert max(0, blocks - 0.1) < twice - once < 2 * blocks


def test_steps_between_meetings() -> None:
    place = GroupPlace(ranks=4, per_host=8, link=NEAR)
    one = all_reduce_s(place, TOTAL) + all_reduce_s(place, SMALL)
    found = predict_step(work(4), split("diloco", dp=4), hardware(4), profile())
    assert found.exposed_comm_s == pytest.approx(one / 100)


def test_a_pipeline_has_a_bubble() -> None:
    """(p - 1) / (m + p - 1) of the time, and messages of B T C bf16 on the longest way."""
    found = predict_step(work(6), split("bucketed", pp=2), hardware(2), profile())
    assert found.compute_s == pytest.approx(6 * 0.3 / 2)
    assert found.bubble_s / (found.bubble_s + found.compute_s) == pytest.approx(1 / 7)
    assert found.exposed_comm_s == pytest.approx(2 * NEAR.seconds(2 * 8 * 8 * 2))
    assert found.update_s == pytest.approx(0.015)
    across = predict_step(work(6), split("bucketed", pp=2), hardware(2, per_host=1), profile())
    assert across.exposed_comm_s == pytest.approx(2 * FAR.seconds(2 * 8 * 8 * 2))


def test_tensor_shards_add_activations_up() -> None:
    found = predict_step(work(3), split("bucketed", tp=2), hardware(2), profile())
    sums = 4 * MODEL.n_layer * all_reduce_s(GroupPlace(ranks=2, per_host=2, link=NEAR), 256)
    assert found.exposed_comm_s == pytest.approx(3 * sums)
    assert found.compute_s == pytest.approx(3 * 0.15)


def test_cores_of_one_host_hide_nothing_and_divide_the_update() -> None:
    """One reduce_scatter, three meetings, a copy, half of the update."""
    (host,) = hardware(2, kind="cpu").hosts
    devices = tuple(replace(each, memory_bytes_per_s=1e6) for each in host.devices)
    cpu = Hardware(hosts=(replace(host, devices=devices),))
    place, copy = GroupPlace(ranks=2, per_host=2, link=NEAR), 2 * TOTAL / 1e6
    found = predict_step(work(2), split("invariant", dp=2), cpu, profile())
    meetings = 3 * all_reduce_s(place, SMALL, "tree")
    assert found.exposed_comm_s == pytest.approx(half_s(place, TOTAL) + meetings + copy)
    assert found.update_s == pytest.approx(0.015)
    whole, small = (all_reduce_s(place, size, "ring") for size in (TOTAL, SMALL))
    for name in ("ddp", "ring"):
        found = predict_step(work(2), split(name, dp=2), cpu, profile())
        assert found.exposed_comm_s == pytest.approx(whole + small + copy)
        assert found.update_s == pytest.approx(0.03)


def test_more_ranks_than_cores_compute_longer() -> None:
    cpu = hardware(4, kind="cpu", cores=2)
    found = predict_step(work(4), split("bucketed", dp=4), cpu, profile())
    assert found.compute_s == pytest.approx(0.6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_its_traffic(strategy: str) -> None:
    assert traffic_of(strategy).bucket_mb == 25
    along_the_tree = strategy in ("invariant", "invariant_bf16", "zero1")
    assert traffic_of(strategy, device="cuda").bucket_mb == (100 if along_the_tree else 25)
    found = predict_step(work(4), split(strategy, dp=4), hardware(4), profile())
    assert math.isfinite(found.total_s)
    assert found.total_s >= found.compute_s > 0
    further = predict_step(work(4), split(strategy, dp=4), hardware(4, per_host=1), profile())
    assert further.total_s > found.total_s


@pytest.mark.parametrize(
    ("leaves", "asked", "ranks", "message"),
    [
        (1, split("rign"), 1, "unknown sync strategy 'rign'"),
        (4, split("ring", dp=4), 2, "4 devices wanted"),
    ],
)
def test_refusals(leaves: int, asked: Split, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict_step(work(leaves), asked, hardware(ranks), profile())


def test_thousands_of_ranks() -> None:
    host = hardware(4).hosts[0]
    splits = [split("ring"), split("hierarchical"), split("diloco"), split("ring", pp=8)]
    hosts = Hardware(hosts=(host,), network=FAR)
    points = simulate(work(1), hosts, [16, 4, 4096], splits, profile())
    found = {(point["name"], point["world_size"]): point for point in points}
    sizes = (4, 16, 4096)
    for name in ("ring", "hierarchical"):
        efficiencies = [found[name, size]["efficiency"] for size in sizes]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert found["diloco", 4096]["efficiency"] > 0.5 > found["ring", 4096]["efficiency"]
    alone = predict_step(work(4), split("ring", dp=4), hardware(4), profile())
    assert found["ring", 4]["step_s"] == alone.total_s
    console_of(stream := io.StringIO()).print(efficiency_table(points))
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["efficiency", "4", "ranks", "16", "ranks", "4096", "ranks"]
    assert [line.split()[0] for line in lines[1:]] == ["ring", "hierarchical", "diloco", "ring"]
    assert len(lines[-1].split()) == 4  # eight stages do not divide 4 ranks
    with pytest.raises(ConfigError, match="2 hosts need a network"):
        simulate(work(1), replace(hosts, network=None), [8], splits, profile())
