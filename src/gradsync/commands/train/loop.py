"""The training loop, readable from top to bottom."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import record_function

from gradsync.checkpoint.background import BackgroundWriter
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.values import from_rank_0
from gradsync.commands.plan.description import Device
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.data import Data
from gradsync.commands.train.learner import (
    ADVICE,
    RANDOM_STREAMS,
    Fingerprint,
    Learner,
    Whole,
    learning_rate,
)
from gradsync.commands.train.output import Progress, RunDir, finite_or_none
from gradsync.core.files import counted
from gradsync.core.torch_private import PROFILE_ALL_THREADS
from gradsync.data.micro_batch import Batch
from gradsync.errors import DataError, DivergenceError, DriftError
from gradsync.runtime.signals import StopRequest
from gradsync.runtime.watch import FailureWatch
from gradsync.sync.step import StepResult
from gradsync.sync.watch import Stopwatch
from gradsync.world import World

T = TypeVar("T")
TRACED_STEPS = 2
"""Two, because sums of the first may still be in flight in the second."""


@dataclass(slots=True)
class Totals:
    """Totals for the report at the end of a run."""

    step: int  # Optimizer steps done, including earlier runs
    train_loss: float = math.nan  # Global mean loss of the last step
    val_loss: float = math.nan  # Validation loss after the last evaluation
    wall_s: float = 0.0  # Seconds in steps, without evaluation and saving
    exposed_s: float = 0.0  # Exposed communication in that time, seconds
    steps_timed: int = 0  # Steps counted in `wall_s`
    val_step: int = -1  # Step of the last evaluation
    saves_s: list[float] = field(default_factory=list)  # For which each checkpoint stopped training
    stopped_by: str = ""  # Signal that ended the run early; "" if it is complete


class Interval:
    """Steps, waiting for data and exposed communication since the last `reset`; read only on
    request, so that no step waits for the device."""

    def __init__(self, *, on_cuda: bool = False) -> None:
        self._on_cuda = on_cuda
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.steps = 0
        self.data_s = 0.0
        self._exposed: list[tuple[str, Stopwatch]] = []
        self._spans: dict[str, list[Stopwatch]] = {}
        self._started = time.perf_counter()

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """Pass `items` on, and count the time spent waiting for them."""
        iterator = iter(items)
        while True:
            before = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.data_s += time.perf_counter() - before
            yield item

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Time a part of a step; profilers show its name, too."""
        watch = Stopwatch(on_cuda=self._on_cuda)
        with record_function(name):
            watch.start()
            yield
            watch.stop()
        self._spans.setdefault(name, []).append(watch)

    def seconds_of(self, name: str) -> float:
        """Seconds in all spans of that name, minus their exposed communication; waits for the
        device."""
        inside = sum(watch.seconds() for part, watch in self._exposed if part == name)
        return sum(watch.seconds() for watch in self._spans.get(name, ())) - inside

    @contextmanager
    def paused(self) -> Generator[None]:
        """Exclude the block: evaluation, saving."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before

    def add(self, exposed: Stopwatch, part: str = "step") -> None:
        """Count one more step, and its communication, which `exposed` measured within `part`."""
        self.steps += 1
        self._exposed.append((part, copy.copy(exposed)))

    def read(self) -> tuple[float, float]:
        """(wall seconds, exposed communication seconds) so far; waits for the device."""
        exposed = sum(watch.seconds() for _, watch in self._exposed)
        return time.perf_counter() - self._started, exposed


class StepProfiler:
    """Runs torch's profiler over a step (counted from 1; 0: none) and the next one, on all threads
    of this rank. Files are named as torchtitan's: `profile_trace/iteration_N/rankR_trace.json` in
    the run's folder."""

    def __init__(self, step: int, folder: Path, world: World) -> None:
        self._step, self._folder, self._world = step, folder, world
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Start at the coming step, if it is the first one."""
        if step == self._step > 0:
            from torch.profiler import profile

            self._profile = profile(experimental_config=PROFILE_ALL_THREADS())
            self._profile.start()

    def after(self, step: int, *, last: bool) -> None:
        """Write the trace after the second step, or the run's last one."""
        if self._profile is None or not (last or step == self._step + TRACED_STEPS - 1):
            return
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        profile, self._profile = self._profile, None
        profile.stop()
        folder = self._folder / "profile_trace" / f"iteration_{self._step}"
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank{self._world.rank}_trace.json"))


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run and the loop over them; made by `gradsync.commands.train.run.train`."""

    config: TrainConfig
    world: World
    comm: Communicator
    data: Data
    learner: Learner
    fingerprint: Fingerprint
    run_dir: RunDir
    store: CheckpointStore
    writer: BackgroundWriter
    progress: Progress
    profiler: StepProfiler
    device: Device
    threads: int
    interval: Interval = field(default_factory=Interval)
    generation: int = 0  # Of the group, see `Recovery`
    watch: Callable[[], FailureWatch | None]

    def run(self, done_steps: int, stop: StopRequest) -> Totals:
        """Train from `done_steps` to `config.steps`, or to the step at which ranks agree to stop.

        Raises:
            DivergenceError: on all ranks: the loss, the gradient's norm or, before a checkpoint,
                a weight or the optimizer's state is not finite.
            DataError: a stream has no more text.
            CheckpointError: on rank 0, at the step after a checkpoint that could not be written.
        """
        config, learner, totals = self.config, self.learner, Totals(done_steps)
        optim = config.optim.scaled(config.tokens_per_update)
        # A group that this rank joins has learnt before.
        if done_steps < config.steps and not self.world.waits_to_join:
            learner.prime((config.micro_batch_size, config.sequence_length))
        self.interval.reset()
        for batch in self.interval.waiting(self.data.train):
            with self.interval.paused():
                self.profiler.before(totals.step + 1)
            if totals.step >= config.steps:
                break
            # Before the step: if ranks divide the update, it hides a difference.
            if _due(totals.step + 1, config.check_replicas_every):
                self._check_replicas(totals.step)
            lr = learning_rate(optim, totals.step, config.steps)
            result = self._train_step(batch, lr, stop)
            totals.step += 1
            self._after_step(totals.step)
            stopped = result.stop and totals.step < config.steps
            last = stopped or totals.step == config.steps
            with self.interval.paused():
                self.profiler.after(totals.step, last=last)
            saves = last or result.rank_waits or _due(totals.step, config.checkpoint.every)
            logs = last or _due(totals.step, config.log_every) or totals.step == done_steps + 1
            # Reading the loss is free on a CPU; on CUDA it waits for the device.
            looks = saves or logs or self.world.device.type != "cuda"
            diverged = self._why_diverged(result) if looks else ""
            if logs or diverged:
                self._log(totals, result, lr)
            if diverged:
                raise DivergenceError(f"{diverged} at step {totals.step}; {ADVICE}")
            if not stopped and (last or _due(totals.step, config.eval.every)):
                self._evaluate(totals)
            if saves:
                self._save(totals, last=last)
            if stopped:
                totals.stopped_by = stop.signal_name or "a signal to another rank"
            if last:
                break
        else:
            raise DataError(f"the data ended after step {totals.step} of {config.steps}")
        self.writer.wait()
        return totals

    def begin_record(self, done_steps: int) -> None:
        """Begin to write the run's files, on rank 0."""
        watch = self.watch()
        self.run_dir.begin(
            self.config,
            self.world,
            self.device,
            threads=self.threads,
            done_steps=done_steps,
            ranks=watch.peers.everyone if watch else None,
        )

    def _after_step(self, step: int) -> None:
        """Tell the other ranks that this rank has done the step."""
        self.writer.check()
        if (watch := self.watch()) is not None:
            watch.sampler.tell(step)
        self.follow_group(step)

    def follow_group(self, step: int) -> None:
        """After a loss, or once lost ranks have joined, refer to the ranks that there are; this
        rank may have become rank 0, which writes the run's files."""
        world = self.world
        if world.recovery is None or world.recovery.generation == self.generation:
            return
        self.generation = world.recovery.generation
        self.comm = communicator(world)
        self.learner = replace(self.learner, comm=self.comm)
        self.progress.go_on(step, world.world_size, enabled=world.is_main)
        now = time.time()
        if world.is_main:
            self.run_dir.close()
            self.begin_record(step)
            for each in world.recovery.incidents:
                did = {"step": step, "seconds": now - each["time"], "advice": "none: it went on"}
                self.run_dir.log_incident(each | did)
        world.recovery.incidents.clear()
        self.progress.say(f"step {step}: going on with {counted(world.world_size, 'rank')}")

    def _check_replicas(self, step: int) -> None:
        """Compare all ranks' bits, and record whether they are equal; DriftError ends the run."""
        drift: DriftError | None = None
        for attempt in self.attempts():
            self.follow_group(step)
            with attempt:
                drift = None
                try:
                    self.learner.sync.check_replicas(self.learner.optimizer, step=step)
                except DriftError as error:
                    drift = error
        self.follow_group(step)
        # Rank 0 of a split model knows only its part.
        if self.world.is_distributed and not self.config.parallel:
            self.run_dir.log_metrics({"step": step, "check/replicas_equal": int(drift is None)})
        if drift is not None:
            raise drift

    def _train_step(self, batch: Batch, lr: float, stop: StopRequest) -> StepResult:
        """One global batch: this rank's micro-batches, then the update that all ranks make."""
        learner, sync = self.learner, self.learner.sync
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        result: StepResult | None = None
        for attempt in self.attempts(batch):
            with attempt:
                learner.run_micro_batches(self.interval.waiting(batch), self.interval.span)
                with self.interval.span("step"):
                    result = sync.step(
                        learner.optimizer,
                        clip_norm=self.config.optim.clip_norm,
                        stop=stop.requested,
                        scale=learner.scaler,
                    )
        assert result is not None, "attempts end with a step that was taken"
        waits_in_backward = sync.reducer.waits_in_backward
        self.interval.add(result.exposed, "backward" if waits_in_backward else "step")
        return result

    def attempts(self, *batches: Batch) -> Iterable[AbstractContextManager[object]]:
        """See `GradientSync.attempts`; a split model has none."""
        once = [nullcontext()]
        return once if self.world.recovery is None else self.learner.sync.attempts(*batches)

    def _why_diverged(self, result: StepResult) -> str:
        """`the loss became nan`, or the norm; "" if both are finite. The same on all ranks; on CUDA
        it waits for the device."""
        if not result.weight:
            return ""
        if not math.isfinite(loss := float(result.mean_loss)):
            return f"the loss became {loss}"
        # A loss scaler skips a step with nan or inf; a rank that steps alone has a separate norm.
        learner = self.learner
        counts = learner.scaler is None and learner.sync.replica.equal_replicas
        norm = result.grad_norm if counts else None
        if norm is not None and not math.isfinite(norm := float(norm)):
            return f"the gradient's norm became {norm}"
        return ""

    def _log(self, totals: Totals, result: StepResult, lr: float) -> None:
        """Close the interval: read the device, print, write metrics; names contain the units."""
        totals.train_loss = float(result.mean_loss)
        wall_s, exposed_s = self.interval.read()
        steps = self.interval.steps
        totals.wall_s += wall_s
        totals.exposed_s += exposed_s
        totals.steps_timed += steps
        tokens_per_s = self.config.tokens_per_update * steps / wall_s
        per_token = self.learner.model.config.flops_per_token(self.config.sequence_length)
        flops = per_token * tokens_per_s / self.world.world_size
        metrics = {
            "step": totals.step,
            "train/loss": totals.train_loss,
            "train/targets": result.weight,
            "optim/lr": lr,
            "optim/grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "perf/tokens_per_s": tokens_per_s,
            "perf/tflops_per_device": flops / 1e12,
            "perf/mfu": flops / self.device.peak_flops,
            "perf/step_s": wall_s / steps,
            "perf/data_s": self.interval.data_s / steps,
            # A split model's schedule shows only the end of the step.
            "perf/forward_s": self.interval.seconds_of("forward") / steps or None,
            "perf/backward_s": self.interval.seconds_of("backward") / steps or None,
            "perf/update_s": self.interval.seconds_of("step") / steps,
            "comm/exposed_s": exposed_s / steps,
            "mem/max_reserved_gib": memory_gib(self.world),
        }
        self.progress.show(metrics)
        self.run_dir.log_metrics(metrics)
        self.interval.reset()

    def _evaluate(self, totals: Totals) -> None:
        """Evaluate the one model that a checkpoint at this step holds.

        In the middle of a round no such model exists: see [Note: A checkpoint ends the round].
        """
        with self.interval.paused():
            self.learner.sync.replica.synchronize_replicas()
            for attempt in self.attempts():
                self.follow_group(totals.step)
                with attempt:
                    totals.val_loss = self.learner.evaluate(self.data.val)
            totals.val_step = totals.step
            self.follow_group(totals.step)
        self.progress.say(f"step {totals.step}: validation loss {totals.val_loss:.4f}")
        self.run_dir.log_metrics({"step": totals.step, "val/loss": totals.val_loss})

    def _save(self, totals: Totals, *, last: bool) -> None:
        """Rank 0 writes what replicas agree on, if they are compared; the others go on. If it
        writes at once, they meet it in the next step's first collective. Except at the `last` step,
        ranks that were started again join here."""
        began = time.perf_counter()
        with self.interval.paused():
            if self.config.check_replicas_every:
                self._check_replicas(totals.step)
            self.learner.save(totals.step, partial(self._keep, totals))
            if self.world.recovery is not None:
                self._let_join(totals, last=last)
        totals.saves_s.append(time.perf_counter() - began)

    def _let_join(self, totals: Totals, *, last: bool) -> None:
        """Let ranks that wait join before the next step. If one is lost meanwhile, perhaps rank 0,
        save again."""
        world, recovery = self.world, self.world.recovery

        def one_waits() -> bool:
            found = not last and recovery.one_waits()
            if found or last:
                self.writer.wait()
            return found

        was_main = world.is_main
        # Whole group, from rank 0: whether a rank waits.
        undisturbed = recovery.saved(totals.step, lambda: from_rank_0(self.comm, one_waits))
        self.follow_group(totals.step)
        if not undisturbed and not was_main:
            self.learner.save(totals.step, partial(self._keep, totals))

    def _keep(
        self,
        totals: Totals,
        tensors: Mapping[str, Whole],
        optimizer: dict[str, Any],
        places: dict[str, Any],
    ) -> None:
        scaler = self.learner.scaler
        state = {
            "optimizer": optimizer,
            "data": dict(self.data.train.state_dict()),
            "tokenizer": self.data.tokenizer,
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": {"streams": RANDOM_STREAMS, "seed": self.config.seed},
            "model": asdict(self.learner.model.config),
            "config": asdict(self.config),
        }
        numerics = self.fingerprint
        snapshot = Snapshot(
            step=totals.step,
            tensors=tensors,
            state=state,
            fingerprint=numerics,
            places=places,
            val_loss=finite_or_none(totals.val_loss) if totals.val_step == totals.step else None,
        )
        (self.writer if self.config.checkpoint.async_save else self.store).save(snapshot)


def memory_gib(world: World) -> float:
    """Peak memory so far: reserved by the allocator on CUDA, resident in RAM on a CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
