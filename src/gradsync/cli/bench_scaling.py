"""`gradsync bench scaling`: does training get faster with more ranks, and by how much?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.memory_choice import memory_for, size_of
from gradsync.bench.scaling import (
    ScalingPlan,
    notes_of,
    points_of,
    print_report,
    scaling_plan,
    usual_sizes,
)
from gradsync.bench.sync_plan import fitting, settings_of
from gradsync.cli.experiment import Experiment, Findings, command_of
from gradsync.errors import ConfigError
from gradsync.runtime.machine import choose_threads, usable_cores

if TYPE_CHECKING:
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


def plan_of(options: ScalingOptions, world: World) -> ScalingPlan:
    """Check the request.

    Raises:
        ConfigError: an unknown size, mode or strategy, numbers that cannot be, another launcher.
    """
    if world.is_distributed:
        raise ConfigError(
            "bench scaling starts its own ranks, of several world sizes: run it without "
            f"{world.launcher}; bench sync measures the ranks that a launcher started"
        )
    if not 0 < options.threshold < math.inf:
        raise ConfigError(
            f"--threshold must be positive and finite, 0.85 for 85 %; got {options.threshold}"
        )

    def planned(model_size: str, threads: int) -> ScalingPlan:
        return scaling_plan(
            settings_of(options, model_size=model_size, threads=threads),
            strategy=options.strategy,
            world_sizes=options.world_sizes or usual_sizes(usable_cores()),
            mode=options.mode,
            batch_size=options.batch_size,
        )

    # Sizes first, from the smallest model: the threads and the model depend on them.
    first = planned("tiny" if options.model_size == "auto" else options.model_size, 1)
    most = first.plan.world_sizes[-1]
    load, room = memory_for(
        options.device,
        leaf_tokens=options.batch_size * (options.context_length or _USUAL_TOKENS),
        ranks=first.plan.num_ranks,
        busy_ranks=most,
    )
    threads = choose_threads(most, requested=options.threads)
    scaling = planned(size_of(options.model_size, load, room), threads)
    contestants = len(scaling.modes) + 1
    return replace(scaling, plan=fitting(scaling.plan, load, room, contestants=contestants))


def _findings(
    options: ScalingOptions,
    scaling: ScalingPlan,
    results: Sequence[Mapping[str, Any]],
    world: World,
) -> Findings:
    from gradsync.bench.plot import plot_scaling

    environment = results[-1]["environment"]  # of the most ranks
    on_cpu = results[-1]["device"] == "cpu"
    points = points_of(scaling, results, options.threshold)
    notes = notes_of(scaling, on_cpu=on_cpu, cores=environment["cores"])
    about: dict[str, Any] = {
        "threshold": options.threshold,
        "notes": notes,
        "environment": environment,
    }
    return Findings(
        environment=environment,
        command=command_of(options, _COMMAND),
        data={
            "threshold": options.threshold,
            "same_host_cpu": on_cpu,
            "notes": notes,
            "plan": asdict(scaling.plan),
            "points": [asdict(point) for point in points],
        },
        samples=[result["contestants"] for result in results],
        show=lambda stream: print_report(scaling, points, stream=stream, **about),
        draw=lambda path: plot_scaling(path, scaling, points, **about),
    )


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=ScalingOptions,
    measure="gradsync.bench.sync_run:measure",
    variants=plan_of,
    collect=lambda options, scaling, world, ask: ask(scaling.plan, scaling.plan.num_ranks)[
        "results"
    ],
    metrics=_findings,
    dry=lambda scaling: asdict(scaling.plan),
)
run = EXPERIMENT.run
