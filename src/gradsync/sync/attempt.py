"""One step that may be begun again after a loss, see runtime/recovery.py.

A `with` block alone cannot run twice, and what follows it would run for a step that was not taken.
So the block stands in a loop, which ends once the step is committed.
"""

from __future__ import annotations

from collections.abc import Callable

from gradsync.data.micro_batch import Batch
from gradsync.runtime.failure import communication_error
from gradsync.world import World


class Attempt:
    """The body of a step; without `on_loss="shrink"` it changes nothing.

    Args:
        world, batch: of the step.
        regroup: makes the handle continue over the ranks that are left.
    """

    def __init__(self, world: World, batch: Batch, regroup: Callable[[], None]) -> None:
        self._world, self._batch, self._regroup = world, batch, regroup
        self._committed = 0
        self.failed = False
        """Whether a rank was lost before the step was committed."""

    def __enter__(self) -> Attempt:
        if (recovery := self._world.recovery) is not None:
            self._committed = recovery.committed
            recovery.in_attempt, recovery.regrouped = True, False
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        recovery = self._world.recovery
        if recovery is None:
            return False
        recovery.in_attempt = False
        committed = recovery.committed > self._committed
        if error is not None:
            if communication_error(error) is None or committed:
                return False
            if not recovery.regrouped:
                recovery.recover(error)
            self._regroup()
            self.failed = True
        if recovery.regrouped:
            self._batch.deal_again(self._world, repeat=self.failed)
        return self.failed
