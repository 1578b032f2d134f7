"""One rank's part in timing steps: its set, its session, checks, turns.

If one launcher of ours starts several sets, their ranks share its store: they use it to take turns
and to collect results. Under torchrun, mpirun or srun, all ranks are one set."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.values import all_gather_json, all_sum
from gradsync.commands.bench.contestants import ALONE, Contestant
from gradsync.commands.bench.entrants import (
    CLIP_NORM,
    BenchSite,
    Blocking,
    Entrant,
    Leaves,
    enter,
    mean_loss,
)
from gradsync.commands.bench.experiment import environment, failed, from_json, raise_failed
from gradsync.commands.bench.host import count
from gradsync.commands.bench.meter import StepClock, Wire
from gradsync.commands.bench.report import Tell, progress_bar, say, silent
from gradsync.commands.bench.sync_plan import (
    CHECK_STEPS,
    CHECKED,
    DECIDING,
    SETTLING,
    BenchPlan,
    Entry,
    duration,
    seconds_of,
)
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.memory import PeakMemory, give_back, keep_freed_memory
from gradsync.runtime.session import Session, SessionOptions
from gradsync.runtime.store import SignedStore, join_store, token_of
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

TOLERANCE = 2e-3  # largest relative difference of a loss, for an exact strategy
_LOSSY_TOLERANCE = 2e-2  # for a strategy that rounds on the wire
_WEIGHTS_TOLERANCE = 1e-6
_FREE = (ALONE, "local_sgd", "diloco", "powersgd")  # no reference losses; they must fall
_SET_PATIENCE = timedelta(days=7)  # sets work as long as they need; if one dies, all end
_RESULT_PATIENCE = timedelta(days=1)
_JOIN_S = 60.0
_FIRST_GENERATION = 1000
_DONE = "done"


class NotTrainingError(RunError):
    """A contestant does not train correctly; raised on all ranks of its set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Results of the check, per rank."""

    losses: list[float]  # each step's mean over ranks
    operations: float  # collectives (a batch of messages is one) in a step
    sent_bytes: float  # by this rank in a step
    memory_bytes: int | None  # peak above the value at the start; None: unknown
    comm_s: float | None  # in collectives, in a step without overlap; None: not visible
    host: dict[str, Any] | None = None  # see host.count


def reference_losses(site: BenchSite, leaves: Leaves) -> tuple[list[float], float]:
    """Losses that every contestant should see, and the last step's seconds; all ranks call it."""
    model = site.model()
    optimizer = site.optimizer(model)
    comm, losses, began = site.comm, [], 0.0
    for _ in range(CHECK_STEPS):
        began = time.perf_counter()  # the first step includes one-time work
        total = torch.zeros((), device=site.device)
        for leaf in leaves:
            with site.autocast():
                loss = mean_loss(model(leaf.inputs), leaf.targets) / len(leaves)
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            assert parameter.grad is not None, "the model uses all its parameters"
            # Whole group, the parameter's shape and dtype; overlaps nothing.
            comm.all_reduce(parameter.grad).wait()
            parameter.grad /= comm.world_size
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(site, total))
    return losses, time.perf_counter() - began


def check(
    contestant: Contestant, site: BenchSite, leaves: Leaves, expected: list[float]
) -> Checked:
    """Run a few steps of `contestant` twice: as it is, when its losses must match the reference
    (without synchronisation it would be fast, and win), and with its communication exposed. Raises
    `NotTrainingError` on all ranks of the set."""
    peak = PeakMemory(on_cuda=site.on_cuda)
    entrant = enter(contestant, site, StepClock(on_cuda=site.on_cuda))
    losses = [_mean(site, entrant.step(leaves)) for _ in range(SETTLING)]
    entrant.wait()
    wire, settled = Wire(entrant.communicators()), CHECK_STEPS - SETTLING
    counted = whole_periods(settled, entrant.period)
    raw = [entrant.step(leaves) for _ in range(counted)]
    entrant.wait()
    operations, sent = wire.read()
    memory = peak.read()
    losses += [_mean(site, loss) for loss in raw[:settled]]
    drift = _drift(entrant.weights(), site)
    host = None
    if site.settings.host:
        tensors = len(list(entrant.model.parameters()))
        host = {"tensors": tensors, **count(partial(entrant.step, leaves))}
    entrant.close()
    del entrant, wire  # memory may hold only one of them
    give_back()
    judge(contestant, losses, expected, drift)
    return Checked(
        losses=losses,
        operations=operations / counted,
        sent_bytes=sent / counted,
        memory_bytes=memory,
        comm_s=None if site.settings.host else _communication(contestant, site, leaves),
        host=host,
    )


def whole_periods(steps: int, period: int) -> int:
    """The smallest multiple of `period` that is at least `steps`."""
    return -(-steps // period) * period


def judge(contestant: Contestant, losses: list[float], expected: list[float], drift: float) -> None:
    """Refuse a contestant that does not train: by its losses, compared with `expected`, and by
    `drift`, the largest relative difference of weights between ranks."""
    label = contestant.label
    if not all(torch.isfinite(torch.tensor(losses))) or not losses[-1] < losses[0]:
        raise NotTrainingError(f"contestant {label} does not train: losses {_shown(losses)}")
    if drift > _WEIGHTS_TOLERANCE:
        raise NotTrainingError(
            f"contestant {label} does not synchronise: after {CHECK_STEPS} steps the ranks' "
            f"weights differ by {drift:.1e}"
        )
    if contestant.name in _FREE:
        return
    lossy = contestant.is_ours and STRATEGIES[contestant.name].promise == "lossy"
    tolerance = _LOSSY_TOLERANCE if lossy else TOLERANCE
    off = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if off > tolerance:
        raise NotTrainingError(
            f"contestant {label} does not train as others do: losses {_shown(losses)}, expected "
            f"{_shown(expected)} (off by {off:.1e}, {tolerance:.0e} is allowed)"
        )


def _communication(contestant: Contestant, site: BenchSite, leaves: Leaves) -> float | None:
    """Time in collectives in a step without overlap, on this rank, seconds."""
    if contestant.name == ALONE or not site.world.is_distributed:
        return 0.0
    blocking = Blocking(site.comm)
    entrant = enter(contestant, site, StepClock(on_cuda=site.on_cuda), blocking=blocking)
    try:
        if not entrant.knows_communication:
            return None
        entrant.step(leaves)
        blocking.seconds = 0.0
        steps = whole_periods(CHECK_STEPS, entrant.period)
        for _ in range(steps):
            entrant.step(leaves)
        return blocking.seconds / steps
    finally:
        entrant.close()


def _mean(site: BenchSite, loss: Tensor) -> float:
    """Mean over all ranks, which have equally many targets."""
    (total,) = all_sum(site.comm, float(loss))
    return total / site.world.world_size


def _drift(weights: list[Tensor] | None, site: BenchSite) -> float:
    """Largest relative difference between any parameter's checksum and its mean over ranks."""
    if weights is None:
        return 0.0
    sums = torch.stack([weight.double().abs().sum() for weight in weights]).cpu()
    mean = sums.clone()
    # Whole group, float64 [parameters]; overlaps nothing.
    site.comm.all_reduce(mean).wait()
    mean /= site.world.world_size
    off: Any = ((sums - mean).abs() / mean.abs().clamp_min(1e-30)).max().reshape(1)
    site.comm.all_reduce(off, "max").wait()
    return float(off)


def _shown(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


@dataclass(slots=True)
class _Bench:
    """An entry of this set, ready for its turns."""

    leaves: Leaves
    clock: StepClock
    entrant: Entrant | None = None
    step_s: list[list[float]] = field(default_factory=list)  # per round and step, seconds
    compute_s: list[list[float]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)  # by the check


class Runner:
    """This rank's part in a plan of all sets; `mine` is this rank's set. All sets share `store`,
    None for one set. `tell` is called before each piece of work, `say` for other progress."""

    def __init__(
        self,
        plan: BenchPlan,
        mine: int,
        world: World,
        store: Any,
        tell: Tell,
        *,
        say: Callable[[str], None] = silent,
    ) -> None:
        self._plan, self._mine, self._world = plan, mine, world
        self._tell, self._say = tell, say
        # Checks first, set after set; then the turns.
        checks = sorted(plan.entries, key=lambda entry: entry.worker_set)
        self._order = [(entry, True) for entry in checks]
        self._order += [(entry, False) for entry in plan.turns()]
        self._baton = Baton(store, mine, [entry.worker_set for entry, _ in self._order])
        self._place = 0  # index of the current work, in the order of all sets
        self._site = BenchSite(settings=plan.settings, world=world)
        self._benches: dict[str, _Bench] = {}
        self._expected: dict[int, list[float]] = {}

    def run(self) -> dict[str, Any]:
        """Do all work of this set. Returns the same result on each of its ranks, nothing if another
        set gave up. Raises `NotTrainingError` or `ConfigError` on all ranks of the set."""
        world = self._world
        before = environment(world_size=world.world_size, threads=self._plan.settings.threads)
        for place, (entry, is_check) in enumerate(self._order):
            self._place = place
            verb = "checking" if is_check else "measuring"
            self._tell(place, len(self._order), f"{verb} {entry.label}")
            if place == len(self._plan.entries):
                self._say(CHECKED)
            if entry.worker_set != self._mine:
                continue
            if not self._baton.take(place):
                return {}
            if is_check:
                self._check(entry)
            else:
                self._turn(entry)
            self._site.comm.barrier()
            if world.is_main:
                self._baton.hand_on(place)
        self._tell(len(self._order), len(self._order), "")
        mine = {}
        for label, bench in self._benches.items():
            if bench.entrant is not None:
                bench.entrant.close()
            mine[label] = {"step_s": bench.step_s, "compute_s": bench.compute_s, **bench.found}
        by_rank = all_gather_json(self._site.comm, mine) if world.is_distributed else [mine]
        return {
            "environment": before,
            "device": world.device_name,
            "contestants": {label: [rank[label] for rank in by_rank] for label in mine},
        }

    def give_up(self) -> None:
        """This set cannot go on: make the others stop waiting."""
        if self._world.is_main:
            self._baton.give_up(self._place)

    def _check(self, entry: Entry) -> None:
        """Check that the contestant trains."""
        site = self._site
        bench = _Bench(site.leaves(entry.batch_size), StepClock(on_cuda=site.on_cuda))
        self._benches[entry.label] = bench
        if entry.batch_size not in self._expected:
            self._expected[entry.batch_size], step_s = reference_losses(site, bench.leaves)
            if self._place == 0:
                self._say(f"all of it takes about {duration(seconds_of(self._plan, step_s))}")
        expected = self._expected[entry.batch_size]
        bench.found = asdict(check(entry.contestant, site, bench.leaves, expected))
        give_back()

    def _built(self, entry: Entry) -> Entrant:
        """The contestant, after the first steps in which it allocates and decides."""
        bench = self._benches[entry.label]
        entrant = enter(entry.contestant, self._site, bench.clock)
        for _ in range(DECIDING):
            entrant.step(bench.leaves)
        entrant.wait()
        return entrant

    def _turn(self, entry: Entry) -> None:
        """Run the warm-up steps, then the measured steps."""
        settings, bench = self._plan.settings, self._benches[entry.label]
        entrant = bench.entrant or self._built(entry)  # in the steady state
        bench.entrant = entrant if settings.side_by_side else None
        self._site.comm.barrier()  # not later: it would wait for pending sends of the warm-up
        for _ in range(settings.num_warmup):
            entrant.step(bench.leaves)
        bench.clock.begin()
        for _ in range(settings.num_steps):
            entrant.backward(bench.leaves)
            bench.clock.backward_done()
            entrant.update()
            bench.clock.step_done()
        step_s, compute_s = bench.clock.read()
        entrant.wait()  # the first step has done the pending work of the warm-up
        bench.step_s.append(step_s)
        bench.compute_s.append(compute_s)
        if bench.entrant is None:
            entrant.close()
            del entrant
            give_back()


def my_set(env: Mapping[str, str], sizes: Sequence[int]) -> tuple[int, dict[str, str]]:
    """This rank's set of `sizes`, by torchrun's variables, and the variables that describe it."""
    rank = int(env["RANK"])
    index = 0
    while rank >= sizes[index]:
        rank -= sizes[index]
        index += 1
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    world = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    # All use one rendezvous store: its keys begin with the restart count.
    generation = {"TORCHELASTIC_RESTART_COUNT": str(_FIRST_GENERATION + index)}
    return index, ranks | dict.fromkeys(world, str(sizes[index])) | generation


class Baton:
    """Lets one set work at a time, by a store that all sets share. The others block in a socket
    read. `owners` lists, for each piece of work in order, the set that does it."""

    def __init__(self, store: SignedStore | None, mine: int, owners: Sequence[int]) -> None:
        self._store, self._mine, self._owners = store, mine, owners

    def take(self, place: int) -> bool:
        """Wait until this set's work at `place` may begin; False: another set gave up."""
        if self._store is None or place == 0 or self._owners[place - 1] == self._mine:
            return True
        key = f"bench/turn/{place - 1}"
        return self._store.wait(key, _SET_PATIENCE) == _DONE.encode()

    def hand_on(self, place: int) -> None:
        """The work at `place` is done on the whole set; one rank calls this."""
        more = place + 1 < len(self._owners)
        if self._store is not None and more and self._owners[place + 1] != self._mine:
            self._store.set(f"bench/turn/{place}", _DONE)

    def give_up(self, place: int) -> None:
        """No work may follow from `place` on; one rank tells the waiting sets."""
        for later in range(place, len(self._owners)):
            if self._store is not None and self._owners[later] == self._mine:
                self._store.set(f"bench/turn/{later}", "gave up")


def measure(plan_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a plan. Rank 0 of all returns the sets' `results`, or raises the error
    that stopped any of them; ignore what other ranks return."""
    plan = from_json(BenchPlan, plan_json)
    env = environ.snapshot()
    mine, variables = 0, dict[str, str]()
    store: SignedStore | None = None
    if len(plan.sets) > 1:
        mine, variables = my_set(env, plan.world_sizes)
        store = _shared_store(env)
    with environ.exported(variables):
        outcome, is_main = _work(plan, mine, store, is_first=env.get("RANK", "0") == "0")
    if store is not None and is_main and mine:
        store.set(f"outcome/{mine}", json.dumps(outcome))
    if mine or not is_main:
        return {}
    outcomes = [outcome]
    for other in range(1, len(plan.sets)):
        assert store is not None
        outcomes.append(json.loads(store.wait(f"outcome/{other}", _RESULT_PATIENCE)))
    for each in outcomes:
        raise_failed(each)
    return {"results": outcomes}


def _work(plan: BenchPlan, mine: int, store: Any, *, is_first: bool) -> tuple[dict[str, Any], bool]:
    """The set's measurements, or why it gave up; and whether this is its rank 0."""
    settings = plan.settings
    keep = plan.sets[mine].keep_memory
    with quiet_session(settings.device, settings.threads, keep_memory=keep) as (world, keeps):
        tell, speak = (progress_bar(), say) if is_first else (silent, silent)
        runner = Runner(plan, mine, world, store, tell, say=speak)
        try:
            return {"keeps_memory": keeps, **runner.run()}, world.is_main
        except (ConfigError, NotTrainingError) as error:  # the same on all ranks of the set
            runner.give_up()
            return failed(error), world.is_main
        finally:
            _forget_accelerate()


@contextmanager
def quiet_session(device: str, threads: int, *, keep_memory: bool) -> Generator[tuple[World, bool]]:
    """A session for measuring ranks; also yields whether this process does keep freed memory."""
    # Messages of other libraries do not belong in the table.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    keeps = keep_memory and keep_freed_memory()
    with Session(SessionOptions(device=device, threads=threads)) as world:
        yield world, keeps


def _shared_store(env: Mapping[str, str]) -> SignedStore:
    """The store of the launcher that started all sets."""
    store = join_store(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        rank=int(env["RANK"]),
        deadline_s=time.monotonic() + _JOIN_S,
    )
    return SignedStore(dist.PrefixStore("gradsync-bench", store), token_of(env), "bench")


def _forget_accelerate() -> None:
    """Accelerate keeps its view of the process group for the life of the process; clear it so that
    the group can be destroyed."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
