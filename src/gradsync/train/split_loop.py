"""Training loop of a model that is split over ranks, where it differs."""

from __future__ import annotations

from typing import Any

from gradsync.comm.values import all_gather_json
from gradsync.data.leaf import Step
from gradsync.train.divergence import check_finite, learnt
from gradsync.train.loop import Trainer, memory_gib
from gradsync.train.split_setup import SplitLearner
from gradsync.train.split_state import split_snapshot


class SplitTrainer(Trainer):
    """Leaves go through the stages of a replica; only the steps that differ are here."""

    @property
    def _split(self) -> SplitLearner:
        assert isinstance(self.learner, SplitLearner)
        return self.learner

    def _run_leaves(self, step: Step) -> None:
        """This replica's leaves. A schedule decides which is next: it has all of them before it."""
        self._split.pipeline.run(list(self._interval.waiting(step)))

    def _prime(self) -> None:
        """Each stage alone: what is learnt is the order of its own gradients."""
        self._split.sync.reducer.prime(self._split.pipeline.throwaway)

    def _evaluate_now(self) -> float:
        """Through all stages of each replica."""
        return self._split.pipeline.evaluate(self.data.val)

    def _save(self, step: int) -> None:
        """Rank 0 writes what the ranks of the first replica send it."""
        with self._interval.paused():
            named = self._split.model.named_parameters()
            check_finite(self.comm, step, learnt(self._split, dict(named)))
            found = split_snapshot(
                step, self.config, self._split, self.data, fingerprint=self._fingerprint
            )
            if found is not None:
                self._store.save(found)

    def closing_figures(self) -> dict[str, Any]:
        """See `Trainer.closing_figures`: the layout, and each rank's memory, on all ranks."""
        memory = all_gather_json(self.comm, memory_gib(self.world))
        return {"parallel": str(self._split.part.layout), "mem_max_gib_by_rank": memory}
