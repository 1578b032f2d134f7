"""`sync.state_dict` and `sync.load_state_dict`: a run goes on elsewhere with the same bits."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError, GradsyncError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import bits, optimizers
from support.thread_ranks import run_thread_ranks

X = torch.linspace(-1, 1, 6 * 4 * 3).sin().view(6, 4, 3)
SAME_BITS = [name for name in STRATEGIES if STRATEGIES[name].same_on_any_ranks]


class Net(nn.Module):
    """A parameter in each of two optimizers, a buffer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))
        generator = torch.Generator().manual_seed(0)  # ranks are threads, the global one is shared
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def steps(sync: GradientSync, optimizer: Any, rank: int, world_size: int) -> None:
    for _ in range(2):
        for number in share(6, rank, world_size):
            last = number == share(6, rank, world_size)[-1]
            with sync.micro_step(last=last, index=number):
                sync.backward(sync.forward(X[number]).square().mean(), weight=4)
        sync.step(optimizer, clip_norm=1.0)


def trained(world_size: int, strategy: str, number: int, begin: Any = None, **more: Any) -> Any:
    """The state after two steps, from `begin` if given; equal on all ranks."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), strategy=strategy, **more)
        optimizer = optimizers(model, number)
        if begin is not None:
            sync.load_state_dict(begin, optimizer)
        steps(sync, optimizer, rank, world_size)
        state = sync.state_dict(optimizer)
        kept = io.BytesIO()
        torch.save(state, kept)
        steps(sync, optimizer, rank, world_size)  # does not change it
        sync.close()
        kept.seek(0)
        saved = torch.load(kept, weights_only=True)
        assert bits(state) == bits(saved)
        return saved

    first, *rest = run_thread_ranks(work, world_size)
    assert all(bits(first) == bits(other) for other in rest)
    return first


@pytest.mark.parametrize(("number", "collective"), [(1, "auto"), (2, "backend")])
@pytest.mark.parametrize("strategy", SAME_BITS)
def test_a_run_goes_on_with_the_same_bits(strategy: str, number: int, collective: str) -> None:
    """On 4 ranks, whose shards `zero1` does not keep in rank order, then 2, then under `invariant`,
    which keeps whole state."""
    more = {"collective": collective}
    whole = trained(1, strategy, number, trained(1, strategy, number))
    parts = trained(2, strategy, number, trained(4, strategy, number, **more), **more)
    assert bits(whole) == bits(parts)
    assert parts["model"].keys() == Net().state_dict().keys()
    if STRATEGIES[strategy].promise == "bitwise":
        other = trained(2, "invariant", number, trained(3, strategy, number, **more))
        assert all(bits(whole[part]) == bits(other[part]) for part in ("model", "optimizer"))


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco", "naive", "overlap"])
def test_what_a_strategy_keeps_comes_along(strategy: str) -> None:
    more = {"inner_steps": 2} if strategy in ("local_sgd", "diloco") else {}
    begin = trained(2, strategy, 1, **more)
    assert begin["strategy"]["name"] == strategy
    assert bool(begin["strategy"]["tensors"]) == (strategy == "diloco")
    whole = trained(2, strategy, 1, begin, **more)
    assert bits(whole["model"]) != bits(begin["model"])


def test_an_optimizers_state_may_have_another_dtype_than_its_weight() -> None:
    """Torch would cast it; where the weight has another dtype than the saved one, it has to."""
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = nn.Linear(3, 3, bias=False).to(dtype)
        sync = replicate(model, comm=SingleCommunicator())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kept != dtype:
            optimizer.state[model.weight]["momentum_buffer"] = torch.full((3, 3), 1 / 3)
            state = sync.state_dict(optimizer)
        sync.load_state_dict(state, optimizer)
        found = optimizer.state[model.weight]["momentum_buffer"]
        assert bits(found) == bits(torch.full((3, 3), 1 / 3).to(kept))


def test_weights_alone() -> None:
    model = Net()
    sync = replicate(model, comm=SingleCommunicator())
    state = sync.state_dict()
    assert state["optimizer"] is None
    assert state["model"]["first.weight"] is state["model"]["second.weight"]  # tied ones stay tied
    with torch.no_grad():
        model.first.weight.zero_()
    sync.load_state_dict(state)
    assert bits(model.state_dict()) == bits(Net().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"the state holds optimizers \[\], but \[.SGD.\] came with it"
    ):
        sync.load_state_dict(state, optimizer)
    with pytest.raises(ConfigError, match="this is no state of"):
        sync.load_state_dict({"model": model.state_dict()})
    sync.close()


def refused(
    change: Callable[[dict[str, Any], int], Any], strategy: str = "invariant", **named: Any
) -> list[str]:
    """What ranks say to a state after `change`, or to what it returns; nothing is loaded then."""

    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), strategy=strategy, **named)
        optimizer = optimizers(model, 1)
        steps(sync, optimizer, rank, 2)
        state = sync.state_dict(optimizer)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state["model"] = {name: tensor + 1 for name, tensor in state["model"].items()}
        other = change(state, rank)
        state = other if isinstance(other, dict | list) else state
        with pytest.raises(GradsyncError) as raised:
            sync.load_state_dict(state, optimizer)
        assert bits(before) == bits(model.state_dict())
        sync.close()
        return str(raised.value)

    return run_thread_ranks(work, 2)


def kinds(state: dict[str, Any], rank: int) -> None:
    state["kinds"] = ["SGD"]


WRONG: dict[str, tuple[Callable[[dict[str, Any], int], Any], str]] = {
    "missing": (lambda s, r: s["model"].pop("seen"), "has no weight 'seen'"),
    "unknown": (lambda s, r: s["model"].update(x=torch.ones(1)), "model has no weight 'x'"),
    "shape": (
        lambda s, r: s["model"].update(seen=torch.ones(1)),
        r"'seen' is \[1\] in the state, \[2\] here",
    ),
    "optimizer": (kinds, r"the state holds optimizers \[.SGD.\], but \[.AdamW.\]"),
    "on one rank": (lambda s, r: {} if r else None, r"on rank 1: this is no state"),
    "no dict": (lambda s, r: [1], "on rank 0: this is no state"),
    "other weights": (
        lambda s, r: s["model"]["second.bias"].add_(r),
        "other states on other ranks: .*'model.second.bias'",
    ),
    "other moments": (
        lambda s, r: s["optimizer"]["state"][1]["exp_avg"].add_(r),
        "other states on other ranks: .*'optimizer.0.state.1.exp_avg'",
    ),
    "other settings": (
        lambda s, r: s["optimizer"]["param_groups"][0].update(lr=0.1 + r),
        "optimizers with other settings on other ranks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_is_refused_on_all_ranks(name: str) -> None:
    change, said = WRONG[name]
    first, second = refused(change)
    assert first == second
    assert re.search(said, first), first


@pytest.mark.parametrize("strategy", ["diloco", "local_sgd", "zero1"])
def test_other_states_are_noticed_where_ranks_would_drift(strategy: str) -> None:
    change, said = WRONG["other weights"]
    assert all(re.search(said, found) for found in refused(change, strategy))


def test_a_state_in_mid_step_is_refused() -> None:
    model = Net()
    sync = replicate(model, comm=SingleCommunicator())
    optimizer = optimizers(model, 1)
    state = sync.state_dict(optimizer)
    sync.backward(sync.forward(X[0]).square().mean(), weight=4)
    for call in (sync.state_dict, lambda: sync.load_state_dict(state)):
        with pytest.raises(ConfigError, match="between backward and step"):
            call()
    sync.discard()
    sync.load_state_dict(state, optimizer)
    sync.close()


def test_what_another_strategy_kept_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    begin = trained(2, "diloco", 1, inner_steps=2)
    caplog.clear()
    trained(2, "invariant", 1, begin)
    (said,) = {r.getMessage() for r in caplog.records if "saved under" in r.getMessage()}
    assert "strategy='diloco'" in said
    assert "left out under 'invariant'" in said
