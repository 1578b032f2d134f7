"""`gradsync verify`: prove strategies right against one rank, or say why they are wrong."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import tyro

from gradsync.commands.launch.ranks import WORKER, Signals, Stopped, start_ranks, until_stopped
from gradsync.commands.train.config import listed
from gradsync.commands.verify.settings import MODELS, VerifyPlan, chosen_strategy, make_plan
from gradsync.errors import ConfigError, PeerError
from gradsync.runtime import environ
from gradsync.runtime.arguments import parse
from gradsync.runtime.bounds import MOST_RANKS, whole_number
from gradsync.runtime.resolve import resolve
from gradsync.sync.registry import STRATEGIES

if TYPE_CHECKING:
    from gradsync.commands.verify.result import Result
    from gradsync.world import World

# Launchers end all ranks when the first one fails: give rank 0 time to report.
_SILENCE_S = 2.0
_QUICK_STEPS = 3
_QUICK = (
    "quick check: every strategy and model on 1, 2 and 3 ranks in fp32, three steps; left out are "
    "4 ranks, bf16 and a fourth step (--thorough: everything, four times as long)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Train every strategy on one rank and on W, on the same global batches, and compare losses,
    gradients, weights and optimizer states step by step. Checkpoints are loaded on another number
    of ranks and by another strategy, too.

    `invariant` must give the same bits. Others may differ only by the order of sums; lossy ones
    must keep their promise. A failure report names what failed, where, and the cause. Under
    torchrun, mpirun or srun, it verifies that number of ranks. By default a quick check runs: all
    strategies and models on 1, 2 and 3 ranks in fp32, three steps.
    """

    thorough: bool = False
    """All checks instead of the quick check: also 4 ranks, bf16, and a fourth step."""
    strategies: str = ""
    """Names separated by commas, each optionally with options: zero1,invariant:collective=backend;
    or all (the default)."""
    world_sizes: str = ""
    """Numbers of ranks, started on this host one after the other; empty: 1,2,3,4."""
    world_size: int | None = None
    """Only this one."""
    models: str = ""
    """mlp, conv, gpt; empty: all."""
    dtypes: str = ""
    """fp64, fp32, bf16 (autocast over fp32 weights; default: fp32,bf16)."""
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
    dry_run: bool = False
    """Only list what would run."""

    def is_quick(self, world: World) -> bool:
        """Whether no option was chosen: the run must then be short."""
        chosen = (self.strategies, self.world_sizes, self.models, self.dtypes, self.target)
        chosen = self.thorough or any(chosen) or self.world_size is not None
        return not (chosen or world.is_distributed)


def run(argv: list[str]) -> int:
    """Run `gradsync verify ARGV`.

    Returns:
        0 if all promises hold, else 1; 128 + signal after one.

    Raises:
        ConfigError: an unknown strategy, model or dtype, invalid numbers.
        RunError: ranks could not start.
    """
    if argv[:1] == [WORKER]:
        from gradsync.commands.verify.matrix import run_worker

        return run_worker(Path(argv[1]))
    options = parse(VerifyOptions, argv, "verify")
    world = resolve(environ.snapshot()).world
    plan = plan_of(options, world)
    if options.dry_run:
        names = [cell.name for cells in plan.launches for cell in cells]
        print(json.dumps(names, indent=1) if options.as_json else "\n".join(names))
        return 0
    return until_stopped(world, lambda: _work(options, plan, world))


def plan_of(options: VerifyOptions, world: World) -> VerifyPlan:
    """The requested matrix; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
    """
    quick = options.is_quick(world)
    words = options.world_sizes or ("1,2,3" if quick else "1,2,3,4")
    sizes = [whole_number(word.strip(), MOST_RANKS) for word in words.split(",")]
    if options.world_size is not None:
        sizes = [options.world_size]
    if world.is_distributed:
        sizes = [world.world_size]
    if None in sizes:
        raise ConfigError(f"--world-sizes: {words[:80]!r} are not numbers of ranks")
    every = options.strategies in ("", "all")
    strategies = list(STRATEGIES) if every else listed(options.strategies)
    for word in strategies:
        chosen_strategy(word)
    num_steps = options.num_steps
    if quick and num_steps is None and options.num_samples is None:
        num_steps = _QUICK_STEPS
    plan = make_plan(
        strategies=strategies,
        world_sizes=[size for size in sizes if size is not None],
        models=["target"] if options.target else listed(options.models or ",".join(MODELS)),
        dtypes=listed(options.dtypes or ("fp32" if quick else "fp32,bf16")),
        num_steps=num_steps,
        num_samples=options.num_samples,
        target=options.target,
    )
    if options.target and world.is_main:  # before any rank is started
        from gradsync.commands.verify.target import check_target

        check_target(plan.settings, plan.launches[0][0].dtype)
    return plan


def _work(options: VerifyOptions, plan: VerifyPlan, world: World) -> int:
    human = sys.stderr if options.as_json else sys.stdout
    started = time.perf_counter()
    if options.is_quick(world):
        print(_QUICK, file=human, flush=True)
    # Torch's warnings about its sockets repeat our one-line results, with stacks.
    quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with (
        Signals() as signals,
        environ.exported(quiet),
        TemporaryDirectory(prefix="gradsync-verify-") as folder,
    ):
        try:
            work = _join if world.is_distributed else _start
            results = work(plan, Path(folder), signals)
        finally:
            signals.hold()
        if world.is_main:
            from gradsync.commands.verify.result import document, print_report

            seconds = time.perf_counter() - started
            print_report(results, seconds, human)
            if options.as_json:
                made = document(plan.settings, results, seconds)
                print(json.dumps(made, indent=1, allow_nan=False), flush=True)
    return 0 if all(result.passed for result in results) else 1


def _start(plan: VerifyPlan, folder: Path, signals: Signals) -> list[Result]:
    """Start the ranks here, one world size after another."""
    from gradsync.commands.launch import local
    from gradsync.commands.verify.matrix import RunEnd, run_matrix

    def start(folder: Path, world_size: int) -> RunEnd:
        ended = start_ranks(["verify", WORKER, str(folder)], world_size, signals)
        deaths = {rank: local.obituary(rank, number) for rank, number in ended.killed.items()}
        return RunEnd(code=ended.code, deaths=deaths)

    return run_matrix(plan, folder, start, _tell)


def _join(plan: VerifyPlan, folder: Path, signals: Signals) -> list[Result]:
    """Be one rank of a launcher's: all cells of its world size.

    These ranks are not started again: after an error, the remaining cells count as not run.
    """
    from gradsync.commands.verify.matrix import broken_off, open_session, read_done, run_cells

    (cells,) = plan.launches
    rank = None
    try:
        signals.check()
        with open_session() as world:
            rank = world.rank
            try:
                return run_cells(cells, plan.settings, world, folder, tell=_tell)
            except Exception:
                # The launcher may now end all ranks; first the session asks which rank failed.
                signals.hold()
                raise
    except (Exception, Stopped) as error:
        if rank is None or signals.received is signal.SIGINT:
            raise
        signals.hold()
        if rank:
            time.sleep(_SILENCE_S)
        said, ranks = f"rank {rank} raised {type(error).__name__}: {error}", [rank]
        if isinstance(error, PeerError):
            said, ranks = str(error).partition("\n")[0], [error.rank] if error.rank >= 0 else []
        elif isinstance(error, Stopped):
            # A launcher stops a rank when another one has failed: finished work must not be lost.
            said, ranks = f"rank {rank} was ended by {error}, perhaps as another one failed", []
        return broken_off(read_done(folder), cells, said, ranks)


def _tell(result: Result) -> None:
    """Show progress on a terminal; the report has the rest."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{result.status} {result.name}", end="\r", file=sys.stderr, flush=True)
