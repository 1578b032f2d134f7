"""One small training problem for every strategy, and its one-rank oracle.

Leaf i has its own number of samples and of zero-weight ones, so that a mean of means, a forgotten
division or a missed rank gives visibly other weights.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.data.plan import share
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate

NUM_STEPS = 3
_GLOBAL_RANDOM_STATE = threading.Lock()


class SmallNet(nn.Module):
    """Tied weights, a frozen part, a buffer, and a branch that only some leaves use."""

    def __init__(self, *, branch: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.inner.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.branch = nn.Linear(6, 6) if branch else None
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x_BC: Tensor, use_branch: bool = True) -> Tensor:
        y_BC = self.again(torch.tanh(self.inner(x_BC))) + self.frozen(x_BC) * self.scale
        if self.branch is not None and use_branch:
            y_BC = y_BC + self.branch(x_BC)
        return y_BC


@dataclass(frozen=True)
class Case:
    """What varies between the problems."""

    name: str
    num_leaves: int = 5
    clip_norm: float | None = None
    zero_weight_leaves: tuple[int, ...] = ()
    branch_leaves: tuple[int, ...] | None = None
    """Leaves that use the branch; None: the net has none."""
    short_last_step: bool = False
    """The last step has a single leaf: all ranks but one have none."""


CASES = (
    Case("uneven shares"),
    Case("clipping", clip_norm=0.05),
    Case("a leaf without targets", zero_weight_leaves=(1, 4)),
    Case("fewer leaves than ranks", short_last_step=True),
    Case("a branch only one leaf uses", branch_leaves=(0,)),
    Case("a branch nobody uses", branch_leaves=()),
)


def leaf_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [B, 6], with B = 2 .. 4."""
    generator = torch.Generator().manual_seed(100 * step + index)
    size = 2 + index % 3
    return (
        torch.randn(size, 6, generator=generator),
        (1 + index) * torch.randn(size, 6, generator=generator),
    )


def train_case(case: Case, sync_name: str, comm: Communicator, **options: Any) -> dict[str, Any]:
    """Train on this rank's share; returns weights, mean losses and gradient norms."""
    with _GLOBAL_RANDOM_STATE:  # ranks may be threads
        torch.manual_seed(1000 + comm.rank)  # ranks start differently: rank 0's weights must win
        model = SmallNet(branch=case.branch_leaves is not None)
    sync = replicate(model, sync=sync_name, comm=comm, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        short = case.short_last_step and step == NUM_STEPS - 1
        num_leaves = 1 if short else case.num_leaves
        mine = share(num_leaves, comm.rank, comm.world_size)
        for index in mine:
            last = index == mine[-1] and num_leaves >= comm.world_size
            _leaf(case, sync, step, index, last=last)
        result = sync.step(optimizer, clip_norm=case.clip_norm)
        losses.append(float(result.mean_loss))
        norms.append(None if result.grad_norm is None else float(result.grad_norm))
    assert all(parameter.grad is None for parameter in model.parameters())
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"weights": weights, "losses": losses, "norms": norms}


def _leaf(case: Case, sync: GradientSync, step: int, index: int, *, last: bool) -> None:
    inputs, targets = leaf_of(step, index)
    weight = 0 if index in case.zero_weight_leaves else len(inputs)
    with sync.micro_step(last=last, index=index):
        use_branch = case.branch_leaves is None or index in case.branch_leaves
        errors = ((sync.forward(inputs, use_branch) - targets) ** 2).sum(dim=1)
        loss = (errors * (1.0 if weight else 0.0)).sum()
        sync.backward(loss, weight=weight)


def assert_equal_to_one_rank(results: list[dict[str, Any]], oracle: dict[str, Any]) -> None:
    """All ranks hold the same bits, and they are the oracle's to fp32 rounding."""
    for result in results:
        for name, tensor in oracle["weights"].items():
            assert torch.equal(result["weights"][name], results[0]["weights"][name]), name
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=1e-6)
        assert result["losses"] == results[0]["losses"]
        torch.testing.assert_close(result["losses"], oracle["losses"], rtol=1e-5, atol=0.0)
        if oracle["norms"][0] is not None:
            torch.testing.assert_close(result["norms"], oracle["norms"], rtol=1e-5, atol=0.0)
