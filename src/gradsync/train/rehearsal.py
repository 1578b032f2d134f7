"""Leaf and update of a run, by one rank alone and without data: what a probe runs.

The optimizer's state is there from the start, and gradients from an earlier leaf, so that the peak
is that of a step in the middle of a run. Under strategies that share out the state each rank keeps
and updates its share. Strategies' own copies of gradients are not made here, but counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT, loss_sum
from gradsync.parallel.layout import Layout
from gradsync.plan.memory import memory_need
from gradsync.plan.probe import Attempt
from gradsync.plan.workload import Split, Workload
from gradsync.sync.registry import find_strategy
from gradsync.train.config import AUTO, TrainConfig
from gradsync.train.optimizer import build_optimizer
from gradsync.train.setup import autocast
from gradsync.world import World

_FP32 = 4
_STATES = 2
_LOGIT_BYTES = 8
"""Bytes of a logit at the very least: its fp32 value and its gradient; see [Note: Loss in rows]."""
_REPEATS, _REPEAT_S = 5, 0.5


class Rehearsal:
    """The model and its optimizer, made when first needed.

    Args:
        config: the run.
        shape: of the model.
        world: with the device.
    """

    def __init__(self, config: TrainConfig, shape: GPTConfig, world: World) -> None:
        self._config, self._shape, self._world = config, shape, world
        self._model: GPT | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._owners = world.world_size if self.shards(config) else 1

    @staticmethod
    def shards(config: TrainConfig) -> bool:
        """Whether ranks share out the optimizer's state."""
        if config.sync == AUTO:
            return False
        strategy = find_strategy(config.sync)
        if strategy.recipe is None:
            return config.sync == "fsdp"
        return (config.sync_options.shard or strategy.recipe.shard) != "none"

    @property
    def communication_bytes(self) -> int:
        """Bytes that the strategy takes for messages beside gradients, by `memory_model.py`."""
        if not self._world.is_distributed:
            return 0
        work = Workload(
            model=self._shape,
            micro_batch_size=1,
            seq_len=self._config.sequence_length,
            num_leaves=self._config.tokens_per_update // self._config.sequence_length,
            dtype=self._config.dtype,
            kind="cuda" if self._world.device.startswith("cuda") else "cpu",
        )
        name = "invariant" if self._config.sync == AUTO else self._config.sync
        split = Split(strategy=name, layout=Layout(dp=self._world.world_size))
        return memory_need(work, split).buckets

    def least_bytes(self, size: int) -> int:
        """Bytes that a leaf of `size` takes in any case: weights, gradients, states, and logits."""
        rows = self._config.loss_rows or size * self._config.sequence_length
        held = 2 + _STATES / self._owners
        logits = _LOGIT_BYTES * rows * self._shape.vocab_size
        return int(_FP32 * held * self._shape.num_params()) + logits

    def of(self, size: int) -> Attempt:
        """Leaves of `size` and an update; gives the seconds of a leaf that is not the first."""

        def attempt(mark: Callable[[], None]) -> float:
            model, optimizer = self._parts()
            try:
                self._leaf(model, size)
                seconds = self._best_time(lambda: self._leaf(model, size))
                optimizer.step()
                mark()
            finally:
                model.zero_grad(set_to_none=True)
            return seconds

        return attempt

    def close(self) -> None:
        """Let go of everything."""
        self._model = self._optimizer = None

    def _leaf(self, model: nn.Module, size: int) -> None:
        shape = (size, self._config.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self._world.device)
        with autocast(self._config, self._world):
            rows = self._config.loss_rows
            loss = model(tokens, tokens) if rows else loss_sum(model(tokens), tokens)
        loss.backward()

    def _parts(self) -> tuple[GPT, torch.optim.Optimizer]:
        if self._model is None or self._optimizer is None:
            self.close()  # memory may have run out half-way
            with torch.device("meta"):
                model = GPT(
                    self._shape,
                    activation_checkpointing=self._config.activation_checkpointing,
                    loss_rows=self._config.loss_rows,
                )
            model.to_empty(device=self._world.device)
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(0.01)  # nothing random: no generator may move
            self._optimizer = self._own_optimizer(model)
            self._model = model
        return self._model, self._optimizer

    def _own_optimizer(self, model: GPT) -> torch.optim.Optimizer:
        """Over this rank's share of the elements, with its state."""
        total, seen = sum(p.numel() for p in model.parameters()), 0
        mine = []
        for parameter in model.parameters():
            middle = seen + parameter.numel() / 2
            if int(middle * self._owners / total) == self._world.rank % self._owners:
                mine.append(parameter)
            seen += parameter.numel()
        mine = mine or list(model.parameters())[-1:]
        optimizer = build_optimizer(nn.ParameterList(mine), self._config.optim)
        for parameter in mine:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return optimizer

    def _best_time(self, work: Callable[[], None]) -> float:
        """Seconds of `work`, the shortest of a few where it is short: others may disturb it."""
        taken: list[float] = []
        while len(taken) < _REPEATS and sum(taken) < _REPEAT_S:
            begin = self._now()
            work()
            taken.append(self._now() - begin)
        return min(taken)

    def _now(self) -> float:
        if self._world.device.startswith("cuda"):
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()
