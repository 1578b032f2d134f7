"""Which split is taken, and in which words the others are turned down; costs are made up here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gradsync.models.presets import preset
from gradsync.parallel.layout import Layout
from gradsync.plan.choice import (
    ERROR,
    Candidate,
    Choice,
    Search,
    choose,
    counts,
    obstacle,
    percent,
    remedy,
    room_bytes,
    splits,
)
from gradsync.plan.description import Device, Hardware, Host, Link
from gradsync.plan.memory import MemoryNeed
from gradsync.plan.placement import MARGIN, gb
from gradsync.plan.profile import BucketReady, StepProfile
from gradsync.plan.report import commands
from gradsync.plan.step import StepTime
from gradsync.plan.workload import Split, Workload

GB = 10**9
LINK = Link(name="fast", alpha_s=1e-6, bytes_per_s=1e11)
STRATEGIES = ("invariant", "bucketed", "zero1", "zero2", "fsdp")
WORK = Workload(model=preset("small"), micro_batch_size=4, seq_len=1024, num_leaves=16)


def gpus(count: int, *, memory_gb: float = 80, hosts: int = 1) -> Hardware:
    device = Device(kind="cuda", name="GPU", memory_bytes=int(memory_gb * GB), peak_flops=1e15)
    host = Host(devices=(device,) * count, link=LINK, cores=32, memory_bytes=10**12)
    return Hardware(hosts=(host,) * hosts, network=LINK if hosts > 1 else None)


def cpus(ranks: int, *, memory_gb: float = 8) -> Hardware:
    device = Device(kind="cpu", name="CPU", memory_bytes=int(memory_gb * GB), peak_flops=1e11)
    host = Host(devices=(device,) * ranks, link=LINK, cores=ranks, memory_bytes=10**12)
    return Hardware(hosts=(host,))


def need(**parts: float) -> MemoryNeed:
    """GB by part; the others are nothing."""
    none = dict.fromkeys(MemoryNeed.__dataclass_fields__, 0)
    return MemoryNeed(**none | {name: int(size * GB) for name, size in parts.items()})


def memory(state_gb: float = 20, activations_gb: float = 5):
    """State that fsdp, stages and shards divide; activations of a leaf, a fifth if recomputed."""

    def of(work: Workload, split: Split) -> MemoryNeed:
        ways = split.layout.dp if split.strategy == "fsdp" else 1
        kept = activations_gb * work.micro_batch_size / 4 / split.layout.model_ranks
        return need(
            weights=state_gb / split.layout.model_ranks / ways,
            activations=kept / 5 if work.activation_checkpointing else kept,
        )

    return of


def models(
    factor: Mapping[str, float] | None = None,
    *,
    state_gb: float = 20,
    activations_gb: float = 5,
    exposed_s: float = 0.0,
) -> Any:
    """A second per sequence and rank; a strategy takes `factor` times as long, stages and shards a
    quarter longer each; any communication takes `exposed_s`."""

    def profile(work: Workload, device: Device) -> StepProfile:
        seconds = work.micro_batch_size * 1e15 / device.peak_flops
        seconds *= 4 / 3 if work.activation_checkpointing else 1
        return StepProfile(
            forward_s=seconds / 3,
            backward_s=seconds * 2 / 3,
            update_s=0.0,
            buckets=(BucketReady(num_bytes=1, ready_s=0.0),),
        )

    def step(work: Workload, split: Split, _: Hardware, costs: StepProfile) -> StepTime:
        layout = split.layout
        longer = 1.25 ** (layout.pp > 1) * 1.25 ** (layout.tp > 1)
        own = -(-work.num_leaves // layout.dp) * costs.leaf_s / layout.model_ranks
        strategy = (factor or {}).get(split.strategy, 1.0) if layout.dp > 1 else 1.0
        total = own * longer * strategy + exposed_s * (split.world_size > 1)
        return step_time(work, split, total)

    return SimpleNamespace(memory=memory(state_gb, activations_gb), profile=profile, step=step)


def step_time(work: Workload, split: Split, seconds: float) -> StepTime:
    alone = work.num_leaves * work.micro_batch_size
    return StepTime(
        compute_s=seconds,
        exposed_comm_s=0.0,
        bubble_s=0.0,
        update_s=0.0,
        comm_s=0.0,
        tokens_per_s=work.step_tokens / seconds,
        efficiency=alone / split.world_size / seconds,
    )


def chosen(hardware: Hardware, costs: Any, work: Workload = WORK, **search) -> Choice:
    given = {"strategies": STRATEGIES, "micro_batch_sizes": (4, 1, 2, 8)} | search
    return choose(work, hardware, costs, Search(**given))


def taken(choice: Choice) -> Candidate:
    assert choice.pick is not None
    assert choice.pick in choice.candidates
    return choice.pick


def row(choice: Choice, text: str) -> Candidate:
    return next(each for each in choice.rows() if str(each.split) == text)


def test_one_device() -> None:
    pick = taken(chosen(gpus(1), models()))
    assert str(pick.split) == "invariant"
    assert (pick.work.micro_batch_size, pick.work.num_leaves) == (4, 16)
    assert pick.seconds == pytest.approx(64)
    assert pick.remark == "nothing is faster (next: bucketed)"
    alone = taken(chosen(gpus(1), models(), strategies=("invariant",)))
    assert alone.remark == "the only one that fits"


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_replicas_where_they_fit(count: int) -> None:
    choice = chosen(gpus(count), models())
    pick = taken(choice)
    assert str(pick.split) == f"invariant dp={count}"
    assert pick.work.micro_batch_size == 4
    assert "one rank's bits on any number of ranks" in pick.remark
    assert choice.rows()[0] is pick


def test_uneven_shares_cost_what_the_largest_costs() -> None:
    """16 leaves on 3 ranks: 6, 5 and 5."""
    pick = taken(chosen(gpus(3), models(), micro_batch_sizes=(4,)))
    assert pick.seconds == pytest.approx(6 * 4)


def test_bits_come_first_within_the_error() -> None:
    close = taken(chosen(gpus(4), models({"invariant": 1.1, "zero1": 1.1})))
    assert close.split.strategy == "invariant"
    assert "bucketed dp=4 is predicted to take 9% less, within the model's error" in close.remark
    far = chosen(gpus(4), models({"invariant": 1.01 + ERROR, "zero1": 1.01 + ERROR}))
    assert taken(far).split.strategy == "bucketed"
    assert row(far, "invariant dp=4").remark == "slower than bucketed dp=4 by 16%"


def test_the_simplest_comes_first_within_the_error() -> None:
    found = taken(chosen(gpus(4), models({"bucketed": 1.1}), strategies=("bucketed", "zero2")))
    assert found.split.strategy == "bucketed"


def test_what_does_not_fit_is_divided() -> None:
    """100 GB of state on 80 GB: fsdp over replicas, or stages and shards."""
    choice = chosen(gpus(4), models(state_gb=100))
    assert "fsdp dp=4" in {str(taken(choice).split)}
    plain = row(choice, "invariant dp=4")
    assert plain.obstacle.startswith("needs 100.2 GB of 72.0 GB: 28.2 GB short")
    without = chosen(gpus(4), models(state_gb=100), strategies=("invariant", "bucketed"))
    assert str(taken(without).split) == "invariant dp=2,pp=2"
    assert "no replica fits on one device (at best needs 100.2 GB" in taken(without).remark


def test_recomputation_is_a_last_resort() -> None:
    """A leaf of one sequence keeps 60 GB: only recomputed it fits."""
    choice = chosen(gpus(2), models(activations_gb=240), strategies=("invariant",))
    assert taken(choice).work.activation_checkpointing
    assert "activations must be recomputed to fit" in taken(choice).remark
    roomy = chosen(gpus(2), models(activations_gb=120), strategies=("invariant",))
    assert not taken(roomy).work.activation_checkpointing
    assert taken(roomy).work.micro_batch_size == 1


def test_recomputation_is_tried_only_where_it_helps() -> None:
    choice = chosen(gpus(1), models(activations_gb=100), strategies=("invariant",))
    tried = [(c.work.micro_batch_size, c.work.activation_checkpointing) for c in choice.candidates]
    assert tried == [(4, False), (1, False), (2, False), (8, False), (4, True), (8, True)]


def test_global_batch_stays() -> None:
    for each in chosen(gpus(4), models()).candidates:
        assert each.work.step_tokens == WORK.step_tokens


def test_fewer_devices_where_communication_eats_the_gain() -> None:
    pick = taken(chosen(gpus(4), models(exposed_s=1000.0)))
    assert pick.split.world_size == 1
    assert "the fastest by" in pick.remark


def test_one_host_where_the_network_is_slow() -> None:
    costs = models()

    def step(work: Workload, split: Split, hardware: Hardware, profile: StepProfile) -> StepTime:
        time = costs.step(work, split, hardware, profile)
        return replace(time, exposed_comm_s=100.0 if len(hardware.hosts) > 1 else 0.0)

    pick = taken(chosen(gpus(4, hosts=2), SimpleNamespace(**vars(costs) | {"step": step})))
    assert pick.split.world_size == 4


def test_the_slowest_device_decides() -> None:
    fast, slow = gpus(1).devices[0], replace(gpus(1).devices[0], name="old", peak_flops=5e14)
    host = Host(devices=(fast, slow), link=LINK, cores=32, memory_bytes=10**12)
    pick = taken(chosen(Hardware(hosts=(host,)), models()))
    assert pick.seconds == pytest.approx(64)  # the fast one alone takes as long as both
    assert pick.split.world_size == 1


def test_room_is_that_of_the_smallest_device() -> None:
    small = replace(gpus(1).devices[0], free_bytes=10 * GB)
    host = Host(devices=(*gpus(1).devices, small), link=LINK, cores=32, memory_bytes=10**12)
    assert room_bytes(Hardware(hosts=(host,)), 2) == int(10 * GB * (1 - MARGIN))
    assert room_bytes(Hardware(hosts=(host,)), 1) == int(80 * GB * (1 - MARGIN))


def test_fewer_ranks_of_a_cpu_have_more_room_each() -> None:
    assert room_bytes(cpus(4), 4) == int(8 * GB * (1 - MARGIN))
    assert room_bytes(cpus(4), 1) == int(32 * GB * (1 - MARGIN))


def test_ranks_of_a_cpu_host_share_weights() -> None:
    shared = {str(s): s.shared_weights for s in splits(2, cpus(2), (*STRATEGIES, "flat", "bf16"))}
    assert {name for name, together in shared.items() if together} == {
        "invariant dp=2",
        "bucketed dp=2",
    }
    assert not any(split.shared_weights for split in splits(2, gpus(2), STRATEGIES))


@pytest.mark.parametrize(
    ("split", "change", "reason"),
    [
        (Split(strategy="invariant", layout=Layout(tp=2)), {}, ""),
        (Split(strategy="invariant", layout=Layout(tp=8)), {}, "12 heads do not divide by 8"),
        (
            Split(strategy="invariant", layout=Layout(pp=16)),
            {},
            "12 layers are fewer than 16 stages",
        ),
        (
            Split(strategy="invariant", layout=Layout(pp=8)),
            {"num_leaves": 4},
            "4 leaves of a replica are fewer than 8 stages",
        ),
        (Split(strategy="fsdp", layout=Layout(dp=3)), {}, "16 leaves do not divide by 3"),
        (
            Split(strategy="invariant", layout=Layout(dp=3, pp=2)),
            {},
            "16 leaves do not divide by 3",
        ),
        (
            Split(strategy="invariant", layout=Layout(tp=2)),
            {"dtype": "fp16"},
            "fp16's loss scale is not known to all parts",
        ),
        (Split(strategy="invariant", layout=Layout(dp=3)), {}, ""),
        (
            Split(strategy="invariant", layout=Layout(dp=3)),
            {"num_leaves": 2},
            "3 replicas cannot share 2 leaves",
        ),
    ],
)
def test_arithmetic_forbids(split: Split, change: dict[str, Any], reason: str) -> None:
    assert obstacle(replace(WORK, **change), split) == reason


@pytest.mark.parametrize(
    ("strategy", "layout", "promise"),
    [
        ("invariant", Layout(dp=2), "bitwise"),
        ("invariant", Layout(dp=2, pp=2), "rounding"),
        ("bucketed", Layout(dp=2), "rounding"),
        ("bf16", Layout(tp=2), "lossy"),
    ],
)
def test_divided_models_round(strategy: str, layout: Layout, promise: str) -> None:
    split = Split(strategy=strategy, layout=layout)
    assert Candidate(work=WORK, split=split).promise == promise


def test_numbers_of_devices_to_try() -> None:
    assert counts(gpus(1)) == [1]
    assert counts(gpus(3)) == [1, 2, 3]
    assert counts(gpus(4, hosts=3)) == [1, 4, 8, 12]


def test_every_layout_once() -> None:
    found = [str(split) for split in splits(4, gpus(4), ("invariant", "fsdp"))]
    assert found == [
        *("invariant dp=4", "fsdp dp=4"),
        *("invariant dp=2,pp=2", "invariant dp=2,tp=2"),
        *("invariant pp=4", "invariant pp=2,tp=2", "invariant tp=4"),
    ]
    assert all(split.layout.tp <= 2 for split in splits(4, gpus(2, hosts=2), ("invariant",)))


def test_what_would_fit() -> None:
    """300 GB of state: five devices of 72 GB with 60 GB of it each, and 0.2 GB recomputed."""
    search = Search(strategies=("invariant", "fsdp"), micro_batch_sizes=(1,))
    costs = models(state_gb=300, activations_gb=4)
    choice = choose(WORK, gpus(2), costs, search)
    assert choice.pick is None
    said = remedy("small", choice, WORK, gpus(2), costs)
    assert said.startswith("small fits nowhere on 2 x GPU: at best (invariant pp=2, micro-batch 1")
    assert "needs 150.1 GB of 72.0 GB: 78.1 GB short" in said
    assert said.endswith("; it would fit on 5 such devices")


def test_hosts_are_counted_where_ranks_share_one() -> None:
    """8 GB a rank less the margin: 26 GB of state take stages on two hosts of two ranks."""
    search = Search(strategies=("invariant",), micro_batch_sizes=(1,))
    costs = models(state_gb=26, activations_gb=0.4)
    choice = choose(WORK, cpus(2), costs, search)
    said = remedy("small", choice, WORK, cpus(2), costs)
    assert said.endswith("it would fit on 2 such hosts")


def test_commands() -> None:
    one = taken(chosen(gpus(1), models()))
    assert commands(one, gpus(1), "small", []) == [
        ("", "gradsync train small --sync invariant --micro-batch-size 4")
    ]
    split = taken(chosen(gpus(4), models(state_gb=100), strategies=("invariant",)))
    ((_, line),) = commands(split, gpus(4), "small", ["--data", "my data"])
    assert line == (
        "gradsync train small --sync invariant --parallel pp=2,dp=2 --micro-batch-size 4 "
        "--data 'my data' --nproc-per-node 4"
    )
    recomputed = taken(chosen(gpus(1), models(activations_gb=240), strategies=("invariant",)))
    assert commands(recomputed, gpus(1), "small", [])[0][1].endswith("--activation-checkpointing")
    many = taken(chosen(gpus(4, hosts=2), models()))
    by_hand, slurm = commands(many, gpus(4, hosts=2), "small", [])
    assert by_hand[1].startswith("gradsync launch --nnodes 2 --nproc-per-node 4 -- train small ")
    assert slurm[1].startswith("gradsync submit --nodes 2 --gpus-per-node 4 ")


def test_numbers_in_words() -> None:
    assert [gb(96.3e9), gb(5e7)] == ["96.3 GB", "50.0 MB"]
    assert [percent(0.124), percent(0.004)] == ["12%", "0.4%"]
