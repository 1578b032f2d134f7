"""From a contestant's name to the one that does the work."""

from __future__ import annotations

from gradsync.bench.contestant import ALONE, Contestant
from gradsync.bench.contestant_base import Blocking, Entrant, Site
from gradsync.bench.meter import StepClock
from gradsync.runtime.threads import pin_threads


def enter(
    contestant: Contestant, site: Site, clock: StepClock, *, blocking: Blocking | None = None
) -> Entrant:
    """Build it; all ranks of the set call this together.

    Args:
        contestant: who.
        site: where.
        clock: told when the last gradient of a step is there.
        blocking: takes the time of communication; then nothing is hidden.
    """
    entrant = _class_of(contestant)(contestant, site, clock, blocking)
    pin_threads(site.settings.threads)  # Accelerate sets a number of its own
    return entrant


def _class_of(contestant: Contestant) -> type[Entrant]:
    if contestant.name == ALONE:
        from gradsync.bench.contestant_plain import Alone

        return Alone
    if contestant.name == "torch_ddp":
        from gradsync.bench.contestant_plain import TorchDdp

        return TorchDdp
    if contestant.name == "accelerate":
        from gradsync.bench.contestant_accelerate import Accelerated

        return Accelerated
    if contestant.name == "fabric":
        from gradsync.bench.contestant_fabric import Fabricated

        return Fabricated
    from gradsync.bench.contestant_gradsync import Synchronised

    return Synchronised
