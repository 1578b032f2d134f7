"""Memory and time for a choice: memory by formula, time by estimate or after a probe."""

from __future__ import annotations

import os

from gradsync.plan.choice.candidate import Models
from gradsync.plan.choice.choose import room_bytes
from gradsync.plan.choice.report import duration
from gradsync.plan.description import Device, Hardware
from gradsync.plan.memory.model import memory_need
from gradsync.plan.timing.estimate import (
    UTILISATION,
    estimate_profile,
    load_profile,
    probe_work,
    profile_path,
    scaled_profile,
)
from gradsync.plan.timing.profile import StepProfile
from gradsync.plan.timing.step import predict_step
from gradsync.plan.workload import Split, Workload
from gradsync.runtime.machine import choose_threads

_BUSY = 0.5
"""Processes that want to run, for each core: above this a probe measures them too."""


class Costs:
    """Memory by formula; time from data sheets, or from a leaf that was measured here."""

    def __init__(self) -> None:
        self._measured: tuple[StepProfile, Workload] | None = None
        self._load: float | None = None
        self.models = Models(memory=memory_need, profile=self._profile, step=predict_step)

    def measure(self, work: Workload, hardware: Hardware) -> bool:
        """Time a leaf on this machine, unless that was done before; a few seconds.

        Args:
            work: what is planned.
            hardware: this machine's.

        Returns:
            false where a whole replica has no room on a device.
        """
        leaf = probe_work(work)
        alone = memory_need(leaf, Split(strategy="bucketed"))
        if alone.total > room_bytes(hardware, 1):
            return False
        from gradsync.plan.timing.probe import probe_profile

        host, device = hardware.hosts[0], leaf.kind
        ranks = len(host.devices)
        path = profile_path(leaf, device=device, threads=choose_threads(ranks))
        if load_profile(path) is None and os.getloadavg()[0] > _BUSY * host.cores:
            self._load = os.getloadavg()[0]
        # What was measured beside other work is not kept.
        cached = self._load is None
        profile = probe_profile(leaf, device=device, ranks_per_host=ranks, cached=cached)
        self._measured = profile, leaf
        return True

    def lines(self, hardware: Hardware) -> list[str]:
        """Where the figures come from."""
        lines = ["memory: closed formulas"]
        if self._measured is None:
            sources = dict.fromkeys(device.source for device in hardware.devices if device.source)
            peak = f" ({'; '.join(sources)})" if sources else ""
            lines.append(f"computing: estimated, {UTILISATION:.1%} of the peak{peak}")
        else:
            profile, leaf = self._measured
            lines.append(
                f"computing: measured here, forward {duration(profile.forward_s)}, backward "
                f"{duration(profile.backward_s)} of {leaf.micro_batch_size} x {leaf.seq_len} "
                f"tokens, update {duration(profile.update_s)}; other leaves in proportion"
            )
        if self._load is not None:
            lines.append(
                f"the machine was busy with other work (load {self._load:.1f}): too slow, and not "
                "kept; ask again when it is quiet"
            )
        links = [host.link for host in hardware.hosts if len(host.devices) > 1]
        if hardware.network is not None and len(hardware.hosts) > 1:
            links.append(hardware.network)
        for link in dict.fromkeys(links):
            lines.append(f"messages: {link.name}, {link.source or 'as given'}")
        return lines

    def _profile(self, work: Workload, device: Device) -> StepProfile:
        if self._measured is None:
            return estimate_profile(work, device)
        profile, leaf = self._measured
        return scaled_profile(profile, leaf, work)
