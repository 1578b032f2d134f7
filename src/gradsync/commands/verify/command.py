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

from gradsync.commands.cli.ranks import WORKER, Signals, Stopped, start_ranks, until_stopped
from gradsync.commands.verify.settings import MODELS, VerifyPlan, make_plan
from gradsync.errors import ConfigError, PeerError
from gradsync.runtime import environ
from gradsync.runtime.arguments import parse
from gradsync.runtime.bounds import MOST_RANKS, whole_number
from gradsync.runtime.resolve import resolve
from gradsync.sync.options import listed
from gradsync.sync.registry import STRATEGIES, chosen_strategy

if TYPE_CHECKING:
    from gradsync.commands.verify.result import Result
    from gradsync.world import World

# Launchers end all ranks when the first one fails: give rank 0 time to report.
_SILENCE_S = 2.0
_QUICK_STEPS = 3


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
        return _show(plan, as_json=options.as_json)
    return until_stopped(world, lambda: _work(options, plan, world))


def _work(options: VerifyOptions, plan: VerifyPlan, world: World) -> int:
    started = time.perf_counter()
    if _is_quick(options, world):
        print(
            "quick check: every strategy and model on 1, 2 and 3 ranks in fp32, three steps; left "
            "out are 4 ranks, bf16 and a fourth step (--thorough: everything, four times as long)",
            file=sys.stderr if options.as_json else sys.stdout,
            flush=True,
        )
    # Torch's warnings about its sockets repeat our one-line results, with stacks.
    quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with Signals() as signals:
        with environ.exported(quiet), TemporaryDirectory(prefix="gradsync-verify-") as folder:
            try:
                work = _join if world.is_distributed else _start
                results = work(plan, Path(folder), signals)
            finally:
                signals.hold()
        if world.is_main:
            return _report(options, plan, results, time.perf_counter() - started)
    return 0 if all(result.passed for result in results) else 1


def plan_of(options: VerifyOptions, world: World) -> VerifyPlan:
    """The requested matrix; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
    """
    quick = _is_quick(options, world)
    sizes = [_number(word) for word in _split(options.world_sizes or ("1,2,3,4", "1,2,3")[quick])]
    if options.world_size is not None:
        sizes = [options.world_size]
    if world.is_distributed:
        sizes = [world.world_size]
    few = quick and options.num_samples is None
    every = options.strategies in ("", "all")
    strategies = list(STRATEGIES) if every else listed(options.strategies)
    for word in strategies:
        chosen_strategy(word)
    plan = make_plan(
        strategies=strategies,
        world_sizes=sizes,
        models=["target"] if options.target else _split(options.models or ",".join(MODELS)),
        dtypes=_split(options.dtypes or ("fp32,bf16", "fp32")[quick]),
        num_steps=options.num_steps or (_QUICK_STEPS if few else None),
        num_samples=options.num_samples,
        target=options.target,
    )
    if options.target and world.is_main:  # before any rank is started
        from gradsync.commands.verify.run import Task
        from gradsync.commands.verify.target_check import check_target

        dtype, settings = plan.launches[0][0].dtype, plan.settings
        check_target(Task(strategy="naive", model="target", dtype=dtype, settings=settings))
    return plan


def _is_quick(options: VerifyOptions, world: World) -> bool:
    """Whether no option was chosen: the run must then be short."""
    chosen = (options.strategies, options.world_sizes, options.models, options.dtypes)
    chosen += (options.target,)
    return not (
        options.thorough or any(chosen) or options.world_size is not None or world.is_distributed
    )


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
        with open_session(plan.settings) as world:
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
        return broken_off(read_done(folder), cells, *_blame(error, rank))


def _blame(error: BaseException, rank: int) -> tuple[str, list[int]]:
    """The failure that ended the ranks, in one line and as ranks."""
    if isinstance(error, PeerError):
        return str(error).partition("\n")[0], [error.rank] if error.rank >= 0 else []
    if isinstance(error, Stopped):
        # A launcher stops a rank when another one has failed: finished work must not be lost.
        return f"rank {rank} was ended by {error}, perhaps because another one failed", []
    return f"rank {rank} raised {type(error).__name__}: {error}", [rank]


def _tell(result: Result) -> None:
    """Show progress on a terminal; the report has the rest."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{result.status} {result.name}", end="\r", file=sys.stderr, flush=True)


def _report(options: VerifyOptions, plan: VerifyPlan, results: list[Result], seconds: float) -> int:
    from gradsync.commands.verify.result import document, print_report

    print_report(results, seconds, sys.stderr if options.as_json else sys.stdout)
    if options.as_json:
        made = document(plan.settings, results, seconds)
        print(json.dumps(made, indent=1, allow_nan=False), flush=True)
    return 0 if all(result.passed for result in results) else 1


def _show(plan: VerifyPlan, *, as_json: bool) -> int:
    names = [cell.name for cells in plan.launches for cell in cells]
    print(json.dumps(names, indent=1) if as_json else "\n".join(names))
    return 0


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(word: str) -> int:
    number = whole_number(word.removeprefix("-"), MOST_RANKS)
    if number is None:
        raise ConfigError(
            f"--world-sizes: {word[:80]!r} is not a number of ranks, at most {MOST_RANKS}"
        )
    return -number if word[0] == "-" else number
