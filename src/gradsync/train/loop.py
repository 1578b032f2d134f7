"""The training loop, readable from top to bottom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.store import CheckpointStore
from gradsync.comm.base import Communicator
from gradsync.data.leaf import Step
from gradsync.errors import DataError, DivergenceError
from gradsync.models.gpt import loss_sum
from gradsync.runtime.signals import StopRequest
from gradsync.sync.step import StepResult
from gradsync.train.config import TrainConfig
from gradsync.train.divergence import (
    ADVICE,
    ADVICE_RESUMED,
    check_finite,
    learnt,
    learnt_shares,
    why_diverged,
)
from gradsync.train.evaluate import evaluate
from gradsync.train.fingerprint import Fingerprint
from gradsync.train.optimizer import set_learning_rate
from gradsync.train.progress import Progress, Tick
from gradsync.train.run_dir import RunDir
from gradsync.train.schedule import learning_rate
from gradsync.train.setup import Data, Learner, autocast
from gradsync.train.sharded_state import sharded_snapshot
from gradsync.train.state import snapshot
from gradsync.train.timing import Interval
from gradsync.world import World


@dataclass(slots=True)
class Totals:
    """Totals that the end of a run reports."""

    step: int
    """Optimizer steps done, earlier runs included."""
    train_loss: float = math.nan
    """Global mean loss of the last step."""
    val_loss: float = math.nan
    """Validation loss after the last evaluation."""
    wall_s: float = 0.0
    """Time in steps, seconds, without evaluation and saving."""
    exposed_s: float = 0.0
    """Exposed communication within that time, seconds."""
    steps_timed: int = 0
    """Steps in `wall_s`."""
    stopped_by: str = ""
    """Signal that ended the run early, "" when it is complete."""


class Trainer:
    """The parts of a run and the loop over them; made by `gradsync.train.run.train`."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        comm: Communicator,
        data: Data,
        learner: Learner,
        *,
        fingerprint: Fingerprint,
        run_dir: RunDir,
        store: CheckpointStore,
        progress: Progress,
    ) -> None:
        self.config, self.world, self.comm = config, world, comm
        self.data, self.learner = data, learner
        self._fingerprint = fingerprint
        self._run_dir, self._store, self._progress = run_dir, store, progress
        self._autocast = autocast(config, world)
        self._interval = Interval()

    def run(self, done_steps: int, stop: StopRequest) -> Totals:
        """Train from `done_steps` to `config.steps`, or to the step at which ranks agree to stop.

        Raises:
            DivergenceError: on all ranks: the loss, the gradient's norm or, before a checkpoint,
                a weight or the optimizer's state is not finite.
            DataError: a stream has no text any more.
        """
        config, totals = self.config, Totals(done_steps)
        optim = config.optim.scaled(config.tokens_per_update)
        if done_steps < config.steps:
            self._prime()
        self._interval.reset()
        for step in self._interval.waiting(self.data.train):
            if totals.step >= config.steps:
                break
            # Before the step: where ranks divide the update, it hides what differed.
            if _due(totals.step + 1, config.check_replicas_every):
                self.learner.sync.check_replicas(step=totals.step)
            lr = learning_rate(optim, totals.step, config.steps)
            result = self._train_step(step, lr, stop)
            totals.step += 1
            stopped = result.stop and totals.step < config.steps
            last = stopped or totals.step == config.steps
            saves = last or _due(totals.step, config.checkpoint.every)
            logs = last or _due(totals.step, config.log_every) or totals.step == done_steps + 1
            # Reading the loss costs nothing on a CPU, on CUDA a wait.
            looks = saves or logs or not self.world.device.startswith("cuda")
            diverged = why_diverged(result, self.learner) if looks else ""
            if logs or diverged:
                self._log(totals, result, lr)
            if diverged:
                advice = ADVICE_RESUMED if totals.step == done_steps + 1 > 1 else ADVICE
                raise DivergenceError(f"{diverged} at step {totals.step}; {advice}")
            if not stopped and (last or _due(totals.step, config.eval.every)):
                self._evaluate(totals)
            if saves:
                self._save(totals.step)
            if stopped:
                totals.stopped_by = stop.signal_name or "a signal to another rank"
            if last:
                break
        else:
            raise DataError(f"the data ended after step {totals.step} of {config.steps}")
        return totals

    def _train_step(self, step: Step, lr: float, stop: StopRequest) -> StepResult:
        """One global batch: this rank's leaves, then the update all ranks make alike."""
        learner, sync = self.learner, self.learner.sync
        set_learning_rate(learner.optimizer, lr)
        self._run_leaves(step)
        result = sync.step(
            learner.optimizer,
            clip_norm=self.config.optim.clip_norm,
            stop=stop.requested,
            scale=learner.scaler,
        )
        self._interval.add(result.exposed)
        return result

    def _run_leaves(self, step: Step) -> None:
        """Forward and backward of this rank's leaves."""
        learner, sync = self.learner, self.learner.sync
        for leaf in self._interval.waiting(step):
            # Before the forward, all ranks know whether this backward synchronises.
            with sync.micro_step(last=leaf.is_last, index=leaf.index):
                with self._autocast:
                    loss = self._loss(leaf.inputs, leaf.targets)
                sync.backward(loss, weight=leaf.num_targets, scale=learner.scaler)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over the targets; the model makes it where logits shall not all be kept."""
        forward = self.learner.sync.forward
        if self.config.loss_rows:
            return forward(inputs, targets)
        return loss_sum(forward(inputs), targets)

    def _prime(self) -> None:
        """Settle what a strategy learns from its first backward; see `GradientSync.prime`."""
        shape = (self.config.micro_batch_size, self.config.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.world.device)
        sync = self.learner.sync

        def forward_backward() -> None:
            with self._autocast:
                loss = self._loss(tokens, tokens)
            loss.backward()

        sync.prime(forward_backward)

    def _log(self, totals: Totals, result: StepResult, lr: float) -> None:
        """Close the interval: read the device, print, write metrics."""
        totals.train_loss = float(result.mean_loss)
        wall_s, exposed_s = self._interval.read()
        steps = self._interval.steps
        totals.wall_s += wall_s
        totals.exposed_s += exposed_s
        totals.steps_timed += steps
        tick = Tick(
            step=totals.step,
            loss=totals.train_loss,
            lr=lr,
            grad_norm=None if result.grad_norm is None else float(result.grad_norm),
            tokens_per_s=self.config.tokens_per_update * steps / wall_s,
            step_s=wall_s / steps,
            data_s=self._interval.data_s / steps,
            comm_s=exposed_s / steps,
        )
        self._progress.tick(tick)
        self._run_dir.log_metrics(metrics_of(tick, result, self.learner, self.world))
        self._interval.reset()

    def _evaluate(self, totals: Totals) -> None:
        """Evaluate the one model that a checkpoint at this step holds.

        In the middle of a round there is none yet: see [Note: A checkpoint ends the round].
        """
        with self._interval.paused():
            self.learner.sync.synchronize_replicas()
            totals.val_loss = self._evaluate_now()
        self._progress.say(f"step {totals.step}: validation loss {totals.val_loss:.4f}")
        self._run_dir.log_metrics({"step": totals.step, "val/loss": totals.val_loss})

    def _evaluate_now(self) -> float:
        return evaluate(
            self.learner.model,
            self.data.val,
            self.comm,
            self._autocast,
            equal_forwards=not self.learner.sync.reducer.shards.whole_parameters,
        )

    def _save(self, step: int) -> None:
        """Rank 0 writes; the others go on and meet it in the next step's first collective.

        What is spread over ranks they send to it, and nobody ever has it whole.
        """
        learner = self.learner
        with self._interval.paused():
            held = learner.sync.sharded_state_dict(learner.optimizer)
            if held is not None:
                check_finite(self.comm, step, learnt_shares(learner, held))
                found = sharded_snapshot(
                    step,
                    self.config,
                    learner,
                    self.data,
                    held=held,
                    comm=self.comm,
                    fingerprint=self._fingerprint,
                )
                if found is not None:
                    self._store.save(found)
                return
            learner.sync.gather(learner.optimizer)
            weights = learner.sync.full_weights()
            check_finite(self.comm, step, learnt(learner, weights))
            if self.world.is_main:
                self._store.save(
                    snapshot(
                        step,
                        self.config,
                        learner,
                        self.data,
                        weights=weights,
                        fingerprint=self._fingerprint,
                    )
                )
            learner.sync.scatter(learner.optimizer)

    def closing_figures(self) -> dict[str, Any]:
        """More for the summary; all ranks call it at the end of the run."""
        return {}


def metrics_of(
    tick: Tick, result: StepResult, learner: Learner, world: World
) -> dict[str, float | int | None]:
    """One object of `metrics.jsonl`; units are in the names."""
    model = learner.model.config
    flops = model.flops_per_token(model.block_size) * tick.tokens_per_s / world.world_size
    return {
        "step": tick.step,
        "train/loss": tick.loss,
        "train/targets": result.weight,
        "optim/lr": tick.lr,
        "optim/grad_norm": tick.grad_norm,
        "perf/tokens_per_s": tick.tokens_per_s,
        "perf/tflops_per_device": flops / 1e12,
        "perf/step_s": tick.step_s,
        "perf/data_s": tick.data_s,
        "comm/exposed_s": tick.comm_s,
        "mem/max_reserved_gib": memory_gib(world),
    }


def memory_gib(world: World) -> float:
    """Largest memory so far: reserved by the allocator on CUDA, resident in RAM on a CPU."""
    if world.device.startswith("cuda"):
        return torch.cuda.max_memory_reserved() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
