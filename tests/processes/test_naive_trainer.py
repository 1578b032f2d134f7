"""`NaiveDDPTrainer` on real process groups, against one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync.compat.course import NaiveDDPTrainer, shard_batch
from gradsync.errors import ConfigError, DataError, RunError
from support.rank_session import open_session

STEPS = 4


class Classifier(nn.Module):
    """Tied weights, a frozen layer, and a branch that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return self.second(torch.tanh(self.first(x))) + self.frozen(x) * scale


NUM_GRADIENTS = 3  # first.weight, first.bias, second.bias


def _batch(step: int, size: int, kind: str) -> Any:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, generator=generator)
    labels = torch.randint(6, (size,), generator=generator)
    if kind in ("padding", "mean"):
        labels[1::2] = -100
    if kind == "dict":
        return {"x": x, "scale": torch.rand(size, 1, generator=generator)}, labels
    return ((x,) if kind == "tuple" else x), (x.sin() if kind == "values" else labels)


KINDS = ("classes", "padding", "values", "dict", "tuple", "mean", "each")
LOSSES: dict[str, Any] = {
    "mean": F.cross_entropy,
    "each": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
}


def _train(rank: int, world_size: int, size: int, kind: str) -> dict[str, Any]:
    torch.manual_seed(5 + rank)  # rank 0's weights must win
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = NaiveDDPTrainer(model, optimizer, rank, world_size)
    infos = []
    for step in range(STEPS):
        inputs, targets = shard_batch(_batch(step, size, kind), rank, world_size)
        infos.append(trainer.train_step(inputs, targets, LOSSES.get(kind)))
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"infos": infos, "weights": weights}


def _train_all(rank: int, world_size: int, store_path: str, size: int) -> list[dict[str, Any]]:
    with open_session(rank, world_size, store_path):
        return [_train(rank, world_size, size, kind) for kind in KINDS]


@pytest.mark.parametrize(("size", "world_size"), [(7, 2), (7, 3), (2, 3)])
def test_equals_one_process_with_the_whole_batch(pool: Any, size: int, world_size: int) -> None:
    """Seven samples are not divisible; two leave one of three ranks without any."""
    by_rank = pool.run(_train_all, world_size, size)
    for kind, *results in zip(KINDS, *by_rank, strict=True):
        oracle = _train(0, 1, size, kind)
        for result in results:
            for name, tensor in oracle["weights"].items():
                assert torch.equal(result["weights"][name], results[0]["weights"][name]), kind
                torch.testing.assert_close(
                    result["weights"][name], tensor, rtol=1e-5, atol=1e-6, msg=f"{kind} {name}"
                )
            for got, expected in zip(result["infos"], oracle["infos"], strict=True):
                assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6), kind
                assert got["num_comm_ops"] == NUM_GRADIENTS


def test_one_process_is_plain_torch() -> None:
    """The oracle's own oracle: torch's mean loss, backward and step, no gradsync."""
    losses_by_kind = {"classes": F.cross_entropy, "padding": F.cross_entropy, "values": F.mse_loss}
    for kind, loss_fn in losses_by_kind.items():
        torch.manual_seed(5)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for step in range(STEPS):
            inputs, targets = _batch(step, 7, kind)
            loss = loss_fn(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        result = _train(0, 1, 7, kind)
        assert [info["loss"] for info in result["infos"]] == pytest.approx(losses, rel=1e-6)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=1e-6)


def test_times_add_up(pool: Any) -> None:
    for result, *_ in pool.run(_train_all, 2, 6):
        for info in result["infos"]:
            assert info["comm_time"] > 0
            assert info["compute_time"] > 0
            assert info["comm_time"] + info["compute_time"] < info["total_time"]
            assert info["comm_fraction"] == info["comm_time"] / info["total_time"]


def _one_rank_fails(rank: int, world_size: int, store_path: str) -> str:
    with open_session(rank, world_size, store_path):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = NaiveDDPTrainer(model, optimizer, rank, world_size)
        if rank == 1:
            return "left"
        try:
            trainer.train_step(torch.ones(2, 2), torch.ones(2, 2))
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_leaves_is_noticed(pool: Any) -> None:
    first, second = pool.run(_one_rank_fails, 2)
    assert second == "left"
    assert first not in ("", "left")


def _told_wrong(rank: int, world_size: int, store_path: str) -> str:
    with open_session(rank, world_size, store_path):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError) as caught:
            NaiveDDPTrainer(model, optimizer, 1 - rank, world_size)
        return str(caught.value)


def test_rank_and_size_are_the_groups(pool: Any) -> None:
    first, _ = pool.run(_told_wrong, 2)
    assert "was told rank 1 of 2, but the process group says rank 0 of 2" in first
    model = nn.Linear(2, 2)
    with pytest.raises(RunError, match="no process group"):
        NaiveDDPTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 2)


def test_language_model_shapes_and_wrong_ones() -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = NaiveDDPTrainer(model, optimizer)
    x_BTC, targets_BT = torch.randn(2, 3, 4), torch.randint(5, (2, 3))
    with torch.no_grad():
        expected = F.cross_entropy(model(x_BTC).flatten(0, 1), targets_BT.flatten())
    info = trainer.train_step(x_BTC, targets_BT)
    assert info["loss"] == pytest.approx(float(expected))
    with pytest.raises(DataError, match=r"outputs have shape \(2, 3, 5\), targets \(2, 3\)"):
        trainer.train_step(x_BTC, targets_BT.float())  # would be broadcast, and wrong
    with pytest.raises(DataError, match=r"different lengths: \[2, 3\]"):
        trainer.train_step(x_BTC, torch.zeros(3, 3))
    with pytest.raises(DataError, match="targets are a dict: give train_step a loss_fn"):
        trainer.train_step(x_BTC, {"labels": targets_BT})
