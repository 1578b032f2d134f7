"""nan and inf in a run: it ends where they are met, and none of them reaches a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.comm.values import all_gather_json
from gradsync.errors import DivergenceError
from gradsync.sync.sharded_state import HeldState
from gradsync.sync.step import StepResult
from gradsync.train.setup import Learner

ADVICE = "lower --optim.lr, or look at the data of that step"
ADVICE_RESUMED = (
    "that is the first step after the checkpoint, whose weights may be finite and yet past saving: "
    "go back to an earlier one (--resume PATH), start anew with another --out, or look at the data "
    "of that step"
)


def why_diverged(result: StepResult, learner: Learner) -> str:
    """`loss became nan`, or the norm; "" when both are finite. The same on all ranks; on CUDA it
    waits for the device."""
    if not result.weight:
        return ""
    if not math.isfinite(loss := float(result.mean_loss)):
        return f"the loss became {loss}"
    # A loss scaler skips such a step; and a rank that steps alone has a norm of its own.
    counts = learner.scaler is None and learner.sync.reducer.shards.equal_replicas
    norm = result.grad_norm if counts else None
    if norm is not None and not math.isfinite(norm := float(norm)):
        return f"the gradient's norm became {norm}"
    return ""


def check_finite(comm: Communicator, step: int, named: Iterable[tuple[str, Tensor]]) -> None:
    """Before a checkpoint, on all ranks, each with what it holds.

    Whole group, two small all-gathers: see `all_gather_json`.

    Raises:
        DivergenceError: on all ranks: some rank holds nan or inf, which no run could go on from.
    """
    for rank, found in enumerate(all_gather_json(comm, non_finite(named))):
        if found:
            raise DivergenceError(
                f"after step {step} there is nan or inf in {found} (rank {rank}), so it is not "
                f"saved; {ADVICE}"
            )


def learnt(learner: Learner, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Contents of a checkpoint of whole tensors, by name: weights, the optimizer's state and the
    strategy's."""
    state, _ = pack_optimizer(learner.optimizer, learner.model.named_parameters())
    return chain(weights.items(), state.items(), learner.sync.state_tensors().items())


def learnt_shares(learner: Learner, held: HeldState) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of weights and optimizer state that ranks share out, by name."""
    weights = learner.sync.sharded_weights()
    if weights is None:
        yield from learner.model.state_dict().items()
    else:
        yield from ((name, tensor) for name, (_, tensor) in weights.items())
    names: dict[Any, str] = {p: name for name, p in learner.model.named_parameters()}
    for parameter, (_, state) in held.items():
        for slot, value in state.items():
            if isinstance(value, Tensor):
                yield f"{slot}/{names[parameter]}", value
    yield from learner.sync.state_tensors().items()
