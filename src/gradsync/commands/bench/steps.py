"""One rank's part in timing steps: its set, its session, checks, turns.

If one launcher of ours starts several sets, their ranks share its store: they use it to take turns
and to collect results. Under torchrun, mpirun or srun, all ranks are one set."""

from __future__ import annotations

import json
import logging
import math
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
    Entrant,
    MicroBatches,
    enter,
    mean_loss,
)
from gradsync.commands.bench.experiment import environment, from_json
from gradsync.commands.bench.host import count
from gradsync.commands.bench.meter import StepClock, Wire
from gradsync.commands.bench.report import Tell, say, show_progress, silent
from gradsync.commands.bench.sync_plan import CHECKED, BenchPlan, Entry
from gradsync.errors import RunError
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
_CHECK_STEPS = 4  # optimizer steps of each contestant's check
_SETTLING = 2  # the first of them, which build buckets (DDP) or state (late updates)
_DECIDING = 5  # steps until overlap_publish=auto has chosen, plus one
_PATIENCE = timedelta(days=7)  # sets work as long as they need; if one dies, all end
_JOIN_S = 60.0
_FIRST_GENERATION = 1000


class NotTrainingError(RunError):
    """A contestant does not train correctly; raised on all ranks of its set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Results of the check, per rank."""

    losses: list[float]  # each step's mean over ranks
    operations: float  # collectives (a batch of messages is one) in a step
    sent_bytes: float  # by this rank in a step
    memory_bytes: int | None  # peak above the value at the start; None: unknown
    comm_s: float | None  # in collectives, in a step without overlap; None: not timed
    host: dict[str, Any] | None = None  # see host.count


def reference_losses(site: BenchSite, micro_batches: MicroBatches) -> list[float]:
    """Losses that every contestant should see; all ranks call it."""
    model = site.model()
    optimizer = site.optimizer(model)
    comm, losses = site.comm, []
    for _ in range(_CHECK_STEPS):
        total = torch.zeros((), device=site.device)
        for each in micro_batches:
            with site.autocast():
                loss = mean_loss(model(each.inputs), each.targets) / len(micro_batches)
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
    return losses


def check(
    contestant: Contestant, site: BenchSite, micro_batches: MicroBatches, expected: list[float]
) -> Checked:
    """Run a few steps of `contestant` twice: as it is, when its losses must match the reference
    (without synchronisation it would be fast, and win), and with its communication exposed. Raises
    `NotTrainingError` on all ranks of the set."""
    peak = PeakMemory(on_cuda=site.on_cuda)
    entrant = enter(contestant, site, StepClock(on_cuda=site.on_cuda))
    losses = [_mean(site, entrant.step(micro_batches)) for _ in range(_SETTLING)]
    entrant.wait()
    wire, settled = Wire(entrant.communicators()), _CHECK_STEPS - _SETTLING
    counted = entrant.whole_periods(settled)
    raw = [entrant.step(micro_batches) for _ in range(counted)]
    entrant.wait()
    operations, sent = wire.read()
    memory = peak.read()
    losses += [_mean(site, loss) for loss in raw[:settled]]
    drift = _drift(entrant.weights(), site)
    host = None
    if site.settings.host:
        tensors = len(list(entrant.model.parameters()))
        host = {"tensors": tensors, **count(partial(entrant.step, micro_batches))}
    entrant.close()
    del entrant, wire  # memory may hold only one of them
    give_back()
    judge(contestant, losses, expected, drift)
    return Checked(
        losses=losses,
        operations=operations / counted,
        sent_bytes=sent / counted,
        memory_bytes=memory,
        comm_s=None if site.settings.host else _communication(contestant, site, micro_batches),
        host=host,
    )


def judge(contestant: Contestant, losses: list[float], expected: list[float], drift: float) -> None:
    """Refuse a contestant that does not train: by its losses, compared with `expected`, and by
    `drift`, the largest relative difference of weights between ranks."""

    def shown(losses: list[float]) -> str:
        return ", ".join(f"{loss:.4f}" for loss in losses)

    label = contestant.label
    if not all(map(math.isfinite, losses)) or not losses[-1] < losses[0]:
        raise NotTrainingError(f"contestant {label} does not train: losses {shown(losses)}")
    if drift > _WEIGHTS_TOLERANCE:
        raise NotTrainingError(
            f"contestant {label} does not synchronise: after {_CHECK_STEPS} steps the ranks' "
            f"weights differ by {drift:.1e}"
        )
    if contestant.name in _FREE:
        return
    lossy = contestant.is_ours and STRATEGIES[contestant.name].promise == "lossy"
    tolerance = _LOSSY_TOLERANCE if lossy else TOLERANCE
    off = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if off > tolerance:
        raise NotTrainingError(
            f"contestant {label} does not train as others do: losses {shown(losses)}, expected "
            f"{shown(expected)} (off by {off:.1e}, {tolerance:.0e} is allowed)"
        )


def _communication(
    contestant: Contestant, site: BenchSite, micro_batches: MicroBatches
) -> float | None:
    """Time in collectives in a step without overlap, on this rank, seconds."""
    if contestant.name == ALONE or not site.world.is_distributed:
        return 0.0
    if not contestant.is_ours:
        return None
    entrant = enter(contestant, site, StepClock(on_cuda=site.on_cuda), exposed=True)
    try:
        entrant.step(micro_batches)
        settled_s = entrant.exposed_s
        if settled_s is None:
            return None
        steps = entrant.whole_periods(_CHECK_STEPS)
        for _ in range(steps):
            entrant.step(micro_batches)
        return ((entrant.exposed_s or 0.0) - settled_s) / steps
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


@dataclass(slots=True)
class _Bench:
    """An entry of this set, ready for its turns."""

    micro_batches: MicroBatches
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
        store: SignedStore | None,
        tell: Tell,
        *,
        say: Callable[[str], None] = silent,
    ) -> None:
        self._plan, self._mine, self._world = plan, mine, world
        self._tell, self._say = tell, say
        # Checks first, set after set; then the turns.
        checks = sorted(plan.entries, key=lambda entry: entry.worker_set)
        self._order = [*checks, *plan.turns()]
        self._baton = Baton(store, mine, [entry.worker_set for entry in self._order])
        self._site = BenchSite(settings=plan.settings, world=world)
        self._benches: dict[str, _Bench] = {}
        self._expected: dict[int, list[float]] = {}

    def run(self) -> dict[str, Any]:
        """Do all work of this set. Returns the same result on each of its ranks. Raises
        `NotTrainingError` or `ConfigError` on all ranks of the set."""
        world, order = self._world, self._order
        before = environment(world_size=world.world_size, threads=self._plan.settings.threads)
        for place, entry in enumerate(order):
            is_check = place < len(self._plan.entries)
            self._tell(
                place, len(order), f"{'checking' if is_check else 'measuring'} {entry.label}"
            )
            if place == len(self._plan.entries):
                self._say(CHECKED)
            if entry.worker_set != self._mine:
                continue
            self._baton.take(place)
            if is_check:
                self._check(entry)
            else:
                self._turn(entry)
            self._site.comm.barrier()
            if world.is_main:
                self._baton.hand_on(place)
        self._tell(len(order), len(order), "")
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

    def _check(self, entry: Entry) -> None:
        """Check that the contestant trains."""
        site, size = self._site, entry.batch_size
        bench = _Bench(site.micro_batches(size), StepClock(on_cuda=site.on_cuda))
        self._benches[entry.label] = bench
        if size not in self._expected:
            self._expected[size] = reference_losses(site, bench.micro_batches)
        found = check(entry.contestant, site, bench.micro_batches, self._expected[size])
        bench.found = asdict(found)
        give_back()

    def _turn(self, entry: Entry) -> None:
        """Run the warm-up steps, then the measured steps."""
        settings, bench = self._plan.settings, self._benches[entry.label]
        entrant = bench.entrant
        if entrant is None:  # built anew, it first allocates and decides
            entrant = enter(entry.contestant, self._site, bench.clock)
            for _ in range(_DECIDING):
                entrant.step(bench.micro_batches)
            entrant.wait()
        bench.entrant = entrant if settings.side_by_side else None
        self._site.comm.barrier()  # not later: it would wait for pending sends of the warm-up
        for _ in range(settings.num_warmup):
            entrant.step(bench.micro_batches)
        bench.clock.begin()
        for _ in range(settings.num_steps):
            entrant.backward(bench.micro_batches)
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


class Baton:
    """Lets one set work at a time, by a store that all sets share. The others block in a socket
    read. `owners` lists, for each piece of work in order, the set that does it."""

    def __init__(self, store: SignedStore | None, mine: int, owners: Sequence[int]) -> None:
        self._store, self._mine, self._owners = store, mine, owners

    def take(self, place: int) -> None:
        """Wait until this set's work at `place` may begin."""
        if self._store is not None and place and self._owners[place - 1] != self._mine:
            self._store.wait(f"bench/turn/{place - 1}", _PATIENCE)

    def hand_on(self, place: int) -> None:
        """The work at `place` is done on the whole set; one rank calls this."""
        more = place + 1 < len(self._owners)
        if self._store is not None and more and self._owners[place + 1] != self._mine:
            self._store.set(f"bench/turn/{place}", "done")


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


def measure(plan_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a plan. Rank 0 of all returns the sets' `results`; ignore what other
    ranks return."""
    plan = from_json(BenchPlan, plan_json)
    env, settings = environ.snapshot(), plan.settings
    mine, variables, store = 0, dict[str, str](), None
    if len(plan.sets) > 1:  # ranks of one launcher of ours, whose store they share
        mine, variables = my_set(env, plan.world_sizes)
        joined = join_store(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            rank=int(env["RANK"]),
            deadline_s=time.monotonic() + _JOIN_S,
        )
        prefixed = dist.PrefixStore("gradsync-bench", joined)
        store = SignedStore(prefixed, token_of(env), "bench")
    keep = plan.sets[mine].keep_memory
    with (
        environ.exported(variables),
        quiet_session(settings.device, settings.threads, keep_memory=keep) as (world, keeps),
    ):
        tell, speak = (show_progress, say) if world.is_main and not mine else (silent, silent)
        try:
            found = Runner(plan, mine, world, store, tell, say=speak).run()
        finally:
            _forget_accelerate()
        is_main = world.is_main
    result = {"keeps_memory": keeps, **found}
    if store is not None and mine and is_main:
        store.set(f"outcome/{mine}", json.dumps(result))
    if mine or not is_main:
        return {}
    results = [result]
    for other in range(1, len(plan.sets)):
        assert store is not None
        results.append(json.loads(store.wait(f"outcome/{other}", _PATIENCE)))
    return {"results": results}


@contextmanager
def quiet_session(device: str, threads: int, *, keep_memory: bool) -> Generator[tuple[World, bool]]:
    """A session for measuring ranks; also yields whether this process does keep freed memory."""
    # Messages of other libraries do not belong in the table.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    keeps = keep_memory and keep_freed_memory()
    with Session(SessionOptions(device=device, threads=threads)) as world:
        yield world, keeps


def _forget_accelerate() -> None:
    """Accelerate keeps its view of the process group for the life of the process; clear it so that
    the group can be destroyed."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
