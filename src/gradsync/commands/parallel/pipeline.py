"""Run leaves through a replica's stages: forward and backward, in the order of 1F1B, a backward as
soon as there is one to make (PipeDream-Flush, arXiv 2006.09503).

A leaf is a micro-batch. 1F1B keeps the activations of at most as many leaves as there are stages. A
single stage has nothing to schedule: it runs forward and backward leaf after leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gradsync.comm.values import all_sum
from gradsync.commands.parallel.split_sync import SplitGroups, SplitSync
from gradsync.commands.parallel.stage_model import GPTStage
from gradsync.core.torch_private import drop_received, renew_received
from gradsync.data.loader import EvalLoader
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import RunError
from gradsync.runtime.seeds import seed_micro_batch
from gradsync.sync.step_metadata import LossSum


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafShape:
    """A replica's leaves per step, sequences per leaf, tokens per sequence: they determine the
    shapes of messages between stages."""

    num_leaves: int
    micro_batch_size: int
    seq_len: int


class Pipeline:
    """This rank's stage between its neighbours.

    `sync` receives each leaf's backward and loss, `autocast` is the context of a forward. Dropout
    is keyed by (seed, step, leaf), see [Note: Keyed streams].
    """

    def __init__(
        self,
        model: GPTStage,
        groups: SplitGroups,
        sync: SplitSync,
        *,
        shape: LeafShape,
        autocast: AbstractContextManager[Any],
        seed: int,
    ) -> None:
        self.model, self.part, self._groups = model, model.part, groups
        self.sync, self.shape = sync, shape
        self._autocast, self._seed = autocast, seed
        self._device = next(model.parameters()).device
        self._leaves: list[MicroBatch] = []
        self._schedule = self._make_schedule() if self.part.layout.pp > 1 else None

    def _make_schedule(self) -> Any:
        # Shapes are given, so that stages need not send them to each other (torch pickles them).
        stream = torch.empty(self._stream_shape(self.shape.micro_batch_size), device="meta")
        tokens = torch.empty(stream.shape[:2], dtype=torch.int64, device="meta")
        stage = _Stage(
            self,
            input_args=tokens if self.part.is_first else stream.requires_grad_(),
            output_args=torch.empty_like(stream, requires_grad=True),
            group=getattr(self._groups.stages, "group", None),
        )
        # A loss function, on any stage, tells torch that there are backwards.
        return Schedule1F1B(stage, self.shape.num_leaves, loss_fn=stage.loss, scale_grads=False)

    def run(self, leaves: Sequence[MicroBatch]) -> None:
        """Forward and backward of all leaves in this replica's share of a step."""
        self._leaves = list(leaves)
        try:
            if self._schedule is None:
                losses = [self._whole_leaf(place) for place in range(len(leaves))]
            else:
                losses = self._scheduled()
        finally:
            self._leaves = []
        for leaf, loss in zip(leaves, losses, strict=self.part.is_last):
            self.sync.add_loss(loss, leaf.num_targets)

    def _scheduled(self) -> list[Tensor]:
        assert self._schedule is not None
        losses: list[Tensor] = []
        inputs = (torch.cat([leaf.inputs for leaf in self._leaves]),)
        targets = torch.cat([leaf.targets for leaf in self._leaves])
        self._schedule.step(
            *(inputs if self.part.is_first else ()),
            target=targets if self.part.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        return losses

    def _whole_leaf(self, place: int) -> Tensor:
        """One leaf, if there is only one stage."""
        leaf = self._leaves[place]
        loss = self.loss(self.forward(place, leaf.inputs), leaf.targets)
        with self.backward(place):
            loss.backward()
        return loss

    def forward(self, place: int, x: Tensor) -> Tensor:
        """This stage's forward of the replica's leaf number `place`."""
        leaf = self._leaves[place]
        with self._autocast:
            if self.model.config.dropout:
                seed_micro_batch(self._seed, leaf.step, leaf.index)
                stream = torch.empty(self._stream_shape(len(leaf.inputs)), device=self._device)
                self.model.pass_over_dropout(stream, _branch_dtype(self._device))
            return self.model(x)

    def backward(self, place: int) -> AbstractContextManager[None]:
        """Encloses this stage's backward of the replica's leaf number `place`."""
        last, index = place == len(self._leaves) - 1, self._leaves[place].index
        return self.sync.reducer.micro_batch(last=last, index=index)

    def loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of one leaf, on the last stage."""
        with self._autocast:
            return self.model.loss(x_BTC, targets_BT)

    def throwaway(self) -> None:
        """One forward and backward of this stage alone, for `Reducer.prime`."""
        shape = self._stream_shape(self.shape.micro_batch_size)
        tokens = torch.zeros(shape[:2], dtype=torch.int64, device=self._device)
        x = tokens if self.part.is_first else torch.zeros(shape, device=self._device)
        with self._autocast:
            out = self.model(x)
            loss = self.model.loss(out, tokens) if self.part.is_last else out.float().sum()
        loss.backward()

    @torch.no_grad()
    def evaluate(self, leaves: EvalLoader) -> float:
        """See `train.learner.evaluate`: each sample once, through all stages of one replica.

        Stages work at the same time, each on a different leaf.
        """
        self.model.eval()
        total, samples = LossSum(self._device), 0
        try:
            for leaf in leaves:
                loss = self._pass_on(leaf)
                if self.part.counts_loss and loss is not None:
                    total.add(loss, leaf.num_targets)
                    samples += leaf.num_samples
        finally:
            self.model.train()
        comm = self._groups.everyone
        *summed, num_samples = all_sum(comm, *total.message(), samples)
        total_loss, num_targets = total.over_ranks(comm, summed)
        if num_samples != leaves.total_samples:
            raise RunError(
                f"evaluation counted {num_samples:.0f} samples, the set has {leaves.total_samples}"
            )
        if not num_targets:
            raise RunError("the evaluation set has no target that counts: all of them are -100")
        return float(total_loss) / num_targets

    def _pass_on(self, leaf: MicroBatch) -> Tensor | None:
        """This stage's forward; returns the loss on the last stage, else sends the stream on."""
        stages, x = self._groups.stages, leaf.inputs
        if not self.part.is_first:
            x = torch.empty(self._stream_shape(*leaf.inputs.shape), device=self._device)
            stages.exchange([], [(x, self.part.place.stage - 1)]).wait()
        with self._autocast:
            out = self.model(x)
        if self.part.is_last:
            return self.loss(out, leaf.targets)
        stages.exchange([(out.contiguous(), self.part.place.stage + 1)], []).wait()
        return None

    def _stream_shape(self, batch: int, seq_len: int | None = None) -> tuple[int, int, int]:
        """Shape of the residual stream, [batch, tokens, n_embd]; its dtype is the embedding's."""
        return (batch, seq_len or self.shape.seq_len, self.model.config.n_embd)


class _Stage(PipelineStage):
    """Torch's stage, plus the context of a leaf in each backward and its dropout in each forward.

    Torch keeps a receive buffer for each leaf of a step, in both directions. Here a buffer lives
    from the receive to the leaf's backward, so 1F1B holds as many as it has leaves in flight.
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
        self._owner, self._forwarded = weakref.ref(pipeline), 0

    @property
    def _pipeline(self) -> Pipeline:
        pipeline = self._owner()
        assert pipeline is not None, "it runs the schedule"
        return pipeline

    def loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Pipeline.loss`."""
        return self._pipeline.loss(x_BTC, targets_BT)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch; records which leaf it is."""
        self._forwarded = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._pipeline.forward(self._forwarded, *args)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch; gradients computed here belong to one leaf."""
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


def _branch_dtype(device: torch.device) -> torch.dtype:
    """Dtype of a linear layer's output here."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32
