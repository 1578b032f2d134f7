"""The course's names and `NaiveDDPTrainer` on real groups, against one process with all samples."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync import compat
from gradsync.compat import course
from gradsync.compat.course import NaiveDDPTrainer, shard_batch
from gradsync.errors import ConfigError, DataError, RunError
from support.rank_session import open_session

STEPS = 4


def test_the_courses_module_has_what_the_course_imports_from_it() -> None:
    assert course.setup_distributed is compat.setup_distributed


def _train_by_hooks(rank: int, world_size: int, store_path: str, kind: str) -> dict[str, Tensor]:
    session = open_session(rank, world_size, store_path) if world_size > 1 else None
    with session or contextlib.nullcontext():
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 6))
        module[3].weight.requires_grad_(False)
        wrapped: Any
        if kind == "plain":
            wrapped = module
        elif kind == "individual":
            wrapped = course.get_ddp_individual_parameters(module)
        else:
            wrapped = course.get_ddp_bucketed(module, 0.0001)
        make = course.get_sharded_optimizer if kind == "sharded" else _plain
        optimizer = make(wrapped.parameters(), torch.optim.AdamW, lr=0.05)
        for step in range(STEPS):
            x_BC = torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
            mine = x_BC.chunk(world_size)[rank]
            optimizer.zero_grad()
            F.mse_loss(wrapped(mine), mine.sin()).backward()
            if wrapped is not module:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _plain(params: Any, optimizer_cls: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return optimizer_cls(params, **kwargs)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["individual", "bucketed", "sharded"])
def test_the_courses_loop_equals_one_process(pool: Any, kind: str, world_size: int) -> None:
    oracle = _train_by_hooks(0, 1, "", "plain")
    _check_weights(oracle, pool.run(_train_by_hooks, world_size, kind), rtol=1e-4)


def _check_weights(oracle: dict[str, Tensor], results: list[Any], *, rtol: float) -> None:
    """Equal bits on all ranks, and the oracle's numbers."""
    for result in results:
        for name, tensor in oracle.items():
            assert torch.equal(result[name], results[0][name]), name
            torch.testing.assert_close(result[name], tensor, rtol=rtol, atol=1e-6)


class Classifier(nn.Module):
    """Tied weights, a frozen layer, and an unused branch."""

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
        _check_weights(oracle["weights"], [each["weights"] for each in results], rtol=1e-5)
        for result in results:
            for info, expected in zip(result["infos"], oracle["infos"], strict=True):
                assert info["loss"] == pytest.approx(expected["loss"], rel=1e-6), kind
                assert info["num_comm_ops"] == NUM_GRADIENTS
                assert min(info["comm_time"], info["total_time"]) > 0
                assert info["comm_time"] + info["compute_time"] < info["total_time"]
                assert info["comm_fraction"] == info["comm_time"] / info["total_time"]


@pytest.mark.parametrize(
    ("kind", "loss_fn"),
    [("classes", F.cross_entropy), ("padding", F.cross_entropy), ("values", F.mse_loss)],
)
def test_one_process_is_plain_torch(kind: str, loss_fn: Any) -> None:
    """The oracle's own oracle: torch's mean loss, backward and step, no gradsync."""
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
    _check_weights(model.state_dict(), [result["weights"]], rtol=1e-5)


def _linear(**given: int) -> NaiveDDPTrainer:
    model = nn.Linear(2, 2)
    return NaiveDDPTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def _fails(rank: int, world_size: int, store_path: str) -> tuple[str, str]:
    """Messages of the errors: for a wrong rank, and on the rank whose peer has left."""
    with open_session(rank, world_size, store_path):
        with pytest.raises(ConfigError) as caught:
            _linear(rank=1 - rank, world_size=world_size)
        trainer = _linear(rank=rank, world_size=world_size)
        if rank == 1:
            return str(caught.value), "left"
        try:
            trainer.train_step(torch.ones(2, 2), torch.ones(2, 2))
        except RuntimeError as error:
            return str(caught.value), str(error)
    return str(caught.value), ""


def test_wrong_numbers_and_a_rank_that_leaves_are_noticed(pool: Any) -> None:
    (told, heard), (_, left) = pool.run(_fails, 2)
    assert "was told rank 1 of 2, but the process group says rank 0 of 2" in told
    assert left == "left"
    assert heard not in ("", "left")
    with pytest.raises(RunError, match="no process group"):
        _linear(rank=0, world_size=2)


def test_language_model_shapes_and_wrong_ones() -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = NaiveDDPTrainer(model, optimizer)
    x_BTC, targets_BT = torch.randn(2, 3, 4), torch.randint(5, (2, 3))
    with torch.no_grad():
        expected = F.cross_entropy(model(x_BTC).flatten(0, 1), targets_BT.flatten())
    info = trainer.train_step(x_BTC, targets_BT)
    assert info["loss"] == pytest.approx(float(expected))
    for targets, words in (
        (targets_BT.float(), r"outputs have shape \(2, 3, 5\), targets \(2, 3\)"),  # not broadcast
        (torch.zeros(3, 3), r"different lengths: \[2, 3\]"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.train_step(x_BTC, targets)
