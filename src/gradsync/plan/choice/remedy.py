"""Changes with which a model would fit; pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradsync.models.config import PRESETS
from gradsync.plan.choice.candidate import Candidate, Models, Search, obstacle, splits
from gradsync.plan.choice.choose import Choice, room_bytes
from gradsync.plan.description import Hardware
from gradsync.plan.workload import Workload

_MOST_DEVICES = 1024
_ONE_BY_ONE = 64
"""From here on whole hosts are added."""
_GPUS_OF_A_HOST = 8
"""Assumed of a host when more devices are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The nearest candidate, and what to change."""

    nearest: Candidate | None
    """The one that needs least beyond what there is; None where arithmetic forbade all."""
    devices: int | None
    """Smallest number of such devices on which the model fits; None: not even on 1,024."""
    preset: str
    """Largest smaller preset that fits on what there is; "" when none does."""

    def words(self, name: str, hardware: Hardware) -> str:
        """In one line, for people."""
        found = hardware.devices
        there = f"{len(found)} x {found[0].name}"
        if self.nearest is None:
            said = f"{name} cannot be divided over {there}"
        else:
            near = self.nearest
            recomputed = ", recomputing activations" if near.work.activation_checkpointing else ""
            said = (
                f"{name} fits nowhere on {there}: at best ({near.split}, micro-batch "
                f"{near.work.micro_batch_size}{recomputed}) a rank {near.obstacle}"
            )
        cures = []
        if self.devices is not None:
            # Devices of a CPU are shares of a host: there hosts count.
            last = hardware.hosts[-1]
            amount = f"{self.devices} such devices"
            if last.devices[0].kind == "cpu":
                amount = f"{self.devices // len(last.devices)} such hosts"
            cures.append(f"it would fit on {amount}")
        if self.preset:
            cures.append(f"{self.preset!r} fits here")
        return f"{said}; {' and '.join(cures) or 'no preset fits here'}"


def find_remedy(choice: Choice, work: Workload, hardware: Hardware, models: Models) -> Remedy:
    """Changes to propose where `choice` found nothing.

    Args:
        choice: without a pick.
        work: as it was asked for.
        hardware: what there is.
        models: memory; time is not asked.
    """
    search = choice.search
    judged = [candidate for candidate in choice.candidates if candidate.memory is not None]
    smaller = sorted(
        (config.num_params(), other, config)
        for other, config in PRESETS.items()
        if config.num_params() < work.model.num_params()
    )
    preset = ""
    for _, other, config in reversed(smaller):
        tokens = min(work.seq_len, config.block_size)
        if _fits(replace(work, model=config, seq_len=tokens), hardware, models, search):
            preset = other
            break
    return Remedy(
        nearest=min(judged, key=lambda candidate: candidate.short_bytes, default=None),
        devices=next(
            (len(more.devices) for more in _more(hardware) if _fits(work, more, models, search)),
            None,
        ),
        preset=preset,
    )


def _fits(work: Workload, hardware: Hardware, models: Models, search: Search) -> bool:
    """Whether anything that may be tried has room on all of these devices."""
    count = len(hardware.devices)
    room = room_bytes(hardware, count)
    variants = list(search.works(work))
    return any(
        not obstacle(variant, split) and models.memory(variant, split).total <= room
        for split in splits(count, hardware, search.strategies)
        for variant in variants
    )


def _more(hardware: Hardware) -> Iterator[Hardware]:
    """The same with ever more devices of the last kind, host by host; on GPUs one by one."""
    last = hardware.hosts[-1]
    on_cpu = last.devices[0].kind == "cpu"
    per_host = len(last.devices) if on_cpu else max(len(last.devices), _GPUS_OF_A_HOST)
    step = per_host if on_cpu else 1
    count = len(hardware.devices) + step
    while count <= _MOST_DEVICES:
        full, rest = divmod(count, per_host)
        sizes = [per_host] * full + [rest] * (rest > 0)
        hosts = tuple(replace(last, devices=(last.devices[0],) * size) for size in sizes)
        yield Hardware(hosts=hosts, network=hardware.network or last.link)
        step = step if count < _ONE_BY_ONE else max(step, per_host)
        count += step
