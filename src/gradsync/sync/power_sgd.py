"""`powersgd`: torch's PowerSGD on torch's DDP: low-rank gradients on the wire, with error feedback.

Vogels, Karimireddy & Jaggi 2019 (arXiv 1905.13727). A gradient matrix M, [n, m], travels as P,
[n, r], and Q, [m, r]; what that loses is added to the next step's gradient:

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    bucket         M = gradient + error                 │
    wire               ──[vectors]──[P]──[Q]── …        ┴── optimizer
                   gradient = mean of P Q^T,  error = M - P Q^T

Bytes per rank: 2(W-1)/W of r (n + m) per compressed matrix instead of n m; vectors, and matrices
where that would save less than `min_compression_rate`, travel whole. Three operations per bucket;
memory: the error and a copy of the gradients (2 S), P and Q.

[Note: The error's unit] Our gradients are sums over a rank's share, and so is the error. DDP turns
the mean of them back into a sum over ranks, and the step divides by its own weight: an error is
paid with the weight of the step that pays it. With the same number of targets in each step that is
the paper's algorithm exactly. Gradients that are not finite would stay in the error for ever:
fp16 loss scaling is out.

The error is each rank's own and is in no checkpoint: after a resume it is empty, and the first
`start_powerSGD_iter` steps travel whole again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.torch_ddp import TorchDdpReducer

if TYPE_CHECKING:
    from torch import nn


class PowerSgdReducer(TorchDdpReducer):
    """DDP with torch's PowerSGD hook. Replicas stay equal; gradients are approximations.

    Until `start_powerSGD_iter`, and in a step in which some rank has no leaf, gradients travel
    whole, without touching error or count.

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
        super().__init__(model, comm, **ddp_options)
        self.state = power_sgd_state(
            self.ddp.process_group,
            self.parameters[0].device,
            matrix_approximation_rank=matrix_approximation_rank,
            start_powerSGD_iter=start_powerSGD_iter,
            min_compression_rate=min_compression_rate,
            use_error_feedback=use_error_feedback,
            warm_start=warm_start,
        )
        self.ddp.register_comm_hook(self.state, powerSGD_hook)

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """As DDP's; the throwaway step does not count."""
        super().prime(forward_backward)
        assert not self.state.error_dict, "the priming step was compressed"
        self.state.iter = 0


def check_power_sgd(**options: Any) -> None:
    """See to it that `options` make a `PowerSGDState`.

    Raises:
        ConfigError: an unknown one, or one out of its range.
    """
    known = inspect.signature(PowerSGDState).parameters.keys() - {"process_group"}
    for name in options:
        if name not in known:
            raise ConfigError(
                f"powersgd has no option {name!r} (it has: {', '.join(sorted(known))})"
            )
    rank, start = options.get("matrix_approximation_rank", 1), options.get("start_powerSGD_iter", 2)
    if rank < 1:
        raise ConfigError(f"matrix_approximation_rank must be at least 1, got {rank}")
    if start < 2:
        raise ConfigError(
            f"start_powerSGD_iter must be at least 2, got {start}: DDP regroups its buckets after "
            "the first backward, and errors belong to buckets"
        )


def power_sgd_state(group: Any, device: torch.device, **options: Any) -> PowerSGDState:
    """Torch's state for its PowerSGD hook, with our defaults.

    Args:
        group: process group.
        device: where the gradients are.
        options: of `PowerSGDState`, see `PowerSgdReducer`.

    Raises:
        ConfigError: an option that cannot be; gradients on the CPU where CUDA is present.
    """
    check_power_sgd(**options)
    if device.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "torch's PowerSGD hook waits for the GPU wherever there is one, and fails with "
            "gradients on the CPU; train on the GPU, or hide it with CUDA_VISIBLE_DEVICES="
        )
    defaults: dict[str, Any] = {
        "start_powerSGD_iter": 10,
        "random_seed": 0,
        # Without it, a matrix whose gradient is all zero (an unused layer) becomes nan.
        "orthogonalization_epsilon": 1e-8,
    }
    return PowerSGDState(process_group=group, **{**defaults, **options})
