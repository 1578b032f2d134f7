"""FSDP2 behind a reducer: what is its own; test_sync_strategies.py holds it to its promise."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.runtime.gloo_group import wait_until_workers_sleep
from gradsync.sync.fsdp import FsdpReducer
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import FsdpOptions
from gradsync.sync.shares import whole
from support.rank_session import open_session
from support.sync_cases import SmallNet, leaf_of


class Blocks(nn.Module):
    """Two blocks in a list, the second with a weight of the first's size, uneven to cut."""

    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 6)
        if tie:
            self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = self.first(x_BC)
        for block in self.blocks:
            x_BC = x_BC + torch.tanh(block(x_BC))
        return self.last(x_BC)


def make(model_name: str) -> nn.Module:
    torch.manual_seed(3)
    if model_name == "net":
        return SmallNet(branch=False)
    model: Any = Blocks(tie=model_name == "tied blocks")
    if model_name == "shared module":
        shared = nn.Linear(7, 7)
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), shared) for _ in range(2))
        model.blocks.append(nn.Linear(7, 7))
    if model_name == "block twice":
        model.blocks[2] = model.blocks[0]
    return model


def leaf_loss(sync: GradientSync, step: int, index: int) -> tuple[Tensor, int]:
    inputs, targets = leaf_of(step, index)
    return ((sync.forward(inputs) - targets) ** 2).sum(), len(inputs)


def do_step(
    sync: GradientSync, optimizer: torch.optim.Optimizer, step: int, num_leaves: int = 6
) -> float:
    mine = share(num_leaves, sync.comm.rank, sync.comm.world_size)
    for index in mine:
        with sync.micro_step(last=index == mine[-1]):
            loss, weight = leaf_loss(sync, step, index)
            sync.backward(loss, weight=weight, reduction="sum")
        reduced = any(p.grad is not None for p in sync.model.parameters())
        assert reduced == (index == mine[-1])  # the others add up without communication
    sync.step(optimizer)
    return sync.mean_loss


def bind(model: nn.Module, world: Any, **options: Any) -> GradientSync:
    if world.world_size == 1:  # a session of one rank makes no group
        comm: Communicator = ProcessGroupCommunicator(dist.group.WORLD)
    else:
        comm = communicator(world)
    return GradientSync(model, comm, FsdpReducer(model, comm, FsdpOptions(**options)))


@contextmanager
def session(rank: int, world_size: int, store_path: str) -> Iterator[Any]:
    """A session; with a group of one rank, too, which a session of one does not make."""
    with open_session(rank, world_size, store_path) as world:
        if world_size > 1:
            yield world
            return

        store = dist.FileStore(store_path, 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield world
        wait_until_workers_sleep()
        dist.destroy_process_group()


def _train_model(
    rank: int, world_size: int, store_path: str, name: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float], bool]:
    with session(rank, world_size, store_path) as world:
        model = make(name)
        sync = bind(model, world, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        num_steps = 1 if "compute_dtype" in options else 3
        losses = [do_step(sync, optimizer, step) for step in range(num_steps)]
        masters = all(p.dtype == torch.float32 for p in model.parameters())
        with torch.no_grad():
            assert sync.forward(torch.ones(2, 6)).dtype == torch.float32
        weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        return weights, losses, masters


def train_by_hand(
    kind: str, compute_dtype: torch.dtype | None, world_size: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Written out: parameters cast for each leaf, gradients added up in fp32.

    A single step in a low dtype: a last bit may turn the next cast, and then much more differs.
    The uses of a tied weight add up in the low dtype; since torch 2.15 in fp32 in the first leaf
    of a rank that has more than one.
    """
    wide = {share(6, rank, world_size)[0] for rank in range(world_size)}
    can_be_wide = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
    num_steps = 3 if compute_dtype is None else 1
    compute_dtype = compute_dtype or torch.float32
    model, low = make(kind), make(kind).to(compute_dtype)
    for name, buffer in model.named_buffers():  # they are not cast
        low.register_buffer(name, buffer.clone())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.02, momentum=0.9)
    losses = []
    for step in range(num_steps):
        total = weight = 0.0
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for index in range(6):
            inputs, targets = leaf_of(step, index)
            with torch.no_grad():
                for mine, other in zip(model.parameters(), low.parameters(), strict=True):
                    other.copy_(mine)
            low.zero_grad()
            for other in low.parameters() if can_be_wide else ():
                other.grad_dtype = torch.float32 if index in wide else None
            loss = ((low(inputs.to(compute_dtype)).float() - targets) ** 2).sum()
            loss.backward()
            for mine, other in zip(model.parameters(), low.parameters(), strict=True):
                if mine.grad is not None and other.grad is not None:
                    mine.grad += other.grad.float()
            total, weight = total + float(loss.detach()), weight + len(inputs)
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad /= weight
        optimizer.step()
        losses.append(total / weight)
    return dict(model.state_dict()), losses


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("blocks", 1, {}),
        ("blocks", 2, {}),
        ("blocks", 3, {}),
        ("blocks", 2, {"blocks": False}),
        ("tied blocks", 3, {}),
        ("shared module", 2, {}),
        ("block twice", 3, {}),
        ("net", 2, {"compute_dtype": "bf16"}),
        ("blocks", 3, {"compute_dtype": "bf16"}),
        ("tied blocks", 1, {"compute_dtype": "bf16"}),
    ],
    ids=str,
)
def test_blocks_ties_and_compute_dtype(
    pool: Any, name: str, world_size: int, options: dict[str, Any]
) -> None:
    weights, losses = train_by_hand(
        name, torch.bfloat16 if "compute_dtype" in options else None, world_size
    )
    for got, got_losses, masters in pool.run(_train_model, world_size, name, options):
        assert masters
        assert list(got) == list(weights)
        torch.testing.assert_close(got, weights, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0.0)


def test_gradients_may_travel_in_bf16(pool: Any) -> None:
    """Then they are rounded: near the exact ones, but not equal to them."""
    weights, _ = train_by_hand("blocks", torch.bfloat16, 2)
    options = {"compute_dtype": "bf16", "reduce_dtype": "bf16"}
    for got, _, _ in pool.run(_train_model, 2, "blocks", options):
        torch.testing.assert_close(got, weights, rtol=0.0, atol=0.1)
        assert not torch.equal(got["first.weight"], weights["first.weight"])


def _save(rank: int, world_size: int, store_path: str) -> Any:
    with open_session(rank, world_size, store_path) as world:
        model = make("blocks")
        sync = bind(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        do_step(sync, optimizer, 0)
        do_step(sync, optimizer, 1)
        sync.replica.gather(optimizer)
        saved = copy.deepcopy(pack_optimizer(optimizer, model.named_parameters()))
        weights = sync.replica.full_weights()
        sync.replica.scatter(optimizer)
        elements = sum(
            value.to_local().numel()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, DTensor)
        )
        do_step(sync, optimizer, 2)
        return saved, weights, elements, sync.replica.full_weights()


def _load(rank: int, world_size: int, store_path: str, saved: Any, weights: Any) -> Any:
    with open_session(rank, world_size, store_path) as world:
        model = make("blocks")
        sync = bind(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with torch.no_grad():  # an evaluation keeps the root whole: it must not be used again
            sync.forward(torch.ones(2, 6))
        sync.replica.load_full_weights(weights)
        unpack_optimizer(optimizer, model.named_parameters(), *saved)
        sync.replica.scatter(optimizer)
        do_step(sync, optimizer, 2)
        return sync.replica.full_weights()


def test_state_and_weights_move_between_numbers_of_ranks(pool: Any) -> None:
    """Whole and back on 3 ranks, then on to 2 ranks, and to a plain optimizer."""
    results = pool.run(_save, 3)
    saved, weights, _, end = results[0]
    for other in results[1:]:
        for name, tensor in saved[0].items():
            assert torch.equal(other[0][0][name], tensor)
    plain = make("blocks")
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    assert sum(elements for _, _, elements, _ in results) == 2 * trained  # each exists once
    for got in pool.run(_load, 2, saved, weights):
        torch.testing.assert_close(got, end, rtol=1e-5, atol=1e-6)
    plain.load_state_dict(weights)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    unpack_optimizer(optimizer, plain.named_parameters(), *saved)
    assert optimizer.state[plain.first.weight]["exp_avg"].shape == (7, 6)


def _too_few(rank: int, world_size: int, store_path: str) -> tuple[str, float]:
    with open_session(rank, world_size, store_path) as world:
        model = make("blocks")
        sync = bind(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        try:
            do_step(sync, optimizer, 0, num_leaves=5)
        except ConfigError as error:
            return str(error)
    return ""


def test_unequal_numbers_of_leaves_are_refused_everywhere(pool: Any) -> None:
    """5 leaves on 3 ranks: without the roll call the two that have more would wait for ever."""
    counts = [len(share(5, rank, 3)) for rank in range(3)]
    fewer = [rank for rank in range(3) if counts[rank] < max(counts)]
    assert len(fewer) == 1
    for message in pool.run(_too_few, 3):
        assert "needs the same number of micro-batches" in message
        assert f"rank(s) {fewer[0]} had fewer" in message


def own_loop(
    model: nn.Module, sync: GradientSync | None, ranks: range, *, accumulate: bool
) -> None:
    """Two micro-batches a step, the loss a mean; `ranks` are played by this process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(3):
        for rank in ranks:
            for micro_step in range(2 if accumulate else 1):
                inputs, targets = leaf_of(step, 2 * rank + micro_step)
                waits = sync is not None and accumulate and micro_step == 0
                with sync.no_sync() if sync is not None and waits else nullcontext():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    (loss / len(ranks)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 4.0)  # in some steps
        optimizer.step()
        optimizer.step()  # once more with the same gradients
        optimizer.zero_grad()


def _own_loop(
    rank: int, world_size: int, store_path: str, options: dict[str, Any], handle: bool
) -> dict[str, Tensor]:
    with session(rank, world_size, store_path) as world:
        model = make("blocks")
        if handle:
            sync = bind(model, world, **options)
            own_loop(model, sync, range(rank, rank + 1), accumulate=True)
        else:  # nothing but torch from here on
            reducer = FsdpReducer(model, communicator(world), FsdpOptions(**options))
            own_loop(model, None, range(rank, rank + 1), accumulate=False)
            assert reducer.parameters[0] is next(model.parameters())
        return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("handle", [True, False])
def test_a_loop_of_ones_own_averages_over_ranks(pool: Any, handle: bool) -> None:
    model = make("blocks")
    own_loop(model, None, range(3), accumulate=handle)
    for got in pool.run(_own_loop, 3, {}, handle):
        torch.testing.assert_close(got, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    for got in pool.run(_own_loop, 3, {"compute_dtype": "bf16"}, handle):
        torch.testing.assert_close(got, dict(model.state_dict()), rtol=0.0, atol=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _misuse(rank: int, world_size: int, store_path: str) -> list[str]:
    messages = []

    def expect(work: Any) -> None:
        with pytest.raises(ConfigError) as error:
            work()
        messages.append(str(error.value))

    with open_session(rank, world_size, store_path) as world:
        model = make("blocks")
        early = sgd(model)
        sync = bind(model, world)
        loss, weight = leaf_loss(sync, 0, rank)
        expect(lambda: sync.backward(loss, weight=weight, reduction="sum"))
        expect(lambda: do_step(sync, early, 0))
        model = make("blocks")
        sync = bind(model, world)
        matrices = (p for p in model.parameters() if p.dim() == 2)
        expect(lambda: do_step(sync, torch.optim.Muon(matrices), 0))
        model = make("blocks")
        sync = bind(model, world)
        with sync.micro_step(last=False):
            loss, weight = leaf_loss(sync, 0, rank)
            sync.backward(loss, weight=weight, reduction="sum")
        expect(lambda: sync.step(sgd(model)))
    return messages


def test_misuse_is_named(pool: Any) -> None:
    for messages in pool.run(_misuse, 2):
        outside, early, muon, never_last = messages
        assert "sync.micro_step(last=micro_batch.is_last, index=micro_batch.index)" in outside
        assert "make it after gs.replicate" in early
        assert "torch.optim.Muon orthogonalises whole matrices" in muon
        assert "no micro-step of this step was `last=True`" in never_last
