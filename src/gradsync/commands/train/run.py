"""One training run from configuration to summary."""

from __future__ import annotations

import math
import re
import shlex
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from socket import gethostname
from typing import Any, TextIO

import torch

from gradsync.checkpoint.background import BackgroundWriter
from gradsync.checkpoint.store import CheckpointStore
from gradsync.checkpoint.weights import weights_sha256
from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.values import from_rank_0, same_on_all_ranks
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, generate
from gradsync.commands.plan.description import Device
from gradsync.commands.plan.machine import cpu_devices, read_processor, torch_devices
from gradsync.commands.train.check import check_size
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import HINTS
from gradsync.commands.train.data import Data, model_config, open_data
from gradsync.commands.train.faults import FaultPlan
from gradsync.commands.train.learner import Learner, build_learner, kernels
from gradsync.commands.train.loop import Interval, StepProfiler, Totals, Trainer
from gradsync.commands.train.output import Progress, RunDir, finite_or_none
from gradsync.commands.train.state import Resumed, numeric_fingerprint, restore
from gradsync.commands.train.trackers import require_packages
from gradsync.core.files import counted, read_object
from gradsync.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    DriftError,
    GradsyncError,
    LatePeerError,
    LostPeerError,
    RunError,
    UsageError,
)
from gradsync.runtime.peers import process_state
from gradsync.runtime.signals import StopRequest
from gradsync.runtime.store import Presence
from gradsync.runtime.watch import FailureWatch
from gradsync.sync.check_replicas import first_difference
from gradsync.world import World

EXIT_REQUEUE = 75
_OF_EACH_RANK = {"out", "data", "tokenizer", "init", "resume", "device", "backend", "threads"}
_OF_EACH_RANK |= {"nproc_per_node", "num_workers", "keep_memory", "track", "profile"}
_OF_EACH_RANK |= {"timeout_s", "rendezvous_timeout_s", "silence_s"}
"""Settings that may differ between ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOutcome:
    """How a run ended."""

    exit_code: int  # 0 done, 75 stopped by a signal with the checkpoint written
    summary: dict[str, Any]  # Contents of `summary.json`; empty except on rank 0


def train(
    config: TrainConfig,
    world: World,
    *,
    threads: int,
    stream: TextIO | None = None,
    notes: Sequence[str] = (),
    fault: FaultPlan | None = None,
    watch: Callable[[], FailureWatch | None] = lambda: None,
) -> TrainOutcome:
    """Train as `config` says, as one rank of `world`; call it in a `with gs.init()` block.

    `config` is equal on all ranks, with `out` set and `dtype` named. Rank 0 prints to `stream`
    (stdout by default), `notes` after its introduction, and writes what the `watch` knows of all
    ranks to `ranks.json`; after a loss there is another watch. `fault` is injected, for a drill or
    a test.
    """
    outside = world.waits_to_join  # a rank that was started again
    config = replace(config, resume="auto") if outside else config
    run_dir = RunDir(config.out)
    progress = Progress(config.steps, world.world_size, enabled=world.is_main, stream=stream)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(announce=world.is_main))
        stack.push(lambda kind, *_: run_dir.close(failed=kind is not None))
        comm = communicator(world)

        def may_start() -> None:
            require_packages(config.track)
            run_dir.hold()
            if config.resume == "none":
                run_dir.refuse_overwrite()

        if not outside:
            from_rank_0(comm, may_start)
        data = open_data(config, world, comm)
        _refuse_unlike(config, data, comm)
        shape, device = model_config(config, data.vocab_size), _device(world, threads)
        config = replace(config, model=shape)
        stack.enter_context(run_dir.rank_log(world))
        stack.enter_context(kernels(config, world))
        kept = config.checkpoint
        store = CheckpointStore(run_dir.checkpoints, kept.keep_last, kept.keep_best)
        trainer = Trainer(
            config=config,
            world=world,
            comm=comm,
            data=data,
            learner=_learner(config, world, shape, comm),
            fingerprint=numeric_fingerprint(config, world, data.plan, threads=threads),
            run_dir=run_dir,
            store=store,
            writer=BackgroundWriter(store),
            progress=progress,
            profiler=StepProfiler(config.profile, run_dir.path, world),
            device=device,
            threads=threads,
            interval=Interval(on_cuda=world.device.type == "cuda"),
            watch=watch,
        )
        trainer.learner.sync.saved_with = trainer.learner.optimizer
        if outside:
            resumed = _load_to_join(trainer)
        else:
            resumed = restore(trainer)
            _introduce(trainer, resumed, threads, notes)
        if resumed.source and resumed.step >= config.steps:
            trainer.progress.say(
                f"{resumed.source} has {resumed.step} steps already and {config.steps} were asked "
                "for: nothing to do (give more --steps to go on)"
            )
            kept = read_object(run_dir.path / "summary.json") | {"stopped_by": ""}
            return TrainOutcome(exit_code=0, summary=kept if world.is_main else {})
        if world.is_main:
            trainer.begin_record(resumed.step)
        if fault is not None and not outside:
            fault.plant(trainer)
        totals = _run(trainer, resumed.step, stop)
        return _finish(trainer, totals)


def _load_to_join(trainer: Trainer) -> Resumed:
    """As a rank that was started again: load the others' next checkpoint, to join them in the next
    step."""
    step = trainer.world.recovery.wait_outside("")
    resumed = restore(trainer)
    if resumed.step != step:
        raise CheckpointError(
            f"the others saved step {step} for this rank to join at; {trainer.run_dir.checkpoints} "
            f"has step {resumed.step}"
        )
    return resumed


def _run(trainer: Trainer, step: int, stop: StopRequest) -> Totals:
    """The loop from `step` on; it ends the table of ranks, which leave one by one afterwards."""
    trainer.progress.start(step)
    try:
        return trainer.run(step, stop)
    except BaseException:
        if (watch := trainer.watch()) is not None:
            watch.sampler.held = True
        raise
    finally:
        trainer.data.train.close()
        with suppress(CheckpointError):  # after a failure; the writer has logged its own
            trainer.writer.wait()
        trainer.run_dir.end_table()


def _refuse_unlike(config: TrainConfig, data: Data, comm: Communicator) -> None:
    """Raise ConfigError on all ranks if some have other settings, or other data under the same
    name: each would train its share of a different run."""
    told = {name: repr(attrgetter(name)(config)) for name in HINTS if name not in _OF_EACH_RANK}
    told["training data"] = data.train.state_dict()["dataset"]
    told["validation data"] = data.val.fingerprint
    if said := _difference(comm, told):
        raise ConfigError(f"{said}; start all ranks with the same arguments, files and data")


def _difference(comm: Communicator, told: Mapping[str, str]) -> str:
    """The first value that differs between ranks, or "". One all-reduce, int64 [2]."""
    equal = same_on_all_ranks(comm, repr(told).encode())
    return "" if equal else first_difference(comm, told)


def _learner(config: TrainConfig, world: World, shape: GPTConfig, comm: Communicator) -> Learner:
    """A learner for a whole model, or for this rank's part of one."""
    check_size(shape, device=world.device_name, num_nodes=world.num_nodes)
    layout = config.layout(world.world_size)
    if layout.model_ranks == 1:
        return build_learner(config, world, shape, comm)
    # Only split models pay for the import of torch's pipelining.
    from gradsync.commands.train.split import build_split_learner

    return build_split_learner(config, layout, world, shape, comm)


def _device(world: World, threads: int) -> Device:
    """This rank's device, with its data-sheet peak, or an estimate for `threads` cores."""
    if world.device.type == "cuda":
        return torch_devices(torch)[world.device.index or 0]
    processor, ranks = read_processor(), world.local_world_size
    used = replace(processor, cores=min(processor.cores, threads * ranks))
    return cpu_devices(used, ranks)[0]


def _introduce(trainer: Trainer, resumed: Resumed, threads: int, notes: Sequence[str]) -> None:
    config, world, data = trainer.config, trainer.world, trainer.data
    say, shape = trainer.progress.say, trainer.learner.model.config
    shares_memory = isinstance(trainer.learner.sync.comm, SharedMemoryCommunicator)
    through = " through shared memory" if shares_memory else ""
    say(
        f"{counted(world.world_size, 'rank')} by {world.launcher} on "
        f"{counted(world.num_nodes, 'host')}, {world.device.type}, "
        f"{counted(threads, 'thread')} a rank, {config.named_dtype}, sync {config.sync}{through}"
    )
    say(
        f"model {config.preset}: {shape.n_embd} wide x {shape.n_layer} deep, "
        f"{shape.num_params():,} parameters, vocabulary {shape.vocab_size}"
    )
    layout = config.layout(world.world_size)
    if layout.model_ranks > 1:
        say(f"split {layout}: each replica of the model is {layout.model_ranks} ranks")
    say(f"data {data.source}")
    say(data.plan.describe("replica" if config.parallel else "rank"))
    for line in notes:
        say(line)
    for note in [*resumed.notes, *_unlike_machines(trainer)]:
        say(f"note: {note}")
    if resumed.source:
        say(f"continuing from {resumed.source} (step {resumed.step})")


def _unlike_machines(trainer: Trainer) -> list[str]:
    """A note if ranks compute with different bits."""
    on_cuda = trainer.world.device.type == "cuda"
    skip = ("threads", "cpu_capability", "math_env") if on_cuda else ()  # of no effect there
    told = {name: repr(value) for name, value in trainer.fingerprint.items() if name not in skip}
    said = _difference(trainer.comm, told)
    return [f"{said}: replicas may drift, and bits of other runs are not kept"] if said else []


def _finish(trainer: Trainer, totals: Totals) -> TrainOutcome:
    outcomes = []
    for attempt in trainer.attempts():  # rank 0 may be lost before it has written the summary
        trainer.follow_group(totals.step)
        with attempt:
            outcomes.append(_write_end(trainer, totals))
    return outcomes[-1]


def _write_end(trainer: Trainer, totals: Totals) -> TrainOutcome:
    learner, world = trainer.learner, trainer.world
    exit_code = EXIT_REQUEUE if totals.stopped_by else 0
    weights = learner.sync.replica.full_weights()  # all ranks: some may hold only a part
    if not world.is_main:
        return TrainOutcome(exit_code=exit_code, summary={})
    summary = _summarise(trainer, totals) | {"weights_sha256": weights_sha256(weights.items())}
    trainer.run_dir.write_json("summary.json", summary)
    if totals.stopped_by:
        trainer.progress.say(
            f"stopped by {totals.stopped_by} after step {totals.step}; checkpoint written, the "
            f"same command with --out {trainer.run_dir.path} goes on from there"
        )
    else:
        trainer.progress.say(f"weights_sha256 {summary['weights_sha256']}")
        _farewell(trainer, totals, learner.whole_model(weights))
    return TrainOutcome(exit_code=exit_code, summary=summary)


def _summarise(trainer: Trainer, totals: Totals) -> dict[str, Any]:
    config, world, meta = trainer.config, trainer.world, trainer.data.meta
    tokens_timed = totals.steps_timed * config.tokens_per_update
    return {
        "steps": totals.step,
        "first_step": totals.step - totals.steps_timed + 1,  # of this start, for speed and times
        "tokens": totals.step * config.tokens_per_update,
        "final_train_loss": finite_or_none(totals.train_loss),
        "val_loss": finite_or_none(totals.val_loss),
        "unigram_entropy": None if meta is None else meta.unigram_entropy_nats,
        "world_size": world.world_size,
        "launcher": world.launcher,
        "sync": config.sync,
        "peak_lr": config.optim.scaled(config.tokens_per_update).lr,
        "tokens_per_s": tokens_timed / totals.wall_s if totals.wall_s else None,
        "exposed_comm_fraction": totals.exposed_s / totals.wall_s if totals.wall_s else None,
        "wall_s": totals.wall_s,
        "save_s": statistics.median(totals.saves_s) if totals.saves_s else None,
        "stopped_by": totals.stopped_by,
        "config": asdict(config),
    }


def _farewell(trainer: Trainer, totals: Totals, model: GPT) -> None:
    """Final figures, a sample of text, and the paths of all files."""
    config, say = trainer.config, trainer.progress.say
    if math.isfinite(totals.val_loss):
        say(f"final validation loss {totals.val_loss:.4f} nats per token")
    if trainer.data.load_tokenizer is not None and config.sample_tokens:
        try:
            tokenizer = trainer.data.load_tokenizer()
            prompt = tokenizer.encode("\n").tolist()
            ids = generate(model, prompt, config.sample_tokens, seed=config.seed)
            say(f"--- a sample ---\n{tokenizer.decode(ids)}\n----------------")
        except UsageError as error:  # a finished run does not fail because of it
            say(f"no sample: {error}")
    path, known = trainer.run_dir.path, trainer.data.load_tokenizer is not None
    commands = ("sample", "report", "export") if known else ("report",)
    say(f"everything lies in {path}")
    say("next:\n" + "\n".join(f"  gradsync {each} {shlex.quote(str(path))}" for each in commands))


_ADVICE = {
    DivergenceError: "look at the samples of that step; go on from an older checkpoint",
    DriftError: "leave that rank's host out if it happens again",
    LatePeerError: "read the ranks' stacks, in the folder that the error names",
    LostPeerError: "start again; leave that host out if it happens again",
    CheckpointError: "go on from an older checkpoint",
    UsageError: "change the request",
}


def note_end(config: TrainConfig, outcome: TrainOutcome) -> None:
    """Write `exit.json` for a run that ended normally or by a signal; rank 0 only."""
    stopped_by = outcome.summary.get("stopped_by", "")
    reason = f"stopped by {stopped_by}" if stopped_by else "done"
    RunDir(config.out).write_json("exit.json", {"exit_code": outcome.exit_code, "reason": reason})


def note_failure(config: TrainConfig, error: Exception, first: Presence | None = None) -> None:
    """Write `exit.json` for a failed run: torchrun reports every failure as 1. Rank 0 does; another
    rank only after rank 0, the `first` one, vanished, and its lock with it. A failed write is
    ignored, and a refused start changes nothing in a finished run."""
    run_dir = RunDir(config.out)
    if not config.out or not run_dir.path.is_dir():
        return
    rank, host = (getattr(error, name, None) for name in ("rank", "host"))
    if first is not None:
        host = host or first.host
        lives = first.host == gethostname() and process_state(first.pid) != "ended"
        if rank != -1 or lives or first.host not in host.split(","):
            return
    code = error.exit_code if isinstance(error, GradsyncError) else 1
    with suppress(RunError), closing(run_dir):
        run_dir.hold()
        before = read_object(run_dir.path / "exit.json").get("exit_code")
        if before == 0 or (first is not None and before is not None):
            return  # else `RunDir.begin` would have removed it
        ended = {"exit_code": code, "reason": "failed", "error": str(error)}
        vanished = rank == -1 and host and code != LatePeerError.exit_code
        run_dir.write_json("exit.json", ended | ({"lost_hosts": host} if vanished else {}))
        # Of gradsync's own errors the message is enough: their place is ours.
        own = "" if isinstance(error, GradsyncError) else "".join(traceback.format_exception(error))
        places = re.findall(r'File "(.+)", line (\d+)', getattr(error, "traceback_text", own))
        named = {"kind": type(error).__name__, "rank": rank, "host": host}
        named["where"] = ":".join(places[-1]) if places else None
        fix = "fix the code at that line" if places else "see what was said"
        fix = _ADVICE[LostPeerError] if vanished else fix
        advice = next((words for kind, words in _ADVICE.items() if isinstance(error, kind)), fix)
        said = {"said": str(error), "advice": fix if places else advice}
        run_dir.log_incident({"time": time.time(), **named, **said})
