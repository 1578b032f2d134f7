"""Which split is taken, and in which words the others are turned down; costs are made up here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gradsync.commands.models.config import preset
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.choice import (
    ERROR,
    MARGIN,
    Candidate,
    Costs,
    Recommendation,
    Search,
    choose,
    counts,
    obstacle,
    room_bytes,
    splits,
)
from gradsync.commands.plan.description import Device, Hardware, Host, Kind, Link
from gradsync.commands.plan.memory import MemoryNeed
from gradsync.commands.plan.profile import StepProfile
from gradsync.commands.plan.step_costs import StepTime
from gradsync.commands.plan.workload import Split, Workload

GB = 10**9
LINK = Link(name="fast", alpha_s=1e-6, bytes_per_s=1e11)
STRATEGIES = ("invariant", "bucketed", "zero1", "zero2", "fsdp")
WORK = Workload(model=preset("small"), micro_batch_size=4, seq_len=1024, num_leaves=16)


def gpus(count: int, *, memory_gb: float = 80, hosts: int = 1, kind: Kind = "cuda") -> Hardware:
    device = Device(kind=kind, name="GPU", memory_bytes=int(memory_gb * GB), peak_flops=1e15)
    host = Host(devices=(device,) * count, link=LINK, cores=32, memory_bytes=10**12)
    return Hardware(hosts=(host,) * hosts, network=LINK if hosts > 1 else None)


def unlike(**change: Any) -> Hardware:
    """Two devices, of which the second one is changed."""
    (host,) = gpus(2).hosts
    devices = (host.devices[0], replace(host.devices[1], **change))
    return Hardware(hosts=(replace(host, devices=devices),))


class MadeUp(Costs):
    """A second per sequence and rank; a strategy takes `factor` times as long, stages and shards a
    quarter longer each; any communication takes `exposed_s`, between hosts `far_s` more. State that
    fsdp, stages and shards divide; activations of a leaf, a fifth if recomputed."""

    def __init__(self, factor: Mapping[str, float] | None = None, **about: float) -> None:
        super().__init__()
        usual = {"state_gb": 20.0, "activations_gb": 5.0, "exposed_s": 0.0, "far_s": 0.0}
        self.factor, self.about = factor or {}, usual | about

    def memory(self, work: Workload, split: Split) -> MemoryNeed:
        ways = split.layout.model_ranks * (split.layout.dp if split.strategy == "fsdp" else 1)
        kept = self.about["activations_gb"] * work.micro_batch_size / 4 / split.layout.model_ranks
        return MemoryNeed(
            weights=int(self.about["state_gb"] / ways * GB),
            activations=int((kept / 5 if work.activation_checkpointing else kept) * GB),
        )

    def profile(self, work: Workload, device: Device) -> StepProfile:
        seconds = work.micro_batch_size * 1e15 / device.peak_flops
        seconds *= 4 / 3 if work.activation_checkpointing else 1
        return StepProfile(forward_s=0.0, backward_s=seconds, update_s=0.0)

    def step(
        self, work: Workload, split: Split, hardware: Hardware, profile: StepProfile
    ) -> StepTime:
        layout = split.layout
        longer = 1.25 ** (layout.pp > 1) * 1.25 ** (layout.tp > 1)
        own = -(-work.num_leaves // layout.dp) * profile.leaf_s / layout.model_ranks
        seconds = own * longer * (self.factor.get(split.strategy, 1.0) if layout.dp > 1 else 1.0)
        seconds += self.about["exposed_s"] * (split.world_size > 1)
        seconds += self.about["far_s"] * (len(hardware.hosts) > 1)
        parts = dict.fromkeys(("exposed_comm_s", "bubble_s", "update_s"), 0.0)
        alone = work.num_leaves * work.micro_batch_size
        return StepTime(
            compute_s=seconds,
            tokens_per_s=work.step_tokens / seconds,
            efficiency=alone / split.world_size / seconds,
            **parts,
        )


def chosen(hardware: Hardware, costs: Costs | None = None, **search: Any) -> Recommendation:
    given = {"strategies": STRATEGIES, "micro_batch_sizes": (4, 1, 2, 8)} | search
    return choose(WORK, hardware, costs or MadeUp(), Search(**given))


def taken(choice: Recommendation) -> Candidate:
    assert choice.pick is not None
    assert choice.pick in choice.candidates
    assert choice.rows()[0] is choice.pick
    return choice.pick


def row(choice: Recommendation, text: str) -> Candidate:
    return next(each for each in choice.rows() if str(each.split) == text)


INVARIANT = {"strategies": ("invariant",)}
SLOWER = {"invariant": 1.1, "zero1": 1.1}
CASES = [
    (gpus(1), MadeUp(), {}, "invariant", 64),
    (gpus(1), MadeUp(), INVARIANT, "invariant", 64),
    *((gpus(n), MadeUp(), {}, f"invariant dp={n}", 64 / n) for n in (2, 4, 8)),
    # 16 leaves on 3 ranks: 6, 5 and 5
    (gpus(3), MadeUp(), {"micro_batch_sizes": (4,)}, "invariant dp=3", 24),
    # Bits come first within the error, then what is simplest.
    (gpus(4), MadeUp(SLOWER), {}, "invariant dp=4", 17.6),
    (
        *(gpus(4), MadeUp({"bucketed": 1.1}), {"strategies": ("bucketed", "zero2")}),
        *("bucketed dp=4", 17.6),
    ),
    # 100 GB of state on 80 GB: fsdp over replicas, or stages and shards
    (gpus(4), MadeUp(state_gb=100), {}, "fsdp dp=4", 16),
    (
        *(gpus(4), MadeUp(state_gb=100), {"strategies": ("invariant", "bucketed")}),
        *("invariant dp=2,pp=2", 20),
    ),
    # Communication eats the gain, or only that between hosts.
    (gpus(4), MadeUp(exposed_s=1000), {}, "invariant", 64),
    (gpus(4, hosts=2), MadeUp(far_s=100), {}, "invariant dp=4", 16),
    # The slowest device decides: the fast one alone takes as long as both.
    (unlike(peak_flops=5e14), MadeUp(), {}, "invariant", 64),
]


@pytest.mark.parametrize(("hardware", "costs", "search", "split", "seconds"), CASES)
def test_what_is_taken(
    hardware: Hardware, costs: Costs, search: Any, split: str, seconds: float
) -> None:
    choice = chosen(hardware, costs, **search)
    pick = taken(choice)
    assert str(pick.split) == split
    assert pick.seconds == pytest.approx(seconds)
    no_replica = "no replica fits on one device" in pick.remark
    assert no_replica == (pick.split.layout.model_ranks > 1)
    assert all(each.work.step_tokens == WORK.step_tokens for each in choice.candidates)


def test_why_others_are_not_taken() -> None:
    slow = 1.01 + ERROR
    far = chosen(gpus(4), MadeUp({"invariant": slow, "zero1": slow}))
    assert taken(far).split.strategy == "bucketed"
    assert row(far, "invariant dp=4").remark == "slower by 16%"
    plain = row(chosen(gpus(4), MadeUp(state_gb=100)), "invariant dp=4")
    assert plain.obstacle.startswith("needs 100.2 GB of 72.0 GB: 28.2 GB short")


def test_recomputation_is_a_last_resort() -> None:
    """A leaf of one sequence keeps 60 GB: only recomputed it fits; with 30 GB it is kept. Tried
    only where it helps."""
    pick = taken(chosen(gpus(2), MadeUp(activations_gb=240), **INVARIANT))
    assert pick.work.activation_checkpointing
    assert "activations must be recomputed to fit" in pick.remark
    roomy = taken(chosen(gpus(2), MadeUp(activations_gb=120), **INVARIANT))
    assert (roomy.work.activation_checkpointing, roomy.work.micro_batch_size) == (False, 1)
    choice = chosen(gpus(1), MadeUp(activations_gb=100), **INVARIANT)
    tried = [(c.work.micro_batch_size, c.work.activation_checkpointing) for c in choice.candidates]
    assert tried == [(4, False), (1, False), (2, False), (8, False), (4, True), (8, True)]


def test_room() -> None:
    """Room of the smallest device; fewer ranks of a CPU have more each."""
    small = unlike(free_bytes=10 * GB)
    cpus = gpus(4, memory_gb=8, kind="cpu")
    room = [room_bytes(*case) for case in ((small, 2), (small, 1), (cpus, 4), (cpus, 1))]
    assert room == [int(size * GB * (1 - MARGIN)) for size in (10, 80, 8, 32)]


def test_ranks_of_a_cpu_host_share_weights() -> None:
    names = (*STRATEGIES, "flat", "bf16")
    shared = [str(s) for s in splits(2, gpus(2, kind="cpu"), names) if s.shared_weights]
    assert shared == ["invariant dp=2", "bucketed dp=2"]
    assert not any(split.shared_weights for split in splits(2, gpus(2), STRATEGIES))


FP16 = "fp16's loss scale is not known to all parts"


@pytest.mark.parametrize(
    ("strategy", "layout", "change", "reason"),
    [
        ("invariant", ParallelLayout(tp=2), {}, ""),
        ("invariant", ParallelLayout(dp=3), {}, ""),
        ("invariant", ParallelLayout(tp=8), {}, "tp=8 does not divide the model's 12 query heads"),
        (
            "invariant",
            ParallelLayout(pp=16),
            {},
            "pp=16 stages need a block each, the model has 12",
        ),
        (
            *("invariant", ParallelLayout(pp=8), {"num_leaves": 4}),
            "pp=8 stages need a micro-batch each, a replica has 4",
        ),
        ("fsdp", ParallelLayout(dp=3), {}, "16 micro-batches do not divide by 3"),
        ("invariant", ParallelLayout(dp=3, pp=2), {}, "16 micro-batches do not divide by 3"),
        ("invariant", ParallelLayout(tp=2), {"dtype": "fp16"}, FP16),
        (
            "invariant",
            ParallelLayout(dp=3),
            {"num_leaves": 2},
            "3 replicas cannot share 2 micro-batches",
        ),
    ],
)
def test_arithmetic_forbids(
    strategy: str, layout: ParallelLayout, change: Any, reason: str
) -> None:
    said = obstacle(replace(WORK, **change), Split(strategy=strategy, layout=layout))
    assert bool(said) == bool(reason)
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("strategy", "layout", "promise"),
    [
        ("invariant", ParallelLayout(dp=2), "bitwise"),
        ("invariant", ParallelLayout(dp=2, pp=2), "rounding"),
        ("bucketed", ParallelLayout(dp=2), "rounding"),
        ("bf16", ParallelLayout(tp=2), "lossy"),
    ],
)
def test_divided_models_round(strategy: str, layout: ParallelLayout, promise: str) -> None:
    split = Split(strategy=strategy, layout=layout)
    assert Candidate(work=WORK, split=split).promise == promise


def test_every_number_of_devices_and_layout_once() -> None:
    assert counts(gpus(1)) == [1]
    assert counts(gpus(3)) == [1, 2, 3]
    assert counts(gpus(4, hosts=3)) == [1, 4, 8, 12]
    found = [str(split) for split in splits(4, gpus(4), ("invariant", "fsdp"))]
    assert found == [
        *("invariant dp=4", "fsdp dp=4"),
        *("invariant dp=2,pp=2", "invariant dp=2,tp=2"),
        *("invariant pp=4", "invariant pp=2,tp=2", "invariant tp=4"),
    ]
    assert all(split.layout.tp <= 2 for split in splits(4, gpus(2, hosts=2), ("invariant",)))
