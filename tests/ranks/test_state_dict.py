"""`sync.state_dict` and `sync.load_state_dict`: a run goes on elsewhere with the same bits."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
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


def optimizers(model: Net, number: int) -> Any:
    own = list(model.parameters())
    if number == 1:
        return torch.optim.AdamW(own, lr=0.1)
    return [torch.optim.AdamW(own[:1], lr=0.1), torch.optim.SGD(own[1:], lr=0.1, momentum=0.9)]


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
        assert same(state, saved)
        return saved

    first, *rest = run_thread_ranks(work, world_size)
    assert all(same(first, other) for other in rest)
    return first


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("collective", ["auto", "backend"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("strategy", SAME_BITS)
def test_a_run_goes_on_with_the_same_bits(strategy: str, number: int, collective: str) -> None:
    """On 3 ranks, then 2, then under `invariant`, which keeps whole state."""
    more = {"collective": collective}
    whole = trained(1, strategy, number, trained(1, strategy, number))
    parts = trained(2, strategy, number, trained(3, strategy, number, **more), **more)
    assert same(whole, parts)
    assert parts["model"].keys() == Net().state_dict().keys()
    if STRATEGIES[strategy].promise == "bitwise":
        assert same(whole, trained(2, "invariant", number, trained(3, strategy, number, **more)))


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco", "naive", "overlap"])
def test_what_a_strategy_keeps_comes_along(strategy: str) -> None:
    more = {"inner_steps": 2} if strategy in ("local_sgd", "diloco") else {}
    begin = trained(2, strategy, 1, **more)
    assert bool(begin["strategy"]) == (strategy == "diloco")
    whole = trained(2, strategy, 1, begin, **more)
    assert not same(whole["model"], begin["model"])


def test_weights_alone() -> None:
    model = Net()
    sync = replicate(model, comm=SingleCommunicator())
    state = sync.state_dict()
    assert state["optimizer"] is None
    assert state["model"]["first.weight"] is state["model"]["second.weight"]  # tied ones stay tied
    with torch.no_grad():
        model.first.weight.zero_()
    sync.load_state_dict(state)
    assert same(dict(model.state_dict()), dict(Net().state_dict()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"holds 0 optimizers, load_state_dict\(\) was given 1"):
        sync.load_state_dict(state, optimizer)
    with pytest.raises(ConfigError, match="it has no 'optimizer'"):
        sync.load_state_dict({"model": model.state_dict()})
    sync.close()
