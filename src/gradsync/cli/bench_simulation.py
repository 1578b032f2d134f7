"""`gradsync bench simulation`: are simulated steps as long as real ones?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.memory_choice import memory_for, size_of
from gradsync.bench.scaling import parse_world_sizes
from gradsync.bench.simulation import (
    SimulationPlan,
    collectives_settings,
    fits_from,
    predictions_of,
    print_report,
    simulation_plan,
)
from gradsync.bench.sync_plan import fitting, settings_of
from gradsync.cli.bench_collectives import EXPERIMENT as COLLECTIVES
from gradsync.cli.experiment import Ask, Experiment, Findings, command_of
from gradsync.errors import ConfigError
from gradsync.runtime.threads import choose_threads

if TYPE_CHECKING:
    from gradsync.plan.collectives import Fit
    from gradsync.world import World

_COMMAND = ("bench", "simulation")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """Predict training steps on 2, 4 ... ranks of this host, measure them, show both.

    A prediction is made of ranks that compute and talk to nobody, and of the collectives' measured
    costs; it never sees the step that it predicts. On CPUs.
    """

    world_sizes: str = "2,4"
    """Numbers of ranks with commas between them."""
    strategies: str = "invariant,bucketed,torch_ddp"
    """What to predict, with options if need be: bucketed:bucket_mb=1."""
    model_size: str = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b."""
    batch_size: int = 1
    """Sequences per rank and step."""
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    leaves_per_rank: int = 1
    """Micro-batches into which a rank's sequences are divided."""
    num_steps: int = 5
    """Optimizer steps of a turn that count."""
    num_warmup: int = 1
    """Optimizer steps of a turn before those."""
    rounds: int = 7
    """Turns of each."""
    seconds_per_point: float = 0.2
    """Time for one collective at one size, about, seconds."""
    dtype: str = "bf16"
    """fp32, or bf16 (autocast over fp32 weights)."""
    threads: int | None = None
    """Intra-op threads of a rank, the same for all; default: cores / the most ranks."""
    seed: int = 0
    """Names tokens and weights."""
    out: str = ""
    """Write record.json, with every sample, into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False
    """Only say what would be measured."""


def plan_of(options: SimulationOptions, world: World) -> SimulationPlan:
    """Check the request.

    Raises:
        ConfigError: an unknown size or strategy, numbers that cannot be, another launcher, a model
            that does not fit into memory.
    """
    if world.is_distributed:
        raise ConfigError(
            "bench simulation starts its own ranks, of several world sizes: run it without "
            f"{world.launcher}"
        )
    most = parse_world_sizes(options.world_sizes)[-1]
    threads = choose_threads(most, requested=options.threads)
    settings = settings_of(options, threads=threads, device="cpu")
    simulation = simulation_plan(
        settings,
        strategies=options.strategies,
        world_sizes=options.world_sizes,
        batch_size=options.batch_size,
    )
    collectives_settings(simulation, options.seconds_per_point)  # refuses what cannot be
    load, room = memory_for(
        "cpu",
        leaf_tokens=options.batch_size // options.leaves_per_rank * settings.tokens,
        ranks=simulation.plan.num_ranks,
        busy_ranks=most,
    )
    size_of(options.model_size, load, room)  # refuses what fits for no contestant alone
    contestants = len(simulation.strategies) + 2
    return replace(simulation, plan=fitting(simulation.plan, load, room, contestants=contestants))


def _collect(
    options: SimulationOptions, simulation: SimulationPlan, world: World, ask: Ask
) -> tuple[dict[int, list[Fit]], Sequence[Mapping[str, Any]]]:
    """Lines through the collectives' costs by number of ranks, and what steps took."""
    settings = collectives_settings(simulation, options.seconds_per_point)
    sizes = simulation.plan.world_sizes[1:]
    fits = {size: fits_from(ask(settings, size, of=COLLECTIVES)) for size in sizes}
    return fits, ask(simulation.plan, simulation.plan.num_ranks)["results"]


def _findings(
    options: SimulationOptions, simulation: SimulationPlan, collected: Any, world: World
) -> Findings:
    fits, results = collected
    environment = results[-1]["environment"]  # of the most ranks
    found = predictions_of(simulation, results, fits, cores=environment["cores"])
    return Findings(
        environment=environment,
        command=command_of(options, _COMMAND),
        data={
            "plan": asdict(simulation.plan),
            "predictions": [each.as_json() for each in found],
            "fits": {str(size): [fit.to_json() for fit in lines] for size, lines in fits.items()},
        },
        samples=[result["contestants"] for result in results],
        show=partial(print_report, simulation, found, environment),
    )


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=SimulationOptions,
    measure="gradsync.bench.sync_run:measure",
    variants=plan_of,
    collect=_collect,
    metrics=_findings,
    dry=lambda simulation: asdict(simulation.plan),
)
run = EXPERIMENT.run
