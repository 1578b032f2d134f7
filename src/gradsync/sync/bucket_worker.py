"""DDP's buckets on a worker thread: results as the futures that DDP waits for, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.comm.work import Background
from gradsync.core.torch_private import timeout_of

if TYPE_CHECKING:
    from torch import Tensor


class BucketWorker:
    """Runs one bucket after the other beside backward, in the order in which DDP passes them.

    After a failure nothing more runs: all later futures fail too, or backward would wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._background = Background(device)
        self._failure: BaseException | None = None

    def submit(self, tensor: Tensor, fn: Callable[[], None]) -> torch.futures.Future[Tensor]:
        """Run `fn()`, which leaves the result in `tensor`; its exception is raised by backward."""
        devices: list[torch.device | int | str] = [tensor.device] if tensor.is_cuda else []
        finished = torch.futures.Future[Any](devices=devices or None)
        failed: list[BaseException] = []

        # Not `set_exception`: DDP reads futures without the part of it that is written in Python.
        # It does see an exception raised by a callback. And no exception inside of a future: its
        # traceback refers to frames, these to the future, and the collector does not look into
        # futures.
        def outcome(_: torch.futures.Future[Any]) -> Tensor:
            if failed:
                raise failed[0]
            return tensor

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                fn()
            except BaseException as failure:
                self._failure = failure
                failed.append(failure)
            finished.set_result(None if failed else tensor)

        result = finished.then(outcome)
        self._background.submit(run)
        return result


def group_of_its_own(group: Any, device: torch.device) -> Any:
    """Make a second group over the same ranks, for one thread's collectives; all its ranks call it.

    Two threads would issue one group's collectives in different orders on different ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        ranks,
        timeout=timeout_of(group, device),
        # Without the others; then torch names the group after how many groups *this* rank has,
        # which must be equal on its members. Not where all ranks are here anyway.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
