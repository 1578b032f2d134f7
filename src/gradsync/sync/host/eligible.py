"""Conditions for dividing an optimizer's step among the ranks of a host."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.core.torch_private import optimizer_post_hooks, optimizer_pre_hooks, step_hooks
from gradsync.errors import ConfigError
from gradsync.sync.host.state import slots_of
from gradsync.sync.optimizers import OptimizerWatch
from gradsync.sync.sharded.elementwise import check_elementwise

if TYPE_CHECKING:
    from torch.optim import Optimizer


def why_whole(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[torch.Tensor],
    dtypes: Collection[torch.dtype],
) -> str:
    """Reason why every rank has to run the whole optimizers; "" when each may update its share.

    The same on all ranks, whose optimizers are equal, and in all steps: see `why_not_now`.

    Args:
        optimizers: the user's.
        parameters: the synchronised ones.
        dtypes: of those parameters.
    """
    try:
        for optimizer in optimizers:
            check_elementwise(type(optimizer), False)
    except ConfigError as error:
        return str(error)
    ours = {id(parameter) for parameter in parameters}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = [p for group in groups for p in group["params"]]
    half = {torch.bfloat16, torch.float16} & set(dtypes)
    reasons = {
        "the optimizer is differentiable": any(group.get("differentiable") for group in groups),
        "a parameter has no elements": any(p.numel() == 0 for p in parameters),
        "the optimizer has parameters that are not synchronised": any(
            id(p) not in ours and p.requires_grad for p in given
        ),
        # See [Note: 16 bits and threads] in sharded/rounding.py.
        "16-bit parameters round otherwise in pieces, with several threads": bool(
            half and torch.get_num_threads() > 1
        ),
        "the optimizer keeps something that is neither elementwise nor a number": any(
            slots_of(optimizer, dtype) is None for optimizer in optimizers for dtype in dtypes
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def why_not_now(optimizer: Optimizer) -> str:
    """Why the next step has to be whole, though not every one has; see `why_whole`."""
    if step_hooks(optimizer):
        return "hooks on the optimizer may look at the whole gradient"
    everywhere = [*optimizer_pre_hooks(), *optimizer_post_hooks()]
    if not all(isinstance(getattr(h, "__self__", h), OptimizerWatch) for h in everywhere):
        return "hooks on all optimizers may look at the whole gradient"
    own = optimizer.__dict__.get("step")  # a scheduler wraps it, to count
    if own is not None and inspect.unwrap(own) != inspect.unwrap(type(optimizer).step):
        return "optimizer.step was replaced"
    return ""
