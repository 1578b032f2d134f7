"""A run whose model is split over ranks: each rank's part, and the checkpoints.

Every rank of the first replica sends the pieces it owns to rank 0, which writes a file for each
rank and holds at most two of the others' tensors. To load, rank 0 reads whole tensors, joined if
the checkpoint is of a split model, and sends each rank its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch.autograd.profiler import record_function

from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.checkpoint.weights import match_weights
from gradsync.comm.base import Communicator
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import (
    ModelPart,
    ParallelLayout,
    join_states,
    place_tensors,
    state_of_part,
)
from gradsync.commands.parallel.pipeline import Pipeline
from gradsync.commands.parallel.split_sync import SplitSync, split_groups
from gradsync.commands.parallel.stage_model import GPTStage
from gradsync.commands.parallel.transfer import distribute
from gradsync.commands.train.check import BY_MESSAGES
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.learner import (
    Keep,
    Learner,
    Span,
    Whole,
    autocast,
    build_optimizer,
    check_finite,
    keep_parts,
)
from gradsync.data.loader import EvalLoader
from gradsync.data.micro_batch import MicroBatch
from gradsync.sync.registry import find_strategy
from gradsync.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLearner(Learner):
    """The part of a split model that one rank trains."""

    model: GPTStage
    sync: SplitSync  # type: ignore[assignment]
    pipeline: Pipeline

    def run_micro_batches(
        self, micro_batches: Iterable[MicroBatch], span: Span = record_function
    ) -> None:
        """This replica's micro-batches. The schedule orders them, so it needs all of them first."""
        self.pipeline.run(list(micro_batches))

    def prime(self, shape: tuple[int, int]) -> None:
        """Each stage alone: it records the order of the stage's gradients."""
        self.sync.reducer.prime(self.pipeline.throwaway)

    def evaluate(self, loader: EvalLoader) -> float:
        """Through all stages of each replica."""
        return self.pipeline.evaluate(loader)

    def save(self, step: int, keep: Keep) -> None:
        part = self.model.part
        named = list(self.model.named_parameters())
        kept, state = pack_optimizer(self.optimizer, named)
        remembered = self.sync.replica.state_tensors()
        check_finite(self.comm, step, chain(named, kept.items(), remembered.items()))
        if part.place.data:
            return
        tensors = {f"model/{name}": parameter.detach() for name, parameter in named}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in kept.items()}
        pieces = place_tensors(part, ((name, tuple(t.shape)) for name, t in tensors.items()))
        placed = {name: (piece, tensors[name]) for name, piece in pieces.items()}
        join = partial(join_states, part)
        keep_parts(self.sync.groups.model, placed, state, keep, join=join, whole={})

    def load(self, saved: Mapping[str, Whole], optimizer_state: Mapping[str, Any]) -> None:
        tensors = {
            f"{kind}/{name}": tensor
            for kind in ("model", "optimizer")
            for name, tensor in saved.get(kind, {}).items()
        }
        got = distribute(self.comm, self.model.part, tensors)
        own = dict(self.model.named_parameters())
        weights = {name: got.pop(f"model/{name}") for name in own if f"model/{name}" in got}
        for name, tensor in match_weights(own, weights).items():
            own[name].data.copy_(tensor)
        kept = {name.removeprefix("optimizer/"): tensor for name, tensor in got.items()}
        state = state_of_part(self.model.part, optimizer_state)
        unpack_optimizer(self.optimizer, list(own.items()), kept, state)


def build_split_learner(
    config: TrainConfig, layout: ParallelLayout, world: World, shape: GPTConfig, comm: Communicator
) -> SplitLearner:
    """This rank's part of the model, its optimizer and its synchronisation.

    All ranks call it at the same point: it creates process groups. Every rank draws the whole
    model's initial values with this seed, so nothing is sent.
    """
    part = ModelPart(config=shape, layout=layout, place=layout.coordinates(world.rank))
    groups = split_groups(layout, part.place, comm)
    model = GPTStage(
        part,
        groups,
        seed=config.seed,
        device=world.device,
        activation_checkpointing=config.activation_checkpointing,
    )
    options = config.sync_options.given()
    if find_strategy(config.sync).recipe is not None:
        options |= BY_MESSAGES
    sync = SplitSync(model, part, groups, sync=config.sync, options=options)
    plan = config.batch_plan(world.world_size)
    mixed = autocast(config, world)
    pipeline = Pipeline(
        model,
        sync,
        num_micro_batches=plan.num_micro_batches // layout.dp,
        shape=(plan.micro_batch_size, config.sequence_length),
        autocast=mixed,
        seed=config.seed,
    )
    return SplitLearner(
        model=model,
        optimizer=build_optimizer(model, config.optim),
        sync=sync,
        scaler=None,
        comm=comm,
        autocast=mixed,
        pipeline=pipeline,
    )
