"""`powersgd`: torch's PowerSGD on torch's DDP: low-rank gradients on the wire, with error feedback.

Vogels, Karimireddy & Jaggi 2019 (arXiv 1905.13727). A gradient matrix M, [n, m], is sent as P,
[n, r], and Q, [m, r]; the error is added to the next step's gradient:

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    bucket         M = gradient + error                 │
    wire               ──[vectors]──[P]──[Q]── …        ┴── optimizer
                   gradient = mean of P Q^T,  error = M - P Q^T

Bytes per rank: 2(W-1)/W of r (n + m) per compressed matrix instead of n m; vectors, and matrices
where that would save less than `min_compression_rate`, are sent whole. Three operations per bucket;
memory: the error and a copy of the gradients (2 S), P and Q.

[Note: The error's unit] Gradients here are sums over a rank's share, and so is the error. DDP turns
their mean back into a sum over ranks, and the step divides by its own weight: so an error counts
with the weight of the step that adds it. With the same number of targets in each step that is the
paper's algorithm exactly. Gradients that are not finite would stay in the error for ever: fp16 loss
scaling is not supported.

The error is private to each rank and in no checkpoint: after a resume it is empty, and the first
`start_powerSGD_iter` steps are sent whole again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.bucket_worker import BucketWorker, group_of_its_own
from gradsync.sync.hook_state import HookState, average_bucket
from gradsync.sync.torch_ddp import TorchDdpReducer

if TYPE_CHECKING:
    from torch import Tensor, nn


class PowerSgd:
    """Torch's hook with its state, made when the first bucket shows the gradients' device.

    [Note: PowerSGD on the CPU] Torch's hook waits for one all-reduce in the callback of another.
    On NCCL that is a matter of streams. On Gloo it blocks one of the group's two worker threads:
    with two buckets in progress both wait for ever, or ranks issue their all-reduces in different
    orders. So on the CPU buckets go one after the other, on a separate thread and group.

    Args:
        options: of torch's `PowerSGDState`, with gradsync's defaults.

    Raises:
        ConfigError: an option that is unknown or out of its range.
    """

    def __init__(self, **options: Any) -> None:
        known = inspect.signature(PowerSGDState).parameters.keys() - {"process_group"}
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"powersgd has no option {name!r} (it has: {', '.join(sorted(known))})"
                )
        defaults: dict[str, Any] = {
            "start_powerSGD_iter": 10,
            "random_seed": 0,
            # Without it, a matrix whose gradient is all zero (an unused layer) becomes nan.
            "orthogonalization_epsilon": 1e-8,
        }
        self._options: dict[str, Any] = {**defaults, **options}
        for name, least in (("matrix_approximation_rank", 1), ("start_powerSGD_iter", 2)):
            if (got := self._options.get(name, least)) < least:
                why = ": DDP regroups its buckets after the first backward" if least == 2 else ""
                raise ConfigError(f"{name} must be at least {least}, got {got}{why}")
        self._state: PowerSGDState | None = None
        self._worker: BucketWorker | None = None

    def __call__(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A future of the bucket's buffer, averaged over `group` in place."""
        tensor = bucket.buffer()
        if self._state is None:
            self._begin(group, tensor.device)
        state, worker = self._state, self._worker
        assert state is not None
        if worker is None:
            return powerSGD_hook(state, bucket)
        return worker.submit(tensor, lambda: _run(state, bucket))

    def _begin(self, group: Any, device: torch.device) -> None:
        """Prepare thread and group; all ranks call it, at their first bucket."""
        if device.type == "cpu":
            if torch.cuda.is_available():
                raise ConfigError(
                    "torch's PowerSGD hook waits for the GPU wherever there is one, and fails with "
                    "gradients on the CPU; train on the GPU, or hide it: CUDA_VISIBLE_DEVICES="
                )
            group = group_of_its_own(group, device)  # [Note: PowerSGD on the CPU]
            self._worker = BucketWorker(device)
        self._state = PowerSGDState(process_group=group, **self._options)

    def forget(self) -> None:
        """Restart the count of steps."""
        if self._state is not None:
            assert not self._state.error_dict, "something was compressed already"
            self._state.iter = 0


def _run(state: PowerSGDState, bucket: dist.GradBucket) -> None:
    powerSGD_hook(state, bucket).wait()


class PowerSgdReducer(TorchDdpReducer):
    """DDP with torch's PowerSGD hook. Replicas stay equal; gradients are approximations.

    Until `start_powerSGD_iter`, and in a step in which some rank has no leaf, gradients are sent
    whole; the latter affects neither error nor count.

    Args:
        model: on its device; its replicas are equal.
        comm: must be a process-group communicator.
        matrix_approximation_rank: r above; torch's documentation suggests 1 to 4.
        start_powerSGD_iter: first step that compresses; at least 2, since DDP regroups its buckets
            after its first backward.
        min_compression_rate: a matrix is compressed if that makes it smaller by this factor.
        use_error_feedback: without it the result is biased; for comparison only.
        warm_start: begin with the last step's Q (one power iteration a step, then enough).
        ddp_options: of `TorchDdpReducer`.

    Raises:
        ConfigError: a number out of its range; tensors on the CPU where CUDA is present.
    """

    strategy = "powersgd"
    takes_scale = False  # inf would stay in the error memory for ever

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 10,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        **ddp_options: Any,
    ) -> None:
        self._power_sgd = PowerSgd(
            matrix_approximation_rank=matrix_approximation_rank,
            start_powerSGD_iter=start_powerSGD_iter,
            min_compression_rate=min_compression_rate,
            use_error_feedback=use_error_feedback,
            warm_start=warm_start,
        )
        super().__init__(model, comm, **ddp_options)
        self.ddp.register_comm_hook(
            HookState(self.ddp.process_group, self._power_sgd), average_bucket
        )

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """See `TorchDdpReducer.prime`; the throwaway step does not count."""
        super().prime(forward_backward)
        self._power_sgd.forget()
