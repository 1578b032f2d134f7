"""`gradsync verify`: prove strategies right against one rank, or say why they are wrong."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.launch.ranks import WORKER, Signals, until_stopped
from gradsync.commands.train.config import listed
from gradsync.commands.verify.settings import MODELS, VerifyPlan, chosen_strategy, make_plan
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.bounds import MOST_RANKS, whole_number
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import STRATEGIES

if TYPE_CHECKING:
    from gradsync.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Train every strategy on one rank and on W, on the same global batches, and compare losses,
    gradients, weights and optimizer states step by step. Checkpoints are loaded on another number
    of ranks and by another strategy, too.

    `invariant` must give the same bits. Others may differ only by the order of sums; lossy ones
    must keep their promise. A failure report names what failed, where, and the cause. Under
    torchrun, mpirun or srun, it verifies that number of ranks.
    """

    thorough: bool = False
    """Also 4 ranks and bf16: four times as long."""
    strategies: str = ""
    """Names separated by commas, each optionally with options: zero1,invariant:collective=backend;
    or all (the default)."""
    world_sizes: Annotated[str, tyro.conf.arg(aliases=["--world-size"])] = ""
    """Numbers of ranks, started on this host one after the other; empty: 1,2,3."""
    models: str = ""
    """mlp, conv, gpt; empty: all."""
    dtypes: str = ""
    """fp64, fp32, bf16 (autocast over fp32 weights); empty: fp32."""
    target: str = ""
    """Your own pkg.module:factory; factory() returns (model, map-style data set of (input, target),
    loss_sum(output, target))."""
    num_steps: int | None = None
    """Optimizer steps of each run; None: 4, or as many as --num-samples takes."""
    num_samples: int | None = None
    """Samples to train on in each run; with --num-steps, batches are as large as that requires. By
    default, as many as make the last step a short one."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""


def run(argv: list[str]) -> int:
    """Run `gradsync verify ARGV`.

    Returns:
        0 if all promises hold, else 1; 128 + signal after one.

    Raises:
        ConfigError: an unknown strategy, model or dtype, invalid numbers.
    """
    if argv[:1] == [WORKER]:
        from gradsync.commands.verify.matrix import run_worker

        return run_worker(Path(argv[1]))
    options = parse(VerifyOptions, argv, "verify")
    world = resolve(environ.snapshot()).world
    plan = plan_of(options, world)
    return until_stopped(world, lambda: _work(options, plan, world))


def plan_of(options: VerifyOptions, world: World) -> VerifyPlan:
    """The requested matrix; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
    """
    words = options.world_sizes or ("1,2,3,4" if options.thorough else "1,2,3")
    sizes = [whole_number(word.strip(), MOST_RANKS) for word in words.split(",")]
    if world.is_distributed:
        sizes = [world.world_size]
    if None in sizes:
        raise ConfigError(f"--world-sizes must be numbers of ranks, got {words[:80]!r}")
    every = options.strategies in ("", "all")
    strategies = list(STRATEGIES) if every else listed(options.strategies)
    for word in strategies:
        chosen_strategy(word)
    plan = make_plan(
        strategies=strategies,
        world_sizes=[size for size in sizes if size is not None],
        models=["target"] if options.target else listed(options.models or ",".join(MODELS)),
        dtypes=listed(options.dtypes or ("fp32,bf16" if options.thorough else "fp32")),
        num_steps=options.num_steps,
        num_samples=options.num_samples,
        target=options.target,
    )
    if options.target and world.is_main:  # before any rank is started
        from gradsync.commands.verify.problem import check_target

        check_target(plan.settings)
    return plan


def _work(options: VerifyOptions, plan: VerifyPlan, world: World) -> int:
    human = sys.stderr if options.as_json else sys.stdout
    started = time.perf_counter()
    from gradsync.commands.verify.matrix import run_matrix, run_rank
    from gradsync.commands.verify.result import document, print_report

    with Signals() as signals, TemporaryDirectory(prefix="gradsync-verify-") as folder:
        try:
            if world.is_distributed:
                (cells,) = plan.launches
                results = run_rank(world.rank, cells, plan.settings, Path(folder), signals)
            else:
                results = run_matrix(plan, Path(folder), signals)
        finally:
            signals.hold()
        if world.is_main:
            seconds = time.perf_counter() - started
            print_report(results, seconds, human)
            if options.as_json:
                made = document(plan.settings, results, seconds)
                print(json.dumps(made, indent=1, allow_nan=False), flush=True)
    return 0 if all(result.passed for result in results) else 1
