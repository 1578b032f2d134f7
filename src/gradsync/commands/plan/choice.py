"""Chooses a split, micro-batch and recomputation for given hardware, with reasons.

Every combination is judged by arithmetic, then memory, then time. The global batch,
`micro_batch_size x num_leaves`, stays the same. Several choices may be as fast as the fastest,
within the model's error: bits independent of the number of ranks come first, then the simplest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import log2
from typing import Any

from gradsync.commands.parallel.layout import ParallelLayout, check_divisible
from gradsync.commands.plan.description import Device, Hardware, gb
from gradsync.commands.plan.measured import machine_conditions
from gradsync.commands.plan.memory import MemoryNeed, memory_need
from gradsync.commands.plan.profile import (
    PROFILES,
    StepProfile,
    estimate_profile,
    probe_profile,
    probe_work,
    scaled_profile,
)
from gradsync.commands.plan.step_costs import StepTime, predict_step
from gradsync.commands.plan.workload import Split, Workload, goes_with_parts, shares_memory
from gradsync.core.files import counted
from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime.machine import busy, choose_threads
from gradsync.sync.registry import STRATEGIES, Promise

USUAL = ("invariant", "bucketed", "zero1", "zero2", "fsdp", "ddp")
"""Tried unless names are given, the simplest first: one lossless strategy for each cost."""
MARGIN = 0.1  # Part of the usable memory that stays free: the memory model is accurate to 10 %
ERROR = 0.15  # Times within this fraction count as equal: the time model is no better
PROMISES: tuple[Promise, ...] = ("bitwise", "rounding", "lossy")  # The strongest first


class Costs:
    """Memory by formula; time from data sheets, or from a micro-batch measured here."""

    measured: tuple[StepProfile, Workload] | None = None
    load: float | None = None  # The machine's load, if it was busy during the measurement
    memory = staticmethod(memory_need)
    step = staticmethod(predict_step)

    def profile(self, work: Workload, device: Device) -> StepProfile:
        """A micro-batch and an update on a device."""
        if self.measured is None:
            return estimate_profile(work, device)
        return scaled_profile(*self.measured, work)

    def measure(self, work: Workload, hardware: Hardware) -> bool:
        """Time a micro-batch here, unless it is known; false if no device holds a replica."""
        leaf, host = probe_work(work), hardware.hosts[0]
        if memory_need(leaf, Split(strategy="bucketed")).total > room_bytes(hardware, 1):
            return False
        ranks = len(host.devices)
        conditions = machine_conditions(leaf.kind, choose_threads(ranks))
        conditions |= asdict(replace(leaf, num_leaves=1))  # their number does not matter
        profile = None
        with suppress(GradsyncError):  # there may be no folder for caches
            profile = PROFILES.read(conditions)
        if profile is None:
            load = os.getloadavg()[0]
            profile = probe_profile(leaf, ranks)
            if busy(load, host.cores):
                self.load = load
            else:
                with suppress(GradsyncError):
                    PROFILES.save(conditions, profile)
        self.measured = profile, leaf
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The variants to try."""

    strategies: tuple[str, ...]  # The simplest first: it wins if times are equal
    micro_batch_sizes: tuple[int, ...]  # Sequences; the usual size first. Each divides the batch
    checkpointing: tuple[bool, ...] = (False, True)  # Keep activations, recompute them, or either

    def works(self, work: Workload) -> Iterator[Workload]:
        """`work` with every micro-batch and recomputation setting; its global batch stays."""
        sequences = work.num_leaves * work.micro_batch_size
        for recompute in self.checkpointing:
            for size in self.micro_batch_sizes:
                yield replace(
                    work,
                    micro_batch_size=size,
                    num_leaves=sequences // size,
                    activation_checkpointing=recompute,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A workload with its micro-batch, its split, and the verdict."""

    work: Workload
    split: Split
    memory: MemoryNeed | None = None  # None if arithmetic alone forbids it
    room_bytes: int = 0  # Memory available to a rank on the smallest device
    time: StepTime | None = None  # Predicted; None if it cannot run
    obstacle: str = ""  # Why it cannot run; empty: it can
    remark: str = ""  # Why it was chosen or not

    @property
    def runs(self) -> bool:
        """Whether it can."""
        return self.time is not None

    @property
    def seconds(self) -> float:
        """Duration of a step; only for a candidate that runs."""
        assert self.time is not None
        return self.time.total_s

    @property
    def promise(self) -> Promise:
        """The strategy's promise; if the model itself is divided, sums have another order."""
        promise = STRATEGIES[self.split.strategy].promise
        whole = self.split.layout.model_ranks == 1
        return promise if whole else max(promise, "rounding", key=PROMISES.index)

    @property
    def short_bytes(self) -> int:
        """How much memory is missing; 0 or less if it fits."""
        return 0 if self.memory is None else self.memory.total - self.room_bytes

    def to_json(self) -> dict[str, Any]:
        """Values for JSON."""
        memory = self.memory
        return {
            "strategy": self.split.strategy,
            "ranks": self.split.world_size,
            "parallel": asdict(self.split.layout),
            "shared_weights": self.split.shared_weights,
            "micro_batch_size": self.work.micro_batch_size,
            "num_micro_batches": self.work.num_leaves,
            "activation_checkpointing": self.work.activation_checkpointing,
            "memory_bytes": None if memory is None else asdict(memory) | {"total": memory.total},
            "room_bytes": self.room_bytes or None,
            "step": None if self.time is None else asdict(self.time) | {"total_s": self.seconds},
            "promise": self.promise,
            "obstacle": self.obstacle or None,
            "remark": self.remark or None,
        }


def counts(hardware: Hardware) -> list[int]:
    """How many devices to try: one, a host's, the largest power of two, and all."""
    total = len(hardware.devices)
    return sorted({1, len(hardware.hosts[0].devices), 1 << (total.bit_length() - 1), total})


def splits(count: int, hardware: Hardware, strategies: Sequence[str]) -> Iterator[Split]:
    """Every split of `count` devices: strategies x (replicas, stages, shards), replicas first. A
    single replica synchronises with no other: it is listed once for each promise."""
    on_cpu_host = hardware.devices[0].kind == "cpu" and len(hardware.hosts) == 1
    most_shards = max(len(host.devices) for host in hardware.hosts)
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    for model_ranks, tp in product(divisors, repeat=2):
        # Shards communicate in every layer: never between hosts.
        if model_ranks % tp or tp > most_shards:
            continue
        layout = ParallelLayout(dp=count // model_ranks, pp=model_ranks // tp, tp=tp)
        usable = [name for name in strategies if model_ranks == 1 or goes_with_parts(name)]
        if layout.dp == 1:
            # Alone, strategies differ only in how they sum micro-batches: their promise.
            first = {STRATEGIES[name].promise: name for name in reversed(usable)}
            usable = [name for name in usable if name in first.values()]
        for strategy in usable:
            recipe = STRATEGIES[strategy].recipe
            # Then `gradsync train` keeps one copy of the weights for all ranks.
            shared = recipe is not None and shares_memory(recipe)
            shared &= on_cpu_host and model_ranks == 1 < layout.dp
            yield Split(strategy=strategy, layout=layout, shared_weights=shared)


def obstacle(work: Workload, split: Split) -> str:
    """Why arithmetic or `train/check.py` forbids it; empty if neither does."""
    layout, count = split.layout, work.num_leaves
    is_divided = layout.model_ranks > 1
    batches = counted(count, "micro-batch", "micro-batches")
    if layout.dp > count:
        return f"{layout.dp} replicas cannot share {batches}"
    if count % layout.dp and (is_divided or STRATEGIES[split.strategy].equal_leaves):
        return f"{batches} do not divide by {layout.dp}"
    try:
        check_divisible(work.model, layout)
    except ConfigError as error:
        return str(error).removeprefix("parallel: ")
    if layout.pp > count // layout.dp:
        return f"pp={layout.pp} stages need a micro-batch each, a replica has {count // layout.dp}"
    if is_divided and work.dtype == "fp16":
        return "fp16's loss scale is not known to all parts"
    return ""


def room_bytes(hardware: Hardware, count: int) -> int:
    """Bytes that each of `count` ranks may take; the device with least memory decides."""
    used = hardware.with_devices(count)
    usable = min(device.usable_bytes for device in used.devices)
    if used.devices[0].kind == "cpu":
        # CPU ranks share the host's memory: with fewer ranks each gets more.
        usable = min(
            sum(device.usable_bytes for device in whole.devices) // len(part.devices)
            for whole, part in zip(hardware.hosts, used.hosts, strict=False)
        )
    return int((1 - MARGIN) * usable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """All candidates, and the one to take."""

    candidates: tuple[Candidate, ...]  # As they were tried
    pick: Candidate | None  # None: the model fits nowhere
    search: Search

    def rows(self) -> list[Candidate]:
        """The best candidate of each split: the pick first, then the others by time, then what
        cannot run, by missing memory. Splits that leave devices idle are reduced to the best one,
        splits that arithmetic forbids to one per reason."""
        of_split: dict[Split, list[Candidate]] = {}
        for candidate in self.candidates:
            of_split.setdefault(candidate.split, []).append(candidate)
        rows = sorted((self._best(group) for group in of_split.values()), key=self._place)
        most = max(row.split.world_size for row in rows)
        seen: set[int | str] = set()
        kept = []
        for row in rows:
            count, reason = row.split.world_size, row.obstacle if row.memory is None else ""
            if reason not in seen and (count == most or count not in seen):
                kept.append(row)
            seen |= {count, reason} if reason else {count}
        return kept

    def _best(self, group: Sequence[Candidate]) -> Candidate:
        """Of one split: the pick, else the preferred one, else what lacks least."""
        if self.pick is not None and self.pick.split == group[0].split:
            return self.pick
        if fitting := [candidate for candidate in group if candidate.runs]:
            return preferred(fitting, self.search)
        return min(group, key=lambda each: (each.memory is None, each.short_bytes))

    def _place(self, candidate: Candidate) -> tuple[int, float]:
        if candidate.runs:
            return (0 if candidate is self.pick else 1), candidate.seconds
        return (3 if candidate.memory is None else 2), candidate.short_bytes


def choose(work: Workload, hardware: Hardware, costs: Costs, search: Search) -> Recommendation:
    """Judge every combination and take one. Every candidate keeps the `step_tokens` of `work`."""
    judged: list[Candidate] = []
    best: list[Candidate] = []  # For each number of devices
    for count in counts(hardware):
        used, room, begin = hardware.with_devices(count), room_bytes(hardware, count), len(judged)
        for split in splits(count, hardware, search.strategies):
            kept: set[int] = set()
            for variant in search.works(work):
                # Recompute only if kept activations do not fit.
                if variant.micro_batch_size not in kept:
                    case = _judge(variant, split, used, room, costs)
                    judged.append(case)
                    kept |= {variant.micro_batch_size} if case.runs else set()
        if fitting := [each for each in judged[begin:] if each.runs]:
            best.append(preferred(fitting, search))
    pick = min(best, key=lambda each: each.seconds, default=None)
    if pick is None:
        return Recommendation(candidates=tuple(judged), pick=None, search=search)
    told = [replace(each, remark=_why_not(each, pick)) if each.runs else each for each in judged]
    taken = told[judged.index(pick)] = replace(pick, remark=_why_taken(pick, judged))
    return Recommendation(candidates=tuple(told), pick=taken, search=search)


def _judge(work: Workload, split: Split, used: Hardware, room: int, costs: Costs) -> Candidate:
    """Arithmetic, memory, time: the first that fails is the obstacle."""
    if reason := obstacle(work, split):
        return Candidate(work=work, split=split, obstacle=reason)
    need = costs.memory(work, split)
    judged = Candidate(work=work, split=split, memory=need, room_bytes=room)
    if need.total > room:
        short = f"needs {gb(need.total)} of {gb(room)}: {gb(need.total - room)} short"
        return replace(judged, obstacle=short)
    # All ranks wait for the slowest device.
    profiles = [costs.profile(work, device) for device in dict.fromkeys(used.devices)]
    slowest = max(profiles, key=lambda each: each.leaf_s)
    return replace(judged, time=costs.step(work, split, used, slowest))


def preferred(fitting: Sequence[Candidate], search: Search) -> Candidate:
    """The best candidate among those as fast as the fastest: strongest promise, whole model on each
    rank, first strategy, activations kept, micro-batch nearest to the usual one."""
    usual = search.micro_batch_sizes[0]

    def order(candidate: Candidate) -> tuple[float, ...]:
        split, work = candidate.split, candidate.work
        return (
            PROMISES.index(candidate.promise),
            split.layout.model_ranks,
            search.strategies.index(split.strategy),
            work.activation_checkpointing,
            abs(log2(work.micro_batch_size / usual)),
            candidate.seconds,
        )

    fastest = min(candidate.seconds for candidate in fitting)
    return min((c for c in fitting if c.seconds <= (1 + ERROR) * fastest), key=order)


def _why_not(candidate: Candidate, pick: Candidate) -> str:
    """How long `candidate`, which can run, takes against the pick."""
    ratio = candidate.seconds / pick.seconds
    if ratio >= 1.95:  # from here on a factor
        said = f"takes {ratio:.1f} times as long"
    elif abs(ratio - 1) < 0.01:
        said = "as fast"
    else:
        said = f"slower by {ratio - 1:.0%}" if ratio > 1 else f"faster by {1 - ratio:.0%}"
    near = candidate.seconds <= (1 + ERROR) * pick.seconds
    return f"{said}; a weaker promise, or not as simple" if near else said


def _why_taken(pick: Candidate, judged: Sequence[Candidate]) -> str:
    """Why `pick`: what rules out a replica per device or kept activations, and its promise."""
    parts = ["the best of what fits"]
    whole = [
        each
        for each in judged
        if each.split.world_size == pick.split.world_size
        and each.split.layout.model_ranks == 1
        and each.memory is not None
    ]
    if pick.split.layout.model_ranks > 1 and whole and not any(each.runs for each in whole):
        least = min(whole, key=lambda each: each.short_bytes)
        parts.append(f"no replica fits on one device (at best {least.split} {least.obstacle})")
    own = [each for each in judged if each.split == pick.split]
    if not any(each.runs and not each.work.activation_checkpointing for each in own):
        parts.append("activations must be recomputed to fit")
    return "; ".join([*parts, f"promise: {pick.promise}"])


def remedy(name: str, choice: Recommendation, hardware: Hardware) -> str:
    """The error line if no candidate fits: the one that lacks the least memory."""
    said = f"{name} fits nowhere on {len(hardware.devices)} x {hardware.devices[0].name}"
    judged = [candidate for candidate in choice.candidates if candidate.memory is not None]
    if not judged:
        return said
    near = min(judged, key=lambda candidate: candidate.short_bytes)
    recomputed = ", recomputing activations" if near.work.activation_checkpointing else ""
    return (
        f"{said}: at best ({near.split}, micro-batch {near.work.micro_batch_size}{recomputed}) "
        f"a rank {near.obstacle}; try more devices, or more hosts"
    )
