"""`gradsync verify`: prove strategies right against one rank, or say why they are not."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import STRATEGIES, find_strategy
from gradsync.verify.plan import MODELS, Plan, Settings, make_plan, split_list

if TYPE_CHECKING:
    from gradsync.verify.result import Result
    from gradsync.world import World

_WORKER = "--worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Train every strategy on one rank and on W, on the same global batches, and compare losses,
    gradients, weights and optimizer states step by step.

    `invariant` must give the same bits; others must stay within what the order of sums explains;
    lossy ones are held to what they promise. A failure is named: what, where, and from what cause.
    Started by torchrun, mpirun or srun, it verifies at that number of ranks.
    """

    strategies: str = "all"
    """Names with commas between them, or all."""
    world_sizes: str = "1,2,3,4"
    """Numbers of ranks, started on this host one after the other."""
    world_size: int | None = None
    """Only this one."""
    models: str = ",".join(MODELS)
    """mlp, conv, gpt."""
    dtypes: str = "fp32,bf16"
    """fp64, fp32, bf16 (autocast over fp32 weights)."""
    dtype: str = ""
    """Only this one."""
    target: str = ""
    """pkg.module:factory of your own; factory() returns (model, map-style data set of (input,
    target), loss_sum(output, target))."""
    num_steps: int = 4
    """Optimizer steps of each run."""
    num_samples: int | None = None
    """Samples of the data set to use; by default as many as make the last step a short one."""
    num_leaves: int = 5
    """Micro-batches in a global batch, over all ranks."""
    leaf_size: int = 3
    """Samples in a micro-batch."""
    optimizer: str = "adamw"
    """adamw or sgd (with momentum)."""
    clip_norm: float = 0.5
    """Largest norm of the gradient; 0 does not clip."""
    batch_norm: str = "local"
    """sync, local or freeze, for models that have BatchNorm."""
    cross_load: bool = True
    """Also hand checkpoints from one world size and strategy to another."""
    seed: int = 0
    """Names weights, order and dropout."""
    csv: str = ""
    """Write one row per cell to this file."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False
    """Only list what would run."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync verify ARGV`; 0 when all is as promised, else 1.

    Raises:
        ConfigError: an unknown strategy, model or dtype, numbers that cannot be.
    """
    if argv[:1] == [_WORKER]:
        from gradsync.verify.worker import run_worker

        return run_worker(Path(argv[1]))
    options = tyro.cli(VerifyOptions, args=argv, prog="gradsync verify")
    world = resolve(environ.snapshot()).world
    plan = plan_of(options, world)
    if options.dry_run:
        return _show(plan, as_json=options.as_json)
    started = time.perf_counter()
    # Torch's own warnings about its sockets repeat, with stacks, what results say in a line.
    quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with environ.exported(quiet), tempfile.TemporaryDirectory(prefix="gradsync-verify-") as folder:
        work = _join if world.is_distributed else _start
        results = work(plan, Path(folder))
    if not world.is_main:
        return 0 if all(result.passed for result in results) else 1
    return _report(options, plan, results, time.perf_counter() - started)


def plan_of(options: VerifyOptions, world: World) -> Plan:
    """The matrix that was asked for; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
    """
    settings = Settings(
        num_steps=options.num_steps,
        num_samples=options.num_samples,
        num_leaves=options.num_leaves,
        leaf_size=options.leaf_size,
        optimizer=options.optimizer,
        clip_norm=options.clip_norm or None,
        batch_norm=options.batch_norm,
        seed=options.seed,
        target=options.target,
    )
    strategies = list(STRATEGIES) if options.strategies == "all" else split_list(options.strategies)
    for name in strategies:
        find_strategy(name)
    if options.target:
        from gradsync.verify.problem import find_factory

        find_factory(options.target)  # a typing error is found before any rank is started
    sizes = [_number(word) for word in split_list(options.world_sizes)]
    if options.world_size is not None:
        sizes = [options.world_size]
    if world.is_distributed:
        sizes = [world.world_size]
    return make_plan(
        strategies=strategies,
        world_sizes=sizes,
        models=["target"] if options.target else split_list(options.models),
        dtypes=[options.dtype] if options.dtype else split_list(options.dtypes),
        settings=settings,
        cross_load=options.cross_load,
    )


def _start(plan: Plan, folder: Path) -> list[Result]:
    """Start the ranks here, world size after world size."""
    from gradsync.launch.local import launch_local
    from gradsync.verify.matrix import run_matrix

    def start_ranks(folder: Path, world_size: int) -> int:
        return launch_local(["verify", _WORKER, str(folder)], world_size, log_dir=None)

    return run_matrix(plan, folder, start_ranks, _tell)


def _join(plan: Plan, folder: Path) -> list[Result]:
    """Be one rank of a launcher's: all jobs of the one world size there is."""
    from gradsync.verify.plan import launches
    from gradsync.verify.worker import Worker, open_session

    (launch,) = launches(plan)
    with open_session(plan.settings) as world:
        worker = Worker(
            plan.settings,
            world,
            folder=folder,
            done=folder / "done.jsonl",
            noted=folder / "error.json",
        )
        return worker.run(launch.jobs, _tell)


def _tell(result: Result) -> None:
    """On a terminal, how far it is; the report says the rest."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{result.status} {result.name}", end="\r", file=sys.stderr, flush=True)


def _report(options: VerifyOptions, plan: Plan, results: list[Result], seconds: float) -> int:
    from gradsync.verify.report import document, print_report, write_csv

    print_report(results, seconds, sys.stderr if options.as_json else sys.stdout)
    if options.csv:
        write_csv(Path(options.csv), results)
    if options.as_json:
        print(json.dumps(document(plan, results, seconds), indent=1))
    return 0 if all(result.passed for result in results) else 1


def _show(plan: Plan, *, as_json: bool) -> int:
    from gradsync.verify.plan import launches

    jobs = [job for launch in launches(plan) for job in launch.jobs]
    names = [
        job.cell.name + (f" from {job.source.name}" if job.source is not None else "")
        for job in jobs
    ]
    print(json.dumps(names, indent=1) if as_json else "\n".join(names))
    return 0


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"--world-sizes: {word!r} is not a number") from None
