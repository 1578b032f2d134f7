"""The loss of a whole evaluation set, exact however ranks share it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_sum
from gradsync.commands.models.gpt import GPT, loss_sum
from gradsync.data.loader import EvalLoader
from gradsync.errors import RunError
from gradsync.sync.step_metadata import LossSum

Autocast = AbstractContextManager[Any]


@torch.no_grad()
def evaluate(
    model: GPT,
    loader: EvalLoader,
    comm: Communicator,
    autocast: Autocast,
    *,
    equal_forwards: bool = False,
) -> float:
    """Mean loss per target over the evaluation set, nats, the same on all ranks. Every sample
    counts once, with no padded duplicates.

    It calls the model, not its wrapper, whose forward would communicate. With `equal_forwards` all
    ranks call the model equally often and discard some results: if parameters are sharded, a
    forward takes all ranks.
    """
    was_training = model.training
    model.eval()
    device = model.embed.weight.device
    total, samples = LossSum(device), 0
    try:
        for mine in loader:
            with autocast:
                loss = loss_sum(model(mine.inputs), mine.targets)
            total.add(loss, mine.num_targets)
            samples += mine.num_samples
        for _ in range(loader.most - len(loader) if equal_forwards else 0):
            with autocast:
                model(torch.zeros((1, 1), dtype=torch.int64, device=device))
    finally:
        model.train(was_training)
    return mean_over_ranks(total, samples, loader, comm)


def mean_over_ranks(total: LossSum, samples: int, loader: EvalLoader, comm: Communicator) -> float:
    """The mean loss per target of what all ranks have added. Ranks may have had different numbers
    of micro-batches, and have not communicated: one all-reduce sums loss, targets and samples.

    Raises:
        RunError: the number of samples counted is not that of the set, or no target counts.
    """
    *summed, num_samples = all_sum(comm, *total.message(), samples)
    total_loss, num_targets = total.over_ranks(comm, summed)
    if num_samples != loader.total_samples:
        raise RunError(
            f"evaluation counted {num_samples:.0f} samples, the set has {loader.total_samples}"
        )
    if not num_targets:
        raise RunError("the evaluation set has no target that counts: all of them are -100")
    return float(total_loss) / num_targets
