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

import msgspec
import tyro

from gradsync.commands.arguments import check_least
from gradsync.commands.bench.experiment import (
    Experiment,
    Findings,
    interval,
    print_table,
    ratios,
    run_experiment,
    taken,
    where,
)
from gradsync.commands.bench.sync import LEGEND, cells_of, row_of, title
from gradsync.commands.bench.sync_plan import (
    Contestant,
    DeviceName,
    Dtype,
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

_TRIED = ("invariant", "zero1", "bucketed", "flat", "zero2", "ddp")  # The default first
_BUCKETS_MB = (2.0, 5.0, 10.0, 50.0, 100.0)
_DOUBT = 0.05  # probability that noise wins a stage, both sides together
_SOME_MESSAGES = 0.01  # fraction of the gradients' bytes
_MOST_CANDIDATES = 7  # of a stage, beside its default
_FEWEST_ROUNDS = 1 + math.ceil(math.log2(_MOST_CANDIDATES / _DOUBT))
"""All rounds lie on one side of the default by chance once in 2**(rounds-1) times."""


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
    promise: Literal["bitwise", "rounding"] = "bitwise"
    """The weakest promise to accept: bitwise (one rank's bits on any number of ranks), or rounding
    (one rank's numbers except for the order of sums)."""
    dtype: Dtype | None = None
    """bf16 is autocast over fp32 weights; default: that of `gradsync train`."""
    batch_size: int | None = None  # Sequences per rank and step; default: as in `gradsync train`.
    micro_batches_per_rank: int | None = None
    """Micro-batches into which these are divided; default: as in `gradsync train`."""
    context_length: int | None = None  # Tokens of a sequence; default: the model's.
    data: str = ""  # Directory with train.bin, for the vocabulary; default: the built-in text's.
    num_steps: int = 5  # Measured optimizer steps per turn.
    rounds: int = 12  # Turns of each candidate.
    threads: int | None = None
    """Intra-op threads of a rank; default: that of `gradsync train`, 1 on a CPU."""
    device: DeviceName = "auto"  # auto: GPUs, if there are any.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the record on standard output; tables go to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """The checked request that every rank receives."""

    settings: SyncSettings  # how each contestant is measured
    batch_size: int  # sequences of a rank and step
    world_size: int
    promise: str = "bitwise"  # the weakest promise to accept: bitwise, or rounding
    data: str = ""


def request_of(options: TuneOptions, world: World) -> TuneRequest:
    """Check the request; under a launcher, at its number of ranks."""
    preset(options.model)
    start = recipe(options.model)
    check_least(options, world_size=2, batch_size=1, micro_batches_per_rank=1, threads=1)
    check_least(options, rounds=_FEWEST_ROUNDS)
    if options.data and not Path(options.data).is_dir():
        raise ConfigError(f"--data {options.data} is no directory")
    if world.is_main:
        check_place("GRADSYNC_CACHE", TUNED.path({}).parent, folder=True)
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
    bench_plan(settings, [], world_size, batch)  # refuses what does not divide
    # Beside the candidates: `none`, the default twice, and one that is checked.
    settings = side_by_side(settings, ranks=local, models=_MOST_CANDIDATES + 4)
    about = {"settings": settings, "batch_size": batch, "world_size": world_size}
    return taken(TuneRequest, options, **about)


def batch_of(options: TuneOptions, start: TrainConfig, world_size: int) -> tuple[int, int]:
    """Sequences and micro-batches of a rank and step: given, or those of `gradsync train MODEL`."""
    micro, count = start.micro_batch_size, options.micro_batches_per_rank
    if options.batch_size is None:
        if count is None:
            count = -(-start.batch_plan(world_size).num_micro_batches // world_size)
        return count * micro, count
    whole, rest = divmod(options.batch_size, micro)
    return options.batch_size, count or (1 if rest else whole)


def strategies(promise: str, *, on_cpu: bool, hosts: int) -> list[TunedStrategy]:
    """The default, and the strategies with at least the requested promise. With `hosts` above 1
    there are two levels of sums; 0 stands for hosts with unequal numbers of ranks."""
    every: list[tuple[str, dict[str, str]]] = [(name, {}) for name in _TRIED]
    if on_cpu and hosts == 1:  # without the memory that they share
        every += [(name, {"collective": "backend"}) for name in ("invariant", "bucketed")]
    if hosts > 1:
        every += [("invariant", {"reduction": "hierarchical"}), ("hierarchical", {})]
    return [
        TunedStrategy(sync=name, options=options)
        for name, options in every
        if promise in ("rounding", STRATEGIES[name].promise)
    ]


def bucket_sizes(winner: TunedStrategy, *, gradient_bytes: int, device: str) -> list[float]:
    """Sizes of buckets, in MiB, that split the gradients unlike the winner; none if it has no
    buckets."""
    known = STRATEGIES[winner.sync]
    recipe = None if known.recipe is None else replace(known.recipe, **winner.options)
    if "bucket_mb" not in known.options if recipe is None else recipe.grouping != "buckets":
        return []
    usual, whole = (recipe or Recipe()).bucket_size_mb(device), gradient_bytes / 2**20
    return [size for size in _BUCKETS_MB if size != usual and min(size, usual) < whole]


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
    part, low, high = (100 * best[figure] for figure in ("ratio", "low", "high"))
    words = (
        f"{label} takes {part:.1f} % of the time of {name} (95 % interval {low:.1f} to {high:.1f} "
        f"%, two copies differ by {100 * noise:.1f} %)"
    )
    if not faster:
        words = f"{name} stays, nothing is faster beyond the noise: {words}"
    return {
        "winner": label if faster else name,
        "noise": noise,  # relative difference of the default's two copies
        "judged": judged,  # every candidate but the default, in order; times over the default's
        "words": words,
    }


def measure(request_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part; the same on all ranks."""
    from gradsync.commands.bench.steps import quiet_session

    request = msgspec.convert(request_json, TuneRequest)
    with quiet_session(request.settings.device, request.settings.threads) as world:
        return ask_all(request, world)


def ask_all(request: TuneRequest, world: World) -> dict[str, Any]:
    """Both stages, in a session."""
    on_cpu, nodes = world.device_name == "cpu", world.num_nodes
    equal = world.local_world_size * nodes == world.world_size
    first = strategies(request.promise, on_cpu=on_cpu, hosts=nodes if equal else 0)
    choice, measured = _ask("strategy", first, request, world)
    found = [measured]
    gradient_bytes = 4 * request.settings.config.num_params()  # fp32, as the weights are
    sizes = bucket_sizes(choice, gradient_bytes=gradient_bytes, device=world.device.type)
    rows = {row["contestant"]: row for row in measured["stage"]["rows"]}
    # Sockets alone are counted: a GPU's messages take other ways.
    if sizes and not (on_cpu and rows[choice.text]["comm_bytes"] < _SOME_MESSAGES * gradient_bytes):
        others = [replace(choice, options={**choice.options, "bucket_mb": s}) for s in sizes]
        choice, measured = _ask("bucket size", [choice, *others], request, world)
        found.append(measured)
    return {
        "choice": asdict(choice),
        "environment": found[0]["environment"],
        "device": world.device_name,
        "num_nodes": nodes,
        "stages": [each["stage"] for each in found],
        "samples": [each["contestants"] for each in found],
    }


def _ask(
    stage: str, candidates: list[TunedStrategy], request: TuneRequest, world: World
) -> tuple[TunedStrategy, dict[str, Any]]:
    """One of the candidates, and what was measured: the first one stays unless another is
    faster. It takes part twice, which measures the noise."""
    from gradsync.commands.bench.steps import run_plan

    made = [Contestant(label=c.text, name=c.sync, options=c.options) for c in candidates]
    name, twice = made[0].label, f"{made[0].label} (again)"
    made.insert(1, replace(made[0], label=twice))
    plan = bench_plan(request.settings, made, world.world_size, request.batch_size)
    result = run_plan(plan, world)
    # By the slowest rank's time of each round.
    seconds = {label: step_seconds(ranks) for label, ranks in result["contestants"].items()}
    others = {each.text: seconds[each.text] for each in candidates[1:]}
    decision = decide(seconds[name], seconds[twice], others, name=name)
    winner = next(each for each in candidates if each.text == decision["winner"])
    rows = [row_of(plan, each, [result]) for each in plan.contestants]
    return winner, result | {"stage": {"name": stage, "rows": rows, "decision": decision}}


_LEGEND = (
    f"{LEGEND} to the default: median of the ratios within rounds, and the bootstrap's 95 % "
    "interval, widened for the number of candidates; below 1 is faster. The default is there "
    "twice: what its copies differ by is noise."
)


def print_report(
    request: TuneRequest,
    stages: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """A table and a verdict for each stage."""
    heading = title(request.settings, request.world_size, request.batch_size)
    print(f"{heading}; promise: {request.promise}", file=stream)
    for stage in stages:
        judged = {each["label"]: each for each in stage["decision"]["judged"]}
        lines = []
        for row in stage["rows"]:
            line = cells_of(row) | {"to the default": "", "verdict": ""}
            if beside := judged.get(row["contestant"]):
                low, high = beside["low"], beside["high"]
                line["to the default"] = f"{beside['ratio']:.3f} ({low:.3f}-{high:.3f})"
                slower = "slower" if low > 1 else "cannot tell"
                line["verdict"] = "faster" if beside["faster"] else slower
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
        verdict = "; ".join(stage["decision"]["words"] for stage in stages)
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
            "samples": result["samples"],
        },
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
