"""The parts of a run whose model is split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.checkpoint.optimizer_state import unpack_optimizer
from gradsync.comm.base import Communicator
from gradsync.errors import CheckpointError
from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT
from gradsync.parallel.layout import Layout, Part, state_of_part
from gradsync.parallel.pipeline import LeafShape, Pipeline
from gradsync.parallel.split_sync import SplitGroups, SplitSync, split_groups
from gradsync.parallel.stage_model import GPTStage
from gradsync.parallel.transfer import distribute
from gradsync.sync.registry import find_strategy
from gradsync.train.config import TrainConfig
from gradsync.train.optimizer import build_optimizer
from gradsync.train.setup import Learner, autocast, set_precision
from gradsync.train.split_check import BY_MESSAGES
from gradsync.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLearner(Learner):
    """The part of a split model that one rank trains."""

    model: GPTStage  # type: ignore[assignment]
    sync: SplitSync  # type: ignore[assignment]
    part: Part
    groups: SplitGroups
    pipeline: Pipeline

    @property
    def parameter_names(self) -> list[str]:
        """See `Learner.parameter_names`."""
        return [weight.name for weight in self.part.weights]

    def load(
        self,
        comm: Communicator,
        saved: Mapping[str, Mapping[str, torch.Tensor]],
        optimizer_state: Mapping[str, Any],
    ) -> None:
        """See `Learner.load`: this rank gets its pieces."""
        tensors = {
            f"{kind}/{name}": tensor
            for kind in ("model", "optimizer")
            for name, tensor in saved.get(kind, {}).items()
        }
        got = distribute(comm, self.part, tensors)
        kept = {
            name.removeprefix("optimizer/"): tensor
            for name, tensor in got.items()
            if name.startswith("optimizer/")
        }
        own = dict(self.model.named_parameters())
        for name, parameter in own.items():
            tensor = got.get(f"model/{name}")
            if tensor is None or tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"the weights are those of another model: {name!r} is missing"
                )
            parameter.data.copy_(tensor)
        state = state_of_part(self.part, optimizer_state)
        unpack_optimizer(self.optimizer, list(own.items()), kept, state)

    def whole_model(self, weights: Mapping[str, torch.Tensor]) -> GPT:  # type: ignore[override]
        """A whole model, on the CPU."""
        model = GPT(self.part.config, seed=0)
        model.load_state_dict(weights)
        return model


def build_split_learner(
    config: TrainConfig, layout: Layout, world: World, shape: GPTConfig, comm: Communicator
) -> SplitLearner:
    """This rank's part of the model, its optimizer and its synchronisation.

    All ranks call it at the same point: it makes process groups. Start values are those of the
    whole model with this seed, drawn on every rank, so nothing is sent.
    """
    device = torch.device(world.device)
    set_precision(config, device)
    part = Part(config=shape, layout=layout, place=layout.coordinates(world.rank))
    groups = split_groups(layout, part.place, comm)
    model = GPTStage(
        part,
        groups,
        seed=config.seed,
        device=device,
        activation_checkpointing=config.activation_checkpointing,
        loss_rows=config.loss_rows,
    )
    options = config.sync_options.given()
    if find_strategy(config.sync).recipe is not None:
        options |= BY_MESSAGES
    sync = SplitSync(model, part, groups, sync=config.sync, options=options)
    plan = config.batch_plan(world.world_size)
    pipeline = Pipeline(
        model,
        groups,
        sync,
        shape=LeafShape(
            num_leaves=plan.num_leaves // layout.dp,
            micro_batch_size=plan.micro_batch_size,
            seq_len=config.sequence_length,
        ),
        schedule=config.pipeline_schedule,
        autocast=autocast(config, world),
        seed=config.seed,
    )
    return SplitLearner(
        model=model,
        optimizer=build_optimizer(model, config.optim),
        sync=sync,
        scaler=None,
        part=part,
        groups=groups,
        pipeline=pipeline,
    )
