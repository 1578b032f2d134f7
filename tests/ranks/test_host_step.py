"""The step divided among the ranks of a host: same bits as whole, and nothing to be noticed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import share_memory
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.ownership import host_step
from gradsync.sync.ownership.host_step import SharedMemoryExchange, SharedMemoryShards
from gradsync.sync.replicate import replicate
from support.engine_cases import bits
from support.thread_ranks import run_thread_ranks

BLOCK = 65_536
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Net(nn.Module):
    """A parameter of more than one block, small ones, a number, one that only some leaves use, and
    one in fp64 that none uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(2, BLOCK - 100, generator=generator))
        self.small = nn.ParameterList(
            nn.Parameter(torch.randn(7 + i, generator=generator)) for i in range(5)
        )
        self.rare = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, number: int) -> Tensor:
        total = (self.large * (1 + number)).sin().sum()
        for i, small in enumerate(self.small):
            total = total + (small * (i + number)).cos().sum()
        return total * self.scale + (self.rare.square().sum() if number % 2 else 0.0)


def one_step(sync: GradientSync, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    sync.backward(sync.model(2 * step + rank), weight=1 + rank, reduction="sum")
    sync.step(optimizer, clip_norm=1.0)


def run(
    make: Callable[[Any], torch.optim.Optimizer],
    between: Callable[[GradientSync, torch.optim.Optimizer], Any] = lambda *_: None,
    steps: int = 3,
    **options: Any,
) -> list[dict[str, Any]]:
    """Weights and whole optimizer state of each of two ranks, as copies."""

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), **options)
        optimizer = make(model.parameters())
        for step in range(steps):
            one_step(sync, optimizer, step, rank)
            if step == 1:
                between(sync, optimizer)
        found = copy.deepcopy({"w": model.state_dict(), "o": optimizer.state_dict()["state"]})
        sync.close()
        return found

    return run_thread_ranks(work, 2)


def assert_equal(left: Any, right: Any) -> None:
    """To the bit, all the way down."""
    assert bits(left) == bits(right)


def was_divided(sync: GradientSync) -> bool:
    assert isinstance(sync.reducer.shards, SharedMemoryShards)
    return bool(sync.reducer.shards._updates)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_and_state_of_the_whole_optimizer(name: str) -> None:
    """`optimizer.state` is whole on every rank, without any gathering."""
    divided: list[bool] = []
    make = OPTIMIZERS[name]
    expected, _ = run(make, update="whole")
    for found in run(make, lambda sync, _: divided.append(was_divided(sync))):
        assert_equal(found, expected)
    assert divided == [True, True]
    for found in run(make, weights="shared"):
        assert_equal(found, expected)


def test_no_rank_goes_on_before_all_have_written_their_shares() -> None:
    """The next forward reads all of them. Rank 1 updates once rank 0 has gone on, which must not
    happen: then it gives up waiting."""
    late, step, gone_on = threading.local(), torch.optim.SGD.step, threading.Event()

    def step_late(optimizer: torch.optim.SGD, closure: None = None) -> None:
        if late.rank:
            gone_on.wait(0.2)
        step(optimizer, closure)

    def work(rank: int, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        late.rank = rank
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one_step(sync, optimizer, 0, rank)
        seen = copy.deepcopy(model.state_dict())
        gone_on.set()
        assert was_divided(sync)
        sync.comm.barrier()
        return seen, copy.deepcopy(model.state_dict())

    with mock.patch.object(torch.optim.SGD, "step", step_late):
        for seen, settled in run_thread_ranks(work, 2):
            assert_equal(seen, settled)


def load(_: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] *= 0.5
        entry["step"] += 7
    optimizer.load_state_dict(state)


def load_and_say(sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    load(sync, optimizer)
    sync.replica.scatter(optimizer)


def clear(_: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def replace_values(sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    """Of one parameter one value, of another one all."""
    optimizer.state[sync.model.large]["exp_avg"] = torch.ones_like(sync.model.large)
    optimizer.state[sync.model.scale] = copy.deepcopy(optimizer.state[sync.model.scale])
    optimizer.state[sync.model.scale]["step"] += 7


def add_own_entries(sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[sync.model.large] |= {"mine": torch.ones(3), "note": 7}


def replace_data(sync: GradientSync, _: torch.optim.Optimizer) -> None:
    sync.model.large.data = torch.full_like(sync.model.large, 0.5)
    sync.model.small[2].data = sync.model.small[2].data * 2


def move_to_files(sync: GradientSync, _: torch.optim.Optimizer) -> None:
    sync.model.share_memory()  # torch's own: it swaps the storage under the parameter


def begin_momentum(sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    """And a learning rate of its own for a group that comes late."""
    optimizer.param_groups[0] |= {"lr": 0.5, "momentum": 0.9}
    optimizer.add_param_group({"params": [sync.model.rare], "lr": 0.1})


def swap_groups(_: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def without_rare(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.numel() != 3], lr=0.01)


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    _, rare, scale, *_ = parameters
    return torch.optim.SGD([{"params": [rare], "lr": 0.5}, {"params": [scale]}], lr=0.01)


@pytest.mark.parametrize(
    ("make", "between"),
    [
        *(
            (OPTIMIZERS["adamw"], between)
            for between in (load, load_and_say, clear, replace_values, add_own_entries)
        ),
        *((OPTIMIZERS["adamw"], between) for between in (replace_data, move_to_files)),
        (without_rare, begin_momentum),
        (in_groups, swap_groups),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_is_changed_between_steps_counts(
    make: Callable[[Any], torch.optim.Optimizer], between: Callable[..., None]
) -> None:
    expected, _ = run(make, between, steps=5, update="whole")
    for found in run(make, between, steps=5):
        assert_equal(found, expected)


def test_state_that_is_changed_in_place_is_refused() -> None:
    """Every rank would halve the one copy."""

    def halve(_: GradientSync, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].mul_(0.5)

    run(OPTIMIZERS["adamw"], halve, steps=4, update="whole")
    with pytest.raises(ConfigError, match=r"state was changed in place .* update='whole'"):
        run(OPTIMIZERS["adamw"], halve, steps=4)


def test_hooks_on_the_optimizer_see_the_whole_gradient() -> None:
    """One that comes on the way too; from then on steps are whole, and state goes on."""
    seen: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(optimizer.param_groups[0]["params"][0].grad.clone())

    def add_hook(_: GradientSync, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(look)

    expected, _ = run(OPTIMIZERS["adamw"], steps=4, update="whole")
    for found in run(OPTIMIZERS["adamw"], add_hook, steps=4):
        assert_equal(found, expected)
    assert len(seen) == 4
    assert all(gradient.shape == (2, BLOCK - 100) for gradient in seen)


def test_hooks_on_one_rank_alone_make_all_steps_whole() -> None:
    """While they are there: a rank that writes a log, say."""
    hooks: list[Any] = []

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        divided = []
        for step in range(6):
            if rank == 1 and step == 2:
                hooks.append(optimizer.register_step_pre_hook(lambda *_: None))
            if rank == 1 and step == 4:
                hooks.pop().remove()
            one_step(sync, optimizer, step, rank)
            divided.append(was_divided(sync))
        found = copy.deepcopy({"w": model.state_dict(), "o": optimizer.state_dict()["state"]})
        sync.close()
        return found, divided

    expected, _ = run(OPTIMIZERS["adamw"], steps=6, update="whole")
    for found, divided in run_thread_ranks(work, 2):
        assert divided == [True, True, False, False, True, True]
        assert_equal(found, expected)


def test_a_loop_of_ones_own_may_follow() -> None:
    """It runs whole optimizers on every rank: then state must be every rank's own."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), strategy="bucketed")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one_step(sync, optimizer, 0, rank)
        assert was_divided(sync)
        for step in range(2):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = copy.deepcopy({"w": model.state_dict(), "o": optimizer.state_dict()["state"]})
        sync.close()
        return found

    first, second = run_thread_ranks(work, 2)
    assert_equal(first, second)
    steps = {index: float(entry["step"]) for index, entry in first["o"].items()}
    assert steps == dict.fromkeys([0, 2, *range(4, 9)], 3) | {1: 2}  # `rare`: in odd steps


def test_after_close_ranks_are_on_their_own() -> None:
    """Weights and state are no longer shared: what one rank does, the other does not see."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), weights="shared")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one_step(sync, optimizer, 0, rank)
        sync.close()
        before = model.small[0].detach().clone()
        with torch.no_grad():
            model.small[0].add_(rank + 1.0)
            optimizer.state[model.small[0]]["exp_avg"].fill_(rank)
        ProcessGroupCommunicator(group).barrier()
        assert torch.equal(model.small[0].detach(), before + (rank + 1.0))
        return float(optimizer.state[model.small[0]]["exp_avg"].mean())

    assert run_thread_ranks(work, 2) == [0.0, 1.0]


def test_one_copy_of_the_weights_may_not_be_changed_by_others() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), weights="shared")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one_step(sync, optimizer, 0, rank)
        with torch.no_grad():
            model.small[0].mul_(0.9)
        with pytest.raises(ConfigError, match=r"share one copy .* weights='replicas'"):
            one_step(sync, optimizer, 1, rank)
        sync.close()

    run_thread_ranks(work, 2)


def test_one_copy_refuses_what_would_need_replicas() -> None:
    def work(_: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        model = Net()
        sync = replicate(model, comm=comm, weights="shared")
        with pytest.raises(ConfigError, match=r"sync\.backward and sync\.step only"):
            sync.finish()
        hooked = OPTIMIZERS["sgd"](model.parameters())
        hooked.register_step_pre_hook(lambda *_: None)
        sync.backward(model(0), weight=1, reduction="sum")
        with pytest.raises(ConfigError, match="weights='shared': hooks on the optimizer"):
            sync.step(hooked)
        sync.close()

    run_thread_ranks(work, 2)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_weights_that_cannot_move_are_updated_whole(ranks: tuple[int, ...]) -> None:
    """Something looks at a parameter's memory, perhaps on one rank: it must go on doing so."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = Net()
        view = model.rare.detach()[:2] if rank in ranks else None
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for step in range(2):
            one_step(sync, optimizer, step, rank)
        assert not was_divided(sync)
        assert view is None or torch.equal(view, model.rare.detach()[:2])
        assert model.rare[0] != 1.0
        sync.close()

    run_thread_ranks(work, 2, timeout_s=20.0)


def test_a_weight_whose_broadcast_ends_late_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Gloo may refer to a weight for a moment after the broadcast is over."""
    by_rank = threading.local()

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = Net()
        by_rank.held = [model.rare.detach()] if rank == 1 else []
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one_step(sync, optimizer, 0, rank)
        assert was_divided(sync)
        sync.close()

    monkeypatch.setattr(host_step, "wait_until_workers_sleep", lambda: by_rank.held.clear())  # noqa: PLW0108 (each thread has its own)
    run_thread_ranks(work, 2, timeout_s=20.0)


@pytest.mark.parametrize("sync", ["bucketed", "zero1"])
def test_too_little_memory_for_buckets_leaves_messages(sync: str) -> None:
    """Nothing is left of the first attempt, whose hooks were on the parameters already."""

    def full(*_: Any) -> Tensor:
        raise SharedMemoryError("no shared memory: full")

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        comm = share_memory(ProcessGroupCommunicator(group))
        comm.allocate = full
        model = Net()
        sync_ = replicate(model, comm=comm, strategy=sync)
        assert not isinstance(sync_.reducer.shards, SharedMemoryShards)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one_step(sync_, optimizer, 0, rank)
        found = copy.deepcopy(model.state_dict())
        sync_.close()
        return found

    def expected(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync_ = replicate(model, comm=ProcessGroupCommunicator(group), strategy=sync)
        one_step(sync_, OPTIMIZERS["adamw"](model.parameters()), 0, rank)
        return copy.deepcopy(model.state_dict())

    whole, _ = run_thread_ranks(expected, 2)
    for found in run_thread_ranks(work, 2):
        assert_equal(found, whole)


def test_after_a_refusal_the_model_can_be_replicated() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        tied = Net()
        tied.register_buffer("view", tied.rare.detach()[:2])
        with pytest.raises(ConfigError, match="share their memory with no other tensor"):
            replicate(tied, comm=comm, weights="shared")
        sync = replicate(tied, comm=comm)
        one_step(sync, OPTIMIZERS["sgd"](tied.parameters()), 0, rank)
        sync.close()

    run_thread_ranks(work, 2)


def test_zero1_adds_in_shared_memory() -> None:
    """Nothing is sent, and a leaf more than buffers foresaw finds its place."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), strategy="zero1")
        assert isinstance(sync.reducer.exchange, SharedMemoryExchange)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for leaves in (1, 3 - rank, 2 + rank):
            for leaf in range(leaves):
                sync.backward(model(leaf + rank), weight=1, reduction="sum")
            sync.step(optimizer, clip_norm=1.0)
        found = copy.deepcopy(model.state_dict())
        sync.close()
        return found

    first, second = run_thread_ranks(work, 2)
    assert_equal(first, second)


def test_weights_exchanged_for_others_stay_somebodys() -> None:
    """As some moving averages do for an evaluation, and never undo."""
    held: list[Tensor] = []

    def exchange(sync: GradientSync, _: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in sync.model.parameters():
                average = parameter.detach() * 0.5
                parameter.data, average = average, parameter.data
                held.extend((average, average.clone()))

    expected, _ = run(OPTIMIZERS["adamw"], exchange, steps=4, update="whole")
    held.clear()
    for found in run(OPTIMIZERS["adamw"], exchange, steps=4):
        assert_equal(found, expected)
    assert all(torch.equal(now, then) for now, then in zip(held[::2], held[1::2], strict=True))


def test_16_bits_round_alike() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        found = []
        for options in ({"update": "whole"}, {}):
            model = nn.Linear(40, 40, dtype=torch.bfloat16)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.copy_(
                        torch.arange(parameter.numel()).view_as(parameter) % (7 + number)
                    )
            sync = replicate(model, comm=ProcessGroupCommunicator(group), **options)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            for step in range(3):
                inputs = torch.arange(120.0).view(3, 40).bfloat16() * (step + rank + 1) / 64
                sync.backward(model(inputs).float().square().sum(), weight=3, reduction="sum")
                sync.step(optimizer, clip_norm=1.0)
            found.append(copy.deepcopy(model.state_dict()))
            assert was_divided(sync) == (not options)
            sync.close()
        return found

    with mock.patch("torch.get_num_threads", return_value=1):  # else steps are whole
        results = run_thread_ranks(work, 2)
    for whole, divided in results:
        assert_equal(divided, whole)


def test_state_given_to_another_optimizer_is_a_copy() -> None:
    """`load_state_dict` takes tensors as they are; whole steps would then update them once per
    rank."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        first, second = (OPTIMIZERS["adamw"](model.parameters()) for _ in range(2))
        one_step(sync, first, 0, rank)
        second.load_state_dict(first.state_dict())
        second.register_step_post_hook(lambda *_: None)
        for step in range(1, 3):
            one_step(sync, second, step, rank)
        found = copy.deepcopy({"w": model.state_dict(), "o": second.state_dict()["state"]})
        sync.close()
        return found

    expected, _ = run(OPTIMIZERS["adamw"], update="whole")
    for found in run_thread_ranks(work, 2):
        assert_equal(found, expected)


def test_a_step_that_fails_is_over() -> None:
    """Its gradients, losses and weights do not come back in the next one."""

    def work(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = OPTIMIZERS["sgd"](model.parameters())

        def skip(*_: Any) -> None:
            raise KeyError("skip this one")

        handle = optimizer.register_step_pre_hook(skip)
        with pytest.raises(KeyError, match="skip"):
            one_step(sync, optimizer, 0, rank)
        assert all(parameter.grad is None for parameter in model.parameters())
        handle.remove()
        with pytest.raises(ConfigError, match="without a backward"):
            sync.step(optimizer)
        model(rank).backward()
        before = model.large.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model.large)
        optimizer.zero_grad()
        sync.backward(model(rank), weight=1, reduction="sum")
        result = sync.step(optimizer)
        sync.close()
        return [result.weight]

    assert run_thread_ranks(work, 2) == [[2.0], [2.0]]


def test_a_graph_from_before_the_step_is_stale() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        stale = model(1)
        one_step(sync, optimizer, 0, rank)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(stale, model.scale)
        sync.close()

    run_thread_ranks(work, 2)


def test_one_copy_of_the_weights_takes_in_loaded_ones() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group), weights="shared")
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one_step(sync, optimizer, 0, rank)
        saved = {name: tensor * 0.5 for name, tensor in sync.replica.full_weights().items()}
        sync.replica.load_full_weights(saved)
        one_step(sync, optimizer, 1, rank)
        sync.close()

    run_thread_ranks(work, 2)
