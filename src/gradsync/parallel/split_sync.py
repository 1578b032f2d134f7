"""The handle of one part of a split model: what `GradientSync` is for a whole one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.groups import Subset
from gradsync.errors import RunError
from gradsync.parallel.groups import SplitGroups
from gradsync.parallel.partition import EMBEDDING, Part
from gradsync.parallel.split_reducer import SplitReducer
from gradsync.sync.batch_norm import choose_batch_norm
from gradsync.sync.loss_sum import LossSum
from gradsync.sync.registry import build_reducer, find_strategy
from gradsync.sync.replicas import check_replicas, hash_bits
from gradsync.sync.state_face import StateFace
from gradsync.sync.statistics import Statistics
from gradsync.sync.step import Optimizers, StepParts, StepResult, Update, take_step

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.parallel.stage_model import GPTStage


class SplitSync(StateFace):
    """Per step: `leaf` around each backward, then `step` once, on all ranks.

    The step's small message goes over all ranks of the run, so the loss, the weight and a wish to
    stop are the same everywhere; gradients are summed over the replicas of a part.

    Args:
        model: this rank's part.
        part, groups: which part, and who has the others.
        sync: a strategy of `STRATEGIES` that keeps whole replicas.
        options: of the strategy.
    """

    def __init__(
        self,
        model: GPTStage,
        part: Part,
        groups: SplitGroups,
        *,
        sync: str,
        options: Mapping[str, Any],
    ) -> None:
        inner = build_reducer(find_strategy(sync), model, groups.data, None, options)
        self.model, self.comm = model, groups.everyone
        self.reducer = SplitReducer(model, part, groups, inner)
        self._part, self._groups = part, groups
        self._loss = LossSum(self.reducer.parameters[0].device)
        # Rotary tables are constants: nothing to keep equal.
        without = choose_batch_norm(model, groups.data, None)
        self._statistics = Statistics(model, groups.data, without, equal_replicas=False)
        self._parts = StepParts(self.reducer, groups.everyone, self._statistics, 0)

    @contextmanager
    def leaf(self, *, last: bool, index: int) -> Iterator[None]:
        """Enclose one leaf's backward through this part; see `Reducer.leaf`."""
        with self.reducer.leaf(last=last, index=index):
            yield

    def add_loss(self, loss_sum: Tensor, weight: float) -> None:
        """One leaf's summed loss, [], and targets; told once of each replica."""
        if self._part.counts_loss:
            self._loss.add(loss_sum, weight)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        stop: bool = False,
        scale: Any = None,
    ) -> StepResult:
        """See `GradientSync.step`; `scale` must be None."""
        assert scale is None, "fp16 is refused: parts would have to agree on the scale"
        update = Update(self.reducer, [optimizer])
        result = take_step(
            self._parts, self._loss, update, enclosed=nullcontext, clip_norm=clip_norm, stop=stop
        )
        optimizer.zero_grad(set_to_none=True)
        return result

    def check_replicas(
        self, optimizer: Optimizers | None = None, *, step: int | None = None
    ) -> None:
        """The replicas of each part must hold the same bits, and both ends a tied embedding.

        Raises:
            RunError: naming the tensor and the ranks, see `StateFace.check_replicas`.
        """
        layout, place = self._part.layout, self._part.place
        same = [replace(place, data=index) for index in range(layout.dp)]
        ranks = [layout.rank(at) for at in same]
        check_replicas(self.model.named_parameters(), self._groups.data, step=step, ranks=ranks)
        if self._part.tied_ends:
            ends = Subset(self.comm, self._part.tied_ends)
            weight = dict(self.model.named_parameters())[EMBEDDING]
            mine = hash_bits(weight).cpu()
            theirs = torch.empty_like(mine)
            peer = 1 - ends.rank
            ends.exchange([(mine, peer)], [(theirs, peer)]).wait()
            if not torch.equal(mine, theirs):
                raise RunError(
                    f"the two ends of the pipeline hold different bits of the tied {EMBEDDING!r} "
                    f"after step {step}: ranks {self._part.tied_ends}; go back to a checkpoint "
                    "from before"
                )

    def close(self) -> None:
        """Take the hooks out of the model."""
        self.reducer.close()
        self._statistics.close()
