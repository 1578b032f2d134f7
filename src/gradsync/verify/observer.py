"""Watches a training loop from outside: weights, gradients and states, copied as they pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradsync.checkpoint.names import clean_names
from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.data.leaf import Leaf
from gradsync.errors import ConfigError
from gradsync.sync.reducer import Reducer, trainable
from gradsync.verify.trace import (
    LeafTrace,
    StepTrace,
    Tensors,
    Trace,
    random_digest,
    sample_digests,
)
from gradsync.verify.whole_gradients import whole_gradients


class Layout:
    """Names of a model's tensors, read before a strategy touches it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(clean_names(name for name, _ in model.named_parameters()).values())
        self.trainable = tuple(clean_names(name for name, _ in trainable(model)).values())
        saved = set(clean_names(model.state_dict()).values())
        buffers = clean_names(name for name, _ in model.named_buffers()).values()
        self.persistent = tuple(name for name in buffers if name in saved)


class Observer:
    """Fills a `Trace`. Calls that may communicate are made by all ranks at the same places.

    With a reducer, its `update` is watched, else the optimizer's `step`: a strategy may step with
    optimizers of its own, over shards.

    Args:
        model: the one that is trained.
        layout: its names, from before `gs.replicate`.
        optimizer: what updates the weights.
        reducer: of the strategy; None for a loop without gradsync.
        whole: ask the reducer for whole weights and states. False where each rank has weights of
            its own: asking would end a round (see `sync/periodic/rounds.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer | None = None,
        *,
        whole: bool = True,
    ) -> None:
        self._model, self._layout = model, layout
        self._optimizer = optimizer
        self._strategy = reducer
        self._reducer = reducer if whole else None
        self._watched: Any = optimizer if reducer is None else reducer
        self._method = "step" if reducer is None else "update"
        self._original = getattr(self._watched, self._method)
        setattr(self._watched, self._method, self._update)
        weights, buffers = self._weights()
        self.trace = Trace(layout.trainable, layout.persistent, start_buffers=buffers)
        self.trace.start_state = self._state()
        self._next_weights = weights

    @property
    def _step(self) -> StepTrace:
        return self.trace.steps[-1]

    def begin(self, number: int) -> None:
        """Before the first leaf of a step."""
        self.trace.steps.append(StepTrace(number, before=self._next_weights))

    def leaf(self, leaf: Leaf) -> None:
        """Before a leaf's forward, random numbers seeded."""
        self._step.leaves.append(
            LeafTrace(
                leaf.index,
                leaf.num_targets,
                sample_digests(leaf.batch, leaf.num_samples),
                random_digest(),
            )
        )

    def end(self, loss: float, weight: float, norm: float | None) -> None:
        """After the optimizer, with what the step reported."""
        step = self._step
        step.loss, step.weight, step.norm = loss, weight, norm
        step.after, step.buffers = self._weights()
        step.state, step.description = self._state()
        if self._strategy is not None:
            kept = self._strategy.state_tensors()
            step.extra = {name: _copy(tensor) for name, tensor in kept.items()}
        self._next_weights = step.after

    def close(self) -> None:
        """Watch no longer."""
        delattr(self._watched, self._method)

    def _update(self, *arguments: Any) -> None:
        self._refuse_late_parameters()
        gradients = whole_gradients(self._model, self._strategy)
        names = clean_names(gradients)
        self._step.gradient = {names[name]: _copied(g) for name, g in gradients.items()}
        self._step.at_step, _ = self._weights()
        self._original(*arguments)
        self._step.updated, _ = self._weights()

    def _refuse_late_parameters(self) -> None:
        """The trial of one leaf names those, too; not where a forward needs a process group."""
        for name in clean_names(name for name, _ in trainable(self._model)).values():
            if name not in self._layout.trainable:
                raise ConfigError(
                    f"a forward made parameter {name!r}, which no optimizer knows: make it in "
                    "__init__, or run a batch through the model in the factory"
                )

    def _weights(self) -> tuple[Tensors, Tensors]:
        """Copies of parameters (tied ones once) and buffers."""
        whole = self._model.state_dict if self._reducer is None else self._reducer.full_weights
        state = whole()
        state = {clean: state[name] for name, clean in clean_names(state).items()}
        parameters = {name: _copy(state[name]) for name in self._layout.parameters}
        buffers = dict(self._model.named_buffers())
        names = clean_names(buffers)
        return parameters, {names[name]: _copy(buffer) for name, buffer in buffers.items()}

    def _state(self) -> tuple[Tensors, dict[str, Any]]:
        """A copy of the optimizer's whole state by parameter name."""
        if self._reducer is not None:
            self._reducer.gather(self._optimizer)
        tensors, state = pack_optimizer(self._optimizer, self._model.named_parameters())
        copied = {name: _copy(tensor) for name, tensor in tensors.items()}
        if self._reducer is not None:
            self._reducer.scatter(self._optimizer)
        return copied, state


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else _copy(gradient)
