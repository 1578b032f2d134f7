"""Which split, micro-batch and recomputation to take on some hardware, and why; pure, no torch.

Every combination is judged: arithmetic first, then memory, then time. The global batch stays what
it is, `micro_batch_size x num_leaves`, whatever is taken. Among those that are as fast as the
fastest within the model's own error, bits that do not depend on ranks come first, then what is
simplest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log2
from typing import Any

from gradsync.plan.choice.candidate import (
    PROMISES,
    Candidate,
    Models,
    Search,
    counts,
    obstacle,
    splits,
)
from gradsync.plan.choice.words import pick_words, remark, short_words
from gradsync.plan.description import Hardware
from gradsync.plan.workload import Split, Workload

MARGIN = 0.1
"""Share of what a device can use that stays free, since the memory model is held to 10 %."""
ERROR = 0.15
"""Times that differ by less count as equal: the time model is held to 15 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """All candidates, and the one to take."""

    candidates: tuple[Candidate, ...]
    """All, in the order in which they were tried."""
    pick: Candidate | None
    """None: the model fits nowhere."""
    search: Search

    def rows(self) -> list[Candidate]:
        """One candidate per split, the best of it: the pick first, then the others by time, then
        what cannot run, by what is missing. Of splits that leave devices idle only the best, and
        one for each reason why arithmetic forbids others."""
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

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "pick": None if self.pick is None else self.pick.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }

    def _best(self, group: Sequence[Candidate]) -> Candidate:
        if self.pick is not None and self.pick.split == group[0].split:
            return self.pick
        fitting = [candidate for candidate in group if candidate.runs]
        if fitting:
            return _preferred(fitting, self.search)
        judged = [candidate for candidate in group if candidate.memory is not None]
        return min(judged, key=lambda c: c.short_bytes) if judged else group[0]

    def _place(self, candidate: Candidate) -> tuple[int, float]:
        if candidate is self.pick:
            return 0, 0.0
        if candidate.runs:
            return 1, candidate.seconds
        return (2, candidate.short_bytes) if candidate.memory is not None else (3, 0.0)


def choose(work: Workload, hardware: Hardware, models: Models, search: Search) -> Choice:
    """Judge every combination and take one.

    Args:
        work: with the usual micro-batch; its `step_tokens` are what every candidate keeps.
        hardware: what there is; candidates use all of it, one host, or one device.
        models: memory and time.
        search: what may be tried.
    """
    works, models = list(search.works(work)), replace(models, profile=cache(models.profile))
    judged: list[Candidate] = []
    for count in counts(hardware):
        used, room = hardware.with_devices(count), room_bytes(hardware, count)
        for split in splits(count, hardware, search.strategies):
            fitting: set[int] = set()
            for variant in works:
                # Recomputed only where it does not fit with its activations kept.
                if variant.micro_batch_size not in fitting:
                    judged.append(_judge(variant, split, used, room, models))
                    if judged[-1].runs:
                        fitting.add(variant.micro_batch_size)
    choice = Choice(candidates=tuple(judged), pick=_pick(judged, search), search=search)
    pick = choice.pick
    if pick is None:
        return choice
    told = replace(pick, remark=pick_words(pick, choice.rows(), judged, ERROR))
    return replace(
        choice,
        candidates=tuple(
            told if each is pick else replace(each, remark=remark(each, pick, ERROR))
            for each in judged
        ),
        pick=told,
    )


def room_bytes(hardware: Hardware, count: int) -> int:
    """Bytes that each of `count` ranks may take; the device with least memory decides."""
    used = hardware.with_devices(count)
    usable = min(device.usable_bytes for device in used.devices)
    if used.devices[0].kind == "cpu":
        # Ranks on a CPU share its memory: fewer of them may take more each.
        usable = min(
            sum(device.usable_bytes for device in whole.devices) // len(part.devices)
            for whole, part in zip(hardware.hosts, used.hosts, strict=False)
        )
    return int((1 - MARGIN) * usable)


def _judge(work: Workload, split: Split, used: Hardware, room: int, models: Models) -> Candidate:
    """Arithmetic, memory, time: the first that forbids it is its obstacle."""
    reason = obstacle(work, split)
    if reason:
        return Candidate(work=work, split=split, obstacle=reason)
    need = models.memory(work, split)
    judged = Candidate(work=work, split=split, memory=need, room_bytes=room)
    if need.total > room:
        return replace(judged, obstacle=short_words(need.total, room))
    # All ranks wait for the slowest device.
    profiles = [models.profile(work, device) for device in dict.fromkeys(used.devices)]
    slowest = max(profiles, key=lambda profile: profile.leaf_s)
    return replace(judged, time=models.step(work, split, used, slowest))


def _pick(judged: Sequence[Candidate], search: Search) -> Candidate | None:
    """The preferred one of each number of devices; of these the fastest."""
    fitting: dict[int, list[Candidate]] = {}
    for candidate in judged:
        if candidate.runs:
            fitting.setdefault(candidate.split.world_size, []).append(candidate)
    best = [_preferred(group, search) for group in fitting.values()]
    return min(best, key=lambda c: (c.seconds, c.split.world_size), default=None)


def _preferred(fitting: Sequence[Candidate], search: Search) -> Candidate:
    """The best of those that are as fast as the fastest: the strongest promise, the whole model on
    each rank, the first strategy, activations kept, the micro-batch nearest to the usual one."""
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
