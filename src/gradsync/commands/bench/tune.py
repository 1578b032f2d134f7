"""`gradsync tune`: measure which way to synchronise is fastest here, and save the result.

    strategy      the default, the default again, and all that promise as much
    bucket size   of the winner, if its buckets travel as messages

Every rank has all samples and makes the same decisions by itself. docs/guide/verifying.md says what
counts as faster. No torch here before ranks measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, Literal, cast

import tyro

from gradsync.commands.bench.contestants import ALONE, Contestant, with_ideals
from gradsync.commands.bench.experiment import (
    Experiment,
    Findings,
    check_least,
    from_json,
    run_experiment,
    taken,
)
from gradsync.commands.bench.report import (
    Spread,
    Tell,
    interval,
    print_table,
    ratios,
    show_progress,
    silent,
    where,
)
from gradsync.commands.bench.sync import STEP_LEGEND, row_of
from gradsync.commands.bench.sync_plan import (
    SyncSettings,
    bench_plan,
    side_by_side,
    step_seconds,
    uses_cuda,
)
from gradsync.commands.models.config import preset
from gradsync.commands.plan.machine import fast_dtype
from gradsync.commands.plan.measured import Conditions
from gradsync.commands.train.config import TrainConfig, recipe
from gradsync.commands.train.data import vocabulary
from gradsync.commands.train.tuned import TUNED, Tuned, TunedStrategy, conditions_of
from gradsync.core.files import check_place
from gradsync.errors import ConfigError
from gradsync.runtime.machine import choose_threads
from gradsync.sync.options import Recipe
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

PROMISES = ("bitwise", "rounding")
_BUCKETS_MB = (2.0, 5.0, 10.0, 50.0, 100.0)
_MIB = 2**20
_DOUBT = 0.05  # probability that noise wins a stage, both sides together
_SOME_MESSAGES = 0.01  # fraction of the bytes of the contestant that sends most
_SIDE_BY_SIDE = 10  # models that the largest stage holds


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """Measure strategies, collectives and bucket sizes for one model on this machine; `gradsync
    train` with `sync: auto` uses the result.

    Candidates take turns; one replaces the default only if it is faster beyond the noise. Sizes
    default to those of `gradsync train MODEL`. Under torchrun, mpirun or srun, it measures the
    launched ranks.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b."""
    world_size: int = 2  # Ranks to start on this host.
    promise: str = "bitwise"
    """The weakest promise to accept: bitwise (one rank's bits on any number of ranks), or rounding
    (one rank's numbers except for the order of sums)."""
    dtype: Literal["fp32", "bf16"] | None = None
    """fp32, or bf16 (autocast over fp32 weights); default: that of `gradsync train`."""
    batch_size: int | None = None  # Sequences per rank and step; default: as in `gradsync train`.
    micro_batches_per_rank: int | None = None
    """Micro-batches into which these are divided; default: as in `gradsync train`."""
    context_length: int | None = None  # Tokens of a sequence; default: the model's.
    data: str = ""  # Directory with train.bin, for the vocabulary; default: the built-in text's.
    num_steps: int = 5  # Measured optimizer steps per turn.
    rounds: int = 12  # Turns of each candidate.
    threads: int | None = None
    """Intra-op threads of a rank; default: that of `gradsync train`, 1 on a CPU."""
    device: str = "auto"  # auto, cpu or cuda.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; tables go to standard error."""
    dry_run: bool = False  # Only say what would be measured.


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """The checked request that every rank receives."""

    settings: SyncSettings  # how each contestant is measured
    batch_size: int  # sequences of a rank and step
    world_size: int
    promise: str = "bitwise"  # the weakest promise to accept: bitwise, or rounding
    data: str = ""

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
        if self.settings.rounds < fewest_rounds(most):
            raise ConfigError(
                f"--rounds must be at least {fewest_rounds(most)} to tell {most} candidates from "
                f"noise; got {self.settings.rounds}"
            )


def request_of(options: TuneOptions, world: World) -> TuneRequest:
    """Check the request; under a launcher, at its number of ranks."""
    preset(options.model)
    start = recipe(options.model)
    check_least(options, world_size=1, batch_size=1, micro_batches_per_rank=1, threads=1)
    if options.data and not Path(options.data).is_dir():
        raise ConfigError(f"--data {options.data} is no directory")
    if world.is_main:
        check_place("GRADSYNC_CACHE", TUNED.folder(), folder=True)
    world_size = world.world_size if world.is_distributed else options.world_size
    local = world.local_world_size if world.is_distributed else world_size
    batch, count = batch_of(options, start, world_size)
    on_cuda = uses_cuda(options.device)
    settings = taken(
        SyncSettings,
        options,
        model_size=options.model,
        vocab_size=vocabulary(options.data) or preset(options.model).vocab_size,
        context_length=options.context_length or start.sequence_length,
        micro_batches_per_rank=count,
        dtype=options.dtype or fast_dtype(options.device),
        num_warmup=1,
        threads=choose_threads(local, requested=options.threads or (None if on_cuda else 1)),
    )
    return taken(
        TuneRequest,
        options,
        settings=side_by_side(settings, ranks=local, models=_SIDE_BY_SIDE),
        batch_size=batch,
        world_size=world_size,
    )


def batch_of(options: TuneOptions, start: TrainConfig, world_size: int) -> tuple[int, int]:
    """Sequences and micro-batches of a rank and step: given, or those of `gradsync train MODEL`."""
    micro = start.micro_batch_size
    batch, count = options.batch_size, options.micro_batches_per_rank
    if batch is None and count is None:
        try:
            count = -(-start.batch_plan(world_size).num_micro_batches // world_size)
        except ConfigError as error:
            raise ConfigError(
                f"gradsync train {options.model} divides its batch among fewer ranks than "
                f"{world_size}; give --batch-size or --micro-batches-per-rank"
            ) from error
    if batch is None:
        batch = (count or 1) * micro
    if count is None:
        count = batch // micro if batch % micro == 0 else 1
    if batch % count:
        raise ConfigError(f"--batch-size {batch} does not divide into {count} micro-batches")
    return batch, count


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneStage:
    """One question. The first candidate stays unless another is faster."""

    name: str
    candidates: tuple[TunedStrategy, ...] = ()
    skipped: str = ""  # why there is nothing to measure

    def contestants(self) -> list[Contestant]:
        """The first candidate twice, which measures the noise, and the others."""
        made = [
            Contestant(label=choice.text, name=choice.sync, options=choice.options)
            for choice in self.candidates
        ]
        return [made[0], replace(made[0], label=again(made[0].label)), *made[1:]]


def again(label: str) -> str:
    """Name of the second copy of the first candidate."""
    return f"{label} (again)"


def strategies(promise: str, *, on_cpu: bool, hosts: int) -> list[TunedStrategy]:
    """The default, and the strategies with at least the requested promise. With `hosts` above 1
    there are two levels of sums; 0 stands for hosts with unequal numbers of ranks."""
    one_memory, levels = on_cpu and hosts == 1, hosts > 1
    by_messages, hierarchical = {"collective": "backend"}, {"reduction": "hierarchical"}
    every: list[tuple[str, dict[str, Any], bool]] = [
        ("invariant", {}, True),
        ("zero1", {}, True),
        ("bucketed", {}, True),
        ("flat", {}, True),
        ("zero2", {}, True),
        ("ddp", {}, True),
        ("invariant", by_messages, one_memory),
        ("bucketed", by_messages, one_memory),
        ("invariant", hierarchical, levels),
        ("hierarchical", {}, levels),
    ]
    return [
        TunedStrategy(sync=name, options=options)
        for name, options, applies in every
        if applies and promise in ("rounding", STRATEGIES[name].promise)
    ]


def strategy_stage(request: TuneRequest, world: World) -> TuneStage:
    """The first question."""
    equal = world.local_world_size * world.num_nodes == world.world_size
    hosts = world.num_nodes if equal or world.num_nodes == 1 else 0
    candidates = strategies(request.promise, on_cpu=world.device_name == "cpu", hosts=hosts)
    return TuneStage(name="strategy", candidates=tuple(candidates))


def bucket_stage(
    winner: TunedStrategy, *, has_messages: bool, gradient_bytes: int, device: str = "cpu"
) -> TuneStage:
    """Sizes of buckets that split the gradients unlike the winner."""
    known = STRATEGIES[winner.sync]
    recipe = None if known.recipe is None else replace(known.recipe, **winner.options)
    usual, whole = (recipe or Recipe()).bucket_size_mb(device), gradient_bytes / _MIB
    sizes = [size for size in _BUCKETS_MB if size != usual and min(size, usual) < whole]
    why = "" if sizes else f"all gradients are {whole:.1f} MiB"
    if "bucket_mb" not in known.options if recipe is None else recipe.grouping != "buckets":
        why = f"{winner.sync} has no buckets"
    elif not has_messages:
        why = "the ranks share memory, and no bucket travels"
    if why:
        return TuneStage(name="bucket size", skipped=why)
    others = [replace(winner, options={**winner.options, "bucket_mb": size}) for size in sizes]
    return TuneStage(name="bucket size", candidates=(winner, *others))


def decide(
    default: Sequence[float],
    again: Sequence[float],
    candidates: Mapping[str, Sequence[float]],
    *,
    name: str,
) -> dict[str, Any]:
    """Choose between the default, called `name`, and the candidates, by step times per round: the
    default's, its second copy's, each candidate's by label."""
    copies = [pair[n % 2] for n, pair in enumerate(zip(default, again, strict=True))]
    noise = abs(median(ratios(again, default)) - 1)
    judged: list[dict[str, Any]] = []
    for label, seconds in candidates.items():
        beside = ratios(seconds, copies)
        ratio = median(beside)
        low, high = interval(beside, doubt=_DOUBT / len(candidates))
        # Beyond chance, and beyond the difference of the default's two copies.
        faster = high < 1 and ratio < 1 - noise
        judged.append({"label": label, "ratio": ratio, "low": low, "high": high, "faster": faster})
    best = min(judged, key=lambda each: (not each["faster"], each["ratio"]))
    label, faster = best["label"], best["faster"]
    gain, least, most = (100 * (1 - best[part]) for part in ("ratio", "high", "low"))
    words = (
        f"{label} takes {gain:.1f} % less time than {name} (95 % interval {least:.1f} to "
        f"{most:.1f} %, two copies differ by {100 * noise:.1f} %)"
    )
    if best["ratio"] >= 1:
        words = f"nothing is faster than {name}, which stays"
    elif not faster:
        words = f"no measurable difference: {words}; {name} stays"
    return {
        "winner": label if faster else name,
        "noise": noise,  # relative difference of the default's two copies
        "judged": judged,  # every candidate but the default, in order; times over the default's
        "words": words,
    }


def fewest_rounds(candidates: int) -> int:
    """Rounds needed so that chance alone does not look like a winner."""
    return 1 + math.ceil(math.log2(candidates / _DOUBT))


def measure(request_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part; the same on all ranks."""
    from gradsync.commands.bench.steps import quiet_session

    request = from_json(TuneRequest, request_json)
    settings = request.settings
    session = quiet_session(settings.device, settings.threads, keep_memory=True)
    with session as (world, keeps):
        tell = show_progress if world.is_main else silent
        return Tuner(request, world, tell, keeps_memory=keeps).run()


class Tuner:
    """The stages, one after another; `keeps_memory`: whether this process does keep freed
    memory."""

    def __init__(
        self, request: TuneRequest, world: World, tell: Tell, *, keeps_memory: bool
    ) -> None:
        self._request, self._world, self._tell = request, world, tell
        self._keeps_memory = keeps_memory
        self._found: dict[str, Any] = {
            **{"stages": [], "samples": {}},
            **{"device": world.device_name, "num_nodes": world.num_nodes},
        }

    def run(self) -> dict[str, Any]:
        """See `measure`."""
        request, world = self._request, self._world
        choice, rows = self._ask(strategy_stage(request, world))
        stage = bucket_stage(
            choice,
            has_messages=has_messages(rows, choice.text),
            gradient_bytes=4 * request.settings.config.num_params(),  # fp32, as the weights are
            device=world.device.type,
        )
        if stage.skipped:
            self._found["stages"].append({"name": stage.name, "skipped": stage.skipped})
        else:
            choice, _ = self._ask(stage)
        return {"choice": asdict(choice), **self._found}

    def _ask(self, stage: TuneStage) -> tuple[TunedStrategy, list[dict[str, Any]]]:
        """The answer to one question, which is one of the stage's candidates, and all figures."""
        from gradsync.commands.bench.steps import Runner

        request, size = self._request, self._world.world_size
        contestants = with_ideals(stage.contestants(), same_allocator=True)
        plan = bench_plan(request.settings, [(c, size, request.batch_size) for c in contestants])
        result = Runner(plan, 0, self._world, None, self._tell).run()
        results = [{"keeps_memory": self._keeps_memory, **result}]
        rows = [row_of(plan, entry, results) for entry in plan.entries]
        # By the slowest rank's time of each round.
        seconds = {name: step_seconds(ranks) for name, ranks in result["contestants"].items()}
        name, *others = (choice.text for choice in stage.candidates)
        candidates = {label: seconds[label] for label in others}
        decision = decide(seconds[name], seconds[again(name)], candidates, name=name)
        self._found.setdefault("environment", result["environment"])
        self._found["samples"][stage.name] = result["contestants"]
        self._found["stages"].append({"name": stage.name, "rows": rows, "decision": decision})
        winner = next(each for each in stage.candidates if each.text == decision["winner"])
        return winner, rows


def has_messages(rows: Sequence[Mapping[str, Any]], label: str) -> bool:
    """Whether the gradients of `label` travel; assumed if the system counts no bytes."""
    sent = {row["contestant"]: row["comm_bytes"] for row in rows if row["contestant"] != ALONE}
    return sent[label] >= _SOME_MESSAGES * max(sent.values())


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
    """A table and a verdict for each stage."""
    settings = request.settings
    count = settings.micro_batches_per_rank
    print(
        f"{settings.model_text}, {request.world_size} ranks x {count} micro-batches x "
        f"{request.batch_size // count} x {settings.tokens} tokens a step; "
        f"{settings.turns_text}; promise: {request.promise}",
        file=stream,
    )
    for stage in stages:
        if "skipped" in stage:
            print(f"{stage['name']}: not measured: {stage['skipped']}", file=stream)
            continue
        judged = {each["label"]: each for each in stage["decision"]["judged"]}
        lines = []
        for row in stage["rows"]:
            beside, verdict = judged.get(row["contestant"]), ""
            if beside:
                slower = "slower" if beside["low"] > 1 else "cannot tell"
                verdict = "faster" if beside["faster"] else slower
            line = {
                "candidate": row["contestant"],
                "step, ms": Spread(**row["total_ms"]).text(1),
                "to none": Spread(**row["ratio"]).text(3),
                "to the default": (
                    f"{beside['ratio']:.3f} ({beside['low']:.3f}-{beside['high']:.3f})"
                    if beside
                    else ""
                ),
                "sent, MB": f"{row['comm_bytes'] / 1e6:.2f}",
                "verdict": verdict,
            }
            lines.append(line)
        print_table(stream, stage["name"], lines, (stage["decision"]["words"],))
    print(_LEGEND, where(environment), sep="\n", file=stream)


def measured_conditions(request: TuneRequest, result: Mapping[str, Any]) -> Conditions:
    """Conditions of a training run whose steps are like the measured ones."""
    settings, nodes = request.settings, result["num_nodes"]
    run = replace(
        recipe(settings.model_size),
        seq_len=settings.tokens,
        micro_batch_size=request.batch_size // settings.micro_batches_per_rank,
        tokens_per_update=request.batch_size * settings.tokens * request.world_size,
        dtype=cast(Any, settings.dtype),
        data=request.data,
        keep_memory=True,
    )
    world = World(
        world_size=request.world_size,
        local_world_size=request.world_size if nodes == 1 else 1,
        num_nodes=nodes,
        device_name=result["device"],
    )
    return conditions_of(run, world, threads=settings.threads)


def findings_of(request: TuneRequest, result: Mapping[str, Any]) -> Findings:
    """The tables, the choice to keep, and what goes into the record."""
    choice, stages = TunedStrategy(**result["choice"]), result["stages"]
    conditions = measured_conditions(request, result)

    def keep() -> str:
        verdict = "; ".join(s["decision"]["words"] for s in stages if "decision" in s)
        tuned = Tuned(choice=choice, verdict=verdict, date=result["environment"]["date"])
        path = TUNED.save(conditions, tuned)
        return f"best here: {choice.text}; kept in {path} for gradsync train --sync auto"

    return Findings(
        environment=result["environment"],
        data={
            "request": asdict(request),
            "choice": result["choice"],
            "stages": stages,
            "cache": str(TUNED.path(conditions)),
        },
        samples=result["samples"],
        show=partial(print_report, request, stages, result["environment"]),
        keep=keep,
    )


EXPERIMENT = Experiment(
    command=("tune",),
    options=TuneOptions,
    plan=request_of,
    ranks=lambda request: request.world_size,
    measure="gradsync.commands.bench.tune:measure",
    findings=findings_of,
)
run = partial(run_experiment, EXPERIMENT)
