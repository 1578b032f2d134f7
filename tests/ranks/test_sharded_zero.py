"""`zero1` and `zero2` on ranks as threads: the engine's numbers, a part of the state each."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.build import build_engine
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import Recipe
from gradsync.sync.ownership.zero import ZeroShards
from gradsync.sync.reducer import Engine
from gradsync.sync.replicate import replicate
from support.engine_cases import global_random_state, pretend_hosts
from support.recording import RecordingCommunicator
from support.sync_cases import (
    CASES,
    MORE_CASES,
    Case,
    Layers,
    SmallNet,
    assert_equal_to_one_rank,
    leaf_of,
    one_rank,
    train_case,
)
from support.thread_ranks import run_thread_ranks

ZERO1 = Recipe(order="invariant", shard="optimizer", bucket_mb=0.0002)
ZERO2 = Recipe(shard="gradients", bucket_mb=0.0002)


def make(comm: Communicator, recipe: Recipe) -> tuple[GradientSync, Any]:
    with global_random_state:
        torch.manual_seed(1000)
        model = SmallNet(branch=False)
    sync = GradientSync(model, comm, build_engine(model, comm, recipe))
    return sync, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def do_step(sync: GradientSync, optimizer: Any, step: int, *, leaves: int = 5) -> None:
    mine = share(leaves, sync.comm.rank, sync.comm.world_size)
    for index in mine:
        inputs, targets = leaf_of(step, index)
        with sync.micro_step(last=index == mine[-1], index=index):
            loss = ((sync.forward(inputs) - targets) ** 2).sum()
            sync.backward(loss, weight=len(inputs), reduction="sum")
    sync.step(optimizer)


@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=lambda case: case.name)
def test_zero2_equals_one_rank(case: Case) -> None:
    results = run_thread_ranks(
        lambda _, group: train_case(
            case,
            "bucketed",
            ProcessGroupCommunicator(group),
            shard="gradients",
            bucket_mb=ZERO2.bucket_mb,
        ),
        3,
    )
    assert_equal_to_one_rank(results, one_rank(case))


@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=lambda case: case.name)
def test_zero1_on_the_tree_has_one_ranks_bits(case: Case) -> None:
    oracle = train_case(case, "invariant", SingleCommunicator())
    assert_equal_to_one_rank([oracle], one_rank(case))
    for world_size, late in ((2, True), (3, False), (4, True), (4, False)):
        results = run_thread_ranks(
            lambda _, group, late=late: train_case(
                case,
                "invariant",
                ProcessGroupCommunicator(group),
                shard="optimizer",
                bucket_mb=ZERO1.bucket_mb,
                overlap_publish=late,
            ),
            world_size,
        )
        for result in results:
            for name, tensor in oracle["weights"].items():
                assert torch.equal(result["weights"][name], tensor), name
            assert result["losses"] == oracle["losses"]
            assert result["norms"] == oracle["norms"]


def sent_in_a_step(
    sync: str, hosts: int, local: int, *, late: bool, clip: float | None
) -> list[tuple[int, int, float]]:
    """For each rank the bytes of messages to ranks of its host and of others, and of collectives,
    in the second step of 3 x 12,288 bytes of gradients in three buckets."""

    def work(rank: int, group: Any) -> tuple[int, int, float]:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        model = Layers(*(torch.nn.Linear(64, 48, bias=False) for _ in range(3)))
        for layer in model:
            layer.forward = lambda x, weight=layer.weight: (x @ weight.T).repeat(1, 2)[:, :64]
        handle = replicate(
            *(model,),
            **{"strategy": sync, "comm": comm, "collective": "backend", "overlap_publish": late},
            **{"grouping": "parameter", "hosts": pretend_hosts(comm, local)},
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            handle.replica.wait()
            before, rings = comm.sent_to.copy(), comm.ring_bytes()
            with handle.micro_step(last=True, index=rank):
                handle.backward(
                    model(torch.ones(1, 64) + rank + step).sum(), weight=1, reduction="sum"
                )
            handle.step(optimizer, clip_norm=clip)
        handle.replica.wait()
        sent, rings = comm.sent_to - before, comm.ring_bytes() - rings
        handle.close()
        inside = sum(size for peer, size in sent.items() if peer // local == rank // local)
        return inside, sent.total() - inside, round(rings, 6)

    return run_thread_ranks(work, hosts * local)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("hosts", "local"), [(2, 1), (3, 1), (4, 1), (1, 4), (2, 2), (3, 2), (1, 3), (4, 2)]
)
def test_zero1_sends_what_one_all_reduce_sends(hosts: int, local: int, late: bool) -> None:
    """Sums go to their owners alone, and weights back: 2(W-1)/W S, of which 2(H-1)/H S/L between
    hosts; and the norm costs what it costs `invariant`."""
    ranks, size = hosts * local, 3 * 4 * 64 * 48
    leaves = 16  # bytes by which a rank tells another one how many it has
    for inside, between, rings in sent_in_a_step("zero1", hosts, local, late=late, clip=None):
        assert inside == 2 * size * (local - 1) // local + leaves * (local - 1)
        assert between == 2 * size * (hosts - 1) // (hosts * local) + leaves * (ranks - local)
        assert rings < size / 8
    found = [sent_in_a_step(n, hosts, local, late=True, clip=0.5) for n in ("zero1", "invariant")]
    assert found[0] == found[1]


def test_owners_stay_when_shares_of_leaves_change() -> None:
    """Four ranks are siblings in the tree in some steps, and not in others."""

    def train(comm: Communicator, recipe: Recipe) -> dict[str, Tensor]:
        sync, optimizer = make(comm, recipe)
        for step, leaves in enumerate((4, 5, 8, 3)):
            do_step(sync, optimizer, step, leaves=leaves)
        sync.close()
        return sync.replica.full_weights()

    expected = train(SingleCommunicator(), Recipe(order="invariant"))
    for got in run_thread_ranks(lambda _, g: train(ProcessGroupCommunicator(g), ZERO1), 4):
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("recipe", [ZERO1, ZERO2], ids=["zero1", "zero2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_dict_without_the_state_is_refused(recipe: Recipe, world_size: int) -> None:
    def train(_: int, group: Any) -> None:
        sync, optimizer = make(ProcessGroupCommunicator(group), recipe)
        optimizer.state_dict()  # nothing to leave out yet
        do_step(sync, optimizer, 0)
        with pytest.raises(ConfigError, match=r"would hold none of it: sync\.state_dict\(opt"):
            optimizer.state_dict()
        sync.replica.gather(optimizer)
        assert optimizer.state_dict()["state"]
        sync.replica.scatter(optimizer)
        sync.close()

    run_thread_ranks(train, world_size)


@pytest.mark.parametrize("recipe", [ZERO1, ZERO2], ids=["zero1", "zero2"])
def test_a_group_that_is_added_on_the_way_is_trained(recipe: Recipe) -> None:
    def train(comm: Communicator, recipe: Recipe) -> dict[str, Tensor]:
        sync, _ = make(comm, recipe)
        first, *rest = sync.model.parameters()
        optimizer = torch.optim.AdamW([first], lr=0.05)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": rest, "lr": 0.1})
            do_step(sync, optimizer, step)
        sync.replica.gather(optimizer)
        assert [float(s["step"]) for s in optimizer.state.values()] == [4.0, 2.0, 2.0]
        sync.close()
        return sync.replica.full_weights()

    expected = train(SingleCommunicator(), Recipe(order="invariant"))
    for got in run_thread_ranks(lambda _, g: train(ProcessGroupCommunicator(g), recipe), 2):
        for name, tensor in expected.items():
            assert recipe is ZERO2 or torch.equal(got[name], tensor), name
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)


def test_whole_gradients_do_not_outlive_backward_in_zero2() -> None:
    """Between steps a rank keeps neither buckets nor whole gradients."""

    def work(comm: Communicator) -> tuple[int, int]:
        sync, optimizer = make(comm, ZERO2)
        kept = []
        reducer = sync.reducer
        assert isinstance(reducer, Engine)
        assert isinstance(reducer.shards, ZeroShards)
        update = reducer.shards.update

        def watched(optimizer: Any) -> None:
            assert all(p.grad is None for p in reducer.parameters)
            assert not any(bucket._flats for bucket in reducer.buckets)
            kept.append(sum(shard.numel() for shard in reducer.shards.owned()))
            update(optimizer)

        with mock.patch.object(reducer.shards, "update", watched):
            do_step(sync, optimizer, 0)
        total = sum(bucket.plan.numel for bucket in reducer.buckets)
        sync.close()
        return kept[0], total

    for kept, total in run_thread_ranks(lambda _, g: work(ProcessGroupCommunicator(g)), 3):
        assert kept * 3 == total


_WAYS = {
    "zero1": {"strategy": "zero1", "collective": "backend"},
    "zero2": {"strategy": "zero2"},
    "whole": {"collective": "backend"},
    "whole in shared memory": {"collective": "shared_memory"},
}


@pytest.mark.parametrize("way", _WAYS)
def test_a_hook_sees_whole_new_weights_and_may_raise(way: str) -> None:
    """One that is called after a step is called once every rank's weights are there."""

    def work(_: int, group: Any) -> list[list[Tensor]]:
        with global_random_state:
            torch.manual_seed(1000)
            model = SmallNet(branch=False)
        sync = replicate(model, comm=ProcessGroupCommunicator(group), **_WAYS[way])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen: list[Tensor] = []
        raises = sync.comm.rank == 0

        def look(*_: Any) -> None:
            nonlocal raises
            seen[:] = weights()
            if raises:
                raises = False
                raise KeyError("a hook")

        def weights() -> list[Tensor]:
            return [p.detach().clone() for p in model.parameters()]

        optimizer.register_step_post_hook(look)
        with pytest.raises(KeyError, match="a hook") if raises else nullcontext():
            do_step(sync, optimizer, 0)
        found = [list(seen), weights()]
        do_step(sync, optimizer, 1)
        found.append(weights())
        sync.close()
        return found

    first, second = run_thread_ranks(work, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, first[0], first[1]))
    assert not all(map(torch.equal, first[1], first[2]))


@pytest.mark.parametrize("way", ["zero1", "zero2"])
@pytest.mark.parametrize("how", ["hook", "hook on all", "wrapped step"])
def test_what_would_look_at_whole_gradients_is_refused(way: str, how: str) -> None:
    """In shards there are none: it would be called without, after the update."""
    model = SmallNet(branch=False)
    sync = replicate(model, comm=SingleCommunicator(), **_WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    removable = None
    if how == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    elif how == "hook on all":
        removable = register_optimizer_step_pre_hook(lambda *_: None)
    else:
        optimizer.step = lambda *_: None
    before = [p.detach().clone() for p in model.parameters()]
    try:
        with pytest.raises(ConfigError, match=rf"strategy='{way}' updates shards"):
            do_step(sync, optimizer, 0)
    finally:
        if removable is not None:
            removable.remove()
        sync.close()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("way", ["zero1", "zero2", "whole"])
@pytest.mark.parametrize("how", ["loaded", "a new dict", "gathered and left"])
def test_state_that_is_loaded_between_steps_counts(way: str, how: str) -> None:
    def work(_: int, group: Any) -> list[Tensor]:
        with global_random_state:
            torch.manual_seed(1000)
            model = SmallNet(branch=False)
        sync = replicate(model, comm=ProcessGroupCommunicator(group), **_WAYS[way])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(3):
            do_step(sync, optimizer, step)
            if step == 0 or (step == 2 and how == "gathered and left"):
                sync.replica.gather(optimizer)
                saved = copy.deepcopy(optimizer.state_dict())
                if how != "gathered and left":
                    sync.replica.scatter(optimizer)
        if how == "loaded":
            optimizer.load_state_dict(saved)
        elif how == "a new dict":
            optimizer.state = defaultdict(dict)
        do_step(sync, optimizer, 3)
        found = [p.detach().clone() for p in model.parameters()]
        # A copy left there would be saved later, stale.
        assert way == "whole" or not any(optimizer.state.values())
        sync.replica.gather(optimizer)
        found += [state["step"] for state in optimizer.state_dict()["state"].values()]
        sync.close()
        return found

    results = run_thread_ranks(work, 2)
    (expected,) = run_thread_ranks(work, 1)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert {int(step) for step in expected[-2:]} == {{"loaded": 2, "a new dict": 1}.get(how, 4)}
