"""One rank of `bench sync`: the set's contestants, turn after turn, in the order of the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from gradsync.bench.contestant_base import Entrant, Leaves, Site, make_leaves
from gradsync.bench.contestant_build import enter
from gradsync.bench.environment import environment
from gradsync.bench.meter import StepClock
from gradsync.bench.sync_check import check, entrant_step, reference_losses
from gradsync.bench.sync_duration import duration, seconds_of
from gradsync.bench.sync_plan import CHECK_STEPS, Entry, Plan
from gradsync.bench.sync_sets import Baton
from gradsync.comm.groups import groups
from gradsync.comm.values import all_gather_json
from gradsync.runtime.peak_memory import give_back
from gradsync.sync.registry import STRATEGIES, wants_groups
from gradsync.world import World

Tell = Callable[[int, int, str], None]
"""`tell(place, count, what)`: how far it is."""
Say = Callable[[str], None]


@dataclass(slots=True)
class _Bench:
    """An entry of this set, ready for its turns."""

    leaves: Leaves
    clock: StepClock
    entrant: Entrant | None = None
    step_s: list[list[float]] = field(default_factory=list)
    """Per round and step, seconds."""
    compute_s: list[list[float]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    """What the check found."""


class Runner:
    """This rank's part.

    Args:
        plan: of all sets.
        mine: index of this rank's set.
        world: of the set's session.
        baton: passed on between sets.
        tell: called before each piece of work of any set.
        say: called once with how long it will take.
    """

    def __init__(
        self,
        plan: Plan,
        mine: int,
        world: World,
        baton: Baton,
        tell: Tell,
        *,
        say: Say = lambda text: None,
    ) -> None:
        self._plan, self._mine, self._world = plan, mine, world
        self._baton, self._tell, self._say = baton, tell, say
        self._order = work_order(plan)
        self.place = 0
        """Of the work at hand, in the order of all sets."""
        contestants = [e.contestant for e in plan.entries if e.worker_set == mine]
        levels = any(
            each.is_ours and wants_groups(STRATEGIES[each.name], each.options)
            for each in contestants
        )
        self._site = Site(
            settings=plan.settings, world=world, groups=groups(world) if levels else None
        )
        self._comm = self._site.comm
        self._benches: dict[str, _Bench] = {}
        self._expected: dict[int, list[float]] = {}

    def run(self) -> dict[str, Any]:
        """All work of this set; the same result on each of its ranks, nothing when another set
        gave up.

        Raises:
            NotTrainingError: on all ranks of the set.
            ConfigError: likewise, for options that do not go together.
        """
        before = environment(world_size=self._world.world_size, threads=self._plan.settings.threads)
        for place, (entry, is_check) in enumerate(self._order):
            self.place = place
            self._tell(self.place, len(self._order), _named(entry, is_check=is_check))
            if entry.worker_set != self._mine:
                continue
            if not self._baton.take(self.place):
                return {}
            if is_check:
                self._check(entry)
            else:
                self._turn(entry)
            self._comm.barrier()
            if self._world.is_main:
                self._baton.hand_on(self.place)
        self._tell(len(self._order), len(self._order), "")
        for bench in self._benches.values():
            if bench.entrant is not None:
                bench.entrant.close()
        return {"environment": before, **self._gather()}

    def _check(self, entry: Entry) -> None:
        """Whether it trains; models that stay are built now, alike in all sets."""
        site, settings = self._site, self._plan.settings
        clock = StepClock(on_cuda=site.on_cuda)
        bench = _Bench(leaves=make_leaves(site, entry.batch_size), clock=clock)
        self._benches[entry.label] = bench
        if entry.batch_size not in self._expected:
            began = time.perf_counter()
            self._expected[entry.batch_size] = reference_losses(site, bench.leaves)
            if self.place == 0:
                step_s = (time.perf_counter() - began) / CHECK_STEPS
                self._say(f"all of it takes about {duration(seconds_of(self._plan, step_s))}")
        expected = self._expected[entry.batch_size]
        bench.found = asdict(check(entry.contestant, site, bench.leaves, expected))
        give_back()
        if settings.side_by_side:
            bench.entrant = enter(entry.contestant, site, clock)

    def _turn(self, entry: Entry) -> None:
        """Some steps to warm up, then those that count."""
        settings, bench = self._plan.settings, self._benches[entry.label]
        entrant = bench.entrant or enter(entry.contestant, self._site, bench.clock)
        for _ in range(settings.num_warmup):
            entrant_step(entrant, bench.leaves)
        self._comm.barrier()
        bench.clock.begin()
        for _ in range(settings.num_steps):
            entrant.backward(bench.leaves)
            bench.clock.backward_done()
            entrant.update()
            bench.clock.step_done()
        times = bench.clock.read()
        bench.step_s.append(times.step_s)
        bench.compute_s.append(times.compute_s)
        if bench.entrant is None:
            entrant.close()
            del entrant
            give_back()

    def _gather(self) -> dict[str, Any]:
        """Every rank's samples, by contestant."""
        mine = {
            label: {"step_s": bench.step_s, "compute_s": bench.compute_s, **bench.found}
            for label, bench in self._benches.items()
        }
        world = self._world
        by_rank = all_gather_json(self._comm, mine) if world.is_distributed else [mine]
        return {
            "device": world.device,
            "one_host": world.one_host,
            "contestants": {label: [rank[label] for rank in by_rank] for label in mine},
        }


def work_order(plan: Plan) -> list[tuple[Entry, bool]]:
    """All pieces of work of all sets, in order: (entry, whether it is its check)."""
    checks = sorted(plan.entries, key=lambda entry: entry.worker_set)
    return [(entry, True) for entry in checks] + [(entry, False) for entry in plan.turns()]


def owners(plan: Plan) -> list[int]:
    """The set that does each piece of work."""
    return [entry.worker_set for entry, _ in work_order(plan)]


def _named(entry: Entry, *, is_check: bool) -> str:
    return f"{'checking' if is_check else 'measuring'} {entry.label}"
