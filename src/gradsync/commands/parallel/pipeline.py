"""Run micro-batches through a replica's stages: forward and backward, in the order of 1F1B, a
backward as soon as there is one to make (PipeDream-Flush, arXiv 2006.09503).

1F1B keeps the activations of at most as many micro-batches as there are stages. A single stage has
nothing to schedule: it runs forward and backward, one micro-batch after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gradsync.commands.models.gpt import mean_over_ranks
from gradsync.commands.parallel.split_sync import SplitSync
from gradsync.commands.parallel.stage_model import GPTStage
from gradsync.core.torch_private import drop_received, renew_received
from gradsync.data.loader import EvalLoader
from gradsync.data.micro_batch import MicroBatch
from gradsync.runtime.seeds import seed_micro_batch
from gradsync.sync.step_metadata import LossSum


class Pipeline:
    """This rank's stage between its neighbours.

    `sync` receives each micro-batch's backward and loss, `autocast` is the context of a forward. A
    replica has `num_micro_batches` in each step, of `shape` (sequences, tokens), which determines
    the messages between stages. Dropout is keyed by (seed, step, index), see [Note: Keyed streams].
    """

    def __init__(
        self,
        model: GPTStage,
        sync: SplitSync,
        *,
        num_micro_batches: int,
        shape: tuple[int, int],
        autocast: AbstractContextManager[Any],
        seed: int,
    ) -> None:
        self.model, self.part = model, model.part
        self.sync, self._shape = sync, (*shape, model.config.n_embd)
        self._autocast, self._seed = autocast, seed
        self._device = next(model.parameters()).device
        self._mine: list[MicroBatch] = []
        self._schedule: Schedule1F1B | None = None
        if self.part.layout.pp > 1:
            # Shapes are given, so that stages need not send them (torch pickles them).
            stream = torch.empty(self._shape, device="meta")
            tokens = torch.empty(shape, dtype=torch.int64, device="meta")
            stage = _Stage(
                self,
                input_args=tokens if self.part.is_first else stream.requires_grad_(),
                output_args=torch.empty_like(stream, requires_grad=True),
                group=getattr(sync.groups.stages, "group", None),
            )
            # A loss function, on any stage, tells torch that there are backwards.
            self._schedule = Schedule1F1B(
                stage, num_micro_batches, loss_fn=stage.loss, scale_grads=False
            )

    def run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Forward and backward of all micro-batches in this replica's share of a step."""
        self._mine = list(micro_batches)
        losses: list[Tensor] = []
        try:
            if self._schedule is not None:
                inputs = (torch.cat([each.inputs for each in micro_batches]),)
                targets = torch.cat([each.targets for each in micro_batches])
                self._schedule.step(
                    *(inputs if self.part.is_first else ()),
                    target=targets if self.part.is_last else None,
                    losses=losses,
                    return_outputs=False,
                )
            else:
                for place, each in enumerate(micro_batches):
                    loss = self.loss(self.forward(place, each.inputs), each.targets)
                    with self.backward(place):
                        loss.backward()
                    losses.append(loss)
        finally:
            self._mine = []
        for each, loss in zip(micro_batches, losses, strict=self.part.is_last):
            self.sync.add_loss(loss, each.num_targets)

    def forward(self, place: int, x: Tensor) -> Tensor:
        """This stage's forward of the replica's micro-batch number `place`."""
        mine = self._mine[place]
        with self._autocast:
            if self.model.config.dropout:
                seed_micro_batch(self._seed, mine.step, mine.index)
                self.model.pass_over_dropout((len(mine.inputs), *self._shape[1:]))
            return self.model(x)

    def backward(self, place: int) -> AbstractContextManager[None]:
        """Encloses this stage's backward of the replica's micro-batch number `place`."""
        last = place == len(self._mine) - 1
        return self.sync.reducer.micro_batch(last=last, index=self._mine[place].index)

    def loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of one micro-batch, on the last stage."""
        with self._autocast:
            return self.model.loss(x_BTC, targets_BT)

    def throwaway(self) -> None:
        """One forward and backward of this stage alone, for `Reducer.prime`."""
        tokens = torch.zeros(self._shape[:2], dtype=torch.int64, device=self._device)
        x = tokens if self.part.is_first else torch.zeros(self._shape, device=self._device)
        with self._autocast:
            out = self.model(x)
            loss = self.model.loss(out, tokens) if self.part.is_last else out.float().sum()
        loss.backward()

    @torch.no_grad()
    def evaluate(self, loader: EvalLoader) -> float:
        """See `models.evaluation.evaluate`: each sample once, through all stages of one replica.

        Stages work at the same time, each on a different micro-batch.
        """
        self.model.eval()
        total, samples = LossSum(self._device), 0
        stages, stage = self.sync.groups.stages, self.part.place.stage
        try:
            for mine in loader:
                x = mine.inputs
                if not self.part.is_first:
                    x = torch.empty((*x.shape, self._shape[2]), device=self._device)
                    stages.exchange([], [(x, stage - 1)]).wait()
                with self._autocast:
                    out = self.model(x)
                if not self.part.is_last:
                    stages.exchange([(out.contiguous(), stage + 1)], []).wait()
                elif self.part.counts_loss:
                    total.add(self.loss(out, mine.targets), mine.num_targets)
                    samples += mine.num_samples
        finally:
            self.model.train()
        return mean_over_ranks(total, samples, loader, self.sync.groups.everyone)


class _Stage(PipelineStage):
    """Torch's stage, plus the context of a micro-batch in each backward and its dropout in each
    forward.

    Torch keeps a receive buffer for each micro-batch of a step, in both directions. Here a buffer
    lives from the receive to the backward, so 1F1B holds as many as are in flight.
    """

    def __init__(self, pipeline: Pipeline, **shapes: Any) -> None:
        part = pipeline.part
        super().__init__(
            pipeline.model,
            part.place.stage,
            part.layout.pp,
            next(pipeline.model.parameters()).device,
            **shapes,
        )
        # Weak: a cycle would keep the group's sockets open until it is collected.
        self._pipeline: Pipeline = weakref.proxy(pipeline)
        self._forwarded = 0

    def loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Pipeline.loss`."""
        return self._pipeline.loss(x_BTC, targets_BT)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch; records which micro-batch it is."""
        self._forwarded = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._pipeline.forward(self._forwarded, *args)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch; gradients computed here belong to one micro-batch."""
        with self._pipeline.backward(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in infos[bwd_chunk_id]:
                drop_received(info)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """See torch; with fresh buffers."""
        for info in self.args_recv_info[fwd_chunk_id]:
            renew_received(info, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """See torch; with fresh buffers."""
        for info in self.grad_recv_info[bwd_chunk_id]:
            renew_received(info, self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)
