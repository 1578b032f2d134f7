"""One training run from configuration to summary."""

from __future__ import annotations

import io
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from gradsync.checkpoint.store import CheckpointStore
from gradsync.checkpoint.weights import weights_sha256
from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.files import read_object
from gradsync.data.tokenizer import Tokenizer
from gradsync.errors import ConfigError, GradsyncError, RunError, UsageError
from gradsync.models.config import GPTConfig
from gradsync.models.generate import generate
from gradsync.models.gpt import GPT
from gradsync.runtime.failure import communication_error
from gradsync.runtime.signals import StopRequest
from gradsync.train.config import TrainConfig
from gradsync.train.fingerprint import numeric_fingerprint
from gradsync.train.loop import Totals, Trainer
from gradsync.train.progress import Progress
from gradsync.train.run_dir import RunDir
from gradsync.train.setup import Data, Learner, build_learner, model_config, open_data
from gradsync.train.size import check_size
from gradsync.train.state import Resumed, restore
from gradsync.world import World

EXIT_REQUEUE = 75

log = logging.getLogger("gradsync")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """0 done, 75 stopped by a signal with the checkpoint written."""
    summary: dict[str, Any]
    """Contents of `summary.json`; on rank 0 only, else empty."""


def train(
    config: TrainConfig,
    world: World,
    *,
    threads: int,
    stream: TextIO | None = None,
    notes: Sequence[str] = (),
) -> Outcome:
    """Train as `config` says, as one rank of `world`; call it inside `with gs.init()`.

    Args:
        config: `out` must be set, and equal on all ranks.
        world: from `gs.init()`.
        threads: intra-op threads of this rank, for the fingerprint.
        stream: where rank 0 prints; stdout by default.
        notes: more lines for its introduction.

    Raises:
        GradsyncError: see the error tree; nothing that was there before is lost.
    """
    run_dir = RunDir(config.out)
    with StopRequest(announce=world.is_main) as stop:
        progress = Progress(
            config.steps,
            world.world_size,
            enabled=world.is_main,
            stream=stream or sys.stdout,
            # mpirun and srun may give rank 0 a terminal and write what it gets to a file.
            live=world.launcher in ("python", "torchrun", "env"),
        )
        try:
            return _train(
                config,
                world,
                threads=threads,
                run_dir=run_dir,
                progress=progress,
                stop=stop,
                notes=notes,
            )
        finally:
            progress.stop()
            run_dir.close()


def _train(
    config: TrainConfig,
    world: World,
    *,
    threads: int,
    run_dir: RunDir,
    progress: Progress,
    stop: StopRequest,
    notes: Sequence[str],
) -> Outcome:
    comm = communicator(world)
    if world.is_main and config.resume == "none":
        run_dir.refuse_overwrite()
    data = open_data(config, world, comm)
    shape = model_config(config, data.vocab_size)
    with _rank_log(run_dir, world) as begin_log:
        learner, kind = _learner(config, world, shape, comm)
        fingerprint = numeric_fingerprint(config, world, data.plan, threads=threads)
        store = CheckpointStore(run_dir.checkpoints, config.checkpoint.keep_last)
        resumed = restore(
            config, learner, data.train, fingerprint=fingerprint, comm=comm, store=store
        )
        begin_log()
        if world.is_main:
            _introduce(progress, config, world, data, learner, threads=threads)
            for line in notes:
                progress.say(line)
            for note in resumed.notes:
                progress.say(f"note: {note}")
            if resumed.source:
                progress.say(f"continuing from {resumed.source} (step {resumed.step})")
        if resumed.source and resumed.step >= config.steps:
            return _already_done(config, world, run_dir, resumed, progress)
        if world.is_main:
            run_dir.begin(config, world, threads=threads, done_steps=resumed.step)
        trainer = kind(
            config,
            world,
            comm,
            data,
            learner,
            fingerprint=fingerprint,
            run_dir=run_dir,
            store=store,
            progress=progress,
        )
        progress.start(resumed.step)
        totals = trainer.run(resumed.step, stop)
        progress.stop()
        data.train.close()
        figures = trainer.closing_figures()
        return _finish(
            config,
            world,
            data,
            learner,
            totals=totals,
            figures=figures,
            run_dir=run_dir,
            progress=progress,
        )


def _learner(
    config: TrainConfig, world: World, shape: GPTConfig, comm: Communicator
) -> tuple[Learner, type[Trainer]]:
    """The learner and its loop: for a whole model, or for this rank's part of one.

    Raises:
        ConfigError: no memory holds such a model.
    """
    check_size(shape, device=world.device, num_nodes=world.num_nodes)
    layout = config.layout(world.world_size)
    if layout.model_ranks == 1:
        return build_learner(config, world, shape, comm), Trainer
    # Other runs need not spend the time to import torch's pipelining.
    from gradsync.train.split_loop import SplitTrainer
    from gradsync.train.split_setup import build_split_learner

    return build_split_learner(config, layout, world, shape, comm), SplitTrainer


def _already_done(
    config: TrainConfig, world: World, run_dir: RunDir, resumed: Resumed, progress: Progress
) -> Outcome:
    """Nothing to do: leave the files of the finished run as they are."""
    progress.say(
        f"{run_dir.path} has {resumed.step} steps already and {config.steps} were asked for: "
        "nothing to do (give more --steps to go on)"
    )
    summary = (
        read_object(run_dir.path / "summary.json") | {"stopped_by": ""} if world.is_main else {}
    )
    return Outcome(exit_code=0, summary=summary)


def _finish(
    config: TrainConfig,
    world: World,
    data: Data,
    learner: Learner,
    *,
    totals: Totals,
    figures: Mapping[str, Any],
    run_dir: RunDir,
    progress: Progress,
) -> Outcome:
    exit_code = EXIT_REQUEUE if totals.stopped_by else 0
    weights = learner.sync.full_weights()  # all ranks, where parameters are spread over them
    if not world.is_main:
        return Outcome(exit_code=exit_code, summary={})
    summary = _summarise(totals, config, world, data) | dict(figures)
    summary["weights_sha256"] = weights_sha256(
        (name, weights[name]) for name in learner.parameter_names
    )
    run_dir.write_json("summary.json", summary)
    if totals.stopped_by:
        progress.say(
            f"stopped by {totals.stopped_by} after step {totals.step}; checkpoint written, the "
            f"same command with --out {run_dir.path} goes on from there"
        )
    else:
        model = learner.whole_model(weights)
        _farewell(progress, config, data, model, totals=totals, run_dir=run_dir)
    return Outcome(exit_code=exit_code, summary=summary)


def _introduce(
    progress: Progress,
    config: TrainConfig,
    world: World,
    data: Data,
    learner: Learner,
    *,
    threads: int,
) -> None:
    shape = learner.model.config
    shares = isinstance(learner.sync.comm, SharedMemoryCommunicator)
    through = " through shared memory" if shares else ""
    progress.say(
        f"{world.world_size} rank(s) by {world.launcher} on {world.num_nodes} host(s), "
        f"{world.device.partition(':')[0]}, {threads} thread(s) a rank, {config.dtype}, "
        f"sync {config.sync}{through}"
    )
    progress.say(
        f"model {config.preset}: {shape.n_embd} wide x {shape.n_layer} deep, "
        f"{shape.num_params():,} parameters, vocabulary {shape.vocab_size}"
    )
    layout = config.layout(world.world_size)
    if layout.model_ranks > 1:
        by = f", {config.pipeline_schedule}" if layout.pp > 1 else ""
        progress.say(f"split {layout}{by}: each replica of the model is {layout.model_ranks} ranks")
    progress.say(f"data {data.source}")
    progress.say(data.plan.describe("replica" if config.parallel else "rank"))
    if scaling := config.optim.describe_scaling(config.tokens_per_update):
        progress.say(scaling)


def _summarise(totals: Totals, config: TrainConfig, world: World, data: Data) -> dict[str, Any]:
    tokens_timed = totals.steps_timed * config.tokens_per_update
    return {
        "steps": totals.step,
        "tokens": totals.step * config.tokens_per_update,
        "final_train_loss": _number(totals.train_loss),
        "val_loss": _number(totals.val_loss),
        "unigram_entropy": None if data.meta is None else data.meta.unigram_entropy_nats,
        "world_size": world.world_size,
        "launcher": world.launcher,
        "sync": config.sync,
        "peak_lr": config.optim.scaled(config.tokens_per_update).lr,
        "tokens_per_s": tokens_timed / totals.wall_s if totals.wall_s else None,
        "exposed_comm_fraction": totals.exposed_s / totals.wall_s if totals.wall_s else None,
        "wall_s": totals.wall_s,
        "stopped_by": totals.stopped_by,
        "config": asdict(config),
    }


def _farewell(
    progress: Progress,
    config: TrainConfig,
    data: Data,
    model: GPT,
    *,
    totals: Totals,
    run_dir: RunDir,
) -> None:
    """Final figures, a sample of text, and where everything lies."""
    if math.isfinite(totals.train_loss):
        progress.say(f"final training loss {totals.train_loss:.4f}")
    if math.isfinite(totals.val_loss):
        progress.say(f"final validation loss {totals.val_loss:.4f} nats per token")
    if data.meta is not None:
        progress.say(
            f"for comparison: {data.meta.unigram_entropy_nats:.4f} is the entropy of single "
            f"{data.meta.tokenizer} tokens (a model that only counts them)"
        )
    if data.load_tokenizer is not None and config.sample_tokens:
        progress.say(_sample(config, data.load_tokenizer, model))
    progress.say(f"everything lies in {run_dir.path}")


def _sample(config: TrainConfig, load_tokenizer: Callable[[], Tokenizer], model: GPT) -> str:
    """Some text, or why there is none: a run that is done does not fail for it."""
    try:
        tokenizer = load_tokenizer()
    except UsageError as error:
        return f"no sample: {error}"
    prompt = tokenizer.encode("def ").tolist()
    ids = generate(model, prompt, config.sample_tokens, seed=config.seed)
    return f"--- a sample ---\n{tokenizer.decode(ids)}\n----------------"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _rank_log(run_dir: RunDir, world: World) -> Iterator[Callable[[], None]]:
    """Every rank's own file: when it began, what was logged, how it ended (with the traceback).

    Made when what this gives is called, or by this rank's own failure, not by a refused request;
    of another rank's this one hears in a collective that fails.
    """
    early = io.StringIO()
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler(early)

    def begin() -> None:
        try:
            file = run_dir.open_log(world.rank)
        except OSError as error:
            raise ConfigError(f"cannot write to --out {run_dir.path}: {error.strerror}") from error
        file.write(early.getvalue())
        handler.setStream(file)

    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    own = logging.Logger("gradsync.rank")  # not in the tree: nothing of it reaches the terminal
    own.addHandler(handler)
    log.addHandler(handler)
    try:
        own.info("started: %s", world.describe())
        yield begin
        own.info("ended")
    except BaseException as error:
        own.exception("ended by %s", type(error).__name__)
        refused = isinstance(error, UsageError) or communication_error(error)
        if handler.stream is early and not refused:
            with suppress(ConfigError):
                begin()
        raise
    finally:
        log.removeHandler(handler)
        handler.stream.close()


def note_end(config: TrainConfig, outcome: Outcome) -> None:
    """Write `exit.json` of a run that ended in an orderly way; rank 0 only."""
    stopped_by = outcome.summary.get("stopped_by", "")
    reason = f"stopped by {stopped_by}" if stopped_by else "done"
    RunDir(config.out).write_json("exit.json", {"exit_code": outcome.exit_code, "reason": reason})


def note_failure(config: TrainConfig, error: Exception) -> None:
    """Leave `exit.json` behind when the run failed: torchrun folds every failure into 1.

    Rank 0 only, and only where a run directory was made; a failure to write it is not another one.
    """
    run_dir = RunDir(config.out)
    if not config.out or not run_dir.path.is_dir():
        return
    code = error.exit_code if isinstance(error, GradsyncError) else 1
    with suppress(RunError):
        run_dir.write_json(
            "exit.json", {"exit_code": code, "reason": "failed", "error": str(error)}
        )
