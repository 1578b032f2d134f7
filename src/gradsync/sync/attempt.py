"""One step that may begin again after a loss, see runtime/recovery.py.

A `with` block alone cannot run twice, and what follows it would run for a step that was not taken.
So the block stands in a loop, which ends once the step is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.data.micro_batch import Batch
from gradsync.runtime.failure import communication_error
from gradsync.runtime.recovery import Recovery


class Attempt:
    """The body of a step, with one `sync.step`; without `on_loss="shrink"` it changes nothing.

    Args:
        recovery: of the run; None lets every error pass.
        batches: of the step.
    """

    def __init__(self, recovery: Recovery | None, batches: Sequence[Batch]) -> None:
        self._recovery, self._batches = recovery, batches
        self._before = 0, 0
        self.failed = False
        """Whether a rank was lost before the step was committed."""

    def __enter__(self) -> Attempt:
        if self._recovery is not None:
            self._recovery.rebind()  # a step of the user's loop has used its gradients by now
            self._before = self._recovery.committed, self._recovery.generation
            self._recovery.in_attempt = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        recovery = self._recovery
        if recovery is None:
            return False
        recovery.in_attempt = False
        committed, generation = self._before
        if error is None or recovery.committed > committed or communication_error(error) is None:
            return False
        if recovery.generation == generation:  # the step has not recovered itself
            recovery.recover(error)
        recovery.rebind()
        for batch in self._batches:
            batch.deal_again()
        self.failed = True
        return True
