"""One rank of `gradsync tune`: all stages in one session.

Every rank has every rank's samples, and so comes to the same decisions by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gradsync.bench.contestant import ALONE, with_ideals
from gradsync.bench.record import failed, from_json
from gradsync.bench.report import Tell, progress_bar, silent
from gradsync.bench.sync_check import NotTrainingError
from gradsync.bench.sync_plan import sync_plan
from gradsync.bench.sync_result import Row, rows_of, turns
from gradsync.bench.sync_run import Runner, quiet_session
from gradsync.bench.tune import (
    Decision,
    Stage,
    TuneRequest,
    again,
    bucket_stage,
    compile_stage,
    decide,
    first_bucket_stage,
    strategy_stage,
)
from gradsync.errors import ConfigError
from gradsync.train.tuned import Choice
from gradsync.world import World

_SOME_MESSAGES = 0.01
"""Part of the bytes of the contestant that sends most."""


def measure(request_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part; the same on all ranks.

    Returns:
        `choice`, `stages` (each with `name`, `skipped`, `rows`, `decision`), `device`, `num_nodes`,
        `environment` and `samples` (of each stage that was measured); or `failed` and `exit_code`,
        when a candidate does not train, or its options do not go together.

    Raises:
        GradsyncError: what else stopped it.
    """
    request = from_json(TuneRequest, request_json)
    settings = request.settings
    session = quiet_session(settings.device, settings.threads, keep_memory=request.keep_memory)
    with session as (world, keeps):
        tell = progress_bar() if world.is_main else silent
        try:
            return Tuner(request, world, tell, keeps_memory=keeps).run()
        except (ConfigError, NotTrainingError) as error:  # the same on all ranks
            return failed(error)


class Tuner:
    """The stages, one after the other.

    Args:
        request: what to tune.
        world: of the session.
        tell: called before each piece of work.
        keeps_memory: whether this process does keep freed memory.
    """

    def __init__(
        self, request: TuneRequest, world: World, tell: Tell, *, keeps_memory: bool
    ) -> None:
        self._keeps_memory = keeps_memory
        self._request, self._world, self._tell = request, world, tell
        self._environment: Mapping[str, Any] = {}
        self._samples: dict[str, Any] = {}
        self._stages: list[dict[str, Any]] = []
        self._has_messages = True

    def run(self) -> dict[str, Any]:
        """See `measure`."""
        request = self._request
        size = 4 * request.settings.config.num_params()  # fp32, as the weights are
        choice = self._ask(strategy_stage(request, self._world), Choice())
        for stage_of in (bucket_stage, first_bucket_stage):
            stage = stage_of(choice, has_messages=self._has_messages, gradient_bytes=size)
            choice = self._ask(stage, choice)
        choice = self._ask(compile_stage(choice, wanted=request.compile), choice)
        return {
            "choice": asdict(choice),
            "stages": self._stages,
            "device": self._world.device,
            "num_nodes": self._world.num_nodes,
            "environment": self._environment,
            "samples": self._samples,
        }

    def _ask(self, stage: Stage, before: Choice) -> Choice:
        """The answer to one question: one of the stage's candidates."""
        if stage.skipped:
            self._stages.append({"name": stage.name, "skipped": stage.skipped})
            return before
        request = self._request
        plan = sync_plan(
            request.settings,
            with_ideals(stage.contestants(keep_memory=request.keep_memory), same_allocator=False),
            world_size=self._world.world_size,
            batch_size=request.batch_size,
        )
        result = Runner(plan, 0, self._world, None, self._tell).run()
        rows = rows_of(plan, [{"keeps_memory": self._keeps_memory, **result}])
        decision = decision_of(stage, result["contestants"])
        self._environment = self._environment or result["environment"]
        self._samples[stage.name] = result["contestants"]
        self._stages.append(
            {
                "name": stage.name,
                "rows": [row.as_json() for row in rows],
                "decision": asdict(decision),
            }
        )
        winner = next(each for each in stage.candidates if each.text == decision.winner)
        if stage.name == "strategy":
            self._has_messages = has_messages(rows, winner.text)
        return winner


def decision_of(stage: Stage, found: Mapping[str, Any]) -> Decision:
    """The decision that the samples of a stage lead to.

    Args:
        stage: the question.
        found: by label, each rank's samples.
    """
    name, *others = (choice.text for choice in stage.candidates)
    seconds = {label: turns([rank["step_s"] for rank in ranks]) for label, ranks in found.items()}
    return decide(
        seconds[name],
        seconds[again(name)],
        {label: seconds[label] for label in others},
        name=name,
    )


def has_messages(rows: list[Row], label: str) -> bool:
    """Whether the gradients of contestant `label` travel; through shared memory they do not.

    Where the system counts no bytes they may.
    """
    sent = {row.contestant: row.comm_bytes for row in rows if row.contestant != ALONE}
    return sent[label] >= _SOME_MESSAGES * max(sent.values())
