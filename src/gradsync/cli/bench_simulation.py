"""`gradsync bench simulation`: are simulated steps as long as real ones?"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.collectives_plan import Settings
from gradsync.bench.memory_choice import fits as has_room
from gradsync.bench.record import write_record
from gradsync.bench.simulation_plan import (
    SimulationPlan,
    collectives_settings,
    simulation_plan,
    sizes_above_one,
)
from gradsync.bench.sync_plan import SyncSettings, built_per_turn, plan_to_json
from gradsync.cli.arguments import parse
from gradsync.cli.bench_sync import check_places, command_of, memory_for, size_of
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.errors import ConfigError
from gradsync.models.presets import preset
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.runtime.threads import choose_threads
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.hardware.timing.alpha_beta import Fit

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


def run(argv: list[str]) -> int:
    """Carry out `gradsync bench simulation ARGV`.

    Returns:
        0 when all was measured, however good the predictions; 128 + signal after one.

    Raises:
        ConfigError: an unknown size or strategy, numbers that cannot be, another launcher, a model
            that does not fit into memory.
        RunError: ranks could not begin, or results could not be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), _measure)
    options = parse(SimulationOptions, argv, "bench simulation")
    world = resolve(environ.snapshot()).world
    if world.is_distributed:
        raise ConfigError(
            "bench simulation starts its own ranks, of several world sizes: run it without "
            f"{world.launcher}"
        )
    simulation = plan_of(options)
    _collectives(options, simulation)  # refuses what cannot be
    check_places(csv="", plot="", out=options.out)
    if options.dry_run:
        print(json.dumps(plan_to_json(simulation.plan), indent=1))
        return 0
    return until_stopped(world, lambda: _work(options, simulation, world))


def plan_of(options: SimulationOptions) -> SimulationPlan:
    """What was asked for.

    Raises:
        ConfigError: see `run`.
    """
    preset(options.model_size)

    def planned(threads: int) -> SimulationPlan:
        settings = SyncSettings(
            model_size=options.model_size,
            context_length=options.context_length,
            num_steps=options.num_steps,
            num_warmup=options.num_warmup,
            rounds=options.rounds,
            leaves_per_rank=options.leaves_per_rank,
            dtype=options.dtype,
            threads=threads,
            device="cpu",
            seed=options.seed,
        )
        return simulation_plan(
            settings,
            strategies=options.strategies,
            world_sizes=options.world_sizes,
            batch_size=options.batch_size,
        )

    most = planned(1).world_sizes[-1]
    simulation = planned(choose_threads(most, requested=options.threads))
    settings = simulation.plan.settings
    load, room = memory_for(
        "cpu",
        leaf_tokens=options.batch_size // options.leaves_per_rank * settings.tokens,
        ranks=simulation.plan.num_ranks,
        busy_ranks=most,
    )
    size_of(options.model_size, load, room)  # refuses what fits for no contestant alone
    together = replace(load, contestants=len(simulation.strategies) + 2)
    if has_room(settings.config, together, room):
        return simulation
    return replace(simulation, plan=built_per_turn(simulation.plan))


def _measure(plan: dict[str, Any]) -> dict[str, Any]:
    """One rank's part; see `ranks.Measure`."""
    from gradsync.bench.sync_worker import measure

    return measure(plan)


def _measure_collectives(settings: dict[str, Any]) -> dict[str, Any]:
    """Never called here: without a launcher the ranks are processes of `bench collectives`."""
    raise AssertionError(settings)


def _collectives(options: SimulationOptions, simulation: SimulationPlan) -> Settings:
    return collectives_settings(simulation, options.seconds_per_point)


def _work(options: SimulationOptions, simulation: SimulationPlan, world: World) -> int:
    from gradsync.bench.simulation_result import fits_from

    settings = asdict(_collectives(options, simulation))
    fits: dict[int, list[Fit]] = {}
    for size in sizes_above_one(simulation.world_sizes):
        outcome = measure_on_ranks(
            ("bench", "collectives"), settings, _measure_collectives, world=world, world_size=size
        )
        if outcome.result is None:
            return outcome.code
        fits[size] = fits_from(outcome.result)
    outcome = measure_on_ranks(
        _COMMAND,
        plan_to_json(simulation.plan),
        _measure,
        world=world,
        world_size=simulation.plan.num_ranks,
    )
    if outcome.result is None:
        return outcome.code
    _tell(options, simulation, outcome.result["results"], fits)
    return 0


def _tell(
    options: SimulationOptions,
    simulation: SimulationPlan,
    results: Sequence[Mapping[str, Any]],
    fits: Mapping[int, Sequence[Fit]],
) -> None:
    from gradsync.bench.simulation_report import print_report
    from gradsync.bench.simulation_result import predictions_of

    environment = results[-1]["environment"]  # of the most ranks
    found = predictions_of(simulation, results, fits, cores=environment["cores"])
    human = sys.stderr if options.as_json else sys.stdout
    print_report(simulation, found, environment, human)
    data = {
        "plan": plan_to_json(simulation.plan),
        "predictions": [each.as_json() for each in found],
        "fits": {str(size): [fit.to_json() for fit in lines] for size, lines in fits.items()},
    }
    command = command_of(options, _COMMAND)
    if options.as_json:
        document = {"environment": environment, "command": command, **data}
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    if options.out:
        samples = [result["contestants"] for result in results]
        path = write_record(
            Path(options.out),
            name="simulation",
            command=command,
            environment=environment,
            data={**data, "samples": samples},
        )
        print(f"wrote {path}", file=human)
