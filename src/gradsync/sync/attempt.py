"""One step that may begin again after a loss, see runtime/recovery.py.

A `with` block alone cannot run twice, and what follows it would run for a step that was not taken.
So the block stands in a loop, which ends once the step is committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from gradsync.comm.groups import communicator
from gradsync.comm.values import all_gather_json
from gradsync.data.micro_batch import Batch
from gradsync.errors import ConfigError, DriftError, LostPeerError
from gradsync.runtime.failure import communication_error
from gradsync.runtime.recovery import Recovery
from gradsync.runtime.seeds import keep_generators, kept_generators
from gradsync.sync.check_replicas import first_difference, group_ranks


class Attempt:
    """The body of a step, with one `sync.step`; without `on_loss="shrink"` it changes nothing.

    Args:
        recovery: of the run; None lets every error pass.
        batches: of the step.
    """

    def __init__(self, recovery: Recovery | None, batches: Sequence[Batch]) -> None:
        self._recovery, self._batches = recovery, batches
        self._put_back: Callable[[], None]  # the global random generators
        self._before = 0, 0
        self.failed = False
        """Whether a rank was lost before the step was committed."""

    def __enter__(self) -> Attempt:
        recovery = self._recovery
        if recovery is not None and recovery.waits_to_join and not self._batches:
            recovery = self._recovery = None  # an evaluation of one rank alone
        if recovery is None:
            return self
        while self._batches and (newcomers := recovery.let_join()):
            try:
                why = self._difference(recovery, newcomers)
            except RuntimeError as error:
                if communication_error(error) is None:
                    raise
                recovery.recover(error)  # then the remaining ranks compare again
                continue
            if why:
                recovery.leave_out(newcomers, why)
            break
        recovery.rebind()  # a step of the user's loop has used its gradients by now
        self._refuse_half_a_step()
        with kept_generators():  # the script has drawn for this step already
            for batch in self._batches:
                batch.follow(recovery.world.rank, recovery.world.world_size)
        self._put_back = keep_generators()
        self._before = recovery.committed, recovery.recovered
        recovery.in_attempt = True
        return self

    def _difference(self, recovery: Recovery, newcomers: Collection[int]) -> str:
        """How `newcomers` differ from the other ranks; "" if they do not. Three all-gathers of the
        whole group, then hashes of weights and optimizer state.

        Raises:
            DriftError: the others differ among themselves.
        """
        comm = communicator(recovery.world)
        handles = sorted(recovery.handles, key=lambda each: each.number)
        told = {"the number of the batch": str([batch.number for batch in self._batches])}
        for handle in handles:
            told |= handle.settings()
        why = first_difference(comm, told)
        sides = group_ranks(all_gather_json(comm, json.dumps(told))).values()
        try:
            for handle in [] if why else handles:
                handle.check_replicas(handle.saved_with)
        except DriftError as error:
            why, sides = str(error), error.sides
        others = set(range(comm.world_size)).difference(newcomers)
        if why and not any(others.issubset(side) for side in sides):
            raise DriftError(why)
        return why

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        recovery = self._recovery
        if recovery is None:
            return False
        committed, recovered = self._before
        if error is None:
            self._refuse_half_a_step()
            if not self._batches and recovery.committed == committed:
                error = self._end_together(recovery)
        recovery.in_attempt = False
        if recovery.lost and isinstance(error, Exception) and recovery.world.device_name != "cpu":
            error = LostPeerError(f"a rank was lost before {error!r}")  # it read aborted sums
        if error is None or recovery.committed > committed or communication_error(error) is None:
            return False
        if recovery.recovered == recovered:  # the step has not recovered itself
            if recovery.generation > recovered:
                return False  # it could not
            recovery.recover(error)
        recovery.rebind(again=True)
        for batch in self._batches:
            batch.deal_again()
        self._put_back()
        self.failed = True
        return True

    def _end_together(self, recovery: Recovery) -> BaseException | None:
        """Without a step, as in an evaluation: all ranks have done all of the block, or none has.
        Returns the error after which it begins again. One barrier of the whole group."""
        try:
            recovery.commit(communicator(recovery.world).barrier, evaluates=True)
        except RuntimeError as error:
            if communication_error(error) is None:
                raise
            return error
        return None

    def _refuse_half_a_step(self) -> None:
        """A loss would drop the sums of batches that are not dealt again."""
        if self._recovery is not None and any(each.in_step for each in self._recovery.handles):
            raise ConfigError(
                "under on_loss='shrink' an attempt holds a whole step, from the first backward to "
                "sync.step: accumulate by a larger global_batch_size in gs.loader"
            )
