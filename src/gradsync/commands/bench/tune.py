"""`gradsync tune`: one stage after another, each with the previous stage's winner.

    strategy      the default, the default again, and all that promise as much
    bucket size   of the winner, if its buckets travel as messages
    first bucket  likewise
    compilation   on request

Every rank has all samples and makes the same decisions by itself. docs/guide/verifying.md says what
counts as faster. No torch here before ranks measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import IO, Any

from gradsync.commands.bench.contestants import ALONE, Contestant, with_ideals
from gradsync.commands.bench.experiment import failed, from_json
from gradsync.commands.bench.report import (
    Spread,
    Tell,
    interval,
    print_notes,
    print_table,
    progress_bar,
    ratios,
    silent,
    where,
)
from gradsync.commands.bench.sync import STEP_LEGEND, ContestantRow, rows_of
from gradsync.commands.bench.sync_plan import SyncSettings, bench_plan, step_seconds
from gradsync.commands.train.config import CompileOrder
from gradsync.commands.train.tuned import TunedStrategy
from gradsync.errors import ConfigError
from gradsync.sync.options import Recipe
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

PROMISES = ("bitwise", "rounding")
STAGES = ("strategy", "bucket size", "first bucket", "compilation")
_BUCKETS_MB = (2.0, 5.0, 10.0, 50.0, 100.0)
_FIRST_MB = (0.25, 4.0, 10.0)
_MIB = 2**20
_DOUBT = 0.05  # probability that noise wins a stage, both sides together
_SOME_MESSAGES = 0.01  # fraction of the bytes of the contestant that sends most


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """A request to tune."""

    settings: SyncSettings  # how each contestant is measured
    batch_size: int  # sequences of a rank and step
    world_size: int
    promise: str = "bitwise"  # the weakest promise to accept: bitwise, or rounding
    compile: bool = False  # whether to try `torch.compile`

    def __post_init__(self) -> None:
        if self.promise not in PROMISES:
            raise ConfigError(
                f"--promise must be one of {', '.join(PROMISES)}; got {self.promise!r} (what is "
                "lossy changes the training, and is not chosen by its speed)"
            )
        if self.world_size < 2:
            raise ConfigError(
                f"--world-size must be at least 2; got {self.world_size}: one sends nothing"
            )
        tried = [strategies(self.promise, on_cpu=True, hosts=hosts) for hosts in (1, 2)]
        most = max(len(_BUCKETS_MB), *(len(choices) - 1 for choices in tried))
        least, rounds = fewest_rounds(most), self.settings.rounds
        if rounds < least:
            raise ConfigError(
                f"--rounds must be at least {least} to tell {most} candidates from noise; got "
                f"{rounds}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneStage:
    """One question. The first candidate stays unless another is faster."""

    name: str
    candidates: tuple[TunedStrategy, ...] = ()
    skipped: str = ""  # why there is nothing to measure

    def contestants(self) -> list[Contestant]:
        """The first candidate twice, which measures the noise, and the others."""
        twice = [self.candidates[0], *self.candidates]
        made = [
            Contestant(
                label=choice.text,
                name=choice.sync,
                options=choice.options,
                compile=choice.compile,
            )
            for choice in twice
        ]
        return [made[0], replace(made[1], label=again(made[1].label)), *made[2:]]


def again(label: str) -> str:
    """Name of the second copy of the first candidate."""
    return f"{label} (again)"


def strategies(promise: str, *, on_cpu: bool, hosts: int) -> list[TunedStrategy]:
    """The default, and the strategies with at least the requested promise. With `hosts` above 1
    there are two levels of sums; 0 stands for hosts with unequal numbers of ranks."""
    names = ["invariant", "zero1"]
    names += ["bucketed", "flat", "zero2", "ddp"] if promise == "rounding" else []
    found = [TunedStrategy(sync=name) for name in names]
    if on_cpu and hosts == 1:
        by_messages = [name for name in names if name in ("invariant", "bucketed")]
        found += [
            TunedStrategy(sync=name, options={"collective": "backend"}) for name in by_messages
        ]
    if hosts > 1:
        found.append(TunedStrategy(sync="invariant", options={"reduction": "hierarchical"}))
        found += [TunedStrategy(sync="hierarchical")] if promise == "rounding" else []
    return found


def strategy_stage(request: TuneRequest, world: World) -> TuneStage:
    """The first question."""
    equal = world.local_world_size * world.num_nodes == world.world_size
    hosts = world.num_nodes if equal or world.num_nodes == 1 else 0
    candidates = strategies(request.promise, on_cpu=world.device_name == "cpu", hosts=hosts)
    return TuneStage(name=STAGES[0], candidates=tuple(candidates))


def bucket_stage(
    winner: TunedStrategy,
    *,
    first: bool,
    has_messages: bool,
    gradient_bytes: int,
    device: str = "cpu",
) -> TuneStage:
    """Sizes of buckets, or of the first one, that split the gradients unlike the winner."""
    name, option = (STAGES[2], "first_bucket_mb") if first else (STAGES[1], "bucket_mb")
    known = STRATEGIES[winner.sync]
    recipe = None if known.recipe is None else replace(known.recipe, **winner.options)
    usual, whole = (recipe or Recipe()).bucket_size_mb(device), gradient_bytes / _MIB
    most = min(usual, whole)
    if first:
        sizes = [size for size in _FIRST_MB if size < most]
        why = "" if sizes else f"there is nothing beyond {most:.1f} MiB to divide"
    else:
        sizes = [size for size in _BUCKETS_MB if size != usual and min(size, usual) < whole]
        why = "" if sizes else f"all gradients are {whole:.1f} MiB"
    if "bucket_mb" not in known.options if recipe is None else recipe.grouping != "buckets":
        why = f"{winner.sync} has no buckets"
    elif not has_messages:
        why = "the ranks share memory, and no bucket travels"
    elif first and recipe is None:
        why = f"{winner.sync} chooses it by itself"
    if why:
        return TuneStage(name=name, skipped=why)
    others = [replace(winner, options={**winner.options, option: size}) for size in sizes]
    return TuneStage(name=name, candidates=(winner, *others))


def compile_stage(winner: TunedStrategy, *, wanted: bool) -> TuneStage:
    """Whether to compile, and in which order with DDP."""
    if not wanted:
        return TuneStage(name=STAGES[3], skipped="not asked for (--compile)")
    orders: list[CompileOrder] = ["none", "model", *(["ddp"] if winner.sync == "ddp" else [])]
    return TuneStage(name=STAGES[3], candidates=tuple(replace(winner, compile=o) for o in orders))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A candidate compared with the default; a ratio is its time over the default's."""

    label: str
    ratio: float  # median over rounds
    low: float  # the interval's ends
    high: float
    faster: bool  # beyond chance, and beyond the difference of the default's two copies


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """A stage's outcome."""

    winner: str  # label of the fastest candidate, or of the default
    noise: float  # relative difference of the default's two copies
    judged: tuple[Judged, ...]  # every candidate but the default, in order
    words: str  # a one-line summary


def decide(
    default: Sequence[float],
    again: Sequence[float],
    candidates: Mapping[str, Sequence[float]],
    *,
    name: str,
) -> StageOutcome:
    """Choose between the default, called `name`, and the candidates, by step times per round: the
    default's, its second copy's, each candidate's by label."""
    copies = [pair[n % 2] for n, pair in enumerate(zip(default, again, strict=True))]
    noise = abs(median(ratios(again, default)) - 1)
    judged = []
    for label, seconds in candidates.items():
        beside = ratios(seconds, copies)
        ratio = median(beside)
        low, high = interval(beside, doubt=_DOUBT / len(candidates))
        faster = high < 1 and ratio < 1 - noise
        judged.append(Judged(label=label, ratio=ratio, low=low, high=high, faster=faster))
    best = min(judged, key=lambda each: (not each.faster, each.ratio))
    return StageOutcome(
        winner=best.label if best.faster else name,
        noise=noise,
        judged=tuple(judged),
        words=_words(best, name, noise),
    )


def fewest_rounds(candidates: int) -> int:
    """Rounds needed so that chance alone does not look like a winner."""
    return 1 + math.ceil(math.log2(candidates / _DOUBT))


def _words(best: Judged, name: str, noise: float) -> str:
    gain, least, most = (100 * (1 - ratio) for ratio in (best.ratio, best.high, best.low))
    between = f"95 % interval {least:.1f} to {most:.1f} %, two copies differ by {100 * noise:.1f} %"
    if best.faster:
        return f"{best.label} takes {gain:.1f} % less time than {name} ({between})"
    if best.ratio >= 1:
        return f"nothing is faster than {name}, which stays"
    return (
        f"no measurable difference: {best.label} takes {gain:.1f} % less time than {name} "
        f"({between}); {name} stays"
    )


_COLUMNS = ("candidate", "step, ms", "to none", "to the default", "sent, MB", "verdict")
_LEGEND = (
    f"{STEP_LEGEND}ranks that never talk. to the default: median of the ratios within rounds, and "
    "the bootstrap's 95 % interval, widened for the number of candidates; below 1 is faster. The "
    "default is there twice: what its copies differ by is noise."
)


def print_report(
    request: TuneRequest,
    stages: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """Tables, verdicts, what the columns mean, and the machine."""
    settings = request.settings
    print(
        f"{settings.model_text}, {request.world_size} ranks x {settings.leaves_per_rank} leaves x "
        f"{request.batch_size // settings.leaves_per_rank} x {settings.tokens} tokens a step; "
        f"{settings.turns_text}; promise: {request.promise}",
        file=stream,
    )
    for stage in stages:
        if "decision" in stage:
            cells = [_cells(row, stage["decision"]["judged"]) for row in stage["rows"]]
            print_table(stream, stage["name"], _COLUMNS, cells)
    for line in verdicts(stages):
        print(line, file=stream)
    print_notes(stream, (_LEGEND, where(environment)))


def verdicts(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each stage."""
    return [
        f"{stage['name']}: {stage['decision']['words']}"
        if "decision" in stage
        else f"{stage['name']}: not measured: {stage['skipped']}"
        for stage in stages
    ]


def _cells(row: Mapping[str, Any], judged: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    ratio = verdict = ""
    for each in judged:
        if each["label"] == row["contestant"]:
            ratio = f"{each['ratio']:.3f} ({each['low']:.3f}-{each['high']:.3f})"
            slower = "slower" if each["low"] > 1 else "cannot tell"
            verdict = "faster" if each["faster"] else slower
    return (
        row["contestant"],
        Spread(**row["total_ms"]).text(1),
        Spread(**row["ratio"]).text(3),
        ratio,
        f"{row['comm_bytes'] / 1e6:.2f}",
        verdict,
    )


def measure(request_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part; the same on all ranks. Returns `failed` if a candidate does not train, or
    if its options conflict."""
    from gradsync.commands.bench.steps import NotTrainingError, quiet_session

    request = from_json(TuneRequest, request_json)
    settings = request.settings
    session = quiet_session(settings.device, settings.threads, keep_memory=True)
    with session as (world, keeps):
        tell = progress_bar() if world.is_main else silent
        try:
            return Tuner(request, world, tell, keeps_memory=keeps).run()
        except (ConfigError, NotTrainingError) as error:  # the same on all ranks
            return failed(error)


class Tuner:
    """The stages, one after another; `keeps_memory`: whether this process does keep freed
    memory."""

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
        choice = self._ask(strategy_stage(request, self._world), TunedStrategy())
        for first in (False, True):
            stage = bucket_stage(
                choice,
                first=first,
                has_messages=self._has_messages,
                gradient_bytes=size,
                device=self._world.device.type,
            )
            choice = self._ask(stage, choice)
        choice = self._ask(compile_stage(choice, wanted=request.compile), choice)
        world = {"device": self._world.device_name, "num_nodes": self._world.num_nodes}
        found = {"environment": self._environment, "samples": self._samples}
        return {"choice": asdict(choice), "stages": self._stages, **world, **found}

    def _ask(self, stage: TuneStage, before: TunedStrategy) -> TunedStrategy:
        """The answer to one question: one of the stage's candidates."""
        from gradsync.commands.bench.steps import Runner

        if stage.skipped:
            self._stages.append({"name": stage.name, "skipped": stage.skipped})
            return before
        request = self._request
        chosen = stage.contestants()
        size = self._world.world_size
        all_of_them = with_ideals(chosen, same_allocator=False)
        plan = bench_plan(request.settings, [(c, size, request.batch_size) for c in all_of_them])
        result = Runner(plan, 0, self._world, None, self._tell).run()
        rows = rows_of(plan, [{"keeps_memory": self._keeps_memory, **result}])
        decision = decision_of(stage, result["contestants"])
        self._environment = self._environment or result["environment"]
        self._samples[stage.name] = result["contestants"]
        entry = {"rows": [asdict(row) for row in rows], "decision": asdict(decision)}
        self._stages.append({"name": stage.name, **entry})
        winner = next(each for each in stage.candidates if each.text == decision.winner)
        if stage.name == "strategy":
            self._has_messages = has_messages(rows, winner.text)
        return winner


def decision_of(stage: TuneStage, found: Mapping[str, Any]) -> StageOutcome:
    """The decision from a stage's samples (by label, each rank's)."""
    name, *others = (choice.text for choice in stage.candidates)
    seconds = {label: step_seconds(ranks) for label, ranks in found.items()}
    return decide(
        seconds[name], seconds[again(name)], {label: seconds[label] for label in others}, name=name
    )


def has_messages(rows: list[ContestantRow], label: str) -> bool:
    """Whether the gradients of `label` travel; assumed if the system counts no bytes."""
    sent = {row.contestant: row.comm_bytes for row in rows if row.contestant != ALONE}
    return sent[label] >= _SOME_MESSAGES * max(sent.values())
