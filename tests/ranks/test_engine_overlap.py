"""When buckets are launched, in which order, and where gradients lie meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.base import Communicator, Work
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import Done, ProcessGroupCommunicator
from gradsync.errors import GradsyncError
from gradsync.sync.buckets import Bucket
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.reducer import Engine
from gradsync.sync.replicate import replicate
from gradsync.sync.step_metadata import NUM_BINS
from support.recording import RecordingCommunicator
from support.thread_ranks import run_thread_ranks

ENGINE_STRATEGIES = ("flat", "overlap", "bucketed", "invariant", "ring", "bf16", "fp16")
TINY_MB = 1e-9
"""Every parameter fills a bucket of its own, but the order is still learned."""


def engine_of(sync: GradientSync) -> Engine:
    assert isinstance(sync.reducer, Engine)
    return sync.reducer


def order_of(engine: Engine) -> list[int]:
    """Parameters in the order in which their buckets travel."""
    return [slot.index for bucket in engine.buckets for slot in bucket.plan.slots]


def record_launches(engine: Engine, events: list[Any]) -> None:
    """Note the parameters of every bucket when it is launched."""
    transport: Any = engine.exchange

    def recorded(original: Callable[..., Work]) -> Callable[..., Work]:
        def launch(bucket: Bucket, *, half: bool) -> Work:
            events.append([slot.index for slot in bucket.plan.slots])
            return original(bucket, half=half)

        return launch

    transport.launch = recorded(transport.launch)


class Chain(nn.Module):
    """Three layers, called in the order 1, 2, 0; notes when backward comes past them."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.events = events

    def forward(self, x_BC: Tensor, order: tuple[int, ...] = (1, 2, 0)) -> Tensor:
        for index in order:
            x_BC = self.layers[index](x_BC)
            if x_BC.requires_grad:
                x_BC.register_hook(lambda _, i=index: self.events.append(f"backward of {i}"))
        return x_BC


def _leaf(sync: GradientSync, *, last: bool, **named: Any) -> None:
    with sync.micro_step(last=last):
        loss = sync.forward(torch.ones(2, 4), **named).square().sum()
        sync.backward(loss, weight=2, reduction="sum")


def _chain(comm: Communicator, sync: str, **options: Any) -> tuple[GradientSync, list[Any]]:
    events: list[Any] = []
    model = Chain(events)
    options = {"collective": "backend"} | options  # shared memory has nothing to overlap
    handle = replicate(model, strategy=sync, comm=comm, **options)
    record_launches(engine_of(handle), events)
    return handle, events


@pytest.mark.parametrize("sync", ["bucketed", "invariant", "overlap"])
def test_buckets_travel_while_backward_runs(sync: str) -> None:
    """From the second step on, when the order is known, each goes as soon as it is full."""
    options = {} if sync == "overlap" else {"bucket_mb": TINY_MB}
    handle, events = _chain(SingleCommunicator(), sync, **options)
    optimizer = torch.optim.SGD(handle.model.parameters(), lr=0.0)
    for _ in range(2):
        events.clear()
        _leaf(handle, last=True)
        events.append("end of backward")
        handle.step(optimizer)
    # backward comes past 0, 2, 1
    expected = ["backward of 0", [0], "backward of 2", [2], "backward of 1", [1], "end of backward"]
    if sync == "overlap":  # no order is learned: 2 and 1 were expected first
        expected = ["backward of 0", "backward of 2", [2], "backward of 1", [1], [0]]
        expected += ["end of backward"]
    assert events == expected


@pytest.mark.parametrize(
    ("options", "last"), [({"overlap": False}, True), ({}, False)], ids=["off", "not said"]
)
def test_without_overlap_after_backward(options: dict[str, Any], last: bool) -> None:
    handle, events = _chain(SingleCommunicator(), "bucketed", bucket_mb=TINY_MB, **options)
    optimizer = torch.optim.SGD(handle.model.parameters(), lr=0.0)
    _leaf(handle, last=False)
    _leaf(handle, last=last)
    assert not [event for event in events if isinstance(event, list)]
    handle.step(optimizer)
    assert [event for event in events if isinstance(event, list)] == [[2], [1], [0]]


@pytest.mark.parametrize("sync", ["bucketed", "invariant"])
def test_a_leaf_after_the_last_is_refused(sync: str) -> None:
    """Its gradients would come too late for buckets that have left: silently wrong sums."""
    handle, _ = _chain(SingleCommunicator(), sync, bucket_mb=TINY_MB)
    _leaf(handle, last=True)
    with pytest.raises(GradsyncError, match="last"):
        _leaf(handle, last=True)


@pytest.mark.parametrize("sync", ["bucketed", "invariant"])
def test_all_ranks_launch_in_one_order(sync: str) -> None:
    """Each rank's backward goes another way; messages would cross if launches did."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[Any], Tensor]:
        handle, events = _chain(ProcessGroupCommunicator(group), sync, bucket_mb=TINY_MB)
        optimizer = torch.optim.SGD(handle.model.parameters(), lr=0.1)
        way = ((1, 2, 0), (0, 1, 2), (2, 0, 1))[rank]
        for _ in range(3):
            _leaf(handle, last=True, order=way)
            handle.step(optimizer)
        launched = [event for event in events if isinstance(event, list)]
        weights = torch.cat([p.detach().flatten() for p in handle.model.parameters()])
        handle.close()
        return launched, weights

    results = run_thread_ranks(work, 3)
    assert results[0][0] == [[2], [1], [0], *[[0], [2], [1]] * 2], "learned from rank 0"
    for launched, weights in results:
        assert launched == results[0][0]
        assert torch.equal(weights, results[0][1])


@pytest.mark.parametrize("sync", ["bucketed", "invariant"])
def test_a_rank_0_without_a_leaf_learns_later(sync: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[list[int]]:
        handle, _ = _chain(ProcessGroupCommunicator(group), sync, bucket_mb=TINY_MB)
        optimizer = torch.optim.SGD(handle.model.parameters(), lr=0.1)
        orders = []
        for step in range(3):
            if rank or step:
                _leaf(handle, last=step > 0)
            handle.step(optimizer)
            orders.append(order_of(engine_of(handle)))
        handle.close()
        return orders

    assert run_thread_ranks(work, 2) == [[[2, 1, 0], [0, 2, 1], [0, 2, 1]]] * 2


def _prime(handle: GradientSync) -> None:
    handle.prime(lambda: handle.forward(torch.ones(1, 4)).sum().backward())


def test_prime_learns_without_leaving_anything() -> None:
    """A resumed run takes the order at once, and its first step is the same as without."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[int], list[int], list[float]]:
        orders, losses = [], []
        for primed in (True, False):
            torch.manual_seed(0)
            handle, _ = _chain(ProcessGroupCommunicator(group), "invariant", bucket_mb=TINY_MB)
            with torch.no_grad():
                for parameter in handle.model.parameters():
                    parameter.copy_(torch.eye(4) / 2)
            if primed:
                _prime(handle)
                assert all(p.grad is None for p in handle.model.parameters())
            orders.append(order_of(engine_of(handle)))
            optimizer = torch.optim.SGD(handle.model.parameters(), lr=0.1)
            for _ in range(2):
                _leaf(handle, last=True)
                handle.step(optimizer)
                losses.append(handle.mean_loss)
            handle.close()
        return *orders, losses

    for primed, unprimed, losses in run_thread_ranks(work, 2):
        assert primed == [0, 2, 1]
        assert unprimed == [2, 1, 0]
        assert losses[:2] == losses[2:]


def _gradients_in_step(handle: GradientSync) -> list[Tensor]:
    """`.grad` as the optimizer sees it; steps with it."""
    optimizer = torch.optim.SGD(handle.model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad for p in handle.model.parameters())
    )
    handle.step(optimizer)
    return seen


@pytest.mark.parametrize("sync", ENGINE_STRATEGIES)
def test_gradients_are_views_of_flat_buckets(sync: str) -> None:
    """The optimizer works where the reduction has put them: no copy back."""

    def work(_: int, group: dist.ProcessGroup) -> None:
        handle, _ = _chain(ProcessGroupCommunicator(group), sync)
        buckets = list(engine_of(handle).buckets)
        _leaf(handle, last=True)
        flats = {bucket.flat(0).untyped_storage().data_ptr() for bucket in buckets}
        found = _gradients_in_step(handle)
        assert {gradient.untyped_storage().data_ptr() for gradient in found} == flats
        handle.close()

    run_thread_ranks(work, 2)


@pytest.mark.parametrize("num_leaves", [1, 2, 4, 8])
def test_memory_of_the_tree(num_leaves: int) -> None:
    """Told leaf by leaf, one rank with 2^k leaves needs max(k, 1) buffers; untold, one for each."""
    for told in (True, False):
        model = nn.Linear(4, 4)
        handle = replicate(model, strategy="invariant", grouping="flat")
        for index in range(num_leaves):
            with handle.micro_step(last=False, index=index if told else None):
                handle.backward(model(torch.ones(1, 4)).sum(), weight=1, reduction="sum")
        (bucket,) = engine_of(handle).buckets
        assert len(bucket._flats) == (max(num_leaves.bit_length() - 1, 1) if told else num_leaves)


@pytest.mark.parametrize(
    ("sync", "halves"),
    [("bucketed", 2), ("invariant", 2), ("zero1", 2), ("ring", 2), ("bf16", 1), ("fp16", 1)],
)
def test_bytes_are_what_the_registry_says(sync: str, halves: int) -> None:
    """2(W-1)/W S for full width, half of that in 16 bits, in the second step."""
    world_size, numel = 4, 4096

    def work(_: int, group: dist.ProcessGroup) -> float:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        model = nn.Linear(64, 64, bias=False)
        handle = replicate(model, strategy=sync, comm=comm, collective="backend")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sent = []
        for _ in range(3):
            before = comm.sent_bytes + comm.ring_bytes()
            with handle.micro_step(last=True):
                handle.backward(model(torch.ones(1, 64)).sum(), weight=1, reduction="sum")
            handle.step(optimizer)
            handle.replica.wait()
            sent.append(comm.sent_bytes + comm.ring_bytes() - before)
        handle.close()
        return sent[-1]

    share = (world_size - 1) / world_size
    for sent in run_thread_ranks(work, world_size):
        formula = halves * share * 4 * numel
        # Five flags and the share of micro-batches that came; five marks of five numbers; loss and
        # weight; the used parameter; then perhaps the ranks' numbers of micro-batches.
        small = 2 * share * 8 * (6 + 5 * 5 + 2 * NUM_BINS + 1)
        assert formula + small <= sent <= formula + small + 2 * share * 8 * world_size


def test_a_rank_waits_for_what_it_launched() -> None:
    """`step` must not read a bucket before its `Work` is done."""

    class Late(SingleCommunicator):
        def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Work:
            return _Doubles(tensor) if tensor.dtype == torch.float32 else Done()

    handle, _ = _chain(Late(), "bucketed", bucket_mb=TINY_MB)
    alone, _ = _chain(SingleCommunicator(), "bucketed")
    alone.model.load_state_dict(handle.model.state_dict())
    _leaf(handle, last=True)
    _leaf(alone, last=True)
    for twice, once in zip(_gradients_in_step(handle), _gradients_in_step(alone), strict=True):
        assert torch.equal(twice, 2 * once)


class _Doubles:
    """A sum over two equal ranks that happens when it is waited for, once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def wait(self) -> None:
        assert self.tensor is not None, "waited for twice"
        self.tensor.mul_(2)
        self.tensor = None
