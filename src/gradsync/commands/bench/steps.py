"""One rank's part in timing steps: its set, its session, checks, turns.

If one launcher of ours starts several sets, their ranks share its store: they use it to take turns
and to collect results. Under torchrun, mpirun or srun, all ranks are one set."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gradsync.comm.values import all_gather_json, all_sum
from gradsync.commands.bench.entrants import BenchSite, Entrant, Reference, enter
from gradsync.commands.bench.experiment import environment, say, show_progress
from gradsync.commands.bench.meter import Wire, host_cost
from gradsync.commands.bench.sync_plan import ALONE, CHECKED, BenchPlan, Contestant
from gradsync.errors import RunError
from gradsync.runtime import environ
from gradsync.runtime.machine import keep_freed_memory
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.runtime.store import SignedStore, join_store, token_of
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

TOLERANCE = 2e-3  # largest relative difference of a loss, for an exact strategy
_LOSSY_TOLERANCE = 2e-2  # for a strategy that rounds on the wire
_FREE = (ALONE, "local_sgd", "diloco", "powersgd")  # no reference losses; they must fall
_CHECK_STEPS = 4  # optimizer steps of each contestant's check
_SETTLING = 2  # the first of them, which build buckets (DDP) or state (late updates)
_DECIDING = 5  # steps until overlap_publish=auto has chosen, plus one
_PATIENCE = timedelta(days=7)  # sets work as long as they need; if one dies, all end
_JOIN_S = 60.0
_FIRST_GENERATION = 1000
_CLEAR = Path("/proc/self/clear_refs")


def reference_losses(site: BenchSite, batch_size: int) -> list[float]:
    """Losses that every contestant should see; all ranks call it."""
    reference = Reference(Contestant(label=ALONE, name=ALONE, batch_size=batch_size), site)
    return [_mean(site, reference.step()) for _ in range(_CHECK_STEPS)]


def check(contestant: Contestant, site: BenchSite, expected: list[float]) -> dict[str, Any]:
    """Run a few steps of `contestant`, whose losses must match the reference: without
    synchronisation it would be fast, and win. Returns what does not depend on time."""
    peak = PeakMemory(on_cuda=site.on_cuda)
    entrant = enter(contestant, site)
    losses = [_mean(site, entrant.step()) for _ in range(_SETTLING)]
    entrant.wait()
    wire, settled = Wire(entrant.communicator()), _CHECK_STEPS - _SETTLING
    counted = max(settled, entrant.period)
    raw = [entrant.step() for _ in range(counted)]
    entrant.wait()
    operations, sent = wire.read()
    found: dict[str, Any] = {
        "losses": losses + [_mean(site, loss) for loss in raw[:settled]],  # means over ranks
        "operations": operations / counted,  # a step's; a batch of messages is one
        "sent_bytes": sent / counted,  # by this rank in a step
        "memory_bytes": peak.read(),  # peak above the value at the start; None: unknown
    }
    if site.settings.host:
        found |= {"tensors": len(list(entrant.model.parameters())), **host_cost(entrant.step)}
    entrant.close()
    judge(contestant, found["losses"], expected)
    return found


def judge(contestant: Contestant, losses: list[float], expected: list[float]) -> None:
    """RunError, on all ranks of the set, for a contestant that does not train."""
    name, off, tolerance = contestant.name, 0.0, TOLERANCE
    if name not in _FREE:
        off = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if name in STRATEGIES and STRATEGIES[name].promise == "lossy":
        tolerance = _LOSSY_TOLERANCE
    if not (losses[-1] < losses[0] and off <= tolerance):
        found, wanted = (", ".join(f"{loss:.4f}" for loss in each) for each in (losses, expected))
        raise RunError(
            f"contestant {contestant.label} does not train as others do: losses {found}, theirs "
            f"{wanted} (off by {off:.1e}, {tolerance:.0e} is allowed)"
        )


def _mean(site: BenchSite, loss: torch.Tensor) -> float:
    """Mean over all ranks, which have equally many targets."""
    (total,) = all_sum(site.comm, float(loss))
    return total / site.world.world_size


def run_plan(plan: BenchPlan, world: World, store: SignedStore | None = None) -> dict[str, Any]:
    """This rank's part in a plan: checks, then turns; returns its set's samples. Ranks of another
    set wait for each piece of work by a `store` that all sets share, in a socket read."""
    site = BenchSite(settings=plan.settings, world=world)
    before = environment(world_size=world.world_size, threads=plan.settings.threads)
    talks = world.is_main and world.world_size == plan.world_sizes[0]
    kept: dict[str, Entrant] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: dict[int, list[float]] = {}  # reference losses by batch size
    checks = len(plan.contestants)
    order = [*plan.contestants, *plan.turns()]
    for place, each in enumerate(order):
        if talks and place == checks:
            say(CHECKED)
        if talks:
            what = "checking" if place < checks else "measuring"
            show_progress(place, len(order), f"{what} {each.label}")
        if each.world_size != world.world_size:
            assert store is not None, "there are several sets"
            store.wait(f"bench/work/{place}", _PATIENCE)
            continue
        if place < checks:
            if each.batch_size not in expected:
                expected[each.batch_size] = reference_losses(site, each.batch_size)
            measured = check(each, site, expected[each.batch_size])
            give_back()
            found[each.label] = {"step_s": [], "compute_s": [], **measured}
        else:
            entrant = kept.pop(each.label, None) or _settled(each, site)
            step_s, compute_s = take_turn(entrant)
            found[each.label]["step_s"].append(step_s)  # per round and step, seconds
            found[each.label]["compute_s"].append(compute_s)
            if plan.settings.side_by_side:
                kept[each.label] = entrant
            else:
                entrant.close()
                del entrant
                give_back()
        site.comm.barrier()
        if store is not None and world.is_main:
            store.set(f"bench/work/{place}", "done")
    for entrant in kept.values():
        entrant.close()
    by_rank = all_gather_json(site.comm, found) if world.is_distributed else [found]
    return {
        "environment": before,
        "device": world.device_name,
        "contestants": {label: [rank[label] for rank in by_rank] for label in found},
    }


def _settled(contestant: Contestant, site: BenchSite) -> Entrant:
    """Built anew, it first allocates and decides."""
    entrant = enter(contestant, site)
    for _ in range(_DECIDING):
        entrant.step()
    entrant.wait()
    return entrant


def take_turn(entrant: Entrant) -> tuple[list[float], list[float]]:
    """Run the warm-up steps, then the measured steps, see `StepClock.read`."""
    settings, clock = entrant.site.settings, entrant.clock
    entrant.site.comm.barrier()  # not later: it would wait for pending sends of the warm-up
    for _ in range(settings.num_warmup):
        entrant.step()
    clock.begin()
    for _ in range(settings.num_steps):
        entrant.backward()
        clock.backward_done()
        entrant.update()
        clock.step_done()
    seconds = clock.read()
    entrant.wait()  # the first step has done the pending work of the warm-up
    return seconds


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
    plan = msgspec.convert(plan_json, BenchPlan)
    env, settings = environ.snapshot(), plan.settings
    mine, variables, store = 0, dict[str, str](), None
    if len(plan.world_sizes) > 1:  # ranks of one launcher of ours, whose store they share
        mine, variables = my_set(env, plan.world_sizes)
        joined = join_store(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            rank=int(env["RANK"]),
            deadline_s=time.monotonic() + _JOIN_S,
        )
        prefixed = dist.PrefixStore("gradsync-bench", joined)
        store = SignedStore(prefixed, token_of(env), "bench")
    with environ.exported(variables), quiet_session(settings.device, settings.threads) as world:
        results = [run_plan(plan, world, store)]
        is_main = world.is_main
    if store is not None and mine and is_main:
        store.set(f"outcome/{mine}", json.dumps(results[0]))
    if mine or not is_main:
        return {}
    for other in range(1, len(plan.world_sizes)):
        assert store is not None, "there are several sets"
        results.append(json.loads(store.wait(f"outcome/{other}", _PATIENCE)))
    return {"results": results}


@contextmanager
def quiet_session(device: str, threads: int) -> Generator[World]:
    """A session for measuring ranks, which keep freed memory."""
    # Messages of other libraries do not belong in the table.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    keep_freed_memory()
    with Session(SessionOptions(device=device, threads=threads)) as world:
        yield world


class PeakMemory:
    """Peak of this process's resident memory, shared pages too, or of its CUDA device's, from here
    until `read`."""

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._before = 0
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        give_back()
        if _CLEAR.exists():
            _CLEAR.write_text("5")  # resets the kernel's peak resident size (proc(5))
            self._before = _status_bytes("VmRSS")

    def read(self) -> int | None:
        """Bytes above the size at the start; None if the system does not report it."""
        if self._on_cuda:
            return torch.cuda.max_memory_allocated() - self._before
        return max(_status_bytes("VmHWM") - self._before, 0) if self._before else None


def _status_bytes(name: str) -> int:
    """A size of this process by its name in proc(5)'s `status`, such as "VmRSS"; 0 if the system
    does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else ()
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def give_back() -> None:
    """Return freed memory to the system, even with `keep_freed_memory` (glibc)."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
