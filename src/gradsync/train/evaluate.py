"""Exact evaluation: every sample once, shared by all ranks, no padded duplicates."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_sum
from gradsync.data.loader import EvalLeaves
from gradsync.errors import RunError
from gradsync.models.gpt import GPT, loss_sum
from gradsync.sync.loss import LossSum


@torch.no_grad()
def evaluate(
    model: GPT,
    leaves: EvalLeaves,
    comm: Communicator,
    autocast: AbstractContextManager[None],
    *,
    equal_forwards: bool = False,
) -> float:
    """Mean loss per target over the evaluation set, nats, the same on all ranks.

    Ranks may have different numbers of leaves: nothing communicates until all are done, then one
    all-reduce of loss, targets and samples (see `LossSum`). It calls the model itself, not its
    wrapper: a wrapper's forward would communicate. With `equal_forwards` all ranks call the model
    equally often, some for nothing: where parameters are spread, a forward is everybody's.

    Raises:
        RunError: the samples counted are not the samples there are, or no target counts.
    """
    was_training = model.training
    model.eval()
    device = model.embed.weight.device
    total, samples = LossSum(device), 0
    try:
        for leaf in leaves:
            with autocast:
                if model.loss_rows:
                    loss = model(leaf.inputs, leaf.targets)
                else:
                    loss = loss_sum(model(leaf.inputs), leaf.targets)
            total.add(loss, leaf.num_targets)
            samples += leaf.num_samples
        for _ in range(leaves.most - len(leaves) if equal_forwards else 0):
            with autocast:
                model(torch.zeros((1, 1), dtype=torch.int64, device=device))
    finally:
        model.train(was_training)
    *summed, num_samples = all_sum(comm, *total.message(), samples)
    total_loss, num_targets = total.over_ranks(comm, summed)
    if num_samples != leaves.total_samples:
        raise RunError(
            f"evaluation counted {num_samples:.0f} samples, the set has {leaves.total_samples}"
        )
    if not num_targets:
        raise RunError("the evaluation set has no target that counts: all of them are -100")
    return float(total_loss) / num_targets
