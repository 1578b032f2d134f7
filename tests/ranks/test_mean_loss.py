"""Mean losses: exact, and a sum that is passed as a mean is noticed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.check_loss import check_loss
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.thread_ranks import run_thread_ranks

B, C = 4, 5
CLASSES = torch.arange(B)
PIXELS = CLASSES.view(1, 2, 2)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
VALUES = torch.linspace(-1, 1, B * C).view(B, C)
ONES = torch.ones(B, C)


def alarm(loss: Tensor, weight: float = B, reduction: str = "mean") -> str:
    """The warning about `loss`, "" for none."""
    return check_loss(loss, weight, reduction)


def images(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, **named: loss(x.view(1, C, 2, 2).log_softmax(1), PIXELS, **named)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, **r: F.cross_entropy(x, CLASSES, **r),
    "cross_entropy, weighted": lambda x, **r: F.cross_entropy(
        x, CLASSES, weight=torch.arange(1.0, C + 1), **r
    ),
    "cross_entropy, smoothed": lambda x, **r: F.cross_entropy(x, CLASSES, label_smoothing=0.1, **r),
    "cross_entropy, images": images(F.cross_entropy),
    "linear_cross_entropy": lambda x, **r: F.linear_cross_entropy(x, VALUES, CLASSES, **r),
    "nll_loss": lambda x, **r: F.nll_loss(x.log_softmax(1), CLASSES, **r),
    "nll_loss, images": images(F.nll_loss),
    "mse_loss": lambda x, **r: F.mse_loss(x, VALUES, **r),
    "smooth_l1_loss": lambda x, **r: F.smooth_l1_loss(x, VALUES, **r),
    "huber_loss": lambda x, **r: F.huber_loss(x, VALUES, **r),
    "binary_cross_entropy": lambda x, **r: F.binary_cross_entropy(x.sigmoid(), ONES, **r),
    "binary_cross_entropy_with_logits": lambda x, **r: F.binary_cross_entropy_with_logits(
        x, ONES, **r
    ),
    "multi_margin_loss": lambda x, **r: F.multi_margin_loss(x, CLASSES, **r),
    "soft_margin_loss": lambda x, **r: F.soft_margin_loss(x[:, 0], SIGNS, **r),
}
"""Losses of x [4, 5] with `reduction=`, whose graphs show it. Torch computes others (`l1_loss`,
`kl_div`) by operations that look like anybody's."""


def test_a_mean_is_told_from_a_sum() -> None:
    x = VALUES.clone().requires_grad_()
    loss = F.cross_entropy(x, CLASSES)
    assert "this loss is a mean" in alarm(loss, reduction="sum")
    assert not alarm(loss * B, reduction="sum")
    assert not alarm(sum(map(F.mse_loss, x, VALUES)), reduction="sum")
    terms = F.cross_entropy(x, CLASSES, reduction="none")
    assert "this loss is a sum" in alarm(terms.sum())
    assert not alarm(terms.sum() / B)


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_is_told_from_a_mean(name: str) -> None:
    if name == "linear_cross_entropy" and not hasattr(F, name):
        pytest.skip(f"torch {torch.__version__} has no F.{name}; 2.13 has")
    x = torch.linspace(-2, 1, B * C).view(B, C).requires_grad_()
    assert "reduction='sum'" not in alarm(LOSSES[name](x, reduction="mean"))
    assert "reduction='sum'" in alarm(LOSSES[name](x, reduction="sum"))


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of losses": lambda x: F.cross_entropy(x, CLASSES, reduction="none").mean(),
    "masked": lambda x: F.cross_entropy(x, CLASSES, reduction="none").sum() / len(x),
    "cast": lambda x: F.cross_entropy(x.bfloat16(), CLASSES).float(),
    "with a penalty": lambda x: F.cross_entropy(x, CLASSES) + 0.1 * x.square().sum(),
    "with a loss that is a sum": lambda x: (
        F.cross_entropy(x, CLASSES) + 0.1 * F.mse_loss(x, VALUES, reduction="sum")
    ),
    "two tasks": lambda x: F.cross_entropy(x, CLASSES) + F.mse_loss(x, VALUES),
    "mean pooling": lambda x: F.cross_entropy(x.view(B, C, 1).mean(2), CLASSES),
    "output": lambda x: x[0, 0] * 2,
}


@pytest.mark.parametrize("name", MEANS)
def test_no_false_alarm(name: str) -> None:
    assert not alarm(MEANS[name](VALUES.clone().requires_grad_()))


def test_a_sum_of_one_is_the_mean() -> None:
    loss = F.cross_entropy(VALUES.clone().requires_grad_()[:1], CLASSES[:1], reduction="sum")
    assert not alarm(loss, weight=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_over_others_than_it_counts_is_noticed(dtype: torch.dtype) -> None:
    """As of a language model that shifts its labels, which leaves out one of each sequence."""
    logits = torch.zeros(3000, 2, dtype=dtype, requires_grad=True)
    labels = torch.zeros(3000, dtype=torch.long)
    labels[2001:] = -100
    loss = F.cross_entropy(logits, labels)
    assert not alarm(loss, weight=2001)
    text = alarm(loss, weight=2500)
    assert "was taken over 200" in text
    assert "counts for 2500: give sync.backward the number as weight=" in text


# -- through a handle ------------------------------------------------------------------------------


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, C))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


X = torch.linspace(-1, 1, 6 * B * 3).sin().view(6, B, 3)
Y = (torch.arange(6 * B) % C).view(6, B)
Y[0, :3], Y[2], Y[5, 1] = -100, -100, -100  # leaf 2 is all padding


def one() -> GradientSync:
    return replicate(net(), comm=SingleCommunicator())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("given", "said"), [("mean", 0), ("sum", 0), (None, 1)])
def test_a_handle_says_it_once(
    given: str | None, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    sync = one()
    for x, y in zip(X[3:], Y[3:], strict=True):
        loss = F.cross_entropy(sync.forward(x), y, reduction=given or "sum")
        named = {} if given is None else {"reduction": given}
        sync.backward(loss, weight=(y != -100).sum(), **named)
    found = [r.getMessage() for r in caplog.records]
    assert len(found) == said
    assert all("sync.backward(..., reduction='sum')" in text for text in found)
    with pytest.raises(ConfigError, match=r"must be 'mean' or 'sum', got 'none'"):
        sync.backward(sync.forward(X[0]).sum(), weight=1, reduction="none")
    sync.discard()
    sync.close()


def masked_mean(logits: Tensor, y: Tensor) -> Tensor:
    """As people write it; over nothing it is 0 / 0, and so is its gradient."""
    mask = y != -100
    losses = -logits.log_softmax(1)[torch.arange(len(y)), y.clamp_min(0)]
    return (losses * mask).sum() / mask.sum()


def loss_sum(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def trained(
    comm: Communicator, loss: Callable[..., Tensor], reduction: str
) -> tuple[list[Tensor], list[float]]:
    """Weights and mean losses of two steps of three leaves, of 1, 4, 0 and 4, 4, 3 targets."""
    sync = replicate(net(), comm=comm)
    optimizer = torch.optim.SGD(sync.model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(2):
        for leaf in share(3, comm.rank, comm.world_size):
            x, y = X[3 * step + leaf], Y[3 * step + leaf]
            weight = (y != -100).sum()
            sync.backward(loss(sync.forward(x), y), weight=weight, reduction=reduction)
        sync.step(optimizer, clip_norm=1.0)
        losses.append(sync.mean_loss)
    sync.close()
    return [p.detach().clone() for p in sync.model.parameters()], losses


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("loss", [F.cross_entropy, masked_mean])
def test_means_give_the_bits_of_sums(world_size: int, loss: Callable[..., Tensor]) -> None:
    expected, losses = trained(SingleCommunicator(), loss_sum, "sum")

    def work(_: int, group: dist.ProcessGroup) -> tuple[list[Tensor], list[float]]:
        return trained(ProcessGroupCommunicator(group), loss, "mean")

    for weights, found in run_thread_ranks(work, world_size):
        assert all(map(torch.equal, weights, expected))
        assert found == pytest.approx(losses, rel=1e-6)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(2):  # one big batch
        cut = slice(3 * step, 3 * step + 3)
        F.cross_entropy(model(X[cut]).flatten(0, 1), Y[cut].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for weight, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_penalty_beside_a_mean_counts_as_in_one_batch(world_size: int) -> None:
    """As people write it: on each micro-batch, whatever its targets."""

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group)
        sync = replicate(net(), comm=comm)
        first = sync.model[0].weight
        for number in share(3, rank, world_size):
            loss = F.cross_entropy(sync.forward(X[number]), Y[number]) + first.square().mean()
            sync.backward(loss, weight=(Y[number] != -100).sum())
        sync.step(torch.optim.SGD(sync.model.parameters(), lr=0.5))
        sync.close()
        return [p.detach().clone() for p in sync.model.parameters()]

    model = net()
    loss = F.cross_entropy(model(X[:3]).flatten(0, 1), Y[:3].flatten())
    (loss + model[0].weight.square().mean()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for weights in run_thread_ranks(work, world_size):
        for weight, parameter in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


class Checkpointed(nn.Module):
    """A net whose middle is computed again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = net(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x)
        return checkpoint(self.net[1:], hidden, use_reentrant=self.use_reentrant)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_leaf_of_nothing_counts_for_nothing(name: str, scaled: bool) -> None:
    """Any layers inside the model, in bf16 autocast; beside one that counts."""
    model = MODELS[name]()
    sync = replicate(model, comm=SingleCommunicator())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in model.parameters()))
    for counts in (False, True, False):
        y = Y[3] if counts else Y[2]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = masked_mean(sync.forward(X[3]), y)
        assert counts == bool(loss.isfinite())
        sync.backward(loss, weight=(y != -100).sum(), scale=scaler)
    result = sync.step(optimizer, scale=scaler)
    assert result.weight == B
    assert result.mean_loss.isfinite()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in seen)
    assert not any(map(torch.equal, before, model.parameters()))
    sync.close()


def test_without_a_step_it_says_why_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    sync = replicate(model, comm=SingleCommunicator())
    model(torch.ones(1, 2)).sum().backward()
    assert math.isnan(sync.mean_loss)
    assert math.isnan(sync.mean_loss)
    assert [r.getMessage()[:21] for r in caplog.records].count("sync.mean_loss is nan") == 1
    assert repr(sync) == "<GradientSync of Linear, strategy='invariant'>"
    sync.discard()
    sync.backward(model(torch.ones(1, 2)).sum(), weight=1)
    result = sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert re.match(r"StepResult\(mean_loss=tensor\(", repr(result))
    assert "Stopwatch" not in repr(result)
    sync.close()


def test_a_loss_of_one_element_is_a_loss() -> None:
    def gradient(shape: list[int]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(C, 1)
        sync = replicate(model)
        sync.backward(model(VALUES).mean().reshape(shape), weight=B)
        sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
        return model.weight.detach()

    assert torch.equal(gradient([1]), gradient([]))
