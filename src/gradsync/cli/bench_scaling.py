"""`gradsync bench scaling`: does training get faster with more ranks, and by how much?"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from gradsync.bench.memory_choice import fits
from gradsync.bench.record import write_record
from gradsync.bench.scaling_plan import ScalingPlan, scaling_plan, usual_sizes
from gradsync.bench.sync_plan import SyncSettings, built_per_turn, plan_to_json
from gradsync.cli.arguments import parse
from gradsync.cli.bench_sync import check_places, command_of, memory_for, size_of
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import usable_cores
from gradsync.runtime.resolve import resolve
from gradsync.runtime.threads import choose_threads
from gradsync.world import World

_COMMAND = ("bench", "scaling")
_USUAL_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """Train the same GPT on 1, 2, 4 … ranks of this host and say how well that scales.

    Weak: each rank keeps its batch. Strong: the global batch stays. The baseline is one rank
    without any wrapper; every round measures all world sizes.
    """

    world_sizes: str = ""
    """Numbers of ranks with commas between them; 1 is always measured. Default: 1, 2, 4 … as far
    as the cores go."""
    mode: str = "both"
    """weak, strong or both."""
    strategy: str = "invariant"
    """How gradients are synchronised, with options if need be: bucketed:bucket_mb=1."""
    threshold: float = 0.85
    """Efficiency to reach."""
    model_size: str = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b; auto takes the largest that fits."""
    batch_size: int = 1
    """Sequences per rank and step at the largest world size; weak: at every one."""
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    num_steps: int = 10
    """Optimizer steps of a turn that count."""
    num_warmup: int = 2
    """Optimizer steps of a turn before those."""
    rounds: int = 10
    """Turns of each world size; the interval comes from these."""
    dtype: str = "bf16"
    """fp32, or bf16 (autocast over fp32 weights)."""
    bucket_mb: float | None = None
    """Size of buckets, MiB."""
    threads: int | None = None
    """Intra-op threads of a rank, the same for all; default: cores / the most ranks."""
    device: str = "auto"
    """auto, cpu or cuda."""
    seed: int = 0
    """Names tokens and weights."""
    plot: str = ""
    """Draw a picture: FILE.png, FILE.svg or FILE.pdf."""
    out: str = ""
    """Write record.json, with every sample, into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False
    """Only say what would be measured."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync bench scaling ARGV`.

    Returns:
        0 when all was measured, whatever the verdict; 128 + signal after one.

    Raises:
        ConfigError: an unknown size, mode or strategy, numbers that cannot be, another launcher.
        RunError: ranks could not begin, or results could not be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), _measure)
    options = parse(ScalingOptions, argv, "bench scaling")
    world = resolve(environ.snapshot()).world
    if world.is_distributed:
        raise ConfigError(
            "bench scaling starts its own ranks, of several world sizes: run it without "
            f"{world.launcher}; bench sync measures the ranks that a launcher started"
        )
    scaling = plan_of(options)
    check_places(csv="", plot=options.plot, out=options.out)
    if options.dry_run:
        print(json.dumps(plan_to_json(scaling.plan), indent=1))
        return 0
    return until_stopped(world, lambda: _work(options, scaling, world))


def plan_of(options: ScalingOptions) -> ScalingPlan:
    """What was asked for.

    Raises:
        ConfigError: see `run`.
    """
    if not 0 < options.threshold < math.inf:
        raise ConfigError(
            f"--threshold must be positive and finite, 0.85 for 85 %; got {options.threshold}"
        )

    def planned(model_size: str, threads: int) -> ScalingPlan:
        settings = SyncSettings(
            model_size=model_size,
            context_length=options.context_length,
            num_steps=options.num_steps,
            num_warmup=options.num_warmup,
            rounds=options.rounds,
            dtype=options.dtype,
            bucket_mb=options.bucket_mb,
            threads=threads,
            device=options.device,
            seed=options.seed,
        )
        return scaling_plan(
            settings,
            strategy=options.strategy,
            world_sizes=options.world_sizes or usual_sizes(usable_cores()),
            mode=options.mode,
            batch_size=options.batch_size,
        )

    # Sizes first, from the smallest model: the threads and the model depend on them.
    first = planned("tiny" if options.model_size == "auto" else options.model_size, 1)
    most = first.world_sizes[-1]
    load, room = memory_for(
        options.device,
        leaf_tokens=options.batch_size * (options.context_length or _USUAL_TOKENS),
        ranks=first.plan.num_ranks,
        busy_ranks=most,
    )
    threads = choose_threads(most, requested=options.threads)
    scaling = planned(size_of(options.model_size, load, room), threads)
    together = replace(load, contestants=len(scaling.modes) + 1)
    if fits(scaling.plan.settings.config, together, room):
        return scaling
    return replace(scaling, plan=built_per_turn(scaling.plan))


def _measure(plan: dict[str, Any]) -> dict[str, Any]:
    """One rank's part; see `ranks.Measure`."""
    from gradsync.bench.sync_worker import measure

    return measure(plan)


def _work(options: ScalingOptions, scaling: ScalingPlan, world: World) -> int:
    outcome = measure_on_ranks(
        _COMMAND,
        plan_to_json(scaling.plan),
        _measure,
        world=world,
        world_size=scaling.plan.num_ranks,
    )
    if outcome.result is None:
        return outcome.code
    _tell(options, scaling, outcome.result["results"])
    return 0


def _tell(
    options: ScalingOptions, scaling: ScalingPlan, results: Sequence[Mapping[str, Any]]
) -> None:
    from gradsync.bench.scaling_report import notes_of, print_report
    from gradsync.bench.scaling_result import points_of

    environment = results[-1]["environment"]  # of the most ranks
    on_cpu = results[-1]["device"] == "cpu"
    points = points_of(scaling, results, options.threshold)
    notes = notes_of(scaling, on_cpu=on_cpu, cores=environment["cores"])
    human = sys.stderr if options.as_json else sys.stdout
    about: dict[str, Any] = {
        "threshold": options.threshold,
        "notes": notes,
        "environment": environment,
    }
    print_report(scaling, points, stream=human, **about)
    data = {
        "threshold": options.threshold,
        "same_host_cpu": on_cpu,
        "notes": notes,
        "plan": plan_to_json(scaling.plan),
        "points": [point.as_json() for point in points],
    }
    command = command_of(options, _COMMAND)
    if options.as_json:
        document = {"environment": environment, "command": command, **data}
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    if options.plot:
        from gradsync.bench.plot_scaling import plot_scaling

        plot_scaling(Path(options.plot), scaling, points, **about)
    if options.out:
        samples = [result["contestants"] for result in results]
        path = write_record(
            Path(options.out),
            name="scaling",
            command=command,
            environment=environment,
            data={**data, "samples": samples},
        )
        print(f"wrote {path}", file=human)
