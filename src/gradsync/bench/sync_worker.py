"""One rank of `bench sync` and `bench scaling`: its set, its session, its part of the work.

Started by one launcher of ours, ranks of several sets share that launcher's store: by it they pass
on the baton and their results. Started by torchrun, mpirun or srun, all ranks are one set.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from gradsync.bench.sync_check import NotTrainingError
from gradsync.bench.sync_plan import Plan, plan_from_json
from gradsync.bench.sync_run import Runner, owners
from gradsync.bench.sync_sets import Baton, my_set
from gradsync.errors import ConfigError, GradsyncError, RunError
from gradsync.runtime import environ
from gradsync.runtime.memory import keep_freed_memory
from gradsync.runtime.session import Session, SessionOptions
from gradsync.runtime.store import join_store

_JOIN_S = 60.0
_PATIENCE = timedelta(days=1)
_BAR = 24


def measure(plan_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a plan. Rank 0 of all returns what every set measured, as `results`;
    other ranks return nothing that counts.

    Raises:
        GradsyncError: on rank 0 of all, what stopped any set; elsewhere only what happened to one
            rank alone.
    """
    plan = plan_from_json(plan_json)
    env = environ.snapshot()
    if len(plan.sets) == 1:
        mine, variables = 0, dict[str, str]()
    else:
        mine, variables = my_set(env, [each.world_size for each in plan.sets])
    store: Any = _shared_store(env) if variables else None
    baton = Baton(store, mine, owners(plan))
    is_first = env.get("RANK", "0") == "0"
    with environ.exported(variables):
        outcome, is_main = _work(plan, mine, baton, is_first=is_first)
    if store is not None and is_main and mine:
        store.set(f"outcome/{mine}", json.dumps(outcome))
    if mine or not is_main:
        return {}
    outcomes = [outcome]
    for other in range(1, len(plan.sets)):
        store.wait([f"outcome/{other}"], _PATIENCE)
        outcomes.append(json.loads(store.get(f"outcome/{other}")))
    return {"results": _checked(outcomes)}


def _work(plan: Plan, mine: int, baton: Baton, *, is_first: bool) -> tuple[dict[str, Any], bool]:
    """What the set measured, or why it gave up; and whether this is its rank 0."""
    # What other libraries have to say about themselves is no part of the table.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    settings = plan.settings
    keeps = plan.sets[mine].keep_memory and keep_freed_memory()
    session = Session(SessionOptions(device=settings.device, threads=settings.threads))
    with session as world, ExitStack() as stack:
        stack.callback(_forget_accelerate)
        tell, say = (progress_bar(), _say) if is_first else (silent, silent)
        runner = Runner(plan, mine, world, baton, tell, say=say)
        try:
            result = {"keeps_memory": keeps, **runner.run()}
        except (ConfigError, NotTrainingError) as error:  # the same on all ranks of the set
            if world.is_main:
                baton.give_up(runner.place)
            result = {"failed": str(error), "exit_code": error.exit_code}
        return result, world.is_main


def _checked(outcomes: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """The results, if there is one of each set."""
    for outcome in outcomes:
        if "failed" in outcome:
            kind: type[GradsyncError] = ConfigError if outcome["exit_code"] == 2 else RunError
            raise kind(outcome["failed"])
    return list(outcomes)


def _shared_store(env: Mapping[str, str]) -> Any:
    """The store of the launcher that started all sets."""
    import torch.distributed as dist

    store = join_store(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        rank=int(env["RANK"]),
        deadline_s=time.monotonic() + _JOIN_S,
    )
    return dist.PrefixStore("gradsync-bench", store)


def _forget_accelerate() -> None:
    """Accelerate keeps its view of the process group for the life of the process; the group must
    be able to go."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def progress_bar() -> Callable[[int, int, str], None]:
    """Draw how far it is, on a terminal: a line of text, no thread that would disturb."""
    if not sys.stderr.isatty():
        return silent

    def draw(place: int, count: int, what: str) -> None:
        full = _BAR * place // count
        bar = "━" * full + "╌" * (_BAR - full)
        text = f"{bar} {place}/{count} {what}" if place < count else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    return draw


def _say(text: str) -> None:
    """A line above the bar."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}gradsync: {text}", file=sys.stderr, flush=True)


def silent(*_: object) -> None:
    """Nobody looks."""
